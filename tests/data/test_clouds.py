"""The clouds of pictures in one tensor: read once, left out with a reason, refused where there are none."""

import numpy as np
import pytest
import torch

from mmpreproj.data.clouds import read_clouds
from mmpreproj.data.encoding import split_held_out
from mmpreproj.points.clouds import UnreadableCloudError


class Boxes:
    """A source whose clouds are boxes of growing size; some rows have none, and some cannot be read."""

    def __init__(self, count=6, *, without=(1,), broken=(3,)):
        self.has_cloud = [place not in without for place in range(count)]
        self.broken = broken

    def cloud(self, index, count, *, features=0, seed=0):
        if index in self.broken:
            raise UnreadableCloudError(f"{index}.ply", "it is torn")
        corners = np.random.default_rng(seed).uniform(-1, 1, (count, 3)) * (index + 1) + 10 * index
        return np.concatenate([corners, np.full((count, features), index)], axis=1).astype(np.float32)


def test_clouds_come_in_the_order_asked_for_and_in_the_unit_ball():
    clouds, there = read_clouds(Boxes(broken=()), [4, 1, 0], count=50, features=2)
    assert (clouds.shape, clouds.dtype) == ((3, 50, 5), torch.float32)
    assert there.tolist() == [True, False, True]
    assert not clouds[1].any()
    for place, index in ((0, 4), (2, 0)):
        xyz = clouds[place, :, :3]
        assert float(xyz.norm(dim=1).max()) == pytest.approx(1, abs=1e-5)
        torch.testing.assert_close(xyz.amax(dim=0), -xyz.amin(dim=0), rtol=1e-4, atol=1e-5)
        assert clouds[place, :, 3:].unique().tolist() == [index]


def test_clouds_may_be_left_as_they_are():
    clouds, _ = read_clouds(Boxes(broken=()), [4], count=50, to_unit_ball=False)
    assert 30 < float(clouds.mean()) < 50


def test_one_that_cannot_be_read_is_left_out_with_its_reason():
    skipped, seen = [], []
    _, there = read_clouds(Boxes(), range(6), count=5, skipped=skipped, on_read=seen.append)
    assert there.tolist() == [True, False, True, False, True, True]
    assert [(entry.name, entry.reason) for entry in skipped] == [("3.ply", "it is torn")]
    assert seen[-1] == 6
    with pytest.raises(UnreadableCloudError, match="torn"):
        read_clouds(Boxes(), range(6), count=5)


def test_none_at_all_is_refused():
    with pytest.raises(ValueError, match=r"not one of 2 pictures has a cloud that can be read; the first: 3\.ply"):
        read_clouds(Boxes(), [1, 3], count=5, skipped=[])


# --- holding out whole captions --------------------------------------------------------------------------------------


def test_captions_are_held_out_whole():
    captions = [f"c{place % 7}" for place in range(30)]
    for count in (1, 5, 12):
        train, held_out = split_held_out(captions, count, seed=count, by="caption")
        assert sorted(train + held_out) == list(range(30))
        assert not {captions[place] for place in train} & {captions[place] for place in held_out}
        assert count <= len(held_out) < count + 5


def test_named_captions_stay_when_captions_are_held_out():
    captions = ["a", "b", "c"] * 4
    for seed in range(5):
        _, held_out = split_held_out(captions, 5, seed=seed, always_train=["b"], by="caption")
        assert {captions[place] for place in held_out} == {"a", "c"}


def test_holding_out_every_caption_is_refused():
    with pytest.raises(ValueError, match="by caption, which takes all 4"):
        split_held_out(["a", "a", "a", "a"], 3, by="caption")
