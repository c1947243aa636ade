"""Tasks in local files: predict the last word, or choose the likeliest of several answers."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np
from torch import nn

from mmpreproj.language.config import TaskKind
from mmpreproj.language.evaluation.scoring import (
    Continuation,
    ContinuationScore,
    Progress,
    longest_input,
    score_continuations,
)

KINDS: tuple[str, ...] = get_args(TaskKind)
FIELDS: dict[str, tuple[str, ...]] = {
    "last_word": ("context", "continuation"),
    "multiple_choice": ("query", "choices", "gold"),
}
PROMPT_SUFFIX = {"last_word": "", "multiple_choice": "\nAnswer:"}
DELIMITER = " "  # between the prompt and what is scored


@dataclass(frozen=True)
class TaskItem:
    """One question.

    Attributes:
        line: of the file, counted from 1.
        context: the whole prompt.
        choices: texts to score, without the space before them; the word alone for "last_word".
        gold: which choice is right, counted from 0.
    """

    line: int
    context: str
    choices: tuple[str, ...]
    gold: int


@dataclass(frozen=True)
class Task:
    """Questions of one kind.

    Attributes:
        name: by which results are told apart.
        kind: "last_word" or "multiple_choice".
        path: the file.
        items: its questions, in the order of the file.
    """

    name: str
    kind: TaskKind
    path: Path
    items: tuple[TaskItem, ...]

    def subset(self, limit: int | None) -> list[int]:
        """Choose `limit` items, see `spread`."""
        return spread(len(self.items), limit)


@dataclass(frozen=True)
class TaskScore:
    """Scores of a task, item by item, to compare two models on the same items.

    Attributes:
        task: its name.
        items: which items of the task were scored `[N]`, counted from 0.
        values: by metric, one value an item `[N]`, float64. "accuracy" is 1 or 0: for a last word, whether each of
            its tokens is the greedy one; for a choice, whether the right one is the likeliest.
            "normalised_accuracy" is the same with each log-likelihood divided by the number of characters (not
            bytes) of its choice, without the space before it: acc_norm of lm-eval 0.4.13. "nll" is the negative
            log-likelihood of the last word, nats.
        log_likelihoods: of each item's choices, nats; None for an item whose answer is not scored so.
    """

    task: str
    items: np.ndarray
    values: Mapping[str, np.ndarray]
    log_likelihoods: Sequence[np.ndarray | None]

    @property
    def metrics(self) -> dict[str, float]:
        """Means over the items; "perplexity" of the word, exp of the mean "nll", in the place of that mean."""
        means = {name: float(values.mean()) for name, values in self.values.items()}
        return {"perplexity" if k == "nll" else k: math.exp(v) if k == "nll" else v for k, v in means.items()}


def read_task(
    path: str | Path, *, kind: TaskKind | None = None, name: str | None = None, prompt_suffix: str | None = None
) -> Task:
    """Read a task from a file of one JSON object a line.

    Rows of a "last_word" task are {"context", "continuation"}, and " " + continuation is scored after the context.
    Rows of a "multiple_choice" task are {"query", "choices": [...], "gold": number of the right one from 0}, and
    each " " + choice is scored after the query and the prompt suffix. A row may have a "prompt_suffix" of its own;
    other fields are ignored, as are empty lines.

    Args:
        path: the .jsonl file, UTF-8.
        kind: by default told from the fields of the first row.
        name: by default the file's name without its suffix.
        prompt_suffix: put after each query or context; by default "\\nAnswer:" after a query, nothing after a context.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: naming file, line and field, if a row cannot be used or there are no rows.
    """
    path = Path(path)
    if kind is not None and kind not in KINDS:
        raise ValueError(f"kind is {kind!r}; give one of {', '.join(KINDS)}")
    if not path.is_file():
        raise FileNotFoundError(f"no task file {path}; give a .jsonl file")
    items = []
    for number, text in enumerate(_lines(path), start=1):
        if not text.strip():
            continue
        place = f"{path}, line {number}"
        row = _object(text, place)
        kind = kind or _kind_of(row, place)
        suffix = PROMPT_SUFFIX[kind] if prompt_suffix is None else prompt_suffix
        items.append(_item(row, kind, suffix, number, place))
    if kind is None or not items:
        raise ValueError(f"{path} has no rows; a task needs one JSON object a line")
    return Task(name=path.stem if name is None else name, kind=kind, path=path, items=tuple(items))


def score_task(
    model: nn.Module,
    tokenizer: Any,
    task: Task,
    *,
    limit: int | None = None,
    batch_size: int,
    on_progress: Progress | None = None,
) -> TaskScore:
    """Score a model on a task, with lm-eval's tokens and lm-eval's metrics.

    Args:
        model: causal language model of transformers, patched or not.
        tokenizer: its tokenizer.
        task: from `read_task`.
        limit: score this many items only, evenly spaced through the file and the same for every model.
        batch_size: continuations of one forward pass; the result does not depend on it.
        on_progress: called with the number of continuations done and of all.

    Raises:
        ValueError: naming file and line, if a choice has no tokens of its own or too many for the model.
    """
    longest = longest_input(model, tokenizer)
    chosen = task.subset(limit)
    requests = [request for index in chosen for request in _requests(tokenizer, task, task.items[index], longest)]
    scores = iter(
        score_continuations(
            model,
            requests,
            batch_size=batch_size,
            max_length=longest,
            prefix_token=prefix_token(tokenizer),
            on_progress=on_progress,
        )
    )
    rows = [_item_values(task.kind, task.items[i], [next(scores) for _ in task.items[i].choices]) for i in chosen]
    return TaskScore(
        task=task.name,
        items=np.array(chosen),
        values={metric: np.array([values[metric] for values, _ in rows]) for metric in rows[0][0]},
        log_likelihoods=[likelihoods for _, likelihoods in rows],
    )


def spread(count: int, limit: int | None) -> list[int]:
    """Choose `limit` of `count` items, evenly spaced: number ⌊i·count/limit⌋ for each i. All, if limit is None.

    Raises:
        ValueError: if the limit is below 1.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit is {limit}; give 1 or more items, or None for all")
    wanted = count if limit is None else min(limit, count)
    return [i * count // wanted for i in range(wanted)]


def encode_pair(tokenizer: Any, context: str, continuation: str) -> Continuation:
    """Encode a context and what follows it the way lm-eval does for causal models.

    Spaces at the end of the context go to the continuation. Both are encoded together, and the continuation's tokens
    are those after as many as the context alone has; so the tokens are the ones that the whole text would have.
    """
    stripped = context.rstrip()
    context, continuation = stripped, context[len(stripped) :] + continuation
    if not context:
        return Continuation([], tokenizer.encode(continuation, add_special_tokens=False))
    context_ids = _encode(tokenizer, context)
    return Continuation(context_ids, _encode(tokenizer, context + continuation)[len(context_ids) :])


def prefix_token(tokenizer: Any) -> int | None:
    """Give the token that stands for an empty context: the tokenizer's BOS, else its EOS."""
    bos = tokenizer.bos_token_id
    return tokenizer.eos_token_id if bos is None else bos


def _encode(tokenizer: Any, text: str) -> list[int]:
    """Encode with the tokenizer's own special tokens, unless the text starts with one already."""
    prefix = prefix_token(tokenizer)
    if prefix is not None and text.startswith(tokenizer.decode(prefix)):
        return list(tokenizer.encode(text, add_special_tokens=False))
    return list(tokenizer.encode(text))


def _requests(tokenizer: Any, task: Task, item: TaskItem, longest: int) -> list[Continuation]:
    requests = [encode_pair(tokenizer, item.context, DELIMITER + choice) for choice in item.choices]
    for request, choice in zip(requests, item.choices, strict=True):
        tokens = len(request.continuation_ids)
        if not 1 <= tokens <= longest:
            raise ValueError(
                f"{task.path}, line {item.line}: {choice[:60]!r} has {tokens} tokens after its prompt; "
                f"this model scores 1 to {longest}; change or remove the row"
            )
    return requests


def _item_values(
    kind: TaskKind, item: TaskItem, scores: Sequence[ContinuationScore]
) -> tuple[dict[str, float], np.ndarray]:
    likelihoods = np.array([score.log_likelihood for score in scores])  # [choices]
    if kind == "last_word":
        return {"accuracy": float(scores[0].is_greedy), "nll": -likelihoods[0]}, likelihoods
    characters = np.array([len(choice) for choice in item.choices])
    values = {
        "accuracy": float(likelihoods.argmax() == item.gold),
        "normalised_accuracy": float((likelihoods / characters).argmax() == item.gold),
    }
    return values, likelihoods


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8-sig").split("\n")  # not splitlines: JSON strings may hold U+2028
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 ({error}); save it as UTF-8") from error


def _object(text: str, place: str) -> dict[str, Any]:
    try:
        row = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place} is not JSON ({error}); write one JSON object a line") from error
    if not isinstance(row, dict):
        raise ValueError(f"{place} is {type(row).__name__}, not an object; write one JSON object a line")
    return row


