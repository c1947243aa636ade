"""What cannot be used of a source: told all at once, or left out and listed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Literal, get_args

from mmpreproj.data.sources.pictures import SkippedPicture

OnError = Literal["raise", "skip"]
LISTED_AT_MOST = 10


def check_on_error(on_error: str) -> None:
    """Refuse anything but the two choices.

    Raises:
        ValueError: naming them.
    """
    if on_error not in get_args(OnError):
        raise ValueError(f"on_error is {on_error!r}; expected 'raise', or 'skip' to go on without what is unusable")


def settle(
    faults: Sequence[SkippedPicture], on_error: OnError, *, where: str, usable: int
) -> tuple[SkippedPicture, ...]:
    """Raise one error with the faults of a source, or return them to be kept with it.

    Args:
        faults: what cannot be used, in the order of the source.
        on_error: what to do about it.
        where: what the error calls the source.
        usable: how many pictures are left without them.

    Raises:
        ValueError: if there are faults and either they are to raise or nothing is left.
    """
    if faults and (on_error == "raise" or usable == 0):
        listed = shortened((f"{fault.name} ({fault.reason})" for fault in faults), len(faults))
        way_out = "correct them, or pass on_error='skip' to go on without them" if usable else "nothing usable is left"
        raise ValueError(f"{where} has {count_of(len(faults), 'fault')}: {listed}; {way_out}")
    return tuple(faults)


def count_of(number: int, noun: str) -> str:
    """Write a number with its noun: "1 file", "2 files"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def shortened(items: Iterable[str], total: int) -> str:
    """List the first few of `total` items, and count the rest."""
    return ", ".join(islice(items, LISTED_AT_MOST)) + (
        f" and {total - LISTED_AT_MOST} more" if total > LISTED_AT_MOST else ""
    )
