"""Adapters from a model to disk and back; keys in the file do not carry the adapter's name."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch
from accelerate.utils import align_module_device
from huggingface_hub import HfApi
from torch import Tensor, nn

from mmpreproj import __version__
from mmpreproj.core.sharding import whole
from mmpreproj.patching.config import PreProjConfig
from mmpreproj.patching.families import Family, joint_blocks
from mmpreproj.patching.files.card import write_card
from mmpreproj.patching.files.exchange import copy_in_place, fill, replace_modules
from mmpreproj.patching.files.format import (
    BaseModel,
    SavedAdapter,
    find_folder,
    read_config,
    read_weights,
    write_adapter,
)
from mmpreproj.patching.hooks import CHILD
from mmpreproj.patching.lifecycle import (
    build,
    check_new_name,
    family_for,
    install,
)
from mmpreproj.patching.lookup import (
    adapters,
    attention_sites,
    family_of,
    named_adapters,
    resolve_name,
    unwrap,
)
from mmpreproj.patching.machinery import check_not_distributed
from mmpreproj.patching.offloading import check_values_present
from mmpreproj.patching.points.hooks import path_of
from mmpreproj.patching.points.life import check_room_for_points
from mmpreproj.patching.points.path import POINT_CHILD
from mmpreproj.patching.profile import profile
from mmpreproj.patching.report import PatchReport, report
from mmpreproj.patching.text_length import text_length


def save(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    name: str | None = None,
    base_model: str | None = None,
    card: bool = True,
) -> Path:
    """Write one of a model's adapters to a folder; the base is not written, and neither are name and scale.

    Each file is written beside its final name and moved over it, so that an interrupted save leaves the old adapter
    or the new one. Where FSDP shards the weights they are gathered, so every process must call this, and each writes
    the whole file.

    Args:
        model: a patched model.
        folder: made if it does not exist.
        name: which adapter; None for the only one.
        base_model: hub id or folder of the base, kept in the file; defaults to where the model was loaded from.
        card: write a model card too, `README.md` with the skip profile's picture `profile.png`. A README that this
            function did not write is left alone.

    Returns:
        The folder.

    Raises:
        ValueError: if the model carries no adapter or several and none is named, its weights are on the `meta` device,
            one is not finite, or group offloading keeps them on disk.
    """
    model = unwrap(model)
    name = resolve_name(model, name)
    check_values_present(model)
    weights = adapter_state(model, name)
    saved = SavedAdapter(
        base=describe_base(model, family_of(model), name_or_path=base_model),
        config=adapter_config(model, name),
        initial_norms={path: adapter.initial_norms for path, adapter in named_adapters(model, name)},
        library_version=__version__,
        max_sequence_length=text_length(model, name=name),
    )
    folder = Path(folder)
    write_adapter(folder, saved, weights)
    if card:
        write_card(folder, saved, report(model, name=name), profile(model, name=name))
    return folder


def push_to_hub(
    model: nn.Module,
    repo_id: str,
    *,
    name: str | None = None,
    base_model: str | None = None,
    private: bool | None = None,
    token: str | None = None,
    commit_message: str = "Upload mmpreproj adapter",
) -> str:
    """Save an adapter with its card and upload it; the repository is made if it does not exist.

    Args:
        model: a patched model.
        repo_id: `owner/name` on the hub.
        name: which adapter; None for the only one.
        base_model: hub id of the base, for the card; see `save`.
        private: whether a new repository is private; None for the account's default.
        token: access token; None for the one that is logged in.
        commit_message: of the upload.

    Returns:
        The commit's address.

    Raises:
        ValueError: see `save`; nothing is uploaded then.
        huggingface_hub.errors.HfHubHTTPError: if the hub refuses.
    """
    with tempfile.TemporaryDirectory() as folder:
        save(model, folder, name=name, base_model=base_model)
        hub = HfApi(token=token)
        repo = hub.create_repo(repo_id, private=private, exist_ok=True)
        commit = hub.upload_folder(repo_id=repo.repo_id, folder_path=folder, commit_message=commit_message)
    return str(commit.commit_url)


def load(
    model: nn.Module,
    source: str | os.PathLike[str],
    *,
    name: str = "default",
    replace: bool = False,
    family: Family | None = None,
    subfolder: str | None = None,
    revision: str | None = None,
) -> PatchReport:
    """Patch a model with a saved adapter; on any error the model is left as it was.

    Loaded weights take the dtype of the attention they join, whatever dtype the file holds; weights that are changed
    in place keep theirs.

    Args:
        model: a model of the class and size that the adapter was made for.
        source: a folder, or a hub id.
        name: what the adapter is called on this model.
        replace: swap it in for the adapter that has this name now, whose scale and switch it takes over. Where both
            have the same shape the weights are changed in place, and a compiled model is not compiled again.
        family: a row of your own for a model that the table does not know.
        subfolder: a folder inside `source`.
        revision: branch, tag or commit on the hub.

    Returns:
        A report of blocks, streams and parameters.

    Raises:
        FileNotFoundError: if there is no adapter at `source`.
        ValueError: if a file is damaged or foreign, the adapter was made for another base (both are named), or the
            name is taken and `replace` is false, the model is shared by several processes already, or group
            offloading keeps it on disk.
    """
    wrapper, model = model, unwrap(model)
    folder = find_folder(source, subfolder=subfolder, revision=revision)
    saved, weights = read_config(folder), read_weights(folder)
    is_new = not (replace and name in adapters(model))
    if is_new:
        check_new_name(model, name)
    check_values_present(model)
    family = family_for(model, family)
    _check_base(saved.base, describe_base(model, family), folder)
    check_room_for_points(model, saved.config, replacing=None if is_new else name)
    with torch.random.fork_rng():  # the start that is about to be overwritten must not disturb anybody's seed
        built = build(model, saved.config, family=family)
    fill(built, saved, weights, folder)
    if not is_new and copy_in_place(model, built, weights, name=name):
        return report(model, name=name)
    check_not_distributed(wrapper)
    if is_new:
        install(model, built, name=name)
    else:
        replace_modules(model, built, name=name)
    return report(model, name=name)


def adapter_state(model: nn.Module, name: str) -> dict[str, Tensor]:
    """Collect an adapter's weights under the keys of its file, on the CPU; whole ones, where processes share them.

    Raises:
        ValueError: if a weight is on the `meta` device or not finite.
    """
    state = {}
    parts: dict[str, nn.Module] = {f"{path}.{CHILD}": adapter for path, adapter in named_adapters(model, name)}
    points = path_of(model, name)
    if points is not None:
        parts[POINT_CHILD] = points
    for path, part in parts.items():
        for module_path, module in part.named_modules():
            with align_module_device(module):
                for key, parameter in module.named_parameters(recurse=False):
                    full = f"{path}.{module_path}.{key}"
                    value = whole(parameter.detach())
                    _check_savable(full, value)
                    state[full] = value.to("cpu", copy=True).contiguous()
    return state


def adapter_config(model: nn.Module, name: str) -> PreProjConfig:
    """Return the config that an adapter was made from."""
    return next(adapter.config for _, adapter in named_adapters(model, name))


def describe_base(model: nn.Module, family: Family, *, name_or_path: str | None = None) -> BaseModel:
    """Describe a model as the base of an adapter."""
    _, _, _, attention = next(attention_sites(model, family))
    config = getattr(model, "config", None)
    return BaseModel(
        model_class=family.model_class,  # what a subclass changes is not in the weights
        width=family.width_of(attention),
        depth=len(joint_blocks(model, family)),
        heads=family.heads_of(attention),
        name_or_path=name_or_path or _pipeline_of(getattr(config, "_name_or_path", None)),
        settings=family.settings_of(model),
    )


def _pipeline_of(source: str | None) -> str | None:
    """Name the pipeline that a transformer was loaded from, which is the folder around its own."""
    return str(Path(source).parent) if source and Path(source).name == "transformer" else source


def _check_savable(key: str, parameter: Tensor) -> None:
    if parameter.is_meta:
        raise ValueError(f"{key} is on the meta device and has no values to save; load the model's weights first")
    if parameter.numel() == 0:
        raise ValueError(
            f"{key} is empty, as DeepSpeed's ZeRO-3 leaves weights between uses; call save inside "
            "deepspeed.zero.GatheredParameters(list(mmpreproj.parameters(model))) in every process"
        )
    if not torch.isfinite(parameter).all():
        raise ValueError(f"{key} holds NaN or infinite values; nothing was saved")


def _check_base(saved: BaseModel, found: BaseModel, folder: Path) -> None:
    if not saved.fits(found):
        raise ValueError(f"the adapter in {folder} was made for {saved}, but this model is {found}")
