"""The content skip: a linear way around attention for what needs no routing by position."""

import torch
from torch import Tensor, nn

from mmpreproj.core.linear_map import LinearMap


class ContentSkip(nn.Module):
    """Compute `W_skip · x_tilde`, to be added to the attention output before its gate.

    Args:
        width: token width D.
        init_std: standard deviation of `W_skip` at the start; 0 makes the skip exactly zero.
        device: where the weight is made.
        dtype: dtype of the weight.

    Source: arXiv 2604.10791, content skip (D to D, no bias). `init_std` is a standard deviation, not a variance: the
    norms that the paper reports (0.13 to 0.30 at D = 768) only fit a start at `1e-4 · 768 = 0.077`.
    """

    def __init__(
        self,
        width: int,
        *,
        init_std: float = 1e-4,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.init_std = init_std
        self.map = LinearMap(width, width, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw `W_skip` from `N(0, init_std²)`."""
        self.map.reset_parameters(self.init_std)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Map features `x_tilde` `[B, N, D]` to their contribution `[B, N, D]` in the dtype of the input."""
        return self.map(hidden_states).to(hidden_states.dtype)  # [B, N, D]
