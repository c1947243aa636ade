"""What is trained: the model, or the sizes of a new one, and the adapter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, PlainSerializer, Tag, model_validator

from mmpreproj.patching.config import PreProjConfig
from mmpreproj.training.config.section import Names, Section


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


class LoraSettings(Section):
    """LoRA through PEFT, alone as a baseline or beside the adapter.

    Attributes:
        rank: r, the inner width of each pair of matrices.
        alpha: the update is scaled by `alpha / rank`; None for the rank, which is no scaling.
        dropout: of what enters the matrices.
        targets: names of the layers that get it, by the ends of their paths; `all-linear` for every linear layer.
    """

    also_called: ClassVar[Mapping[str, str]] = {
        "r": "rank",
        "lora_alpha": "alpha",
        "lora_dropout": "dropout",
        "target_modules": "targets",
    }

    rank: int = Field(default=16, ge=1)
    alpha: float | None = Field(default=None, gt=0)
    dropout: float = Field(default=0.0, ge=0, lt=1)
    targets: Names = (
        "attn.add_k_proj",
        "attn.add_q_proj",
        "attn.add_v_proj",
        "attn.to_add_out",
        "attn.to_k",
        "attn.to_out.0",
        "attn.to_q",
        "attn.to_v",
    )


def _read_adapter(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    try:
        return PreProjConfig.from_dict(value)
    except TypeError as error:
        raise ValueError(str(error)) from error


Adapter = Annotated[
    PreProjConfig, BeforeValidator(_read_adapter), PlainSerializer(lambda config: config.to_dict(), return_type=dict)
]


GIVE_A_MODEL = "give a hub id, a folder, or the sizes of a new model such as {width: 192, heads: 6}"


def _kind_of_model(value: Any) -> str | None:
    if isinstance(value, str):
        return "name"
    return "sizes" if isinstance(value, (Mapping, ScratchModel)) else None


def _named(value: str) -> str:
    if not value.strip():
        raise ValueError(f"is empty; {GIVE_A_MODEL}")
    return value


# Told apart before either is read, so that a fault in the sizes is no complaint that they are not a name.
Model = Annotated[
    Annotated[str, AfterValidator(_named), Tag("name")] | Annotated[ScratchModel, Tag("sizes")],
    Discriminator(
        _kind_of_model,
        custom_error_type="model_kind",
        custom_error_message=GIVE_A_MODEL,
    ),
]
