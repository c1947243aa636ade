"""Pictures from a trained model."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from mmpreproj.patching.control import is_enabled
from mmpreproj.patching.lookup import adapters
from mmpreproj.pipelines.latents import largest_side
from mmpreproj.pipelines.sd3 import PreProjSD3Pipeline
from mmpreproj.training.lora import lora_parameters


@dataclass(frozen=True)
class Sampling:
    """How pictures are generated.

    Attributes:
        steps: denoising steps.
        guidance: classifier-free guidance scale; 1 for none.
        negative_prompt: what to steer away from.
        count: pictures per prompt.
        seed: the first picture of each prompt takes this seed, the next one seed + 1, and so on.
        size: side of the square picture, or its width and height, in pixels; None for the model's own.
    """

    steps: int = 28
    guidance: float = 5.0
    negative_prompt: str = ""
    count: int = 1
    seed: int = 0
    size: int | tuple[int, int] | None = None

    def __post_init__(self) -> None:
        for name in ("steps", "count"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}")
        sides = self.sides
        if len(sides) != 2 or any(side is not None and (not isinstance(side, int) or side < 1) for side in sides):
            raise ValueError(f"size must be a side or a width and a height, of at least 1 pixel; got {self.size}")

    @property
    def sides(self) -> tuple[int | None, int | None]:
        """Width and height, in pixels."""
        return self.size if isinstance(self.size, tuple) else (self.size, self.size)


def parse_size(text: str) -> int | tuple[int, int]:
    """Read a size such as `64`, or `48x32` for a width of 48 and a height of 32 pixels.

    Raises:
        ValueError: if it is neither.
    """
    found = re.fullmatch(r"(\d+)(?:[xX×](\d+))?", text.strip())
    if found is None:
        raise ValueError(f"size: expected a side such as 64, or width and height such as 48x32; got {text!r}")
    width, height = found.groups()
    return int(width) if height is None else (int(width), int(height))


def generate(
    pipeline: PreProjSD3Pipeline,
    prompts: Sequence[str],
    sampling: Sampling | None = None,
    *,
    point_cloud: np.ndarray | None = None,
) -> list[tuple[str, list[Image.Image]]]:
    """Generate pictures for prompts; a picture depends on its prompt, seed and settings, not on its neighbours.

    Args:
        pipeline: makes the pictures.
        prompts: what to show.
        sampling: how they are generated.
        point_cloud: `[P, 3 + F]`, what all of them are to show, for a model with a point path.

    Returns:
        One (prompt, pictures) pair per prompt, in order.

    Raises:
        ValueError: if the pictures are to be larger than the model has positions for, or do not divide into its
            patches; or if there is a cloud that the model has no use for.
    """
    sampling = sampling or Sampling()
    width, height = sampling.sides
    for side in (width, height):
        if side is not None:
            _check_side(pipeline, side)
    given = {} if point_cloud is None else {"point_cloud": point_cloud}
    rows = []
    for prompt in prompts:
        generators = [torch.Generator().manual_seed(sampling.seed + place) for place in range(sampling.count)]
        output: Any = pipeline(
            prompt,
            negative_prompt=sampling.negative_prompt,
            num_inference_steps=sampling.steps,
            guidance_scale=sampling.guidance,
            num_images_per_prompt=sampling.count,
            generator=generators,
            height=height,
            width=width,
            **given,
        )
        rows.append((prompt, output.images))
    return rows


def write_pictures(rows: Sequence[tuple[str, Sequence[Image.Image]]], folder: Path, *, seed: int = 0) -> list[Path]:
    """Write each picture as `<prompt>-<seed>.png`; prompts that would share a name are numbered."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for stem, (_, images) in zip(file_stems([prompt for prompt, _ in rows]), rows, strict=True):
        for offset, image in enumerate(images):
            paths.append(folder / f"{stem}-{seed + offset}.png")
            image.save(paths[-1])
    return paths


def best_device() -> torch.device:
    """Choose the accelerator that is present, else the CPU."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return torch.device("cpu") if found is None else found


def describe(pipeline: PreProjSD3Pipeline) -> str:
    """Say in a line what was loaded; the weights of a LoRA are counted apart, as they may be merged."""
    transformer = pipeline.transformer
    names = adapters(transformer)
    marked = [name if is_enabled(transformer, name) else f"{name} (switched off)" for name in names]
    if marked in ([], ["default"]):
        patched = "with its adapter" if marked else "without an adapter"
    else:
        patched = f"with its adapter{'s' if len(marked) > 1 else ''} {', '.join(marked)}"
    of_lora = sum(parameter.numel() for parameter in lora_parameters(transformer))
    size = f"{transformer.num_parameters() - of_lora:,} parameters"
    beside = f", and a LoRA of {of_lora:,} more" if of_lora else ""
    return f"{type(transformer).__name__} {patched}, {size}{beside}"


def file_stems(prompts: Sequence[str]) -> list[str]:
    """Make names for files from prompts, all different."""
    stems: list[str] = []
    for prompt in prompts:
        stem = re.sub(r"[^\w-]+", "-", prompt.lower()).strip("-")[:60] or "prompt"
        names = (stem if number == 1 else f"{stem}-{number}" for number in count(1))
        stems.append(next(name for name in names if name not in stems))
    return stems


def _check_side(pipeline: PreProjSD3Pipeline, side: int) -> None:
    largest = largest_side(pipeline.transformer, vae_scale_factor=pipeline.vae_scale_factor)
    if side > largest:
        raise ValueError(f"size: {side} pixels are more than this model has positions for; it takes {largest} at most")
    step = pipeline.vae_scale_factor * pipeline.patch_size
    if side % step:
        below = side - side % step
        choices = " or ".join(str(near) for near in (below, below + step) if 0 < near <= largest)
        raise ValueError(f"size: {side} pixels do not divide into patches of {step}; take {choices}")
