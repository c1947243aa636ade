"""A training run from its configuration: data, model, training, and what is left on disk."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import set_seed
from rich.console import Console

from mmpreproj.data.encoding import EncodedPictures
from mmpreproj.data.sources.faults import count_of
from mmpreproj.data.sources.pictures import SkippedPicture
from mmpreproj.files import flush_file
from mmpreproj.pipelines.sd3 import PreProjSD3Pipeline
from mmpreproj.recipes.locking import locked
from mmpreproj.recipes.progress import Reporter
from mmpreproj.recipes.train.encoders import Encoders
from mmpreproj.recipes.train.inputs import Inputs, make_inputs
from mmpreproj.recipes.train.output import check_folder, check_inputs_survive, check_output, clear_output
from mmpreproj.recipes.train.preparation import open_base, prepare_pipeline
from mmpreproj.recipes.train.results import write_results
from mmpreproj.recipes.train.sources import check_apart, check_readers, open_source, split
from mmpreproj.recipes.train.tracking import check_trackers
from mmpreproj.recipes.train.upload import check_login, upload
from mmpreproj.recipes.train.watching import Watch
from mmpreproj.training.checkpoints import find_checkpoint
from mmpreproj.training.config import TrainConfig, write_config
from mmpreproj.training.loop import Scheduler, StepRecord, make_accelerator, train
from mmpreproj.training.optimisation import check_optimizer
from mmpreproj.training.processes import on_main_process
from mmpreproj.training.progress import check_progress, step_of
from mmpreproj.training.stopping import listening
from mmpreproj.training.trainable import select_trainable
from mmpreproj.training.weights import LORA, trains_base


@dataclass
class TrainingRun:
    """What a run gave.

    Attributes:
        config: its configuration.
        pipeline: with the trained transformer.
        saved: the folder of the model (where the base trains), of the adapter, or of the LoRA.
        history: one record per step, and one of step 0 where there are held-out pictures.
        inputs: what it was trained on, and what was left out.
        seconds: wall-clock time of each stage.
    """

    config: TrainConfig
    pipeline: PreProjSD3Pipeline
    saved: Path
    history: list[StepRecord]
    inputs: Inputs
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def results(self) -> tuple[Path, ...]:
        """Every folder with trained weights: `saved`, and that of a LoRA beside an adapter."""
        beside = self.config.lora is not None and self.saved.name != LORA
        return (self.saved, self.config.output / LORA) if beside else (self.saved,)

    @property
    def pictures(self) -> EncodedPictures:
        """All pictures, encoded."""
        return self.inputs.pictures

    @property
    def places(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Which of `pictures` were trained on, and which held out."""
        return self.inputs.places

    @property
    def skipped(self) -> tuple[SkippedPicture, ...]:
        """Pictures and captions that could not be used."""
        return self.inputs.skipped

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


def run_training(
    config: TrainConfig, *, console: Console | None = None, overwrite: bool = False, resume: str | None = None
) -> TrainingRun:
    """Train as a configuration says and write everything below `config.output`.

    Written are `config.yaml`, `metrics.jsonl` (as it goes), `loss.png`, `profile.png`, `checkpoints/`, `previews/`
    (pictures of the prompts of `validation`, and shapes where points are trained, at each evaluation), `tensorboard/`,
    and at the end `adapter/`, `lora/`, or, where the base trains, `model/`, a pipeline folder; each with a card,
    `README.md`. With `push_to_hub` that folder is uploaded.

    Args:
        config: the run's settings.
        console: where progress is shown; None for standard error.
        overwrite: replace what an earlier run left in `config.output`.
        resume: go on from a checkpoint of `config.output`: `latest`, or its step or path.

    Raises:
        ConfigError: if the configuration does not fit this machine, model or output folder, or another run is writing
            to that folder.
        FileNotFoundError: if data or model are not where the configuration says.
        ValueError: if the data cannot be used.
        TrainingDivergedError: if the loss is not finite; checkpoints and metrics so far are kept.
        TrainingStoppedError: if the process was asked to stop; a checkpoint has been written.
    """
    accelerator = make_accelerator(config)
    check_optimizer(config.optimizer, device=accelerator.device)
    check_trackers(config)
    check_login(config, accelerator=accelerator)
    check_folder(config.output)
    check_apart(config)
    with (
        locked(config.output, accelerator),
        Reporter(console or Console(stderr=True), show=accelerator.is_main_process) as reporter,
    ):
        checkpoint = _checkpoint_of(config, accelerator, resume=resume)
        if not _is_own(checkpoint, config):
            check_output(config.output, overwrite=overwrite)
            check_inputs_survive(config)
        return _run(config, accelerator, reporter, checkpoint)


