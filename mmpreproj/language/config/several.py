"""Lists of settings that a study goes through: none is empty, and nothing is in one twice."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from mmpreproj.training.config.optimisation import Rate
from mmpreproj.training.config.section import LARGEST_REAL


def one_or_more(value: object) -> object:
    """Take one without brackets for a list of one."""
    return (value,) if isinstance(value, (str, int, float)) else value


def _numbers(value: object) -> object:
    # A section looks into its own tuples; these may be in a mapping.
    values = one_or_more(value)
    if isinstance(values, (list, tuple)) and any(isinstance(part, bool) for part in values):
        raise ValueError("give a number, not true or false")
    return values


def some_and_none_twice(values: tuple) -> tuple:
    """Refuse an empty list, and one that has something twice."""
    if not values:
        raise ValueError("is empty; give one at least")
    twice = [part for part in values if values.count(part) > 1]
    if twice:
        raise ValueError(f"{twice[0]!r} is there twice; remove one")
    return values


def _in_folders_of_their_own(rates: tuple[float, ...]) -> tuple[float, ...]:
    some_and_none_twice(rates)
    taken: dict[str, float] = {}
    for rate in rates:
        if rate > LARGEST_REAL:
            raise ValueError(f"too large; give a number of at most {LARGEST_REAL:g}")
        folder = f"lr-{rate:g}"  # a trial's
        if folder in taken:
            alike = f"{taken[folder]!r} and {rate!r}"
            raise ValueError(f"{alike} would share the folder {folder}; give them with six digits at most")
        taken[folder] = rate
    return rates


_SEVERAL: Any = {"minItems": 1, "uniqueItems": True}
Several = Field(json_schema_extra=_SEVERAL)
Seed = Annotated[int, Field(ge=0, lt=2**32)]
Seeds = Annotated[tuple[Seed, ...], BeforeValidator(one_or_more), AfterValidator(some_and_none_twice), Several]
Rates = Annotated[
    tuple[Rate, ...],
    BeforeValidator(_numbers, json_schema_input_type=Rate | tuple[Rate, ...]),
    AfterValidator(_in_folders_of_their_own),
    Several,
]
