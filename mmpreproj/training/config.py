"""The training configuration: one YAML file, checked before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PlainSerializer,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)

from mmpreproj.patching.config import PreProjConfig
from mmpreproj.patching.points.settings import PointPathConfig


class ConfigError(ValueError):
    """A configuration that cannot be used; the message names the file, the field, the value and the way out."""


class Section(BaseModel):
    """A part of the configuration; unknown keys are refused, and so are numbers that are not finite, or truth values.

    Attributes:
        also_called: what other tools call a key, to answer those who write that.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())
    also_called: ClassVar[Mapping[str, str]] = {}

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_value_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        annotation = cls.model_fields[str(info.field_name)].annotation
        kinds = get_args(annotation) or (annotation,)
        if isinstance(value, bool) and (int in kinds or float in kinds):
            raise ValueError("give a number, not true or false")
        return value


class ScratchModel(Section):
    """A small SD3-style model to be made new, with random weights.

    Attributes:
        width: token width D.
        heads: number of attention heads.
        depth: number of joint blocks.
        patch_size: side of a patch, in latent cells (pixels where there is no VAE).
        qk_norm: normalisation of queries and keys.
        text_tokens: length of the text, in tokens; longer captions are cut.
    """

    width: int = Field(default=192, ge=8)
    heads: int = Field(default=6, ge=1)
    depth: int = Field(default=6, ge=1)
    patch_size: int = Field(default=4, ge=1)
    qk_norm: Literal["rms_norm"] | None = "rms_norm"
    text_tokens: int = Field(default=12, ge=3, le=512)

    @model_validator(mode="after")
    def _heads_divide_width(self) -> ScratchModel:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} must be a multiple of heads {self.heads}")
        return self


class DataConfig(Section):
    """Where the captioned pictures come from.

    Attributes:
        source: `folder`, a folder with metadata.jsonl or metadata.csv; `openmoji`, drawings from installed packages;
            `furniture`, named shapes with icons from an unpacked Debian package.
        folder: the folder, for `source: folder` and `source: furniture`.
        caption_column: name of the caption column in the metadata.
        points_column: name of the column with each row's cloud or mesh file; None reads no clouds.
        resolution: side of the square training pictures, in pixels.
        held_out: number of pictures that are never trained on and measure the held-out loss; 0 for none.
        held_out_by: `picture`; or `caption`, which holds out whole captions with all their pictures, until there are
            as many as `held_out`.
        held_out_seed: of the choice of what is held out; None takes the run's own, so that runs with several seeds
            hold out different pictures.
        always_train: captions that must not be held out.
    """

    source: Literal["folder", "openmoji", "furniture"] = "folder"
    folder: Path | None = None
    caption_column: str = "text"
    points_column: str | None = None
    resolution: int = Field(default=512, ge=8)
    held_out: int = Field(default=0, ge=0)
    held_out_by: Literal["picture", "caption"] = "picture"
    held_out_seed: int | None = Field(default=None, ge=0)
    always_train: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _folder_is_named(self) -> DataConfig:
        if self.source == "folder" and self.folder is None:
            raise ValueError("source 'folder' needs folder: the path of a folder with pictures and metadata.jsonl")
        if self.points_column is not None and self.source != "folder":
            raise ValueError(f"points_column is of source 'folder'; source {self.source!r} has no metadata")
        if self.source == "furniture" and self.folder is None:
            raise ValueError(
                "source 'furniture' needs folder: where the Debian package sweethome3d-furniture was unpacked, "
                "furniture/usr/share/sweethome3d/furniture"
            )
        return self

    @property
    def has_clouds(self) -> bool:
        """Whether the source has clouds beside its pictures."""
        return self.source == "furniture" or (self.source == "folder" and self.points_column is not None)


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

    also_called = {"lr": "learning_rate", "optimizer": "name", "type": "name", "lr_warmup_steps": "warmup_steps"}

    name: str = "adamw"
    learning_rate: float = Field(default=1e-3, gt=0)
    adapter_learning_rate: float | None = Field(default=None, gt=0)
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.99)
    weight_decay: float = Field(default=0.0, ge=0)
    warmup_steps: int = Field(default=50, ge=0)
    max_grad_norm: float = Field(default=1.0, gt=0)


class FlowConfig(Section):
    """How noise levels are drawn: `σ = shift(sigmoid(N(logit_mean, logit_std²)))`.

    Attributes:
        logit_mean: mean of the logit.
        logit_std: standard deviation of the logit.
        shift: as `shift` of the scheduler; None takes the scheduler's own.
    """

    logit_mean: float = 0.0
    logit_std: float = Field(default=1.0, gt=0)
    shift: float | None = Field(default=None, gt=0)


class PointTraining(Section):
    """How clouds are trained on, where the adapter has `points`.

    Attributes:
        stored: points that each cloud is read as, once.
        per_step: points drawn from each cloud at a step, to be made from noise.
        dropout: share of pictures that are shown no cloud.
        weight: of the loss of points, that of pictures being 1.
        flow: noise levels of points; no shift by default, whatever the scheduler's.
        previews: captions of which shapes are generated and drawn, two each, at each evaluation; the second half are
            held-out ones.
    """

    stored: int = Field(default=4096, ge=2)
    per_step: int = Field(default=512, ge=1)
    dropout: float = Field(default=0.5, ge=0, le=1)
    weight: float = Field(default=1.0, ge=0)
    flow: FlowConfig = Field(default_factory=lambda: FlowConfig(shift=1.0))
    previews: int = Field(default=8, ge=0)


def _read_adapter(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    try:
        return PreProjConfig.from_dict(value)
    except TypeError as error:
        raise ValueError(str(error)) from error


# YAML 1.1 reads a bare `no` as false.
Precision = Annotated[Literal["no", "bf16", "fp16"], BeforeValidator(lambda value: "no" if value is False else value)]

Adapter = Annotated[
    PreProjConfig, BeforeValidator(_read_adapter), PlainSerializer(lambda config: config.to_dict(), return_type=dict)
]


def _kind_of_model(value: Any) -> str | None:
    if isinstance(value, str):
        return "name"
    return "sizes" if isinstance(value, (Mapping, ScratchModel)) else None


# Told apart before either is read, so that a fault in the sizes is no complaint that they are not a name.
Model = Annotated[
    Annotated[str, Tag("name")] | Annotated[ScratchModel, Tag("sizes")],
    Discriminator(
        _kind_of_model,
        custom_error_type="model_kind",
        custom_error_message="give a hub id, a folder, or the sizes of a new model such as {width: 192, heads: 6}",
    ),
]


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

    also_called = {
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
