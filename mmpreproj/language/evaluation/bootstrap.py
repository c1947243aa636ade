"""Errors and paired differences of scores, by resampling items and training seeds together.

Scores of an arm are `[seeds, items]`. Each resample draws the items with replacement, the same for every seed and, in
a comparison, for both arms, so that what makes an item hard cancels. It also draws seeds, for each arm by itself:
S − 1 of its S with replacement, since S of S would make the variance of the mean too small by (S − 1)/S, a third for
three seeds. An arm of one seed keeps it: then the error is that of the items alone and says nothing of retraining.

Intervals are percentiles of the resampled values; p is twice the smaller share of them on either side of no
difference, both with one added to the count, at most 1. Where items, seeds and their interplay all vary, the errors
are a little too large rather than too small.

Source: Efron & Tibshirani, An Introduction to the Bootstrap (1993), chapters 6 and 13; Owen, The pigeonhole
bootstrap, Ann. Appl. Stat. 1 (2007), for rows and columns resampled together; McCarthy & Snowden, The Bootstrap and
Finite Population Sampling (1985), for drawing S − 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

CHUNK_ELEMENTS = 1 << 22  # resamples × items held at a time
LEVEL = 0.95
Statistic = Callable[[np.ndarray, np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Estimate:
    """A value of one arm.

    Attributes:
        value: the mean, or the perplexity, of all seeds and items.
        error: its standard error, the standard deviation of its resamples.
        seeds: number of seeds; with 1, only the items were resampled.
        items: number of items, or of windows.
    """

    value: float
    error: float
    seeds: int
    items: int


@dataclass(frozen=True)
class Comparison:
    """Arm a against arm b on the same items.

    Attributes:
        value: a − b of the means, or a / b of the perplexities.
        low: lower end of the 95 % interval.
        high: upper end of it.
        p: two-sided, of no difference (a ratio of 1).
        seeds: number of seeds of a and of b; where it is 1, that arm's seed was not resampled.
        items: number of items, or of windows.
    """

    value: float
    low: float
    high: float
    p: float
    seeds: tuple[int, int]
    items: int


def mean_and_error(values: ArrayLike, *, seed: int = 0, resamples: int = 10_000) -> Estimate:
    """Give the mean of an arm's scores and its standard error over items and seeds together.

    Args:
        values: scores `[seeds, items]`, or `[items]` of one seed.
        seed: of the resampling.
        resamples: number of them.

    Raises:
        ValueError: if the scores have another shape, are empty or not finite, or `resamples` is below 2.
    """
    scores = _scores(values, "values")
    return _estimate(scores, np.ones_like(scores), _ratio, seed, resamples)


def perplexity_and_error(nll: ArrayLike, counts: ArrayLike, *, seed: int = 0, resamples: int = 10_000) -> Estimate:
    """Give an arm's perplexity, exp(Σ nll / Σ counts) over windows and seeds, and its standard error.

    Args:
        nll: summed negative log-likelihood of each window `[seeds, windows]` or `[windows]`, nats.
        counts: tokens scored in each window, of the same shape or `[windows]` for all seeds.
        seed: of the resampling.
        resamples: number of them.

    Raises:
        ValueError: as `mean_and_error`, or if a count is not above 0.
    """
    sums, tokens = _sums_and_counts(nll, counts, "")
    return _estimate(sums, tokens, _perplexity, seed, resamples)


def paired_difference(
    values_a: ArrayLike, values_b: ArrayLike, *, seed: int = 0, resamples: int = 10_000
) -> Comparison:
    """Compare the mean scores of two arms on the same items: a − b.

    Args:
        values_a: scores `[seeds, items]`, or `[items]` of one seed.
        values_b: the same of the other arm, whose number of seeds may differ.
        seed: of the resampling.
        resamples: number of them.

    Raises:
        ValueError: as `mean_and_error`, or if the arms have different numbers of items.
    """
    a, b = _scores(values_a, "values_a"), _scores(values_b, "values_b")
    return _compare((a, np.ones_like(a)), (b, np.ones_like(b)), seed, resamples)


def paired_perplexity_ratio(
    nll_a: ArrayLike,
    counts_a: ArrayLike,
    nll_b: ArrayLike,
    counts_b: ArrayLike,
    *,
    seed: int = 0,
    resamples: int = 10_000,
) -> Comparison:
    """Compare the perplexities of two arms on the same windows: a / b, below 1 where a predicts better.

    Args:
        nll_a: summed negative log-likelihood of each window `[seeds, windows]` or `[windows]`, nats.
        counts_a: tokens scored in each window, of the same shape or `[windows]` for all seeds.
        nll_b: as `nll_a`, of the other arm.
        counts_b: as `counts_a`, of the other arm.
        seed: of the resampling.
        resamples: number of them.

    Raises:
        ValueError: as `perplexity_and_error`, or if the arms have different numbers of windows.
    """
    a, b = _sums_and_counts(nll_a, counts_a, "_a"), _sums_and_counts(nll_b, counts_b, "_b")
    logs = _compare(a, b, seed, resamples)  # the difference of mean nll is the log of the ratio
    value, low, high = np.exp([logs.value, logs.low, logs.high]).tolist()
    return Comparison(value, low, high, logs.p, logs.seeds, logs.items)


def _scores(values: ArrayLike, name: str) -> np.ndarray:
    scores = np.atleast_2d(np.asarray(values, dtype=np.float64))  # [S, I]
    if scores.ndim != 2 or 0 in scores.shape:
        raise ValueError(f"{name} has the shape {list(np.shape(values))}; give [seeds, items] or [items], not empty")
    if not np.isfinite(scores).all():
        row, column = np.argwhere(~np.isfinite(scores))[0].tolist()
        raise ValueError(f"{name} is {scores[row, column]} for item {column} of seed {row}; scores must be finite")
    return scores


def _sums_and_counts(nll: ArrayLike, counts: ArrayLike, suffix: str) -> tuple[np.ndarray, np.ndarray]:
    sums, tokens = _scores(nll, f"nll{suffix}"), _scores(counts, f"counts{suffix}")
    if tokens.shape[1] != sums.shape[1] or tokens.shape[0] not in (1, sums.shape[0]):
        raise ValueError(
            f"nll{suffix} is {list(sums.shape)} but counts{suffix} is {list(tokens.shape)} (seeds, windows); "
            "give one count a window"
        )
    if (tokens <= 0).any():
        raise ValueError(f"counts{suffix} has the value {tokens.min():g}; every window must score a token")
    return sums, np.broadcast_to(tokens, sums.shape)


def _ratio(sums: np.ndarray, counts: np.ndarray) -> np.ndarray:
    return sums / counts


def _perplexity(sums: np.ndarray, counts: np.ndarray) -> np.ndarray:
    return np.exp(sums / counts)


def _estimate(sums: np.ndarray, counts: np.ndarray, statistic: Statistic, seed: int, resamples: int) -> Estimate:
    parts = [drawn for (drawn,) in _resampled([(sums, counts)], statistic, seed, resamples)]
    value = statistic(sums.sum(), counts.sum())
    return Estimate(float(value), float(np.concatenate(parts).std(ddof=1)), *sums.shape)


def _compare(
    a: tuple[np.ndarray, np.ndarray],
    b: tuple[np.ndarray, np.ndarray],
    seed: int,
    resamples: int,
) -> Comparison:
    (seeds_a, items_a), (seeds_b, items_b) = a[0].shape, b[0].shape
    if items_a != items_b:
        raise ValueError(f"the arms have {items_a} and {items_b} items; compare arms on the same items")
    drawn = np.concatenate([of_a - of_b for of_a, of_b in _resampled([a, b], _ratio, seed, resamples)])  # [R]
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(drawn, [tail, 1 - tail]).tolist()
    one_sided = (1 + min((drawn <= 0).sum(), (drawn >= 0).sum())) / (resamples + 1)
    value = a[0].sum() / a[1].sum() - b[0].sum() / b[1].sum()
    return Comparison(float(value), low, high, float(min(1.0, 2 * one_sided)), (seeds_a, seeds_b), items_a)


def _resampled(
    arms: list[tuple[np.ndarray, np.ndarray]], statistic: Statistic, seed: int, resamples: int
) -> Iterator[list[np.ndarray]]:
    """Resample the arms' statistic, some resamples at a time `[r]`: the same items in all arms, seeds in each."""
    if resamples < 2:
        raise ValueError(f"resamples is {resamples}; give 2 or more, thousands for an interval")
    generator = np.random.default_rng(seed)
    items = arms[0][0].shape[1]
    size = max(1, CHUNK_ELEMENTS // items)
    for start in range(0, resamples, size):
        number = min(size, resamples - start)
        of_items = _times_drawn(generator, number, items, draws=items)  # [r, I]
        drawn = []
        for sums, counts in arms:
            seeds = sums.shape[0]
            of_seeds = _times_drawn(generator, number, seeds, draws=max(1, seeds - 1))  # [r, S]
            pooled = [((of_items @ each.T) * of_seeds).sum(1) for each in (sums, counts)]
            drawn.append(statistic(*pooled))
        yield drawn


def _times_drawn(generator: np.random.Generator, number: int, choices: int, *, draws: int) -> np.ndarray:
    """Count how often each choice is drawn, in `number` samples of `draws` with replacement `[number, choices]`."""
    drawn = generator.integers(choices, size=(number, draws)) + choices * np.arange(number)[:, None]
    return np.bincount(drawn.ravel(), minlength=number * choices).reshape(number, choices).astype(np.float64)
