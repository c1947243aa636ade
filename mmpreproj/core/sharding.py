"""Weights that several processes share."""

from torch import Tensor


def is_sharded(tensor: Tensor) -> bool:
    """Tell whether a process holds only its part of a tensor, as under FSDP2 and tensor parallelism."""
    return hasattr(tensor, "full_tensor")  # torch's DTensor, whose module takes a second to import


def whole(tensor: Tensor) -> Tensor:
    """Gather a sharded tensor from all processes, each of which must call this; others are returned as they are."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
