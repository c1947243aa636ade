"""How much memory a training step takes, before it is taken.

Activations are counted in a forward on fake tensors: they have the shapes, dtypes and device of real ones, so that
autocast and attention choose what they would choose, and no values.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef

from mmpreproj.training.config import OptimizerConfig, TrainConfig
from mmpreproj.training.optimisation import make_optimizer

GIB = 2**30
TRIAL = 256  # side of the matrix that the optimiser is tried on; the 8-bit ones begin at 4,096 values
OPTIMISED = torch.float32  # dtype of what trains, of its gradients and of its average


@dataclass(frozen=True)
class StepMemory:
    """Memory of one process while it trains, in bytes.

    What operations need while they run is not counted: a step that was measured on a CPU took up to a third more than
    its activations.

    Attributes:
        frozen: weights that do not train, and buffers.
        trained: weights that train, in fp32.
        gradients: of these.
        optimiser: its states.
        average: the moving average.
        activations: kept from the forward for the backward, of a batch at the largest size. With gradient
            checkpointing what enters the blocks, and what one block keeps while it is computed again.
    """

    frozen: int
    trained: int
    gradients: int
    optimiser: int
    average: int
    activations: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.frozen + self.trained + self.gradients + self.optimiser + self.average + self.activations


@dataclass
class Saved:
    """What autograd keeps of a forward: the bytes of every storage, once, and of each block those that are its own."""

    total: int
    blocks: tuple[int, ...] = ()


@contextmanager
def counting_saved(model: nn.Module, blocks: Sequence[nn.Module] = ()) -> Iterator[Callable[[], Saved]]:
    """Count what a forward inside the `with` block keeps for its backward, the model's own tensors left out.

    Views of one storage count once. Works on real and on fake tensors alike, and keeps what it counts until the end.

    Args:
        model: whose parameters and buffers are not counted.
        blocks: of the model, whose shares are told apart.

    Yields:
        What gives the count, to be called inside the block.
    """
    own = {_key(tensor) for tensor in (*model.parameters(), *model.buffers())}
    kept: dict[int, tuple[Tensor, int, int]] = {}
    current = [-1]  # the block that is running

    def pack(tensor: Tensor) -> Tensor:
        key = _key(tensor)
        if key not in own:
            kept.setdefault(key, (tensor, tensor.untyped_storage().nbytes(), current[0]))
        return tensor

    def count() -> Saved:
        of_blocks = [sum(size for _, size, place in kept.values() if place == number) for number in range(len(blocks))]
        return Saved(sum(size for _, size, _ in kept.values()), tuple(of_blocks))

    hooks = [
        handle
        for number, block in enumerate(blocks)
        for handle in (
            block.register_forward_pre_hook(lambda *_, number=number: current.__setitem__(0, number)),
            block.register_forward_hook(lambda *_: current.__setitem__(0, -1)),
        )
    ]
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield count
    finally:
        for handle in hooks:
            handle.remove()


def make_fake(model: nn.Module, device: torch.device) -> FakeTensorMode:
    """Turn a model on the `meta` device into one of fake tensors, in place; return their mode."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        model.to_empty(device=device)
    return mode


def optimiser_bytes(config: OptimizerConfig, *, matrices: int, others: int, device: torch.device | str = "cpu") -> int:
    """Measure the optimiser's states on a small layer, and scale them to so many values of matrices and others."""
    layer = nn.utils.skip_init(nn.Linear, TRIAL, TRIAL, device=device)  # which would draw random numbers
    nn.init.ones_(layer.weight)
    nn.init.zeros_(layer.bias)
    optimizer = make_optimizer(layer, config)
    layer(torch.ones(1, TRIAL, device=device)).square().sum().backward()
    optimizer.step()

    def per_value(parameter: nn.Parameter) -> float:
        states = [value for value in optimizer.state[parameter].values() if isinstance(value, Tensor) and value.ndim]
        return sum(value.untyped_storage().nbytes() for value in states) / parameter.numel()

    return round(per_value(layer.weight) * matrices + per_value(layer.bias) * others)


def weights_bytes(*modules: nn.Module | None) -> int:
    """Add up the sizes of parameters and buffers."""
    tensors = (
        tensor for module in modules if module is not None for tensor in (*module.parameters(), *module.buffers())
    )
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def step_memory(
    transformer: nn.Module, config: TrainConfig, *, activations: int, device: torch.device | str = "cpu"
) -> StepMemory:
    """Put together what training takes.

    Args:
        transformer: one that `select_trainable` saw; its tensors need no values.
        config: the run's settings.
        activations: bytes that autograd keeps.
        device: where the optimiser is tried.

    Raises:
        ConfigError: if there is no such optimiser.
    """
    trained = [parameter for parameter in transformer.parameters() if parameter.requires_grad]
    matrices = sum(parameter.numel() for parameter in trained if parameter.ndim > 1)
    others = sum(parameter.numel() for parameter in trained) - matrices
    size = (matrices + others) * OPTIMISED.itemsize
    return StepMemory(
        frozen=weights_bytes(transformer) - size,
        trained=size,
        gradients=size,
        optimiser=optimiser_bytes(config.optimizer, matrices=matrices, others=others, device=device),
        average=0 if config.ema is None else size,
        activations=activations,
    )


def memory_there(device: torch.device) -> int | None:
    """Return the bytes that a device has free, or the machine's memory for the CPU; None where that is not known."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type != "cpu" or not hasattr(os, "sysconf"):
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def in_bytes(size: int, *, beside: int = 0) -> str:
    """Write a number of bytes in GiB, or where it and what it stands beside are less than one in MiB."""
    large = max(size, beside) >= GIB
    return f"{size / GIB:,.2f} GiB" if large else f"{size / 2**20:,.2f} MiB"


def _key(tensor: Tensor) -> int:
    return StorageWeakRef(tensor.untyped_storage()).cdata
