"""Clouds of any size and place into the unit ball."""

import torch
from torch import Tensor


def unit_ball(points: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Move and scale each cloud so that its bounding box is centred at 0 and its farthest point has length 1.

    Args:
        points: `[B, P, 3 + F]`, coordinates first; further channels are left as they are.
        mask: truth values `[B, P]`, false at padding, which has no say and comes back as zeros.

    Returns:
        The points `[B, P, 3 + F]`, what was the centre `[B, 3]`, and the length of the farthest point `[B]`, in the
        units of the input. A cloud without extent is moved and not scaled; one without points has centre 0.
    """
    kept, there = mask.unsqueeze(-1), mask.any(dim=1)  # [B, P, 1], [B]
    wide = points[..., :3].to(torch.promote_types(points.dtype, torch.float32))
    lowest = wide.masked_fill(~kept, torch.inf).amin(dim=1) / 2  # [B, 3]; halved first, or large sums overflow
    highest = wide.masked_fill(~kept, -torch.inf).amax(dim=1) / 2
    centre = torch.where(there.unsqueeze(-1), lowest + highest, 0.0)  # [B, 3]
    extent = torch.where(there, (highest - lowest).amax(dim=1), 0.0)  # [B], half the longest side of the box
    places = (wide - centre.unsqueeze(1)).masked_fill(~kept, 0.0)  # [B, P, 3]
    places = places / torch.where(extent > 0, extent, 1.0).view(-1, 1, 1)  # so that squares keep within range
    length = torch.linalg.vector_norm(places, dim=-1).amax(dim=1)  # [B], 1 to √3, or 0
    places = places / torch.where(length > 0, length, 1.0).view(-1, 1, 1)
    features = points[..., 3:].masked_fill(~kept, 0.0)
    moved = torch.cat([places.to(points.dtype), features], dim=-1)
    return moved, centre.to(points.dtype), (length * extent).to(points.dtype)
