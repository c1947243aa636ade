"""Distances and set scores of clouds, against slow sums in float64 and against what they must be."""

import numpy as np
import pytest
import torch

from mmpreproj.points import metrics
from mmpreproj.points.metrics import (
    chamfer_distance,
    coverage,
    minimum_matching_distance,
    nearest_neighbour_accuracy,
    pairwise_chamfer,
)


def clouds(number, points, seed=0, shift=0.0):
    return torch.randn(number, points, 3, generator=torch.Generator().manual_seed(seed)) + shift


def slow_chamfer(first, second):
    """One pair, point by point, in float64."""
    first, second = first.double().tolist(), second.double().tolist()

    def one_way(some, others):
        return sum(min(sum((a - b) ** 2 for a, b in zip(p, q, strict=True)) for q in others) for p in some) / len(some)

    return one_way(first, second) + one_way(second, first)


def slow_accuracy(generated, across, reference):
    """Leave one out of the union, look for its nearest, count; without ties."""
    size = len(generated)
    table = np.block([[generated, across], [across.T, reference]]).astype(np.float64)
    right = 0
    for one in range(2 * size):
        others = [other for other in range(2 * size) if other != one]
        nearest = min(others, key=lambda other: table[one, other])
        right += (nearest < size) == (one < size)
    return right / (2 * size)


def accuracy_of(generated, reference):
    return nearest_neighbour_accuracy(
        pairwise_chamfer(generated, generated),
        pairwise_chamfer(generated, reference),
        pairwise_chamfer(reference, reference),
    )


# --- distances ---


@pytest.mark.parametrize("block", [1, 50, 10**6])
def test_chamfer_agrees_with_a_slow_sum_whatever_is_held_at_once(monkeypatch, block):
    monkeypatch.setattr(metrics, "BLOCK", block)
    first, second = clouds(3, 11), clouds(3, 7, seed=1)
    expected = torch.tensor([slow_chamfer(*pair) for pair in zip(first, second, strict=True)])
    torch.testing.assert_close(chamfer_distance(first, second), expected, rtol=1e-5, atol=0)


def test_the_convention_is_mean_squares_summed_over_both_ways():
    first = torch.tensor([[[0.0, 0, 0], [0, 0, 4]]])
    second = torch.tensor([[[0.0, 3, 0]]])
    assert chamfer_distance(first, second).tolist() == [(9 + 25) / 2 + 9]


