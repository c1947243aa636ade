"""One optimiser step after another: loss, gradient, clipping, update, and what is stopped at."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn

from mmpreproj.data.encoding import EncodedPictures
from mmpreproj.training.averaging import Average
from mmpreproj.training.batches import BucketBatches, make_loader
from mmpreproj.training.calls.objective import CallObjective
from mmpreproj.training.calls.pictures import CalledPictures
from mmpreproj.training.checkpoints import checkpoints
from mmpreproj.training.config import ConfigError, TrainConfig
from mmpreproj.training.measures import HeldOut
from mmpreproj.training.objective import FlowObjective
from mmpreproj.training.optimisation import make_optimizer, make_schedule
from mmpreproj.training.triplets import TripletObjective, cloud_share


class TrainingDivergedError(RuntimeError):
    """The loss or a gradient was not finite; the message names the step and the last good checkpoint."""


@dataclass(frozen=True)
class Scheduler:
    """What training needs to know of a pipeline's scheduler and VAE.

    Attributes:
        shift: of noise levels, where the configuration gives none.
        timesteps: number of training timesteps.
        cell: side of a latent cell in pixels, the VAE's scale factor.
    """

    shift: float = 1.0
    timesteps: int = 1000
    cell: int = 1


@dataclass(frozen=True)
class StepResult:
    """What one optimiser step gave: means over its batches and over processes.

    Attributes:
        loss: what was minimised.
        losses: for each modality.
        grad_norm: global norm before clipping.
        asked_to_stop: whether a process has been.
    """

    loss: float
    losses: dict[str, float]
    grad_norm: float
    asked_to_stop: bool


class Stepper:
    """The moving parts of one training run.

    Attributes:
        average: of what trains; None where there is none.
        learning_rates: that the last step took, of each part that trains.
        schedule: of the learning rate.
        pictures: that were trained on so far.
        seconds: that it took, evaluation and checkpoints left out.
    """

    def __init__(
        self,
        transformer: nn.Module,
        pictures: EncodedPictures | CalledPictures,
        config: TrainConfig,
        *,
        accelerator: Accelerator,
        scheduler: Scheduler,
        stop_asked: Callable[[], bool] = lambda: False,
    ) -> None:
        self.config, self.accelerator, self.stop_asked = config, accelerator, stop_asked
        self.transformer, self._pictures = transformer, pictures
        self.objective: FlowObjective | CallObjective = (
            make_call_objective(pictures, config, scheduler)
            if isinstance(pictures, CalledPictures)
            else make_objective(pictures, config, scheduler)
        )
        denoiser = self.objective.denoiser(transformer)
        optimizer = make_optimizer(transformer, config.optimizer)
        self._forward = vars(denoiser).get("forward")
        # Not prepared by accelerate, which would step it once per process.
        self.schedule = make_schedule(optimizer, config.optimizer, steps=config.steps)
        _tell_deepspeed(accelerator, config)
        if accelerator.is_fsdp2:
            # It would round what the model is given, the timesteps too, to half precision; autocast does not.
            accelerator.state.fsdp_plugin.mixed_precision_policy = None
        self.model, self.optimizer = accelerator.prepare(denoiser, optimizer)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.average = None if config.ema is None else Average(trained, config.ema, module=self.model)
        self.batches: Iterator[dict[str, Tensor]] = iter(())
        self.last_batch: dict[str, Tensor] = {}
        self.learning_rates: dict[str, float] = {}
        self.seconds, self.pictures = 0.0, 0

    @property
    def learning_rate(self) -> float:
        """That the last step took, of the first part that trains."""
        return next(iter(self.learning_rates.values()), 0.0)

    @property
    def pictures_per_second(self) -> float:
        return self.pictures / max(self.seconds, 1e-9)

    def begin(self, steps_done: int = 0) -> None:
        """Take up the order of batches where so many steps have left it."""
        batches = BucketBatches(
            self._pictures.groups or (None,) * len(self._pictures),
            self._pictures.times or None,
            batch_size=self.config.batch_size,
            seed=self.config.seed,
            processes=self.accelerator.num_processes,
            rank=self.accelerator.process_index,
            first_batch=steps_done * self.config.gradient_accumulation,
        )
        self.batches = iter(make_loader(self._pictures, batches, workers=self.config.data.workers))
        self.model.train()

    def step(self, step: int) -> StepResult:
        """Take one optimiser step."""
        began = time.perf_counter()
        seen: list[dict[str, Tensor]] = []
        for _ in range(self.config.gradient_accumulation):
            with self.accelerator.accumulate(self.model):
                batch = self.last_batch = self._to_device(next(self.batches))
                parts = self._losses(batch)
                loss = self.objective.total(parts)
                seen.append({name: part.detach() for name, part in {**parts, "": loss}.items()})
                if self.accelerator.sync_gradients:
                    # A loss that is not finite must not reach the update, and DeepSpeed's comes with the gradient.
                    means = self._means(seen)
                    self._check_loss(means[""], step)
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    grad_norm = self._clip(step)
                self.optimizer.step()
                self.optimizer.zero_grad()
            self.pictures += len(batch["latents"]) * self.accelerator.num_processes
        groups, rates = self.schedule.optimizer.param_groups, self.schedule.get_last_lr()
        self.learning_rates = {group["name"]: float(rate) for group, rate in zip(groups, rates, strict=True)}
        if not self.accelerator.optimizer_step_was_skipped:
            self.schedule.step()
            if self.average is not None:
                self.average.update()
        self.seconds += time.perf_counter() - began
        loss_mean, asked = means.pop(""), means.pop("stop") > 0
        return StepResult(loss_mean, means, grad_norm, asked)

    def autocast(self) -> AbstractContextManager[None]:
        """Compute in the run's precision; accelerate leaves that to DeepSpeed, which casts weights and no inputs."""
        if self.accelerator.distributed_type != DistributedType.DEEPSPEED or self.config.precision == "no":
            return self.accelerator.autocast()
        dtype = torch.bfloat16 if self.config.precision == "bf16" else torch.float16
        return torch.autocast(self.accelerator.device.type, dtype=dtype)

    def averaged(self) -> AbstractContextManager[None]:
        """Put the averaged weights in the place of the trained ones for a while, if there are any."""
        return nullcontext() if self.average is None else self.average.applied()

    def measure(self, measures: dict[str, HeldOut]) -> dict[str, float]:
        """Measure the held-out losses."""
        # Not the prepared model, whose call is that of all modalities together.
        with self.autocast():
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

        The loss of a step tells of the weights before it; those that the step made are tried on its last batch.
        """
        trained = (parameter for parameter in self.model.parameters() if parameter.requires_grad)
        if not all(bool(torch.isfinite(parameter).all()) for parameter in trained):
            self._stop("a trained weight is not finite after the update", step)
        with torch.random.fork_rng():  # of LoRA's dropout, which must not depend on when a checkpoint is due
            loss = self.objective.total(self._losses(self.last_batch))
        self._check_loss(self._means([{"": loss}])[""], step)

    def close(self) -> None:
        """End the processes that load, and take autocast off the transformer."""
        self.batches = iter(())
        self.restore_forward()

    def restore_forward(self) -> None:
        """Take autocast off the transformer."""
        # Accelerate's own way takes diffusers' decorators off too, and with them the LoRA scale.
        attributes = vars(self.accelerator.unwrap_model(self.model))
        attributes.pop("_original_forward", None)
        attributes.pop("forward", None)
        if self._forward is not None:
            attributes["forward"] = self._forward

    @property
    def checkpoint_folder(self) -> Path:
        return self.config.output / "checkpoints"

    def _losses(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        # Accelerate puts autocast around the forward pass of other prepared models itself.
        alone = self.accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)
        with self.autocast() if alone else nullcontext():
            return self.objective.losses(self.model, batch)

    def _to_device(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        device = self.accelerator.device
        # The numbers of the draws are read on the CPU, where everything random is drawn.
        return {
            name: value if name == "draw" else value.to(device, non_blocking=True) for name, value in batch.items()
        }

    def _means(self, seen: list[dict[str, Tensor]]) -> dict[str, float]:
        """Average losses over a step's batches and over processes, in one exchange; count who is asked to stop."""
        names = list(seen[0])
        means = [torch.stack([part[name].float() for part in seen]).mean() for name in names]
        asked = torch.tensor(float(self.stop_asked()), device=means[0].device)
        exchanged = self.accelerator.reduce(torch.stack([*means, asked]), reduction="mean")
        return dict(zip([*names, "stop"], exchanged.tolist(), strict=True))

    def _check_loss(self, value: float, step: int) -> None:
        if not math.isfinite(value):
            self._stop(f"the loss is {value}", step)

    def _clip(self, step: int) -> float:
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        norm = float(self.accelerator.clip_grad_norm_(trained, self.config.optimizer.max_grad_norm))
        # With fp16 an overflow is expected now and then: the scaler skips that step and lowers its scale.
        if self.accelerator.scaler is None and not math.isfinite(norm):
            self._stop(f"the gradient's norm is {norm}", step)
        return norm

    def _stop(self, what: str, step: int) -> None:
        kept = checkpoints(self.checkpoint_folder)
        raise TrainingDivergedError(
            f"{what} at step {step} (learning rate {self.learning_rate:.2e}); "
            + (f"the last good checkpoint is {kept[-1]}" if kept else "there is no checkpoint yet")
            + ". Lower optimizer.learning_rate, or use precision: bf16 or no if this run used fp16"
        )


