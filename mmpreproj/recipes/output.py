"""The folder of a run: refused where something would be lost, cleared where that was asked for."""

from __future__ import annotations

import shutil
from pathlib import Path

from mmpreproj.training.checkpoints import checkpoints
from mmpreproj.training.config import ConfigError, TrainConfig

RECORDS = ("metrics.jsonl", "loss.png", "profile.png", "grid.png", "report.md")


def check_output(folder: Path, *, overwrite: bool) -> None:
    """Refuse a folder with an earlier run's results.

    Raises:
        ConfigError: if there are results and `overwrite` is false, or the path is a file.
    """
    if folder.is_file():
        raise ConfigError(f"output: {folder} is a file; name a folder")
    if any(path.exists() for path in _results(folder)) and not overwrite:
        raise ConfigError(f"output: {folder} holds the results of an earlier run; choose another, or add --overwrite")


def check_inputs_survive(config: TrainConfig) -> None:
    """Refuse to train from what the run is about to replace.

    Raises:
        ConfigError: if the model or the pictures are among the results in `config.output`.
    """
    inputs = {"model": config.model, "data.folder": config.data.folder}
    for field_name, value in inputs.items():
        if isinstance(value, (str, Path)) and Path(value).exists():
            place = Path(value).resolve()
            for result in (path.resolve() for path in _results(config.output)):
                if place == result or result in place.parents:
                    raise ConfigError(
                        f"{field_name}: {value} would be replaced by this run, which writes to {config.output}; "
                        "choose another output"
                    )


def clear_output(folder: Path) -> None:
    """Make the folder, and remove what an earlier run left in it."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in _results(folder):
        shutil.rmtree(path, ignore_errors=True)
    for name in RECORDS:
        (folder / name).unlink(missing_ok=True)


def _results(folder: Path) -> list[Path]:
    return [folder / "model", folder / "adapter", *checkpoints(folder / "checkpoints")]
