"""Point clouds: made by a trained model, written, drawn, and shown to a model that makes pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from mmpreproj.pipelines.sd3 import PreProjSD3Pipeline
from mmpreproj.pipelines.shapes import PreProjShapePipeline
from mmpreproj.points.clouds import read_cloud, write_ply
from mmpreproj.points.drawing import draw_cloud
from mmpreproj.points.path import point_path
from mmpreproj.recipes.generate import file_stems


@dataclass(frozen=True)
class ShapeSampling:
    """How point clouds are generated.

    Attributes:
        points: points of each cloud.
        steps: Euler steps.
        guidance: classifier-free guidance scale; 1 for none.
        count: clouds per prompt.
        seed: the first cloud of each prompt takes this seed, the next one seed + 1, and so on.
    """

    points: int = 2048
    steps: int = 50
    guidance: float = 2.0
    count: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        # A single point has no extent, so it could be neither drawn nor shown to a model.
        for name, least in (("points", 2), ("steps", 1), ("count", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}; got {getattr(self, name)}")


def generate_shapes(
    pipeline: PreProjShapePipeline, prompts: Sequence[str], sampling: ShapeSampling | None = None
) -> list[tuple[str, list[np.ndarray]]]:
    """Generate clouds for prompts; a cloud depends on its prompt, seed and settings, not on its neighbours.

    Returns:
        One (prompt, clouds `[P, 3 + F]`) pair per prompt, in order.

    Raises:
        ValueError: if the model has no point path that generates, or the clouds are not finite.
    """
    sampling = sampling or ShapeSampling()
    rows = []
    for prompt in prompts:
        generators = [torch.Generator().manual_seed(sampling.seed + place) for place in range(sampling.count)]
        (clouds,) = pipeline(
            prompt,
            num_points=sampling.points,
            num_inference_steps=sampling.steps,
            guidance_scale=sampling.guidance,
            num_shapes_per_prompt=sampling.count,
            generator=generators,
            return_dict=False,
        )
        rows.append((prompt, list(np.asarray(clouds))))
    return rows


def write_shapes(rows: Sequence[tuple[str, Sequence[np.ndarray]]], folder: Path, *, seed: int = 0) -> list[Path]:
    """Write each cloud as `<prompt>-<seed>.ply`, and beside it a picture of it from several sides, `.png`.

    The PLY file has the coordinates. What features there are go into a `.npy` file of all columns.

    Returns:
        The files, in order.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []
    for stem, (prompt, clouds) in zip(file_stems([prompt for prompt, _ in rows]), rows, strict=True):
        for offset, cloud in enumerate(clouds):
            ply, png, npy = (folder / f"{stem}-{seed + offset}.{suffix}" for suffix in ("ply", "png", "npy"))
            write_ply(ply, cloud[:, :3])
            draw_cloud(cloud, png, title=prompt)
            paths += [ply, png]
            if cloud.shape[1] > 3:
                np.save(npy, cloud)
                paths.append(npy)
    return paths


def read_cloud_for(pipeline: PreProjSD3Pipeline, cloud: Path) -> np.ndarray:
    """Read a cloud with the features of a pipeline's point path.

    Returns:
        The points `[P, 3 + F]`.

    Raises:
        UnreadableCloudError: if it cannot be read.
        ValueError: if the model has no point path.
    """
    return read_cloud(cloud, features=point_path(pipeline.transformer).channels - 3)
