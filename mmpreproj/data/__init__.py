"""Captioned pictures: where they come from and how they become training tensors."""

from mmpreproj.data.folder import FolderSource, open_folder
from mmpreproj.data.hub_dataset import HubDatasetSource
from mmpreproj.data.mix import MixedSource
from mmpreproj.data.openmoji import OpenMojiSource
from mmpreproj.data.pictures import (
    PictureSource,
    SkippedPicture,
    UnreadablePictureError,
    decode,
    picture_size,
    to_rgb,
)
from mmpreproj.data.sidecars import SidecarSource
from mmpreproj.data.tar_shards import ShardSource

__all__ = [
    "FolderSource",
    "HubDatasetSource",
    "MixedSource",
    "OpenMojiSource",
    "PictureSource",
    "ShardSource",
    "SidecarSource",
    "SkippedPicture",
    "UnreadablePictureError",
    "decode",
    "open_folder",
    "picture_size",
    "to_rgb",
]
