"""How weights are updated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import Field

from mmpreproj.training.config.section import Section


class OptimizerConfig(Section):
    """How weights are updated.

    Attributes:
        name: an optimiser of timm's factory, e.g. `adamw`.
        learning_rate: peak rate after warm-up.
        adapter_learning_rate: peak rate of the adapter alone, in mode `full`; None for the same.
        betas: AdamW's decay rates.
        weight_decay: on weight matrices only.
        warmup_steps: steps of linear warm-up; a cosine to 0 follows.
        max_grad_norm: gradients are scaled down to this global norm.
    """

    also_called: ClassVar[Mapping[str, str]] = {
        "lr": "learning_rate",
        "optimizer": "name",
        "type": "name",
        "lr_warmup_steps": "warmup_steps",
    }

    name: str = "adamw"
    learning_rate: float = Field(default=1e-3, gt=0)
    adapter_learning_rate: float | None = Field(default=None, gt=0)
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.99)
    weight_decay: float = Field(default=0.0, ge=0)
    warmup_steps: int = Field(default=50, ge=0)
    max_grad_norm: float = Field(default=1.0, gt=0)
