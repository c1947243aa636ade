"""The pre-projection: nonlinear features made before any position is applied."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmpreproj.core.linear_map import LinearMap


class PreProjection(nn.Module):
    """Compute the increment `W_down · SiLU(W_up · x_hat)` that turns `x_hat` into `x_tilde`.

    Acts on each token alone and sees no position. The caller adds the increment to its input, so that several
    adapters can be summed: `x_tilde = x_hat + Σ increments`.

    Args:
        width: token width D.
        expansion: hidden width as a multiple of D; `round(expansion · D)` features, at least one.
        init_std: standard deviation of `W_down` at the start; 0 makes the increment exactly zero.
        device: where the weights are made.
        dtype: dtype of the weights.

    Source: arXiv 2604.10791, pre-projection (no biases, SiLU). Deviation: the paper does not state how `W_down`
    starts; it starts as small as the skip does, so that a patched model is its base to within rounding.
    """

    def __init__(
        self,
        width: int,
        *,
        expansion: float = 1.25,
        init_std: float = 1e-4,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        hidden = max(1, round(expansion * width))
        self.init_std = init_std
        self.up = LinearMap(width, hidden, device=device, dtype=dtype)
        self.down = LinearMap(hidden, width, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw `W_up` as `nn.Linear` does and `W_down` from `N(0, init_std²)`."""
        self.up.reset_parameters()
        self.down.reset_parameters(self.init_std)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Map normed tokens `x_hat` `[B, N, D]` to their increment `[B, N, D]` in the dtype of the input."""
        features = F.silu(self.up(hidden_states))  # [B, N, e·D]
        return self.down(features).to(hidden_states.dtype)  # [B, N, D]
