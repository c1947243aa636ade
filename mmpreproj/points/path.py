"""The point path from outside: velocities of points, and clouds of different sizes as one batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mmpreproj.patching.lookup import unwrap
from mmpreproj.patching.onloading import onloaded
from mmpreproj.patching.points.hooks import point_layer, velocity_of_points
from mmpreproj.patching.points.path import PointAdapter
from mmpreproj.points.clouds import check_cloud


def point_velocity(transformer: nn.Module, points: Tensor, *, timestep: Tensor, pooled_projections: Tensor) -> Tensor:
    """Compute the velocity of noisy points under a prompt; each point's depends on itself alone.

    Args:
        transformer: a model with a point path.
        points: `z = (1 - σ)·x + σ·ε`, `[B, P, 3 + F]`, where x is a cloud in the unit ball (see
            `PointPathConfig.normalise`) with its coordinates, not its features, times `PointPathConfig.spread`.
        timestep: `σ` times the scheduler's number of training timesteps, `[B]`.
        pooled_projections: pooled text embeddings, `[B, D_pooled]`.

    Returns:
        An estimate of `ε - x`, in the shape and dtype of `points`.

    Raises:
        TypeError: if `points` is no floating-point tensor.
        ValueError: if the model has no point path, or one that was made with `generate=False` or is switched off or at
            scale 0; or if a shape is wrong.

    Source: the block without attention is ours; the objective is that of arXiv 2403.03206, section 2.
    """
    model = unwrap(transformer)
    path = generating_path(model)
    if not isinstance(points, Tensor) or not points.is_floating_point():
        kind = points.dtype if isinstance(points, Tensor) else type(points).__name__
        raise TypeError(f"points must be a floating-point tensor [B, P, {path.channels}]; got {kind}")
    if points.ndim != 3 or points.shape[-1] != path.channels or points.shape[1] == 0:
        raise ValueError(f"points must have the shape [B, P, {path.channels}], P at least 1; got {list(points.shape)}")
    for name, value in (("timestep", timestep), ("pooled_projections", pooled_projections)):
        if value.ndim == 0 or len(value) != len(points):
            raise ValueError(f"{name} must have one row for each of {len(points)} clouds; got {list(value.shape)}")
    width = getattr(getattr(model, "config", None), "pooled_projection_dim", None)
    if pooled_projections.ndim != 2 or width not in (None, pooled_projections.shape[1]):
        told = "D_pooled]" if width is None else f"{width}], as wide as the model's pooled_projection_dim"
        raise ValueError(
            f"pooled_projections must have the shape [{len(points)}, {told}; got {list(pooled_projections.shape)}"
        )
    with onloaded(model):
        return velocity_of_points(model, points, timestep=timestep, pooled_projections=pooled_projections)


def point_path(transformer: nn.Module) -> PointAdapter:
    """Return a model's point path.

    Raises:
        ValueError: if it has none.
    """
    return point_layer(unwrap(transformer)).path


def generating_path(transformer: nn.Module) -> PointAdapter:
    """Return a model's point path, if it can generate now.

    Raises:
        ValueError: if there is none, it was made with `generate=False`, or its adapter is switched off or at scale 0.
    """
    path = point_path(transformer)
    if path.head is None:
        raise ValueError("this point path was made with generate=False, so it generates no clouds")
    if not path.acts:
        raise ValueError(
            "the adapter with the point path is switched off or at scale 0, so it generates no clouds; call "
            "mmpreproj.enable(model) and mmpreproj.set_scale(model, 1.0) first (a point path takes the mean of its "
            "blocks' scales)"
        )
    return path


def batch_clouds(clouds: Any, *, features: int = 0) -> tuple[Tensor, Tensor]:
    """Put clouds together that may have different numbers of points.

    Args:
        clouds: a cloud `[P, 3 + F]`, a batch `[B, P, 3 + F]`, or a list of clouds; tensors, arrays, or nested lists of
            numbers.
        features: number F.

    Returns:
        The clouds padded with zeros, float32 `[B, P, 3 + F]`, and truth values `[B, P]`, true at points.

    Raises:
        TypeError: if it is something else.
        ValueError: if a cloud is empty, of another width, partly masked, not finite, degenerate, or too far from the
            origin for float32; its place is named.
    """
    if isinstance(clouds, (Tensor, np.ndarray)):
        clouds = [clouds] if clouds.ndim == 2 else list(clouds)
    elif _is_table(clouds):
        clouds = [clouds]
    if not isinstance(clouds, Sequence) or isinstance(clouds, (str, bytes)) or not clouds:
        raise TypeError(f"clouds must be an array [P, {3 + features}], or a list of them; got {type(clouds).__name__}")
    arrays = []
    for place, cloud in enumerate(clouds):
        array = cloud.detach().float().cpu().numpy() if isinstance(cloud, Tensor) else _array(cloud, place)
        if array.dtype.kind in "fiu":  # before it is checked: what fp64 tells apart, fp32 may not
            with np.errstate(over="ignore"):
                array = array.astype(np.float32, order="C")
        check_cloud(array, features=features, name=f"point cloud {place}")
        arrays.append(torch.from_numpy(np.asarray(array)))
    lengths = torch.tensor([len(array) for array in arrays])
    padded = torch.nn.utils.rnn.pad_sequence(arrays, batch_first=True)  # [B, P, 3 + F]
    return padded, torch.arange(padded.shape[1]) < lengths[:, None]


def _is_table(value: Any) -> bool:
    """Tell whether it is a list of rows of numbers, as JSON has a cloud."""
    first = value[0] if isinstance(value, (list, tuple)) and value else None
    return isinstance(first, (list, tuple)) and bool(first) and isinstance(first[0], (int, float, np.number))


def _array(cloud: Any, place: int) -> np.ndarray:
    try:
        return np.asanyarray(cloud)  # masks are kept, to be seen
    except ValueError as error:
        raise ValueError(f"point cloud {place} is no table of numbers: {error}") from error
