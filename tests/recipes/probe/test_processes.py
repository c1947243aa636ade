"""A study on two processes: what one process finds, written once."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from processes_kit import WORLD, meeting, run_in_processes
from study_kit import build_study, run_quietly
from training_kit import told_of_others

from mmpreproj.language.trials import RECORD
from mmpreproj.training.config import ConfigError

SMALL = {"arms": ("base", "lora", "skip"), "seeds": (0, 1), "learning_rates": (1e-3,)}


def study_twice(rank: int, folder: Path) -> None:
    """Run a study and run it again, and then with another setting, which both processes refuse."""
    inputs = Path((folder / "inputs.txt").read_text())
    config = build_study(inputs, folder / "study", **SMALL)
    study, told = run_quietly(config)
    found = {str(trial): record.validation_perplexity for trial, record in study.trials.items()}
    again, _ = run_quietly(config)
    assert again.trials == study.trials
    with pytest.raises(ConfigError, match=r"training\.steps was 3, is 4"):
        run_quietly(build_study(inputs, folder / "study", training__steps=4, **SMALL))
    (folder / f"told-{rank}.json").write_text(json.dumps([found, told]))


@pytest.mark.slow
def test_two_processes_find_what_one_does(inputs, make_study, tmp_path):
    folder = tmp_path / "two"
    folder.mkdir()
    (folder / "inputs.txt").write_text(str(inputs))
    run_in_processes(__file__, folder)
    study, told = run_quietly(make_study(**SMALL))
    expected = {str(trial): record.validation_perplexity for trial, record in study.trials.items()}
    for rank in range(WORLD):
        found, shown = json.loads((folder / f"told-{rank}.json").read_text())
        assert found == pytest.approx(expected, rel=1e-3)
        assert len(shown.splitlines()) == (len(told.splitlines()) if rank == 0 else 0)
    assert len(list(folder.rglob(RECORD))) == len(expected)


if __name__ == "__main__":
    import datasets

    with meeting() as (rank, folder), told_of_others(rank):
        datasets.config.HF_DATASETS_CACHE = folder / "cache"
        torch.set_num_threads(1)
        study_twice(rank, folder)
    sys.exit()
