"""The quickstart: a small transformer trained on real drawings, and a report that shows what came out."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from mmpreproj.patching.lookup import is_patched
from mmpreproj.patching.profile import profile
from mmpreproj.patching.report import report
from mmpreproj.recipes.figures import draw_grid
from mmpreproj.recipes.generate import Sampling, best_device, generate
from mmpreproj.recipes.train import TrainingRun, run_training
from mmpreproj.training.config import ScratchModel, TrainConfig, read_config

PROMPTS = (
    "red apple",
    "smiling face",
    "green tree",
    "purple heart",
    "yellow star",
    "blue book",
    "sun",
    "green apple",
    "dog face",
    "orange heart",
)


def quickstart_config(overrides: Sequence[str] = ()) -> TrainConfig:
    """Read the shipped `quickstart.yaml`."""
    return read_config("quickstart", overrides)


def run_quickstart(
    config: TrainConfig, *, console: Console | None = None, overwrite: bool = False, sampling: Sampling | None = None
) -> Path:
    """Train, generate a labelled grid through the pipeline, and write `report.md` beside everything else.

    Args:
        config: as `quickstart_config` gives it.
        console: where progress is shown; None for standard error.
        overwrite: replace an earlier quickstart.
        sampling: settings of the grid's pictures.

    Returns:
        The report's path.

    Raises:
        ConfigError, ValueError, FileNotFoundError, TrainingDivergedError: see `run_training`.
    """
    began = time.perf_counter()
    console = console or Console(stderr=True)
    run = run_training(config, console=console, overwrite=overwrite)
    path = config.output / "report.md"
    console.print("generating the grid", highlight=False)
    sampling = sampling or Sampling(steps=28, guidance=3.5, count=6)
    pipeline = run.pipeline.to(best_device())
    pipeline.set_progress_bar_config(disable=True)
    started = time.perf_counter()
    draw_grid(generate(pipeline, PROMPTS, sampling), config.output / "grid.png")
    run.seconds["the grid"] = time.perf_counter() - started
    minutes = (time.perf_counter() - began) / 60
    path.write_text(write_report(run, sampling, minutes=minutes), encoding="utf-8")
    return path


def write_report(run: TrainingRun, sampling: Sampling, *, minutes: float) -> str:
    """Write the report of a quickstart as Markdown, with links to the pictures beside it."""
    config, transformer = run.config, run.pipeline.transformer
    held_out = "not measured" if run.held_out_loss is None else f"{run.held_out_loss:.4f}"
    trained, held = run.counts
    prompts = ", ".join(f"“{prompt}”" for prompt in PROMPTS)
    memory = _peak_memory()
    lines = [
        "# Quickstart",
        "",
        f"A {_sizes(config)} trained from nothing for {config.steps} steps of {config.batch_size} pictures.",
        "",
        "| what | value |",
        "|---|---|",
        f"| held-out flow loss, {held} pictures never trained on | **{held_out}** |",
        f"| pictures trained on | {trained}, {len(run.skipped)} unreadable |",
        f"| parameters | {transformer.num_parameters():,} |",
        *([f"| of them the adapter's | {report(transformer).parameters:,} |"] if is_patched(transformer) else []),
        *[f"| time for {stage} | {seconds:.0f} s |" for stage, seconds in run.seconds.items()],
        f"| time in all | {minutes:.1f} min |",
        *([f"| peak memory | {memory:.2f} GiB |"] if memory is not None else []),
        "",
        "## Pictures",
        "",
        f"{sampling.count} seeds for each prompt, {sampling.steps} steps, guidance {sampling.guidance:g}. Prompts: "
        f"{prompts}. {_say_what_is_new(run)}",
        "",
        "![generated pictures](grid.png)",
        "",
        "## Loss",
        "",
        "Mean squared error of the velocity `ε − x`. Training draws σ from a logit-normal, the held-out loss spreads "
        "σ evenly over (0, 1) on a fixed grid of pictures and noise, so the two are not on one scale.",
        "",
        "![loss curves](loss.png)",
        "",
    ]
    if is_patched(transformer):
        lines += [
            "## Skip profile",
            "",
            "![skip profile](profile.png)",
            "",
            "```",
            str(profile(transformer)),
            "```",
            "",
        ]
    lines += [
        "## What next",
        "",
        "```",
        f'mmpreproj generate --model {run.saved} --prompt "red apple" --count 8 --grid apples.png',
        f"mmpreproj inspect {run.saved}",
        "```",
        "",
        "The drawings are by [OpenMoji](https://openmoji.org), CC BY-SA 4.0; their names are Unicode's.",
        "",
    ]
    return "\n".join(lines)


def _say_what_is_new(run: TrainingRun) -> str:
    new = [f"“{prompt}”" for prompt in PROMPTS if prompt not in run.captions]
    if not new:
        return "All are names of training drawings, and show what was learned, not how it generalises."
    known = "The others show what was learned, not how it generalises."
    return f"Not the name of any training drawing: {', '.join(new)}. {known}"


def _sizes(config: TrainConfig) -> str:
    if not isinstance(config.model, ScratchModel):
        return f"`{config.model}`"
    sizes = config.model
    return (
        f"`SD3Transformer2DModel` of width {sizes.width}, {sizes.depth} blocks, patches of {sizes.patch_size} on "
        f"{config.data.resolution} × {config.data.resolution} pixels"
    )


def _peak_memory() -> float | None:
    """Peak resident memory of this process in GiB; None where the platform does not tell."""
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**30 if sys.platform == "darwin" else peak / 2**20
