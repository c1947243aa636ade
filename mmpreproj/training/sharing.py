"""Weights of which every process holds a part, under FSDP2 and DeepSpeed's ZeRO-3: what that rules out, and saving."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module

from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn

from mmpreproj.core.sharding import is_sharded, whole
from mmpreproj.training.config import ConfigError, TrainConfig


def check_sharing(config: TrainConfig, accelerator: Accelerator) -> None:
    """Refuse what cannot be trained while processes share the weights.

    Raises:
        ConfigError: naming the way out.
    """
    kind = _kind_of_sharing(accelerator)
    if kind is None:
        return
    if kind == "FSDP" and not accelerator.is_fsdp2:
        raise ConfigError("FSDP of version 1 shares out weights that cannot be told apart; set fsdp_version: 2")
    if config.trains_points:
        raise ConfigError(
            f"adapter.points: points go through parts of a block, which {kind} does not gather; launch with "
            "configs/accelerate/ddp.yaml or zero2.yaml, which keep the weights whole"
        )
    if config.ema is not None and kind == "ZeRO-3":
        raise ConfigError("ema: ZeRO-3 leaves no weights to average between uses; use fsdp2.yaml, or leave ema out")


def reshard(module: nn.Module) -> None:
    """Let FSDP2 gather anew the weights that a forward pass without a backward leaves whole, and computes with."""
    for part in _sharded_modules(module):
        part.reshard()  # type: ignore[operator]


@contextmanager
def whole_weights(module: nn.Module, *, keep: bool, frozen: bool) -> Iterator[None]:
    """Put whole weights on the CPU in the place of sharded ones for the length of a `with` block, to be saved.

    Every process must enter; those that are not to `keep` take part in the gathering alone, so that the model is whole
    in the memory of one. There modules are of their own class again, too, whose name goes into files. Where nothing is
    sharded nothing is done.

    Args:
        module: what is trained.
        keep: whether this process saves.
        frozen: take what does not train too, for a base that is saved.
    """
    reshard(module)
    with ExitStack() as stack:
        for parameter, places in _shared_weights(module, frozen=frozen):
            value = whole(parameter.detach())
            if keep:
                found = nn.Parameter(value.cpu(), requires_grad=parameter.requires_grad)
                for part, name in places:
                    setattr(part, name, found)
                    stack.callback(setattr, part, name, parameter)
        for part in _sharded_modules(module) if keep else ():
            stack.callback(setattr, part, "__class__", type(part))
            part.__class__ = type(part).__mro__[2]  # after the class that FSDP2 has made for it, and FSDPModule
        empty = [one for one in module.parameters() if hasattr(one, "ds_id") and (frozen or one.requires_grad)]
        if empty:  # as ZeRO-3 leaves them between uses
            stack.enter_context(import_module("deepspeed").zero.GatheredParameters(empty))
        yield


def _shared_weights(module: nn.Module, *, frozen: bool) -> list[tuple[nn.Parameter, list[tuple[nn.Module, str]]]]:
    """List sharded weights, each once, with the modules that have it and what it is called there."""
    found: dict[int, tuple[nn.Parameter, list[tuple[nn.Module, str]]]] = {}
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            if is_sharded(parameter) and (frozen or parameter.requires_grad):
                found.setdefault(id(parameter), (parameter, []))[1].append((part, name))
    return list(found.values())


def _sharded_modules(module: nn.Module) -> list[nn.Module]:
    """List the modules that FSDP2 gathers as one, the whole included."""
    # Known by the method of torch's FSDPModule, which takes a second to import.
    return [part for part in module.modules() if callable(getattr(part, "reshard", None))]


def _kind_of_sharing(accelerator: Accelerator) -> str | None:
    if accelerator.distributed_type == DistributedType.FSDP:
        return "FSDP"
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    return "ZeRO-3" if plugin is not None and plugin.zero_stage == 3 else None