def _kind_of(row: Mapping[str, Any], place: str) -> TaskKind:
    for kind, fields in FIELDS.items():
        if fields[0] in row:
            return cast(TaskKind, kind)
    known = " or ".join(f"{', '.join(fields)} ({kind})" for kind, fields in FIELDS.items())
    raise ValueError(f"{place} has the fields {', '.join(map(repr, row)) or 'of nothing'}; a task's rows have {known}")


def _item(row: Mapping[str, Any], kind: TaskKind, suffix: str, number: int, place: str) -> TaskItem:
    for field in FIELDS[kind]:
        if field not in row:
            raise ValueError(f"{place} has no {field!r}; rows of a {kind} task have {', '.join(FIELDS[kind])}")
    suffix = _text(row.get("prompt_suffix", suffix), "prompt_suffix", place)
    prompt = _text(row[FIELDS[kind][0]], FIELDS[kind][0], place) + suffix
    if kind == "last_word":
        return TaskItem(number, prompt, (_text(row["continuation"], "continuation", place, filled=True),), 0)
    choices = row["choices"]
    if not isinstance(choices, list) or len(choices) < 2:
        raise ValueError(f"{place}: 'choices' is {choices!r}; give a list of at least 2 texts")
    texts = tuple(_text(choice, f"choices[{i}]", place, filled=True) for i, choice in enumerate(choices))
    gold = row["gold"]
    if type(gold) is not int or not 0 <= gold < len(texts):
        raise ValueError(f"{place}: 'gold' is {gold!r}; give the number of the right choice, 0 to {len(texts) - 1}")
    return TaskItem(number, prompt, texts, gold)


def _text(value: Any, field: str, place: str, *, filled: bool = False) -> str:
    if not isinstance(value, str) or (filled and not value):
        raise ValueError(f"{place}: {field!r} is {value!r}; give {'a text that is not empty' if filled else 'a text'}")
    return value
