"""The error for point clouds that cannot be read."""

from __future__ import annotations

from mmpreproj.files import UnreadableFileError

__all__ = ["UnreadableCloudError"]


class UnreadableCloudError(UnreadableFileError):
    """A point cloud that cannot be read."""

    kind = "point cloud"
