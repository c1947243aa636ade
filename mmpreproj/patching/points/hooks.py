"""Clouds into a model's own call: hooks on the model and on what makes its conditioning.

Plain module-level functions that keep nothing between calls. The model's pre-hook takes the clouds out of its
attention kwargs and sends them along with the pooled text; where that text is read, a pre-hook unpacks them, and a
hook adds what the points say to the conditioning, which then reaches every block.

The path is the model's child. What makes the conditioning has hooks alone, so that others may copy it (PEFT) or read
its weights (ControlNets); each call names the model that it came through.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from mmpreproj.patching.families import Family, PointSeam
from mmpreproj.patching.hooks import POINT_CLOUD, POINT_MASK, PROMPT_CLOUDS, remove_hook, taken_off
from mmpreproj.patching.lookup import model_parts
from mmpreproj.patching.points.path import POINT_CHILD, PointAdapter, PointCall, PointLayer, walk


class PointKeywords(dict):
    """Keyword arguments of a call to the conditioning, and the clouds that go into it."""

    call: PointCall | None = None


def bring_points(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Take clouds out of a model's attention kwargs and send them to its conditioning with the pooled text."""
    layer = point_layer(model)
    seam = layer.seam
    given = seam.attention_kwargs.read(args, kwargs)
    if not given or not any(key in given for key in (POINT_CLOUD, POINT_MASK, PROMPT_CLOUDS)):
        return None
    others = dict(given)
    cloud, mask = others.pop(POINT_CLOUD, None), others.pop(POINT_MASK, None)
    prompts = others.pop(PROMPT_CLOUDS, None)
    args, kwargs = seam.attention_kwargs.replace(others or None, args, kwargs)
    latents, pooled = seam.latents.read(args, kwargs), seam.pooled.read(args, kwargs)
    if not layer.path.takes_part or not (isinstance(latents, Tensor) and isinstance(pooled, Tensor)):
        return args, kwargs
    if cloud is None and prompts is not None:
        cloud, mask = _beside_negatives(*prompts, batch=len(latents))
    if cloud is None:
        if mask is not None:
            raise ValueError(f"{POINT_MASK} was given without {POINT_CLOUD}")
        return args, kwargs
    cloud, mask = check_clouds(cloud, mask, channels=layer.path.channels, batch=len(latents))
    if layer.path.pooling is None:
        raise ValueError("this point path was made with condition=False, so clouds cannot condition pictures")
    call = PointCall(pooled, cloud.to(latents.device), mask.to(latents.device), model)
    return seam.pooled.replace(call, args, kwargs)


def unpack_points(
    embedder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Give the conditioning the pooled text it expects, and keep the clouds for the hook behind it."""
    call = next((value for value in (*args, *kwargs.values()) if isinstance(value, PointCall)), None)
    if call is None:
        return None
    keywords = PointKeywords({key: call.pooled if value is call else value for key, value in kwargs.items()})
    keywords.call = call
    return tuple(call.pooled if value is call else value for value in args), keywords


def add_points(embedder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], temb: Tensor) -> Tensor:
    """Send the clouds through the model's blocks, and add what they say to the conditioning `[B, D]`."""
    call = getattr(kwargs, "call", None)
    if call is None:
        return temb
    layer = point_layer(call.model)
    points, mask = call.points.to(temb.device), call.mask.to(temb.device)
    tokens = walk(call.model, layer.family, layer.path.embed_cloud(points, mask).to(temb.dtype), temb)  # [B, P, D]
    return layer.path.condition(tokens, mask, temb)


def velocity_of_points(model: nn.Module, points: Tensor, *, timestep: Tensor, pooled_projections: Tensor) -> Tensor:
    """Compute the velocity of noisy points `[B, P, 3 + F]`; see `mmpreproj.points.point_velocity`."""
    layer = point_layer(model)
    temb = getattr(model, layer.seam.conditioning)(timestep, pooled_projections)  # [B, D]
    tokens = walk(model, layer.family, layer.path.embed(points).to(temb.dtype), temb)  # [B, P, D]
    return layer.path.velocity(tokens, temb).to(points.dtype)


def check_clouds(cloud: Any, mask: Any, *, channels: int, batch: int) -> tuple[Tensor, Tensor]:
    """Check clouds `[B, P, 3 + F]` and the mask `[B, P]` of their points, all true where none is given.

    Values are looked at too, but for a compiler's sake not inside a graph.

    Raises:
        TypeError: if one is no tensor of its kind.
        ValueError: if a shape is wrong, or a point is not finite, or all points of a cloud are one.
    """
    if not isinstance(cloud, Tensor) or not cloud.is_floating_point():
        kind = cloud.dtype if isinstance(cloud, Tensor) else type(cloud).__name__
        raise TypeError(f"{POINT_CLOUD} must be a floating-point tensor [B, P, {channels}]; got {kind}")
    if cloud.ndim != 3 or cloud.shape[-1] != channels or cloud.shape[1] == 0:
        raise ValueError(
            f"{POINT_CLOUD} must have the shape [B, P, {channels}] with at least one point: 3 coordinates and "
            f"{channels - 3} features, as the point path was made for; got {list(cloud.shape)}"
        )
    if len(cloud) != batch:
        raise ValueError(
            f"{POINT_CLOUD} has {len(cloud)} clouds for a batch of {batch}. With guidance a pipeline puts the "
            f"negative prompts before the prompts: give clouds in that order, with {POINT_MASK} false for those "
            "without, or pass point_cloud=… to PreProjSD3Pipeline"
        )
    if mask is None:
        mask = torch.ones(cloud.shape[:2], dtype=torch.bool, device=cloud.device)
    if not isinstance(mask, Tensor) or mask.is_floating_point() or mask.shape != cloud.shape[:2]:
        found = f"{mask.dtype} {list(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(
            f"{POINT_MASK} must be truth values {list(cloud.shape[:2])}, true at points and false at padding; "
            f"got {found}"
        )
    mask = mask.to(cloud.device) != 0
    if not torch.compiler.is_compiling():
        _check_values(cloud, mask)
    return cloud, mask


