"""Whole runs on two processes: from a cold cache to the results, as on one, and everything written once and whole."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from PIL import Image
from processes_kit import WORLD, meeting, run_in_processes
from rich.console import Console
from training_kit import begin_sharding, told_of_others

import mmpreproj
from mmpreproj.patching.files.format import read_weights
from mmpreproj.pipelines import PreProjSD3Pipeline
from mmpreproj.recipes.train import TrainingRun, run_training
from mmpreproj.training.config import TrainConfig, read_config, write_config

BROKEN = ("03.png", "08.png")
pytestmark = pytest.mark.slow  # the loop on two processes is in the default tests: tests/training/test_processes.py
SETTINGS: dict[str, dict[str, Any]] = {
    "ddp": {
        "ema": {"decay": 0.5, "warmup": False},
        "validation": {"prompts": ["red square"], "count": 1, "steps": 2},
    },
    "fsdp2": {
        "mode": "full",
        "optimizer": {"name": "sgd", "learning_rate": 1e-2, "warmup_steps": 0},
        "validation": {"prompts": ["red square"], "count": 1, "steps": 2},
    },
}


def run(config: TrainConfig) -> tuple[TrainingRun, str]:
    """Train, and return what was shown too."""
    screen = io.StringIO()
    return run_training(config, console=Console(file=screen, width=200)), screen.getvalue()


def run_here(rank: int, folder: Path) -> None:
    """Take every run of the folder, and note what this process knows at its end."""
    for way in SETTINGS:
        AcceleratorState._reset_state(reset_partial_state=True)
        if way == "fsdp2":
            begin_sharding()
        done, screen = run(read_config(folder / f"{way}.yaml"))
        told = {
            "losses": [record.loss for record in done.history],
            "held_out": [record.held_out for record in done.history],
            "skipped": [picture.name for picture in done.skipped],
            "screen": screen,
        }
        (folder / f"{way}-{rank}.json").write_text(json.dumps(told), encoding="utf-8")


def write_pictures(folder: Path) -> Path:
    """Write twelve pictures of two sizes, of which two can be looked at and not decoded, and their captions."""
    folder.mkdir()
    generator, lines = np.random.default_rng(0), []
    for index in range(12):
        name, shape = f"{index:02}.png", (16, 32, 3) if index % 3 == 2 else (24, 24, 3)
        Image.fromarray(generator.integers(0, 256, shape, dtype=np.uint8)).save(folder / name)
        if name in BROKEN:
            (folder / name).write_bytes((folder / name).read_bytes()[:600])
        lines.append(json.dumps({"file_name": name, "text": f"{('red', 'green', 'blue')[index % 3]} square"}))
    (folder / "metadata.jsonl").write_text("\n".join(lines))
    return folder


@pytest.fixture(scope="module")
def folders(saved_pipelines: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Take the runs on one process and on two; returns the folders that they wrote to, one below another a run."""
    alone, together = tmp_path_factory.mktemp("alone"), tmp_path_factory.mktemp("together")
    pictures = write_pictures(alone / "pictures")
    for way, settings in SETTINGS.items():
        for folder, processes in ((alone, 1), (together, WORLD)):
            values: dict[str, Any] = {
                "model": str(saved_pipelines["latents"]),
                "output": folder / way / "run",
                "steps": 4,
                "batch_size": 4 // processes,
                "evaluate_every": 2,
                "checkpoint_every": 2,
                "max_sequence_length": 6,
                "optimizer": {"learning_rate": 1e-3, "warmup_steps": 0},
            }
            data = {"folder": pictures, "resolution": 16, "flip": 0.5, "held_out": 2, "cache": folder / way / "cache"}
            write_config(TrainConfig(**(values | settings), data=data), folder / f"{way}.yaml")
        AcceleratorState._reset_state(reset_partial_state=True)
        run(read_config(alone / f"{way}.yaml"))
    return alone, run_in_processes(__file__, together)


def told(folder: Path, way: str) -> list[dict[str, Any]]:
    """What each process knew at the end."""
    return [json.loads((folder / f"{way}-{rank}.json").read_text()) for rank in range(WORLD)]


def metrics(folder: Path, way: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / way / "run" / "metrics.jsonl").read_text().splitlines()]


def files(folder: Path) -> set[str]:
    """Everything below a run's folder but the state of its processes and TensorBoard's files, named after the time."""
    found = {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}
    return {path.as_posix() for path in found if not {"state", "tensorboard"} & set(path.parts)}


@pytest.mark.parametrize("way", SETTINGS)
def test_a_run_on_two_processes_gives_the_losses_of_one_and_writes_each_record_once(folders, way):
    expected, found = (metrics(folder, way) for folder in folders)
    assert [record["step"] for record in found] == [0, 1, 2, 3, 4]
    for key in ("loss", "held_out", "grad_norm"):
        values, others = ({record["step"]: record[key] for record in each} for each in (expected, found))
        assert [step for step, value in values.items() if value is not None]
        assert {step: value or 0.0 for step, value in others.items()} == pytest.approx(
            {step: value or 0.0 for step, value in values.items()}, rel=1e-5
        ), key


@pytest.mark.parametrize("way", SETTINGS)
def test_both_processes_know_the_same_and_one_speaks(folders, way):
    first, second = told(folders[1], way)
    assert {**first, "screen": ""} == {**second, "screen": ""}
    assert first["skipped"] == list(BROKEN)
    assert "2 pictures could not be used" in first["screen"]
    assert second["screen"].strip() == ""


@pytest.mark.parametrize("way", SETTINGS)
def test_the_files_are_those_of_one_process_and_whole(folders, way):
    alone, together = (files(folder / way / "run") for folder in folders)
    assert together == alone
    assert {"loss.png", "profile.png", "config.yaml"} <= together
    assert any(name.startswith("previews/") for name in together) == ("validation" in SETTINGS[way])
    assert not any("partial" in name for name in together)


@pytest.mark.parametrize("way", [way for way, settings in SETTINGS.items() if "validation" in settings])
def test_previews_are_the_pictures_that_one_process_draws(folders, way):
    names = sorted(path.name for path in (folders[0] / way / "run" / "previews").iterdir())
    assert names
    for name in names:
        one, two = (Image.open(folder / way / "run" / "previews" / name).convert("RGB") for folder in folders)
        difference = np.abs(np.asarray(one, dtype=float) - np.asarray(two, dtype=float))
        assert difference.max() <= 2, name  # of 255: rounding


def test_the_adapter_of_two_processes_is_that_of_one(folders):
    expected, found = (read_weights(folder / "ddp" / "run" / "adapter") for folder in folders)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-6, msg=key)


def test_a_model_whose_weights_were_shared_out_is_saved_whole(folders):
    expected, found = (PreProjSD3Pipeline.from_pretrained(folder / "fsdp2" / "run" / "model") for folder in folders)
    assert mmpreproj.adapters(found.transformer) == ("default",)
    weights = found.transformer.state_dict()
    assert weights.keys() == expected.transformer.state_dict().keys()
    for key, value in expected.transformer.state_dict().items():
        torch.testing.assert_close(weights[key], value, rtol=1e-4, atol=1e-6, msg=key)


if __name__ == "__main__":
    sys.path = [path for path in sys.path if Path(path or ".").resolve() != Path(__file__).parent]
    with meeting() as place, told_of_others(place[0]):
        run_here(*place)
