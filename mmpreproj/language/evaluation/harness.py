"""Scores by EleutherAI's lm-evaluation-harness (lm-eval): its own tasks, or a local file through its own scorer."""

from __future__ import annotations

import copy
import functools
import importlib
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from mmpreproj.language.evaluation.scoring import evaluation_mode
from mmpreproj.language.evaluation.tasks import DELIMITER, Task, TaskScore, spread

OURS = {"acc": "accuracy", "acc_norm": "normalised_accuracy", "perplexity": "nll"}
FEWSHOT_SEED = 1234  # lm-eval's
LIKELIHOODS = ("loglikelihood", "multiple_choice")


@contextmanager
def _random_states_kept() -> Iterator[None]:
    """Put the random states back that lm-eval and its tasks draw from and seed."""
    of_python, of_numpy, of_torch = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        torch.set_rng_state(of_torch)


@_random_states_kept()
def score_with_lm_eval(
    model: nn.Module, tokenizer: Any, tasks: Sequence[str], *, limit: int | None = None, batch_size: int
) -> list[TaskScore]:
    """Score a model on tasks of lm-eval, with its own prompts and data.

    Metrics keep lm-eval's names, except those that `TaskScore` names. Kept are the metrics that lm-eval averages over
    the items, and the perplexity of a last word. Random states, the model's mode and the tokenizer stay as they are.

    Args:
        model: causal language model of transformers, patched or not.
        tokenizer: its tokenizer.
        tasks: names of tasks, groups or tags, such as "lambada_openai", or paths of lm-eval's YAML files.
        limit: score this many items of a task only, evenly spaced as in `score_task`.
        batch_size: sequences of one forward pass.

    Returns:
        One score a task, those of a group one by one.

    Raises:
        ImportError: if lm-eval is not installed.
        RuntimeError: if the data of a task cannot be had.
        ValueError: if there is no such task, or it has no metric with one value an item.
    """
    return _evaluate(model, tokenizer, _own_tasks(tasks), limit, batch_size)


@_random_states_kept()
def score_file_with_lm_eval(
    model: nn.Module, tokenizer: Any, task: Task, *, limit: int | None = None, batch_size: int
) -> TaskScore:
    """Score a model on a local file with lm-eval, as `score_task` does without it.

    Args:
        model: causal language model of transformers, patched or not.
        tokenizer: its tokenizer.
        task: from `read_task`.
        limit: score this many items only, the same ones as in `score_task`.
        batch_size: sequences of one forward pass.

    Raises:
        ImportError: if lm-eval is not installed.
    """
    configured = _lm_eval("api.task").ConfigurableTask(config=_config(task))
    return _evaluate(model, tokenizer, [configured], limit, batch_size)[0]


def _lm_eval(module: str) -> Any:
    try:
        return importlib.import_module(f"lm_eval.{module}")
    except ImportError as error:
        raise ImportError(
            f"lm-eval's scorer needs the package {error.name!r}; run: pip install 'mmpreproj[lm]'"
        ) from error


@functools.lru_cache(maxsize=1)
def _index(manager: Any) -> Any:
    """Read lm-eval's thousands of task files, which takes seconds, once a process."""
    return manager()


def _own_tasks(names: Sequence[str]) -> list[Any]:
    """Load tasks one name at a time, so that an error can name the one that failed."""
    manager = _index(_lm_eval("tasks").TaskManager)
    tasks: dict[str, Any] = {}
    for name in names:
        try:
            tasks |= manager.load([name])["tasks"]
        except KeyError as error:
            raise ValueError(f"lm-eval has no task {name!r}; `lm-eval ls tasks` lists its tasks") from error
        except (OSError, ImportError, RuntimeError, ValueError) as error:
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise RuntimeError(
                f"the data of lm-eval's task {name!r} cannot be had: {first}. Run once with a connection to fill the "
                "cache of `datasets`, or write the task as a local .jsonl file, which mmpreproj scores without lm-eval"
            ) from error
    return list(tasks.values())


def _config(task: Task) -> dict[str, Any]:
    """Describe a local file to lm-eval, field by field: names of fields, so that no template touches the text."""
    from datasets import Dataset

    rows = [
        {
            "context": item.context,
            "choices": list(item.choices),
            "gold": item.gold,
            "word": DELIMITER + item.choices[0],
        }
        for item in task.items
    ]
    config: dict[str, Any] = {
        "task": task.name,
        "custom_dataset": lambda **_: {"test": Dataset.from_list(rows)},
        "test_split": "test",
        "doc_to_text": "context",
        "target_delimiter": DELIMITER,
    }
    if task.kind == "last_word":
        perplexity = {"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False}
        return config | {
            "output_type": "loglikelihood",
            "doc_to_target": "word",
            "metric_list": [perplexity, _mean_of("acc")],
        }
    return config | {
        "output_type": "multiple_choice",
        "doc_to_target": "gold",
        "doc_to_choice": "choices",
        "metric_list": [_mean_of("acc"), _mean_of("acc_norm")],
    }


def _mean_of(metric: str) -> dict[str, Any]:
    return {"metric": metric, "aggregation": "mean", "higher_is_better": True}


def _evaluate(
    model: nn.Module, tokenizer: Any, tasks: Sequence[Any], limit: int | None, batch_size: int
) -> list[TaskScore]:
    chosen = {task.task_name: spread(len(task.eval_docs), limit) for task in tasks}
    for task in tasks:
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=FEWSHOT_SEED)
    with evaluation_mode(model):
        wrapped = _lm_eval("models.huggingface").HFLM(
            pretrained=model,
            backend="causal",
            tokenizer=copy.deepcopy(tokenizer),  # lm-eval gives it a padding token
            batch_size=batch_size,
            softmax_dtype="float32",
        )
        # What `simple_evaluate` runs, without its seeding and its survey of the machine, which takes pip and seconds.
        results = _lm_eval("evaluator").evaluate(
            wrapped,
            task_dict={task.task_name: task for task in tasks},
            samples=None if limit is None else chosen,
            bootstrap_iters=0,
            log_samples=True,
        )
    return [_score(task, results["samples"][task.task_name]) for task in tasks]


def _score(task: Any, samples: Sequence[dict[str, Any]]) -> TaskScore:
    samples = [sample for sample in samples if sample["filter"] == samples[0]["filter"]]
    samples.sort(key=lambda sample: sample["doc_id"])
    values = {}
    for metric in _averaged(task):
        if metric in samples[0]:
            column = np.array([sample[metric] for sample in samples], dtype=np.float64)  # [N]
            values[OURS.get(metric, metric)] = -column if metric == "perplexity" else column
    if not values:
        raise ValueError(f"lm-eval's task {task.task_name!r} has no metric with one value an item; leave it out")
    return TaskScore(
        task=task.task_name,
        items=np.array([sample["doc_id"] for sample in samples]),
        values=values,
        log_likelihoods=[_likelihoods(task, sample) for sample in samples],
    )


def _averaged(task: Any) -> list[str]:
    """Name the metrics that are means of one number an item, or exp of minus such a mean (the perplexity)."""
    metrics = _lm_eval("api.metrics")
    return [
        name
        for name, how in task.aggregation().items()
        if how is metrics.mean or (name == "perplexity" and how is metrics.perplexity)
    ]


def _likelihoods(task: Any, sample: dict[str, Any]) -> np.ndarray | None:
    if task.OUTPUT_TYPE not in LIKELIHOODS:
        return None
    return np.array([likelihood for likelihood, _ in sample["filtered_resps"]])
