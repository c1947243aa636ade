"""Tokens back to points: the velocity of each."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmpreproj.core.linear_map import LinearMap


class PointHead(nn.Module):
    """Compute `W · ((1 + scale) ⊙ LN(token) + shift)`, with scale and shift from the conditioning; W starts at zero.

    Args:
        width: token width D.
        features: channels F of a point beside its coordinates.
        device: where the weights are made.
        dtype: dtype of the weights.

    Source: the output layer of DiT, arXiv 2212.09748, section 3.2.
    """

    def __init__(
        self,
        width: int,
        *,
        features: int = 0,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.modulation = LinearMap(width, 2 * width, device=device, dtype=dtype)
        self.out = LinearMap(width, 3 + features, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set both weights to zero."""
        self.modulation.reset_parameters(0)
        self.out.reset_parameters(0)

    def forward(self, tokens: Tensor, temb: Tensor) -> Tensor:
        """Map tokens `[B, P, D]` and conditioning `[B, D]` to velocities `[B, P, 3 + F]`."""
        scale, shift = self.modulation(F.silu(temb)).unsqueeze(1).chunk(2, dim=-1)  # [B, 1, D] each
        normed = F.layer_norm(tokens, tokens.shape[-1:], eps=1e-6)
        return self.out(normed * (1 + scale) + shift)  # [B, P, 3 + F]
