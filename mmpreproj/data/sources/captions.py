"""Captions: what counts as one, and captions from text files."""

from __future__ import annotations

import reprlib
from typing import Any


def caption_fault(caption: Any) -> str | None:
    """Say what is wrong with a caption, or None if it is text that can be used."""
    if caption is None:
        return "the caption is null"
    if not isinstance(caption, str):
        return f"the caption is the {type(caption).__name__} {reprlib.repr(caption)}, expected text"
    if not caption.strip():
        return "the caption is empty"
    if "\0" in caption:
        return "the caption holds NUL characters, as text saved in UTF-16 does"
    try:
        caption.encode()
    except UnicodeEncodeError as error:
        return f"the caption holds half a character ({error.reason} at place {error.start})"
    return None


def caption_from_file(data: bytes) -> str:
    """Return the text of a caption's file: its lines, stripped, with one blank between.

    Args:
        data: the whole file, UTF-8 with or without a byte order mark.

    Raises:
        ValueError: with the reason, if it is no text that can be used.
    """
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"the caption is not UTF-8 ({error.reason} at byte {error.start}), save it as UTF-8"
        ) from None
    caption = " ".join(filter(None, map(str.strip, text.splitlines())))
    fault = caption_fault(caption)
    if fault is not None:
        raise ValueError(fault)
    return caption
