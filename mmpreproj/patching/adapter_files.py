"""The two files of a saved adapter: what they hold, how they are read, checked and written."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from mmpreproj import __version__
from mmpreproj.patching.config import PreProjConfig

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
FORMAT_VERSION = 1
PARTS = ("down", "skip")


@dataclass(frozen=True)
class BaseModel:
    """What an adapter was made for: model class, token width D, number of joint blocks, heads, and where it is."""

    model_class: str
    width: int
    depth: int
    heads: int
    name_or_path: str | None = None

    def __str__(self) -> str:
        return f"{self.model_class} of width {self.width}, depth {self.depth}, {self.heads} heads"


@dataclass(frozen=True)
class SavedAdapter:
    """The contents of `adapter_config.json`.

    `initial_norms` keeps, per attention path, the Frobenius norms of `W_down` and `W_skip` at the start of training.
    """

    base: BaseModel
    config: PreProjConfig
    initial_norms: dict[str, Any]
    library_version: str

    def to_json(self) -> str:
        """Return the file's text."""
        values = {
            "format_version": FORMAT_VERSION,
            "library": "mmpreproj",
            "library_version": self.library_version,
            "base": asdict(self.base),
            "config": self.config.to_dict(),
            "initial_norms": self.initial_norms,
        }
        return json.dumps(values, indent=2) + "\n"


def read_config(folder: Path) -> SavedAdapter:
    """Read and check `adapter_config.json`.

    Raises:
        FileNotFoundError: if the folder has none.
        ValueError: if it is not JSON, of another tool, or of a newer format.
    """
    path = folder / CONFIG_NAME
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no {CONFIG_NAME}, so it is not an adapter saved by mmpreproj")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
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
        return SavedAdapter(base, config, norms, values["library_version"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is incomplete or has a bad value: {error}") from error


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Read `adapter_model.safetensors`.

    Raises:
        FileNotFoundError: if the folder has none.
        ValueError: if it is truncated or not a safetensors file.
    """
    path = folder / WEIGHTS_NAME
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no {WEIGHTS_NAME}")
    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(f"{path} is damaged or not a safetensors file ({error})") from error


def find_folder(source: str | os.PathLike[str], *, subfolder: str | None = None, revision: str | None = None) -> Path:
    """Find an adapter's folder on disk, fetching it from the hub where `source` is no folder.

    Raises:
        FileNotFoundError: if `source` is neither a folder nor a hub repository that can be had.
    """
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


def write_atomically(path: Path, write: Callable[[str], Any]) -> None:
    """Call `write` on a temporary file beside `path`, then move it over `path` in one step."""
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    os.close(handle)
    try:
        write(temporary)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
