"""A picture of what a file holds, a cloud or a mesh; without torch, so that it is drawn at once."""

from __future__ import annotations

from pathlib import Path

from mmpreproj.points.clouds import read_cloud
from mmpreproj.points.drawing import Up, draw_cloud


def view_cloud(cloud: Path, picture: Path, *, up: Up = "y", count: int | None = None) -> None:
    """Draw what a file holds, a cloud or a mesh, from several sides.

    Args:
        cloud: any file that `read_cloud` reads.
        picture: a PNG file.
        up: the axis that points up.
        count: number of points; None for all of a cloud, and 4096 of a mesh.

    Raises:
        UnreadableCloudError: if it cannot be read.
    """
    draw_cloud(read_cloud(cloud, count=count), picture, up=up, title=cloud.name)
