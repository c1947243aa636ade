"""The files of a tensor store: safetensors, each holding whole items, as tensors named `<key>/<name>`."""

# Shards are read here and not through `safe_open`: its handles keep 0.4 kB for each item of a shard and take
# milliseconds to open, and pages that were read stay in the process. The library writes and checks the files.
from __future__ import annotations

import json
import math
import mmap
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from mmpreproj.files import UnreadableFileError

KEY = np.dtype("S16")
ROW = np.dtype([("shard", np.uint32), ("spec", np.uint32), ("offset", np.uint64)])
KeyArray: TypeAlias = NDArray[np.bytes_]
RowArray: TypeAlias = NDArray[np.void]
_TENSOR_NAME = re.compile(r"([0-9a-f]{32})/(.+)", re.DOTALL)

# What safetensors both writes and reads back.
DTYPES = {
    "BOOL": torch.bool,
    **{f"U{8 * dtype.itemsize}": dtype for dtype in (torch.uint8, torch.uint16, torch.uint32, torch.uint64)},
    **{f"I{8 * dtype.itemsize}": dtype for dtype in (torch.int8, torch.int16, torch.int32, torch.int64)},
    **{f"F{8 * dtype.itemsize}": dtype for dtype in (torch.float16, torch.float32, torch.float64)},
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "C64": torch.complex64,
}


class UnreadableShardError(UnreadableFileError):
    """A shard that cannot be read."""

    kind = "cache file"


@dataclass(frozen=True)
class DamagedShard:
    """A file that a `TensorStore` left out, and why."""

    name: str
    reason: str


class Shard(NamedTuple):
    name: str
    size: int  # bytes, as the file was when its header was read


class Spec(NamedTuple):
    """What tensors of many items have in common."""

    name: str
    dtype: str  # as safetensors calls it
    shape: tuple[int, ...]


def write_shard(path: str, tensors: dict[str, Tensor]) -> None:
    """Write tensors on the CPU, contiguous and none sharing memory, so that they outlast a loss of power.

    Raises:
        OSError: if the disk is full, or fails.
    """
    content = save(tensors)  # not `save_file`, which tells of a full disk without its number
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())  # or the move to its name could reach the disk before what is in it


def read_shard(path: Path, *, number: int, specs: dict[Spec, int]) -> tuple[Shard, KeyArray, RowArray]:
    """Read from a shard's header where its tensors are.

    Args:
        path: the shard.
        number: what the rows call it.
        specs: what the rows call each name, dtype and shape; new ones are added.

    Returns:
        The shard, and keys `[T]` and rows `[T]` of its tensors.

    Raises:
        UnreadableShardError: if it is no whole shard.
        FileNotFoundError: if it is not there.
    """
    size, start, header = _read_header(path)
    digits, rows = [], []
    for tensor, entry in header.items():
        parts = _TENSOR_NAME.fullmatch(tensor)
        if not parts or entry["dtype"] not in DTYPES:
            reason = f"it holds {tensor!r} of {entry['dtype']}, which this cache does not write; move it elsewhere"
            raise UnreadableShardError(path.name, reason)
        key, name = parts.groups()
        spec = cast(Spec, (name, entry["dtype"], tuple(entry["shape"])))  # equal to a Spec, and five times as fast
        digits.append(key)
        rows.append((number, specs.setdefault(spec, len(specs)), start + entry["data_offsets"][0]))
    return Shard(path.name, size), np.frombuffer(bytes.fromhex("".join(digits)), KEY), np.array(rows, ROW)


def _read_header(path: Path) -> tuple[int, int, dict[str, dict[str, Any]]]:
    """Return a file's size in bytes, where its tensors start, and its header without what is no tensor."""
    try:
        with safe_open(path, framework="numpy"):
            pass  # the library has checked the header, and that the file is as long as it says
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
            size = os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UnreadableShardError(path.name, error.strerror or str(error)) from error
    except (SafetensorError, ValueError) as error:
        reason = f"{error}; remove it, what it held is computed anew"
        raise UnreadableShardError(path.name, reason) from error
    header.pop("__metadata__", None)
    return size, 8 + length, header


def map_shard(path: str, shard: Shard) -> mmap.mmap:
    """Map a shard.

    Raises:
        UnreadableShardError: if it is not there as it was.
    """
    way_out = "start again, and what it held is computed anew"
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size == shard.size:
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise UnreadableShardError(shard.name, f"{error.strerror or error}; {way_out}") from error
    raise UnreadableShardError(shard.name, f"it has {size} bytes and had {shard.size} before; {way_out}")


def read_tensor(pages: mmap.mmap, offset: int, spec: Spec) -> Tensor:
    """Copy one tensor out of a mapped shard."""
    dtype = DTYPES[spec.dtype]
    size = math.prod(spec.shape) * dtype.itemsize
    content = torch.empty(size, dtype=torch.uint8)
    content.numpy()[:] = np.frombuffer(pages, np.uint8, size, offset)
    return content.view(dtype).view(spec.shape)
