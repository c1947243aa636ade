"""Rotary positions: angles of text and image tokens, what becomes of them on larger grids, and the rotation.

A head of width D has D/2 pairs of neighbouring channels (2i, 2i + 1), as in FLUX and Qwen-Image. A token at position p
turns pair i by `p · fᵢ` radians, so the product of a query and a key depends on the difference of their positions.
Every table here is `[N, D/2]`, in radians and float32.

Source: arXiv 2104.09864 (RoPE), section 3.2; scalings as stated at `axis_angles`.
"""

from __future__ import annotations

import math
from typing import Literal, cast

import torch
from torch import Tensor

Scaling = Literal["none", "linear", "ntk", "yarn"]
SLOW_TURNS, FAST_TURNS = 1.0, 32.0  # YaRN's α and β: turns over the base's positions


def frequencies(width: int, *, theta: float, device: torch.device | None = None) -> Tensor:
    """Return `fᵢ = theta^(-2i / width)` `[width/2]`, in radians per position."""
    return theta ** (-torch.arange(0, width, 2, dtype=torch.float32, device=device) / width)


def text_angles(length: int, *, width: int, theta: float, device: torch.device | None = None) -> Tensor:
    """Return the angles `[L, D/2]` of L text tokens at positions 0, 1, … on one axis, for heads of width D."""
    places = torch.arange(length, dtype=torch.float32, device=device)
    return places[:, None] * frequencies(width, theta=theta, device=device)  # [L, D/2]


def diagonal_angles(
    length: int, *, start: int, width: int, theta: float, device: torch.device | None = None
) -> Tensor:
    """Return the angles `[L, D/2]` of text tokens that continue an image's diagonal: (start, start), (start + 1, …).

    Source: Qwen-Image (arXiv 2508.02324), MSRoPE, without its axis of frames.
    """
    places = start + torch.arange(length, dtype=torch.float32, device=device)
    axis = places[:, None] * frequencies(width // 2, theta=theta, device=device)  # [L, D/4]
    return torch.cat([axis, axis], dim=-1)  # [L, D/2]


def diagonal_start(rows: int, columns: int, *, base: int | None = None) -> int:
    """Return the first position after an image's diagonal; a grid beyond the base counts as the base."""
    if base is not None:
        rows, columns = min(rows, base), min(columns, base)
    return max(rows // 2, columns // 2)


def grid_angles(
    rows: int,
    columns: int,
    *,
    width: int,
    theta: float,
    scaling: Scaling = "none",
    base: int | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """Return the angles `[rows · columns, D/2]` of a grid of patches, row by row, for heads of width D.

    The first D/4 pairs turn by the row, the others by the column; see `axis_angles`.
    """
    by_row = axis_angles(rows, width=width // 2, theta=theta, scaling=scaling, base=base, device=device)  # [R, D/4]
    by_column = axis_angles(columns, width=width // 2, theta=theta, scaling=scaling, base=base, device=device)
    shape = (rows, columns, by_row.shape[-1])
    grid = torch.cat([by_row[:, None].expand(shape), by_column[None].expand(shape)], dim=-1)  # [R, C, D/2]
    return grid.flatten(0, 1)  # [R · C, D/2]


def axis_angles(
    count: int,
    *,
    width: int,
    theta: float,
    scaling: Scaling = "none",
    base: int | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """Return the angles `[count, width/2]` of the patches along one axis.

    Positions are in patches from the centre, which is patch `ceil(count / 2)`. With a scaling, an axis of more than
    `base` patches is brought back by the factor `s = (count - 1) / (base - 1)`, and its centre lies `s · ceil(base/2)`
    patches from its first patch; at the base's size and below every scaling is `"none"`, bit for bit.

    - `"linear"`: positions are divided by s, so every angle lies within those of the base.
    - `"ntk"`: `theta` becomes `theta · s^(width / (width - 2))`; the fastest frequency stays, the slowest is divided
      by s, and so lies within the base's angles.
    - `"yarn"`: frequencies of less than one turn over the base are divided by s, those of more than 32 stay, in
      between a ramp; see also `temperature`. The bounds are the paper's, for texts: on a base of 64 patches the
      fastest frequency makes 10 turns and is divided by s for 70 %, so that this lies close to `"linear"`.

    Source: linear, arXiv 2306.15595, there with `s = count / base`, by which the last patch would lie beyond the
    base's last; ntk and yarn, arXiv 2309.00071, sections 3.1 and 3.2.

    Raises:
        ValueError: if a scaling is asked for without a base of at least 2, or `"ntk"` with a width below 4.
    """
    speeds = frequencies(width, theta=theta, device=device)  # [width/2]
    if scaling == "ntk" and width < 4:
        raise ValueError(f"scaling 'ntk' needs a width of at least 4 channels along an axis; got {width}")
    if scaling == "none":
        stretch, middle = torch.ones((), dtype=torch.float32, device=device), (count + 1) // 2
    else:
        stretch, base = _stretch(count, base, device), cast(int, base)
        middle = (min(count, base) + 1) // 2
    places = torch.arange(count, dtype=torch.float32, device=device) - stretch * middle  # [count]
    if scaling == "linear":
        places = places / stretch
    elif scaling == "ntk":
        index = torch.arange(0, width, 2, dtype=torch.float32, device=device)
        speeds = speeds * stretch ** (-index / (width - 2))
    elif scaling == "yarn":
        turns = cast(int, base) * speeds / (2 * math.pi)
        stays = ((turns - SLOW_TURNS) / (FAST_TURNS - SLOW_TURNS)).clamp(0, 1)
        speeds = torch.lerp(speeds / stretch, speeds, stays)
    return places[:, None] * speeds  # [count, width/2]


def temperature(rows: int, columns: int, *, base: int | None, device: torch.device | None = None) -> Tensor:
    """Return YaRN's factor `[]` on an image's queries and keys, `0.1 · ln s + 1`, s the geometric mean of both axes'.

    Source: arXiv 2309.00071, section 3.4.
    """
    return 0.1 * torch.log(_stretch(rows, base, device) * _stretch(columns, base, device)) / 2 + 1


def rotate(tokens: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs of queries or keys `[B, N, H, D]` by angles given as cosine and sine `[N, H or 1, D/2]`.

    Computed in float32, or in the tokens' float64, and given back in their dtype.
    """
    wide = torch.promote_types(tokens.dtype, torch.float32)
    pairs = tokens.to(wide).unflatten(-1, (-1, 2))  # [B, N, H, D/2, 2]
    cos, sin = cos.to(wide), sin.to(wide)
    if torch.compiler.is_compiling():  # the compiler fuses real arithmetic, and has no code for complex numbers
        even, odd = pairs.unbind(-1)
        turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1)
    else:
        turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * torch.complex(cos, sin))
    return turned.flatten(-2).to(tokens.dtype)  # [B, N, H, D]


def _stretch(count: int, base: int | None, device: torch.device | None) -> Tensor:
    """Return how many times the base an axis spans, from first patch to last; at least 1."""
    if base is None or base < 2:
        raise ValueError(f"a scaling needs a base of at least 2 patches along an axis; got {base}")
    return torch.full((), (count - 1) / (base - 1), dtype=torch.float32, device=device).clamp(min=1)
