"""What is inside a saved adapter."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import torch

from mmpreproj.patching.files.format import CONFIG_NAME, WEIGHTS_NAME, SavedAdapter, read_config, read_weights
from mmpreproj.patching.hooks import CHILD
from mmpreproj.patching.points.path import POINT_CHILD
from mmpreproj.patching.profile import Profile, rows_from_gains, rows_from_norms
from mmpreproj.pipelines.adapter_folder import ADAPTER_FOLDER
from mmpreproj.pipelines.adapter_list import LIST_NAME, read_list

KEY = re.compile(
    rf".+\.\d+\.\w+\.{CHILD}\.((pre_projection|content_skip)\.\w+\.\w+\.weight|rotary_gain\.\w+\.gain)"
    rf"|{POINT_CHILD}\.(embedding|pooling|head)\.\w+\.weight"
)
PARTS = {"pre_projection": ("down", "down.weight"), "content_skip": ("skip", "map.weight")}


@dataclass(frozen=True)
class AdapterSummary:
    """The contents of an adapter's folder.

    Attributes:
        folder: where the two files are.
        saved: what `adapter_config.json` says.
        profile: norms now and at the start.
        parameters: number of values.
        point_parameters: how many of them are the point path's.
        dtypes: dtypes of the weights.
        bytes: size of the weights' file.
    """

    folder: Path
    saved: SavedAdapter
    profile: Profile
    parameters: int
    dtypes: tuple[str, ...]
    bytes: int
    point_parameters: int = 0


def inspect_adapter(folder: str | Path) -> AdapterSummary:
    """Read an adapter's folder, or a pipeline's folder that holds one.

    Raises:
        FileNotFoundError: if there is no adapter.
        ValueError: if a file is damaged or foreign, or there are several adapters.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}")
    candidates = (folder, folder / ADAPTER_FOLDER, folder / "model" / ADAPTER_FOLDER, folder / "adapter")
    files = (LIST_NAME, CONFIG_NAME)
    home = next((path for path in candidates if any((path / file).is_file() for file in files)), folder)
    if (home / LIST_NAME).is_file():
        home = _only_one(home)
    saved, weights = read_config(home), read_weights(home)
    _check_keys(weights, home, may_be_empty=saved.config.needs_processor)
    return AdapterSummary(
        folder=home,
        saved=saved,
        profile=_profile(weights, saved),
        parameters=sum(weight.numel() for weight in weights.values()),
        dtypes=tuple(sorted({str(weight.dtype).removeprefix("torch.") for weight in weights.values()})),
        bytes=(home / WEIGHTS_NAME).stat().st_size,
        point_parameters=sum(weight.numel() for key, weight in weights.items() if _is_of_points(key)),
    )


def _only_one(home: Path) -> Path:
    """Find the adapter in a pipeline's folder of adapters."""
    names = tuple(read_list(home))
    if len(names) > 1:
        raise ValueError(
            f"{home} holds several adapters, {', '.join(names)}; name the folder of one: {home / names[0]}"
        )
    return home / names[0]


def _check_keys(weights: dict[str, torch.Tensor], home: Path, *, may_be_empty: bool) -> None:
    foreign = sorted(key for key in weights if not KEY.fullmatch(key))
    if foreign or not (weights or may_be_empty):
        raise ValueError(
            f"{home / WEIGHTS_NAME} is not of an mmpreproj adapter: it holds {foreign[:3] or 'no weights'}, expected "
            f"keys such as transformer_blocks.0.attn.{CHILD}.content_skip.shared.map.weight"
        )


def _is_of_points(key: str) -> bool:
    return key.startswith(f"{POINT_CHILD}.")


def _profile(weights: dict[str, torch.Tensor], saved: SavedAdapter) -> Profile:
    norms: dict[str, dict] = {}
    gains: dict[str, dict] = {}
    for key, weight in weights.items():
        if _is_of_points(key):
            continue
        path, _, rest = key.partition(f".{CHILD}.")
        part, name, tail = rest.split(".", 2)
        site = norms.setdefault(path, {"down": {}, "skip": {}})
        if part == "rotary_gain":
            gains.setdefault(path, {})[name] = float(weight.float().abs().mean())
            continue
        column, wanted = PARTS[part]
        if tail == wanted:
            site[column][name] = float(torch.linalg.vector_norm(weight.float()))
    unknown: dict[str, dict] = {"down": {}, "skip": {}}
    paths = sorted(norms, key=lambda path: [int(part) if part.isdigit() else part for part in path.split(".")])
    rows = [
        row for path in paths for row in rows_from_norms(path, norms[path], saved.initial_norms.get(path, unknown))
    ]
    return Profile(tuple(rows), tuple(row for path in paths for row in rows_from_gains(path, gains.get(path, {}))))
