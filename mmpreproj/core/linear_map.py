"""The linear map that the adapter is made of."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LinearMap(nn.Module):
    """Compute `W · x` for each token, without a bias.

    On purpose no `nn.Linear`. What rewrites "every linear layer" of a model (layerwise casting to fp8, quantisation by
    bitsandbytes, torchao or quanto, LoRA on `all-linear`) finds `nn.Linear` and its subclasses; an adapter is the
    small, precise part beside a base so treated and must stay as it is.

    Args:
        inputs: width of a token.
        outputs: width of the result.
        device: where the weight is made.
        dtype: dtype of the weight.
    """

    def __init__(
        self, inputs: int, outputs: int, *, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        device = device or torch.get_default_device()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, device=device, dtype=dtype))

    def reset_parameters(self, std: float | None = None) -> None:
        """Draw the weight from `N(0, std²)`, exact zeros where `std` is 0; None draws it as `nn.Linear` does."""
        if std is None:
            nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        elif std == 0:
            nn.init.zeros_(self.weight)
        else:
            nn.init.normal_(self.weight, std=std)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Map `[..., inputs]` of any floating dtype to `[..., outputs]` in the weight's, or as autocast decides."""
        if not torch.is_autocast_enabled(hidden_states.device.type):
            hidden_states = hidden_states.to(self.weight.dtype)  # fp32 weights serve a half-precision base
        return F.linear(hidden_states, self.weight)

    def extra_repr(self) -> str:
        """Show the widths."""
        outputs, inputs = self.weight.shape
        return f"{inputs}, {outputs}"
