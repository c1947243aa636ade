"""The card of a run's result: what was trained on what, with which settings, what came of it, and how it is used."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Literal, get_args

from mmpreproj import __version__
from mmpreproj.patching.files.card import (
    CARD_NAME,
    MARK,
    PICTURE_NAME,
    TAGS,
    adapter_table,
    describe_adapter,
    front_matter,
    is_hub_id,
    may_write,
    profile_section,
    title_of,
    write_text,
)
from mmpreproj.patching.files.format import SavedAdapter, read_config
from mmpreproj.patching.lookup import is_patched
from mmpreproj.patching.profile import profile
from mmpreproj.patching.report import report
from mmpreproj.pipelines.adapter_folder import ADAPTER_FOLDER
from mmpreproj.pipelines.adapter_list import LIST_NAME, read_list
from mmpreproj.pipelines.sd3 import PreProjSD3Pipeline
from mmpreproj.recipes.train.card_parts import (
    CURVES_NAME,
    data_section,
    data_sets,
    quoted,
    results_section,
    settings_section,
)
from mmpreproj.recipes.train.card_usage import usage_section
from mmpreproj.recipes.train.inputs import Inputs
from mmpreproj.training.config import ScratchModel, TrainConfig
from mmpreproj.training.loop import StepRecord
from mmpreproj.training.trainable import named_parts

Result = Literal["adapter", "lora", "model"]
RESULTS: tuple[Result, ...] = get_args(Result)
TRAINING_MARK = "<!-- written by mmpreproj train, and written anew by it while this line is here -->"
SAMPLES = {"pictures": "samples.png", "shapes": "shapes.png"}  # by kind of preview
NAMES = {
    "adapter": "the adapter",
    "lora": "the LoRA",
    "norms": "norms of the base",
    "biases": "biases of the base",
    "base": "the rest of the base",
}
BASE_PARTS = ("norms", "biases", "base")


@dataclass(frozen=True)
class RunFacts:
    """What a card is written from.

    Attributes:
        config: the run's settings.
        pipeline: with the trained transformer.
        inputs: what it was trained on.
        history: the run's records.
        processes: how many trained together.
    """

    config: TrainConfig
    pipeline: PreProjSD3Pipeline
    inputs: Inputs
    history: Sequence[StepRecord]
    processes: int = 1

    @property
    def adapted(self) -> bool:
        """Whether the transformer carries an adapter."""
        return is_patched(self.pipeline.transformer)

    @property
    def base(self) -> str | None:
        """Hub id of the base; None where it has none."""
        model = self.config.model
        return model if isinstance(model, str) and is_hub_id(model) else None


def write_training_card(folder: Path, facts: RunFacts) -> bool:
    """Write `README.md` into a result of a run, and the pictures that it shows beside it.

    Args:
        folder: `adapter/`, `lora/` or `model/` below the run's output, with the weights in it.
        facts: of the run; its figures are in its output already.

    Returns:
        Whether a card was written: a README that neither this function nor `mmpreproj.save` wrote is left alone.

    Raises:
        ValueError: if the folder is none of the three.
    """
    if not may_write(folder, MARK, TRAINING_MARK):
        return False
    result = next((known for known in RESULTS if known == folder.name), None)
    if result is None:
        raise ValueError(f"a run's results are {', '.join(RESULTS)}; got {folder}")
    output = facts.config.output
    steps = {kind: _copy_last_preview(output, kind, folder / name) for kind, name in SAMPLES.items()}
    pictures = [CURVES_NAME, *([PICTURE_NAME] if facts.adapted and result != "lora" else [])]
    for name in pictures:
        if (output / name).is_file():
            shutil.copyfile(output / name, folder / name)
    saved = _adapter_of(folder, result) if facts.adapted else None
    write_text(folder / CARD_NAME, "\n".join(_card(facts, result, saved, steps)))
    return True


def _card(facts: RunFacts, result: Result, saved: SavedAdapter | None, steps: dict[str, int | None]) -> list[str]:
    lines = [*_front(facts, result), TRAINING_MARK, "", f"# {_title(facts, result)}", ""]
    lines += [_introduction(facts, result, saved), ""]
    lines += _samples(facts, steps)
    lines += usage_section(facts.config, facts.pipeline, result=result, base=facts.base)
    lines += _training_section(facts)
    if saved is not None and result != "lora":
        lines += ["### The adapter", "", *adapter_table(saved, report(facts.pipeline.transformer)), ""]
    lines += data_section(facts.config, facts.inputs)
    lines += results_section(facts.config, facts.history)
    if facts.adapted and result != "lora":
        lines += profile_section(profile(facts.pipeline.transformer))
    return [*lines, *settings_section(facts.config), *_end(facts)]


def _front(facts: RunFacts, result: Result) -> list[str]:
    kind = "adapter" if result != "model" else "finetune"
    tags = ["text-to-image", *TAGS] if result == "adapter" else ["text-to-image", "diffusers", "mmpreproj"]
    return front_matter(
        facts.base,
        library="diffusers" if result == "lora" else "mmpreproj",
        tags=[*tags, *(["lora"] if facts.config.lora is not None else []), "stable-diffusion-3"],
        pipeline_tag="text-to-image",
        base_model_relation=None if facts.base is None else kind,
        datasets=data_sets(facts.config) or None,
    )


def _title(facts: RunFacts, result: Result) -> str:
    config = facts.config
    if result == "adapter" and config.adapter is not None:
        return title_of(config.adapter)
    if result == "lora" and config.lora is not None:
        return f"LoRA of rank {config.lora.rank}"
    if isinstance(config.model, ScratchModel):
        return "Stable Diffusion 3 transformer trained from nothing"
    how = "" if config.mode == "full" else f", its {' and '.join(config.thaw)}"
    return f"Stable Diffusion 3 trained further{how}"


def _introduction(facts: RunFacts, result: Result, saved: SavedAdapter | None) -> str:
    config = facts.config
    batch = config.batch_size * config.gradient_accumulation * facts.processes
    on = f"on {facts.base}" if facts.base else f"on a `{type(facts.pipeline.transformer).__name__}`"
    first = {
        "adapter": "" if saved is None else describe_adapter(saved),
        "lora": f"A LoRA {on}.",
        "model": f"A whole model{f', trained further from {facts.base}' if facts.base else ''}"
        f"{f', with an adapter in `{ADAPTER_FOLDER}/`' if config.adapter is not None else ''}.",
    }[result]
    measured = _held_out(facts.history)
    came = f" The held-out loss went from {measured[0][1]:.4f} to {measured[-1][1]:.4f}." if len(measured) > 1 else ""
    return f"{first} Trained for {config.steps:,} steps of {batch} pictures with `mmpreproj train`.{came}".strip()


def _samples(facts: RunFacts, steps: dict[str, int | None]) -> list[str]:
    """Show what the model makes of the prompts of validation."""
    settings, lines = facts.config.validation, []
    if steps["pictures"] is not None:
        lines += [f"![pictures of the prompts below]({SAMPLES['pictures']})", ""]
        lines += [f"{row}. {quoted(prompt)}" for row, prompt in enumerate(settings.prompts, start=1)]
        lines += [
            "",
            f"A row a prompt, {settings.count} pictures each, not chosen: seeds from {settings.seed}, "
            f"{settings.steps} steps, guidance {settings.guidance:g}, after training step {steps['pictures']:,}.",
            "",
        ]
    if steps["shapes"] is not None:
        lines += [f"![shapes made of captions]({SAMPLES['shapes']})", ""]
    return lines


def _training_section(facts: RunFacts) -> list[str]:
    config, rates = facts.config, facts.config.optimizer
    trained: Counter[str] = Counter()
    frozen = 0
    for _, part, parameter in named_parts(facts.pipeline.transformer):
        if parameter.requires_grad:
            whole = config.mode == "full" and part in BASE_PARTS
            trained["the base, all of it" if whole else NAMES[part]] += parameter.numel()
        else:
            frozen += parameter.numel()
    rows = [f"| {name} | {count:,} |" for name, count in trained.items()]
    average = f"; the weights are a moving average, decay {config.ema.decay:g}" if config.ema is not None else ""
    precision = "" if config.precision == "no" else f", in {config.precision}"
    return [
        "## What was trained",
        "",
        "| part | parameters |",
        "|---|---|",
        *rows,
        *([f"| left as it was | {frozen:,} |"] if frozen else []),
        "",
        f"Rectified flow, optimiser {rates.name}, learning rate {rates.learning_rate:g}{precision}{average}.",
        "",
    ]


def _held_out(history: Sequence[StepRecord]) -> list[tuple[int, float]]:
    return [(record.step, record.held_out) for record in history if record.held_out is not None]


def _end(facts: RunFacts) -> list[str]:
    packages = ["torch", "diffusers", "transformers", "accelerate", *(["peft"] if facts.config.lora else [])]
    versions = ", ".join(f"{name} {version(name)}" for name in packages)
    return [
        f"Made with mmpreproj {__version__}, {versions}.",
        "",
        "## Licence",
        "",
        "None is named yet. Whoever publishes this chooses one (`license:` at the top of this file), within what the "
        "licences of the base and of the pictures allow.",
        "",
    ]


def _adapter_of(folder: Path, result: Result) -> SavedAdapter | None:
    place = {"adapter": folder, "model": folder / ADAPTER_FOLDER, "lora": folder.parent / "adapter"}[result]
    if (place / LIST_NAME).is_file():  # it has a name or a scale of its own
        place = place / next(iter(read_list(place)))
    return read_config(place) if place.is_dir() else None


def _copy_last_preview(output: Path, kind: str, path: Path) -> int | None:
    """Copy the last grid of a run beside a card, and return the step that it is of; None where there is none."""
    path.unlink(missing_ok=True)  # of a card before
    steps = {
        int(found[1]): file
        for file in (output / "previews").glob(f"{kind}-*.png")
        if (found := re.fullmatch(rf"{kind}-(\d+)\.png", file.name))
    }
    if not steps:
        return None
    last = max(steps)
    shutil.copyfile(steps[last], path)
    return last
