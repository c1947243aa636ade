"""Log-likelihoods of tokens under a causal language model, whatever adapters it carries."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

CHUNK_ELEMENTS = 1 << 24  # logits in fp32 at a time: 64 MiB
LENGTH_FIELDS = ("n_positions", "max_position_embeddings", "n_ctx")  # in the order that lm-eval asks for them
FALLBACK_LENGTH = 2048  # lm-eval's, for a model that names no length
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class TextScore:
    """How likely a text is, window by window.

    Attributes:
        nll: summed negative log-likelihood of each window's scored tokens `[W]`, nats, float64.
        counts: number of tokens scored in each window `[W]`, int64.
    """

    nll: np.ndarray
    counts: np.ndarray

    @property
    def perplexity(self) -> float:
        """exp of the mean negative log-likelihood of a scored token."""
        return math.exp(self.nll.sum() / self.counts.sum())


@dataclass(frozen=True)
class Continuation:
    """Tokens to score after a context.

    Attributes:
        context_ids: tokens before, may be empty.
        continuation_ids: tokens to score, at least one.
    """

    context_ids: Sequence[int]
    continuation_ids: Sequence[int]


@dataclass(frozen=True)
class ContinuationScore:
    """How likely a continuation is.

    Attributes:
        log_likelihood: summed over its tokens, nats.
        is_greedy: whether each token is the likeliest one after those before it.
        tokens: number of tokens scored.
    """

    log_likelihood: float
    is_greedy: bool
    tokens: int


@dataclass(frozen=True)
class _Row:
    """One sequence of a batch: the logits at the last `len(targets)` of the inputs predict the targets."""

    inputs: Sequence[int]
    targets: Sequence[int]


def score_text(
    model: nn.Module,
    tokens: Tensor | Sequence[int],
    *,
    length: int,
    stride: int,
    batch_size: int,
    beginning: int | None = None,
    on_progress: Progress | None = None,
) -> TextScore:
    """Score a long text with a sliding window.

    Window k reads the `length` tokens from k·stride on, fewer at the end of the text, and predicts the token after
    each. It scores those predictions that no window before it made: all in the first window, the last `stride` in
    the others. So every token but the very first is scored once, and outside the first window after at least
    length − stride + 1 tokens of context. A smaller stride gives each token more context, at more passes.

    The largest tensor is the logits `[batch_size, stride, vocabulary]`, in the first window `[1, length,
    vocabulary]`, in the model's dtype; the loss is in fp32 (float64 for a float64 model), summed in float64.

    Args:
        model: causal language model of transformers, patched or not; its mode is restored afterwards.
        tokens: the text `[T]`, T ≥ 2.
        length: tokens that a window reads, at most what the model can read.
        stride: tokens from one window to the next, 1 to `length`.
        batch_size: windows of one forward pass; the result does not depend on it.
        beginning: the token that the model needs at the start of what it reads, as Gemma does; it takes the place of
            each window's first token, so that the same tokens are scored. None for models that need none.
        on_progress: called with the number of windows done and of all windows.

    Raises:
        ValueError: if a length, a stride, a batch size or the text is out of its range.
    """
    text = torch.as_tensor(tokens, dtype=torch.long).cpu()
    _check_text(text, length, stride, longest_input(model))
    rows = list(_windows(text.tolist(), length=length, stride=stride, beginning=beginning))
    # The first window wants logits at all of its positions: alone, it does not make the others compute theirs.
    batches = [rows[:1], *_batched(rows[1:], batch_size)]
    scores: list[ContinuationScore] = []
    with evaluation_mode(model):
        for batch in batches:
            scores += _score_rows(model, batch)
            if on_progress is not None:
                on_progress(len(scores), len(rows))
    nll = np.array([-score.log_likelihood for score in scores])  # [W]
    return TextScore(nll=nll, counts=np.array([score.tokens for score in scores], dtype=np.int64))


def score_continuations(
    model: nn.Module,
    requests: Sequence[Continuation],
    *,
    batch_size: int,
    max_length: int | None = None,
    prefix_token: int | None = None,
    on_progress: Progress | None = None,
) -> list[ContinuationScore]:
    """Score continuations, each after its own context.

    Sequences are padded on the right and, where they are longer than the model can read, cut on the left: the last
    `max_length` tokens before the final one are read. An empty context becomes the prefix token; if the continuation
    starts with that token, it is the context itself and is not scored (as in lm-eval).

    Args:
        model: causal language model of transformers, patched or not; its mode is restored afterwards.
        requests: contexts and continuations, as token ids.
        batch_size: sequences of one forward pass; the result does not depend on it.
        max_length: tokens that the model reads; by default what its configuration says.
        prefix_token: what stands before an empty context; by default the BOS, else the EOS of the configuration.
        on_progress: called with the number of requests done and of all requests.

    Returns:
        One score a request, in the order of the requests.

    Raises:
        ValueError: if a continuation has no tokens or more than `max_length`, or a context is empty and there is no
            prefix token.
    """
    limit = longest_input(model) if max_length is None else max_length
    prefix = _configured_prefix(model) if prefix_token is None else prefix_token
    rows = [_continuation_row(request, number, limit, prefix) for number, request in enumerate(requests)]
    order = sorted(range(len(rows)), key=lambda number: -len(rows[number].inputs))  # the longest first: out of memory
    scores: dict[int, ContinuationScore] = {}  # at once or never
    with evaluation_mode(model):
        for batch in _batched(order, batch_size):
            scores.update(zip(batch, _score_rows(model, [rows[number] for number in batch]), strict=True))
            if on_progress is not None:
                on_progress(len(scores), len(rows))
    return [scores[number] for number in range(len(rows))]


def longest_input(model: nn.Module, tokenizer: Any = None) -> int:
    """Say how many tokens a model can read.

    Looked up as lm-eval does: in the configuration (that of the text part first), then in the tokenizer, else 2048.
    """
    config = getattr(model, "config", None)
    config = getattr(config, "text_config", None) or config
    for field in LENGTH_FIELDS:
        if (value := getattr(config, field, None)) is not None:
            return int(value)
    value = getattr(tokenizer, "model_max_length", None)
    return FALLBACK_LENGTH if value is None or value > 10**12 else int(value)  # transformers writes 1e30 for "unset"


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Turn off dropout and gradients inside; afterwards every module is in its own mode again.

    Not `inference_mode`: what modules keep from one forward to the next must stay usable in training.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


def _check_text(text: Tensor, length: int, stride: int, longest: int) -> None:
    if text.ndim != 1 or len(text) < 2:
        raise ValueError(f"tokens must be one sequence [T] of at least 2, got the shape {list(text.shape)}")
    if not 1 <= length <= longest:
        raise ValueError(f"length is {length}; this model reads 1 to {longest} tokens")
    if not 1 <= stride <= length:
        raise ValueError(f"stride is {stride}; give 1 to length ({length}), or some tokens would not be scored")


def _windows(text: list[int], *, length: int, stride: int, beginning: int | None) -> Iterator[_Row]:
    scored, last = 0, len(text) - 1
    for start in range(0, last, stride):
        end = min(start + length, last)
        inputs = text[start:end] if beginning is None else [beginning, *text[start + 1 : end]]
        yield _Row(inputs=inputs, targets=text[scored + 1 : end + 1])
        scored = end
        if end == last:
            return


def _batched(items: Sequence[Any], size: int) -> list[Any]:
    if size < 1:
        raise ValueError(f"batch_size is {size}; give 1 or more")
    return [items[start : start + size] for start in range(0, len(items), size)]


def _configured_prefix(model: nn.Module) -> int | None:
    config = getattr(model, "config", None)
    for field in ("bos_token_id", "eos_token_id"):
        value = getattr(config, field, None)
        if value is not None:
            return int(value[0] if isinstance(value, list) else value)
    return None


def _continuation_row(request: Continuation, number: int, limit: int, prefix: int | None) -> _Row:
    context, targets = list(request.context_ids), list(request.continuation_ids)
    if not context:
        if prefix is None:
            raise ValueError(
                f"request {number} has an empty context and the model's configuration has no BOS or EOS token; "
                "give prefix_token"
            )
        context, targets = (targets[:1], targets[1:]) if targets[:1] == [prefix] else ([prefix], targets)
    if not 1 <= len(targets) <= limit:
        raise ValueError(f"request {number} has {len(targets)} tokens to score; this model scores 1 to {limit}")
    return _Row(inputs=(context + targets)[-(limit + 1) : -1], targets=targets)


def _score_rows(model: nn.Module, rows: Sequence[_Row]) -> list[ContinuationScore]:
    """Score one batch: pad on the right, read only the logits from the earliest wanted position on."""
    width = max(len(row.inputs) for row in rows)
    device = _input_device(model)
    input_ids = torch.zeros(len(rows), width, dtype=torch.long)  # [B, L]
    attention_mask = torch.zeros_like(input_ids)
    for number, row in enumerate(rows):
        input_ids[number, : len(row.inputs)] = torch.tensor(row.inputs)
        attention_mask[number, : len(row.inputs)] = 1
    kept = width - min(len(row.inputs) - len(row.targets) for row in rows)
    options = {"logits_to_keep": kept} if _takes_logits_to_keep(model) else {}
    output = model(
        input_ids=input_ids.to(device), attention_mask=attention_mask.to(device), use_cache=False, **options
    )
    logits = output.logits[:, -kept:]  # [B, K, V]; counted from the end, as prompt tuning puts positions in front
    scores = []
    for number, row in enumerate(rows):
        end = len(row.inputs) - (width - kept)
        scores.append(_score_targets(logits[number, end - len(row.targets) : end], row.targets))
    return scores


def _score_targets(logits: Tensor, targets: Sequence[int]) -> ContinuationScore:
    """Score the targets [C] under their logits [C, V], a few positions at a time."""
    wanted = torch.tensor(targets, device=logits.device)  # [C]
    size = max(1, CHUNK_ELEMENTS // logits.shape[-1])
    total, greedy = 0.0, True
    for some, ids in zip(logits.split(size), wanted.split(size), strict=True):
        some = some if some.dtype == torch.float64 else some.float()  # [c, V]
        chosen = some.gather(-1, ids[:, None])[:, 0]  # [c]
        total += (chosen - some.logsumexp(-1)).double().sum().item()
        greedy = greedy and bool((some.argmax(-1) == ids).all())
    return ContinuationScore(log_likelihood=total, is_greedy=greedy, tokens=len(targets))


def _input_device(model: nn.Module) -> torch.device:
    """Say where token ids go: to the embedding, which need not be where a spread model's other layers are."""
    part: Any = model
    return next((part.get_input_embeddings() if hasattr(part, "get_input_embeddings") else part).parameters()).device


def _takes_logits_to_keep(model: nn.Module) -> bool:
    """Look through the wrapper of PEFT, whose own `forward` names no arguments."""
    outer: Any = model
    inner = outer.get_base_model() if hasattr(outer, "get_base_model") else outer
    return "logits_to_keep" in inspect.signature(inner.forward).parameters
