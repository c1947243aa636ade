"""A cloud's tokens to one vector, in which their order and number have no say."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmpreproj.core.linear_map import LinearMap


class PointPooling(nn.Module):
    """Compute `W · [mean, max]` over a cloud's normed tokens; W starts at zero, so at first every cloud gives 0.

    Args:
        width: token width D.
        device: where the weight is made.
        dtype: dtype of the weight.

    Source: mean and max pooling over sets, arXiv 1612.00593 (PointNet), section 4.2; the zero start is ours.
    """

    def __init__(self, width: int, *, device: torch.device | None = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.map = LinearMap(2 * width, width, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight to zero."""
        self.map.reset_parameters(0)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Pool tokens `[B, P, D]` where the mask `[B, P]` is true into `[B, D]`; zeros for a cloud without points."""
        wide = tokens.to(torch.promote_types(tokens.dtype, torch.float32))
        kept, there = mask.unsqueeze(-1), mask.any(dim=1, keepdim=True)  # [B, P, 1], [B, 1]
        normed = F.layer_norm(wide, wide.shape[-1:])
        mean = normed.masked_fill(~kept, 0.0).sum(dim=1) / kept.sum(dim=1).clamp(min=1)  # [B, D]
        largest = normed.masked_fill(~kept, -torch.inf).amax(dim=1).masked_fill(~there, 0.0)  # [B, D]
        pooled = self.map(torch.cat([mean, largest], dim=-1))  # [B, D]
        return pooled.to(tokens.dtype).masked_fill(~there, 0.0)
