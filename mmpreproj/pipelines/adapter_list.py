"""The list of a pipeline's adapters, `adapters.json`: their names, scales and switches."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmpreproj.files import write_atomically

LIST_NAME = "adapters.json"
FORMAT_VERSION = 1
SAFE_NAME = re.compile(r"[\w-]([\w -]*[\w-])?")
RESERVED_NAMES = {"CON", "PRN", "AUX", "NUL", *(f"{port}{number}" for port in ("COM", "LPT") for number in range(10))}


@dataclass(frozen=True)
class ListedAdapter:
    """What `adapters.json` says of an adapter: its scale in each block, and whether it is switched on."""

    scales: dict[int, float]
    enabled: bool


def write_list(folder: Path, listed: Mapping[str, ListedAdapter]) -> None:
    """Write `adapters.json` in one move."""
    entries = {name: {"scales": entry.scales, "enabled": entry.enabled} for name, entry in listed.items()}
    text = json.dumps({"format_version": FORMAT_VERSION, "adapters": entries}, indent=2, ensure_ascii=False) + "\n"
    write_atomically(folder / LIST_NAME, lambda path: Path(path).write_text(text, encoding="utf-8"))


def read_list(folder: Path) -> dict[str, ListedAdapter]:
    """Read and check `adapters.json`: the adapters by name, in their order on the model.

    Raises:
        ValueError: if it is not JSON, of a newer format, or has a bad entry.
    """
    path = folder / LIST_NAME
    try:
        values = json.loads(path.read_bytes().decode("utf-8"))
        if values["format_version"] != FORMAT_VERSION:
            raise ValueError(f"format version {values['format_version']!r}, expected {FORMAT_VERSION}")
        listed = {name: _parse_entry(name, entry) for name, entry in values["adapters"].items()}
        if not listed:
            raise ValueError("it lists no adapter")
        check_folder_names(tuple(listed))
        return listed
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged or of another version of mmpreproj: {error!r}") from error


def check_folder_names(names: tuple[str, ...]) -> None:
    """Refuse names of adapters that cannot be folders' on every file system.

    Raises:
        ValueError: naming the first, and what is allowed.
    """
    taken: dict[str, str] = {}
    for name in names:
        reserved = name.upper() in RESERVED_NAMES
        if reserved or len(name) > 64 or not SAFE_NAME.fullmatch(name) or name.casefold() in taken:
            twin = taken.get(name.casefold())
            reason = "is reserved on Windows" if reserved else f"differs from {twin!r} in case alone" if twin else ""
            raise ValueError(
                f"the adapter {name!r} is saved in a folder of its name, which "
                f"{reason or 'may hold up to 64 letters, digits, _, - and spaces in between'}; carry it under "
                "another name: save it with mmpreproj.save(…, name=…) and load it with mmpreproj.load(…, name=…)"
            )
        taken[name.casefold()] = name


def _parse_entry(name: str, entry: Any) -> ListedAdapter:
    by_block, enabled = entry["scales"], entry["enabled"]
    if not isinstance(enabled, bool):
        raise TypeError(f"{name!r}: enabled must be true or false; got {enabled!r}")
    for scale in by_block.values():
        if isinstance(scale, bool) or not isinstance(scale, (int, float)):
            raise TypeError(f"{name!r}: a scale must be a number; got {scale!r}")
    return ListedAdapter({int(block): float(scale) for block, scale in by_block.items()}, enabled)
