"""Where a pipeline's adapter lies: `preproj/` beside the components, in a folder or on the hub."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from mmpreproj.patching.adapter_files import CONFIG_NAME, WEIGHTS_NAME

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
    if folder is None or not any((folder / ADAPTER_FOLDER / file).is_file() for file in (CONFIG_NAME, WEIGHTS_NAME)):
        return None
    return folder / ADAPTER_FOLDER


def _fetch_adapter(repo_id: str, components: Mapping[str, Any]) -> Path | None:
    """Return the snapshot that a hub pipeline was loaded from, with its adapter, if it has one, in it."""
    snapshot = _snapshot_of(repo_id, components)
    if snapshot is None:
        logger.warning(
            "No component was loaded from %s itself, so its adapter, if it has one, was not looked for. "
            "Load it with mmpreproj.load(pipe.transformer, %r, subfolder=%r)",
            repo_id,
            repo_id,
            ADAPTER_FOLDER,
        )
        return None
    if all((snapshot / ADAPTER_FOLDER / file).is_file() for file in (CONFIG_NAME, WEIGHTS_NAME)):
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


def _snapshot_of(repo_id: str, components: Mapping[str, Any]) -> Path | None:
    """Find the hub snapshot that components were loaded from, by where they say they came from."""
    for name, component in components.items():
        settings = getattr(component, "config", None)
        settings = settings if isinstance(settings, Mapping) else {}
        path = Path(settings.get("_name_or_path") or getattr(component, "name_or_path", None) or "")
        if path.parts[-4:-2] == (f"models--{repo_id.replace('/', '--')}", "snapshots") and path.name == name:
            return path.parent
    return None


def remove_adapter(folder: Path) -> None:
    """Remove an adapter's two files, and their folder if that leaves it empty."""
    for file in (CONFIG_NAME, WEIGHTS_NAME):
        (folder / file).unlink(missing_ok=True)
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
