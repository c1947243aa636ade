"""The longest text that an adapter was trained with, kept with it so that generation pads texts as training did."""

from __future__ import annotations

from typing import Any

from torch import nn

from mmpreproj.patching.lookup import adapters, named_adapters, resolve_name, resolve_names, unwrap


def text_length(model: nn.Module, *, name: str | None = None) -> int | None:
    """Return the longest text, in tokens, that a model's adapters were trained with.

    Args:
        model: patched or not.
        name: which adapter; None for all of them, switched off or not, of which the largest length counts.

    Returns:
        The length; None where no adapter says.

    Raises:
        ValueError: if the model carries no adapter of that name.
    """
    model = unwrap(model)
    names = adapters(model) if name is None else resolve_names(model, name)
    lengths = {adapter.text_length for found in names for _, adapter in named_adapters(model, found)}
    return max((length for length in lengths if length is not None), default=None)


def set_text_length(model: nn.Module, length: int | None, *, name: str | None = None) -> None:
    """Note the longest text, in tokens, that an adapter is trained with; it is saved with the adapter.

    Args:
        model: a patched model.
        length: in tokens; None for not known.
        name: which adapter; None for the only one.

    Raises:
        TypeError: if the length is no whole number.
        ValueError: if it is below 1, or the model carries no adapter, or several and none is named.
    """
    if length is not None:
        check_text_length(length)
    model = unwrap(model)
    for _, adapter in named_adapters(model, resolve_name(model, name)):
        adapter.text_length = length


def check_text_length(length: Any) -> None:
    """Refuse what is no length of a text.

    Raises:
        TypeError: if it is no whole number.
        ValueError: if it is below 1.
    """
    if isinstance(length, bool) or not isinstance(length, int):
        raise TypeError(f"max_sequence_length must be a whole number of tokens; got {length!r}")
    if length < 1:
        raise ValueError(f"max_sequence_length must be at least 1; got {length}")
