"""What a model scores on a study's test text and tasks, item by item, in a file."""

from __future__ import annotations

import json
import math
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from mmpreproj.files import write_atomically
from mmpreproj.language.config import EvaluationConfig
from mmpreproj.language.evaluation.harness import score_with_lm_eval
from mmpreproj.language.evaluation.scoring import TextScore, score_text
from mmpreproj.language.evaluation.tasks import Task, TaskScore, score_task
from mmpreproj.language.texts.packing import PackedText
from mmpreproj.language.trials import check_settings
from mmpreproj.training.config import ConfigError

SCORES = "scores.npz"
UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, EOFError, zipfile.BadZipFile, zlib.error)
SETTINGS, NLL, COUNTS, TASK = "settings", "text.nll", "text.counts", "task"


@dataclass(frozen=True)
class Scores:
    """What one trained arm scores.

    Attributes:
        text: of each window of the test text.
        tasks: by task and metric, one value an item `[N]`, float64.
    """

    text: TextScore
    tasks: Mapping[str, Mapping[str, np.ndarray]]


def score_model(
    model: nn.Module,
    tokenizer: Any,
    text: PackedText,
    tasks: Sequence[Task],
    config: EvaluationConfig,
    *,
    on_progress: Callable[[str, int, int], None],
) -> Scores:
    """Score a model on test text and tasks.

    Args:
        model: causal language model, patched or not.
        tokenizer: its tokenizer.
        text: of which the test part is scored.
        tasks: from local files.
        config: lengths, limits, and tasks of lm-eval.
        on_progress: is told what is scored, how much of it is done, and how much there is.
    """

    def progress(name: str) -> Callable[[int, int], None]:
        return lambda done, total: on_progress(name, done, total)

    scored = score_text(
        model,
        text.test[: config.test_tokens],
        length=config.length,
        stride=config.stride,
        batch_size=config.batch_size,
        beginning=text.beginning,
        on_progress=progress("test text"),
    )
    found: list[TaskScore] = [
        score_task(
            model,
            tokenizer,
            task,
            limit=config.limit,
            batch_size=config.batch_size,
            on_progress=progress(task.name),
        )
        for task in tasks
    ]
    if config.lm_eval:
        found += score_with_lm_eval(model, tokenizer, config.lm_eval, limit=config.limit, batch_size=config.batch_size)
    return Scores(scored, {score.task: dict(score.values) for score in found})


def validation_perplexity(
    model: nn.Module,
    text: PackedText,
    config: EvaluationConfig,
    *,
    on_progress: Callable[[int, int], None] | None = None,
) -> float:
    """Measure the perplexity of the text by which learning rates are chosen; infinite where it is too large."""
    scored = score_text(
        model,
        text.validation[: config.validation_tokens],
        length=config.length,
        stride=config.stride,
        batch_size=config.batch_size,
        beginning=text.beginning,
        on_progress=on_progress,
    )
    try:
        return scored.perplexity
    except OverflowError:  # of a training that has gone wrong
        return math.inf


def write_scores(scores: Scores, folder: Path, settings: Mapping[str, Any]) -> None:
    """Write scores in one move."""
    told = np.array(json.dumps(settings))
    arrays: dict[str, Any] = {NLL: scores.text.nll, COUNTS: scores.text.counts, SETTINGS: told}
    for task, by_metric in scores.tasks.items():
        arrays |= {f"{TASK}/{task}/{metric}": values for metric, values in by_metric.items()}

    def write(path: str) -> None:
        with open(path, "wb") as file:
            np.savez_compressed(file, **arrays)

    write_atomically(folder / SCORES, write)


def read_scores(folder: Path, settings: Mapping[str, Any]) -> Scores | None:
    """Read scores; None where there are none.

    Raises:
        ConfigError: if they cannot be read, or were made with other settings; those that differ are named.
    """
    path = folder / SCORES
    if not path.is_file():
        return None
    tasks: dict[str, dict[str, np.ndarray]] = {}
    try:
        with np.load(path) as arrays:
            found = json.loads(str(arrays[SETTINGS]))
            text = TextScore(nll=arrays[NLL], counts=arrays[COUNTS])
            for name in arrays.files:
                kind, _, rest = name.partition("/")
                if kind == TASK:
                    task, metric = rest.rsplit("/", 1)
                    tasks.setdefault(task, {})[metric] = arrays[name]
    except UNREADABLE as error:
        raise ConfigError(
            f"{path} is damaged ({type(error).__name__}: {error}); remove it, and the arm is scored again"
        ) from error
    check_settings(found, settings, path, way_out="remove that file, and the arm is scored again")
    return Scores(text, tasks)
