"""The training loop: rectified flow on encoded pictures, driven by accelerate."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import GradientAccumulationPlugin, set_seed
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler

from mmpreproj.data.encoding import EncodedPictures
from mmpreproj.training.checkpoints import checkpoints, write_checkpoint
from mmpreproj.training.config import ConfigError, TrainConfig
from mmpreproj.training.measures import HeldOut, make_measures
from mmpreproj.training.objective import FlowObjective
from mmpreproj.training.optimisation import make_optimizer, make_schedule, select_trainable
from mmpreproj.training.triplets import (
    TripletObjective,
    cloud_share,
)


class TrainingDivergedError(RuntimeError):
    """The loss or a gradient was not finite; the message names the step and the last good checkpoint."""


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
    """

    step: int
    loss: float | None
    held_out: float | None
    learning_rate: float
    grad_norm: float | None
    pictures_per_second: float | None
    losses: dict[str, float] = field(default_factory=dict)
    held_out_losses: dict[str, float] = field(default_factory=dict)


def make_accelerator(config: TrainConfig) -> Accelerator:
    """Build the accelerator that a configuration asks for.

    Raises:
        ConfigError: if this machine cannot train in that precision, or this process has begun in another.
    """
    # Accelerate would train in fp32 there without a word.
    if config.precision == "fp16" and PartialState().device.type == "cpu":
        raise ConfigError("precision: fp16 needs a GPU, and this run is on the CPU; set precision: bf16 or no")
    # By default accelerate ends a step early where an epoch ends; ours go on into the next epoch.
    accumulation = GradientAccumulationPlugin(num_steps=config.gradient_accumulation, sync_with_dataloader=False)
    try:
        return Accelerator(mixed_precision=config.precision, gradient_accumulation_plugin=accumulation)
    except ValueError as error:
        raise ConfigError(f"precision: {config.precision} cannot be used here ({error})") from error


def train(
    transformer: nn.Module,
    pictures: EncodedPictures,
    config: TrainConfig,
    *,
    accelerator: Accelerator | None = None,
    held_out: EncodedPictures | None = None,
    shift: float = 1.0,
    timesteps: int = 1000,
    on_step: Callable[[StepRecord], None] = lambda record: None,
) -> nn.Module:
    """Train a transformer in place.

    Args:
        transformer: patched where the configuration's mode needs it.
        pictures: what to train on.
        config: the run's settings; `model` and `data` are not read here.
        accelerator: as made by `make_accelerator`; None makes one.
        held_out: pictures for the held-out loss.
        shift: the scheduler's shift, used where `config.flow.shift` is None.
        timesteps: the scheduler's number of training timesteps.
        on_step: called on every process after each optimiser step, and once before the first with step 0.

    Returns:
        The same transformer, free of wrappers.

    Raises:
        TrainingDivergedError: if the loss or a gradient is not finite; no weight has been touched by that step.
        ValueError: if nothing would train.
    """
    set_seed(config.seed)
    accelerator = accelerator or make_accelerator(config)
    select_trainable(transformer, config.mode)
    if config.gradient_checkpointing:
        transformer.enable_gradient_checkpointing()  # type: ignore[operator]
    run = _Run(transformer, pictures, config, accelerator=accelerator, shift=shift, timesteps=timesteps)
    measures = make_measures(held_out, config, timesteps=timesteps)
    if measures:
        start = run.measure(measures)
        on_step(StepRecord(0, None, start["pictures"], run.learning_rate, None, None, held_out_losses=start))
    run.model.train()
    try:
        for step in range(1, config.steps + 1):
            loss, grad_norm, losses = run.step(step)
            due = step == config.steps or (config.evaluate_every > 0 and step % config.evaluate_every == 0)
            measured = run.measure(measures) if due else {}
            run.check_held_out(measured, step)
            on_step(
                StepRecord(
                    step,
                    loss,
                    measured.get("pictures"),
                    run.learning_rate,
                    grad_norm,
                    run.pictures_per_second,
                    losses=losses,
                    held_out_losses=measured,
                )
            )
            checkpoint_due = config.checkpoint_every > 0 and step % config.checkpoint_every == 0
            if checkpoint_due or step == config.steps:
                run.check_weights(step)
            if checkpoint_due:
                run.checkpoint(step)
    finally:
        run.restore_forward()
    return run.finish()


