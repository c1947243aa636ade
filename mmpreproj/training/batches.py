"""The order of training batches, and all that is random about a sample, as pure functions of seed and number.

So a run that is resumed goes on as if it had never stopped, and neither the number of loader workers nor, at an equal
global batch, the number of processes changes what is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from itertools import count
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset, Sampler

from mmpreproj.core.draws import FIRST, GOLDEN, SECOND, Draw, check_whole, hashed
from mmpreproj.training.stopping import leave_stopping_to_parent

# SplitMix64's step and factors: Steele, Lea & Flood 2014, as in Vigna's splitmix64.c.
DRAWS_AT_ONCE = 2**16  # epochs of few samples are made together, no more than 16 bits number; the order is the same


class BucketBatches(Sampler[list[Draw]]):
    """Endless batches, each of one group, in an order that its arguments alone decide.

    The samples of an epoch are put in a random order and walked through; each joins the queue of its group. A queue
    that holds a global batch becomes the next one. What an epoch leaves in the queues waits for the next, so no sample
    is lost, and a group smaller than a batch fills it over several epochs. A process takes its slice of every global
    batch; so processes must not share the batches out once more (`Accelerator.prepare` would).

    Every iteration starts anew from `first_batch`.
    """

    def __init__(
        self,
        groups: Sequence[Hashable],
        times: Sequence[float] | None = None,
        *,
        batch_size: int,
        seed: int,
        processes: int = 1,
        rank: int = 0,
        first_batch: int = 0,
    ) -> None:
        """Set the order up; nothing is drawn yet.

        Args:
            groups: the group of every sample, such as its bucket.
            times: how often every sample is drawn an epoch, once by default. The fraction is the chance of one more
                draw; it is dealt so that after any number of epochs a sample is less than one draw off its mean.
            batch_size: samples a batch of one process.
            seed: of the run.
            processes: how many there are.
            rank: which of them this is, from 0.
            first_batch: how many batches to leave out at the start, for a run that has trained on them.

        Raises:
            ValueError: without samples, for times that are negative, not finite, of another number than the groups or
                less than one draw an epoch in all, and for numbers out of range.
        """
        for name, value, least in (("batch_size", batch_size, 1), ("processes", processes, 1), ("rank", rank, 0)):
            check_whole(name, value, least=least)
        check_whole("first_batch", first_batch)
        check_whole("seed", seed)
        if rank >= processes:
            raise ValueError(f"rank is {rank}; expected less than the number of processes, {processes}")
        wanted = _checked_times(times, len(groups))
        self.batch_size, self.processes, self.rank, self.seed = batch_size, processes, rank, seed
        self.first_batch = first_batch
        names: dict[Hashable, int] = {}
        numbered = [names.setdefault(group, len(names)) for group in groups]
        self._groups = np.array(numbered, dtype=np.min_scalar_type(len(names)))  # [n], narrow: sorts faster
        self._whole = np.floor(wanted)  # [n]
        self._fraction = wanted - self._whole  # [n]
        self._phase = (_hashes(hashed(seed, 0), np.arange(len(groups))) >> np.uint64(11)) * 2.0**-53  # [n] in [0, 1)
        self._epochs_at_once = max(DRAWS_AT_ONCE // max(len(groups), math.ceil(wanted.sum())), 1)

    def __iter__(self) -> Iterator[list[Draw]]:
        """Yield this process's slice of every global batch from `first_batch` on, without end."""
        size = self.batch_size * self.processes
        waiting = np.empty(0, dtype=np.int64)
        done = 0
        for epoch in count(step=self._epochs_at_once):
            samples = np.concatenate([waiting, self._draw_epochs(epoch, self._epochs_at_once)])
            places, left = fill_batches(self._groups[samples], size)  # [b, size]
            for batch in range(max(0, self.first_batch - done), len(places)):
                start = self.rank * self.batch_size
                indices = samples[places[batch, start : start + self.batch_size]].tolist()
                first = (done + batch) * size + start
                yield [Draw(index, first + offset) for offset, index in enumerate(indices)]
            done += len(places)
            waiting = samples[left]

    def _draw_epochs(self, first: int, epochs: int) -> NDArray[np.int64]:
        """Return the samples of consecutive epochs in the order in which they are drawn, `[draws]`."""
        edges = np.arange(first, first + epochs + 1)[:, None] * self._fraction  # [epochs + 1, n]
        repeats = (self._whole + np.diff(np.floor(edges + self._phase), axis=0)).astype(np.int64)  # [epochs, n]
        samples = np.repeat(np.tile(np.arange(len(self._groups)), epochs), repeats.ravel())  # [draws]
        lengths = repeats.sum(axis=1)  # [epochs]
        epoch = np.repeat(np.arange(epochs), lengths)  # [draws]
        within = np.arange(len(epoch)) - (np.cumsum(lengths) - lengths)[epoch]  # [draws], place in its epoch
        # NumPy's generators may change their streams from release to release, and a resumed run its order with them.
        keys = _hashes(_hashes(hashed(self.seed, 1), np.arange(first, first + epochs))[epoch], within)
        return samples[np.argsort(epoch.astype(np.uint64) << np.uint64(48) | keys >> np.uint64(16), kind="stable")]


