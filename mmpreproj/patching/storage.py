"""Adapters from a model to disk and back; keys in the file do not carry the adapter's name."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from accelerate.utils import align_module_device
from safetensors.torch import save_file
from torch import Tensor, nn

from mmpreproj import __version__
from mmpreproj.patching.adapter_files import (
    CONFIG_NAME,
    WEIGHTS_NAME,
    BaseModel,
    SavedAdapter,
    find_folder,
    read_config,
    read_weights,
    write_atomically,
)
from mmpreproj.patching.config import PreProjConfig
from mmpreproj.patching.families import Family, find_family, joint_blocks
from mmpreproj.patching.hooks import CHILD
from mmpreproj.patching.lifecycle import (
    attention_sites,
    family_of,
    named_adapters,
    patch,
    report,
    resolve_name,
    unpatch,
    unwrap,
)
from mmpreproj.patching.report import PatchReport


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
                    _check_own(full)
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
        name_or_path=name_or_path or _pipeline_of(getattr(config, "_name_or_path", None)),
    )


def _pipeline_of(source: str | None) -> str | None:
    """Name the pipeline that a transformer was loaded from, which is the folder around its own."""
    return str(Path(source).parent) if source and Path(source).name == "transformer" else source


def _check_own(key: str) -> None:
    if ".base_layer." in key or ".lora_" in key:
        raise ValueError(
            f"another adapter wraps this one ({key}), as LoRA on 'all-linear' does; nothing was saved. "
            f"Remove it, and add it again with exclude_modules=r'.*\\.{CHILD}\\..*'"
        )


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
        if parameter.is_meta:
            raise ValueError(f"{key} of the model is on the meta device; load the base's weights before the adapter's")
        with torch.no_grad():
            parameter.copy_(weights[key])
