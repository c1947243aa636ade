"""Prompts of a pipeline: which encoders it can use, and the embeddings that a generic one gives."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from mmpreproj.patching.lookup import unwrap
from mmpreproj.pipelines.text import encode_text, negative_prompts


def encode_generically(pipe: Any, given: Mapping[str, Any]) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """Encode prompts with a pipeline's one generic encoder.

    Args:
        pipe: a `PreProjSD3Pipeline`.
        given: every argument of `StableDiffusion3Pipeline.encode_prompt` by name.

    Returns:
        As `PreProjSD3Pipeline.encode_prompt`.

    Raises:
        TypeError: if a negative prompt does not match its prompt.
        ValueError: if an argument has no use for the encoder, or the encoder does not fit.
    """
    _check_generic_encoder(pipe, given)
    encode = functools.partial(
        _encode_batch,
        pipe,
        device=given["device"] or pipe._execution_device,
        images_per_prompt=given["num_images_per_prompt"],
        max_sequence_length=given["max_sequence_length"],
    )
    prompt, embeds, pooled = given["prompt"], given["prompt_embeds"], given["pooled_prompt_embeds"]
    negative, negative_pooled = given["negative_prompt_embeds"], given["negative_pooled_prompt_embeds"]
    prompts = [prompt] if isinstance(prompt, str) else prompt
    if embeds is None:
        embeds, pooled = encode(prompts)
    if given["do_classifier_free_guidance"] and negative is None:
        batch_size = embeds.shape[0] if prompts is None else len(prompts)
        texts = negative_prompts(given["negative_prompt"], prompt=prompt, batch_size=batch_size)
        negative, negative_pooled = encode(texts)
        if negative.shape != embeds.shape:
            raise ValueError(
                f"the negative prompt is encoded as {list(negative.shape)}, but prompt_embeds are "
                f"{list(embeds.shape)}; pass negative_prompt_embeds and negative_pooled_prompt_embeds too"
            )
    return embeds, negative, pooled, negative_pooled


def check_clip_encoders(pipe: Any) -> None:
    """Refuse to encode prompts with a pipeline that lacks one of the stock encoders.

    Raises:
        ValueError: naming what is missing, and what to pass instead.
    """
    needed = ["text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"]
    needed += ["tokenizer_3"] if pipe.text_encoder_3 is not None else []
    missing = [name for name in needed if getattr(pipe, name) is None]
    if missing:
        raise ValueError(
            f"this pipeline has no {', '.join(missing)} to encode prompts with; pass prompt_embeds and "
            "pooled_prompt_embeds instead of prompt and, with a guidance_scale above 1, negative_prompt_embeds "
            "and negative_pooled_prompt_embeds"
        )


def _encode_batch(
    pipe: Any, prompts: list[str], *, device: torch.device, images_per_prompt: int, max_sequence_length: int
) -> tuple[Tensor, Tensor]:
    embeds, pooled = encode_text(
        pipe.text_encoder, pipe.tokenizer, prompts, max_sequence_length=max_sequence_length, device=device
    )  # [B, L, D], [B, D]
    if pipe.transformer is not None:  # it may be left out, to encode alone
        _check_width(pipe, embeds.shape[-1])
        dtype = cast(torch.dtype, unwrap(pipe.transformer).dtype)  # the encoder may run in another precision
        embeds, pooled = embeds.to(dtype), pooled.to(dtype)
    return embeds.repeat_interleave(images_per_prompt, 0), pooled.repeat_interleave(images_per_prompt, 0)


def _check_width(pipe: Any, width: int) -> None:
    for setting in ("joint_attention_dim", "pooled_projection_dim"):
        expected = pipe.transformer.config[setting]
        if width != expected:
            raise ValueError(
                f"{type(unwrap(pipe.text_encoder)).__name__} gives embeddings of width {width}, but the "
                f"transformer's {setting} is {expected}; use the text encoder that it was trained with"
            )


def _check_generic_encoder(pipe: Any, given: Mapping[str, Any]) -> None:
    name = type(unwrap(pipe.text_encoder)).__name__
    others = [other for other in ("text_encoder_2", "text_encoder_3") if getattr(pipe, other) is not None]
    if others:
        raise ValueError(f"text_encoder is a {name}, which stands alone, but {' and '.join(others)} is there too")
    if pipe.tokenizer is None:
        raise ValueError(f"text_encoder is a {name} without a tokenizer; load the pipeline with tokenizer=…")
    for argument in ("prompt_2", "prompt_3", "negative_prompt_2", "negative_prompt_3", "clip_skip"):
        if given[argument] is not None:
            raise ValueError(
                f"{argument} has no use with the single text encoder {name}; got {given[argument]!r}. Put the "
                "whole text into prompt and negative_prompt"
            )
