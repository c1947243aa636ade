"""Rotary tables of a picture and its text, made from an adapter's settings; kept per size and device."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from mmpreproj.core.rotary import diagonal_angles, diagonal_start, grid_angles, temperature, text_angles
from mmpreproj.patching.positions.settings import Positions

KEPT = 64  # tables in one process: one of 4,096 patches with heads of 64 takes 0.5 MiB


class Grid(NamedTuple):
    """Rows and columns of a picture in patches, and the number of text tokens."""

    rows: int
    columns: int
    text_length: int


class RotaryTables(NamedTuple):
    """Angles of each stream's tokens `[N, D/2]`, in radians and float32; None for a stream without positions.

    `temperature` `[]` is YaRN's factor on the image's queries and keys, None with any other scaling.
    """

    image: Tensor | None
    text: Tensor | None
    temperature: Tensor | None

    def packed(self) -> RotaryTables:
        """Return the tables as whole numbers of the same bits, for the way through a model's arguments.

        FSDP's mixed precision casts every floating tensor that a block is called with.
        """
        return RotaryTables(*(part if part is None else part.view(torch.int32) for part in self))

    def unpacked(self) -> RotaryTables:
        """Return packed tables as float32 again."""
        return RotaryTables(*(part if part is None else part.view(torch.float32) for part in self))


def rotary_tables(positions: Positions, grid: Grid, *, head_width: int, device: torch.device) -> RotaryTables:
    """Return the tables of a size; those made last are kept.

    Args:
        positions: with `base_size` set where there is a scaling.
        grid: sizes of picture and text.
        head_width: D.
        device: where the tables are.
    """
    # A graph computes its own, or it would be compiled anew for every size; and what a dispatch mode such as
    # FakeTensorMode makes must not be kept for those outside of it.
    alone = torch.compiler.is_compiling() or _get_current_dispatch_mode() is not None
    make = _made if alone else _kept
    rows, columns, length = grid
    base = positions.base_size if positions.scaling != "none" else None
    heads: dict[str, Any] = {"width": head_width, "theta": positions.theta, "device": device}
    image, text, factor = None, None, None
    if positions.image == "2d":
        image = make(grid_angles, rows, columns, scaling=positions.scaling, base=base, **heads)
    if positions.text == "1d":
        text = make(text_angles, length, **heads)
    elif positions.text == "diagonal":
        text = make(diagonal_angles, length, start=diagonal_start(rows, columns, base=base), **heads)
    if positions.scaling == "yarn":
        factor = make(temperature, rows, columns, base=base, device=device)
    return RotaryTables(image, text, factor)


def _made(make: Callable[..., Tensor], *sizes: int, **settings: Any) -> Tensor:
    return make(*sizes, **settings)


@lru_cache(maxsize=KEPT)
def _kept(make: Callable[..., Tensor], *sizes: int, **settings: Any) -> Tensor:
    # Made as an ordinary tensor, whoever asks first: one made in inference mode could never be trained through.
    with torch.inference_mode(False), torch.no_grad():
        return make(*sizes, **settings)
