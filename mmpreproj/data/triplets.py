"""Captioned pictures with a point cloud each: the protocol, and the folder layout with one more column.

chairs/
  metadata.jsonl      {"file_name": "views/oak.png", "text": "an oak chair", "points": "shapes/oak.ply"}
  views/oak.png
  shapes/oak.ply
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Protocol

import numpy as np

from mmpreproj.data.folder import FolderSource, Row, count_of, inner_path, shortened
from mmpreproj.data.pictures import PictureSource
from mmpreproj.points.clouds import CLOUD_SUFFIXES, read_cloud


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

    Attributes:
        folder: as given, with `~` expanded.
        captions: one caption a picture, in the order of the metadata.
        names: the pictures' paths, relative to the folder.
        unlisted: number of picture files in the folder that the metadata does not mention, and that are ignored.
        points_column: as given.
        clouds: the clouds' paths, relative to the folder; None where a row has no cloud.
        has_cloud: for each picture, whether there is a cloud to read.

    Raises:
        FileNotFoundError: if the folder, its pictures, its metadata or a listed file do not exist.
        ValueError: if the metadata is ambiguous, broken, or incomplete, or gives not one cloud.
    """

    def __init__(self, folder: str | Path, caption_column: str = "text", points_column: str = "points") -> None:
        self.points_column = points_column
        super().__init__(folder, caption_column)

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

    def _take_more(self, rows: Sequence[Row], metadata: Path) -> None:
        _check_column(rows, metadata, self.points_column)
        self.clouds = [_cloud_path(row, metadata, self.points_column) for row in rows]
        self.has_cloud = [cloud is not None for cloud in self.clouds]
        if not any(self.has_cloud):
            raise ValueError(
                f"{metadata} leaves {self.points_column!r} empty in every row; "
                "give the clouds' paths, or use FolderSource for pictures without clouds"
            )
        _check_files([(row.line, cloud) for row, cloud in zip(rows, self.clouds, strict=True) if cloud], metadata)


def _check_column(rows: Sequence[Row], metadata: Path, column: str) -> None:
    columns = list(dict.fromkeys(name for row in rows for name in row.fields))
    if column in columns:
        return
    near = difflib.get_close_matches(column, columns, n=1)
    way_out = (
        f"the nearest is {near[0]!r}: pass it as points_column" if near else "add it, or name another as points_column"
    )
    raise ValueError(
        f"{metadata} has no column {column!r} with the paths of the clouds, only {', '.join(map(repr, columns))}; "
        f"{way_out}"
    )


def _cloud_path(row: Row, metadata: Path, column: str) -> str | None:
    """Return the path a row gives, normalised, or None where it gives none."""
    path = row.fields.get(column)
    if path is None or path == "":
        return None
    if not isinstance(path, str) or not path.strip():
        raise ValueError(
            f"{metadata}, line {row.line}: {column} is {path!r}; expected the path of a cloud relative to "
            f"{metadata.parent}, or nothing for a picture without one"
        )
    return inner_path(path, column, row, metadata)


def _check_files(clouds: Sequence[tuple[int, str]], metadata: Path) -> None:
    """Check that each cloud, with the line that lists it, is of a known kind and there."""
    foreign = [_place(*cloud) for cloud in clouds if PurePosixPath(cloud[1]).suffix.lower() not in CLOUD_SUFFIXES]
    if foreign:
        raise ValueError(
            f"{metadata} lists {count_of(len(foreign), 'cloud')} of no known kind: "
            f"{shortened(foreign, len(foreign))}; expected {', '.join(CLOUD_SUFFIXES)}"
        )
    missing = [_place(*cloud) for cloud in clouds if not (metadata.parent / cloud[1]).is_file()]
    if missing:
        raise FileNotFoundError(
            f"{metadata} lists {count_of(len(missing), 'cloud')} that {metadata.parent} does not hold: "
            f"{shortened(missing, len(missing))}; add the files or empty their cells"
        )


def _place(line: int, name: str) -> str:
    return f"line {line} ({name!r})"
