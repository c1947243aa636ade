"""A training run from its configuration: data, model, training, and what is left on disk."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import set_seed
from rich.console import Console

from mmpreproj.data.encoding import EncodedPictures
from mmpreproj.data.pictures import SkippedPicture
from mmpreproj.patching.files.card import draw_profile
from mmpreproj.patching.files.storage import save
from mmpreproj.patching.lookup import is_patched
from mmpreproj.patching.profile import profile
from mmpreproj.pipelines.sd3 import PreProjSD3Pipeline
from mmpreproj.recipes.figures import draw_loss_curves
from mmpreproj.recipes.inputs import check_clouds, check_readers, encode, open_source, split
from mmpreproj.recipes.output import check_inputs_survive, check_output, clear_output, preview_path
from mmpreproj.recipes.preparation import prepare_pipeline
from mmpreproj.recipes.previews import Preview, choose_previews, draw_previews
from mmpreproj.recipes.progress import Reporter
from mmpreproj.training.config import TrainConfig, write_config
from mmpreproj.training.loop import StepRecord, make_accelerator, train
from mmpreproj.training.optimisation import check_optimizer


@dataclass
class TrainingRun:
    """What a run gave.

    Attributes:
        config: its configuration.
        pipeline: with the trained transformer.
        saved: the folder of the model (mode `full`) or of the adapter (mode `probe`).
        history: one record per step, and one of step 0 where there are held-out pictures.
        pictures: all of them, encoded.
        places: which of `pictures` were trained on, and which held out.
        seconds: wall-clock time of each stage.
    """

    config: TrainConfig
    pipeline: PreProjSD3Pipeline
    saved: Path
    history: list[StepRecord]
    pictures: EncodedPictures
    places: tuple[tuple[int, ...], tuple[int, ...]]
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def skipped(self) -> tuple[SkippedPicture, ...]:
        """Pictures that could not be read."""
        return self.pictures.skipped

    @property
    def counts(self) -> tuple[int, int]:
        """Number of pictures trained on, and held out."""
        return len(self.places[0]), len(self.places[1])

    @property
    def captions(self) -> frozenset[str]:
        """Captions of the pictures trained on."""
        return frozenset(self.pictures.captions[place] for place in self.places[0])

    @property
    def held_out_loss(self) -> float | None:
        """The last held-out loss."""
        return next((record.held_out for record in reversed(self.history) if record.held_out is not None), None)


def run_training(config: TrainConfig, *, console: Console | None = None, overwrite: bool = False) -> TrainingRun:
    """Train as a configuration says and write everything below `config.output`.

    Written are `config.yaml`, `metrics.jsonl` (as it goes), `loss.png`, `profile.png`, `checkpoints/`, `previews/`
    (where points are trained: shapes for some prompts at each evaluation), and at the end `adapter/` (mode `probe`) or
    `model/`, a pipeline folder (mode `full`).

    Args:
        config: the run's settings.
        console: where progress is shown; None for standard error.
        overwrite: replace what an earlier run left in `config.output`.

    Raises:
        ConfigError: if the configuration does not fit this machine, model or output folder.
        FileNotFoundError: if data or model are not where the configuration says.
        ValueError: if the data cannot be used.
        TrainingDivergedError: if the loss is not finite; checkpoints and metrics so far are kept.
    """
    accelerator = make_accelerator(config)
    check_optimizer(config.optimizer, device=accelerator.device)
    check_output(config.output, overwrite=overwrite)
    check_inputs_survive(config)
    seconds: dict[str, float] = {}
    with Reporter(console or Console(stderr=True), show=accelerator.is_main_process) as reporter:
        source = open_source(config.data)
        split(source, range(len(source)), config)  # refused now rather than when every picture has been encoded
        if config.trains_points:
            check_readers(source)
        set_seed(config.seed)
        with _timed(seconds, "model"):
            pipeline = prepare_pipeline(config, reporter)
        with _timed(seconds, "encoding"):
            pictures = encode(pipeline, source, config, accelerator=accelerator, reporter=reporter)
        train_indices, held_indices = split(source, pictures.places, config)
        splits = pictures.subset(train_indices), pictures.subset(held_indices)
        if config.trains_points:
            check_clouds(splits[0])
        try:
            with _timed(seconds, "training"):
                history = _train(pipeline, splits, config, accelerator=accelerator, reporter=reporter)
            run = TrainingRun(
                config=config,
                pipeline=pipeline,
                saved=config.output / ("adapter" if config.mode == "probe" else "model"),
                history=history,
                pictures=pictures,
                places=(tuple(train_indices), tuple(held_indices)),
                seconds=seconds,
            )
            if accelerator.is_main_process:
                write_results(run)
        finally:
            if accelerator.is_main_process:
                _say_skipped("picture", pictures.skipped, "left out", reporter)
                _say_skipped("cloud", pictures.skipped_clouds, "its picture trained without", reporter)
    accelerator.wait_for_everyone()
    return run


def write_results(run: TrainingRun) -> None:
    """Write the trained weights, the configuration and the figures."""
    config, transformer = run.config, run.pipeline.transformer
    if config.mode == "probe":
        save(transformer, run.saved, base_model=_where(str(config.model)))
    else:
        partial = run.saved.with_name(f".{run.saved.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        run.pipeline.save_pretrained(partial)
        os.replace(partial, run.saved)  # so that a folder called model is a whole one
    draw_loss_curves(run.history, config.output / "loss.png")
    if is_patched(transformer):
        draw_profile(profile(transformer), config.output / "profile.png")


def _where(model: str) -> str:
    """Name a base so that it is found from any folder: absolute where it is on this disk, else its hub id."""
    return str(Path(model).resolve()) if Path(model).is_dir() else model


def _train(
    pipeline: PreProjSD3Pipeline,
    splits: tuple[EncodedPictures, EncodedPictures],
    config: TrainConfig,
    *,
    accelerator: Accelerator,
    reporter: Reporter,
) -> list[StepRecord]:
    history: list[StepRecord] = []
    previews = _previews(splits, config)

    def on_step(record: StepRecord) -> None:
        history.append(record)
        reporter.step(record, config.steps)
        if not accelerator.is_main_process:
            return
        with (config.output / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(record)) + "\n")
        if previews and record.step and (record.held_out_losses or record.step == config.steps):
            path = preview_path(config.output, record.step)
            reason = draw_previews(pipeline, previews, path)
            if reason is not None:
                reporter.say(f"no preview of shapes at step {record.step}: {reason}")

    if accelerator.is_main_process:
        clear_output(config.output)  # only now: nothing that is refused costs an earlier run's results
        write_config(config, config.output / "config.yaml")
    pipeline.transformer = train(
        pipeline.transformer,
        splits[0],
        config,
        accelerator=accelerator,
        held_out=splits[1],
        shift=pipeline.scheduler.config.get("shift", 1.0),
        timesteps=pipeline.scheduler.config.num_train_timesteps,
        on_step=on_step,
    )
    return history


def _previews(splits: tuple[EncodedPictures, EncodedPictures], config: TrainConfig) -> list[Preview]:
    if config.point_path is None or not config.point_path.generate:
        return []
    return choose_previews(*splits, count=config.points.previews)


def _say_skipped(what: str, skipped: tuple[SkippedPicture, ...], consequence: str, reporter: Reporter) -> None:
    if skipped:
        files = f"1 {what}" if len(skipped) == 1 else f"{len(skipped)} {what}s"
        reporter.say(f"{files} could not be read and {consequence}:")
    for file in skipped:
        reporter.say(f"  {file.name}: {file.reason}")


@contextmanager
def _timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    seconds[stage] = time.perf_counter() - began
