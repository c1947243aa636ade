"""Adapters on disk: `adapter_config.json` and `adapter_model.safetensors`, keys without the adapter's name."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import align_module_device
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mmpreproj import __version__
from mmpreproj.patching.config import PreProjConfig
from mmpreproj.patching.families import Family, find_family, joint_blocks
from mmpreproj.patching.hooks import CHILD
from mmpreproj.patching.lifecycle import (
    PatchReport,
    attention_sites,
    family_of,
    named_adapters,
    patch,
    report,
    resolve_name,
    unpatch,
    unwrap,
)

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


def save(
    model: nn.Module, folder: str | os.PathLike[str], *, name: str | None = None, base_model: str | None = None
) -> Path:
    """Write a model's adapter to a folder; the base is not written.

    Each file is written beside its final name and moved over it, so that an interrupted save leaves whole files.

    Args:
        model: a patched model.
        folder: made if it does not exist.
        name: which adapter; None for the only one.
        base_model: hub id or folder of the base, kept in the file; defaults to where the model was loaded from.

    Returns:
        The folder.

    Raises:
        ValueError: if the model carries no adapter, its weights are on the `meta` device, or one is not finite.
    """
    model = unwrap(model)
    name = resolve_name(model, name)
    weights = adapter_state(model, name)
    saved = SavedAdapter(
        base=describe_base(model, family_of(model), name_or_path=base_model),
        config=adapter_config(model, name),
        initial_norms={path: adapter.initial_norms for path, adapter in named_adapters(model, name)},
        library_version=__version__,
    )
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / WEIGHTS_NAME, lambda path: save_file(weights, path, metadata={"format": "pt"}))
    write_atomically(folder / CONFIG_NAME, lambda path: Path(path).write_text(saved.to_json(), encoding="utf-8"))
    return folder


def load(
    model: nn.Module,
    source: str | os.PathLike[str],
    *,
    name: str = "default",
    family: Family | None = None,
    subfolder: str | None = None,
    revision: str | None = None,
) -> PatchReport:
    """Patch a model with a saved adapter; on any error the model is left as it was.

    The loaded weights take the dtype of the attention they join, whatever dtype the file holds.

    Args:
        model: an unpatched model of the class and size that the adapter was made for.
        source: a folder, or a hub id.
        name: what the adapter is called on this model.
        family: a row of your own for a model that the table does not know.
        subfolder: a folder inside `source`.
        revision: branch, tag or commit on the hub.

    Raises:
        FileNotFoundError: if there is no adapter at `source`.
        ValueError: if a file is damaged or foreign, or the adapter was made for another base; both are named.
    """
    folder = find_folder(source, subfolder=subfolder, revision=revision)
    saved = read_config(folder)
    weights = read_weights(folder)
    model = unwrap(model)
    family = find_family(model) if family is None else family
    _check_base(saved.base, describe_base(model, family), folder)
    with torch.random.fork_rng():  # the start that is about to be overwritten must not disturb anybody's seed
        patch(model, saved.config, name=name, family=family)
    try:
        _copy_weights(model, name, weights, folder)
    except BaseException:
        unpatch(model, name)
        raise
    for path, adapter in named_adapters(model, name):
        adapter.initial_norms = saved.initial_norms.get(path, adapter.initial_norms)
    return report(model, name=name)


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


def adapter_state(model: nn.Module, name: str) -> dict[str, Tensor]:
    """Collect an adapter's weights under the keys of its file, on the CPU.

    Raises:
        ValueError: if a weight is on the `meta` device or not finite.
    """
    state = {}
    for path, adapter in named_adapters(model, name):
        for module_path, module in adapter.named_modules():
            with align_module_device(module):
                for key, parameter in module.named_parameters(recurse=False):
                    full = f"{path}.{CHILD}.{module_path}.{key}"
                    _check_savable(full, parameter)
                    state[full] = parameter.detach().to("cpu", copy=True).contiguous()
    return state


def adapter_config(model: nn.Module, name: str) -> PreProjConfig:
    """Return the config that an adapter was made from."""
    return next(adapter.config for _, adapter in named_adapters(model, name))


def describe_base(model: nn.Module, family: Family, *, name_or_path: str | None = None) -> BaseModel:
    """Describe a model as the base of an adapter."""
    _, _, _, attention = next(attention_sites(model, family))
    config = getattr(model, "config", None)
    return BaseModel(
        model_class=type(model).__name__,
        width=int(getattr(attention, family.width)),
        depth=len(joint_blocks(model, family)),
        heads=int(getattr(attention, family.heads)),
        name_or_path=name_or_path or getattr(config, "_name_or_path", None),
    )


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


def _check_savable(key: str, parameter: Tensor) -> None:
    if parameter.is_meta:
        raise ValueError(f"{key} is on the meta device and has no values to save; load the model's weights first")
    if not torch.isfinite(parameter).all():
        raise ValueError(f"{key} holds NaN or infinite values; nothing was saved")


def _check_base(saved: BaseModel, found: BaseModel, folder: Path) -> None:
    same = (saved.model_class, saved.width, saved.depth, saved.heads)
    if same != (found.model_class, found.width, found.depth, found.heads):
        raise ValueError(f"the adapter in {folder} was made for {saved}, but this model is {found}")


def _copy_weights(model: nn.Module, name: str, weights: dict[str, Tensor], folder: Path) -> None:
    targets = {
        f"{path}.{CHILD}.{key}": parameter
        for path, adapter in named_adapters(model, name)
        for key, parameter in adapter.named_parameters()
    }
    missing, surplus = sorted(set(targets) - set(weights)), sorted(set(weights) - set(targets))
    if missing or surplus:
        raise ValueError(
            f"{folder / WEIGHTS_NAME} does not fit its config: {len(set(targets) & set(weights))} of {len(targets)} "
            f"keys match; missing {missing[:3]}, not expected {surplus[:3]}"
        )
    for key, parameter in targets.items():
        found, expected = list(weights[key].shape), list(parameter.shape)
        if found != expected:
            raise ValueError(f"{folder / WEIGHTS_NAME}: {key} has shape {found}, expected {expected}")
        if not torch.isfinite(weights[key]).all():
            raise ValueError(f"{folder / WEIGHTS_NAME}: {key} holds NaN or infinite values; the file is of no use")
        with torch.no_grad():
            parameter.copy_(weights[key])
