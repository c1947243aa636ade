"""The training configuration as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from mmpreproj.patching.config import PreProjConfig
from mmpreproj.patching.points.settings import PointPathConfig
from mmpreproj.training.config.data import DataConfig
from mmpreproj.training.config.model import Adapter, Model, ScratchModel
from mmpreproj.training.config.noise import FlowConfig, PointTraining
from mmpreproj.training.config.optimisation import OptimizerConfig
from mmpreproj.training.config.section import Section

# YAML 1.1 reads a bare `no` as false.
Precision = Annotated[Literal["no", "bf16", "fp16"], BeforeValidator(lambda value: "no" if value is False else value)]


class TrainConfig(Section):
    """Everything that a training run needs.

    Attributes:
        model: hub id or folder of a Diffusers SD3 pipeline, or the sizes of a small one to make new.
        output: folder for everything that the run writes.
        mode: `probe`, only the adapter trains; `full`, all of the transformer.
        adapter: what is patched in; None (with mode `full`) trains the stock model.
        data: the pictures.
        optimizer: the updates.
        flow: the noise levels.
        points: how clouds are trained on, where the adapter has `points`.
        steps: number of optimiser steps.
        batch_size: pictures per step and process, before accumulation.
        gradient_accumulation: batches per optimiser step.
        caption_dropout: share of captions replaced by the empty one, for classifier-free guidance.
        max_sequence_length: longest text, in tokens, of T5.
        precision: autocast dtype; trained weights stay fp32. `no` is fp32 throughout.
        gradient_checkpointing: trade time for memory.
        evaluate_every: steps between held-out losses; 0 for the end only.
        held_out_levels: noise levels per held-out picture.
        checkpoint_every: steps between checkpoints; 0 for none.
        keep_checkpoints: older ones are removed.
        seed: of everything random.
    """

    also_called: ClassVar[Mapping[str, str]] = {
        "max_train_steps": "steps",
        "max_steps": "steps",
        "train_batch_size": "batch_size",
        "gradient_accumulation_steps": "gradient_accumulation",
        "mixed_precision": "precision",
        "pretrained_model_name_or_path": "model",
        "output_dir": "output",
        "checkpointing_steps": "checkpoint_every",
        "checkpoints_total_limit": "keep_checkpoints",
    }

    model: Model
    output: Path
    mode: Literal["probe", "full"] = "probe"
    adapter: Adapter | None = Field(default_factory=PreProjConfig)
    data: DataConfig
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    flow: FlowConfig = Field(default_factory=FlowConfig)
    points: PointTraining = Field(default_factory=PointTraining)
    steps: int = Field(default=1000, ge=1)
    batch_size: int = Field(default=1, ge=1)
    gradient_accumulation: int = Field(default=1, ge=1)
    caption_dropout: float = Field(default=0.1, ge=0, le=1)
    max_sequence_length: int = Field(default=256, ge=1, le=512)
    precision: Precision = "no"
    gradient_checkpointing: bool = False
    evaluate_every: int = Field(default=100, ge=0)
    held_out_levels: int = Field(default=4, ge=1)
    checkpoint_every: int = Field(default=500, ge=0)
    keep_checkpoints: int = Field(default=2, ge=1)
    seed: int = Field(default=0, ge=0, lt=2**32)

    @model_validator(mode="after")
    def _something_trains(self) -> TrainConfig:
        if self.mode == "probe" and self.adapter is None:
            raise ValueError(
                "mode 'probe' trains the adapter alone, but adapter is null; set adapter: {} or mode: full"
            )
        if self.mode == "probe" and isinstance(self.model, ScratchModel):
            raise ValueError("mode 'probe' would leave a new model's random weights as they are; set mode: full")
        return self

    @model_validator(mode="after")
    def _points_have_clouds(self) -> TrainConfig:
        if self.trains_points and not self.data.has_clouds:
            raise ValueError(
                "adapter.points is set, but the data has no clouds; set data.points_column to the column of the "
                "metadata that names each row's cloud or mesh file, or data.source: furniture, or leave "
                "adapter.points out"
            )
        if self.data.points_column is not None and not self.trains_points:
            raise ValueError(
                "data.points_column is set, but nothing trains on clouds; set adapter: {points: {}}, or leave it out"
            )
        return self

    @property
    def point_path(self) -> PointPathConfig | None:
        """The adapter's way for points, which is trained on clouds beside pictures; None for pictures alone."""
        return None if self.adapter is None else self.adapter.points

    @property
    def trains_points(self) -> bool:
        """Whether clouds are trained on beside pictures."""
        return self.point_path is not None
