"""Trials: one arm trained on one text at one learning rate and seed, and what it leaves on disk.

trials/TEXT/ARM/lr-0.001/seed-0/
  adapter/, lora/   what was trained
  losses.json       of every step
  record.json       how it went, written last: a trial with it is done
  scores.npz        of test text and tasks, item by item
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mmpreproj.files import write_atomically
from mmpreproj.language.config import BASE, ArmName
from mmpreproj.training.config import ConfigError

RECORD = "record.json"
ABSENT = "not there"


@dataclass(frozen=True)
class Trial:
    """One training run of a study.

    Attributes:
        text: name of the text.
        arm: name of the arm.
        learning_rate: peak rate; None for the base, which does not train.
        seed: of starting weights and of the order of blocks.
    """

    text: str
    arm: ArmName
    learning_rate: float | None
    seed: int

    def folder(self, records: Path) -> Path:
        """Name the folder of what it leaves."""
        place = records / self.text / self.arm
        return place if self.arm == BASE else place / f"lr-{self.learning_rate:g}" / f"seed-{self.seed}"

    def __str__(self) -> str:
        rate = "" if self.arm == BASE else f", rate {self.learning_rate:g}, seed {self.seed}"
        return f"{self.text}: {self.arm}{rate}"


@dataclass(frozen=True)
class TrialRecord:
    """How a trial went.

    Attributes:
        trial: which it is.
        settings: all that its result depends on.
        parameters: number of those that were trained.
        lora_rank: of its LoRA; 0 where there is none.
        validation_perplexity: at the end; infinite where the training diverged.
        loss: mean of the last tenth of the training steps, in nats a token; None for the base, and where it diverged.
        step_seconds: median time of a step; None for the base.
        peak_memory: most memory that training held, in bytes: of the GPU, or of the process on a CPU; None where it
            is not known.
        cache_bytes: of the K/V cache after a short text.
        skip_norms: `‖W_skip‖_F` of each layer.
        initial_skip_norms: at the start.
    """

    trial: Trial
    settings: Mapping[str, Any]
    parameters: int
    lora_rank: int
    validation_perplexity: float
    cache_bytes: int
    loss: float | None = None
    step_seconds: float | None = None
    peak_memory: int | None = None
    skip_norms: tuple[float, ...] = ()
    initial_skip_norms: tuple[float, ...] = ()


def write_record(record: TrialRecord, folder: Path) -> None:
    """Write a trial's record in one move."""
    text = json.dumps(asdict(record), indent=1) + "\n"
    write_atomically(folder / RECORD, lambda path: Path(path).write_text(text, encoding="utf-8"))


def read_record(folder: Path, settings: Mapping[str, Any]) -> TrialRecord | None:
    """Read the record of a trial that is done; None where there is none.

    Raises:
        ConfigError: if it cannot be read, or was made with other settings; those that differ are named.
    """
    path = folder / RECORD
    if not path.is_file():
        return None
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        found = values["settings"]
        values["trial"] = Trial(**values["trial"])
        values |= {key: tuple(values[key]) for key in ("skip_norms", "initial_skip_norms")}
        record = TrialRecord(**values)
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise ConfigError(
            f"{path} is damaged ({type(error).__name__}: {error}); remove the folder that it is in, and the trial is "
            "made again"
        ) from error
    check_settings(found, settings, path)
    return record


def check_settings(
    found: Any, wanted: Mapping[str, Any], path: Path, *, way_out: str = "remove the folder that it is in"
) -> None:
    """Refuse what was made with other settings.

    Args:
        found: what a file says that it was made with.
        wanted: what it would be made with now.
        path: the file.
        way_out: what else can be done than to choose another output.

    Raises:
        ConfigError: naming each setting that differs, what it was and what it is now.
    """
    before, now = _flat(found), _flat(json.loads(json.dumps(wanted)))
    differing = [key for key in sorted({*before, *now}) if before.get(key, ABSENT) != now.get(key, ABSENT)]
    if differing:
        told = "; ".join(f"{key} was {_short(before, key)}, is {_short(now, key)}" for key in differing)
        raise ConfigError(f"output: {path} was made with other settings: {told}. Choose another output, or {way_out}")


def _flat(value: Any, place: str = "") -> dict[str, Any]:
    """Give each setting in a tree of mappings its path."""
    if not (isinstance(value, Mapping) and value):
        return {place or "settings": value}
    parts = (_flat(below, f"{place}.{key}" if place else str(key)) for key, below in value.items())
    return {key: below for part in parts for key, below in part.items()}


def _short(settings: Mapping[str, Any], key: str, *, most: int = 80) -> str:
    text = json.dumps(settings[key], sort_keys=True) if key in settings else ABSENT
    return text if len(text) <= most else f"{text[: most - 1]}…"
