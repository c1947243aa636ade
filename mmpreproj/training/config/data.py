"""Where the pictures come from."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from mmpreproj.training.config.section import Section


class DataConfig(Section):
    """Where the captioned pictures come from.

    Attributes:
        source: `folder`, a folder with metadata.jsonl or metadata.csv; `openmoji`, drawings from installed packages;
            `furniture`, named shapes with icons from an unpacked Debian package.
        folder: the folder, for `source: folder` and `source: furniture`.
        caption_column: name of the caption column in the metadata.
        points_column: name of the column with each row's cloud or mesh file; None reads no clouds.
        resolution: side of the square training pictures, in pixels.
        held_out: number of pictures that are never trained on and measure the held-out loss; 0 for none.
        held_out_by: `picture`; or `caption`, which holds out whole captions with all their pictures, until there are
            as many as `held_out`.
        held_out_seed: of the choice of what is held out; None takes the run's own, so that runs with several seeds
            hold out different pictures.
        always_train: captions that must not be held out.
    """

    source: Literal["folder", "openmoji", "furniture"] = "folder"
    folder: Path | None = None
    caption_column: str = "text"
    points_column: str | None = None
    resolution: int = Field(default=512, ge=8)
    held_out: int = Field(default=0, ge=0)
    held_out_by: Literal["picture", "caption"] = "picture"
    held_out_seed: int | None = Field(default=None, ge=0)
    always_train: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _folder_is_named(self) -> DataConfig:
        if self.source == "folder" and self.folder is None:
            raise ValueError("source 'folder' needs folder: the path of a folder with pictures and metadata.jsonl")
        if self.points_column is not None and self.source != "folder":
            raise ValueError(f"points_column is of source 'folder'; source {self.source!r} has no metadata")
        if self.source == "furniture" and self.folder is None:
            raise ValueError(
                "source 'furniture' needs folder: where the Debian package sweethome3d-furniture was unpacked, "
                "furniture/usr/share/sweethome3d/furniture"
            )
        return self

    @property
    def has_clouds(self) -> bool:
        """Whether the source has clouds beside its pictures."""
        return self.source == "furniture" or (self.source == "folder" and self.points_column is not None)
