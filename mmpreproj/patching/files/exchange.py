"""Bring the values of a file into an adapter: one that was just built, or one that is on a model already."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from mmpreproj.patching.files.format import WEIGHTS_NAME, SavedAdapter
from mmpreproj.patching.following import follow_attentions
from mmpreproj.patching.hooks import CHILD
from mmpreproj.patching.layer import AttentionAdapter
from mmpreproj.patching.lifecycle import BuiltAdapter, install, unpatch
from mmpreproj.patching.lookup import block_of, named_adapters, parameters
from mmpreproj.patching.points.hooks import path_of
from mmpreproj.patching.points.path import POINT_CHILD


def fill(built: BuiltAdapter, saved: SavedAdapter, weights: dict[str, Tensor], folder: Path) -> None:
    """Give a built adapter the values of a file.

    Raises:
        ValueError: if keys, shapes or values do not fit; the built adapter is of no use then.
    """
    targets = dict(built.named_parameters())
    missing, surplus = sorted(set(targets) - set(weights)), sorted(set(weights) - set(targets))
    if missing or surplus:
        raise ValueError(
            f"{folder / WEIGHTS_NAME} does not fit its config: {len(set(targets) & set(weights))} of {len(targets)} "
            f"keys match; missing {missing[:3]}, not expected {surplus[:3]}"
        )
    for key, parameter in targets.items():
        found, expected = list(weights[key].shape), list(parameter.shape)
        if found != expected:
            raise ValueError(f"{folder / WEIGHTS_NAME}: {key} has shape {found}, expected {expected}")
        if not torch.isfinite(weights[key]).all():
            raise ValueError(f"{folder / WEIGHTS_NAME}: {key} holds NaN or infinite values; the file is of no use")
        if parameter.is_meta:
            raise ValueError(f"{key} of the model is on the meta device; load the base's weights before the adapter's")
        _check_range(f"{folder / WEIGHTS_NAME}: {key}", weights[key], parameter.dtype)
        with torch.no_grad():
            parameter.copy_(weights[key])
    for path, (_, _, adapter) in built.sites.items():
        adapter.initial_norms = saved.initial_norms.get(path, adapter.initial_norms)
        adapter.text_length = saved.max_sequence_length


def _check_range(what: str, weight: Tensor, dtype: torch.dtype) -> None:
    if not torch.isfinite(weight.to(dtype)).all():
        raise ValueError(
            f"{what} holds values up to {float(weight.abs().max()):.3g}, beyond the range of the model's {dtype}; "
            "load it onto a model in bfloat16 or float32"
        )


def copy_in_place(model: nn.Module, built: BuiltAdapter, weights: dict[str, Tensor], *, name: str) -> bool:
    """Give the adapter of that name the values of a file, if the one built from it has the same shape; tell whether.

    The values come from the file, not from what was built: an adapter in training may be finer than its base's dtype.

    Raises:
        ValueError: if a value is beyond the range of the adapter's dtype; nothing is changed then.
    """
    present = dict(named_adapters(model, name))
    fresh = {path: adapter for path, (_, _, adapter) in built.sites.items()}
    if present.keys() != fresh.keys() or not all(_alike(present[path], fresh[path]) for path in present):
        return False
    pairs = {
        f"{path}.{CHILD}.{key}": target for path, old in present.items() for key, target in old.named_parameters()
    }
    points = path_of(model, name)
    if points is not None:
        pairs |= {f"{POINT_CHILD}.{key}": target for key, target in points.named_parameters()}
    for key, target in pairs.items():
        _check_range(key, weights[key], target.dtype)
    with torch.no_grad():
        for key, target in pairs.items():
            target.copy_(weights[key])
    for path, old in present.items():
        old.config, old.initial_norms = fresh[path].config, fresh[path].initial_norms
        old.text_length = fresh[path].text_length
    return True


def _alike(old: AttentionAdapter, new: AttentionAdapter) -> bool:
    def shape(adapter: AttentionAdapter) -> tuple:
        sizes = tuple((key, parameter.shape, parameter.is_meta) for key, parameter in adapter.named_parameters())
        config = adapter.config
        return sizes, adapter.skipped, adapter.keys, config.positions, config.mask_padding, config.points

    return shape(old) == shape(new)


def replace_modules(model: nn.Module, built: BuiltAdapter, *, name: str) -> None:
    """Put a built adapter in the place of the one that has its name."""
    flags = [parameter.requires_grad for parameter in parameters(model, name)]
    trained = any(flags) or not flags
    old = {block_of(path): adapter for path, adapter in named_adapters(model, name)}
    fallback = next(iter(old.values()))
    for path, (_, _, adapter) in built.sites.items():
        source = old.get(block_of(path), fallback)
        adapter.scale.set(source.scale.factor)
        adapter.enabled, adapter.suspended = source.enabled, source.suspended
        adapter.requires_grad_(trained)
    if built.points is not None:
        built.points.requires_grad_(trained)
    unpatch(model, name)
    install(model, built, name=name)
    follow_attentions(model, name)
