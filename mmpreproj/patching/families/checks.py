"""Checks of a row by itself, and of what it reads off a model: errors name the field, the value and the way out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter, index
from typing import Any, TypeVar

from torch import nn

_Entry = TypeVar("_Entry")
_SIZES = ("in_features", "embed_dim")


def check_text(field: str, value: Any, example: str, *, empty: bool = False) -> None:
    """Refuse what is no text, or an empty one where that will not do."""
    if not isinstance(value, str):
        raise TypeError(f"{field} must be a text such as {example!r}; got {value!r} ({type(value).__name__})")
    if not value and not empty:
        raise ValueError(f"{field} must not be empty; give a text such as {example!r}")


def check_name(field: str, value: Any) -> None:
    """Refuse a stream's name that could not name weights."""
    check_text(field, value, "image")
    if "." in value or hasattr(nn.ModuleDict, value) or hasattr(nn.ModuleDict(), value):
        raise ValueError(f"{field} must have no dot and be no attribute of torch modules; got {value!r}")


def check_place(field: str, value: Any) -> None:
    """Refuse what is no place in a call or a tuple."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{field} must be a whole number from 0; got {value!r} ({type(value).__name__})")
    if value < 0:
        raise ValueError(f"{field} must be 0 or more, counted from the first; got {value}")


def check_kind(field: str, value: Any, kind: type) -> None:
    """Refuse what is neither None nor of a kind."""
    if not isinstance(value, (kind, type(None))):
        raise TypeError(f"{field} must be a {kind.__name__} or None; got {value!r}")


def check_truth(field: str, value: Any) -> None:
    """Refuse what is neither True nor False."""
    if not isinstance(value, bool):
        raise TypeError(f"{field} must be True or False; got {value!r}")


def entries(field: str, values: Any, kind: type[_Entry], *, example: str, empty: bool = False) -> tuple[_Entry, ...]:
    """Return the entries of a tuple or list, or refuse what is none, or holds something else."""
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise TypeError(f"{field} must be a tuple, {example}; got {values!r} (a tuple of one needs its comma)")
    for value in values:
        if not isinstance(value, kind):
            raise TypeError(f"{field} must hold {kind.__name__} entries, {example}; got {value!r}")
    if not values and not empty:
        raise ValueError(f"{field} is empty, so there would be nothing to patch; give it entries, {example}")
    return tuple(values)


def check_apart(field: str, values: Iterable[Any]) -> None:
    """Refuse a value that is there twice."""
    seen = set()
    for value in values:
        if value in seen:
            raise ValueError(f"{field} is {value!r} twice; each must have its own")
        seen.add(value)


def read_attribute(field: str, owner: nn.Module, attribute: str) -> Any:
    """Read an attribute, dotted for one of an attribute's own, that a row names.

    Raises:
        ValueError: if the module has none of that name.
    """
    try:
        return attrgetter(attribute)(owner)
    except AttributeError as error:
        raise ValueError(
            f"{field}={attribute!r} is no attribute of this {type(owner).__name__} ({error}). Correct the row; a "
            "dotted path reaches an attribute of a child"
        ) from error


def read_number(field: str, owner: nn.Module, attribute: str) -> int:
    """Read a whole number above 0 that a row says is at an attribute of a module.

    Raises:
        ValueError: if it is not there, or something else is; with the whole numbers that there are.
    """
    try:
        value = attrgetter(attribute)(owner)
        number = 0 if isinstance(value, bool) else index(value)
    except AttributeError:
        problem = "is no attribute"
    except TypeError:
        problem = f"is {type(value).__name__}, no whole number,"
    else:
        if number > 0:
            return number
        problem = f"is {value!r}, no whole number above 0,"
    raise ValueError(
        f"{field}={attribute!r} {problem} of this {type(owner).__name__}. Correct the row; whole numbers there: "
        f"{', '.join(_numbers(owner)) or 'none, so give it one in its __init__'}"
    )


def _numbers(owner: nn.Module) -> list[str]:
    """List attributes of a module, and sizes of its children, that are whole numbers above 0, with their values."""
    own = {key: value for key, value in vars(owner).items() if not key.startswith("_")}
    sizes = {f"{path}.{size}": getattr(child, size, None) for path, child in owner.named_children() for size in _SIZES}
    return [f"{key} {value}" for key, value in {**own, **sizes}.items() if type(value) is int and value > 0]
