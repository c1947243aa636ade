"""Writing into a tensor store, a shard at a time."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mmpreproj.data.store.shards import DTYPES, write_shard
from mmpreproj.files import write_atomically

if TYPE_CHECKING:
    from mmpreproj.data.store import TensorStore

ITEMS_AT_MOST = 4096  # a shard; reading a header takes some kilobytes an item for a moment


class TensorWriter:
    """Collects items and writes them to a store's folder a shard at a time; `TensorStore.writer` makes one.

    Leaving the `with` block writes the rest, after an exception too.
    """

    def __init__(self, store: TensorStore, shard_bytes: int, every_seconds: float) -> None:
        self._store, self._shard_bytes, self._every_seconds = store, shard_bytes, every_seconds
        self._waiting: dict[str, dict[str, Tensor]] = {}
        self._bytes, self._written = 0, time.monotonic()

    def __enter__(self) -> TensorWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.flush()

    def add(self, key: str, tensors: Mapping[str, Tensor]) -> None:
        """Take copies of an item's tensors, from any device and of any strides, unless the key has an item already.

        Raises:
            ValueError: for a key that `key_of` did not make, no tensors, or one without a name.
            TypeError: for what is not a dense tensor of a dtype that safetensors reads back.
            OSError: if a shard was due and cannot be written; what waited for it is dropped.
        """
        if not tensors:
            raise ValueError(f"item {key} has no tensors; give at least one")
        for name, tensor in tensors.items():
            _check_tensor(name, tensor)
        if key not in self._store and key not in self._waiting:
            self._waiting[key] = {
                name: tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
                for name, tensor in tensors.items()
            }
            self._bytes += sum(tensor.nbytes for tensor in tensors.values())
        full = self._bytes >= self._shard_bytes or len(self._waiting) >= ITEMS_AT_MOST
        if full or time.monotonic() - self._written >= self._every_seconds:
            self.flush()

    def flush(self) -> None:
        """Write what waits as one shard, and let the store know it.

        Raises:
            OSError: if it cannot be written; names the folder. Earlier shards stay, what waited is dropped.
        """
        if self._waiting:
            tensors = {f"{key}/{name}": value for key, item in self._waiting.items() for name, value in item.items()}
            path = self._store.folder / f"{uuid.uuid4().hex}.safetensors"
            try:
                write_atomically(path, lambda temporary: write_shard(temporary, tensors))
            except OSError as error:
                self._waiting, self._bytes = {}, 0
                raise no_place(self._store.folder, error) from error
            self._waiting, self._bytes = {}, 0
            self._store.refresh()
        self._written = time.monotonic()


def _check_tensor(name: str, tensor: object) -> None:
    if not isinstance(name, str) or not name:
        raise ValueError(f"a tensor is named {name!r}; expected text")
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name!r} is a {type(tensor).__name__}; expected a tensor")
    if tensor.layout != torch.strided or tensor.dtype not in DTYPES.values():
        raise TypeError(
            f"{name!r} is a tensor of {tensor.dtype}, {tensor.layout}; expected a dense one of "
            f"{', '.join(str(dtype).removeprefix('torch.') for dtype in DTYPES.values())}"
        )


def no_place(folder: Path, error: OSError) -> OSError:
    """Say of a folder that cannot be written to what to do."""
    reason = f"{error.strerror or error}; the cache cannot be written here: make room, or set `data.cache` elsewhere"
    return OSError(error.errno, reason, str(folder))
