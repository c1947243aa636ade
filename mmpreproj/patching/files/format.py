"""The two files of a saved adapter: what they hold, how they are read, checked and written."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from mmpreproj import __version__
from mmpreproj.files import write_atomically
from mmpreproj.patching.config import PreProjConfig
from mmpreproj.patching.text_length import check_text_length

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
METADATA_KEY = "mmpreproj"
FORMAT_VERSION = 1
PARTS = ("down", "skip")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class BaseModel:
    """What an adapter was made for.

    Attributes:
        model_class: name of the model class.
        width: token width D.
        depth: number of joint blocks.
        heads: number of attention heads.
        name_or_path: where the base is, if that is known.
        settings: further settings of the model's config that set it apart, as its family names them; None in a file
            of an earlier version.
    """

    model_class: str
    width: int
    depth: int
    heads: int
    name_or_path: str | None = None
    settings: dict[str, Any] | None = None

    def __str__(self) -> str:
        further = "".join(f", {key} {value!r}" for key, value in (self.settings or {}).items())
        return f"{self.model_class} of width {self.width}, depth {self.depth}, {self.heads} heads{further}"

    def fits(self, other: BaseModel) -> bool:
        """Tell whether an adapter for this base can be put on another."""
        sizes = (self.width, self.depth, self.heads, self.model_class)
        alike = sizes == (other.width, other.depth, other.heads, other.model_class)
        return alike and (None in (self.settings, other.settings) or self.settings == other.settings)


@dataclass(frozen=True)
class SavedAdapter:
    """The contents of `adapter_config.json`.

    `initial_norms` keeps, per attention path, the Frobenius norms of `W_down` and `W_skip` at the start of training.
    `max_sequence_length` is the longest text, in tokens, of training; the file has it where it is known.
    """

    base: BaseModel
    config: PreProjConfig
    initial_norms: dict[str, Any]
    library_version: str
    max_sequence_length: int | None = None

    def to_json(self) -> str:
        """Return the file's text. `save_id` says which weights it was written with."""
        values = {
            "format_version": FORMAT_VERSION,
            "library": "mmpreproj",
            "library_version": self.library_version,
            "base": asdict(self.base),
            "config": self.config.to_dict(),
            "initial_norms": self.initial_norms,
        }
        if self.max_sequence_length is not None:
            values["max_sequence_length"] = self.max_sequence_length
        values["save_id"] = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]
        return json.dumps(values, indent=2) + "\n"


def write_adapter(folder: Path, saved: SavedAdapter, weights: dict[str, Tensor]) -> None:
    """Write both files, each in one move.

    The weights hold a copy of the config, so that a save broken off between the two moves leaves a whole adapter.
    """
    folder.mkdir(parents=True, exist_ok=True)
    text = saved.to_json()
    metadata = {METADATA_KEY: text}  # one entry: safetensors writes several in no fixed order
    try:
        write_atomically(folder / WEIGHTS_NAME, lambda path: save_file(weights, path, metadata=metadata))
    except SafetensorError as error:
        raise OSError(f"{folder / WEIGHTS_NAME} could not be written ({error})") from error
    write_atomically(folder / CONFIG_NAME, lambda path: Path(path).write_text(text, encoding="utf-8"))


def read_config(folder: Path) -> SavedAdapter:
    """Read and check an adapter's config: `adapter_config.json`, or, where that is of another save, the weights' copy.

    Raises:
        FileNotFoundError: if the folder has none.
        ValueError: if it is not JSON, of another tool, or of a newer format.
    """
    path = folder / CONFIG_NAME
    text = path.read_bytes().decode("utf-8", errors="replace") if path.is_file() else None
    copy = _config_in_weights(folder / WEIGHTS_NAME)
    if copy is not None and (text is None or _save_id(text) not in (None, _save_id(copy))):
        return _parse_config(copy, folder / WEIGHTS_NAME)  # a save was broken off once the weights were written
    if text is None:
        raise FileNotFoundError(f"{folder} holds no {CONFIG_NAME}, so it is not an adapter saved by mmpreproj")
    return _parse_config(text, path)


