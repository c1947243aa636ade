"""A training run from its configuration: data, model, training, and what is left on disk."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import set_seed
from rich.console import Console

from mmpreproj.data.encoding import EncodedPictures
from mmpreproj.data.sources.faults import count_of
from mmpreproj.data.sources.pictures import SkippedPicture
from mmpreproj.pipelines.sd3 import PreProjSD3Pipeline
from mmpreproj.recipes.progress import Reporter
from mmpreproj.recipes.train.encoders import Encoders
from mmpreproj.recipes.train.inputs import Inputs, make_inputs
from mmpreproj.recipes.train.output import check_inputs_survive, check_output, clear_output
from mmpreproj.recipes.train.preparation import open_base, prepare_pipeline
from mmpreproj.recipes.train.results import write_results
from mmpreproj.recipes.train.sources import check_readers, open_source, split
from mmpreproj.recipes.train.tracking import check_trackers
from mmpreproj.recipes.train.upload import check_login, upload
from mmpreproj.recipes.train.watching import Watch
from mmpreproj.training.checkpoints import find_checkpoint
from mmpreproj.training.config import TrainConfig, write_config
from mmpreproj.training.loop import Scheduler, StepRecord, make_accelerator, train
from mmpreproj.training.optimisation import check_optimizer
from mmpreproj.training.progress import check_progress, samples_digest
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
        ConfigError: if the configuration does not fit this machine, model or output folder.
        FileNotFoundError: if data or model are not where the configuration says.
        ValueError: if the data cannot be used.
        TrainingDivergedError: if the loss is not finite; checkpoints and metrics so far are kept.
        TrainingStoppedError: if the process was asked to stop; a checkpoint has been written.
    """
    accelerator = make_accelerator(config)
    check_optimizer(config.optimizer, device=accelerator.device)
    check_trackers(config)
    check_login(config, accelerator=accelerator)
    checkpoint = None if resume is None else find_checkpoint(config.output / "checkpoints", resume)
    if checkpoint is not None:
        check_progress(checkpoint, config, processes=accelerator.num_processes)
    if not _is_own(checkpoint, config):
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
                write_results(run.pipeline, config, history, inputs=inputs, accelerator=accelerator)
            encoders.restore()
            if accelerator.is_main_process:
                upload(config, run.saved, say=reporter.say)
        finally:
            _say_skipped("picture", inputs.skipped, "left out", reporter)
            _say_skipped("cloud", inputs.pictures.skipped_clouds, "its picture trained without", reporter)
    accelerator.wait_for_everyone()
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
        samples, processes = samples_digest(inputs.trained), accelerator.num_processes
        done = check_progress(checkpoint, config, samples=samples, processes=processes)
        left = config.steps - done.step
        what = f"{left} steps are left" if left else "no step is left; the results are written again"
        reporter.say(f"going on after step {done.step} of {config.steps}: {what}")
    accelerator.wait_for_everyone()  # only now: nothing that is refused costs an earlier run's results
    if accelerator.is_main_process:
        if not _is_own(checkpoint, config):
            clear_output(config.output)
        write_config(config, config.output / "config.yaml")
    accelerator.wait_for_everyone()
    with Watch(pipeline, inputs, config, accelerator=accelerator, reporter=reporter, checkpoint=checkpoint) as watch:
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
        )
        return watch.history


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
