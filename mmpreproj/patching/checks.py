"""Checks of single settings, whose errors name the field, the value and what it should be."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from typing import Any, TypeVar, cast

_Settings = TypeVar("_Settings")


def positive_number(name: str, value: Any) -> float:
    """Return a finite number above 0 as a float, or refuse the value."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number above 0; got {value!r} ({type(value).__name__})")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"{name} must be a finite number above 0; got {value!r}")
    return number


def check_bool(name: str, value: Any) -> None:
    """Refuse what is neither True nor False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False; got {value!r} ({type(value).__name__})")


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Refuse what is none of the choices."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}; got {value!r}")


def read_settings(kind: type[_Settings], owner: str, values: Any) -> _Settings:
    """Build a dataclass of settings from plain values, naming it as its owner calls it."""
    if not isinstance(values, Mapping):
        raise TypeError(f"{owner} must be a mapping of its fields; got {values!r} ({type(values).__name__})")
    check_fields(owner, values, [field.name for field in fields(cast(Any, kind))])
    return kind(**values)


def check_fields(owner: str, values: Mapping[str, Any], known: Sequence[str]) -> None:
    """Refuse a key that is no field, naming the nearest one."""
    for key in values:
        if key not in known:
            nearest = get_close_matches(str(key), known, n=1)
            hint = f"; did you mean {nearest[0]!r}?" if nearest else "."
            raise ValueError(f"{owner} has no field {key!r}{hint} Fields: {', '.join(known)}")