def make_objective(pictures: EncodedPictures, config: TrainConfig, scheduler: Scheduler) -> FlowObjective:
    """Build what is minimised on encoded pictures."""
    settings: dict[str, Any] = {
        "flow": config.flow,
        "shift": scheduler.shift,
        "timesteps": scheduler.timesteps,
        "cell": scheduler.cell,
        "caption_dropout": config.caption_dropout,
        "seed": config.seed,
    }
    if config.trains_points:
        return TripletObjective(pictures.empty, points=config.points, cloud_share=cloud_share(pictures), **settings)
    return FlowObjective(pictures.empty, **settings)


def make_call_objective(pictures: CalledPictures, config: TrainConfig, scheduler: Scheduler) -> CallObjective:
    """Build what is minimised on recorded calls.

    Raises:
        ConfigError: if points are to be trained.
        ValueError: if captions are to be dropped without an empty one, or noise levels shifted by a resolution.
    """
    if config.trains_points:
        raise ConfigError("adapter.points: points are not trained on recorded calls; leave adapter.points out")
    return CallObjective(
        pictures, flow=config.flow, shift=scheduler.shift, caption_dropout=config.caption_dropout, seed=config.seed
    )


def _tell_deepspeed(accelerator: Accelerator, config: TrainConfig) -> None:
    """Give DeepSpeed the batch size that it would read off a prepared loader, and our limit of gradients."""
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    if plugin is not None:
        plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = config.batch_size
        plugin.deepspeed_config["gradient_clipping"] = config.optimizer.max_grad_norm
