"""What trains, and how its weights are updated."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any, Literal

import torch
from diffusers.optimization import get_scheduler
from diffusers.training_utils import cast_training_params
from timm.optim import create_optimizer_v2, list_optimizers
from torch import nn

from mmpreproj.patching.control import is_enabled, scales
from mmpreproj.patching.integrity import check_intact
from mmpreproj.patching.lookup import adapters, is_patched, parameters
from mmpreproj.training.config import ConfigError, OptimizerConfig


def select_trainable(transformer: nn.Module, mode: Literal["probe", "full"]) -> None:
    """Thaw the adapter alone (`probe`) or everything (`full`); what trains becomes fp32.

    Raises:
        ValueError: in mode `probe`, if the transformer carries no adapter; in any, if it carries several, or has lost
            one that was put on it, or one that `check_strength` refuses; in mode `probe`, if the adapter has no
            weights.
    """
    check_intact(transformer)
    names = adapters(transformer)
    if len(names) > 1:
        raise ValueError(
            f"the transformer carries several adapters, {', '.join(names)}, and a run trains one; take the others off "
            "with mmpreproj.unpatch(model, name)"
        )
    if names:
        check_strength(transformer, mode)
    if mode == "probe" and not names:
        raise ValueError(
            f"mode 'probe' trains an adapter, but this {type(transformer).__name__} is not patched; call "
            "mmpreproj.patch(transformer, config) first"
        )
    added = list(parameters(transformer)) if names else []
    if mode == "probe" and not added:
        raise ValueError(
            "mode 'probe' trains an adapter, but this one has no weights: pre_projection and skip are off and its "
            "positions are whole from the start; set positions.start: identity, or mode: full"
        )
    transformer.requires_grad_(mode == "full")
    for parameter in added:
        parameter.requires_grad_(True)
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


def parameter_groups(transformer: nn.Module, config: OptimizerConfig) -> list[dict[str, Any]]:
    """Group what trains by learning rate (adapter, base) and weight decay (matrices, the rest)."""
    added = {id(parameter) for parameter in parameters(transformer)} if is_patched(transformer) else set()
    rates = {False: config.learning_rate, True: config.adapter_learning_rate or config.learning_rate}
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for parameter in transformer.parameters():
        if parameter.requires_grad:
            groups.setdefault((id(parameter) in added, parameter.ndim > 1), []).append(parameter)
    return [
        {"params": members, "lr": rates[is_adapter], "weight_decay": config.weight_decay if is_matrix else 0.0}
        for (is_adapter, is_matrix), members in groups.items()
    ]


def check_optimizer(config: OptimizerConfig, *, device: torch.device | str = "cpu") -> None:
    """Refuse an optimiser that there is not, or that cannot take a step here.

    Some of timm's need a GPU, another package, or a closure that a plain training loop does not give.

    Raises:
        ConfigError: naming those that are nearest, or what went wrong.
    """
    _check_name(config)
    weight = nn.Parameter(torch.ones(8, 8, device=device))
    try:
        optimizer = _from_factory([{"params": [weight], "lr": config.learning_rate, "weight_decay": 0.0}], config)
        weight.square().sum().backward()
        optimizer.step()
    except Exception as error:  # whatever an optional package has to say
        raise ConfigError(
            f"optimizer.name: {config.name!r} cannot be used here ({error or type(error).__name__}); adamw can"
        ) from error


def make_optimizer(transformer: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Build the optimiser from timm's factory; see `check_optimizer` for what cannot be."""
    _check_name(config)
    return _from_factory(parameter_groups(transformer, config), config)


def _check_name(config: OptimizerConfig) -> None:
    known = [str(name) for name in list_optimizers()]
    if config.name not in known:
        nearest = get_close_matches(config.name, known, n=3) or known[:8]
        raise ConfigError(f"optimizer.name: timm has no optimiser {config.name!r}; it has {', '.join(nearest)}, …")


def _from_factory(groups: list[dict[str, Any]], config: OptimizerConfig) -> torch.optim.Optimizer:
    settings: dict[str, Any] = {"betas": config.betas} if "adam" in config.name else {}
    if config.name in ("adam", "adamw"):
        settings["fused"] = True  # one pass over the weights, on CPUs too
    return create_optimizer_v2(groups, opt=config.name, lr=config.learning_rate, weight_decay=0.0, **settings)


def make_schedule(optimizer: torch.optim.Optimizer, *, warmup_steps: int, steps: int) -> Any:
    """Build linear warm-up followed by a cosine to 0, in optimiser steps."""
    return get_scheduler("cosine", optimizer, num_warmup_steps=min(warmup_steps, steps // 2), num_training_steps=steps)
