"""Pictures from a trained model."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from mmpreproj.patching.control import is_enabled
from mmpreproj.patching.lookup import adapters
from mmpreproj.pipelines.latents import largest_side
from mmpreproj.pipelines.sd3 import PreProjSD3Pipeline


@dataclass(frozen=True)
class Sampling:
    """How pictures are generated.

    Attributes:
        steps: denoising steps.
        guidance: classifier-free guidance scale; 1 for none.
        negative_prompt: what to steer away from.
        count: pictures per prompt.
        seed: the first picture of each prompt takes this seed, the next one seed + 1, and so on.
        size: side of the square picture, in pixels; None for the model's own.
    """

    steps: int = 28
    guidance: float = 5.0
    negative_prompt: str = ""
    count: int = 1
    seed: int = 0
    size: int | None = None

    def __post_init__(self) -> None:
        for name in ("steps", "count"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}")


def generate(
    pipeline: PreProjSD3Pipeline, prompts: Sequence[str], sampling: Sampling | None = None
) -> list[tuple[str, list[Image.Image]]]:
    """Generate pictures for prompts; a picture depends on its prompt, seed and settings, not on its neighbours.

    Returns:
        One (prompt, pictures) pair per prompt, in order.

    Raises:
        ValueError: if the pictures are to be larger than the model has positions for.
    """
    sampling = sampling or Sampling()
    largest = largest_side(pipeline.transformer, vae_scale_factor=pipeline.vae_scale_factor)
    if sampling.size is not None and sampling.size > largest:
        raise ValueError(
            f"size: {sampling.size} pixels are more than this model has positions for; it takes {largest} at most"
        )
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
            height=sampling.size,
            width=sampling.size,
        )
        rows.append((prompt, output.images))
    return rows


def write_pictures(rows: Sequence[tuple[str, Sequence[Image.Image]]], folder: Path, *, seed: int = 0) -> list[Path]:
    """Write each picture as `<prompt>-<seed>.png`; prompts that would share a name are numbered."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for stem, (_, images) in zip(_file_stems([prompt for prompt, _ in rows]), rows, strict=True):
        for offset, image in enumerate(images):
            paths.append(folder / f"{stem}-{seed + offset}.png")
            image.save(paths[-1])
    return paths


def best_device() -> torch.device:
    """Choose the accelerator that is present, else the CPU."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return torch.device("cpu") if found is None else found


def describe(pipeline: PreProjSD3Pipeline) -> str:
    """Say in a line what was loaded."""
    transformer = pipeline.transformer
    names = adapters(transformer)
    marked = [name if is_enabled(transformer, name) else f"{name} (switched off)" for name in names]
    if marked in ([], ["default"]):
        patched = "with its adapter" if marked else "without an adapter"
    else:
        patched = f"with its adapter{'s' if len(marked) > 1 else ''} {', '.join(marked)}"
    return f"{type(transformer).__name__} {patched}, {transformer.num_parameters():,} parameters"


def _file_stems(prompts: Sequence[str]) -> list[str]:
    stems: list[str] = []
    for prompt in prompts:
        stem = re.sub(r"[^\w-]+", "-", prompt.lower()).strip("-")[:60] or "prompt"
        names = (stem if number == 1 else f"{stem}-{number}" for number in count(1))
        stems.append(next(name for name in names if name not in stems))
    return stems
