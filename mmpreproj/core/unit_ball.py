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
    kept = mask.unsqueeze(-1)  # [B, P, 1]
    places, others = points[..., :3], points[..., 3:]
    lowest = places.masked_fill(~kept, torch.inf).amin(dim=1)  # [B, 3]
    highest = places.masked_fill(~kept, -torch.inf).amax(dim=1)
    centre = torch.where(mask.any(dim=1, keepdim=True), (lowest + highest) / 2, 0.0)  # [B, 3]
    places = (places - centre.unsqueeze(1)).masked_fill(~kept, 0.0)  # [B, P, 3]
    radius = torch.linalg.vector_norm(places, dim=-1).amax(dim=1)  # [B]
    factor = torch.where(radius > 0, 1 / radius.clamp(min=torch.finfo(radius.dtype).tiny), 1.0)
    places = places * factor.view(-1, 1, 1)
    return torch.cat([places, others.masked_fill(~kept, 0.0)], dim=-1), centre, radius
