"""Set the strength of adapters, switch them off and on, thaw them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from numbers import Real
from typing import Any, Literal, cast

import torch
from torch import nn

from mmpreproj.patching.families import joint_blocks
from mmpreproj.patching.following import follow_attentions
from mmpreproj.patching.layer import AttentionAdapter
from mmpreproj.patching.lookup import (
    block_of,
    family_of,
    named_adapters,
    parameters,
    resolve_names,
    root_adapters,
    unwrap,
)
from mmpreproj.patching.offloading import check_values_present
from mmpreproj.patching.positions.life import settle_positions
from mmpreproj.patching.positions.settings import Positions

BlockScales = float | Sequence[float] | Mapping[int, float]
TAKES = "a number, a list with one number for each block of the model, or {block: number}"
LARGEST = torch.finfo(torch.float32).max


def set_scale(model: nn.Module, scale: BlockScales | Mapping[str, BlockScales]) -> None:
    """Set how strongly adapters act: 1 as trained, 0 not at all (the base, bit for bit).

    With several adapters `i` of scale `sᵢ` and increment `Δᵢ`: `x_tilde = x_hat + Σ sᵢ Δᵢ(x_hat)`, and what goes
    around attention is `Σ sᵢ Wᵢ (x_hat + Δᵢ(x_hat))`. Rotary angles are scaled and summed too; of absolute positions
    that an adapter removes, `1 - s` is left, s the mean of its blocks. A point path takes the mean of its blocks'
    scales too: where they cancel out, clouds change no picture, and none are generated. A compiled model is not
    compiled again. Scales are settings of the model; `save` does not write them.

    Args:
        model: a patched model.
        scale: a number for every adapter and block; a list with one number for each block of the model; `{block:
            number}`, which leaves other blocks as they are; or `{name: …}` with any of these per adapter.

    Raises:
        TypeError: if a scale is no number.
        ValueError: if it is not finite, a list has another length than the model has blocks, an adapter or block is
            not there, or group offloading keeps the model on disk. Nothing is changed then.
    """
    model = unwrap(model)
    check_values_present(model)
    by_name = isinstance(scale, Mapping) and any(isinstance(key, str) for key in scale)
    wanted: Any = scale if by_name else dict.fromkeys(resolve_names(model, None), scale)
    changes = [change for name, value in wanted.items() for change in _changes(model, name, value)]
    for adapter, factor in changes:
        adapter.scale.set(factor)
    for name in wanted:
        follow_attentions(model, name)


def scales(model: nn.Module) -> dict[str, dict[int, float]]:
    """Read the scale of every adapter in each block that it is on: `{name: {block: scale}}`.

    Raises:
        ValueError: if the model carries no adapter.
    """
    model = unwrap(model)
    return {
        name: {block_of(path): adapter.scale.factor for path, adapter in named_adapters(model, name)}
        for name in resolve_names(model, None)
    }


def disable(model: nn.Module, name: str | None = None) -> None:
    """Switch an adapter off, all of them for None: it is not computed, and scale and weights stay.

    A compiled model is compiled once for each combination of switches; to change strength without that, use
    `set_scale`.

    Raises:
        ValueError: if the model carries no adapter, or none of that name.
    """
    _switch(model, name, on=False)


def set_scaling(
    model: nn.Module,
    scaling: Literal["none", "linear", "ntk", "yarn"],
    *,
    base_size: int | None = None,
    name: str | None = None,
) -> None:
    """Choose what is done with rotary positions on pictures larger than those trained on; see `Positions`.

    Weights do not depend on it, so it may be chosen after training; `save` writes it.

    Args:
        model: a patched model.
        scaling: as in `Positions`.
        base_size: patches along the side of the pictures that were trained on; None keeps the adapter's, or takes the
            model's own where it has none.
        name: which adapter; None for all that have positions.

    Raises:
        ValueError: if a value is not valid, or no such adapter has positions. Nothing is changed then.
    """
    model = unwrap(model)
    positioned = [
        found
        for found in resolve_names(model, name)
        if any(adapter.config.positions is not None for _, adapter in named_adapters(model, found))
    ]
    if not positioned:
        raise ValueError("no adapter here has rotary positions; give PreProjConfig(positions=Positions(…)) to patch")
    settled = {}
    for found in positioned:
        config = next(adapter.config for _, adapter in named_adapters(model, found))
        positions = cast(Positions, config.positions)
        changed = replace(positions, scaling=scaling, base_size=base_size or positions.base_size)
        settled[found] = settle_positions(model, replace(config, positions=changed), family_of(model))
    for found, config in settled.items():
        for _, adapter in named_adapters(model, found):
            adapter.config = config
        for root in root_adapters(model, found):
            root.positions = config.positions


def enable(model: nn.Module, name: str | None = None) -> None:
    """Switch an adapter on again, all of them for None; see `disable`."""
    _switch(model, name, on=True)


def is_enabled(model: nn.Module, name: str | None = None) -> bool:
    """Tell whether an adapter, any there is for None, takes part: it is switched on, and in no `disabled` block."""
    model = unwrap(model)
    return any(
        adapter.takes_part for found in resolve_names(model, name) for _, adapter in named_adapters(model, found)
    )


@contextmanager
def disabled(model: nn.Module, name: str | None = None) -> Iterator[nn.Module]:
    """Switch an adapter off, all that there are for None, for the length of a `with` block.

    Blocks may be nested or overlap: an adapter takes part again when the last of them has ended. What is added inside
    the block takes part. A copy made inside stays off.

    Raises:
        ValueError: if the model carries no adapter, or none of that name.
    """
    bare = unwrap(model)
    names = resolve_names(bare, name)
    _suspend(bare, names, by=1)
    try:
        yield model
    finally:
        _suspend(bare, names, by=-1)


def thaw(model: nn.Module, name: str | None = None) -> None:
    """Make an adapter trainable again, all of them for None.

    PEFT freezes every parameter but its own when it adds a LoRA.

    Raises:
        ValueError: if the model carries no adapter, or none of that name.
    """
    for parameter in parameters(model, name):
        parameter.requires_grad_(True)


def _suspend(model: nn.Module, names: tuple[str, ...], *, by: int) -> None:
    for name in names:
        for _, adapter in named_adapters(model, name):
            adapter.suspended = max(0, adapter.suspended + by)
        follow_attentions(model, name)


def _switch(model: nn.Module, name: str | None, *, on: bool) -> None:
    model = unwrap(model)
    for found in resolve_names(model, name):
        for _, adapter in named_adapters(model, found):
            adapter.enabled = on
        follow_attentions(model, found)


def _changes(model: nn.Module, name: str, scale: Any) -> list[tuple[AttentionAdapter, float]]:
    """Pair each part of an adapter whose scale is to change with its new scale."""
    (name,) = resolve_names(model, name)
    members = [(block_of(path), adapter) for path, adapter in named_adapters(model, name)]
    by_block = _by_block(scale, name, depth=len(joint_blocks(model, family_of(model))))
    if isinstance(scale, Mapping):
        there = {block for block, _ in members}
        if absent := sorted(set(by_block) - there):
            raise ValueError(f"scale of {name!r}: the adapter is not on blocks {absent}; it is on {sorted(there)}")
    return [(adapter, by_block[block]) for block, adapter in members if block in by_block]


def _by_block(scale: Any, name: str, *, depth: int) -> dict[int, float]:
    if isinstance(scale, Mapping):
        for block in scale:
            if isinstance(block, bool) or not isinstance(block, int):
                raise TypeError(f"scale of {name!r} must be {TAKES}; got the key {block!r}")
        return {block: _number(value, name) for block, value in scale.items()}
    if isinstance(scale, Sequence) and not isinstance(scale, (str, bytes)):
        if len(scale) != depth:
            raise ValueError(f"scale of {name!r}: {len(scale)} numbers for a model of {depth} blocks; give one each")
        return {block: _number(value, name) for block, value in enumerate(scale)}
    return dict.fromkeys(range(depth), _number(scale, name))


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"scale of {name!r} must be {TAKES}; got {value!r} ({type(value).__name__})")
    if not -LARGEST <= cast(Any, value) <= LARGEST:  # NaN neither
        raise ValueError(f"scale of {name!r} must be finite in float32; got {value!r}")
    return float(value)
