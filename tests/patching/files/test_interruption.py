"""Saving that breaks off: whatever happens, the folder holds the old adapter or the new one."""

import multiprocessing
import os
import random
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import mmpreproj
from mmpreproj import PreProjConfig

WEIGHTS = "adapter_model.safetensors"
CONFIGS = {"old": PreProjConfig(), "new": PreProjConfig(share="stream", blocks=[0], expansion=0.5)}


@pytest.fixture
def versions(make_transformer, shake) -> dict[str, nn.Module]:
    """Two models with adapters of different shapes."""
    models = {}
    for seed, (version, config) in enumerate(CONFIGS.items()):
        models[version] = make_transformer("sd35")
        mmpreproj.patch(models[version], config)
        shake(models[version], seed=seed)
    return models


@pytest.fixture
def version_in(make_transformer, versions, predict):
    """Load what is in a folder and say which version it is; anything between is an error."""
    expected = {version: (mmpreproj.profile(model), predict(model)) for version, model in versions.items()}

    def find(folder: Path) -> str:
        model = make_transformer("sd35")
        mmpreproj.load(model, folder)
        profile, output = mmpreproj.profile(model), predict(model)
        (found,) = (
            version for version, (rows, values) in expected.items() if rows == profile and torch.equal(values, output)
        )
        return found

    return find


@pytest.fixture
def save_broken_off(monkeypatch):
    """Save, with the disk full at the given move of a file to its place, counted from 1."""

    def run(model: nn.Module, folder: Path, at: int) -> None:
        moves, move = [], os.replace

        def break_off(source: str, target: str) -> None:
            moves.append(target)
            if len(moves) == at:
                raise OSError(28, "No space left on device")
            move(source, target)

        with monkeypatch.context() as patched, pytest.raises(OSError, match="No space left"):
            patched.setattr(os, "replace", break_off)
            mmpreproj.save(model, folder)

    return run


@pytest.mark.parametrize(
    ("broken", "expected"),
    [(1, "old"), (2, "new"), (3, "new"), (4, "new")],
    ids=["weights", "config", "picture", "card"],
)
def test_a_save_that_breaks_off_leaves_the_old_adapter_or_the_new_one(
    versions, version_in, save_broken_off, tmp_path, broken: int, expected: str
):
    mmpreproj.save(versions["old"], tmp_path)
    assert version_in(tmp_path) == "old"
    names = sorted(os.listdir(tmp_path))
    save_broken_off(versions["new"], tmp_path, at=broken)
    assert version_in(tmp_path) == expected
    assert sorted(os.listdir(tmp_path)) == names
    mmpreproj.save(versions["new"], tmp_path)
    assert version_in(tmp_path) == "new"


@pytest.mark.parametrize("broken", [1, 2])
def test_a_first_save_that_breaks_off_leaves_nothing_or_the_adapter(
    versions, version_in, save_broken_off, tmp_path, broken: int
):
    save_broken_off(versions["new"], tmp_path, at=broken)
    if broken == 1:
        with pytest.raises(FileNotFoundError, match=r"holds no adapter_config\.json"):
            version_in(tmp_path)
    else:
        assert version_in(tmp_path) == "new"


def save_forever(versions: dict[str, nn.Module], folder: Path) -> None:
    while True:
        for version in ("new", "old"):
            mmpreproj.save(versions[version], folder, card=False)


@pytest.mark.skipif(sys.platform != "linux", reason="a fork is what makes a killed child cheap enough to repeat")
def test_a_killed_save_leaves_the_old_adapter_or_the_new_one(versions, version_in, tmp_path):
    mmpreproj.save(versions["old"], tmp_path, card=False)
    context, moments, found = multiprocessing.get_context("fork"), random.Random(0), []
    for _ in range(12):
        written = (tmp_path / WEIGHTS).stat().st_mtime_ns
        child = context.Process(target=save_forever, args=(versions, tmp_path), daemon=True)
        child.start()
        deadline = time.monotonic() + 10
        while (tmp_path / WEIGHTS).stat().st_mtime_ns == written:
            assert child.is_alive(), "the child saves until it is killed"
            assert time.monotonic() < deadline, "the child saves nothing"
        time.sleep(moments.uniform(0, 0.03))
        child.kill()
        child.join()
        assert child.exitcode == -9
        found.append(version_in(tmp_path))
    assert set(found) == {"old", "new"}
