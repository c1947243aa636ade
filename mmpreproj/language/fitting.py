"""Train what an arm has put on a frozen language model."""

from __future__ import annotations

import json
import math
import pickle
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor, nn
from torch.utils.data import RandomSampler

from mmpreproj.files import remove_left_over, write_atomically
from mmpreproj.language.config import StudyConfig
from mmpreproj.language.memory import PeakMemory
from mmpreproj.language.trials import check_settings
from mmpreproj.training.config import ConfigError
from mmpreproj.training.optimisation import make_optimizer, make_schedule
from mmpreproj.training.processes import on_every_process, on_main_process

UNFINISHED = "unfinished.pt"
UNREADABLE = (RuntimeError, ValueError, KeyError, TypeError, AttributeError, EOFError, OSError, pickle.UnpicklingError)
MARKS = ("forward", "_original_forward", "_is_accelerate_prepared")  # that accelerate leaves on a model


class DivergedError(RuntimeError):
    """A training whose loss or gradient is not finite, at a rate that is too high."""


@dataclass(frozen=True)
class Fit:
    """How a training went.

    Attributes:
        losses: of each step, mean over its tokens, nats.
        step_seconds: median time of a step.
        peak_memory: see `PeakMemory`.
    """

    losses: tuple[float, ...]
    step_seconds: float
    peak_memory: int | None


def make_accelerator(config: StudyConfig) -> Accelerator:
    """Start accelerate; the blocks of a step are divided among its processes.

    Raises:
        ConfigError: if they cannot be.
    """
    accelerator = Accelerator(mixed_precision=config.training.precision)
    processes, training = accelerator.num_processes, config.training
    if training.batch_size % processes:
        raise ConfigError(
            f"training.batch_size: {training.batch_size} blocks cannot be divided among {processes} processes; give a "
            f"multiple of {processes}"
        )
    share = training.batch_size // processes
    micro = training.micro_batch_size
    if micro is not None and share % micro:
        raise ConfigError(
            f"training.micro_batch_size: a process has {share} blocks a step, which {micro} does not divide; give a "
            "divisor"
        )
    return accelerator


def fit(
    wrapped: Any,
    blocks: Any,
    config: StudyConfig,
    *,
    learning_rate: float,
    seed: int,
    accelerator: Accelerator,
    folder: Path,
    identity: Mapping[str, Any],
    on_step: Callable[[int, float], None] | None = None,
) -> Fit:
    """Train what is not frozen of a model on blocks of tokens.

    A training that was broken off goes on from `folder/unfinished.pt` and gives the same weights as one that was not.

    Args:
        wrapped: a causal language model, patched, or in PEFT's wrapper; afterwards in eval mode, and as it was.
        blocks: of which `blocks[rows]["input_ids"]` is int64 `[rows, length]`, as a data set in torch's format.
        config: steps, batch, optimiser.
        learning_rate: peak rate.
        seed: of the order of blocks, and of dropout.
        accelerator: from `make_accelerator`.
        folder: for what is kept while it runs.
        identity: all that the result depends on, in values of JSON, by which that is known again.
        on_step: is told each step and its loss.

    Raises:
        ConfigError: if what was kept is damaged, or was made with other settings.
        DivergedError: if a loss or a gradient is not finite.
    """
    training = config.training
    settings = config.optimizer.model_copy(update={"learning_rate": learning_rate})
    optimizer = make_optimizer(wrapped, settings)
    schedule = make_schedule(optimizer, settings, steps=training.steps)
    batches = _Batches(blocks, config, seed, accelerator)
    with _prepared(wrapped, optimizer, config, accelerator) as (model, optimizer):
        set_seed(seed, device_specific=True)
        run = _Run(folder, identity, wrapped, optimizer, schedule, accelerator)
        run.resume()
        for step in range(len(run.losses), training.steps):
            begun = time.perf_counter()
            run.losses.append(_step(model, batches.read(step), config, optimizer, accelerator))
            schedule.step()
            run.seconds.append(time.perf_counter() - begun)
            if (step + 1) % training.checkpoint_every == 0:
                run.keep()
            if on_step is not None:
                on_step(step + 1, run.losses[-1])
        accelerator.wait_for_everyone()
    return Fit(tuple(run.losses), median(run.seconds), run.peak())


def forget_unfinished(folder: Path) -> None:
    """Remove what a training has kept to go on from."""
    (folder / UNFINISHED).unlink(missing_ok=True)
    remove_left_over(folder)


@contextmanager
def _prepared(
    wrapped: Any, optimizer: Any, config: StudyConfig, accelerator: Accelerator
) -> Iterator[tuple[nn.Module, Any]]:
    """Let accelerate prepare a model for training, and take off again what it has put on it."""
    if config.training.gradient_checkpointing:
        _checkpoint_gradients(wrapped)
    if accelerator.scaler is not None:  # of fp16; it has learned in the training before this one
        accelerator.scaler.load_state_dict(torch.amp.GradScaler().state_dict())
    try:
        model, optimizer = accelerator.prepare(wrapped, optimizer)
        model.train()
        yield model, optimizer
    finally:
        if config.training.gradient_checkpointing:
            _keep_activations(wrapped)
        for name in MARKS:  # else it would neither be cast nor shared among processes the next time
            vars(wrapped).pop(name, None)
        wrapped.eval()
        accelerator.free_memory()


