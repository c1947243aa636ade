"""A folder of pictures with captions in a metadata file: the Hugging Face `imagefolder` layout.

flowers/
  metadata.jsonl      {"file_name": "red/rose.png", "text": "a red rose"}
  red/rose.png
"""

from __future__ import annotations

import json
import os
import reprlib
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from mmpreproj.data.sources.captions import caption_fault
from mmpreproj.data.sources.faults import OnError, check_on_error, count_of, settle
from mmpreproj.data.sources.listing import PICTURE_SUFFIXES, check_folder, find_files, picture_path
from mmpreproj.data.sources.metadata import (
    FILE_COLUMN,
    METADATA_NAMES,
    Row,
    Table,
    check_column,
    find_metadata,
    read_table,
)
from mmpreproj.data.sources.pictures import PictureSource, SkippedPicture, read_file
from mmpreproj.data.sources.sidecars import SidecarSource, find_extension


class FolderSource(PictureSource):
    """The pictures that a folder's metadata file lists, each with its caption.

    The metadata is metadata.jsonl, metadata.csv or metadata.parquet. It is read and checked whole at construction; a
    picture is opened only when asked for, and nothing is written. Paths in `file_name` (or `image`, where there is no
    such column) are relative to the folder, with `/` between subfolders.

    Args:
        folder: the folder that holds the metadata file.
        caption_column: the metadata column with the captions.
        on_error: "raise" to name all rows that cannot be used in one error, "skip" to leave them out and list them in
            `faults`: no picture of that name in the folder, one listed before, no text as its caption, a broken line.

    Attributes:
        folder: as given, with `~` expanded.
        captions: one caption a picture, in the order of the metadata.
        names: the pictures' paths, relative to the folder.
        unlisted: number of picture files in the folder that no row in use mentions, and that are ignored.
        faults: the rows that were left out, by file and line, each with the reason.
        runs: folders in it that training runs have written; their pictures count as listed or not at all.

    Raises:
        FileNotFoundError: if the folder, its pictures or its metadata do not exist.
        ImportError: if the metadata is Parquet and `pyarrow` is not installed.
        ValueError: if the metadata is ambiguous, broken, or incomplete.
    """

    _more_columns: Sequence[str] = ()  # that a subclass reads

    def __init__(self, folder: str | Path, caption_column: str = "text", *, on_error: OnError = "raise") -> None:
        check_on_error(on_error)
        self.folder = Path(folder).expanduser()
        check_folder(self.folder)
        runs: list[str] = []
        pictures = find_files(self.folder, PICTURE_SUFFIXES, runs=runs)
        self.runs = tuple(os.path.join(self.folder, run) for run in sorted(runs))
        metadata = find_metadata(self.folder) or _no_metadata(self.folder, pictures)
        faults: list[SkippedPicture] = []
        table = read_table(metadata, [caption_column, *self._more_columns], faults=faults)
        _check_columns(table, caption_column)
        usable = _usable_rows(table, caption_column, faults)
        self.names = list(usable)
        self.captions = [row.fields[caption_column] for row in usable.values()]
        self.unlisted = len(pictures - set(self.names))
        self._take_more(Table(metadata, table.columns, list(usable.values())), faults)
        self.faults = settle(faults, on_error, where=str(self.folder), usable=len(self.names))

    def __len__(self) -> int:
        return len(self.names)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.folder)!r})  # {len(self)} pictures, {self.unlisted} unlisted"

    def read(self, index: int) -> bytes:
        """Return one picture's file; see `PictureSource.read`."""
        return read_file(os.path.join(self.folder, self.names[index]), self.names[index])

    def _take_more(self, table: Table, faults: list[SkippedPicture]) -> None:
        """Take further columns of the usable rows; for subclasses, called once names and captions are there."""


def open_folder(folder: str | Path, *, caption_column: str = "text", on_error: OnError = "raise") -> PictureSource:
    """Open a folder of captioned pictures, whichever way it keeps its captions.

    With a metadata file that is a `FolderSource`; without one, but with text files beside pictures, a `SidecarSource`.

    Args:
        folder: the folder.
        caption_column: the metadata column with the captions.
        on_error: what to do about pictures that cannot be used; see the sources.

    Raises:
        FileNotFoundError: if the folder does not exist, or holds no pictures or no captions.
        ValueError: if the captions are ambiguous or broken.
    """
    root = Path(folder).expanduser()
    check_folder(root)
    if find_metadata(root) is None:
        extension = find_extension(root)
        if extension is not None:
            return SidecarSource(root, extension=extension, on_error=on_error)
    return FolderSource(root, caption_column, on_error=on_error)


def _no_metadata(folder: Path, pictures: set[str]) -> Path:
    """Refuse a folder without metadata, with what there is instead."""
    names = f"{', '.join(METADATA_NAMES[:-1])} or {METADATA_NAMES[-1]}"
    if not pictures:
        raise FileNotFoundError(f"no pictures in {folder}, and no {names}; check the path")
    nested = sorted(path for name in METADATA_NAMES for path in folder.glob(f"*/{name}"))
    if nested:
        raise FileNotFoundError(f"{folder} holds no {names} itself, but {nested[0].parent} does; pass that folder")
    first = min(pictures)
    beside = PurePosixPath(first).with_suffix(".txt")
    example = json.dumps({FILE_COLUMN: first, "text": "what the picture shows"}, ensure_ascii=False)
    raise FileNotFoundError(
        f"{folder} holds {count_of(len(pictures), 'picture')} but no {names} with captions; "
        f"write a metadata.jsonl with one line a picture, such as {example}, "
        f"or put each caption into a text file beside its picture, such as {beside}"
    )


def _check_columns(table: Table, caption_column: str) -> None:
    if FILE_COLUMN not in table.columns:
        raise ValueError(
            f"{table.path} has no column {FILE_COLUMN!r}, only {', '.join(map(repr, table.columns))}; "
            "it must give each picture's path relative to the folder"
        )
    check_column(table.columns, caption_column, where=str(table.path), content="captions", argument="caption_column")


def _usable_rows(table: Table, caption_column: str, faults: list[SkippedPicture]) -> dict[str, Row]:
    """Return the rows that give a picture of the folder and a caption, by the picture's path."""
    usable: dict[str, Row] = {}
    for row in table.rows:
        try:
            usable[_picture_of(row, caption_column, table.path.parent, usable)] = row
        except ValueError as error:
            faults.append(SkippedPicture(row.place, str(error)))
    return usable


def _picture_of(row: Row, caption_column: str, folder: Path, before: dict[str, Row]) -> str:
    """Return the picture's path, normalised.

    Raises:
        ValueError: with the reason, if the row cannot be used.
    """
    name = row.fields.get(FILE_COLUMN)
    if not isinstance(name, str) or not name.strip():
        got = f"it is {reprlib.repr(name)}" if FILE_COLUMN in row.fields else "it is not there"
        raise ValueError(f"the row has no {FILE_COLUMN!r}: {got}")
    name = picture_path(name)
    # Not Path.is_file, which raises for a name too long for the file system.
    if not os.path.isfile(os.path.join(folder, name)):
        raise ValueError(f"{name!r} is not in the folder")
    if name in before:
        raise ValueError(f"{name!r} is already listed in {before[name].place}")
    fault = caption_fault(row.fields.get(caption_column))
    if fault is not None:
        raise ValueError(fault if caption_column in row.fields else f"the row has no {caption_column!r}")
    return name
