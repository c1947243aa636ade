"""How weights are updated: optimiser, and the schedule of its rate."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from difflib import get_close_matches
from importlib import import_module
from typing import Any

import torch
from diffusers.optimization import get_scheduler
from timm.optim import create_optimizer_v2, get_optimizer_class, list_optimizers
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from mmpreproj.training.config import ConfigError, OptimizerConfig
from mmpreproj.training.trainable import parameter_groups

PRODIGY = "prodigy"
ELSEWHERE = {
    "lr": "learning_rate",
    "weight_decay": "weight_decay",
    "betas": "betas",
}  # settings with keys of their own
WELL_KNOWN = ("adamw", "adafactor", "lion", "muon", "bnbadamw8bit")
CONSTANT = "constant_with_warmup"  # diffusers' `constant` knows no warm-up
POWER = 2.0  # of `polynomial`; 1, diffusers' own, is `linear`
LAST_RATE = 1e-7  # where diffusers' `polynomial` ends


def check_optimizer(config: OptimizerConfig, *, device: torch.device | str = "cpu") -> None:
    """Refuse an optimiser that there is not, or that cannot take a step here.

    Some of timm's need a GPU, another package, or a closure that a plain training loop does not give.

    Raises:
        ConfigError: naming those that are nearest, or what went wrong.
    """
    matrix = nn.Parameter(torch.ones(64, 64, device=device))  # as many as the 8-bit optimisers begin at
    vector = nn.Parameter(torch.ones(8, device=device))
    groups = [
        {"params": [matrix], "lr": config.learning_rate, "weight_decay": config.weight_decay},
        {"params": [vector], "lr": config.learning_rate, "weight_decay": 0.0},
    ]
    try:
        optimizer = _build(groups, config)
        (matrix.square().sum() + vector.square().sum()).backward()
        optimizer.step()
    except ConfigError:
        raise
    except Exception as error:  # whatever an optional package has to say
        given = f" with settings {config.settings}" if config.settings else ""
        raise ConfigError(
            f"optimizer.name: {config.name!r}{given} cannot be used here ({error or type(error).__name__}); adamw can"
        ) from error


def make_optimizer(transformer: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Build an optimiser of timm's factory, or Prodigy, over what trains; see `check_optimizer` for what cannot be.

    Of timm's, `muon` and its kin turn matrices that are at least 4 wide and not too long, and update all else as
    NAdamW or AdamW do. `prodigy` finds its rate itself: `learning_rate` is a factor on it, and is meant to be 1;
    bias correction and the safeguard for warm-up are on, as in Diffusers' training scripts, unless `settings` say
    otherwise.

    Raises:
        ConfigError: if there is no such optimiser, or a setting is not one of its.
    """
    return _build(parameter_groups(transformer, config), config)


def make_schedule(optimizer: torch.optim.Optimizer, config: OptimizerConfig, *, steps: int) -> LambdaLR:
    """Build linear warm-up, over half of the run at most, followed by what `schedule` names, in optimiser steps.

    Every group's rate is multiplied by the same factor. `cosine`, `linear` and `cosine_with_restarts` end at 0;
    `polynomial` falls as `(1 - t)²`, and ends at a rate of 1e-7.

    Raises:
        ConfigError: if `polynomial` would begin below its end.
    """
    if config.schedule == "polynomial" and config.learning_rate <= LAST_RATE:
        raise ConfigError(
            f"optimizer.learning_rate: {config.learning_rate:g} is no more than the {LAST_RATE:g} that schedule "
            "'polynomial' ends at; set schedule: linear"
        )
    return get_scheduler(
        CONSTANT if config.schedule == "constant" else config.schedule,
        optimizer,
        num_warmup_steps=min(config.warmup_steps, steps // 2),
        num_training_steps=steps,
        num_cycles=config.schedule_cycles,
        power=POWER,
    )


def _build(groups: list[dict[str, Any]], config: OptimizerConfig) -> torch.optim.Optimizer:
    _check_name(config)
    is_prodigy = config.name == PRODIGY
    maker: Callable[..., torch.optim.Optimizer] = (
        _prodigy(config) if is_prodigy else get_optimizer_class(config.name, bind_defaults=False)
    )
    arguments = _betas(maker, config) | _defaults(config) | _settings(maker, config)
    if is_prodigy:
        return maker(groups, lr=config.learning_rate, **arguments)
    return create_optimizer_v2(groups, opt=config.name, lr=config.learning_rate, weight_decay=0.0, **arguments)


def _check_name(config: OptimizerConfig) -> None:
    known = [str(name) for name in list_optimizers()]
    if config.name not in (PRODIGY, *known):
        nearest = get_close_matches(config.name, known, n=3) or WELL_KNOWN
        raise ConfigError(
            f"optimizer.name: timm has no optimiser {config.name!r}; it has {', '.join(nearest)}, …, and there is "
            "prodigy"
        )


def _prodigy(config: OptimizerConfig) -> Callable[..., torch.optim.Optimizer]:
    rates = config.learning_rates.model_dump(exclude_none=True)
    if others := {part: rate for part, rate in rates.items() if rate != config.learning_rate}:
        raise ConfigError(
            f"optimizer.learning_rates: {others}, but prodigy takes one rate for all parts, learning_rate; leave "
            "learning_rates out"
        )
    try:
        return import_module("prodigyopt").Prodigy
    except ImportError as error:
        raise ConfigError(
            "optimizer.name: 'prodigy' needs the package 'prodigyopt'; run: pip install prodigyopt"
        ) from error


def _betas(maker: Callable[..., Any], config: OptimizerConfig) -> dict[str, Any]:
    """Pass the decay rates on to optimisers that have two of them by default.

    So Adafactor, which has none unless it is given some, and then takes more memory, gets none.
    """
    parameter = inspect.signature(maker).parameters.get("betas")
    if parameter is not None and isinstance(parameter.default, tuple) and len(parameter.default) == 2:
        return {"betas": config.betas}
    if config.betas != OptimizerConfig.model_fields["betas"].default:
        raise ConfigError(f"optimizer.betas: {config.name!r} does not go by two decay rates; leave betas out")
    return {}


def _defaults(config: OptimizerConfig) -> dict[str, Any]:
    if config.name == PRODIGY:
        return {"use_bias_correction": True, "safeguard_warmup": True}
    if config.name in ("adam", "adamw") and not {"foreach", "differentiable"} & config.settings.keys():
        return {"fused": True}  # one pass over the weights, on CPUs too
    return {}


def _settings(maker: Callable[..., Any], config: OptimizerConfig) -> dict[str, Any]:
    known = [name for name in inspect.signature(maker).parameters if name not in {"params", "kwargs", *ELSEWHERE}]
    for name in config.settings:
        if name in ELSEWHERE:
            raise ConfigError(f"optimizer.settings.{name}: set optimizer.{ELSEWHERE[name]} instead")
        if name not in known:
            raise ConfigError(
                f"optimizer.settings.{name}: {config.name!r} takes no such setting; it takes {', '.join(known)}"
            )
    return dict(config.settings)
