"""Items for the tests of the tensor store, and a run that writes them."""

from pathlib import Path

import torch
from torch import Tensor

from mmpreproj.data.store import TensorStore, key_of


def item(number: int) -> dict[str, Tensor]:
    """Make the tensors of an item, the same in every process."""
    generator = torch.Generator().manual_seed(number)
    return {"mean": torch.randn(4, 8, 8, generator=generator), "std": torch.rand(4, 8, 8, generator=generator)}


def key(number: int) -> str:
    return key_of(picture=number, model="vae")


def fill(folder: str | Path, numbers: range, shard_bytes: int) -> TensorStore:
    """Write items to a folder, as a run does."""
    store = TensorStore(folder)
    with store.writer(shard_bytes=shard_bytes) as writer:
        for number in numbers:
            writer.add(key(number), item(number))
    return store
