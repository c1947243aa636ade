"""Captioned pictures: where they come from and how they become training tensors."""

from mmpreproj.data.sources.folder import FolderSource, open_folder
from mmpreproj.data.sources.hub_dataset import HubDatasetSource
from mmpreproj.data.sources.mix import MixedSource
from mmpreproj.data.sources.openmoji import OpenMojiSource
from mmpreproj.data.sources.pictures import (
    PictureSource,
    SkippedPicture,
    UnreadablePictureError,
    decode,
    picture_size,
    to_rgb,
)
from mmpreproj.data.sources.sidecars import SidecarSource
from mmpreproj.data.sources.tar_shards import ShardSource

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
