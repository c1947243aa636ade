"""What every part of the configuration is made of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, ValidationInfo, field_validator

LARGEST = 2**32  # whole numbers lie below: seeds have 32 bits, and nothing here is counted further
LARGEST_REAL = 1e30  # of other numbers, so that products of two are finite in fp64, and each is in fp32


class ConfigError(ValueError):
    """A configuration that cannot be used; the message names the file, the field, the value and the way out."""


class Section(BaseModel):
    """A part of the configuration; unknown keys are refused, and so are truth values for numbers, numbers that are
    not finite or beyond what is computed with, and the NUL character in text.

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

    @field_validator("*", mode="after")
    @classmethod
    def _can_be_computed_with_or_written(cls, value: Any) -> Any:
        for part in value if isinstance(value, tuple) else (value,):
            if isinstance(part, int) and abs(part) >= LARGEST:
                raise ValueError(f"too large; give a number below {LARGEST}")
            if isinstance(part, float) and abs(part) > LARGEST_REAL:
                raise ValueError(f"too large; give a number of at most {LARGEST_REAL:g}")
            if isinstance(part, (str, Path)) and "\0" in str(part):
                raise ValueError("has a NUL character in it, which no name or text may have; remove it")
        return value


def parts_of(annotation: Any) -> Iterator[Any]:
    """List what an annotation such as `Annotated[float, …] | None` is put together from."""
    yield annotation
    for part in get_args(annotation):
        yield from parts_of(part)


def _not_blank(value: str) -> str:
    if not value.strip():
        raise ValueError("is empty; give a name, or leave it out")
    return value


def _no_blank_path(value: Any) -> Any:
    # pathlib takes an empty path for the current folder, which is where a forgotten one must not lead.
    if isinstance(value, str) and not value.strip():
        raise ValueError("is empty; give a path, such as . for the current folder")
    return value


# Several of something, of which one may be written without brackets.
Names = Annotated[tuple[str, ...], BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)]
Name = Annotated[str, AfterValidator(_not_blank)]
Place = Annotated[Path, BeforeValidator(_no_blank_path)]
