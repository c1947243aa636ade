"""Errors and intervals against closed forms, and how often intervals cover the truth."""

import numpy as np
import pytest

from mmpreproj.language.evaluation.bootstrap import (
    mean_and_error,
    paired_difference,
    paired_perplexity_ratio,
    perplexity_and_error,
)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def coverage(truth, draw, simulations=250):
    """Give the share of simulated comparisons whose 95 % interval holds the truth."""
    generator = np.random.default_rng(0)
    intervals = [paired_difference(*draw(generator), seed=i, resamples=400) for i in range(simulations)]
    return np.mean([comparison.low <= truth <= comparison.high for comparison in intervals])


def test_the_error_of_one_seed_is_that_of_a_mean_of_items():
    values = normal(500)
    estimate = mean_and_error(values)
    assert estimate.value == pytest.approx(values.mean())
    assert estimate.error == pytest.approx(values.std() / np.sqrt(500), rel=0.03)
    assert (estimate.seeds, estimate.items) == (1, 500)


@pytest.mark.parametrize("seeds", [2, 3, 8])
def test_the_error_of_seeds_that_differ_alone_is_that_of_a_mean_of_seeds(seeds):
    shifts = normal(seeds, seed=seeds)
    estimate = mean_and_error(np.tile(shifts[:, None], 50))
    assert estimate.error == pytest.approx(shifts.std(ddof=1) / np.sqrt(seeds), rel=0.03)


def test_the_error_of_items_and_seeds_has_both_parts():
    seeds, items = normal(6, 1, seed=1), normal(1, 400, seed=2)
    expected = np.sqrt(seeds.var(ddof=1) / 6 + items.var() / 400)
    assert mean_and_error(seeds + items).error == pytest.approx(expected, rel=0.03)


def test_items_cancel_in_a_comparison():
    hardness = 10 * normal(200)
    a, b = hardness + 1 + 0.1 * normal(200, seed=1), hardness + 0.1 * normal(200, seed=2)
    comparison = paired_difference(a, b)
    assert comparison.value == pytest.approx((a - b).mean())
    width = 2 * 1.96 * (a - b).std() / np.sqrt(200)
    assert comparison.high - comparison.low == pytest.approx(width, rel=0.05)
    assert comparison.p == pytest.approx(2 / 10_001)


def test_seeds_are_drawn_by_each_arm_for_itself():
    shifts = normal(8)
    a = b = np.tile(shifts[:, None], 20)
    comparison = paired_difference(a, b)
    variance = 2 * shifts.var(ddof=1) / 8
    assert comparison.high - comparison.low == pytest.approx(2 * 1.96 * np.sqrt(variance), rel=0.1)
    assert comparison.p > 0.9


def test_an_arm_of_one_seed_is_compared_with_one_of_many():
    comparison = paired_difference(normal(4, 60) + 0.5, normal(60, seed=1))
    assert comparison.seeds == (4, 1)
    assert comparison.items == 60


def test_arms_that_are_equal_do_not_differ():
    values = normal(30)
    comparison = paired_difference(values, values)
    assert (comparison.value, comparison.low, comparison.high, comparison.p) == (0, 0, 0, 1)


def test_the_sign_follows_the_order_of_the_arms():
    a, b = normal(3, 80) + 0.3, normal(3, 80, seed=1)
    one, other = paired_difference(a, b), paired_difference(b, a)
    assert one.value == pytest.approx(-other.value)
    assert one.low < one.value < one.high
    assert one.p == pytest.approx(other.p, abs=0.02)


def test_p_is_that_of_a_normal_test():
    values = normal(400)
    values += 2.0 * values.std() / np.sqrt(400) - values.mean()  # z of 2: p of 0.0455
    assert paired_difference(values, np.zeros(400)).p == pytest.approx(0.0455, abs=0.008)


def test_intervals_of_one_seed_cover_the_difference_as_often_as_they_say():
    def draw(generator):
        hardness = generator.normal(size=80)
        return hardness + 0.2 + generator.normal(size=80), hardness + generator.normal(size=80)

    assert coverage(0.2, draw) == pytest.approx(0.95, abs=0.035)


