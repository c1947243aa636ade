"""The clouds of captioned pictures, read once: all with as many points, in one tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from mmpreproj.data.pictures import SkippedPicture
from mmpreproj.data.triplets import TripletSource
from mmpreproj.points.clouds import UnreadableCloudError, normalise


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

    Args:
        source: pictures with clouds.
        indices: which pictures.
        count: points K of each cloud.
        features: channels F of a point beside its coordinates.
        to_unit_ball: centre each cloud's bounding box and scale its farthest point to length 1.
        seed: of the points drawn from a mesh or a larger cloud.
        skipped: where clouds that cannot be read are listed, whose pictures then have none; without, they raise.
        on_read: called with how many are done.

    Returns:
        Clouds float32 `[N, K, 3 + F]`, zeros where there is none, and truth values `[N]`, true where there is one.

    Raises:
        UnreadableCloudError: for a cloud that cannot be read, if `skipped` is None.
        ValueError: if no picture has a cloud that can be read.
    """
    clouds = torch.zeros(len(indices), count, 3 + features)
    there = torch.zeros(len(indices), dtype=torch.bool)
    failed: list[SkippedPicture] = []
    for place, index in enumerate(indices):
        try:
            if source.has_cloud[index]:
                points = source.cloud(index, count, features=features, seed=seed)
                points = normalise(points)[0] if to_unit_ball else points
                clouds[place] = torch.from_numpy(np.ascontiguousarray(points))
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
