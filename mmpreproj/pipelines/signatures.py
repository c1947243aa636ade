"""What `inspect.signature` shows of our pipelines' methods, to people and to diffusers."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

LENGTH = "max_sequence_length"

_Init = TypeVar("_Init", bound=Callable[..., None])
_Method = TypeVar("_Method", bound=Callable[..., Any])


def hide_defaults(init: _Init) -> _Init:
    """Show an `__init__` to `inspect.signature` without its defaults.

    `DiffusionPipeline.from_pretrained(custom_pipeline=…)` reads from the signature which components a caller may pass.
    One with a default it takes for a plain option, unless *DiffusionPipeline's own* list of optional components names
    it; then `vae=…` or `text_encoder_3=None` would be overridden by what the folder holds.
    """
    signature = inspect.signature(init)
    bare = [parameter.replace(default=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    init.__signature__ = signature.replace(parameters=bare)  # type: ignore[attr-defined]
    return init


def signature_of(parent: Callable[..., Any], *further: str) -> Callable[[_Method], _Method]:
    """Show a method to `inspect.signature`, and so to callers and diffusers, with its parent's signature.

    The length of texts, where the parent takes one, is None by default, for the one that is stored.

    Args:
        parent: the method whose arguments it takes.
        further: keyword arguments that it takes besides, None by default.
    """
    own = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in further]
    signature = inspect.signature(parent)
    parents = [
        parameter.replace(default=None, annotation="int | None") if name == LENGTH else parameter
        for name, parameter in signature.parameters.items()
    ]

    def show(method: _Method) -> _Method:
        shown: Any = functools.wraps(parent, assigned=())(method)
        shown.__signature__ = signature.replace(parameters=[*parents, *own])
        return cast(_Method, shown)

    return show
