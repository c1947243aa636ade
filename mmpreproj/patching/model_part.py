"""What an adapter has at the model itself rather than at an attention: its switch and its strength."""

from __future__ import annotations

import torch
from torch import nn

from mmpreproj.core.scale import Scale


class ModelPart(nn.Module):
    """A part of an adapter that a model has once; it follows the adapter's parts at the attentions.

    Args:
        device: where the scale is made.
    """

    def __init__(self, *, device: torch.device | None = None) -> None:
        super().__init__()
        self.enabled = True
        self.suspended = 0
        self.has_strength = True  # in a block at least
        self.scale = Scale(device=device)  # the mean of the blocks'

    @property
    def takes_part(self) -> bool:
        """Whether the adapter is switched on, and in no `disabled` block."""
        return self.enabled and not self.suspended

    @property
    def acts(self) -> bool:
        """Whether the adapter takes part, at a scale other than 0 in some block."""
        return self.takes_part and self.has_strength
