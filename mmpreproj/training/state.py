"""The state of a run: what trains, optimiser, schedule, averages, scaler and random numbers, to a folder and back."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import RNG_STATE_NAME, load
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mmpreproj.core.sharding import is_sharded
from mmpreproj.training.config import ConfigError

if TYPE_CHECKING:
    from mmpreproj.training.averaging import Average
    from mmpreproj.training.stepper import Stepper

TRAINED = "trained.safetensors"


def save_state(stepper: Stepper, folder: Path) -> None:
    """Write what going on takes besides the weights' own files, through accelerate; every process calls this.

    Raises:
        OSError, RuntimeError, SafetensorError: if it cannot be written; which of them depends on the file.
    """
    accelerator = stepper.accelerator
    # Taken now, which takes every process where it is sharded: one that fails at a file must leave none waiting.
    average = None if stepper.average is None else _Taken(stepper.average.state_dict())

    def only_what_trains(models: list[nn.Module], weights: list[dict[str, Tensor]], place: str) -> None:
        if weights and accelerator.is_main_process:  # sharded weights are written by accelerate, and are not here
            trained = _trained(stepper.transformer)
            save_file({name: value.contiguous() for name, value in trained.items()}, str(Path(place) / TRAINED))
        weights.clear()

    hook = accelerator.register_save_state_pre_hook(only_what_trains)
    try:
        with _alone(stepper, average), _without_frozen(stepper.model):
            accelerator.save_state(str(folder))
    except _sharing_failure() as error:  # no Exception, and its text names each process and its trace
        raise _first_reason(error) from error
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
        with _alone(stepper, stepper.average), _without_frozen(stepper.model):
            accelerator.load_state(str(folder))
        _check_random_numbers(folder / f"{RNG_STATE_NAME}_{accelerator.process_index}.pkl")
    except ConfigError:
        raise
    except (OSError, EOFError, KeyError, RuntimeError, ValueError, SafetensorError, pickle.UnpicklingError) as error:
        raise ConfigError(
            f"--resume: {folder} is damaged or of another run ({error}); name an earlier checkpoint"
        ) from error
    except _sharing_failure() as error:
        raise ConfigError(
            f"--resume: {folder} is damaged or of another run ({_first_reason(error)}); name an earlier checkpoint"
        ) from error
    finally:
        hook.remove()


@dataclass(frozen=True)
class _Taken:
    """Something's state, ready to be written."""

    state: dict[str, Any]

    def state_dict(self) -> dict[str, Any]:
        return self.state


@contextmanager
def _without_frozen(model: nn.Module) -> Iterator[None]:
    """Leave what does not train out of a sharded model's states; loading one leaves it as it is.

    Accelerate writes the whole of a model that FSDP2 shares out, and `state_dict` is all of it that can be reached.
    """
    if not any(is_sharded(parameter) for parameter in model.parameters()):
        yield
        return
    frozen = {name: value.detach() for name, value in model.named_parameters() if not value.requires_grad}

    def drop(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for name in frozen:
            state.pop(prefix + name, None)

    def add(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        for name, value in frozen.items():
            state.setdefault(prefix + name, value)

    hooks = model.register_state_dict_post_hook(drop), model.register_load_state_dict_pre_hook(add)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _sharing_failure() -> type[BaseException] | tuple[()]:
    """Return the error of torch's for files that processes write or read together, if it can have been raised."""
    module = sys.modules.get("torch.distributed.checkpoint.api")  # takes a second to import
    return () if module is None else module.CheckpointException


def _first_reason(error: BaseException) -> Exception:
    """Return what the first process failed at, of such an error."""
    failures = getattr(error, "failures", {})
    reasons = (failure[0] for _, failure in sorted(failures.items()))
    return next((reason for reason in reasons if isinstance(reason, Exception)), RuntimeError(str(error)))


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
def _alone(stepper: Stepper, average: Average | _Taken | None) -> Iterator[None]:
    """Let accelerate see the parts of this run alone, also if it has prepared those of an earlier one."""
    accelerator = stepper.accelerator
    seen = {
        "_models": accelerator._models[-1:],  # as accelerate has wrapped them
        "_optimizers": accelerator._optimizers[-1:],
        "_schedulers": [],
        "_dataloaders": [],
        "_custom_objects": [thing for thing in (stepper.schedule, average) if thing is not None],
    }
    before = {name: getattr(accelerator, name) for name in seen}
    vars(accelerator).update(seen)
    try:
        yield
    finally:
        vars(accelerator).update(before)