@pytest.mark.parametrize("block", [1, 100, 10**6])
def test_pairwise_measures_every_pair(monkeypatch, block):
    monkeypatch.setattr(metrics, "BLOCK", block)
    first, second = clouds(3, 6), clouds(4, 9, seed=1)
    expected = torch.tensor([[slow_chamfer(a, b) for b in second] for a in first])
    torch.testing.assert_close(pairwise_chamfer(first, second), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("shift", [0.0, 1000.0])
def test_a_cloud_is_at_no_distance_from_itself_however_far_from_the_origin(shift):
    some = clouds(3, 64, shift=shift)
    assert chamfer_distance(some, some).tolist() == [0, 0, 0]


def test_distances_are_symmetric():
    first, second = clouds(3, 8), clouds(5, 12, seed=1)
    torch.testing.assert_close(pairwise_chamfer(first, second), pairwise_chamfer(second, first).T)


def test_the_order_of_the_points_changes_nothing():
    first, second = clouds(4, 20), clouds(4, 30, seed=1)
    shuffled = first[:, torch.randperm(20, generator=torch.Generator().manual_seed(0))]
    torch.testing.assert_close(chamfer_distance(shuffled, second), chamfer_distance(first, second))


def test_moving_both_changes_nothing_and_scaling_both_scales_by_the_square():
    first, second = clouds(2, 10), clouds(2, 10, seed=1)
    torch.testing.assert_close(chamfer_distance(first + 2, second + 2), chamfer_distance(first, second))
    torch.testing.assert_close(chamfer_distance(3 * first, 3 * second), 9 * chamfer_distance(first, second))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_results_are_float32(dtype):
    some = clouds(2, 5).to(dtype)
    assert chamfer_distance(some, some + 1).dtype == pairwise_chamfer(some, some).dtype == torch.float32


def test_no_more_than_a_block_is_held_at_once(monkeypatch):
    sizes = []
    cdist = torch.cdist

    def watched(first, second, **settings):
        result = cdist(first, second, **settings)
        sizes.append(result.numel())
        return result

    monkeypatch.setattr(metrics, "BLOCK", 100)
    monkeypatch.setattr(torch, "cdist", watched)
    pairwise_chamfer(clouds(2, 30), clouds(3, 20))
    assert max(sizes) <= 100
    assert sum(sizes) == 2 * 3 * 30 * 20


def test_nan_stays_nan():
    some = clouds(2, 5)
    some[1, 3, 0] = torch.nan
    assert chamfer_distance(some, clouds(2, 5, seed=1)).isnan().tolist() == [False, True]


# --- set scores ---


def test_a_set_covers_itself_at_no_distance():
    distances = pairwise_chamfer(clouds(6, 10), clouds(6, 10))
    assert coverage(distances) == 1
    assert minimum_matching_distance(distances) == 0


def test_coverage_counts_references_and_matching_averages_over_them():
    distances = torch.tensor([[1.0, 2, 9, 9], [2.0, 3, 9, 9], [9.0, 5, 4, 9]])
    assert coverage(distances) == 2 / 4  # the first twice, the third once
    assert minimum_matching_distance(distances) == (1 + 2 + 4 + 9) / 4


def test_copies_of_one_cloud_cover_one_reference():
    reference = clouds(5, 10)
    copies = reference[2].expand(7, -1, -1)
    assert coverage(pairwise_chamfer(copies, reference)) == 1 / 5


@pytest.mark.parametrize("seed", range(5))
def test_the_accuracy_agrees_with_leaving_out_one_by_one(seed):
    tables = np.random.default_rng(seed).random((3, 9, 9), dtype=np.float32)
    assert nearest_neighbour_accuracy(*map(torch.from_numpy, tables)) == pytest.approx(slow_accuracy(*tables))


def test_two_samples_of_one_distribution_are_told_apart_by_chance_only():
    assert accuracy_of(clouds(150, 8), clouds(150, 8, seed=1)) == pytest.approx(0.5, abs=0.1)


def test_sets_that_lie_apart_are_told_apart_always():
    assert accuracy_of(clouds(10, 8), clouds(10, 8, seed=1, shift=20)) == 1


def test_a_copied_set_is_mistaken_for_the_other_always():
    assert accuracy_of(clouds(10, 8), clouds(10, 8)) == 0


def test_a_tie_counts_half():
    assert nearest_neighbour_accuracy(torch.ones(3, 3), torch.ones(3, 3), torch.ones(3, 3)) == 0.5


def test_the_sets_may_change_places():
    generated, reference = clouds(20, 8), clouds(20, 8, seed=1, shift=0.3)
    assert accuracy_of(generated, reference) == pytest.approx(accuracy_of(reference, generated))


def test_no_cloud_is_its_own_neighbour():
    within, across = torch.full((4, 4), 2.0).fill_diagonal_(0), torch.ones(4, 4)
    assert nearest_neighbour_accuracy(within, across, within) == 0


# --- refusals ---


@pytest.mark.parametrize("measure", [chamfer_distance, pairwise_chamfer])
@pytest.mark.parametrize("shape", [(5, 3), (2, 5, 4), (2, 3, 5)])
def test_what_is_no_batch_of_clouds_is_refused(measure, shape):
    with pytest.raises(ValueError, match=r"first has shape .*expected clouds \[number, points, 3\]"):
        measure(torch.zeros(shape), clouds(2, 5))
    with pytest.raises(ValueError, match="second has shape"):
        measure(clouds(2, 5), torch.zeros(shape))


@pytest.mark.parametrize("measure", [chamfer_distance, pairwise_chamfer])
@pytest.mark.parametrize("shape", [(2, 0, 3), (0, 5, 3)])
def test_no_clouds_and_clouds_without_points_are_refused(measure, shape):
    with pytest.raises(ValueError, match="at least one cloud of at least one point"):
        measure(torch.zeros(shape), clouds(2, 5))


def test_whole_numbers_are_refused():
    with pytest.raises(TypeError, match=r"second is torch\.int64.*second\.float\(\)"):
        pairwise_chamfer(clouds(1, 5), torch.zeros(1, 5, 3, dtype=torch.int64))


def test_batches_of_different_size_are_refused_with_the_way_to_all_pairs():
    with pytest.raises(ValueError, match=r"first holds 2 clouds and second 3.*pairwise_chamfer"):
        chamfer_distance(clouds(2, 5), clouds(3, 5))


def test_different_devices_are_refused():
    with pytest.raises(ValueError, match="first is on cpu and second on meta"):
        chamfer_distance(clouds(2, 5), torch.zeros(2, 5, 3, device="meta"))


@pytest.mark.parametrize("score", [coverage, minimum_matching_distance])
def test_scores_refuse_what_is_no_matrix_and_what_is_not_finite(score):
    for shape in [(4,), (0, 3), (3, 0)]:
        with pytest.raises(ValueError, match=r"distances has shape .*expected a matrix"):
            score(torch.zeros(shape))
    distances = torch.zeros(4, 3)
    distances[2, 1], distances[3, 0] = torch.nan, torch.inf
    with pytest.raises(ValueError, match="distances is not finite in 2 of 4 rows, the first of them row 2"):
        score(distances)


def test_the_accuracy_names_the_matrix_at_fault():
    good, bad = torch.ones(3, 3), torch.full((3, 3), torch.nan)
    for tables, name in [
        ((bad, good, good), "generated_generated"),
        ((good, bad, good), "generated_reference"),
        ((good, good, bad), "reference_reference"),
    ]:
        with pytest.raises(ValueError, match=f"^{name} is not finite"):
            nearest_neighbour_accuracy(*tables)


@pytest.mark.parametrize("sizes", [(3, 4), (4, 3)])
def test_sets_of_different_size_are_refused_as_chance_would_not_be_a_half(sizes):
    generated, reference = sizes
    with pytest.raises(ValueError, match=r"generated_reference \[.*as many reference clouds as generated"):
        nearest_neighbour_accuracy(
            torch.ones(generated, generated), torch.ones(generated, reference), torch.ones(reference, reference)
        )


def test_single_clouds_are_refused():
    with pytest.raises(ValueError, match="at least two of each"):
        nearest_neighbour_accuracy(torch.zeros(1, 1), torch.zeros(1, 1), torch.zeros(1, 1))
