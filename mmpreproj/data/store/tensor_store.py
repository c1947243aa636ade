"""Tensors on disk, found by a digest of what they were computed from: a folder of safetensors files, memory-mapped.

cache/
  0b7c….safetensors      tensors `<key>/<name>`, whole items only
  .4f1a….safetensors.x7  being written, or left by a run that was killed

A shard is written whole under a new name and never changed, so any number of processes may read and write at once.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
import re
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from torch import Tensor

from mmpreproj.data.store.shards import (
    KEY,
    ROW,
    DamagedShard,
    KeyArray,
    RowArray,
    Shard,
    Spec,
    UnreadableShardError,
    map_shard,
    read_shard,
    read_tensor,
)
from mmpreproj.data.store.writer import TensorWriter, no_place

KeyPart: TypeAlias = "str | int | float | bool | Sequence[KeyPart] | None"

SHARD_BYTES = 64 * 2**20
SHARD_SECONDS = 60.0
LEFT_OVER_SECONDS = 24 * 60 * 60.0  # another process may still be writing a younger temporary file
OPEN_AT_MOST = 32  # each takes a file descriptor; opening one again takes some 15 µs
_KEY = re.compile(r"[0-9a-f]{32}")


def key_of(**parts: KeyPart) -> str:
    """Digest what an item is computed from to its key: 32 hexadecimal digits, BLAKE2b of canonical JSON.

    Keys differ wherever a name or a value differs, in kind too: `1`, `1.0`, `True` and `"1"` give four keys. Lists and
    tuples are the same.

    Raises:
        TypeError: for a part that is no text, number, truth value, None or sequence of these.
        ValueError: for numbers that are not finite, and without any part.
    """
    if not parts:
        raise ValueError("a key of no parts would be the same for everything; name what the item is computed from")
    for name, part in parts.items():
        _check_part(name, part)
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=KEY.itemsize).hexdigest()


def _check_part(name: str, part: object) -> None:
    if isinstance(part, float) and not math.isfinite(part):
        raise ValueError(f"part {name!r} of a key is {part}; expected a finite number")
    if isinstance(part, (list, tuple)):
        for inner in part:
            _check_part(name, inner)
    elif part is not None and not isinstance(part, (str, int, float)):
        raise TypeError(
            f"part {name!r} of a key is a {type(part).__name__}; expected text, a number, a truth value, None, or a "
            "list or tuple of these"
        )


class TensorStore:
    """Items of named tensors in a folder, each under a key that says what it was computed from; see `key_of`.

    The headers of the shards are the index; it takes 32 bytes a tensor in memory. Can be pickled, and read in forked
    and spawned processes. Of items that were written twice, the first found is read.

    Args:
        folder: holds the shards; a folder that does not exist is an empty store, and made by `writer`. Temporary
            files in it that are older than a day are removed.

    Attributes:
        folder: as given, with `~` expanded.
        damaged: files that are no whole shards; what they held is missing.

    Raises:
        ValueError: if `folder` is a file.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser()
        if self.folder.exists() and not self.folder.is_dir():
            raise ValueError(f"{self.folder} is a file; expected the folder of the cache, `data.cache`")
        self._forget()
        self._remove_left_over()
        self.refresh()

    def _forget(self) -> None:
        self.damaged: list[DamagedShard] = []
        self._shards: list[Shard] = []
        self._specs: list[Spec] = []
        self._keys = np.empty(0, KEY)  # one a tensor, sorted; `_rows` says where it is
        self._rows = np.empty(0, ROW)
        self._length = 0
        self._map = lru_cache(OPEN_AT_MOST)(map_shard)

    def _remove_left_over(self) -> None:
        for path in self.folder.glob(".*.safetensors.*"):
            with suppress(OSError):  # another process was faster, or the folder is read-only
                if time.time() - path.stat().st_mtime > LEFT_OVER_SECONDS:
                    path.unlink()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_map"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _map=lru_cache(OPEN_AT_MOST)(map_shard))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.folder)!r})  # {len(self)} items, {len(self._shards)} shards"

    def __len__(self) -> int:
        return self._length

    def __contains__(self, key: str) -> bool:
        start, stop = self._span(key)
        return stop > start

    def __getitem__(self, key: str) -> dict[str, Tensor]:
        """Read an item: tensors of its own, which neither share memory with the file nor keep it open.

        Raises:
            KeyError: if there is no such item.
            UnreadableShardError: if its shard was removed or changed since the store saw it.
        """
        start, stop = self._span(key)
        if start == stop:
            raise KeyError(f"{key} is not in {self.folder}; ask `missing` first, and write what it names")
        shard = self._shards[self._rows["shard"][start]]
        pages = self._map(os.path.join(self.folder, shard.name), shard)
        item = {}
        for _, number, offset in self._rows[start:stop].tolist():
            spec = self._specs[number]
            item[spec.name] = read_tensor(pages, offset, spec)
        if hasattr(mmap, "MADV_DONTNEED"):
            pages.madvise(mmap.MADV_DONTNEED)  # they stay in the system's cache, but count no longer as this process's
        return item

    def _span(self, key: str) -> tuple[int, int]:
        packed = np.array(_packed(key), KEY)
        return int(self._keys.searchsorted(packed)), int(self._keys.searchsorted(packed, "right"))

    def missing(self, keys: Iterable[str]) -> list[str]:
        """Return those of the keys that have no item, each once, in the order given."""
        distinct = list(dict.fromkeys(keys))
        packed = np.array([_packed(key) for key in distinct], KEY)
        absent = self._keys.searchsorted(packed) == self._keys.searchsorted(packed, "right")
        return [distinct[index] for index in absent.nonzero()[0]]

    def refresh(self) -> None:
        """Find what other processes have written or removed since."""
        listed = sorted(path.name for path in self.folder.glob("[!.]*.safetensors"))
        known = {shard.name for shard in self._shards}
        if not known.issubset(listed):
            self._forget()
            known = set()
        self.damaged, keys, rows = [], [self._keys], [self._rows]
        specs = {spec: number for number, spec in enumerate(self._specs)}
        for name in listed:
            if name in known:
                continue
            try:
                shard, its_keys, its_rows = read_shard(self.folder / name, number=len(self._shards), specs=specs)
            except UnreadableShardError as error:
                self.damaged.append(DamagedShard(error.name, error.reason))
            except FileNotFoundError:  # another process has removed it since it was listed
                pass
            else:
                self._shards.append(shard)
                keys.append(its_keys)
                rows.append(its_rows)
        self._specs = [Spec(*spec) for spec in specs]
        self._index(np.concatenate(keys), np.concatenate(rows))

    def _index(self, keys: KeyArray, rows: RowArray) -> None:
        """Sort by key, and keep one shard's tensors for each."""
        order = keys.argsort(kind="stable")
        keys, rows = keys[order], rows[order]
        starts = np.concatenate([[True], keys[1:] != keys[:-1]])[: len(keys)].nonzero()[0]
        first = np.repeat(rows["shard"][starts], np.diff(starts, append=len(keys)))
        kept = rows["shard"] == first
        self._keys, self._rows, self._length = keys[kept], rows[kept], len(starts)

    def writer(self, *, shard_bytes: int = SHARD_BYTES, every_seconds: float = SHARD_SECONDS) -> TensorWriter:
        """Return a writer for a `with` block.

        Args:
            shard_bytes: a shard is written once it would hold this many bytes.
            every_seconds: or once this many seconds have passed since the last.

        Raises:
            ValueError: for numbers that are not positive.
            OSError: if the folder cannot be made.
        """
        for name, value in (("shard_bytes", shard_bytes), ("every_seconds", every_seconds)):
            if not value > 0:
                raise ValueError(f"{name} must be above 0; got {value}")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise no_place(self.folder, error) from error
        return TensorWriter(self, shard_bytes, every_seconds)


def _packed(key: str) -> bytes:
    if not _KEY.fullmatch(key):
        raise ValueError(f"{key!r} is no key; expected 32 hexadecimal digits, as `key_of` makes them")
    return bytes.fromhex(key)
