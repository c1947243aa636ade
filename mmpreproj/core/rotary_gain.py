"""The learned strength of positions."""

import torch
from torch import Tensor, nn


class RotaryGain(nn.Module):
    """Multiply rotary angles by one learned gain per head, at first 0: no head knows a position until it is trained.

    Args:
        heads: number of attention heads H.
        device: where the gains are made.
        dtype: dtype of the gains.
    """

    def __init__(self, heads: int, *, device: torch.device | None = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.zeros(heads, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        """Set every gain to 0."""
        nn.init.zeros_(self.gain)

    def forward(self, angles: Tensor) -> Tensor:
        """Turn angles `[N, P]`, in radians, into each head's own `[N, H, P]`, in float32."""
        return angles[:, None] * self.gain.float()[:, None]  # [N, H, P]

    def extra_repr(self) -> str:
        """Show the number of heads."""
        return f"{self.gain.numel()} heads"
