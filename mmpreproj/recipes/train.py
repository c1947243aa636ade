"""A training run from its configuration: data, model, training, and what is left on disk."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import cast

from accelerate import Accelerator
from accelerate.utils import set_seed
from diffusers.training_utils import free_memory
from rich.console import Console

from mmpreproj.data.clouds import read_clouds
from mmpreproj.data.encoding import EncodedPictures, encode_pictures, split_held_out
from mmpreproj.data.folder import FolderSource
from mmpreproj.data.furniture import FurnitureSource
from mmpreproj.data.openmoji import OpenMojiSource
from mmpreproj.data.pictures import PictureSource, SkippedPicture
from mmpreproj.data.triplets import TripletFolderSource, TripletSource
from mmpreproj.patching.files.card import draw_profile
from mmpreproj.patching.files.storage import save
from mmpreproj.patching.lookup import is_patched
from mmpreproj.patching.points.settings import PointPathConfig
from mmpreproj.patching.profile import profile
from mmpreproj.pipelines.sd3 import PreProjSD3Pipeline
from mmpreproj.points.reading import MESH_SUFFIXES, import_trimesh
from mmpreproj.recipes.figures import draw_loss_curves
from mmpreproj.recipes.output import check_inputs_survive, check_output, clear_output, preview_path
from mmpreproj.recipes.preparation import prepare_pipeline
from mmpreproj.recipes.previews import Preview, choose_previews, draw_previews
from mmpreproj.recipes.progress import Reporter
from mmpreproj.training.config import ConfigError, DataConfig, TrainConfig
from mmpreproj.training.config_file import write_config
from mmpreproj.training.loop import StepRecord, make_accelerator, train
from mmpreproj.training.optimisation import check_optimizer

ENCODERS = ("vae", "text_encoder", "text_encoder_2", "text_encoder_3")


@dataclass
class TrainingRun:
    """What a run gave.

    Attributes:
        config: its configuration.
        pipeline: with the trained transformer.
        saved: the folder of the model (mode `full`) or of the adapter (mode `probe`).
        history: one record per step, and one of step 0 where there are held-out pictures.
        skipped: pictures that could not be read.
        counts: pictures trained on, and held out.
        captions: those of the pictures trained on.
        pictures: all of them, encoded.
        places: which of `pictures` were trained on, and which held out.
        seconds: wall-clock time of each stage.
    """

    config: TrainConfig
    pipeline: PreProjSD3Pipeline
    saved: Path
    history: list[StepRecord]
    skipped: tuple[SkippedPicture, ...]
    counts: tuple[int, int]
    captions: frozenset[str] = frozenset()
    pictures: EncodedPictures | None = None
    places: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    seconds: dict[str, float] = field(default_factory=dict)

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
        _split(source, range(len(source)), config)  # refused now rather than when every picture has been encoded
        if config.trains_points:
            _check_readers(source)
        set_seed(config.seed)
        with _timed(seconds, "model"):
            pipeline = prepare_pipeline(config, reporter)
        with _timed(seconds, "encoding"):
            pictures = _encode(pipeline, source, config, accelerator=accelerator, reporter=reporter)
        train_indices, held_indices = _split(source, pictures.places, config)
        splits = pictures.subset(train_indices), pictures.subset(held_indices)
        if config.trains_points:
            _check_clouds(splits[0])
        try:
            with _timed(seconds, "training"):
                history = _train(pipeline, splits, config, accelerator=accelerator, reporter=reporter)
            run = TrainingRun(
                config=config,
                pipeline=pipeline,
                saved=config.output / ("adapter" if config.mode == "probe" else "model"),
                history=history,
                skipped=pictures.skipped,
                counts=(len(train_indices), len(held_indices)),
                captions=frozenset(pictures.captions[index] for index in train_indices),
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


def open_source(data: DataConfig) -> PictureSource:
    """Open the pictures that a configuration names; see the sources in `mmpreproj.data` for errors."""
    if data.source == "openmoji":
        return OpenMojiSource(render_size=max(64, data.resolution))
    if data.folder is None:
        raise ConfigError(f"data.folder: missing; source {data.source!r} needs it")
    if data.source == "furniture":
        return FurnitureSource(data.folder)
    if data.points_column is not None:
        return TripletFolderSource(data.folder, caption_column=data.caption_column, points_column=data.points_column)
    return FolderSource(data.folder, caption_column=data.caption_column)


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


def _split(source: PictureSource, places: Sequence[int], config: TrainConfig) -> tuple[list[int], list[int]]:
    """Split pictures, given by their places in the source, into those to train on and those held out."""
    data, captions = config.data, [source.captions[place] for place in places]
    together: list[list[Hashable | None]] = [list(captions)] if data.held_out_by == "caption" else []
    if config.trains_points:  # several pictures may be views of one shape
        clouds = cast(TripletSource, source).clouds
        together.append([clouds[place] for place in places])
    return split_held_out(
        captions,
        data.held_out,
        seed=config.seed if data.held_out_seed is None else data.held_out_seed,
        always_train=data.always_train,
        together=together,
    )


def _check_readers(source: PictureSource) -> None:
    """Make sure that what reads clouds is installed before everything else is encoded."""
    names = [name for name in cast(TripletSource, source).clouds if name is not None]
    if isinstance(source, FurnitureSource) or any(Path(name).suffix.lower() in MESH_SUFFIXES for name in names):
        import_trimesh()


def _check_clouds(trained: EncodedPictures) -> None:
    if trained.has_cloud is None or not trained.has_cloud.any():
        raise ConfigError(
            "data: none of the pictures that are trained on has a cloud that can be read, so adapter.points would "
            "learn nothing; see what was left out, hold out fewer, or give more rows a cloud"
        )


def _encode(
    pipeline: PreProjSD3Pipeline,
    source: PictureSource,
    config: TrainConfig,
    *,
    accelerator: Accelerator,
    reporter: Reporter,
) -> EncodedPictures:
    encoders = [module for name in ENCODERS if (module := getattr(pipeline, name)) is not None]
    for module in encoders:
        module.requires_grad_(False).eval().to(accelerator.device)
    pictures = encode_pictures(
        pipeline,
        source,
        resolution=config.data.resolution,
        max_sequence_length=config.max_sequence_length,
        device=accelerator.device,
        seed=config.seed,
        on_progress=lambda stage, done, total: reporter.stage(stage, done, total),
    )
    for module in encoders:
        module.to("cpu")
    free_memory()
    if config.point_path is None:
        return pictures
    return _add_clouds(pictures, source, config, config.point_path, reporter=reporter)


def _add_clouds(
    pictures: EncodedPictures,
    source: PictureSource,
    config: TrainConfig,
    points: PointPathConfig,
    *,
    reporter: Reporter,
) -> EncodedPictures:
    skipped: list[SkippedPicture] = []
    clouds, has_cloud = read_clouds(
        cast(TripletSource, source),
        pictures.places,
        count=config.points.stored,
        features=points.features,
        to_unit_ball=points.normalise == "unit_ball",
        seed=config.seed,
        skipped=skipped,
        on_read=lambda done: reporter.stage("clouds", done, len(pictures)),
    )
    reporter.say(f"{int(has_cloud.sum())} of {len(pictures)} pictures have a cloud")
    return pictures.with_clouds(clouds, has_cloud, skipped=skipped)


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