def fill_batches(groups: NDArray[Any], size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Queue samples by their groups, and take a batch whenever a queue holds one.

    Args:
        groups: number of each sample's group, in the order in which the samples come, `[n]`.
        size: samples a batch.

    Returns:
        The places in `groups` of every batch's samples, `[b, size]`, in the order in which the batches fill, and the
        places of those left in the queues, `[rest]`; both in the order in which they came.
    """
    by_group = np.argsort(groups, kind="stable")  # [n]
    lengths = np.bincount(groups)  # [g]
    within = np.arange(len(groups)) - np.repeat(np.cumsum(lengths) - lengths, lengths)  # [n], place in its group
    ends = np.flatnonzero(within % size == size - 1)  # [b], in by_group
    ends = ends[np.argsort(by_group[ends])]
    left = within >= np.repeat(lengths // size * size, lengths)
    return by_group[ends[:, None] + np.arange(1 - size, 1)], np.sort(by_group[left])


def times_of(
    parts: Sequence[range], repeats: Sequence[float], weights: Sequence[float | None] | None = None
) -> list[float]:
    """Say how often each sample of mixed sources is drawn an epoch; see `BucketBatches`.

    Args:
        parts: the samples of each source, one after another from 0.
        repeats: how often each source's samples are drawn an epoch. With weights they set the epoch's length alone.
        weights: the share of all draws that each source gets is its weight in the sum of the weights; None for all of
            them leaves the shares to the repeats.

    Returns:
        A number a sample.

    Raises:
        ValueError: for lists of different lengths, an empty part or one that does not follow the last, repeats or
            weights that are negative, not finite or all zero, and for weights of some sources alone.
    """
    given = [None] * len(parts) if weights is None else list(weights)
    if not len(parts) == len(repeats) == len(given):
        raise ValueError(f"{len(parts)} parts, {len(repeats)} repeats and {len(given)} weights; expected one a source")
    _check_parts(parts)
    _check_numbers("repeats", repeats)
    if all(weight is None for weight in given):
        return [float(repeat) for part, repeat in zip(parts, repeats, strict=True) for _ in part]
    known = [weight for weight in given if weight is not None]
    if len(known) < len(given):
        raise ValueError(f"weights: source {given.index(None)} has none and others do; give one to all or to none")
    _check_numbers("weights", known)
    epoch = math.fsum(len(part) * repeat for part, repeat in zip(parts, repeats, strict=True))
    total = math.fsum(known)
    each = [epoch * (weight / total) / len(part) for part, weight in zip(parts, known, strict=True)]
    return [time for part, time in zip(parts, each, strict=True) for _ in part]


def make_loader(pictures: Dataset[Any], batches: BucketBatches, *, workers: int) -> DataLoader[Any]:
    """Load batches, in the same order and with the same contents for any number of workers.

    Args:
        pictures: indexed by `Draw`; what it draws at random should come from `generator_of` with the draw's number.
        batches: which samples, in which order.
        workers: processes that load ahead; with 0 this one loads.

    Raises:
        ValueError: for a negative number of workers.
    """
    check_whole("workers", workers)
    # Without a generator of its own the loader would take a number from torch's global one whenever it is iterated.
    return DataLoader(
        pictures,
        batch_sampler=batches,
        num_workers=workers,
        persistent_workers=workers > 0,
        worker_init_fn=leave_stopping_to_parent if workers else None,
        generator=torch.Generator().manual_seed(0),
    )


def _hashes(key: int | NDArray[np.uint64], places: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return SplitMix64's numbers at places of its stream from a key, `[n]`; those of a key are all different."""
    bits = np.asarray(key, dtype=np.uint64) + (places.astype(np.uint64) + np.uint64(1)) * np.uint64(GOLDEN)
    bits = (bits ^ bits >> np.uint64(30)) * np.uint64(FIRST)
    bits = (bits ^ bits >> np.uint64(27)) * np.uint64(SECOND)
    return bits ^ bits >> np.uint64(31)


def _checked_times(times: Sequence[float] | None, samples: int) -> NDArray[np.float64]:
    if samples == 0:
        raise ValueError("there are no samples to draw; expected at least one")
    if times is None:
        return np.ones(samples)
    if len(times) != samples:
        raise ValueError(f"{len(times)} times for {samples} samples; expected one a sample")
    _check_numbers("times", times)
    total = math.fsum(times)
    if total < 1:
        raise ValueError(f"times: {total} draws an epoch in all; expected at least 1: raise the repeats")
    return np.array(times, dtype=np.float64)


def _check_numbers(name: str, values: Sequence[float]) -> None:
    for place, value in enumerate(values):
        if not 0 <= value < math.inf:
            raise ValueError(f"{name}[{place}] is {value!r}; expected a finite number of at least 0")
    if not any(values):
        raise ValueError(f"{name}: none is above 0, so nothing would be drawn")


def _check_parts(parts: Sequence[range]) -> None:
    end = 0
    for place, part in enumerate(parts):
        if len(part) == 0:
            raise ValueError(f"parts[{place}] is empty; leave sources without samples out")
        if part.start != end or part.step != 1:
            raise ValueError(f"parts[{place}] is {part}; expected a range from {end}, where the one before ends")
        end = part.stop
