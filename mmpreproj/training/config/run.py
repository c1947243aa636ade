"""The training configuration as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from mmpreproj.patching.config import PreProjConfig
from mmpreproj.patching.points.settings import PointPathConfig
from mmpreproj.training.config.data import DataConfig
from mmpreproj.training.config.model import Adapter, LoraSettings, Model, ScratchModel
from mmpreproj.training.config.noise import FlowConfig, PointTraining
from mmpreproj.training.config.optimisation import EmaConfig, OptimizerConfig
from mmpreproj.training.config.section import Name, Place, Section
from mmpreproj.training.config.watching import Tracker, ValidationConfig

# YAML 1.1 reads a bare `no` as false.
Precision = Annotated[Literal["no", "bf16", "fp16"], BeforeValidator(lambda value: "no" if value is False else value)]


class TrainConfig(Section):
    """Everything that a training run needs.

    Attributes:
        model: hub id or folder of a Diffusers SD3 pipeline, or the sizes of a small one to make new.
        output: folder for everything that the run writes.
        mode: `probe`, the base is frozen and what is added to it trains; `full`, all of the transformer.
        adapter: what is patched in; None for nothing, which needs `lora`, `thaw` or mode `full`.
        lora: LoRA, beside the adapter or instead of it; None for none.
        thaw: parts of the base that train in mode `probe` too: `norms`, `biases`.
        data: the pictures.
        optimizer: the updates.
        ema: a moving average of what trains; None for none.
        flow: the noise levels.
        points: how clouds are trained on, where the adapter has `points`.
        steps: number of optimiser steps.
        batch_size: pictures per step and process, before accumulation.
        gradient_accumulation: batches per optimiser step.
        caption_dropout: share of captions replaced by the empty one, for classifier-free guidance.
        max_sequence_length: longest text, in tokens, of T5; kept with what is saved, and the pipeline's default.
        precision: autocast dtype; trained weights stay fp32. `no` is fp32 throughout.
        gradient_checkpointing: trade time for memory.
        evaluate_every: steps between held-out losses; 0 for the end only.
        held_out_levels: noise levels per held-out picture.
        validation: pictures of fixed prompts at each evaluation.
        trackers: where losses, pictures and profile go besides the run's folder.
        checkpoint_every: steps between checkpoints; 0 for none.
        keep_checkpoints: older ones are removed.
        push_to_hub: a repository id such as `me/my-adapter`, which the result is uploaded to; None for no upload.
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
        "report_to": "trackers",
        "hub_model_id": "push_to_hub",
        "use_ema": "ema",
        "proportion_empty_prompts": "caption_dropout",
        # of sections
        "learning_rate": "optimizer.learning_rate",
        "lr": "optimizer.learning_rate",
        "lr_scheduler": "optimizer.schedule",
        "lr_warmup_steps": "optimizer.warmup_steps",
        "max_grad_norm": "optimizer.max_grad_norm",
        "weighting_scheme": "flow.scheme",
        "rank": "lora.rank",
        "train_data_dir": "data.folder",
        "instance_data_dir": "data.folder",
        "dataset_name": "data.dataset",
        "resolution": "data.resolution",
        "dataloader_num_workers": "data.workers",
        "validation_prompt": "validation.prompts",
        "num_validation_images": "validation.count",
    }

    model: Model
    output: Place
    mode: Literal["probe", "full"] = "probe"
    adapter: Adapter | None = Field(default_factory=PreProjConfig)
    lora: LoraSettings | None = None
    thaw: tuple[Literal["norms", "biases"], ...] = ()
    data: DataConfig
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    ema: EmaConfig | None = None
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
    validation: ValidationConfig = Field(default_factory=ValidationConfig)
    trackers: tuple[Tracker, ...] = ("tensorboard",)
    checkpoint_every: int = Field(default=500, ge=0)
    keep_checkpoints: int = Field(default=2, ge=1)
    push_to_hub: Name | None = None
    seed: int = Field(default=0, ge=0, lt=2**32)

    @model_validator(mode="after")
    def _something_trains(self) -> TrainConfig:
        if self.mode == "probe" and isinstance(self.model, ScratchModel):
            raise ValueError("mode 'probe' would leave a new model's random weights as they are; set mode: full")
        if self.mode == "probe" and self.adapter is None and self.lora is None and not self.thaw:
            raise ValueError(
                "mode 'probe' trains what is added to the base, but adapter is null; set adapter: {}, lora: {} or "
                "mode: full"
            )
        return self

    @model_validator(mode="after")
    def _nothing_trains_twice(self) -> TrainConfig:
        if self.lora is not None and (self.mode == "full" or self.thaw):
            what = "mode 'full'" if self.mode == "full" else "thaw"
            raise ValueError(f"{what} trains weights of the base, which lora leaves as they are; use one of the two")
        if self.mode == "full" and self.thaw:
            raise ValueError("mode 'full' trains norms and biases with everything else; leave thaw out, or use probe")
        return self

    @model_validator(mode="after")
    def _points_have_clouds(self) -> TrainConfig:
        if self.trains_points and not self.data.has_clouds:
            raise ValueError(
                "adapter.points is set, but the data has no clouds; set data.points_column to the column of the "
                "metadata that names each row's cloud or mesh file, or data.source: furniture, or leave "
                "adapter.points out"
            )
        named = [source.points_column is not None for source in self.data.sources]
        if any(named) and not self.trains_points:
            where = f"data.mix.{named.index(True)}" if self.data.mix else "data"
            raise ValueError(
                f"{where}.points_column is set, but nothing trains on clouds; set adapter: {{points: {{}}}}, or leave "
                "it out"
            )
        return self

    @model_validator(mode="after")
    def _clouds_are_not_mirrored(self) -> TrainConfig:
        if self.trains_points and self.data.flip > 0:
            raise ValueError("data.flip mirrors pictures, and would not mirror their clouds; leave it out with points")
        return self

    @property
    def point_path(self) -> PointPathConfig | None:
        """The adapter's way for points, which is trained on clouds beside pictures; None for pictures alone."""
        return None if self.adapter is None else self.adapter.points

    @property
    def trains_points(self) -> bool:
        """Whether clouds are trained on beside pictures."""
        return self.point_path is not None
