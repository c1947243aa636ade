"""Rotary tables of a picture and its text, made from an adapter's settings; kept per size and device."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from mmpreproj.core.rotary import diagonal_angles, diagonal_start, grid_angles, temperature, text_angles
from mmpreproj.patching.positions import Positions

KEPT = 32  # sizes in one process: a table of 4,096 patches with heads of 64 takes 0.5 MiB


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


def rotary_tables(positions: Positions, grid: Grid, *, head_width: int, device: torch.device) -> RotaryTables:
    """Return the tables of a size, from the last sizes where it is among them.

    Args:
        positions: with `base_size` set where there is a scaling.
        grid: sizes of picture and text.
        head_width: D.
        device: where the tables are.
    """
    if torch.compiler.is_compiling():  # a graph computes its own, or it would be compiled anew for every size
        return _make(positions, grid, head_width, device)
    return _kept(positions, grid, head_width, device)


def _make(positions: Positions, grid: Grid, head_width: int, device: torch.device) -> RotaryTables:
    rows, columns, length = grid
    base = positions.base_size if positions.scaling != "none" else None
    image, text, factor = None, None, None
    if positions.image == "2d":
        image = grid_angles(
            rows,
            columns,
            width=head_width,
            theta=positions.theta,
            scaling=positions.scaling,
            base=base,
            device=device,
        )
        if positions.scaling == "yarn" and base is not None:
            factor = temperature(rows, columns, base=base, device=device)
    if positions.text == "1d":
        text = text_angles(length, width=head_width, theta=positions.theta, device=device)
    elif positions.text == "diagonal":
        start = diagonal_start(rows, columns, base=base)
        text = diagonal_angles(length, start=start, width=head_width, theta=positions.theta, device=device)
    return RotaryTables(image, text, factor)


@lru_cache(maxsize=KEPT)
def _kept(positions: Positions, grid: Grid, head_width: int, device: torch.device) -> RotaryTables:
    # Made as ordinary tensors, whoever asks first: a table made in inference mode could never be trained through.
    with torch.inference_mode(False), torch.no_grad():
        return _make(positions, grid, head_width, device)
