"""Prompts through one generic transformer text encoder (BERT, MiniLM, T5 …)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

logger = logging.getLogger(__name__)


def encode_text(
    text_encoder: nn.Module,
    tokenizer: Any,
    prompts: Sequence[str],
    *,
    max_sequence_length: int,
    device: torch.device | str,
) -> tuple[Tensor, Tensor]:
    """Encode prompts into per-token embeddings and one pooled embedding each.

    Every prompt is padded to the same length, `min(max_sequence_length, tokenizer.model_max_length)`. A model trained
    on shorter prompts keeps that length in its tokenizer's `model_max_length`, which is saved with it; so training
    and generation agree without a further setting. Gradients flow to the encoder; call under `torch.no_grad()` where
    they are not wanted.

    Args:
        text_encoder: a transformers model whose output has `last_hidden_state`.
        tokenizer: its tokenizer.
        prompts: B prompts.
        max_sequence_length: upper bound of the length L, in tokens.
        device: where the encoder runs.

    Returns:
        The encoder's last hidden states, zero at padding, `[B, L, D]`, and their mean over the tokens that are not
        padding, `[B, D]`; both in the encoder's output dtype.

    Raises:
        TypeError: if prompts are not a list of strings, or the model gives no `last_hidden_state`.
        ValueError: if the length is below 1 or beyond the encoder's positions, or the tokenizer cannot pad.
    """
    prompts = _as_list(prompts)
    length = sequence_length(text_encoder, tokenizer, max_sequence_length=max_sequence_length)
    _warn_of_truncation(tokenizer, prompts, length)
    tokens = tokenizer(prompts, padding="max_length", max_length=length, truncation=True, return_tensors="pt")
    mask = tokens.attention_mask.to(device)  # [B, L]
    output = text_encoder(input_ids=tokens.input_ids.to(device), attention_mask=mask)
    hidden_states = getattr(output, "last_hidden_state", None)  # [B, L, D]
    if hidden_states is None:
        raise TypeError(f"{type(text_encoder).__name__} gives no last_hidden_state; use an encoder such as BertModel")
    keep = mask.to(hidden_states.device).unsqueeze(-1)  # [B, L, 1]
    # Not a product: padding positions may hold anything, and 0 · inf would be NaN.
    embeds = hidden_states.masked_fill(keep == 0, 0.0)  # [B, L, D]
    pooled = embeds.float().sum(dim=1) / keep.sum(dim=1).clamp(min=1)  # [B, D]
    return embeds, pooled.to(embeds.dtype)


def sequence_length(text_encoder: nn.Module, tokenizer: Any, *, max_sequence_length: int) -> int:
    """Return the length L, in tokens, that `encode_text` pads prompts to.

    Raises:
        ValueError: if it is below 1 or beyond the encoder's positions, or the tokenizer cannot pad.
    """
    if getattr(tokenizer, "pad_token", None) is None:
        raise ValueError(f"{type(tokenizer).__name__} has no pad token; set tokenizer.pad_token before encoding")
    length = min(max_sequence_length, int(tokenizer.model_max_length))
    positions = getattr(getattr(text_encoder, "config", None), "max_position_embeddings", None)
    if length < 1:
        raise ValueError(f"max_sequence_length must be at least 1; got {length}")
    if positions is not None and length > positions:
        raise ValueError(
            f"prompts would be padded to {length} tokens, but {type(text_encoder).__name__} has {positions} "
            f"positions; set tokenizer.model_max_length or max_sequence_length to {positions} or less"
        )
    return length


def negative_prompts(negative_prompt: str | list[str] | None, *, prompt: Any, batch_size: int) -> list[str]:
    """Return one negative prompt per prompt, the empty one for None.

    Raises:
        TypeError: if it is neither a string nor a list.
        ValueError: if a list is not as long as the batch.
    """
    negative = negative_prompt or ""
    if isinstance(negative, str):
        return [negative] * batch_size
    if not isinstance(negative, list) or isinstance(prompt, str):
        expected = "a string like prompt" if isinstance(prompt, str) else "a string or a list of strings"
        raise TypeError(f"negative_prompt must be {expected}; got {negative!r} ({type(negative).__name__})")
    if len(negative) != batch_size:
        raise ValueError(
            f"negative_prompt has {len(negative)} entries for {batch_size} prompts; give one each, or one string"
        )
    return negative


def _as_list(prompts: Sequence[str]) -> list[str]:
    if isinstance(prompts, str) or not isinstance(prompts, Sequence) or not prompts:
        raise TypeError(f"prompts must be a non-empty list of strings; got {prompts!r} ({type(prompts).__name__})")
    for index, prompt in enumerate(prompts):
        if not isinstance(prompt, str):
            raise TypeError(f"prompt {index} must be a string; got {prompt!r} ({type(prompt).__name__})")
    return list(prompts)


def _warn_of_truncation(tokenizer: Any, prompts: list[str], length: int) -> None:
    room = max(length - tokenizer.num_special_tokens_to_add(), 0)
    for ids in tokenizer(prompts, add_special_tokens=False, verbose=False).input_ids:
        if len(ids) > room:
            logger.warning(
                "The following part of a prompt was cut off, as the text encoder is given at most %d tokens: %r",
                length,
                tokenizer.decode(ids[room:]),
            )
