"""Captioned pictures: where they come from and how they become training tensors."""

from mmpreproj.data.folder import FolderSource
from mmpreproj.data.openmoji import OpenMojiSource
from mmpreproj.data.pictures import (
    PictureSource,
    SkippedPicture,
    UnreadablePictureError,
    picture_transform,
    read_pictures,
    to_rgb,
)

__all__ = [
    "FolderSource",
    "OpenMojiSource",
    "PictureSource",
    "SkippedPicture",
    "UnreadablePictureError",
    "picture_transform",
    "read_pictures",
    "to_rgb",
]