def _checkpoint_gradients(model: Any) -> None:
    if hasattr(model, "activation_checkpointing_enable"):  # so called from transformers 5 on
        model.activation_checkpointing_enable()
    else:
        model.gradient_checkpointing_enable({"use_reentrant": False})


def _keep_activations(model: Any) -> None:
    if hasattr(model, "activation_checkpointing_disable"):
        model.activation_checkpointing_disable()
    else:
        model.gradient_checkpointing_disable()
    if hasattr(model, "_require_grads_hook"):  # on the embedding, where transformers leaves it
        model.disable_input_require_grads()


class _Batches:
    """This process's blocks of each step; every block is read once before one comes again."""

    def __init__(self, blocks: Any, config: StudyConfig, seed: int, accelerator: Accelerator) -> None:
        self.blocks = blocks
        self.size = config.training.batch_size
        self.share = self.size // accelerator.num_processes
        self.first = accelerator.process_index * self.share
        self.device = accelerator.device
        number = config.training.steps * self.size
        generator = torch.Generator().manual_seed(seed)
        self.order = list(RandomSampler(blocks, num_samples=number, generator=generator))

    def read(self, step: int) -> Tensor:
        start = step * self.size + self.first
        return self.blocks[self.order[start : start + self.share]]["input_ids"].to(self.device)  # [share, length]


def _step(model: nn.Module, tokens: Tensor, config: StudyConfig, optimizer: Any, accelerator: Accelerator) -> float:
    """Make one step on this process's blocks `[b, length]`; the loss is the mean over all processes."""
    *first, last = tokens.split(config.training.micro_batch_size or len(tokens))
    total = torch.zeros((), device=tokens.device)
    for part in (*first, last):
        with nullcontext() if part is last else accelerator.no_sync(model):
            loss = model(input_ids=part, labels=part, use_cache=False).loss / (len(first) + 1)
            accelerator.backward(loss)
        total += loss.detach().float()
    norm = float(accelerator.clip_grad_norm_(_trained(model), config.optimizer.max_grad_norm))
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    mean = float(accelerator.reduce(total, reduction="mean"))
    rescues = accelerator.scaler is not None  # which leaves out a step whose gradient has overflown
    if not math.isfinite(mean) or not (rescues or math.isfinite(norm)):
        raise DivergedError(f"the loss is {mean:g} and the norm of its gradient {norm:g}: this training has diverged")
    return mean


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


@dataclass
class _Run:
    """How far a training has come, and what it needs to go on."""

    folder: Path
    identity: Mapping[str, Any]
    wrapped: nn.Module
    optimizer: Any
    schedule: Any
    accelerator: Accelerator

    def __post_init__(self) -> None:
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.earlier_peak: int | None = None
        self.memory = PeakMemory(self.accelerator.device)

    def peak(self) -> int | None:
        """Return the most memory that it has held, before it was broken off too."""
        now = self.memory.peak()
        return now if now is None or self.earlier_peak is None else max(now, self.earlier_peak)

    def keep(self) -> None:
        """Write all that it needs to go on, in one move; every process calls this."""
        drawn = on_every_process(lambda: _random_state(self.accelerator.device))
        on_main_process(self.accelerator, lambda: self._write(drawn))

    def _write(self, drawn: list[Any]) -> None:
        state = {
            "identity": json.dumps(self.identity),
            "weights": {name: parameter.detach().cpu() for name, parameter in self._trained()},
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "scaler": None if self.accelerator.scaler is None else self.accelerator.scaler.state_dict(),
            "losses": self.losses,
            "seconds": self.seconds,
            "peak": self.peak(),
            "random": drawn,  # of each process
        }
        write_atomically(self.folder / UNFINISHED, lambda path: torch.save(state, path))

    def resume(self) -> None:
        """Put it where it was broken off, if it was."""
        path = self.folder / UNFINISHED
        if not path.is_file():
            return
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
            found, processes = json.loads(state["identity"]), len(state["random"])
        except UNREADABLE as error:
            raise ConfigError(_damaged(path, error)) from error
        check_settings(found, self.identity, path, way_out="remove that file, and the trial is made again")
        if processes != self.accelerator.num_processes:
            raise ConfigError(
                f"{path} was made by {processes} processes, and there are {self.accelerator.num_processes}; start "
                f"{processes}, or remove it, and the trial is made again"
            )
        try:
            self._take(state)
        except UNREADABLE as error:
            raise ConfigError(_damaged(path, error)) from error

    @torch.no_grad()
    def _take(self, state: Mapping[str, Any]) -> None:
        for name, parameter in self._trained():
            parameter.copy_(state["weights"][name])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        if self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(state["scaler"])
        self.losses, self.seconds, self.earlier_peak = state["losses"], state["seconds"], state["peak"]
        _set_random_state(state["random"][self.accelerator.process_index], self.accelerator.device)

    def _trained(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, parameter) for name, parameter in self.wrapped.named_parameters() if parameter.requires_grad]


def _random_state(device: torch.device) -> dict[str, Tensor]:
    """Read what dropout is drawn from."""
    states = {"cpu": torch.get_rng_state()}
    return states | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def _set_random_state(states: Mapping[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)


def _damaged(path: Path, error: Exception) -> str:
    # torch's own words for it ask to load it unsafely
    reason = "torch.save has not written it" if isinstance(error, pickle.UnpicklingError) else str(error)
    return f"{path} is damaged ({type(error).__name__}: {reason}); remove it, and the trial is made again"
