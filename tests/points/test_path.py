"""Clouds from outside as one batch: nested lists, masked arrays, and what float32 would blur."""

import numpy as np
import pytest
import torch

from mmpreproj.points.path import batch_clouds


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_nested_list_of_numbers_is_one_cloud(kind):
    rows = kind(kind(row) for row in np.eye(3).tolist())
    points, mask = batch_clouds(rows)
    assert torch.equal(points, torch.eye(3)[None]) and mask.all()


def test_a_list_of_nested_lists_is_as_many_clouds():
    points, mask = batch_clouds([np.eye(3).tolist(), np.eye(4, 3, dtype=int).tolist()])
    assert points.shape == (2, 4, 3)
    assert mask.tolist() == [[True] * 3 + [False], [True] * 4]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([[0, 0, 0], [1, 0]], r"point cloud 0 is no table of numbers: "),
        ([np.eye(3), [[0, 0, 0], [1, 0]]], r"point cloud 1 is no table of numbers: "),
        ([[0, 0], [1, 0]], r"point cloud 0 is of shape \[2, 2\]; expected \[P, 3\]"),
        (np.ma.masked_equal(np.eye(3), 1), r"point cloud 0 has 3 masked values; expected none"),
        ([np.eye(3), np.ma.masked_equal(np.eye(3), 1)], r"point cloud 1 has 3 masked values"),
        (np.ma.masked_equal(np.eye(3)[None], 1), r"point cloud 0 has 3 masked values"),
        (
            [np.random.default_rng(0).random((9, 3)) + np.array([5e5, 4.5e6, 0])],
            r"point cloud 0 is .* long .* subtract its centre",
        ),
    ],
)
def test_what_is_no_cloud_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        batch_clouds(given)


def test_an_array_that_could_be_masked_but_is_not_is_a_cloud():
    assert torch.equal(batch_clouds(np.ma.masked_equal(np.eye(3), 7))[0], torch.eye(3)[None])
