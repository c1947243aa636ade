"""The pictures that a configuration names: opened, checked and split before a model is loaded."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import cast

from mmpreproj.data.sources.folder import open_folder
from mmpreproj.data.sources.furniture import FurnitureSource
from mmpreproj.data.sources.hub_dataset import HubDatasetSource
from mmpreproj.data.sources.mix import MixedSource
from mmpreproj.data.sources.openmoji import OpenMojiSource
from mmpreproj.data.sources.pictures import PictureSource
from mmpreproj.data.sources.tar_shards import ShardSource
from mmpreproj.data.sources.triplets import TripletFolderSource, TripletSource
from mmpreproj.data.splitting import split_held_out
from mmpreproj.points.reading import MESH_SUFFIXES, import_trimesh
from mmpreproj.training.config import ConfigError, DataConfig, SourceConfig, TrainConfig


def open_source(data: DataConfig) -> PictureSource:
    """Open the pictures that a configuration names; see the sources in `mmpreproj.data` for errors."""
    opened = [_open_one(part, data) for part in data.sources]
    return MixedSource(opened, labels=data.labels) if data.mix else opened[0]


def _open_one(part: SourceConfig, data: DataConfig) -> PictureSource:
    if part.source == "openmoji":
        return OpenMojiSource(render_size=max(64, *data.resolutions))
    if part.source == "dataset" and part.dataset is not None:
        return HubDatasetSource(
            part.dataset,
            subset=part.subset,
            split=part.split,
            data_files=part.data_files or None,
            picture_column=part.picture_column,
            caption_column=part.caption_column,
            on_error=data.on_error,
        )
    if part.source == "shards":
        return ShardSource(list(part.shards), caption=part.shard_caption, on_error=data.on_error)
    if part.folder is None:
        raise ConfigError(f"data.folder: missing; source {part.source!r} needs it")
    if part.source == "furniture":
        return FurnitureSource(part.folder)
    if part.points_column is not None:
        return TripletFolderSource(
            part.folder,
            caption_column=part.caption_column,
            points_column=part.points_column,
            on_error=data.on_error,
        )
    return open_folder(part.folder, caption_column=part.caption_column, on_error=data.on_error)


def check_apart(config: TrainConfig) -> None:
    """Refuse to write what a run leaves right among the pictures that it reads.

    Raises:
        ConfigError: naming both settings, if the folder of the pictures is the run's own.
    """
    output = config.output.expanduser().resolve()
    for number, part in enumerate(config.data.sources):
        prefix = f"data.mix.{number}" if config.data.mix else "data"
        for name, value in (("folder", part.folder), ("dataset", part.dataset)):
            place = None if value is None else Path(value).expanduser()  # a data set may be of the hub
            if place is not None and place.is_dir() and place.resolve() == output:
                raise ConfigError(
                    f"output: {config.output} is {prefix}.{name} too, and a run's pictures would lie among those that "
                    "it trains on; choose another output, which may be a folder inside: what runs have written there "
                    "is left out of the data"
                )


def check_readers(source: PictureSource) -> None:
    """Make sure that what reads clouds is installed, before anything is encoded.

    Raises:
        ImportError: naming the extra to install.
    """
    parts = source.sources if isinstance(source, MixedSource) else [source]
    names = [name for name in cast(TripletSource, source).clouds if name is not None]
    has_meshes = any(Path(name).suffix.lower() in MESH_SUFFIXES for name in names)
    if has_meshes or any(isinstance(part, FurnitureSource) for part in parts):
        import_trimesh()


def split(
    source: PictureSource, places: Sequence[int], config: TrainConfig, *, digests: Sequence[str | None] = ()
) -> tuple[list[int], list[int]]:
    """Split pictures, given by their places in the source and digests of their files; see `split_held_out`.

    Copies of a picture stay together, so that none that is held out is trained on under another name; of a file
    without a digest it is not known whether it is one.

    Returns:
        Which of `places` are trained on and which held out, by their numbers in it.
    """
    data, captions = config.data, [source.captions[place] for place in places]
    together: list[list[Hashable | None]] = [list(captions)] if data.held_out_by == "caption" else []
    if len(set(digests)) < len(digests):
        together.append(list(digests))
    if config.trains_points:  # several pictures may be views of one shape
        clouds = cast(TripletSource, source).clouds
        together.append([clouds[place] for place in places])
    return split_held_out(
        captions,
        data.held_out,
        seed=config.seed if data.held_out_seed is None else data.held_out_seed,
        always_train=data.always_train,
        together=together,
    )
