"""The skip profile: how far each block's weights, and its positions, have moved from their start."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from mmpreproj.patching.lookup import named_adapters, resolve_name, split_path, unwrap
from mmpreproj.patching.offloading import check_values_present


@dataclass(frozen=True)
class ProfileRow:
    """Frobenius norms of one set of weights; None where there is no such module or its weights are on `meta`.

    Attributes:
        block: index of the block.
        attention: name of the attention module in it (`attn`, `attn2`).
        weights: `"shared"`, or the stream that the weights belong to.
        skip: `‖W_skip‖_F` now.
        skip_initial: `‖W_skip‖_F` at the start.
        down: `‖W_down‖_F` now.
        down_initial: `‖W_down‖_F` at the start.
    """

    block: int
    attention: str
    weights: str
    skip: float | None
    skip_initial: float | None
    down: float | None
    down_initial: float | None


@dataclass(frozen=True)
class GainRow:
    """How far one stream's learned positions have grown in one attention.

    Attributes:
        block: index of the block.
        attention: name of the attention module in it.
        stream: `"image"` or `"text"`.
        gain: mean over heads of the gain's absolute value, at first 0; None while it is on `meta`.
    """

    block: int
    attention: str
    stream: str
    gain: float | None


@dataclass(frozen=True)
class Profile:
    """A model's skip profile, in the order of its blocks; `str(profile)` is a table.

    Attributes:
        rows: norms of the pre-projection and the content skip.
        gains: the rotary gains; none where positions are not learned.
    """

    rows: tuple[ProfileRow, ...]
    gains: tuple[GainRow, ...] = ()

    def __iter__(self) -> Iterator[ProfileRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        lines = []
        if self.rows or not self.gains:
            lines = [f"{'block':>5} {'attention':>9} {'weights':>8} {'‖W_skip‖':>20} {'‖W_down‖':>20}"]
        for row in self.rows:
            skip, down = format_norm(row.skip, row.skip_initial), format_norm(row.down, row.down_initial)
            lines.append(f"{row.block:>5} {row.attention:>9} {row.weights:>8} {skip:>20} {down:>20}")
        if self.gains:
            lines.append(f"{'block':>5} {'attention':>9} {'stream':>8} {'mean |gain|':>20}")
        for gain in self.gains:
            lines.append(f"{gain.block:>5} {gain.attention:>9} {gain.stream:>8} {format_norm(gain.gain, None):>20}")
        return "\n".join(lines)


def profile(model: nn.Module, *, name: str | None = None) -> Profile:
    """Measure, per block, the norms of `W_skip` and `W_down` beside their initial values, and the rotary gains.

    Raises:
        ValueError: if the model carries no adapter, none of that name, or group offloading keeps it on disk.

    Source: arXiv 2604.10791 reads the skip's norm per layer in the same way.
    """
    model = unwrap(model)
    name = resolve_name(model, name)
    check_values_present(model)
    rows, gains = [], []
    for path, adapter in named_adapters(model, name):
        rows += rows_from_norms(path, adapter.norms(), adapter.initial_norms)
        gains += rows_from_gains(path, adapter.gains())
    return Profile(tuple(rows), tuple(gains))


def rows_from_norms(path: str, norms: dict, initial: dict) -> list[ProfileRow]:
    """Build the rows of one attention module from its norms now and at the start."""
    block, attention = split_path(path)
    return [
        ProfileRow(
            block=block,
            attention=attention,
            weights=weights,
            skip=norms["skip"].get(weights),
            skip_initial=initial["skip"].get(weights),
            down=norms["down"].get(weights),
            down_initial=initial["down"].get(weights),
        )
        for weights in sorted({*norms["skip"], *norms["down"]})
    ]


def rows_from_gains(path: str, gains: dict[str, float | None]) -> list[GainRow]:
    """Build the rows of one attention module from the mean gain of each stream."""
    block, attention = split_path(path)
    return [GainRow(block, attention, stream, gain) for stream, gain in sorted(gains.items())]


def format_norm(now: float | None, initial: float | None) -> str:
    """Write a norm and where it began, e.g. `0.3012 (from 0.0769)`."""
    if now is None:
        return "-"
    return f"{now:.4f}" if initial is None else f"{now:.4f} (from {initial:.4f})"
