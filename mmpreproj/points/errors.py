"""The error for point clouds that cannot be read."""

from __future__ import annotations

__all__ = ["UnreadableCloudError"]


class UnreadableCloudError(Exception):
    """A point cloud that cannot be read.

    Attributes:
        name: what the source calls the cloud.
        reason: why it could not be read, in words.
    """

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)
        self.name = name
        self.reason = reason

    def __str__(self) -> str:
        return f"cannot read the point cloud {self.name!r}: {self.reason}"
