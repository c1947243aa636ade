"""What else keeps lists of a model's modules and weights: it is told of a change, or the change is refused."""

from __future__ import annotations

import sys

import torch
from diffusers.hooks.group_offloading import _maybe_remove_and_reapply_group_offloading
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def tell_machinery(model: nn.Module) -> None:
    """Have what keeps lists of a model's modules look again."""
    _maybe_remove_and_reapply_group_offloading(model)
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()  # it does not notice hooks that come and go after a model has run compiled


def check_not_distributed(model: nn.Module) -> None:
    """Refuse a model inside `DistributedDataParallel`, which synchronises the parameters it found when it was made.

    Raises:
        ValueError: naming the way out.
    """
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise ValueError(
            "this model is inside DistributedDataParallel, which would not keep new weights equal among processes; "
            "patch or load first, then wrap (accelerator.prepare)"
        )
