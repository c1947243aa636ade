"""The folder of a run: refused where something would be lost, cleared where that was asked for."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Literal

from mmpreproj.patching.files.format import CONFIG_NAME
from mmpreproj.training.checkpoints import checkpoint_folders
from mmpreproj.training.config import ConfigError, TrainConfig
from mmpreproj.training.weights import LORA

RECORDS = ("config.yaml", "metrics.jsonl", "loss.png", "profile.png", "grid.png", "report.md")
PREVIEWS = ("pictures", "shapes")
RESULTS = ("model", "adapter", LORA, "tensorboard")


def check_output(folder: Path, *, overwrite: bool) -> None:
    """Refuse a folder with an earlier run's results, or with files of those names that no run wrote.

    Raises:
        ConfigError: if there are such files and `overwrite` is false; if a folder that would be replaced is of no run;
            or if the path is a file.
    """
    check_folder(folder)
    if (folder / "previews").is_file():
        raise ConfigError(f"output: {folder / 'previews'} is a file, and a run keeps a folder there; choose another")
    for path in (folder / name for name in RESULTS):
        if path.exists() and not _is_result(path):
            raise ConfigError(f"output: {path} was not written by a run, and this one would; choose another folder")
    records = (*(folder / name for name in RECORDS), *_previews(folder))
    found = [path for path in (*_results(folder), *records) if path.exists()]
    if found and not overwrite:
        raise ConfigError(
            f"output: {folder} holds the results of an earlier run, or what looks like it ({found[0].name}); choose "
            "another folder, or add --overwrite to replace them"
        )


def check_folder(folder: Path) -> None:
    """Refuse a path that is a file, or that leads through one.

    Raises:
        ConfigError: naming the file.
    """
    file = next((path for path in (folder, *folder.parents) if path.is_file()), None)
    if file is not None:
        raise ConfigError(f"output: {file} is a file; name a folder")


def check_config_survives(file: Path, config: TrainConfig) -> None:
    """Refuse to write the full configuration over the very file that it was read from.

    Raises:
        ConfigError: naming the way out.
    """
    if file.resolve() == (config.output / "config.yaml").resolve():
        raise ConfigError(
            f"output: the run would write its full configuration over {file}, which it was read from; choose another "
            "output, or another name for the file"
        )


def check_inputs_survive(config: TrainConfig) -> None:
    """Refuse to train from what the run is about to replace.

    Raises:
        ConfigError: if the model or the pictures are among the results in `config.output`.
    """
    results = [path.resolve() for path in _results(config.output)]
    for field_name, value in _places(config).items():
        place = Path(value).expanduser().resolve()
        if place.exists() and any(result == place or result in place.parents for result in results):
            raise ConfigError(
                f"{field_name}: {value} would be replaced by this run, which writes to {config.output}; "
                "choose another output"
            )


def _places(config: TrainConfig) -> dict[str, str | Path]:
    """List what a run reads from this disk, or may, by the setting that names it."""
    places: dict[str, str | Path] = {"model": config.model} if isinstance(config.model, str) else {}
    if config.data.cache is not None:
        places["data.cache"] = config.data.cache
    for number, part in enumerate(config.data.sources):
        prefix = f"data.mix.{number}" if config.data.mix else "data"
        several = {"shards": part.shards, "data_files": part.data_files}
        named = {"folder": part.folder, "dataset": part.dataset}
        places |= {f"{prefix}.{key}": value for key, value in named.items() if value is not None}
        places |= {f"{prefix}.{key}": value for key, values in several.items() for value in values}
    return places


def clear_output(folder: Path) -> None:
    """Make the folder, and remove what an earlier run left in it."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in reversed(_results(folder)):  # checkpoints first, which nothing must go on from any more
        shutil.rmtree(path, ignore_errors=True)
    for path in (*(folder / name for name in RECORDS), *_previews(folder)):
        path.unlink(missing_ok=True)


def preview_path(folder: Path, step: int, *, kind: Literal["shapes", "pictures"]) -> Path:
    """Name the picture of what a model in training makes at a step, and make its folder."""
    path = folder / "previews" / f"{kind}-{step:06d}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _is_result(path: Path) -> bool:
    if not path.is_dir():
        return False
    marks = ("model_index.json", CONFIG_NAME, "pytorch_lora_weights.safetensors", "events.out.tfevents.*")
    return any(any(path.glob(mark)) for mark in marks) or not any(path.iterdir())


def _previews(folder: Path) -> list[Path]:
    return sorted(path for kind in PREVIEWS for path in (folder / "previews").glob(f"{kind}-[0-9]*.png"))


def _results(folder: Path) -> list[Path]:
    return [*(folder / name for name in RESULTS), *checkpoint_folders(folder / "checkpoints")]
