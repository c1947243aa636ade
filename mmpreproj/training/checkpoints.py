"""Checkpoints: all that a run needs to go on, each in a folder that is either whole or not there.

runs/x/checkpoints/step-000500/
  adapter_config.json, adapter_model.safetensors, lora/ …   what is trained, to be used as it is
  state/                                                   optimiser, schedule, averages, scaler, random numbers
  progress.json                                            how far the run was, of which run it is, and its files:
                                                           how long each is, and its digest

A checkpoint is written as `.step-000500.partial`, with `progress.json` last, and moved to its name. What is removed or
replaced is moved to `.step-000500.removed` first. So a process may be killed at any instant.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError

from mmpreproj.files import flush_folder
from mmpreproj.training import state
from mmpreproj.training.config import ConfigError
from mmpreproj.training.processes import on_every_process, on_main_process
from mmpreproj.training.progress import (
    PREFIX,
    PROGRESS,
    Progress,
    check_contents,
    file_digest,
    read_progress,
    step_of,
)
from mmpreproj.training.sharing import whole_weights
from mmpreproj.training.weights import trains_base, write_weights

if TYPE_CHECKING:
    from mmpreproj.training.stepper import Stepper

STATE = "state"
PARTIAL, REMOVED = ".partial", ".removed"
logger = logging.getLogger(__name__)


def checkpoints(folder: Path) -> list[Path]:
    """List complete checkpoints, the oldest first.

    Complete is one whose `progress.json` can be read, and all of whose files are there in their whole length; what is
    in them is not read, which `find_checkpoint` does.
    """
    return [path for path in _numbered(folder) if _fault(path, step_of(path)) is None]


def checkpoint_folders(folder: Path) -> list[Path]:
    """List everything that runs have left in a folder of checkpoints, what is not whole included."""
    hidden = (path for suffix in (PARTIAL, REMOVED) for path in folder.glob(f".{PREFIX}*{suffix}"))
    return [*_numbered(folder), *hidden]


def find_checkpoint(folder: Path, which: str) -> Path:
    """Find a checkpoint of a run by `latest`, by its step, or by its path.

    Its files are read and compared with their digests. A newer one that is not whole is passed over by `latest`, with
    a warning that names what it lacks.

    Raises:
        ConfigError: if there is none, or the one that is named is not whole; those that there are are listed.
    """
    _finish_moves(folder)
    numbered = _numbered(folder)
    faults: list[str] = []
    for path in reversed(numbered) if which == "latest" else ():
        fault = _fault(path, step_of(path), read_files=True)
        if fault is None:
            for newer in faults:
                logger.warning("%s; going on from an earlier one", newer)
            return path
        faults.append(fault)
    if faults:
        newest = faults[0].removeprefix("--resume: ")
        raise ConfigError(
            f"--resume: no checkpoint {which!r} to go on from; {folder} holds none that is whole: {newest}"
        )
    there = checkpoints(folder)
    listed = f"there are {', '.join(path.name for path in there)}" if there else f"{folder} holds none that is whole"
    named = {path.name: path for path in numbered} | {str(step_of(path)): path for path in numbered}
    found = named.get(which, Path(which))
    if step_of(found) is None or not found.is_dir():
        raise ConfigError(f"--resume: no checkpoint {which!r} to go on from; {listed}")
    fault = _fault(found, step_of(found), read_files=True)
    if fault is not None:
        raise ConfigError(f"{fault}; {listed}")
    return found


def tell_last(folder: Path) -> str:
    """Say which checkpoint a run can go on from, for the message that ends one."""
    kept = checkpoints(folder)
    return (
        f"the last good checkpoint is {kept[-1]}, go on with --resume latest" if kept else "there is no checkpoint yet"
    )


def drop_later(folder: Path, step: int) -> None:
    """Remove the checkpoints after a step that a run goes back to: its records of them are dropped too."""
    for path in _numbered(folder):
        if (step_of(path) or 0) > step:
            _remove(path)


def write_checkpoint(stepper: Stepper, progress: Progress) -> Path:
    """Write `checkpoints/step-000123` in one move and remove the oldest; every process calls this.

    Later ones are removed too: they are of a run that this one takes the place of.

    Returns:
        The checkpoint's folder.

    Raises:
        OSError: if it cannot be written, on every process; what was there before is kept.
    """
    accelerator, config, folder = stepper.accelerator, stepper.config, stepper.checkpoint_folder
    target = folder / f"{PREFIX}{progress.step:06d}"
    partial = folder / f".{target.name}{PARTIAL}"
    settings = config.model_dump(mode="json")
    progress = dataclasses.replace(progress, config=settings, processes=accelerator.num_processes)
    try:
        on_main_process(accelerator, lambda: _begin(folder, partial))
        _write_parts(stepper, partial)
        on_main_process(accelerator, lambda: _finish(partial, target, progress))
    except Exception as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(
            error, (OSError, RuntimeError, SafetensorError)
        ):  # torch and safetensors have errors of their own
            raise _not_written(error, folder, progress.step) from error
        raise
    on_main_process(accelerator, lambda: _drop_others(folder, progress.step, keep=config.keep_checkpoints))
    return target


def load_checkpoint(checkpoint: Path, stepper: Stepper) -> None:
    """Put a run where a checkpoint has left it; every process calls this.

    Raises:
        ConfigError: if its files are damaged, or not of this run.
    """
    state.load_state(checkpoint / STATE, stepper)


def clean(folder: Path) -> None:
    """Finish or remove what a killed process has left half-done."""
    _finish_moves(folder)
    for path in checkpoint_folders(folder):
        if step_of(path) is None:
            shutil.rmtree(path, ignore_errors=True)


def _begin(folder: Path, partial: Path) -> None:
    clean(folder)
    partial.mkdir(parents=True)


def _write_parts(stepper: Stepper, partial: Path) -> None:
    accelerator, config = stepper.accelerator, stepper.config
    on_every_process(lambda: state.save_state(stepper, partial / STATE))
    base = config.model if isinstance(config.model, str) else None
    with whole_weights(stepper.transformer, keep=accelerator.is_main_process, frozen=trains_base(config)):
        on_main_process(accelerator, lambda: write_weights(stepper.transformer, partial, config, base_model=base))


def _finish(partial: Path, target: Path, progress: Progress) -> None:
    """Write what makes a checkpoint whole, once everything else is on the disk, and move it to its name."""
    files = {path.relative_to(partial).as_posix(): path for path in sorted(partial.rglob("*")) if path.is_file()}
    _flush(partial)
    sizes = {name: path.stat().st_size for name, path in files.items()}
    digests = {name: file_digest(path) for name, path in files.items()}
    told = json.dumps(dataclasses.asdict(dataclasses.replace(progress, files=sizes, digests=digests)))
    (partial / PROGRESS).write_text(told, encoding="utf-8")
    _flush(partial)
    _put_in_place(partial, target)


def _drop_others(folder: Path, step: int, *, keep: int) -> None:
    """Remove the checkpoints after a step, and the oldest."""
    drop_later(folder, step)
    for old in checkpoints(folder)[:-keep]:
        _remove(old)


def _put_in_place(partial: Path, target: Path) -> None:
    """Move a whole checkpoint to its name; if the process is killed between two moves, `_finish_moves` ends it."""
    aside = target.with_name(f".{target.name}{REMOVED}")
    replaces = target.exists()
    if replaces:
        os.replace(target, aside)
    try:
        os.replace(partial, target)
    except OSError:
        if replaces:
            os.replace(aside, target)
        raise
    for folder in (target.parent, target.parent.parent):
        flush_folder(folder)
    shutil.rmtree(aside, ignore_errors=True)


def _finish_moves(folder: Path) -> None:
    """Move to their names the checkpoints that were whole when their process was killed."""
    for partial in folder.glob(f".{PREFIX}*{PARTIAL}"):
        target = partial.with_name(partial.name[1 : -len(PARTIAL)])
        if not target.exists() and _fault(partial, step_of(target)) is None:
            try:
                os.replace(partial, target)
            except FileNotFoundError:
                continue  # another process of this run was faster


def _remove(path: Path) -> None:
    """Remove a checkpoint; killed half-way, it is no half checkpoint."""
    hidden = path.with_name(f".{path.name}{REMOVED}")
    shutil.rmtree(hidden, ignore_errors=True)
    os.replace(path, hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def _numbered(folder: Path) -> list[Path]:
    found = {step_of(path): path for path in folder.glob(f"{PREFIX}*") if path.is_dir()}
    return [found[step] for step in sorted(step for step in found if step is not None)]


def _fault(path: Path, step: int | None, *, read_files: bool = False) -> str | None:
    """Say what a checkpoint lacks, by the sizes of its files, or also by what is in them; None if it is whole."""
    try:
        progress = read_progress(path, step=step)
        if read_files:
            check_contents(path, progress)
    except ConfigError as error:
        return str(error)
    return None


def _not_written(error: Exception, folder: Path, step: int) -> OSError:
    reason = getattr(error, "strerror", None) or error
    told = f"the checkpoint of step {step} could not be written ({reason}); {tell_last(folder)}"
    number = getattr(error, "errno", None)
    return OSError(f"{told}: {folder}") if number is None else OSError(number, told, str(folder))


def _flush(folder: Path) -> None:
    """Make sure that every file below is on the disk, and not only on its way."""
    for parent, _, files in os.walk(folder):
        for name in files:
            with open(Path(parent) / name, "rb") as file:
                os.fsync(file.fileno())
        flush_folder(Path(parent))
