"""Captioned pictures with a point cloud each: the protocol, and the folder layout with one more column.

chairs/
  metadata.jsonl      {"file_name": "views/oak.png", "text": "an oak chair", "points": "shapes/oak.ply"}
  views/oak.png
  shapes/oak.ply
"""

from __future__ import annotations

import os
import reprlib
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Protocol, runtime_checkable

import numpy as np

from mmpreproj.data.sources.faults import OnError, count_of, settle
from mmpreproj.data.sources.folder import FolderSource
from mmpreproj.data.sources.listing import inner_path
from mmpreproj.data.sources.metadata import Row, Table, check_column
from mmpreproj.data.sources.pictures import PictureSource, SkippedPicture
from mmpreproj.points.clouds import CLOUD_SUFFIXES, read_cloud


@runtime_checkable
class TripletSource(PictureSource, Protocol):
    """Captioned pictures, each of which may have a point cloud, read only when asked for.

    Attributes:
        has_cloud: for each picture, whether there is a cloud to read.
        clouds: what each picture's cloud is called; the same for pictures that share one, None where there is none.
    """

    has_cloud: Sequence[bool]
    clouds: Sequence[str | None]

    def cloud(self, index: int, count: int, *, features: int = 0, seed: int = 0) -> np.ndarray:
        """Read one picture's cloud, in the units and the frame of its file: not yet normalised.

        Args:
            index: which picture's.
            count: number of points P.
            features: values a point has besides its place, F.
            seed: what decides which points are taken.

        Returns:
            Places and features, float32 `[P, 3 + F]`.

        Raises:
            UnreadableCloudError: for whatever is wrong with the cloud itself: training lists it and goes on.
            ValueError: for what is wrong with the call: the picture has no cloud, or another argument is out of its
                range.
        """
        ...


class TripletFolderSource(FolderSource, TripletSource):
    """The pictures that a folder's metadata file lists, each with its caption and, where there is one, its cloud.

    The layout is that of `FolderSource` with one more column: the path of the row's point file or mesh, relative to
    the folder, with `/` between subfolders. An empty cell, a null or, in JSON, a missing key means that the row has
    no cloud. Several rows may share a cloud: the views of one shape. Everything but the clouds' contents is checked
    at construction.

    Args:
        folder: the folder that holds the metadata file.
        caption_column: the metadata column with the captions.
        points_column: the metadata column with the clouds' paths.
        on_error: as for `FolderSource`. A picture whose cloud cannot be used stays with "skip", without the cloud.

    Attributes:
        folder: as given, with `~` expanded.
        captions: one caption a picture, in the order of the metadata.
        names: the pictures' paths, relative to the folder.
        unlisted: number of picture files in the folder that no row in use mentions, and that are ignored.
        faults: the rows that were left out, or lost their cloud, by file and line, each with the reason.
        points_column: as given.
        clouds: the clouds' paths, relative to the folder; None where a row has no cloud.
        has_cloud: for each picture, whether there is a cloud to read.

    Raises:
        FileNotFoundError: if the folder, its pictures or its metadata do not exist.
        ValueError: if the metadata is ambiguous, broken, or incomplete, or gives not one cloud.
    """

    def __init__(
        self,
        folder: str | Path,
        caption_column: str = "text",
        points_column: str = "points",
        *,
        on_error: OnError = "raise",
    ) -> None:
        self.points_column = points_column
        self._more_columns = (points_column,)
        super().__init__(folder, caption_column, on_error=on_error)

    def __repr__(self) -> str:
        clouds = count_of(sum(self.has_cloud), "cloud")
        return f"{type(self).__name__}({str(self.folder)!r})  # {len(self)} pictures, {clouds}"

    def cloud(self, index: int, count: int, *, features: int = 0, seed: int = 0) -> np.ndarray:
        """Read one picture's cloud, not yet normalised; see `TripletSource.cloud`.

        A mesh is sampled uniformly by area; of a point file, `count` points are drawn.
        """
        name = self.clouds[index]
        if name is None:
            raise ValueError(
                f"{self.names[index]} has no cloud: its row leaves {self.points_column!r} empty; "
                "ask only where has_cloud is true"
            )
        return read_cloud(self.folder / name, count=count, features=features, seed=seed, name=name)

    def _take_more(self, table: Table, faults: list[SkippedPicture]) -> None:
        check_column(
            table.columns,
            self.points_column,
            where=str(table.path),
            content="paths of the clouds",
            argument="points_column",
        )
        self.clouds: list[str | None] = []
        for row in table.rows:
            try:
                self.clouds.append(_cloud_path(row, self.folder, self.points_column))
            except ValueError as error:
                self.clouds.append(None)
                faults.append(SkippedPicture(row.place, str(error)))
        self.has_cloud = [cloud is not None for cloud in self.clouds]
        if table.rows and not any(self.has_cloud):
            settle(faults, "raise", where=str(self.folder), usable=0)
            raise ValueError(
                f"{table.path} leaves {self.points_column!r} empty in every row; "
                "give the clouds' paths, or use FolderSource for pictures without clouds"
            )


def _cloud_path(row: Row, folder: Path, column: str) -> str | None:
    """Return the path a row gives, normalised, or None where it gives none.

    Raises:
        ValueError: with the reason, if it is no path of a cloud in the folder.
    """
    path = row.fields.get(column)
    if path is None or path == "":
        return None
    if not isinstance(path, str) or not path.strip():
        raise ValueError(
            f"{column!r} is {reprlib.repr(path)}, expected the path of a cloud, or nothing for a picture without one"
        )
    path = inner_path(path)
    if PurePosixPath(path).suffix.lower() not in CLOUD_SUFFIXES:
        raise ValueError(f"{path!r} is no cloud, expected one of {', '.join(CLOUD_SUFFIXES)}")
    if not os.path.isfile(folder / path):
        raise ValueError(f"the cloud {path!r} is not in the folder")
    return path
