"""The strength of an adapter, in a buffer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class Scale(nn.Module):
    """Multiply by a factor that can change without a compiled graph being built anew; 0 gives 0, whatever the input.

    The factor is a buffer, read in this module's own forward, so that offloading brings it along; it is no weight, so
    it is not saved. It stays float32: a model cast to bfloat16 would turn 0.7 into 0.6992.

    Args:
        device: where the buffer is made.
    """

    value: Tensor

    def __init__(self, *, device: torch.device | None = None) -> None:
        super().__init__()
        self.factor = 1.0
        self.register_buffer("value", torch.ones((), dtype=torch.float32, device=device), persistent=False)

    def set(self, factor: float) -> None:
        """Change the factor in place."""
        self.factor = factor
        if self.value.is_inference():  # made under torch.inference_mode, and so not to be changed outside of it
            self.value = torch.full((), factor, dtype=torch.float32, device=self.value.device)
        elif not self.value.is_meta:
            self.value.fill_(factor)

    def forward(self, contribution: Tensor) -> Tensor:
        """Scale `[B, N, D]`; its dtype stays."""
        if self.value.is_meta and not contribution.is_meta:  # weights were assigned to a model made on `meta`
            self.value = torch.full((), self.factor, dtype=torch.float32, device=contribution.device)
        value = self.value.clone()  # autograd keeps the copy, so the factor may change before the backward pass
        scaled = contribution * value  # a 0-dimensional factor does not promote
        return scaled.masked_fill(value == 0, 0)  # where weights are so large that it overflowed, 0 · inf is NaN

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Scale:
        if self.value.is_meta:
            self.value = torch.full((), self.factor, dtype=torch.float32)  # the one tensor that needs no file
        super()._apply(fn, recurse)
        if self.value.dtype != torch.float32:
            self.value = torch.empty((), dtype=torch.float32, device=self.value.device)
        self.set(self.factor)  # `to_empty` leaves no value either
        return self
