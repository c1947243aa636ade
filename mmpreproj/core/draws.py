"""What is random about a sample, as a pure function of a run's seed and the number of the draw."""

from __future__ import annotations

from typing import NamedTuple

import torch

GOLDEN, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


class Draw(NamedTuple):
    """One sample of a run.

    Attributes:
        index: which picture of the dataset.
        number: how many draws the whole run made before this one, over all processes; see `generator_of`.
    """

    index: int  # type: ignore[assignment]  # in the place of tuple.index, the method
    number: int


def generator_of(seed: int, number: int, purpose: int = 0) -> torch.Generator:
    """Return the random numbers of one draw, on the CPU, whatever was drawn before and wherever.

    torch's CPU generator takes 32 bits of a seed, too few for a hash: of 77,000 draws two would share theirs with even
    chances. So what is mixed is a bijection of the number and the purpose: within a seed none are shared among the
    first 2**28 numbers with purposes below 16. Beyond, and between seeds, two agree with a chance of 2**-32.

    Args:
        seed: of the run.
        number: of the draw; see `Draw`.
        purpose: tells apart what is drawn independently for the same sample, such as noise and flips.

    Raises:
        ValueError: for numbers that are no integers from 0 to 2**64 - 1.
    """
    for name, value in (("seed", seed), ("number", number), ("purpose", purpose)):
        check_whole(name, value)
    key = hashed(seed, 2, number >> 28, purpose >> 4)
    mixed = _mix_32((number & 2**28 - 1) << 4 | purpose & 15) ^ key >> 32
    return torch.Generator().manual_seed(_mix_32(mixed) ^ key & 2**32 - 1)


def hashed(*parts: int) -> int:
    """Mix whole numbers of 64 bits into one, their order counting: each time SplitMix64's first from a new key."""
    bits = 0
    for part in parts:
        bits = (bits ^ part) + GOLDEN & 2**64 - 1
        bits = (bits ^ bits >> 30) * FIRST & 2**64 - 1
        bits = (bits ^ bits >> 27) * SECOND & 2**64 - 1
        bits ^= bits >> 31
    return bits


def _mix_32(bits: int) -> int:
    """Mix 32 bits, one to one (MurmurHash3's finaliser, `fmix32`)."""
    bits = (bits ^ bits >> 16) * 0x85EBCA6B & 2**32 - 1
    bits = (bits ^ bits >> 13) * 0xC2B2AE35 & 2**32 - 1
    return bits ^ bits >> 16


def check_whole(name: str, value: int, *, least: int = 0) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**64:
        raise ValueError(f"{name} is {value!r}; expected a whole number from {least} to 2**64 - 1")
