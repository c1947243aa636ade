"""How far a run was when a checkpoint was written, and whether another run may go on from there."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from mmpreproj.training.config import ConfigError, TrainConfig

PREFIX = "step-"
PROGRESS = "progress.json"

# What may change between a checkpoint and going on from it: nothing that a weight depends on.
MAY_CHANGE = frozenset(
    {
        "output",
        "evaluate_every",
        "held_out_levels",
        "validation",
        "trackers",
        "checkpoint_every",
        "keep_checkpoints",
        "push_to_hub",
        "data.cache",
        "data.workers",
        "data.on_error",
        "points.previews",
    }
)


@dataclass(frozen=True)
class Progress:
    """How far a run is.

    Attributes:
        step: the last one taken.
        pictures: that were trained on.
        seconds: that it took.
        samples: digest of what is trained on; see `EncodedPictures.digest`.
        config: the run's settings, as plain values.
        processes: how many the run has.
        files: the checkpoint's other files, by their paths in it, and how many bytes each has.
        digests: of the same files, as `file_digest` gives them; those of an older checkpoint are not known.
    """

    step: int
    pictures: int
    seconds: float
    samples: str
    config: dict[str, Any] = field(default_factory=dict)
    processes: int = 1
    files: dict[str, int] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)


def step_of(path: Path) -> int | None:
    """Read the step off a folder's name, `step-000123`; None if it has another."""
    number = path.name.removeprefix(PREFIX)
    return int(number) if path.name.startswith(PREFIX) and number.isdecimal() else None


def read_progress(checkpoint: Path, *, step: int | None) -> Progress:
    """Read how far a run was, and make sure that all files of the checkpoint are there in their whole length.

    Raises:
        ConfigError: saying what is missing or damaged, or that the checkpoint is of another step.
    """
    path = checkpoint / PROGRESS
    try:
        progress = TypeAdapter(Progress).validate_json(path.read_bytes(), strict=True)
    except FileNotFoundError as error:
        raise ConfigError(f"--resume: {checkpoint} is not whole: it has no {PROGRESS}") from error
    except (OSError, ValidationError) as error:
        raise ConfigError(f"--resume: {checkpoint} is not whole: {PROGRESS} is damaged ({error})") from error
    for name, size in progress.files.items():
        found = (checkpoint / name).stat().st_size if (checkpoint / name).is_file() else None
        if found != size:
            what = "is missing" if found is None else f"has {found} bytes of {size}"
            raise ConfigError(f"--resume: {checkpoint} is not whole: {name} {what}")
    if progress.step != step:
        raise ConfigError(f"--resume: {checkpoint} is of step {progress.step}; give the folder that step's name again")
    return progress


def check_contents(checkpoint: Path, progress: Progress) -> None:
    """Make sure that every byte of a checkpoint's files is as it was written; each is read whole.

    Raises:
        ConfigError: naming the first that is not, or that cannot be read.
    """
    for name, digest in progress.digests.items():
        try:
            found = file_digest(checkpoint / name)
        except OSError as error:
            raise ConfigError(f"--resume: {checkpoint} is not whole: {name} cannot be read ({error})") from error
        if found != digest:
            raise ConfigError(f"--resume: {checkpoint} is not whole: {name} has other bytes than were written")


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, in hexadecimal digits."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()


def check_progress(
    checkpoint: Path, config: TrainConfig, *, samples: str | None = None, processes: int = 1
) -> Progress:
    """Read how far a run was, and make sure that it is this one; without `samples`, all but its data is looked at.

    Raises:
        ConfigError: naming the settings that differ, or that the data do.
    """
    progress = read_progress(checkpoint, step=step_of(checkpoint))
    was, now = _flat(progress.config), _flat(config.model_dump(mode="json"))
    differing = sorted(key for key in was.keys() | now.keys() if was.get(key) != now.get(key) and not _may_change(key))
    if differing:
        told = "; ".join(f"{key} was {was.get(key)!r}, is {now.get(key)!r}" for key in differing)
        raise ConfigError(
            f"--resume: {checkpoint} is of a run with other settings, and going on would not give what either gives: "
            f"{told}. Give the same, or start anew in another output"
        )
    if progress.processes != processes:
        raise ConfigError(
            f"--resume: {checkpoint} is of a run on {progress.processes} processes, and this one has {processes}, so "
            "each step would have another number of pictures; start as many, or start anew in another output"
        )
    if samples is not None and progress.samples != samples:
        raise ConfigError(
            f"--resume: the pictures or captions are no longer those, or the base is no longer the one, that "
            f"{checkpoint} was trained on; bring them back, or start anew in another output"
        )
    return progress


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested values to dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def _may_change(key: str) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in MAY_CHANGE)
