"""What is trained: the model, or the sizes of a new one, and the adapter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, PlainSerializer, Tag, model_validator

from mmpreproj.patching.config import PreProjConfig
from mmpreproj.training.config.section import Section


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
