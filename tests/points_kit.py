"""Clouds for the tiny transformers, and both ways to send them, for tests of the point path."""

from typing import Any

import torch
from positions_kit import output, picture
from torch import Tensor, nn

from mmpreproj import PreProjConfig
from mmpreproj.points import PointPathConfig, point_velocity

Clouds = dict[str, Tensor]


def with_points(*, adapter: dict[str, Any] | None = None, **values: Any) -> PreProjConfig:
    """Settings of an adapter with a point path of these settings."""
    return PreProjConfig(points=PointPathConfig(**values), **(adapter or {}))


def clouds(count: int = 7, *, features: int = 0, seed: int = 5, dtype: torch.dtype = torch.float32) -> Clouds:
    """Two clouds off the origin, as attention kwargs; the second has two points fewer, and padding in their places."""
    generator = torch.Generator().manual_seed(seed)
    points = torch.randn(2, count, 3 + features, generator=generator, dtype=torch.float64) * 3 + 1
    mask = torch.ones(2, count, dtype=torch.bool)
    mask[1, -2:] = False
    return {"point_cloud": points.to(dtype), "point_mask": mask}


def dtype_of(model: nn.Module) -> torch.dtype:
    return model.proj_out.weight.dtype


def drawn(model: nn.Module, given: Clouds | None = None, **others: Any) -> Tensor:
    """The output for the fixed pictures, with clouds or without."""
    return output(model, picture(8, 8, 5, dtype_of(model)), joint_attention_kwargs=given, **others)


def noisy(count: int = 6, *, features: int = 0, seed: int = 8, dtype: torch.dtype = torch.float32) -> Tensor:
    """Noisy points `[2, P, 3 + F]`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, count, 3 + features, generator=generator, dtype=torch.float64).to(dtype)


def prompt(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Timesteps and pooled text of the fixed pictures."""
    inputs = picture(8, 8, 5, dtype)
    return {key: inputs[key] for key in ("timestep", "pooled_projections")}


def moved(model: nn.Module, points: Tensor | None = None, **options: Any) -> Tensor:
    """The velocity of points under the fixed prompts."""
    dtype = dtype_of(model)
    points = noisy(dtype=torch.promote_types(dtype, torch.float32), **options) if points is None else points
    with torch.no_grad():
        return point_velocity(model, points, **prompt(dtype))