class _Run:
    """The moving parts of one training run."""

    def __init__(
        self,
        transformer: nn.Module,
        pictures: EncodedPictures,
        config: TrainConfig,
        *,
        accelerator: Accelerator,
        shift: float,
        timesteps: int,
    ) -> None:
        self.config = config
        self.accelerator = accelerator
        settings: dict[str, Any] = {
            "flow": config.flow,
            "shift": shift,
            "timesteps": timesteps,
            "caption_dropout": config.caption_dropout,
            "seed": config.seed + 1 + accelerator.process_index,
        }
        self.objective: FlowObjective = (
            TripletObjective(pictures.empty, points=config.points, cloud_share=cloud_share(pictures), **settings)
            if config.trains_points
            else FlowObjective(pictures.empty, **settings)
        )
        self.transformer = transformer
        denoiser = self.objective.denoiser(transformer)
        optimizer = make_optimizer(transformer, config.optimizer)
        self._forward = vars(denoiser).get("forward")
        # Not prepared by accelerate, which would step it once per process.
        self.schedule = make_schedule(optimizer, warmup_steps=config.optimizer.warmup_steps, steps=config.steps)
        self.model, self.optimizer, loader = accelerator.prepare(
            denoiser,
            optimizer,
            make_loader(pictures, config.batch_size, seed=config.seed, processes=accelerator.num_processes),
        )
        self.batches = _endless(loader)
        self.last_batch: dict[str, Tensor] = {}
        self.learning_rate = 0.0
        self.seconds = 0.0
        self.pictures = 0

    @property
    def pictures_per_second(self) -> float:
        return self.pictures / max(self.seconds, 1e-9)

    def step(self, step: int) -> tuple[float, float, dict[str, float]]:
        """Take one optimiser step; return its batches' mean loss, the gradient's norm, and the loss by modality."""
        began = time.perf_counter()
        losses: list[float] = []
        parts: list[dict[str, Tensor]] = []
        for _ in range(self.config.gradient_accumulation):
            with self.accelerator.accumulate(self.model):
                batch = self.last_batch = next(self.batches)
                parts.append(self.objective.losses(self.model, batch))
                loss = self.objective.total(parts[-1])
                losses.append(self._check_loss(loss, step))
                self.accelerator.backward(loss)
                parts[-1] = {name: part.detach() for name, part in parts[-1].items()}
                if self.accelerator.sync_gradients:
                    grad_norm = self._clip(step)
                self.optimizer.step()
                self.optimizer.zero_grad()
            self.pictures += len(batch["latents"]) * self.accelerator.num_processes
        self.learning_rate = float(self.schedule.get_last_lr()[0])
        if not self.accelerator.optimizer_step_was_skipped:
            self.schedule.step()
        self.seconds += time.perf_counter() - began
        means = {name: torch.stack([part[name].float() for part in parts]).mean() for name in parts[0]}
        return sum(losses) / len(losses), grad_norm, {name: self._average(mean) for name, mean in means.items()}

    def measure(self, measures: dict[str, HeldOut]) -> dict[str, float]:
        """Measure the held-out losses."""
        # Not the prepared model, whose call is that of all modalities together.
        with self.accelerator.autocast():
            return {name: measure(self.transformer) for name, measure in measures.items()}

    def check_held_out(self, losses: dict[str, float], step: int) -> None:
        """Stop if a held-out loss is not finite."""
        for name, loss in losses.items():
            if not math.isfinite(loss):
                whose = "" if name == "pictures" else f" of {name}"
                self._stop(f"the held-out loss{whose} is {loss}", step)

    @torch.no_grad()
    def check_weights(self, step: int) -> None:
        """Stop, before anything is saved, if the weights are not finite or give a loss that is not.

        The loss of a step tells of the weights before it; those that the step made are tried on one more batch, with
        the random state put back afterwards.
        """
        trained = (parameter for parameter in self.model.parameters() if parameter.requires_grad)
        if not all(bool(torch.isfinite(parameter).all()) for parameter in trained):
            self._stop("a trained weight is not finite after the update", step)
        state = self.objective.generator.get_state()
        loss = self.objective.total(self.objective.losses(self.model, self.last_batch))
        self.objective.generator.set_state(state)
        self._check_loss(loss, step)

    def checkpoint(self, step: int) -> None:
        """Write a checkpoint from the main process."""
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            write_checkpoint(
                self.transformer,
                self._checkpoint_folder,
                step=step,
                mode=self.config.mode,
                keep=self.config.keep_checkpoints,
                base_model=self.config.model if isinstance(self.config.model, str) else None,
            )
        self.accelerator.wait_for_everyone()

    def restore_forward(self) -> None:
        """Take autocast off the transformer."""
        # Accelerate's own way takes diffusers' decorators off too, and with them the LoRA scale.
        attributes = vars(self.accelerator.unwrap_model(self.model))
        attributes.pop("_original_forward", None)
        attributes.pop("forward", None)
        if self._forward is not None:
            attributes["forward"] = self._forward

    def finish(self) -> nn.Module:
        """Return the transformer in eval mode, once every process is done."""
        self.accelerator.wait_for_everyone()
        return self.transformer.eval()

    @property
    def _checkpoint_folder(self) -> Path:
        return self.config.output / "checkpoints"

    def _check_loss(self, loss: Tensor, step: int) -> float:
        value = self._average(loss)  # so that all processes stop at the same step
        if not torch.isfinite(torch.tensor(value)):
            self._stop(f"the loss is {value}", step)
        return value

    def _average(self, loss: Tensor) -> float:
        """Average a loss over processes."""
        return float(self.accelerator.reduce(loss.detach().float(), reduction="mean"))

    def _clip(self, step: int) -> float:
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        norm = float(self.accelerator.clip_grad_norm_(trained, self.config.optimizer.max_grad_norm))
        # With fp16 an overflow is expected now and then: the scaler skips that step and lowers its scale.
        if self.accelerator.scaler is None and not torch.isfinite(torch.tensor(norm)):
            self._stop(f"the gradient's norm is {norm}", step)
        return norm

    def _stop(self, what: str, step: int) -> None:
        kept = checkpoints(self._checkpoint_folder)
        raise TrainingDivergedError(
            f"{what} at step {step} (learning rate {self.learning_rate:.2e}); "
            + (f"the last good checkpoint is {kept[-1]}" if kept else "there is no checkpoint yet")
            + ". Lower optimizer.learning_rate, or use precision: bf16 or no if this run used fp16"
        )


def make_loader(
    pictures: EncodedPictures, batch_size: int, *, seed: int, processes: int = 1
) -> DataLoader[dict[str, Tensor]]:
    """Build a shuffling loader whose order depends on the seed alone.

    A last, smaller round of batches is left out, unless there is no other: then accelerate fills it up.
    """
    sampler = RandomSampler(pictures, generator=torch.Generator().manual_seed(seed))
    full = len(pictures) >= batch_size * processes
    return DataLoader(pictures, batch_size=min(batch_size, len(pictures)), sampler=sampler, drop_last=full)


def _endless(loader: Any) -> Iterator[dict[str, Tensor]]:
    while True:
        batch = None
        for batch in loader:
            yield batch
        if batch is None:
            raise ValueError("an epoch gave no batch: too few pictures for batch_size on this many processes")