def _check_values(cloud: Tensor, mask: Tensor) -> None:
    kept = mask.unsqueeze(-1)
    bad = (~torch.isfinite(cloud) & kept).flatten(1).any(dim=1)
    if bad.any():
        raise ValueError(
            f"{POINT_CLOUD} {int(bad.nonzero()[0])} has NaN or infinite values; remove those points first"
        )
    places = cloud[..., :3]
    highest = places.masked_fill(~kept, -torch.inf).amax(dim=1)
    lowest = places.masked_fill(~kept, torch.inf).amin(dim=1)
    flat = mask.any(dim=1) & (highest == lowest).all(dim=1)
    if flat.any():
        raise ValueError(
            f"{POINT_CLOUD} {int(flat.nonzero()[0])} is degenerate: all its points are one and the same, so it has no "
            "shape; give at least two different points, or false in all of its mask for no cloud"
        )


def _beside_negatives(cloud: Tensor, mask: Tensor, *, batch: int) -> tuple[Tensor, Tensor]:
    """Put clouds of prompts in place: behind as many negative prompts without, where a pipeline calls with both."""
    if batch != 2 * len(cloud):
        return cloud, mask
    return torch.cat([cloud, cloud]), torch.cat([torch.zeros_like(mask), mask])


def attach_points(model: nn.Module, layer: PointLayer) -> None:
    """Make `layer` a model's child, and register the hooks on it and on what makes its conditioning."""
    embedder = conditioning(model, layer.family)
    model.add_module(POINT_CHILD, layer)
    embedder.register_forward_pre_hook(unpack_points, with_kwargs=True)
    embedder.register_forward_hook(add_points, with_kwargs=True)
    model.register_forward_pre_hook(bring_points, with_kwargs=True)


def detach_points(model: nn.Module) -> None:
    """Take layer and hooks off a model, or off every one inside a module."""
    for part in list(model.modules()):  # PEFT may have copied what makes the conditioning
        remove_hook(part._forward_pre_hooks, part._forward_pre_hooks_with_kwargs, bring_points)
        remove_hook(part._forward_pre_hooks, part._forward_pre_hooks_with_kwargs, unpack_points)
        remove_hook(part._forward_hooks, part._forward_hooks_with_kwargs, add_points)
        if POINT_CHILD in part._modules:
            del part._modules[POINT_CHILD]


@contextmanager
def without_points(model: nn.Module) -> Iterator[None]:
    """Take the point path off a model for a `with` block, for instance to save the base alone."""
    layers = [(part, part._modules[POINT_CHILD]) for part in model.modules() if POINT_CHILD in part._modules]
    put_back = taken_off(list(model.modules()), lambda: detach_points(model))
    try:
        yield
    finally:
        for part, layer in layers:
            part.add_module(POINT_CHILD, layer)
        put_back()


def brings_points(model: nn.Module) -> bool:
    """Tell whether a module takes clouds."""
    return bring_points in model._forward_pre_hooks.values()


def find_point_layer(model: nn.Module) -> PointLayer | None:
    """Return a model's point layer, None if it has none."""
    child = model._modules[POINT_CHILD] if POINT_CHILD in model._modules else None
    layer = getattr(child, "_fsdp_wrapped_module", child)  # of FSDP's first version, which may wrap any child
    return layer if isinstance(layer, PointLayer) else None


def point_layer(model: nn.Module) -> PointLayer:
    """Return the layer of a model that has a point path.

    Raises:
        ValueError: if it has none.
    """
    layer = find_point_layer(model)
    if layer is None:
        raise ValueError(
            f"{type(model).__name__} has no point path; add one with mmpreproj.points.add_point_path(transformer, "
            "PointPathConfig(…)), or patch it with PreProjConfig(points=PointPathConfig(…))"
        )
    return layer


def are_points_attached(model: nn.Module, family: Family) -> bool:
    """Tell whether a model has a point path with all its hooks."""
    parts = list(conditioning(model, family).modules())
    return (
        find_point_layer(model) is not None
        and brings_points(model)
        and any(unpack_points in part._forward_pre_hooks.values() for part in parts)
        and any(add_points in part._forward_hooks.values() for part in parts)
    )


def path_of(model: nn.Module, name: str) -> PointAdapter | None:
    """Return an adapter's point path, None if it has none."""
    return next((part for part in model_parts(model, name) if isinstance(part, PointAdapter)), None)


def conditioning(model: nn.Module, family: Family) -> nn.Module:
    """Return what makes a model's conditioning."""
    return cast(nn.Module, getattr(model, cast(PointSeam, family.points).conditioning))
