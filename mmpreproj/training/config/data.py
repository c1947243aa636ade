"""Where the pictures come from, what is done to them, and where what was computed from them is kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field, ValidationInfo, field_validator, model_validator

from mmpreproj.training.config.section import Name, Names, Place, Section

Side = Annotated[int, Field(ge=8)]
Level = Annotated[int, Field(ge=0, le=255)]

MOST_REPEATS = 10_000


def _fits_into_memory(value: float) -> float:
    if value > MOST_REPEATS:
        raise ValueError(
            f"give at most {MOST_REPEATS:,}, since an epoch is laid out in memory; to draw one source far more often "
            "than another, give each a weight"
        )
    return value


Repeats = Annotated[float, Field(gt=0), AfterValidator(_fits_into_memory)]
NEEDS = {  # what each source cannot do without, and what it is
    "folder": ("folder", "the path of a folder with pictures and metadata.jsonl, or with a text file beside each"),
    "furniture": (
        "folder",
        "where the Debian package sweethome3d-furniture was unpacked, furniture/usr/share/sweethome3d/furniture",
    ),
    "dataset": ("dataset", "a hub id, a folder, or a builder such as parquet with data_files"),
    "shards": ("shards", "paths of tar files, or a pattern such as data/*.tar"),
}


class SourceConfig(Section):
    """One source of captioned pictures.

    Attributes:
        source: `folder`, a folder with metadata.jsonl, .csv or .parquet, or with a text file beside each picture;
            `dataset`, a data set of the hub or on disk, through the library `datasets`; `shards`, tar files in the
            webdataset layout; `openmoji`, drawings from installed packages; `furniture`, named shapes with icons from
            an unpacked Debian package.
        folder: the folder, for `source: folder` and `source: furniture`.
        dataset: hub id, folder or builder name, for `source: dataset`.
        subset: the data set's configuration, where it has several.
        split: the data set's split.
        data_files: files that a builder such as `parquet` or `webdataset` reads.
        shards: paths of tar files, or one pattern such as `data/{000..009}.tar` or `data/*.tar`, for `source: shards`.
        picture_column: name of the picture column of a data set.
        caption_column: name of the caption column in the metadata or the data set.
        shard_caption: which member of a shard holds the caption of a picture: `txt`, or `json:caption` for a field of
            its json.
        points_column: name of the column with each row's cloud or mesh file; None reads no clouds.
        repeats: how often each picture is drawn in an epoch, at most 10,000 times; 0.5 for every other epoch.
        weight: this source's share of all draws, relative to the other sources'; given for all sources or for none.
    """

    also_called: ClassVar[Mapping[str, str]] = {
        "type": "source",
        "path": "folder",
        "image_dir": "folder",
        "train_data_dir": "folder",
        "instance_data_dir": "folder",
        "instance_data_root": "folder",
        "dataset_name": "dataset",
        "dataset_config_name": "subset",
        "image_column": "picture_column",
        "num_repeats": "repeats",
        "urls": "shards",
    }

    source: Literal["folder", "dataset", "shards", "openmoji", "furniture"] = "folder"
    folder: Place | None = None
    dataset: str | None = None
    subset: Name | None = None
    split: Name = "train"
    data_files: Names = ()
    shards: Names = ()
    picture_column: Name = "image"
    caption_column: Name = "text"
    shard_caption: Name = "txt"
    points_column: Name | None = None
    repeats: Repeats = 1.0
    weight: float | None = Field(default=None, gt=0)

    @field_validator("data_files", "shards")
    @classmethod
    def _files_have_names(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if any(not name.strip() for name in value):
            raise ValueError("one of them is empty; give a path each, or leave it out")
        return value

    @model_validator(mode="after")
    def _what_the_source_needs_is_named(self) -> SourceConfig:
        need = NEEDS.get(self.source)
        named = None if need is None else getattr(self, need[0])
        if need is not None and not (named.strip() if isinstance(named, str) else named) and not self._is_mixed:
            raise ValueError(f"source {self.source!r} needs {need[0]}: {need[1]}")
        if self.points_column is not None and self.source != "folder":
            raise ValueError(f"points_column is of source 'folder'; source {self.source!r} has no metadata")
        return self

    @property
    def label(self) -> str:
        """What people know the source by: its folder, its data set or its first shard, else its kind."""
        found = {"folder": self.folder, "dataset": self.dataset, "shards": next(iter(self.shards), None)}
        return str(found.get(self.source) or self.source)

    @property
    def has_clouds(self) -> bool:
        """Whether the source has clouds beside its pictures."""
        return self.source == "furniture" or (self.source == "folder" and self.points_column is not None)

    @property
    def _is_mixed(self) -> bool:
        return False


class DataConfig(SourceConfig):
    """Where the captioned pictures come from, and how they become training samples.

    Attributes:
        mix: several sources instead of one; each with settings of its own, and `repeats` or `weight`.
        resolution: side in pixels of a square training picture; other shapes have about as many pixels.
        more_resolutions: further ones; each picture is trained on at each of them that it is large enough for.
        aspect: `buckets`, pictures keep their shape, a batch has one shape; or `square`, the largest centred square.
        max_aspect: longer side by shorter side of the longest bucket.
        flip: share of samples that are mirrored, left to right.
        background: red, green and blue, 0 to 255, seen through transparent pixels.
        max_enlargement: pictures that would have to be enlarged by more than this are left out.
        on_error: what a picture or caption that cannot be used does: `skip`, it is left out and listed at the end; or
            `raise`, it ends the run.
        held_out: number of pictures that are never trained on and measure the held-out loss; 0 for none.
        held_out_by: `picture`; or `caption`, which holds out whole captions with all their pictures, until there are
            as many as `held_out`.
        held_out_seed: of the choice of what is held out; None takes the run's own, so that runs with several seeds
            hold out different pictures.
        always_train: captions that must not be held out.
        cache: folder for what the VAE and the text encoders gave, which later runs use again; None takes `cache/`
            beside the run's folder.
        workers: processes that read samples ahead; 0 reads them in the run's own.
    """

    mix: tuple[SourceConfig, ...] = ()
    resolution: Side = 512
    more_resolutions: tuple[Side, ...] = ()
    aspect: Literal["buckets", "square"] = "buckets"
    max_aspect: float = Field(default=2.0, ge=1)
    flip: float = Field(default=0.0, ge=0, le=1)
    background: tuple[Level, Level, Level] = (255, 255, 255)
    max_enlargement: float = Field(default=2.0, gt=0)
    on_error: Literal["skip", "raise"] = "skip"
    held_out: int = Field(default=0, ge=0)
    held_out_by: Literal["picture", "caption"] = "picture"
    held_out_seed: int | None = Field(default=None, ge=0)
    always_train: tuple[str, ...] = ()
    cache: Place | None = None
    workers: int = Field(default=0, ge=0, le=64)

    @field_validator("more_resolutions")
    @classmethod
    def _resolutions_differ(cls, value: tuple[int, ...], info: ValidationInfo) -> tuple[int, ...]:
        if len({*value, info.data.get("resolution")}) <= len(value):
            raise ValueError("the resolutions must differ from each other and from resolution")
        return value

    @model_validator(mode="after")
    def _mixed_sources_stand_alone(self) -> DataConfig:
        # By value: a file that was written names every field.
        fields = SourceConfig.model_fields.items() if self.mix else ()
        own = sorted(name for name, field in fields if getattr(self, name) != field.default)
        if own:
            raise ValueError(f"mix names the sources, so {', '.join(own)} belongs into one of them")
        weighted = [part.weight is not None for part in self.mix]
        if any(weighted) and not all(weighted):
            raise ValueError("give each source of mix a weight, or none")
        return self

    @property
    def sources(self) -> tuple[SourceConfig, ...]:
        """The sources, one or several."""
        return self.mix or (self,)

    @property
    def labels(self) -> tuple[str, ...]:
        """Labels of the sources, all different: those that are alike are numbered."""
        alike = [part.label for part in self.sources]
        return tuple(
            label if alike.count(label) == 1 else f"{label} ({alike[: place + 1].count(label)})"
            for place, label in enumerate(alike)
        )

    @property
    def resolutions(self) -> tuple[int, ...]:
        """The sides of square training pictures, in pixels, one or several."""
        return (self.resolution, *self.more_resolutions)

    @property
    def has_clouds(self) -> bool:
        """Whether a source has clouds beside its pictures."""
        return any(part.has_clouds for part in self.mix) if self.mix else super().has_clouds

    @property
    def _is_mixed(self) -> bool:
        return bool(self.mix)