def test_intervals_of_seeds_and_items_cover_the_difference_as_often_as_they_say():
    def draw(generator):
        effect = generator.normal(size=(1, 80))  # of each item on the difference
        shifts = 0.1 * generator.normal(size=(2, 8, 1))
        return 0.2 + effect + shifts[0] + np.zeros((8, 80)), shifts[1] + np.zeros((8, 80))

    assert coverage(0.2, draw) == pytest.approx(0.95, abs=0.035)


def test_noise_of_items_and_seeds_together_makes_errors_too_large_rather_than_too_small():
    def draw(generator):
        return 0.2 + generator.normal(size=(4, 80)), generator.normal(size=(4, 80))

    assert coverage(0.2, draw) >= 0.95


def test_a_perplexity_weighs_windows_by_their_tokens():
    counts = np.array([100, 100, 10])
    nll = np.array([[200.0, 300.0, 50.0], [210.0, 290.0, 40.0]])
    estimate = perplexity_and_error(nll, counts)
    assert estimate.value == pytest.approx(np.exp(1090 / 420))
    same = perplexity_and_error(np.tile([3.0], (2, 40)) * 50, np.full((2, 40), 50))
    assert same.value == pytest.approx(np.exp(3))
    assert same.error == pytest.approx(0, abs=1e-9)


def test_the_error_of_a_perplexity_follows_from_that_of_the_mean_loss():
    losses = 3 + 0.2 * normal(300)
    expected = np.exp(losses.mean()) * losses.std() / np.sqrt(300)
    assert perplexity_and_error(losses * 64, np.full(300, 64)).error == pytest.approx(expected, rel=0.03)


def test_a_ratio_of_perplexities_pairs_the_windows():
    losses = 3 + normal(200)
    counts = np.full(200, 64)
    a, b = losses - 0.1 + 0.01 * normal(200, seed=1), losses
    comparison = paired_perplexity_ratio(a * 64, counts, b * 64, counts)
    assert comparison.value == pytest.approx(np.exp((a - b).mean()))
    assert comparison.low < comparison.value < comparison.high < 1
    assert comparison.p < 0.001
    error = (a - b).std() / np.sqrt(200)
    assert np.log(comparison.high / comparison.low) == pytest.approx(2 * 1.96 * error, rel=0.05)


def test_a_seed_makes_the_result_repeatable():
    a, b = normal(3, 50), normal(3, 50, seed=1)
    assert paired_difference(a, b, resamples=100) == paired_difference(a, b, resamples=100)
    assert paired_difference(a, b, resamples=100) != paired_difference(a, b, resamples=100, seed=1)


def test_many_items_are_resampled_in_parts(monkeypatch):
    monkeypatch.setattr("mmpreproj.language.evaluation.bootstrap.CHUNK_ELEMENTS", 1000)
    values = normal(150)
    assert mean_and_error(values, resamples=3001).error == pytest.approx(values.std() / np.sqrt(150), rel=0.05)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mean_and_error([]), r"values has the shape \[0\]; give \[seeds, items\]"),
        (lambda: mean_and_error(np.zeros((2, 2, 2))), r"values has the shape \[2, 2, 2\]"),
        (lambda: mean_and_error([[0, 1], [0, np.nan]]), "values is nan for item 1 of seed 1"),
        (lambda: mean_and_error([0, 1], resamples=1), "resamples is 1"),
        (lambda: paired_difference([0, 1], [0, 1, 2]), "the arms have 2 and 3 items"),
        (lambda: paired_difference([0, 1], [0, np.inf]), "values_b is inf for item 1 of seed 0"),
        (lambda: perplexity_and_error([3.0, 4.0], [1]), r"nll is \[1, 2\] but counts is \[1, 1\]"),
        (lambda: perplexity_and_error(np.ones((3, 2)), np.ones((2, 2))), r"nll is \[3, 2\] but counts is \[2, 2\]"),
        (lambda: perplexity_and_error([3.0, 4.0], [1, 0]), "counts has the value 0"),
        (lambda: paired_perplexity_ratio([1.0], [1], [1.0], [-2]), "counts_b has the value -2"),
    ],
)
def test_scores_that_cannot_be_compared_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
