"""What every part of the configuration is made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator


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
