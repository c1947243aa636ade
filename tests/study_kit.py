"""A tiny language model in a folder, two texts, two tasks, and studies of them."""

from __future__ import annotations

import io
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from accelerate.state import AcceleratorState
from rich.console import Console
from scoring_kit import CORPUS, tiny_llama, tiny_tokenizer

from mmpreproj.language.config import StudyConfig
from mmpreproj.recipes.probe import Study, run_study

WORDS = " ".join(CORPUS).split()
ARMS = ("base", "lora", "pre_projection", "pre_projection+skip")


def write_inputs(folder):
    """Write model, texts and tasks into a folder."""
    tiny_llama().save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    for name, shift in (("docs", 0), ("tales", 7)):
        (folder / name).mkdir()
        for number in range(40):
            words = [WORDS[(shift + number * step) % len(WORDS)] for step in range(1, 20)]
            (folder / name / f"{number:02}.txt").write_text(f"{number} " + " ".join(words))
    lines = [{"context": " ".join(WORDS[n : n + 5]), "continuation": WORDS[n + 5]} for n in range(8)]
    (folder / "words.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    lines = [{"query": WORDS[n], "choices": WORDS[n + 1 : n + 4], "gold": n % 3} for n in range(8)]
    (folder / "choices.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def build_study(inputs, output, **changes):
    """Three steps of two blocks, two rates, two seeds; changes go by dotted names."""
    values = {
        "model": str(inputs / "model"),
        "output": output,
        "texts": {name: {"files": [str(inputs / name / "*.txt")], "held_out": 0.2} for name in ("docs", "tales")},
        "arms": ARMS,
        "seeds": (0, 1),
        "learning_rates": (1e-3, 1e-2),
        "training": {"steps": 3, "length": 16, "batch_size": 2, "checkpoint_every": 2},
        "optimizer": {"warmup_steps": 0},
        "evaluation": {
            "length": 16,
            "stride": 8,
            "validation_tokens": 64,
            "test_tokens": 96,
            "batch_size": 8,
            "resamples": 200,
            "tasks": [{"file": inputs / "words.jsonl"}, {"file": inputs / "choices.jsonl"}],
        },
    }
    for key, value in changes.items():
        section, _, field = key.replace("__", ".").partition(".")
        values[section] = values[section] | {field: value} if field else value
    return StudyConfig(**values)


def run_quietly(config):
    """Run a study; returns it, and what a person has seen."""
    AcceleratorState._reset_state(reset_partial_state=True)
    screen = io.StringIO()
    return run_study(config, console=Console(file=screen, width=200)), screen.getvalue()


@dataclass(frozen=True)
class Finished:
    """A study that is done, and its report."""

    study: Study
    told: str
    report: Path

    @property
    def folder(self):
        return self.study.config.output

    def copied(self, folder):
        """Copy what it has left, for a study that goes on from it."""
        shutil.copytree(self.folder, folder)
        return folder
