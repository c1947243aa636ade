"""The clouds of captioned pictures, read once: all with as many points, in one tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from mmpreproj.data.sources.pictures import SkippedPicture
from mmpreproj.data.sources.triplets import TripletSource
from mmpreproj.points.checks import check_cloud, check_whole
from mmpreproj.points.clouds import UnreadableCloudError, normalise

MOST_FEATURE = 2  # colours are in 0..1, normals in -1..1


def read_clouds(
    source: TripletSource,
    indices: Sequence[int],
    *,
    count: int,
    features: int = 0,
    to_unit_ball: bool = True,
    seed: int = 0,
    skipped: list[SkippedPicture] | None = None,
    on_read: Callable[[int], None] = lambda done: None,
) -> tuple[Tensor, Tensor]:
    """Read the clouds that belong to some of a source's pictures.

    The points of each come in a random order, so that the first ones are a sample of the whole.

    Args:
        source: pictures with clouds.
        indices: which pictures.
        count: points K of each cloud.
        features: channels F of a point beside its coordinates.
        to_unit_ball: centre each cloud's bounding box and scale its farthest point to length 1.
        seed: of the points drawn from a mesh or a larger cloud, and of their order, with the picture's index.
        skipped: where clouds that cannot be read or used are listed, whose pictures then have none; without, they
            raise.
        on_read: called with how many are done.

    Returns:
        Clouds float32 `[N, K, 3 + F]`, zeros where there is none, and truth values `[N]`, true where there is one.

    Raises:
        UnreadableCloudError: if `skipped` is None, for a cloud that cannot be read, that `check_cloud` refuses, or
            that has features beyond 2, such as colours in 0..255.
        ValueError: if no picture has a cloud that can be read, or count, features or seed is out of its range.
    """
    count, features = check_whole(count, "count", 1), check_whole(features, "features", 0)
    seed = check_whole(seed, "seed", 0)
    clouds = torch.zeros(len(indices), count, 3 + features)
    there = torch.zeros(len(indices), dtype=torch.bool)
    failed: list[SkippedPicture] = []
    for place, index in enumerate(indices):
        try:
            if source.has_cloud[index]:
                points = _read(source, index, count, features=features, to_unit_ball=to_unit_ball, seed=seed)
                clouds[place] = torch.from_numpy(points)
                there[place] = True
        except UnreadableCloudError as error:
            if skipped is None:
                raise
            failed.append(SkippedPicture(error.name, error.reason))
        on_read(place + 1)
    if skipped is not None:
        skipped += failed
    if not there.any():
        reason = f"; the first: {failed[0].name}: {failed[0].reason}" if failed else ""
        raise ValueError(f"not one of {len(indices)} pictures has a cloud that can be read{reason}")
    return clouds, there


def _read(
    source: TripletSource, index: int, count: int, *, features: int, to_unit_ball: bool, seed: int
) -> np.ndarray:
    """Read one cloud, check it, and put its points in a random order: float32 `[K, 3 + F]`."""
    try:
        points = source.cloud(index, count, features=features, seed=seed)
        check_cloud(points, features=features, name="the cloud")
        if len(points) != count:
            raise ValueError(f"the cloud has {len(points)} points; asked for {count}")
        points = normalise(points)[0] if to_unit_ball else points
    # The call is right, as it was checked: so whatever is wrong is wrong with this one cloud.
    except ValueError as error:
        raise UnreadableCloudError(source.clouds[index] or source.names[index], str(error)) from error
    values = points[:, 3:]
    if features and np.abs(values).max() > MOST_FEATURE:
        raise UnreadableCloudError(
            source.clouds[index] or source.names[index],
            f"its features span {values.min():g} to {values.max():g}; colours are expected in 0..1, normals in -1..1",
        )
    order = np.random.default_rng([seed, index]).permutation(count)
    return np.ascontiguousarray(points[order], dtype=np.float32)
