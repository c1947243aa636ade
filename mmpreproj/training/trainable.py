"""What trains, and at which rate."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, get_args

import torch
from diffusers.training_utils import cast_training_params
from torch import nn

from mmpreproj.patching.control import is_enabled, scales
from mmpreproj.patching.integrity import check_intact
from mmpreproj.patching.lookup import adapters, is_patched, parameters
from mmpreproj.training.config import ConfigError, OptimizerConfig, TrainConfig
from mmpreproj.training.lora import lora_parameters

Part = Literal["adapter", "lora", "norms", "biases", "base"]
PARTS: tuple[Part, ...] = get_args(Part)
THAWED: tuple[Part, ...] = ("norms", "biases")


def select_trainable(transformer: nn.Module, config: TrainConfig) -> None:
    """Let that train which a configuration asks for, in fp32, and nothing else.

    Mode `probe` trains the adapter, where `adapter` is set, the LoRA, where `lora` is, and the parts of the base that
    `thaw` names; mode `full` trains everything. What is frozen keeps its dtype.

    A thawed norm or bias in fp32 beside half-precision weights needs autocast, in evaluation too; see
    `settle_dtypes`.

    Raises:
        ValueError: if the transformer carries several adapters, or has lost one that was put on it, or one that is to
            train is refused by `check_strength`; in mode `probe`, if something that is to train is not there, or has
            no weights. Nothing is changed then.
    """
    check_intact(transformer)
    names = adapters(transformer)
    if len(names) > 1:
        raise ValueError(
            f"the transformer carries several adapters, {', '.join(names)}, and a run trains one; take the others off "
            "with mmpreproj.unpatch(model, name)"
        )
    if names and (config.mode == "full" or config.adapter is not None):
        check_strength(transformer, config.mode)
    trained = frozenset(PARTS)
    if config.mode == "probe":
        _check_adapter(transformer, config)
        trained = _asked_for(config)
        _check_present(transformer, trained)
    for _, part, parameter in named_parts(transformer):
        parameter.requires_grad_(part in trained)
    cast_training_params(transformer, dtype=torch.float32)


def check_strength(transformer: nn.Module, mode: Literal["probe", "full"]) -> None:
    """Refuse to train an adapter that takes no part, or, where it is saved alone, one that acts at another scale.

    Raises:
        ValueError: naming the way out.
    """
    (name,) = adapters(transformer)
    strengths = set(scales(transformer)[name].values())
    if is_enabled(transformer) and 0.0 not in strengths and (mode == "full" or strengths == {1.0}):
        return
    raise ValueError(
        f"the adapter {name!r} is switched off or not at scale 1, so it would not train, or would act otherwise "
        "once it is saved; call mmpreproj.enable(model) and mmpreproj.set_scale(model, 1.0) first"
    )


def named_parts(transformer: nn.Module) -> Iterator[tuple[str, Part, nn.Parameter]]:
    """Iterate over every parameter: its name in the model, the part it belongs to, and itself.

    Of the base, `biases` are all that are called so, those of norms and of modulation too, and `norms` the other
    learned weights of norms, those of queries and keys too. What adaLN makes its scales and shifts with is no norm.
    """
    adapter = {id(parameter) for parameter in parameters(transformer)} if is_patched(transformer) else set()
    lora = {id(parameter) for parameter in lora_parameters(transformer)}
    norms = {
        id(parameter)
        for module in transformer.modules()
        if "norm" in type(module).__name__.lower()  # diffusers has a dozen that share no class but nn.Module
        for parameter in module.parameters(
            recurse=False
        )  # adaLN is called a norm too; its weights are a linear layer's
    }
    for name, parameter in transformer.named_parameters():
        part: Part = "base"
        if id(parameter) in adapter:
            part = "adapter"
        elif id(parameter) in lora:
            part = "lora"
        elif name.split(".")[-1] == "bias":
            part = "biases"
        elif id(parameter) in norms:
            part = "norms"
        yield name, part, parameter


def parameter_groups(transformer: nn.Module, config: OptimizerConfig) -> list[dict[str, Any]]:
    """Group what trains by part, each with its learning rate, and by weight decay, which matrices alone have.

    Groups come in the order of `PARTS`, matrices first, and carry their part's name as `name`. Empty ones are left
    out.
    """
    members: dict[tuple[Part, bool], list[nn.Parameter]] = {
        (part, flag): [] for part in PARTS for flag in (True, False)
    }
    for _, part, parameter in named_parts(transformer):
        if parameter.requires_grad:
            members[part, parameter.ndim > 1].append(parameter)
    return [
        {
            "name": part,
            "params": found,
            "lr": getattr(config.learning_rates, part) or config.learning_rate,
            "weight_decay": config.weight_decay if is_matrix else 0.0,
        }
        for (part, is_matrix), found in members.items()
        if found
    ]


@torch.no_grad()
def settle_dtypes(transformer: nn.Module) -> None:
    """Give thawed norms and biases the dtype of the frozen base again, in which the model runs without autocast.

    The adapter and LoRA stay in fp32; they convert what they are given.
    """
    found = [(part, parameter) for _, part, parameter in named_parts(transformer)]
    frozen = (
        parameter.dtype
        for part, parameter in found
        if part == "base" and parameter.is_floating_point() and not parameter.requires_grad
    )
    dtype = next(frozen, None)
    for part, parameter in found:
        if dtype is not None and part in THAWED and parameter.requires_grad:
            parameter.data = parameter.to(dtype)


def _check_adapter(transformer: nn.Module, config: TrainConfig) -> None:
    if config.adapter is None:
        return
    if not is_patched(transformer):
        raise ValueError(
            f"mode 'probe' trains an adapter, but this {type(transformer).__name__} is not patched; call "
            "mmpreproj.patch(transformer, config) first"
        )
    if config.lora is None and not config.thaw and not any(True for _ in parameters(transformer)):
        raise ValueError(
            "mode 'probe' trains an adapter, but this one has no weights: pre_projection and skip are off and its "
            "positions are whole from the start; set positions.start: identity, or mode: full"
        )


def _asked_for(config: TrainConfig) -> frozenset[Part]:
    added: dict[Part, bool] = {"adapter": config.adapter is not None, "lora": config.lora is not None}
    return frozenset(config.thaw) | {part for part, asked in added.items() if asked}


def _check_present(transformer: nn.Module, trained: frozenset[Part]) -> None:
    kind = type(transformer).__name__
    missing = trained - {part for _, part, _ in named_parts(transformer)}
    if "lora" in missing:
        raise ValueError(f"lora is to train, but this {kind} carries none; call inject_lora(transformer, config.lora)")
    for part in THAWED:
        if part in missing:
            raise ConfigError(f"thaw: this {kind} has no {part} that are learned; leave {part} out")
