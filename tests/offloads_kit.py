"""Ways to offload a model in place, from CPU to CPU, for tests of what lives with it."""

import torch
from accelerate import cpu_offload, cpu_offload_with_hook
from diffusers.hooks import apply_group_offloading
from torch import nn

CPU = torch.device("cpu")


def group_block_level(model: nn.Module) -> None:
    model.enable_group_offload(CPU, CPU, offload_type="block_level", num_blocks_per_group=1)


def group_leaf_level(model: nn.Module) -> None:
    apply_group_offloading(model, CPU, CPU, offload_type="leaf_level")


def sequential(model: nn.Module) -> None:
    cpu_offload(model, execution_device=CPU)


def sequential_with_buffers(model: nn.Module) -> None:
    cpu_offload(model, execution_device=CPU, offload_buffers=True)


def whole_model(model: nn.Module) -> None:
    cpu_offload_with_hook(model, execution_device=CPU)
