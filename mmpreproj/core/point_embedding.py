"""Points to tokens: coordinates are content, not position."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmpreproj.core.linear_map import LinearMap


class PointEmbedding(nn.Module):
    """Compute a token from each point alone: `W₂ · SiLU(W₁ · [1, x, f, sin 2ᵏπx/4, cos 2ᵏπx/4])`, k from 0.

    The longest wave is 8 units, about the width of noise of variance 1; the shortest `8 / 2^(frequencies - 1)`.

    Args:
        width: token width D.
        features: channels F of a point beside its coordinates, as colours or normals.
        frequencies: number of waves along each axis; 0 for none.
        device: where the weights are made.
        dtype: dtype of the weights.

    Source: Fourier features, arXiv 2006.10739, with octaves as in arXiv 2003.08934, equation 4.
    """

    def __init__(
        self,
        width: int,
        *,
        features: int = 0,
        frequencies: int = 6,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.frequencies = frequencies
        inputs = 1 + 3 + features + 6 * frequencies
        self.up = LinearMap(inputs, width, device=device, dtype=dtype)
        self.down = LinearMap(width, width, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw both weights as `nn.Linear` does."""
        self.up.reset_parameters()
        self.down.reset_parameters()

    def forward(self, points: Tensor) -> Tensor:
        """Map points `[B, P, 3 + F]` to tokens `[B, P, D]` in the dtype of the weights."""
        wide = points.to(torch.promote_types(points.dtype, torch.float32))
        places = wide[..., :3]
        parts = [torch.ones_like(wide[..., :1]), wide]
        for octave in range(self.frequencies):
            angles = places * (2**octave * math.pi / 4)  # [B, P, 3]
            parts += [angles.sin(), angles.cos()]
        return self.down(F.silu(self.up(torch.cat(parts, dim=-1))))  # [B, P, D]
