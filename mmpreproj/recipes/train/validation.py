"""Pictures that a model in training makes of fixed prompts, with the live modules and embeddings computed before."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from mmpreproj.patching.positions.life import masks_padding
from mmpreproj.patching.positions.root import MASK
from mmpreproj.pipelines.latents import largest_side
from mmpreproj.pipelines.sd3 import PreProjSD3Pipeline
from mmpreproj.recipes.figures import draw_grid
from mmpreproj.training.config import ConfigError, TrainConfig

SMALLEST_CELL, LARGEST_CELL = 96, 256  # a grid of eight by five is then 2,200 pixels wide at most


def check_prompts(pipeline: PreProjSD3Pipeline, config: TrainConfig) -> None:
    """Refuse pictures of validation that the model cannot make, before anything is encoded.

    Raises:
        ConfigError: if their height or width does not fit.
    """
    settings = config.validation
    multiple = pipeline.vae_scale_factor * pipeline.transformer.config.patch_size
    largest = largest_side(pipeline.transformer, vae_scale_factor=pipeline.vae_scale_factor)
    for name, side in (("height", settings.height), ("width", settings.width)):
        if not settings.prompts or side is None:
            continue
        if side % multiple:
            raise ConfigError(
                f"validation.{name}: {side} pixels cannot be cut into patches; this model takes multiples of "
                f"{multiple}"
            )
        if side > largest:
            raise ConfigError(
                f"validation.{name}: {side} pixels are more than this model has positions for; it takes {largest} at "
                "most"
            )


def draw_prompts(
    pipeline: PreProjSD3Pipeline, prompts: Mapping[str, dict[str, Tensor]], config: TrainConfig, path: Path | None
) -> str | None:
    """Generate pictures and draw them as a grid; say why where there is nothing to draw, which must end no training.

    Args:
        pipeline: with the transformer in training; its VAE is moved to where it is needed and back.
        prompts: embeddings of the prompts of `validation` and of its negative one: tokens `[L, D]`, pooled `[P]`, mask
            `[L]` each.
        config: the run's settings.
        path: a PNG file; None generates without drawing, on processes that must take part.
    """
    settings = config.validation
    transformer, vae = pipeline.transformer, pipeline.vae
    # The same modules, without a bar of progress. Not by `from_pipe`, which knows no transformer that FSDP2 renamed.
    drawing = copy.copy(pipeline)
    drawing.set_progress_bar_config(disable=True)
    was_training, device = transformer.training, next(transformer.parameters()).device
    transformer.eval()
    if vae is not None:
        vae.to(device)
    try:
        pictures = [
            _generate(drawing, prompts[prompt], prompts[settings.negative_prompt], config)
            for prompt in settings.prompts
        ]
        if path is not None:
            draw_grid(list(zip(settings.prompts, pictures, strict=True)), path, cell=_cell(pictures[0][0]))
    # A model that has learned nothing yet may give what is not finite; memory or the disk may be full.
    except (ValueError, RuntimeError, OSError) as error:
        return str(error)
    finally:
        transformer.train(was_training)
        if vae is not None:
            vae.to("cpu")
    return None


def _cell(picture: Image.Image) -> int:
    """Return the side of a picture in the grid, in pixels: its own, so that it can be judged, within limits."""
    return min(max(SMALLEST_CELL, *picture.size), LARGEST_CELL)


def _generate(
    pipeline: PreProjSD3Pipeline, prompt: dict[str, Tensor], negative: dict[str, Tensor], config: TrainConfig
) -> Sequence[Image.Image]:
    settings = config.validation
    device, count = next(pipeline.transformer.parameters()).device, settings.count

    def several(value: Tensor) -> Tensor:
        return value.to(device)[None].expand(count, *value.shape)

    attention = None
    if masks_padding(pipeline.transformer):
        asked = [negative["mask"], prompt["mask"]] if settings.guidance > 1 else [prompt["mask"]]
        attention = {MASK: torch.cat([several(mask) for mask in asked])}
    (pictures,) = pipeline(
        prompt_embeds=several(prompt["tokens"]),
        pooled_prompt_embeds=several(prompt["pooled"]),
        negative_prompt_embeds=several(negative["tokens"]),
        negative_pooled_prompt_embeds=several(negative["pooled"]),
        height=settings.height or config.data.resolution,
        width=settings.width or config.data.resolution,
        num_inference_steps=settings.steps,
        guidance_scale=settings.guidance,
        generator=[torch.Generator().manual_seed(settings.seed + place) for place in range(count)],
        joint_attention_kwargs=attention,
        return_dict=False,
    )
    return pictures
