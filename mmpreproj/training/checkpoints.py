"""Checkpoints: what has been learned so far, each in a folder that is either whole or not there."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Literal

from torch import nn

from mmpreproj.patching.files.storage import save
from mmpreproj.patching.lifecycle import detached
from mmpreproj.patching.lookup import is_patched

PREFIX = "step-"


def write_weights(
    transformer: nn.Module, folder: Path, *, mode: Literal["probe", "full"], base_model: str | None = None
) -> None:
    """Write what a mode trains: the adapter alone, or `transformer/` (the base) and `preproj/` (the adapter)."""
    if mode == "probe":
        save(transformer, folder, base_model=base_model, card=False)
        return
    with detached(transformer) as base:
        base.save_pretrained(folder / "transformer")  # type: ignore[operator]
    if is_patched(transformer):
        save(transformer, folder / "preproj", base_model=base_model, card=False)


def write_checkpoint(
    transformer: nn.Module,
    folder: Path,
    *,
    step: int,
    mode: Literal["probe", "full"],
    keep: int,
    base_model: str | None = None,
) -> Path:
    """Write `folder/step-000123` in one move and remove the oldest beyond `keep`.

    Returns:
        The checkpoint's folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{PREFIX}{step:06d}"
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=folder))
    try:
        write_weights(transformer, partial, mode=mode, base_model=base_model)
        os.chmod(partial, 0o755)
        if target.exists():
            shutil.rmtree(target)
        os.replace(partial, target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    for old in checkpoints(folder)[:-keep]:
        shutil.rmtree(old)
    return target


def checkpoints(folder: Path) -> list[Path]:
    """List complete checkpoints, the oldest first."""
    found = {int(path.name[len(PREFIX) :]): path for path in folder.glob(f"{PREFIX}*") if _is_checkpoint(path)}
    return [found[step] for step in sorted(found)]


def _is_checkpoint(path: Path) -> bool:
    return path.is_dir() and path.name[len(PREFIX) :].isdecimal()
