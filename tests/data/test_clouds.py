"""The clouds of pictures in one tensor: read once, left out with a reason, refused where there are none."""

import re

import numpy as np
import pytest
import torch

from mmpreproj.data.clouds import read_clouds
from mmpreproj.points.clouds import UnreadableCloudError


class Boxes:
    """A source whose clouds are boxes of growing size; some rows have none, and some cannot be read."""

    def __init__(self, count=6, *, without=(1,), broken=(3,)):
        self.has_cloud = [place not in without for place in range(count)]
        self.names = [f"{place}.png" for place in range(count)]
        self.clouds = [f"{place}.ply" if there else None for place, there in enumerate(self.has_cloud)]
        self.broken = broken

    def cloud(self, index, count, *, features=0, seed=0):
        if index in self.broken:
            raise UnreadableCloudError(f"{index}.ply", "it is torn")
        corners = np.random.default_rng(seed).uniform(-1, 1, (count, 3)) * (index + 1) + 10 * index
        return np.concatenate([corners, np.full((count, features), index / 4)], axis=1).astype(np.float32)


def test_clouds_come_in_the_order_asked_for_and_in_the_unit_ball():
    clouds, there = read_clouds(Boxes(broken=()), [4, 1, 0], count=50, features=2)
    assert (clouds.shape, clouds.dtype) == ((3, 50, 5), torch.float32)
    assert there.tolist() == [True, False, True]
    assert not clouds[1].any()
    for place, index in ((0, 4), (2, 0)):
        xyz = clouds[place, :, :3]
        assert float(xyz.norm(dim=1).max()) == pytest.approx(1, abs=1e-5)
        torch.testing.assert_close(xyz.amax(dim=0), -xyz.amin(dim=0), rtol=1e-4, atol=1e-5)
        assert clouds[place, :, 3:].unique().tolist() == [index / 4]


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


class Given(Boxes):
    """A source whose first cloud is given, and whose second is sound."""

    def __init__(self, points):
        super().__init__(2, without=(), broken=())
        self.points = points

    def cloud(self, index, count, *, features=0, seed=0):
        if index == 0 and isinstance(self.points, Exception):
            raise self.points
        return self.points if index == 0 else super().cloud(index, count, features=features, seed=seed)


def test_the_first_points_are_a_sample_of_the_whole():
    sorted_by_x = np.linspace([0, 0, 0], [1, 1, 1], 1000, dtype=np.float32)
    clouds, _ = read_clouds(Given(sorted_by_x), [0], count=1000)
    assert np.ptp(clouds[0, :50, 0].numpy()) > 0.8
    assert sorted(clouds[0, :, 0].tolist()) == clouds[0, :, 0].sort().values.tolist()
    assert len(set(clouds[0, :, 0].tolist())) == 1000


def test_the_order_depends_on_seed_and_index_alone():
    source = Boxes(without=(), broken=())
    together, _ = read_clouds(source, [2, 5, 3], count=40)
    alone, _ = read_clouds(source, [3], count=40)
    assert torch.equal(together[2], alone[0])
    line = Given(np.linspace([0, 0, 0], [1, 1, 1], 40, dtype=np.float32))
    assert not torch.equal(read_clouds(line, [0], count=40)[0], read_clouds(line, [0], count=40, seed=1)[0])


@pytest.mark.parametrize(
    ("points", "features", "reason"),
    [
        (np.ones((9, 3), np.float32), 0, r"the cloud is degenerate: all of its points \(9\) lie in one place"),
        (np.full((9, 3), np.nan, np.float32), 0, "the cloud has NaN or infinite values"),
        (np.eye(3, dtype=np.float32), 0, "the cloud has 3 points; asked for 9"),
        (np.zeros((9, 4), np.float32), 0, r"the cloud is of shape \[9, 4\]; expected \[P, 3\]"),
        (ValueError("no such shape"), 0, "no such shape"),
        (
            255 * np.random.default_rng(0).random((9, 6)).astype(np.float32),
            3,
            r"its features span \S+ to 2\d\d\.\S+; colours are expected in 0\.\.1, normals in -1\.\.1",
        ),
    ],
)
def test_one_that_cannot_be_used_is_left_out_under_its_name(points, features, reason):
    skipped = []
    _, there = read_clouds(Given(points), [0, 1], count=9, features=features, skipped=skipped)
    assert there.tolist() == [False, True]
    assert [entry.name for entry in skipped] == ["0.ply"]
    assert re.match(reason, skipped[0].reason)
    with pytest.raises(UnreadableCloudError, match=reason):
        read_clouds(Given(points), [0, 1], count=9, features=features)


@pytest.mark.parametrize("options", [{"count": 0}, {"count": 5, "features": -1}, {"count": 5, "seed": 0.5}])
def test_options_out_of_range_are_refused_before_anything_is_read(options):
    with pytest.raises(ValueError, match="expected a whole number of at least"):
        read_clouds(Boxes(), [0], skipped=[], **options)


def test_none_at_all_is_refused():
    with pytest.raises(ValueError, match=r"not one of 2 pictures has a cloud that can be read; the first: 3\.ply"):
        read_clouds(Boxes(), [1, 3], count=5, skipped=[])
