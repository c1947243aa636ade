"""A moving average of what trains."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from diffusers.training_utils import EMAModel
from torch import Tensor, nn

from mmpreproj.core.sharding import is_sharded, whole
from mmpreproj.training.config import EmaConfig
from mmpreproj.training.sharing import reshard


class Average:
    """Keep the exponential moving average `m ← d·m + (1 - d)·w` of what trains, in fp32.

    Without warm-up, `m` begins as the weights it is made with, and `d` is `decay` throughout. With it, `d` is
    `min(decay, (1 + n) / (10 + n))` after n updates, but 0 at the first: the average begins as the weights after one
    step. Takes as much memory as what trains, and as much again, in host memory, while it is applied.

    Make it when the parameters are where they train and sharded as they train: each process then keeps its part.

    Args:
        parameters: of these, the ones that require a gradient are averaged.
        config: decay and warm-up.
        module: what they are of; only where they are sharded, as under FSDP2, is it needed.

    Raises:
        ValueError: if none require one, or sharded ones come without their module.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], config: EmaConfig, *, module: nn.Module | None = None
    ) -> None:
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._module = module
        if not self.parameters:
            raise ValueError("nothing to average: no parameter requires a gradient; call select_trainable first")
        if module is None and any(is_sharded(parameter) for parameter in self.parameters):
            raise ValueError("the parameters are sharded, and their module may hold gathered copies; give module=…")
        # Diffusers' model would take the first weights whole, as with warm-up, unless it counts from one further on.
        constant = {} if config.warmup else {"min_decay": config.decay, "update_after_step": -1}
        self._averages = EMAModel(self.parameters, decay=config.decay, **constant)
        self._averages.to(dtype=torch.float32)

    def update(self) -> None:
        """Take the weights as they are now into the average; call it after each optimiser step.

        Raises:
            RuntimeError: inside `applied`.
        """
        self._check_not_applied()
        self._averages.step(self.parameters)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Put the average in the place of the weights for the length of a `with` block; then they are back, every bit.

        Raises:
            RuntimeError: inside another such block.
        """
        self._check_not_applied()
        self._averages.store(self.parameters)
        try:
            self._averages.copy_to(self.parameters)
            self._drop_gathered()
            yield
        finally:
            self._averages.restore(self.parameters)
            self._drop_gathered()

    def copy_to_parameters(self) -> None:
        """Put the average in the place of the weights for good.

        Raises:
            RuntimeError: inside `applied`.
        """
        self._check_not_applied()
        self._averages.copy_to(self.parameters)
        self._drop_gathered()

    def state_dict(self) -> dict[str, Any]:
        """Return the number of updates and the averages, which are not copied.

        Sharded ones are gathered, so every process must call this, and one file of it serves all.
        """
        averages = [whole(average) for average in self._averages.shadow_params]
        return {"updates": self._averages.optimization_step, "averages": averages}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state, of which each process takes its part; decay and warm-up stay the configuration's.

        Raises:
            ValueError: if it is the state of other parameters. Nothing is changed then.
        """
        averages: list[Tensor] = state["averages"]
        found, expected = ([tuple(tensor.shape) for tensor in tensors] for tensors in (averages, self.parameters))
        if found != expected:
            place = next(
                (index for index, shapes in enumerate(zip(found, expected, strict=False)) if shapes[0] != shapes[1]),
                min(len(found), len(expected)),
            )
            raise ValueError(
                f"the average is of other parameters: it has {len(found)}, {len(expected)} train, and they differ "
                f"from number {place} on; train on with the configuration that it was made with"
            )
        placed = [
            _part_of(average.to(device=parameter.device, dtype=torch.float32), parameter)
            for average, parameter in zip(averages, self.parameters, strict=True)
        ]
        self._averages.load_state_dict({"optimization_step": state["updates"], "shadow_params": placed})

    def _check_not_applied(self) -> None:
        if self._averages.temp_stored_params is not None:
            raise RuntimeError(
                "the average is in the place of the weights now; leave the `with average.applied()` block"
            )

    def _drop_gathered(self) -> None:
        if self._module is not None:
            reshard(self._module)


def _part_of(value: Tensor, parameter: nn.Parameter) -> Tensor:
    """Keep of a whole tensor what this process has of a parameter."""
    if not is_sharded(parameter):
        return value
    from torch.distributed.tensor import DTensor, distribute_tensor  # takes a second to import

    if not isinstance(parameter, DTensor):
        raise TypeError(f"a parameter is sharded as {type(parameter).__name__}; expected torch's DTensor")
    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
