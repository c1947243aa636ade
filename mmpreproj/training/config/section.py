"""What every part of the configuration is made of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationInfo, field_validator


class ConfigError(ValueError):
    """A configuration that cannot be used; the message names the file, the field, the value and the way out."""


class Section(BaseModel):
    """A part of the configuration; unknown keys are refused, and so are numbers that are not finite, or truth values.

    Attributes:
        also_called: what other tools call a key, to answer those who write that; the key may be one of a section,
            `optimizer.learning_rate`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())
    also_called: ClassVar[Mapping[str, str]] = {}

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_value_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        kinds = set(parts_of(cls.model_fields[str(info.field_name)].annotation))
        values = value if isinstance(value, (list, tuple)) else [value]
        if any(isinstance(part, bool) for part in values) and bool not in kinds and kinds & {int, float}:
            raise ValueError("give a number, not true or false")
        return value


def parts_of(annotation: Any) -> Iterator[Any]:
    """List what an annotation such as `Annotated[float, …] | None` is put together from."""
    yield annotation
    for part in get_args(annotation):
        yield from parts_of(part)


# Several of something, of which one may be written without brackets.
Names = Annotated[tuple[str, ...], BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)]
