"""The state of a run: what trains, optimiser, schedule, averages, scaler and random numbers, to a folder and back."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from accelerate.utils import RNG_STATE_NAME, load
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mmpreproj.training.config import ConfigError

if TYPE_CHECKING:
    from mmpreproj.training.stepper import Stepper

TRAINED = "trained.safetensors"


def save_state(stepper: Stepper, folder: Path) -> None:
    """Write what going on takes besides the weights' own files, through accelerate; every process calls this.

    Raises:
        OSError, RuntimeError, SafetensorError: if it cannot be written; which of them depends on the file.
    """
    accelerator = stepper.accelerator

    def only_what_trains(models: list[nn.Module], weights: list[dict[str, Tensor]], place: str) -> None:
        if weights and accelerator.is_main_process:  # sharded weights are written by accelerate, and are not here
            trained = _trained(stepper.transformer)
            save_file({name: value.contiguous() for name, value in trained.items()}, str(Path(place) / TRAINED))
        weights.clear()

    hook = accelerator.register_save_state_pre_hook(only_what_trains)
    try:
        with _alone(stepper):
            accelerator.save_state(str(folder))
    finally:
        hook.remove()


def load_state(folder: Path, stepper: Stepper) -> None:
    """Put a run where it was when its state was written; every process calls this.

    Raises:
        ConfigError: if the state is damaged, or of another model.
    """
    accelerator = stepper.accelerator

    def only_what_trained(models: list[nn.Module], place: str) -> None:
        path = Path(place) / TRAINED
        if path.is_file():
            _copy_into(stepper.transformer, load_file(str(path)), path)
            models.clear()

    hook = accelerator.register_load_state_pre_hook(only_what_trained)
    try:
        with _alone(stepper):
            accelerator.load_state(str(folder))
        _check_random_numbers(folder / f"{RNG_STATE_NAME}_{accelerator.process_index}.pkl")
    except ConfigError:
        raise
    except (OSError, EOFError, KeyError, RuntimeError, ValueError, SafetensorError, pickle.UnpicklingError) as error:
        raise ConfigError(
            f"--resume: {folder} is damaged or of another run ({error}); name an earlier checkpoint"
        ) from error
    finally:
        hook.remove()


def _trained(transformer: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in transformer.named_parameters() if value.requires_grad}


def _copy_into(transformer: nn.Module, values: Mapping[str, Tensor], path: Path) -> None:
    there = _trained(transformer)
    shapes = ({name: value.shape for name, value in found.items()} for found in (there, values))
    odd = sorted({name for name, _ in set.symmetric_difference(*(set(found.items()) for found in shapes))})
    if odd:
        raise ConfigError(f"--resume: {path} is of another model: {len(odd)} weights differ, the first is {odd[0]}")
    for name, value in there.items():
        value.copy_(values[name])


def _check_random_numbers(path: Path) -> None:
    """Make sure that the random numbers go on, which accelerate only tries."""
    saved = load(path)
    taken_up = torch.equal(torch.get_rng_state(), saved["torch_manual_seed"])
    if not taken_up or random.getstate() != saved["random_state"]:
        raise RuntimeError(f"the random numbers of {path.name} could not be taken up")


@contextmanager
def _alone(stepper: Stepper) -> Iterator[None]:
    """Let accelerate see the parts of this run alone, also if it has prepared those of an earlier one."""
    accelerator = stepper.accelerator
    seen = {
        "_models": accelerator._models[-1:],  # as accelerate has wrapped them
        "_optimizers": accelerator._optimizers[-1:],
        "_schedulers": [],
        "_dataloaders": [],
        "_custom_objects": [thing for thing in (stepper.schedule, stepper.average) if thing is not None],
    }
    before = {name: getattr(accelerator, name) for name in seen}
    vars(accelerator).update(seen)
    try:
        yield
    finally:
        vars(accelerator).update(before)
