"""Which tokens of a prompt are text and which are padding, for transformers that must not attend to padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mmpreproj.patching.positions.root import MASK
from mmpreproj.pipelines.text import negative_prompts, sequence_length


def prompt_mask(
    pipe: Any,
    prompt: str | Sequence[str],
    prompt_2: str | Sequence[str] | None = None,
    prompt_3: str | Sequence[str] | None = None,
    *,
    max_sequence_length: int | None = None,
) -> Tensor:
    """Tell text from padding in what a pipeline's `encode_prompt` makes of prompts.

    A place that two CLIP encoders share counts as text if it is for one of them. Where there is no T5, its places are
    padding.

    Args:
        pipe: a `PreProjSD3Pipeline`.
        prompt: B prompts.
        prompt_2: those of the second CLIP encoder, if they are others.
        prompt_3: those of T5, if they are others.
        max_sequence_length: as given to `encode_prompt`; None for the pipeline's own.

    Returns:
        Truth values `[B, L]`, true at text.
    """
    prompts = _as_list(prompt)
    max_sequence_length = pipe.max_sequence_length if max_sequence_length is None else max_sequence_length
    if pipe.uses_generic_text_encoder:
        length = sequence_length(pipe.text_encoder, pipe.tokenizer, max_sequence_length=max_sequence_length)
        return _text_places(pipe.tokenizer, prompts, length)
    clip = _text_places(pipe.tokenizer, prompts, pipe.tokenizer_max_length)
    clip = clip | _text_places(pipe.tokenizer_2, _as_list(prompt_2 or prompts), pipe.tokenizer_max_length)  # [B, 77]
    if pipe.text_encoder_3 is None:
        t5 = clip.new_zeros((len(prompts), max_sequence_length))
    else:
        t5 = _text_places(pipe.tokenizer_3, _as_list(prompt_3 or prompts), max_sequence_length)
    return torch.cat([clip, t5], dim=1)


def mask_of_call(pipe: Any, given: Mapping[str, Any]) -> Tensor:
    """Make the mask for a call of a pipeline, in the order in which it calls the transformer.

    Args:
        pipe: a `PreProjSD3Pipeline`.
        given: every argument of `StableDiffusion3Pipeline.__call__` by name.

    Returns:
        Truth values `[B, L]`; with guidance `[2B, L]`, negative prompts first.

    Raises:
        TypeError: if a negative prompt does not match its prompt.
        ValueError: if embeddings are given instead of prompts, which do not tell text from padding.
    """
    guided = given["guidance_scale"] > 1
    for name in ("prompt_embeds", "negative_prompt_embeds") if guided else ("prompt_embeds",):
        if given[name] is not None:
            raise ValueError(
                f"{name} do not tell text from padding, and this transformer was trained not to attend to padding; "
                f"pass joint_attention_kwargs={{{MASK!r}: …}} too, true at text, [B, tokens] or with guidance "
                "[2B, tokens], negative prompts first (pipe.encode_prompt_mask makes it), or give prompts"
            )
    texts = [_as_list(given[name] or given["prompt"]) for name in ("prompt", "prompt_2", "prompt_3")]
    rows = [texts]
    if guided:
        rows.insert(0, _negative_texts(given, batch_size=len(texts[0])))
    masks = [pipe.encode_prompt_mask(*row, max_sequence_length=given["max_sequence_length"]) for row in rows]
    return torch.cat([mask.repeat_interleave(given["num_images_per_prompt"], 0) for mask in masks])


def _negative_texts(given: Mapping[str, Any], *, batch_size: int) -> list[list[str]]:
    """Return the negative prompts of the three encoders, as `encode_prompt` reads them."""
    first = given["negative_prompt"]
    texts = (given[name] or first for name in ("negative_prompt", "negative_prompt_2", "negative_prompt_3"))
    return [negative_prompts(text, prompt=given["prompt"], batch_size=batch_size) for text in texts]


def _as_list(texts: str | Sequence[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else list(texts)


def _text_places(tokenizer: Any, prompts: list[str], length: int) -> Tensor:
    tokens = tokenizer(prompts, padding="max_length", max_length=length, truncation=True, return_tensors="pt")
    return tokens.attention_mask != 0  # [B, L]
