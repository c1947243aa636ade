"""No more points are shown to a picture than the model was trained to be shown, whatever a user gives."""

import pytest
import torch

from mmpreproj.pipelines.clouds import thin_clouds


@pytest.fixture
def clouds():
    """Three clouds of 20, 7 and 0 points; a point's channels all hold its own number."""
    numbers = torch.arange(60.0).view(3, 20, 1).expand(-1, -1, 4)
    return numbers, torch.arange(20) < torch.tensor([20, 7, 0])[:, None]


def numbers_of(cloud, mask):
    return cloud[mask][:, 0].tolist()


@pytest.mark.parametrize("most", [5, 7, 12])
def test_so_many_points_are_kept_and_none_is_padding_or_doubled(clouds, most):
    thin, mask = thin_clouds(*clouds, most=most)
    assert thin.shape == (3, most, 4)
    for place, there in enumerate((20, 7, 0)):
        kept = numbers_of(thin[place], mask[place])
        assert len(kept) == len(set(kept)) == min(most, there)
        assert set(kept) <= set(numbers_of(clouds[0][place], clouds[1][place]))


def test_a_slice_is_not_taken_for_the_whole(clouds):
    thin, mask = thin_clouds(*clouds, most=10)
    kept = numbers_of(thin[0], mask[0])
    assert max(kept) >= 10 and min(kept) < 10


def test_the_same_points_every_time_and_no_random_state_is_touched(clouds):
    state = torch.get_rng_state()
    assert all(
        torch.equal(*pair) for pair in zip(thin_clouds(*clouds, most=5), thin_clouds(*clouds, most=5), strict=True)
    )
    assert torch.equal(torch.get_rng_state(), state)


def test_small_clouds_are_left_as_they_are(clouds):
    thin, mask = thin_clouds(*clouds, most=20)
    assert thin is clouds[0] and mask is clouds[1]
