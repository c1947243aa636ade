"""Point clouds: a way for them through patched blocks, and to and from files, pictures and scores."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mmpreproj.patching.points.life import add_point_path
    from mmpreproj.patching.points.settings import PointPathConfig
    from mmpreproj.points.clouds import read_cloud, write_ply
    from mmpreproj.points.drawing import draw_cloud
    from mmpreproj.points.path import batch_clouds, point_velocity
    from mmpreproj.points.reading import UnreadableCloudError

_HOMES = {
    "PointPathConfig": "patching.points.settings",
    "add_point_path": "patching.points.life",
    "read_cloud": "points.clouds",
    "write_ply": "points.clouds",
    "draw_cloud": "points.drawing",
    "batch_clouds": "points.path",
    "point_velocity": "points.path",
    "UnreadableCloudError": "points.reading",
}

__all__ = [
    "PointPathConfig",
    "UnreadableCloudError",
    "add_point_path",
    "batch_clouds",
    "draw_cloud",
    "point_velocity",
    "read_cloud",
    "write_ply",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'mmpreproj.points' has no attribute {name!r}")
    return getattr(import_module(f"mmpreproj.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
