"""What a run trains on: its source, opened, split, encoded, and its clouds."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import cast

from accelerate import Accelerator
from diffusers.training_utils import free_memory

from mmpreproj.data.clouds import read_clouds
from mmpreproj.data.encoding import EncodedPictures, encode_pictures, split_held_out
from mmpreproj.data.folder import FolderSource
from mmpreproj.data.furniture import FurnitureSource
from mmpreproj.data.openmoji import OpenMojiSource
from mmpreproj.data.pictures import PictureSource, SkippedPicture
from mmpreproj.data.triplets import TripletFolderSource, TripletSource
from mmpreproj.patching.points.settings import PointPathConfig
from mmpreproj.pipelines.sd3 import PreProjSD3Pipeline
from mmpreproj.points.reading import MESH_SUFFIXES, import_trimesh
from mmpreproj.recipes.progress import Reporter
from mmpreproj.training.config import ConfigError, DataConfig, TrainConfig

ENCODERS = ("vae", "text_encoder", "text_encoder_2", "text_encoder_3")


def open_source(data: DataConfig) -> PictureSource:
    """Open the pictures that a configuration names; see the sources in `mmpreproj.data` for errors."""
    if data.source == "openmoji":
        return OpenMojiSource(render_size=max(64, data.resolution))
    if data.folder is None:
        raise ConfigError(f"data.folder: missing; source {data.source!r} needs it")
    if data.source == "furniture":
        return FurnitureSource(data.folder)
    if data.points_column is not None:
        return TripletFolderSource(data.folder, caption_column=data.caption_column, points_column=data.points_column)
    return FolderSource(data.folder, caption_column=data.caption_column)


def split(source: PictureSource, places: Sequence[int], config: TrainConfig) -> tuple[list[int], list[int]]:
    """Split pictures, given by their places in the source; see `split_held_out`."""
    data, captions = config.data, [source.captions[place] for place in places]
    together: list[list[Hashable | None]] = [list(captions)] if data.held_out_by == "caption" else []
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


def check_readers(source: PictureSource) -> None:
    """Make sure that what reads clouds is installed, before anything is encoded.

    Raises:
        ImportError: naming the extra to install.
    """
    names = [name for name in cast(TripletSource, source).clouds if name is not None]
    if isinstance(source, FurnitureSource) or any(Path(name).suffix.lower() in MESH_SUFFIXES for name in names):
        import_trimesh()


def check_clouds(trained: EncodedPictures) -> None:
    """Refuse to train points on pictures without a cloud.

    Raises:
        ConfigError: if none has one.
    """
    if trained.has_cloud is None or not trained.has_cloud.any():
        raise ConfigError(
            "data: none of the pictures that are trained on has a cloud that can be read, so adapter.points would "
            "learn nothing; see what was left out, hold out fewer, or give more rows a cloud"
        )


def encode(
    pipeline: PreProjSD3Pipeline,
    source: PictureSource,
    config: TrainConfig,
    *,
    accelerator: Accelerator,
    reporter: Reporter,
) -> EncodedPictures:
    """Encode a source's pictures and captions, and read its clouds where points are trained."""
    encoders = [module for name in ENCODERS if (module := getattr(pipeline, name)) is not None]
    for module in encoders:
        module.requires_grad_(False).eval().to(accelerator.device)
    pictures = encode_pictures(
        pipeline,
        source,
        resolution=config.data.resolution,
        max_sequence_length=config.max_sequence_length,
        device=accelerator.device,
        seed=config.seed,
        on_progress=lambda stage, done, total: reporter.stage(stage, done, total),
    )
    for module in encoders:
        module.to("cpu")
    free_memory()
    if config.point_path is None:
        return pictures
    return _add_clouds(pictures, source, config, config.point_path, reporter=reporter)


def _add_clouds(
    pictures: EncodedPictures,
    source: PictureSource,
    config: TrainConfig,
    points: PointPathConfig,
    *,
    reporter: Reporter,
) -> EncodedPictures:
    skipped: list[SkippedPicture] = []
    clouds, has_cloud = read_clouds(
        cast(TripletSource, source),
        pictures.places,
        count=config.points.stored,
        features=points.features,
        to_unit_ball=points.normalise == "unit_ball",
        seed=config.seed,
        skipped=skipped,
        on_read=lambda done: reporter.stage("clouds", done, len(pictures)),
    )
    reporter.say(f"{int(has_cloud.sum())} of {len(pictures)} pictures have a cloud")
    return pictures.with_clouds(clouds, has_cloud, skipped=skipped)
