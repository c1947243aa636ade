"""Which dtype a small trained module computes in."""

import torch
from torch import Tensor, nn


def cast_to_parameters(hidden_states: Tensor, linear: nn.Module) -> Tensor:
    """Cast an input to the dtype of the linear map that reads it, unless autocast decides.

    Adapters are often kept in fp32 beside a half-precision base; without autocast torch refuses to multiply the two.

    Args:
        hidden_states: `[..., D]`, any floating dtype.
        linear: the module about to be called.

    Returns:
        `[..., D]`, the same tensor where no cast is needed.
    """
    if torch.is_autocast_enabled(hidden_states.device.type):
        return hidden_states
    parameter = next(linear.parameters(), None)
    return hidden_states if parameter is None else hidden_states.to(parameter.dtype)