def _config_in_weights(path: Path) -> str | None:
    try:
        with safe_open(path, framework="pt") as file:
            return (file.metadata() or {}).get(METADATA_KEY)
    except (SafetensorError, OSError):
        return None  # `read_weights` says what is wrong with them


def _save_id(text: str) -> str | None:
    try:
        values = json.loads(text)
    except ValueError:
        return None
    return values.get("save_id") if isinstance(values, dict) else None


def _parse_config(text: str, path: Path) -> SavedAdapter:
    try:
        values = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}); the file is damaged, save the adapter again") from error
    if not isinstance(values, dict) or values.get("library") != "mmpreproj":
        kind = values.get("peft_type") if isinstance(values, dict) else None
        raise ValueError(
            f"{path} was not written by mmpreproj" + (f" but by PEFT (peft_type {kind!r})" if kind else "")
        )
    if values.get("format_version") != FORMAT_VERSION:
        raise ValueError(
            f"{path} has format version {values.get('format_version')!r}, this mmpreproj {__version__} reads "
            f"{FORMAT_VERSION}; it was written by version {values.get('library_version')!r}"
        )
    try:
        base, config = BaseModel(**values["base"]), PreProjConfig.from_dict(values["config"])
        norms = {path: {part: dict(site[part]) for part in PARTS} for path, site in values["initial_norms"].items()}
        _check_types(base, norms)
        length = values.get("max_sequence_length")
        if length is not None:
            check_text_length(length)
        return SavedAdapter(base, config, norms, values["library_version"], length)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is incomplete or has a bad value: {error}") from error


def _check_types(base: BaseModel, norms: dict[str, Any]) -> None:
    for name in ("width", "depth", "heads"):
        if type(getattr(base, name)) is not int:
            raise TypeError(f"base.{name} must be a whole number; got {getattr(base, name)!r}")
    if not isinstance(base.settings, (dict, type(None))):
        raise TypeError(f"base.settings must be a mapping; got {base.settings!r}")
    for path, site in norms.items():
        for norm in (norm for part in site.values() for norm in part.values()):
            if norm is not None and (isinstance(norm, bool) or not isinstance(norm, (int, float))):
                raise TypeError(f"initial_norms of {path} must be numbers; got {norm!r}")


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Read `adapter_model.safetensors`.

    Raises:
        FileNotFoundError: if the folder has none.
        ValueError: if it is truncated, not a safetensors file, or a weight is of no floating dtype that we write.
    """
    path = folder / WEIGHTS_NAME
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no {WEIGHTS_NAME}")
    try:
        weights = load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(f"{path} is damaged or not a safetensors file ({error})") from error
    for key, weight in weights.items():
        if weight.dtype not in DTYPES:
            kinds = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            raise ValueError(f"{path}: {key} is of {weight.dtype}; an adapter's weights are {kinds}")
    return weights


def find_folder(source: str | os.PathLike[str], *, subfolder: str | None = None, revision: str | None = None) -> Path:
    """Find an adapter's folder on disk, fetching it from the hub where `source` is no folder.

    Raises:
        FileNotFoundError: if `source` is neither a folder nor a hub repository that can be had.
    """
    if not str(source):
        raise FileNotFoundError("the source of an adapter is an empty string; give a folder or a hub id")
    folder = Path(source)
    if not folder.is_dir():
        patterns = [f"{subfolder}/{file}" if subfolder else file for file in (CONFIG_NAME, WEIGHTS_NAME)]
        try:
            folder = Path(snapshot_download(str(source), revision=revision, allow_patterns=patterns))
        except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
            raise FileNotFoundError(
                f"no adapter at {str(source)!r}: it is no folder, and the hub gives no such repository ({error})"
            ) from error
    return folder / subfolder if subfolder else folder
