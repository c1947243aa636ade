"""The training loop: rectified flow on encoded pictures, driven by accelerate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from accelerate import Accelerator, PartialState
from accelerate.utils import GradientAccumulationPlugin, set_seed
from torch import nn

from mmpreproj.data.encoding import EncodedPictures
from mmpreproj.training.calls.pictures import CalledPictures
from mmpreproj.training.checkpoints import clean, load_checkpoint, write_checkpoint
from mmpreproj.training.config import ConfigError, TrainConfig
from mmpreproj.training.measures import make_measures
from mmpreproj.training.processes import on_main_process
from mmpreproj.training.progress import Progress, check_progress
from mmpreproj.training.sharing import check_sharing
from mmpreproj.training.stepper import Scheduler, Stepper, StepResult, TrainingDivergedError
from mmpreproj.training.stopping import TrainingStoppedError, listening
from mmpreproj.training.trainable import select_trainable, settle_dtypes

__all__ = [
    "Scheduler",
    "StepRecord",
    "TrainingDivergedError",
    "TrainingStoppedError",
    "make_accelerator",
    "train",
]


@dataclass(frozen=True)
class StepRecord:
    """What one optimiser step gave.

    Attributes:
        step: number of the step, from 1.
        loss: mean flow loss of the step's batches; in the record of step 0, which only evaluates, None.
        held_out: held-out loss after the step, where it was measured.
        learning_rate: that the step took, of the first parameter group.
        grad_norm: global norm before clipping.
        pictures_per_second: since the run began, evaluation and checkpoints left out.
        losses: mean loss of the step's batches for each modality.
        held_out_losses: held-out loss for each modality, and for pictures with and without clouds, where measured.
        learning_rates: that the step took, of each part that trains.
    """

    step: int
    loss: float | None
    held_out: float | None
    learning_rate: float
    grad_norm: float | None
    pictures_per_second: float | None
    losses: dict[str, float] = field(default_factory=dict)
    held_out_losses: dict[str, float] = field(default_factory=dict)
    learning_rates: dict[str, float] = field(default_factory=dict)


def make_accelerator(config: TrainConfig) -> Accelerator:
    """Build the accelerator that a configuration asks for.

    Raises:
        ConfigError: if this machine cannot train in that precision, or this process has begun in another; or if
            something cannot be trained as processes share the weights.
    """
    # Accelerate would train in fp32 there without a word.
    if config.precision == "fp16" and PartialState().device.type == "cpu":
        raise ConfigError("precision: fp16 needs a GPU, and this run is on the CPU; set precision: bf16 or no")
    accumulation = GradientAccumulationPlugin(num_steps=config.gradient_accumulation, sync_with_dataloader=False)
    try:
        accelerator = Accelerator(mixed_precision=config.precision, gradient_accumulation_plugin=accumulation)
    except ValueError as error:
        raise ConfigError(f"precision: {config.precision} cannot be used here ({error})") from error
    check_sharing(config, accelerator)
    return accelerator


def train(
    transformer: nn.Module,
    pictures: EncodedPictures | CalledPictures,
    config: TrainConfig,
    *,
    accelerator: Accelerator | None = None,
    held_out: EncodedPictures | CalledPictures | None = None,
    scheduler: Scheduler | None = None,
    resume: Path | None = None,
    on_step: Callable[[StepRecord], None] = lambda record: None,
    on_evaluate: Callable[[int], None] = lambda step: None,
    before_checkpoint: Callable[[], None] = lambda: None,
) -> nn.Module:
    """Train a transformer in place.

    Args:
        transformer: with whatever the configuration trains: patched, with LoRA, or stock.
        pictures: what to train on; by a pipeline's own calls for families whose pictures and texts the trainer does
            not encode itself.
        config: the run's settings; of `data` only `workers` is read here, and `model` is not.
        accelerator: as made by `make_accelerator`; None makes one.
        held_out: pictures for the held-out loss.
        scheduler: shift and timesteps of the pipeline's scheduler, used where the configuration gives none.
        resume: a checkpoint of the same run, after which it goes on as if it had never stopped.
        on_step: called on every process after each optimiser step, and once before the first with step 0.
        on_evaluate: called on every process whenever the held-out loss is due, with the step, while the averaged
            weights are in place if there are any; before the first step too, with 0, and not again where a run is
            taken up.
        before_checkpoint: called on the main process alone before each checkpoint is written, to put on the disk what
            must not be behind it; what it raises is raised on every process.

    Returns:
        The same transformer, free of wrappers, with the averaged weights if there are any.

    Raises:
        TrainingDivergedError: if the loss or a gradient is not finite; no weight has been touched by that step.
        TrainingStoppedError: if the process was asked to stop, by SIGINT or SIGTERM; a checkpoint has been written.
        ValueError: if nothing would train.
        ConfigError: if the checkpoint is of a run with other settings or data.
        OSError: if a checkpoint cannot be written; those before it are kept.
    """
    set_seed(config.seed)
    accelerator = accelerator or make_accelerator(config)
    scheduler = scheduler or Scheduler()
    select_trainable(transformer, config)
    if config.gradient_checkpointing:
        transformer.enable_gradient_checkpointing()  # type: ignore[operator]
    with listening() as stop:
        stepper = Stepper(
            transformer,
            pictures,
            config,
            accelerator=accelerator,
            scheduler=scheduler,
            stop_asked=lambda: stop.asked is not None,
        )
        run = _Run(
            stepper,
            pictures,
            held_out,
            scheduler,
            on_step=on_step,
            on_evaluate=on_evaluate,
            before_checkpoint=before_checkpoint,
        )
        try:
            last = run.go(resume)
        finally:
            stepper.close()
        if last < config.steps:
            raise TrainingStoppedError(last, config.steps, stop.asked, checkpoint=run.last_checkpoint)
    if stepper.average is not None:
        stepper.average.copy_to_parameters()
    settle_dtypes(transformer)
    accelerator.wait_for_everyone()
    return transformer.eval()


class _Run:
    """What goes on around the steps: records, evaluations, checkpoints."""

    def __init__(
        self,
        stepper: Stepper,
        pictures: EncodedPictures | CalledPictures,
        held_out: EncodedPictures | CalledPictures | None,
        scheduler: Scheduler,
        *,
        on_step: Callable[[StepRecord], None],
        on_evaluate: Callable[[int], None],
        before_checkpoint: Callable[[], None],
    ) -> None:
        self.stepper, self.config = stepper, stepper.config
        self.measures = make_measures(held_out, stepper.config, timesteps=scheduler.timesteps)
        self.samples = pictures.digest()
        self.on_step, self.on_evaluate, self.before_checkpoint = on_step, on_evaluate, before_checkpoint
        self.last_checkpoint: Path | None = None

    def go(self, resume: Path | None) -> int:
        """Take the steps that are left; return the last one taken."""
        done = 0 if resume is None else self._take_up(resume)
        if not done:
            measured = self._evaluate(0)
            if measured:
                self.on_step(self._record(0, None, measured))
        self.stepper.begin(done)
        for step in range(done + 1, self.config.steps + 1):
            result = self.stepper.step(step)
            measured = self._evaluate(step) if self._is_due(step, self.config.evaluate_every, at_end=True) else {}
            self.on_step(self._record(step, result, measured))
            due = self._is_due(step, self.config.checkpoint_every)
            stopping = result.asked_to_stop and step < self.config.steps
            if due or stopping or step == self.config.steps:
                self.stepper.check_weights(step)
            if due or stopping:
                self._checkpoint(step)
            if stopping:
                return step
        return self.config.steps

    def _take_up(self, checkpoint: Path) -> int:
        processes = self.stepper.accelerator.num_processes
        progress = check_progress(checkpoint, self.config, samples=self.samples, processes=processes)
        load_checkpoint(checkpoint, self.stepper)
        # Where no step is left, no checkpoint is written, which would do this too.
        on_main_process(self.stepper.accelerator, lambda: clean(self.stepper.checkpoint_folder))
        self.stepper.pictures, self.stepper.seconds = progress.pictures, progress.seconds
        self.last_checkpoint = checkpoint
        return progress.step

    def _is_due(self, step: int, every: int, *, at_end: bool = False) -> bool:
        return (every > 0 and step % every == 0) or (at_end and step == self.config.steps)

    def _evaluate(self, step: int) -> dict[str, float]:
        with self.stepper.averaged():
            measured = self.stepper.measure(self.measures)
            if step:
                self.stepper.check_held_out(measured, step)
            with self.stepper.autocast():
                self.on_evaluate(step)
        return measured

    def _record(self, step: int, result: StepResult | None, measured: dict[str, float]) -> StepRecord:
        return StepRecord(
            step,
            None if result is None else result.loss,
            measured.get("pictures"),
            self.stepper.learning_rate,
            None if result is None else result.grad_norm,
            None if result is None else self.stepper.pictures_per_second,
            losses={} if result is None else result.losses,
            held_out_losses=measured,
            learning_rates={} if result is None else dict(self.stepper.learning_rates),
        )

    def _checkpoint(self, step: int) -> None:
        progress = Progress(
            step=step, pictures=self.stepper.pictures, seconds=self.stepper.seconds, samples=self.samples
        )
        on_main_process(self.stepper.accelerator, self.before_checkpoint)
        self.last_checkpoint = write_checkpoint(self.stepper, progress)
