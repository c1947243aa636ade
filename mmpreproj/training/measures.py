"""What a run measures on pictures, and clouds, that it never trains on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from mmpreproj.data.encoding import EncodedPictures
from mmpreproj.training.calls.objective import CallHeldOutLoss
from mmpreproj.training.calls.pictures import CalledPictures
from mmpreproj.training.config import TrainConfig
from mmpreproj.training.held_out import HeldOutLoss
from mmpreproj.training.triplets import CloudHeldOutLoss, PointHeldOutLoss, with_clouds_alone

HeldOut = Callable[[nn.Module], float]


def make_measures(
    held_out: EncodedPictures | CalledPictures | None, config: TrainConfig, *, timesteps: int
) -> dict[str, HeldOut]:
    """Build what is measured on pictures that are never trained on, by name; nothing where there are none."""
    if held_out is None or not len(held_out):
        return {}
    if isinstance(held_out, CalledPictures):
        return {"pictures": CallHeldOutLoss(held_out, levels=config.held_out_levels, seed=config.seed)}
    settings: dict[str, Any] = {"levels": config.held_out_levels, "seed": config.seed, "timesteps": timesteps}
    measures: dict[str, HeldOut] = {"pictures": HeldOutLoss(held_out, **settings)}
    points = config.point_path
    if points is None or held_out.has_cloud is None or not held_out.has_cloud.any():
        return measures
    if points.condition:
        measures["pictures with clouds"] = CloudHeldOutLoss(held_out, **settings)
    if points.condition and not held_out.has_cloud.all():
        measures["these without"] = HeldOutLoss(with_clouds_alone(held_out), **settings)
    if points.generate:
        measures["points"] = PointHeldOutLoss(held_out, per_cloud=config.points.per_step, **settings)
    return measures
