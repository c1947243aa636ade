"""Pictures of prompts on two processes: each generates its part, and all of them where the weights are shared out."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from PIL import Image
from processes_kit import WORLD, meeting, run_in_processes
from torch.distributed.fsdp import fully_shard
from training_kit import told_of_others

from mmpreproj.pipelines import PreProjSD3Pipeline
from mmpreproj.recipes.train.validation import draw_prompts
from mmpreproj.training.config import TrainConfig

PROMPTS = ("red apple", "blue tree", "green square")
STEPS, COUNT = 2, 2
WAYS = ("whole", "sharded", "failing", "nowhere")

pytestmark = pytest.mark.slow  # two processes


def draw(folder: Path, way: str, rank: int, accelerator: Accelerator | None) -> dict[str, Any]:
    """Draw the prompts; returns how often the transformer was called and how often a reason was given."""
    pipeline = PreProjSD3Pipeline.from_pretrained(folder / "model")
    prompts = {}
    for prompt in ("", *PROMPTS):
        tokens, _, pooled, _ = pipeline.encode_prompt(
            prompt, prompt_2=None, prompt_3=None, do_classifier_free_guidance=False, max_sequence_length=6
        )
        prompts[prompt] = {"tokens": tokens[0], "pooled": pooled[0], "mask": torch.ones(6, dtype=torch.bool)}
    if way == "failing":  # of the second process alone
        prompts["blue tree"]["tokens"] = torch.full_like(prompts["blue tree"]["tokens"], torch.nan)
    if way == "sharded":
        fully_shard(pipeline.transformer)
    calls: list[int] = []
    pipeline.transformer.register_forward_hook(lambda *_: calls.append(1))
    config = TrainConfig(
        model=str(folder / "model"),
        output=folder / way,
        data={"folder": folder, "resolution": 8},
        validation={"prompts": PROMPTS, "count": COUNT, "steps": STEPS},
    )
    path = folder / f"{way}.png" if rank == 0 else None
    if way == "nowhere" and path is not None:
        path.mkdir()
    reason = draw_prompts(pipeline, prompts, config, path, accelerator=accelerator)
    return {"calls": len(calls), "reason": reason}


def run_here(rank: int, folder: Path) -> None:
    """Draw in every way, and note what this process did."""
    told = {way: draw(folder, way, rank, Accelerator(cpu=True)) for way in WAYS}
    (folder / f"{rank}.json").write_text(json.dumps(told), encoding="utf-8")


@pytest.fixture(scope="module")
def folder(saved_pipelines: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Draw on two processes, and, as `alone.png`, on one."""
    place = tmp_path_factory.mktemp("drawn")
    (place / "model").symlink_to(saved_pipelines["pixels"])
    draw(place, "alone", 0, None)
    return run_in_processes(__file__, place)


@pytest.fixture(scope="module")
def told(folder: Path) -> list[dict[str, Any]]:
    """What each process did."""
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(WORLD)]


@pytest.mark.parametrize("way", ["whole", "sharded"])
def test_the_grid_is_that_of_one_process(folder: Path, way: str) -> None:
    one, two = (np.asarray(Image.open(folder / f"{name}.png").convert("RGB"), dtype=float) for name in ("alone", way))
    assert np.abs(one - two).max() <= 2  # of 255: rounding
    assert len(np.unique(one.reshape(-1, 3), axis=0)) > 50


def test_each_process_generates_its_part(told: list[dict[str, Any]]) -> None:
    assert [one["whole"]["calls"] for one in told] == [2 * STEPS, 1 * STEPS]
    assert [one["whole"]["reason"] for one in told] == [None, None]


def test_where_the_weights_are_shared_out_each_generates_all(told: list[dict[str, Any]]) -> None:
    assert [one["sharded"]["calls"] for one in told] == [len(PROMPTS) * STEPS] * WORLD


def test_what_one_process_cannot_make_all_are_told(told: list[dict[str, Any]], folder: Path) -> None:
    assert all("NaN or infinite" in one["failing"]["reason"] for one in told)
    assert not (folder / "failing.png").exists()


def test_a_disk_that_fails_is_told_by_the_process_that_draws(told: list[dict[str, Any]]) -> None:
    first, second = (one["nowhere"]["reason"] for one in told)
    assert "directory" in first and second is None


if __name__ == "__main__":
    sys.path = [path for path in sys.path if Path(path or ".").resolve() != Path(__file__).parent]
    with meeting() as place, told_of_others(place[0]):
        run_here(*place)