def _checkpoint_of(config: TrainConfig, accelerator: Accelerator, *, resume: str | None) -> Path | None:
    """Find the checkpoint to go on from; the main process alone reads it whole."""
    if resume is None:
        return None
    checkpoint = on_main_process(accelerator, lambda: find_checkpoint(config.output / "checkpoints", resume))
    check_progress(checkpoint, config, processes=accelerator.num_processes)
    return checkpoint


def _run(config: TrainConfig, accelerator: Accelerator, reporter: Reporter, checkpoint: Path | None) -> TrainingRun:
    seconds: dict[str, float] = {}
    source = open_source(config.data)
    split(source, range(len(source)), config)  # refused now rather than when every picture has been encoded
    if config.trains_points:
        check_readers(source)
    set_seed(config.seed)
    with _timed(seconds, "model"):
        pipeline = open_base(config)
        prepare_pipeline(pipeline, config, say=reporter.say)
        select_trainable(pipeline.transformer, config)  # refuses before an earlier run's results are gone
    encoders = Encoders(pipeline, config.model)
    with _timed(seconds, "encoding"):
        encoders.place(accelerator.device)
        inputs = make_inputs(pipeline, source, config, accelerator=accelerator, reporter=reporter)
        encoders.release()
    try:
        with _timed(seconds, "training"):
            history = _train(pipeline, inputs, config, accelerator, reporter, checkpoint)
        run = TrainingRun(config, pipeline, config.output / _result(config), history, inputs, seconds)
        with listening():  # nothing that asks to stop may cost the results now
            if trains_base(config):
                encoders.restore()  # they are part of the model's folder
            write_results(run.pipeline, config, history, inputs=inputs, accelerator=accelerator, say=reporter.say)
        encoders.restore()
        on_main_process(accelerator, lambda: upload(config, run.saved, say=reporter.say))
    finally:
        _say_skipped("picture", inputs.skipped, "left out", reporter)
        _say_skipped("cloud", inputs.pictures.skipped_clouds, "its picture trained without", reporter)
    return run


def _train(
    pipeline: PreProjSD3Pipeline,
    inputs: Inputs,
    config: TrainConfig,
    accelerator: Accelerator,
    reporter: Reporter,
    checkpoint: Path | None,
) -> list[StepRecord]:
    if checkpoint is not None:
        samples, processes = inputs.trained.digest(), accelerator.num_processes
        done = check_progress(checkpoint, config, samples=samples, processes=processes)
        left = config.steps - done.step
        what = f"{left} steps are left" if left else "no step is left; the results are written again"
        reporter.say(f"going on after step {done.step} of {config.steps}: {what}")
    accelerator.wait_for_everyone()  # only now: nothing that is refused costs an earlier run's results
    on_main_process(accelerator, lambda: _begin_output(config, clear=not _is_own(checkpoint, config)))
    with Watch(pipeline, inputs, config, accelerator=accelerator, reporter=reporter, checkpoint=checkpoint) as watch:
        _say_missing(watch.history, checkpoint, reporter)
        pipeline.transformer = train(
            pipeline.transformer,
            inputs.trained,
            config,
            accelerator=accelerator,
            held_out=inputs.held_out,
            scheduler=Scheduler(
                shift=pipeline.scheduler.config.get("shift", 1.0),
                timesteps=pipeline.scheduler.config.num_train_timesteps,
                cell=pipeline.vae_scale_factor,
            ),
            resume=checkpoint,
            on_step=watch.step,
            on_evaluate=watch.evaluate,
            before_checkpoint=lambda: flush_file(watch.metrics),
        )
        return watch.history


def _begin_output(config: TrainConfig, *, clear: bool) -> None:
    if clear:
        clear_output(config.output)
    write_config(config, config.output / "config.yaml")


def _say_missing(history: Sequence[StepRecord], checkpoint: Path | None, reporter: Reporter) -> None:
    """Say which records of the steps before a checkpoint are not there any more, as after a loss of power."""
    step = None if checkpoint is None else step_of(checkpoint)
    last = history[-1].step if history else 0
    if step is not None and last < step:
        reporter.say(f"warning: metrics.jsonl ends at step {last}, before {step}; the figures will lack those between")


def _is_own(checkpoint: Path | None, config: TrainConfig) -> bool:
    """Tell whether a run goes on in the folder that it began in."""
    return checkpoint is not None and checkpoint.resolve().parent == (config.output / "checkpoints").resolve()


def _result(config: TrainConfig) -> str:
    if trains_base(config):
        return "model"
    return "adapter" if config.adapter is not None else LORA


def _say_skipped(what: str, skipped: tuple[SkippedPicture, ...], consequence: str, reporter: Reporter) -> None:
    if skipped:
        reporter.say(f"{count_of(len(skipped), what)} could not be used and {consequence}:")
    for file in skipped:
        reporter.say(f"  {file.name}: {file.reason}")


@contextmanager
def _timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    seconds[stage] = time.perf_counter() - began
