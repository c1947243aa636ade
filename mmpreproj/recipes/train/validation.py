"""Pictures that a model in training makes of fixed prompts, with the live modules and embeddings computed before."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from PIL import Image
from torch import Tensor, nn

from mmpreproj.core.sharding import is_sharded
from mmpreproj.patching.positions.life import masks_padding
from mmpreproj.patching.positions.root import MASK
from mmpreproj.pipelines.latents import largest_side
from mmpreproj.pipelines.sd3 import PreProjSD3Pipeline
from mmpreproj.recipes.figures import draw_grid
from mmpreproj.training.config import ConfigError, TrainConfig

# A model that has learned nothing yet may give what is not finite; memory or the disk may be full.
FAILURES = (ValueError, RuntimeError, OSError)
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
    pipeline: PreProjSD3Pipeline,
    prompts: Mapping[str, dict[str, Tensor]],
    config: TrainConfig,
    path: Path | None,
    *,
    accelerator: Accelerator | None = None,
) -> str | None:
    """Generate pictures and draw them as a grid; say why where there is nothing to draw, which must end no training.

    Several processes must all call this. Each generates the pictures of some prompts and gets those of the others; but
    where they share the weights, each generates all, since none can compute without the others.

    Args:
        pipeline: with the transformer in training; its VAE is moved to where it is needed and back.
        prompts: embeddings of the prompts of `validation` and of its negative one: tokens `[L, D]`, pooled `[P]`, mask
            `[L]` each.
        config: the run's settings.
        path: a PNG file; None generates without drawing, on processes that must take part.
        accelerator: of the run; None for one process.
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
        pictures = _Share(transformer, accelerator).make(
            settings.prompts,
            lambda prompt: _generate(drawing, prompts[prompt], prompts[settings.negative_prompt], config),
        )
        if path is not None:
            draw_grid(list(zip(settings.prompts, pictures, strict=True)), path, cell=_cell(pictures[0][0]))
    except FAILURES as error:
        return str(error)
    finally:
        transformer.train(was_training)
        if vae is not None:
            vae.to("cpu")
    return None


class _Share:
    """What this process generates of the pictures of some prompts.

    Args:
        transformer: with whole weights or shared ones.
        accelerator: of the run; None for one process.
    """

    def __init__(self, transformer: nn.Module, accelerator: Accelerator | None) -> None:
        # ZeRO-3 marks the parameters that it shares out by a `ds_id`.
        sharded = any(is_sharded(one) or hasattr(one, "ds_id") for one in transformer.parameters())
        self.rank, self.count = 0, 1
        if accelerator is not None and not sharded:
            self.rank, self.count = accelerator.process_index, accelerator.num_processes

    def make(
        self, prompts: Sequence[str], generate: Callable[[str], Sequence[Image.Image]]
    ) -> list[Sequence[Image.Image]]:
        """Generate the pictures of this process's prompts, and gather those of all.

        Raises:
            ValueError: if a process could not, on every process.
        """
        if self.count == 1:
            return [generate(prompt) for prompt in prompts]
        mine: list[tuple[int, Sequence[Image.Image] | str]] = []
        try:
            for place in range(self.rank, len(prompts), self.count):
                mine.append((place, generate(prompts[place])))
        except FAILURES as error:  # the others are waiting to be told
            mine.append((len(prompts), str(error)))
        found: list[tuple[int, Sequence[Image.Image] | str]] = gather_object(mine)
        for _, made in found:
            if isinstance(made, str):
                raise ValueError(made)
        return [made for _, made in sorted(found, key=lambda one: one[0]) if not isinstance(made, str)]


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
