"""The parts of a study's configuration that say what is trained, and how."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from mmpreproj.training.config.optimisation import Decay, OptimizerConfig
from mmpreproj.training.config.run import Precision
from mmpreproj.training.config.section import Name, Names, Section

Dtype = Literal["float32", "bfloat16", "float16"]


class LanguageModel(Section):
    """A causal language model of transformers.

    Attributes:
        name: hub id or folder.
        revision: branch, tag or commit on the hub.
        gguf_file: a GGUF file in it, of which the weights are read and widened to `dtype`.
        dtype: of the frozen weights; what trains is fp32 in any case.
    """

    also_called: ClassVar[Mapping[str, str]] = {"pretrained_model_name_or_path": "name", "torch_dtype": "dtype"}

    name: Name
    revision: Name | None = None
    gguf_file: Name | None = None
    dtype: Dtype = "float32"


def _by_name(value: object) -> object:
    if isinstance(value, str):
        return {"name": value}
    if not isinstance(value, (Mapping, LanguageModel)):
        raise ValueError("give a hub id or a folder, or settings such as {name: …, dtype: bfloat16}")
    return value


Model = Annotated[LanguageModel, BeforeValidator(_by_name, json_schema_input_type=str | LanguageModel)]


class LanguageLora(Section):
    """LoRA through PEFT, as it is by default there.

    Attributes:
        rank: r of the arms `lora` and `pre_projection+skip+lora`.
        alpha: the update is scaled by `alpha / rank`; for `lora_matched` it grows with the rank.
        dropout: of what enters the matrices.
        targets: names of the layers of `lora` and `pre_projection+skip+lora`; none for PEFT's choice.
        matched_targets: those of `lora_matched`, whose rank is chosen for as many parameters as pre-projection and
            skip have together.
    """

    also_called: ClassVar[Mapping[str, str]] = {
        "r": "rank",
        "lora_alpha": "alpha",
        "lora_dropout": "dropout",
        "target_modules": "targets",
    }

    rank: int = Field(default=8, ge=1)
    alpha: float = Field(default=8, gt=0)
    dropout: float = Field(default=0.0, ge=0, lt=1)
    targets: Names = ()
    matched_targets: Names = ("all-linear",)


class LanguageTraining(Section):
    """How every arm is trained.

    Attributes:
        steps: number of optimiser steps.
        length: tokens of a block; texts are packed into blocks without gaps.
        batch_size: blocks per step, over all processes.
        micro_batch_size: blocks at once on a process; None for all of its share.
        precision: autocast dtype; trained weights stay fp32. `no` computes in the model's dtype.
        gradient_checkpointing: trade time for memory.
        checkpoint_every: steps between the points from which a trial that was broken off goes on.
    """

    also_called: ClassVar[Mapping[str, str]] = {
        "max_steps": "steps",
        "block_size": "length",
        "max_seq_length": "length",
        "mixed_precision": "precision",
        "checkpointing_steps": "checkpoint_every",
    }

    steps: int = Field(default=500, ge=1)
    length: int = Field(default=512, ge=2)
    batch_size: int = Field(default=16, ge=1)
    micro_batch_size: int | None = Field(default=None, ge=1)
    precision: Precision = "no"
    gradient_checkpointing: bool = False
    checkpoint_every: int = Field(default=100, ge=1)


class LanguageOptimizer(OptimizerConfig):
    """How weights are updated, at the learning rate of each trial.

    Attributes:
        learning_rate: not to be set here; see `learning_rates` of the study.
        learning_rates: not to be set here.
    """

    betas: tuple[Decay, Decay] = (0.9, 0.95)

    @model_validator(mode="after")
    def _rate_is_the_trials(self) -> LanguageOptimizer:
        rate = OptimizerConfig.model_fields["learning_rate"].default
        if self.learning_rate != rate or self.learning_rates.model_dump(exclude_none=True):
            raise ValueError(
                "learning_rate is set by each trial; give learning_rates, the list it is from, at the top"
            )
        return self
