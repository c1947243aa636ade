"""A pipeline's adapters on disk: `preproj/` beside the components, in a folder or on the hub.

One adapter called `default`, at scale 1 and switched on, lies in `preproj/` itself. Any others lie in
`preproj/<name>/` each, and `preproj/adapters.json` lists them with their scales and switches. Where that list is
there, it alone counts; it is written last, so that a save that was broken off leaves the old adapters, the new ones,
or an error.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import file_exists, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from torch import nn

from mmpreproj.patching.control import disable, is_enabled, scales, set_scale
from mmpreproj.patching.files.format import CONFIG_NAME, WEIGHTS_NAME, read_config
from mmpreproj.patching.files.storage import load, save
from mmpreproj.patching.integrity import noted_adapters
from mmpreproj.patching.lifecycle import unpatch
from mmpreproj.patching.lookup import adapters, is_patched
from mmpreproj.pipelines.adapter_list import LIST_NAME, ListedAdapter, check_folder_names, read_list, write_list

logger = logging.getLogger(__name__)

ADAPTER_FOLDER = "preproj"


def find_adapter(source: str | os.PathLike[str], components: Mapping[str, Any]) -> Path | None:
    """Find the adapter of a pipeline that was loaded from `source`.

    Args:
        source: a pipeline's folder, or a hub id.
        components: the pipeline's components by name; they tell which snapshot of a hub id was loaded.

    Returns:
        The folder with the adapter, or None if there is none.

    Raises:
        ValueError: if the hub has an adapter that cannot be fetched.
    """
    folder: Path | None = Path(source)
    if not Path(source).is_dir():
        folder = _fetch_adapter(str(source), components)
    if folder is None:
        return None
    home = folder / ADAPTER_FOLDER
    return home if (home / LIST_NAME).is_file() or _has_files(home) or _subfolders(home) else None


def save_adapters(model: nn.Module, folder: Path) -> None:
    """Write all adapters of a model to a folder in place of those it holds, with their scales and switches.

    Raises:
        ValueError: if a name cannot be a folder's, or an adapter cannot be saved (see `mmpreproj.save`); the folder
            is as it was then.
    """
    names = adapters(model)
    if names == ("default",) and is_enabled(model) and set(scales(model)["default"].values()) == {1.0}:
        save(model, folder, card=False)
        (folder / LIST_NAME).unlink(missing_ok=True)  # from here on the folder's own files count
        _remove_all_but((), folder)
        return
    names = tuple(
        name for name in noted_adapters(model) if name in names
    )  # as they were put on, so as they are summed
    check_folder_names(names)
    strengths = scales(model)
    listed = {name: ListedAdapter(strengths[name], is_enabled(model, name)) for name in names}
    made = not folder.parent.exists()
    folder.parent.mkdir(parents=True, exist_ok=True)
    staged = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        for name in names:
            save(model, staged / name, name=name, card=False)
        folder.mkdir(exist_ok=True)
        (folder / LIST_NAME).unlink(missing_ok=True)
        for name in names:
            (folder / name).mkdir(exist_ok=True)
            for file in (WEIGHTS_NAME, CONFIG_NAME):
                os.replace(staged / name / file, folder / name / file)
        write_list(folder, listed)
    finally:
        shutil.rmtree(staged, ignore_errors=True)
        if made:
            _remove_if_empty(folder.parent)
    remove_adapter(folder)
    _remove_all_but(names, folder)


def load_adapters(model: nn.Module, folder: Path) -> None:
    """Load what `save_adapters` wrote onto a model that carries no adapter; on any error it carries none still.

    Raises:
        FileNotFoundError: if an adapter lacks a file.
        ValueError: if one is damaged or was made for another base, or the list of them is missing or damaged.
    """
    if not (folder / LIST_NAME).is_file():
        if not _has_files(folder):
            raise ValueError(
                f"{folder} holds the adapters {', '.join(_subfolders(folder))}, but no {LIST_NAME}: saving it was "
                "broken off. Save the pipeline again, or load one of them with mmpreproj.load(model, folder)"
            )
        load(model, folder)
        return
    listed = read_list(folder)
    try:
        for name, kept in listed.items():
            load(model, folder / name, name=name)
            set_scale(model, {name: kept.scales})
            if not kept.enabled:
                disable(model, name)
    except BaseException:
        if is_patched(model):
            unpatch(model)
        raise


def saved_length(folder: Path) -> int | None:
    """Return the largest `max_sequence_length` of the adapters that `save_adapters` wrote; None where none has one.

    Raises:
        FileNotFoundError: if an adapter lacks its config.
        ValueError: if one is damaged, or the list of them is.
    """
    listed = (folder / LIST_NAME).is_file()
    folders = [folder / name for name in read_list(folder)] if listed else [folder] if _has_files(folder) else []
    lengths = [read_config(place).max_sequence_length for place in folders]
    return max((length for length in lengths if length is not None), default=None)


def check_upload(folder: Path, repo_id: str, *, subfolder: str | None = None, token: str | None = None) -> None:
    """Refuse to upload a pipeline's folder where the hub's adapters would be taken for its own.

    An upload deletes nothing, so what is on the hub already and counts would end up on this other base.

    Raises:
        ValueError: naming what the hub holds.
    """
    home = folder / ADAPTER_FOLDER
    if (home / LIST_NAME).is_file():
        return  # it counts, whatever else is there
    bare = not (home / CONFIG_NAME).is_file()
    for file in (CONFIG_NAME, LIST_NAME) if bare else (LIST_NAME,):
        path = "/".join(part for part in (subfolder, ADAPTER_FOLDER, file) if part)
        if file_exists(repo_id, path, token=token):
            found = "an adapter" if file == CONFIG_NAME else "named adapters"
            carries = "none" if bare else "a single one without a name"
            raise ValueError(
                f"{repo_id} on the hub holds {found} in {ADAPTER_FOLDER}/, but this pipeline carries {carries}; "
                "nothing was uploaded. Delete that folder on the hub first, or push to another repository"
            )


def _fetch_adapter(repo_id: str, components: Mapping[str, Any]) -> Path | None:
    """Return the snapshot that a hub pipeline was loaded from, with its adapter, if it has one, in it."""
    snapshot = snapshot_of(repo_id, components)
    if snapshot is None:
        logger.warning(
            "No component was loaded from %s itself, so its adapter, if it has one, was not looked for. "
            "Load it with mmpreproj.load(pipe.transformer, %r, subfolder=%r)",
            repo_id,
            repo_id,
            ADAPTER_FOLDER,
        )
        return None
    if _is_complete(snapshot / ADAPTER_FOLDER):
        return snapshot
    try:
        # Same commit, same cache: models--<id>/snapshots/<commit>. diffusers fetched only the folders that
        # model_index.json names; that file is asked for so that a base without an adapter is no warning. Offline the
        # snapshot comes back as it is, and is refused where the hub's listing promised an adapter.
        found = snapshot_download(
            repo_id,
            revision=snapshot.name,
            cache_dir=snapshot.parents[2],
            allow_patterns=["model_index.json", f"{ADAPTER_FOLDER}/*"],
        )
    except (HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise ValueError(
            f"the adapter in {ADAPTER_FOLDER}/ of {repo_id} could not be fetched ({error}). Go online once or, for a "
            "private repository, log in with `hf auth login`"
        ) from error
    return Path(found)


def snapshot_of(repo_id: str, components: Mapping[str, Any]) -> Path | None:
    """Find the hub snapshot that components were loaded from, by where they say they came from."""
    for name, component in components.items():
        settings = getattr(component, "config", None)
        settings = settings if isinstance(settings, Mapping) else {}
        path = Path(settings.get("_name_or_path") or getattr(component, "name_or_path", None) or "")
        if path.parts[-4:-2] == (f"models--{repo_id.replace('/', '--')}", "snapshots") and path.name == name:
            return path.parent
    return None


def remove_adapters(folder: Path) -> None:
    """Remove all adapters from a folder, and the folder itself if that leaves it empty."""
    remove_adapter(folder)
    _remove_all_but((), folder)
    (folder / LIST_NAME).unlink(missing_ok=True)  # last: what is half removed is an error
    _remove_if_empty(folder)


def remove_adapter(folder: Path) -> None:
    """Remove an adapter's two files, and their folder if that leaves it empty."""
    for file in (CONFIG_NAME, WEIGHTS_NAME):
        (folder / file).unlink(missing_ok=True)
    _remove_if_empty(folder)


def _remove_all_but(names: tuple[str, ...], folder: Path) -> None:
    for name in _subfolders(folder):
        if name not in names:
            remove_adapter(folder / name)


def _remove_if_empty(folder: Path) -> None:
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def _subfolders(folder: Path) -> list[str]:
    """Name the folders in a folder that hold an adapter, or half of one."""
    return sorted(path.name for path in folder.iterdir() if _has_files(path)) if folder.is_dir() else []


def _has_files(folder: Path) -> bool:
    return any((folder / file).is_file() for file in (CONFIG_NAME, WEIGHTS_NAME))


def _is_complete(folder: Path) -> bool:
    """Tell whether all that a folder says it holds is there."""
    if not (folder / LIST_NAME).is_file():
        return all((folder / file).is_file() for file in (CONFIG_NAME, WEIGHTS_NAME))
    return all((folder / name / file).is_file() for name in read_list(folder) for file in (CONFIG_NAME, WEIGHTS_NAME))
