"""How weights are updated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from mmpreproj.training.config.section import Section

Rate = Annotated[float, Field(gt=0)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Schedule = Literal["cosine", "linear", "constant", "cosine_with_restarts", "polynomial"]


class GroupRates(Section):
    """Peak learning rates of parts of what trains; None takes `learning_rate`.

    Attributes:
        adapter: pre-projections, content skips and all else of the adapter.
        lora: LoRA's matrices.
        norms: norm weights of the base, with `thaw` or in mode `full`.
        biases: biases of the base, with `thaw` or in mode `full`.
        base: everything else of the base, in mode `full`.
    """

    adapter: Rate | None = None
    lora: Rate | None = None
    norms: Rate | None = None
    biases: Rate | None = None
    base: Rate | None = None


class OptimizerConfig(Section):
    """How weights are updated.

    Attributes:
        name: an optimiser of timm's factory, e.g. `adamw`, `muon`, `bnbadamw8bit`; or `prodigy`.
        learning_rate: peak rate after warm-up; 1 for `prodigy`, which finds its own.
        learning_rates: peak rates of parts of what trains.
        betas: decay rates of the optimisers of Adam's kind.
        weight_decay: on weight matrices only.
        settings: further arguments of the optimiser, by its own names.
        schedule: of the rate after warm-up: `cosine` and `linear` end at 0, `polynomial` at 1e-7, `constant` stays.
        schedule_cycles: of `cosine_with_restarts`.
        warmup_steps: steps of linear warm-up.
        max_grad_norm: gradients are scaled down to this global norm.
    """

    also_called: ClassVar[Mapping[str, str]] = {
        "lr": "learning_rate",
        "adapter_learning_rate": "learning_rates",
        "optimizer": "name",
        "type": "name",
        "lr_scheduler": "schedule",
        "scheduler": "schedule",
        "lr_warmup_steps": "warmup_steps",
        "lr_num_cycles": "schedule_cycles",
        "optimizer_args": "settings",
    }

    name: str = "adamw"
    learning_rate: Rate = 1e-3
    learning_rates: GroupRates = Field(default_factory=GroupRates)
    betas: tuple[Decay, Decay] = (0.9, 0.99)
    weight_decay: float = Field(default=0.0, ge=0)
    settings: dict[str, float | int | bool | str | None] = Field(default_factory=dict)
    schedule: Schedule = "cosine"
    schedule_cycles: int = Field(default=1, ge=1)
    warmup_steps: int = Field(default=50, ge=0)
    max_grad_norm: float = Field(default=1.0, gt=0)


class EmaConfig(Section):
    """An exponential moving average of what trains, which is evaluated and is what a run leaves.

    Attributes:
        decay: share that is kept at a step, late in training.
        warmup: begin with a smaller share, `(1 + step) / (10 + step)`, so that the start is soon forgotten.
    """

    also_called: ClassVar[Mapping[str, str]] = {
        "ema_decay": "decay",
        "max_decay": "decay",
        "use_warmup": "warmup",
        "use_ema_warmup": "warmup",
    }

    decay: float = Field(default=0.999, gt=0, lt=1)
    warmup: bool = True
