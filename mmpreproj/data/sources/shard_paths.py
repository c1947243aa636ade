"""Which tar files a pattern means, and what they are called."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Sequence
from pathlib import Path

from mmpreproj.data.sources.faults import count_of, shortened

BRACES = re.compile(r"\{([^{}]*)\}")
NUMBERS = re.compile(r"(\d+)\.\.(\d+)")
SHARDS_AT_MOST = 1_000_000


def expand_shards(shards: str | Path | Sequence[str | Path]) -> list[Path]:
    """Return the files that paths and patterns mean, in order.

    Args:
        shards: paths; `{000..009}` stands for numbers, padded as written, `{a,b}` for choices; then `*`, `?` and
            `[…]` as in a shell, sorted by name. A path that is there as it stands is no pattern.

    Raises:
        FileNotFoundError: if a path is no file, or a pattern matches none.
        ValueError: if there are none, or one twice.
    """
    given = [shards] if isinstance(shards, str | Path) else list(shards)
    found = [path for pattern in given for path in _expand(os.path.expanduser(pattern))]
    if not found:
        raise ValueError("shards is empty; expected paths of tar files, or a pattern such as 'data/{000..009}.tar'")
    missing = [path for path in found if not os.path.isfile(path)]
    if missing:
        raise FileNotFoundError(
            f"{count_of(len(missing), 'shard')} of {len(found)} not found: {shortened(missing, len(missing))}; "
            "check the paths"
        )
    twice = sorted({path for path in found if found.count(path) > 1}) if len(set(found)) < len(found) else []
    if twice:
        raise ValueError(f"the shard {twice[0]} is named twice; name each once")
    return [Path(path) for path in found]


def shard_names(paths: Sequence[Path]) -> list[str]:
    """Return what each shard is called: its path below the folder that holds all of them."""
    root = os.path.commonpath([os.path.abspath(path.parent) for path in paths])
    return [Path(os.path.relpath(os.path.abspath(path), root)).as_posix() for path in paths]


def _expand(pattern: str) -> list[str]:
    if os.path.exists(pattern):
        return [pattern]
    found: list[str] = []
    for path in _expand_braces(pattern):
        # A path without `*` is kept even if nothing is there, so that it is missed.
        found += sorted(glob.glob(path)) or [path] if glob.has_magic(path) and not os.path.exists(path) else [path]
    return found


def _expand_braces(pattern: str) -> list[str]:
    match = BRACES.search(pattern)
    if match is None:
        return [pattern]
    numbers = NUMBERS.fullmatch(match[1])
    if numbers is None:
        choices = match[1].split(",")
    else:
        first, last = int(numbers[1]), int(numbers[2])
        if not first <= last < first + SHARDS_AT_MOST:
            raise ValueError(f"{match[0]} in {pattern!r} counts from {first} to {last}; expected a range upwards")
        choices = [f"{number:0{len(numbers[1])}}" for number in range(first, last + 1)]
    heads = [pattern[: match.start()] + choice for choice in choices]
    tails = _expand_braces(pattern[match.end() :])
    return [head + tail for head in heads for tail in tails]
