"""A folder of pictures with captions in metadata.jsonl or metadata.csv: the Hugging Face `imagefolder` layout.

flowers/
  metadata.jsonl      {"file_name": "red/rose.png", "text": "a red rose"}
  red/rose.png
"""

# The metadata is parsed here and not by `datasets`: its imagefolder builder accepts rows without a file, lists missing
# files as rows, turns the CSV captions "None" and "007" into null and 7, and reports no line numbers.
from __future__ import annotations

import csv
import difflib
import io
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from PIL import Image

from mmpreproj.data.pictures import PictureSource, open_picture

METADATA_NAMES = ("metadata.jsonl", "metadata.csv")
PICTURE_SUFFIXES = frozenset({".avif", ".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"})
FILE_COLUMN = "file_name"
_OTHER_NAMES = {"image": FILE_COLUMN}  # as others call it; read where there is no file_name
LISTED_AT_MOST = 10


class FolderSource(PictureSource):
    """The pictures that a folder's metadata file lists, each with its caption.

    The metadata is read and checked whole at construction; a picture is opened only when asked for, and nothing is
    written. Paths in `file_name` (or `image`, where there is no such column) are relative to the folder, with `/`
    between subfolders.

    Args:
        folder: the folder that holds the metadata file.
        caption_column: the metadata column with the captions.

    Attributes:
        folder: as given, with `~` expanded.
        captions: one caption a picture, in the order of the metadata.
        names: the pictures' paths, relative to the folder.
        unlisted: number of picture files in the folder that the metadata does not mention, and that are ignored.

    Raises:
        FileNotFoundError: if the folder, its pictures, its metadata or a listed file do not exist.
        ValueError: if the metadata is ambiguous, broken, or incomplete.
    """

    def __init__(self, folder: str | Path, caption_column: str = "text") -> None:
        self.folder = Path(folder).expanduser()
        pictures = _find_pictures(self.folder)
        metadata = _find_metadata(self.folder, pictures)
        rows = _read_rows(metadata)
        _check_columns(rows, metadata, caption_column)
        self.names = _file_names(rows, metadata)
        self.captions = _captions(rows, metadata, caption_column)
        self.unlisted = len(pictures - set(self.names))
        self._take_more(rows, metadata)

    def __len__(self) -> int:
        return len(self.names)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.folder)!r})  # {len(self)} pictures, {self.unlisted} unlisted"

    def open(self, index: int) -> Image.Image:
        """Decode one picture to RGB; see `PictureSource.open`."""
        return open_picture(str(self.folder / self.names[index]), self.names[index])

    def _take_more(self, rows: Sequence[Row], metadata: Path) -> None:
        """Take further columns of the rows; for subclasses, called once names and captions are there."""


@dataclass(frozen=True)
class Row:
    """One row of a metadata file, as it was read."""

    line: int  # where the row starts in the metadata file, from 1
    fields: Mapping[str, Any]


def _find_pictures(folder: Path) -> set[str]:
    """Return the relative paths of all picture files in the folder and below, hidden ones left out."""
    if not folder.exists():
        raise FileNotFoundError(f"the picture folder {folder} does not exist; check the path")
    if not folder.is_dir():
        raise ValueError(f"{folder} is a file; expected the folder that holds the pictures and their metadata")
    pictures = set()
    for parent, subfolders, files in os.walk(folder):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        for file in files:
            if Path(file).suffix.lower() in PICTURE_SUFFIXES and not file.startswith("."):
                pictures.add((Path(parent) / file).relative_to(folder).as_posix())
    return pictures


def _find_metadata(folder: Path, pictures: set[str]) -> Path:
    found = [folder / name for name in METADATA_NAMES if (folder / name).is_file()]
    if len(found) > 1:
        raise ValueError(f"{folder} holds both {' and '.join(METADATA_NAMES)}; keep one, so that captions are certain")
    if found:
        return found[0]
    if not pictures:
        raise FileNotFoundError(f"no pictures in {folder}, and no metadata.jsonl or metadata.csv; check the path")
    nested = sorted(path for name in METADATA_NAMES for path in folder.glob(f"*/{name}"))
    if nested:
        raise FileNotFoundError(
            f"{folder} holds no metadata.jsonl or metadata.csv itself, but {nested[0].parent} does; pass that folder"
        )
    example = json.dumps({FILE_COLUMN: min(pictures), "text": "what the picture shows"}, ensure_ascii=False)
    raise FileNotFoundError(
        f"{folder} holds {count_of(len(pictures), 'picture')} but no metadata.jsonl or metadata.csv with captions; "
        f"write a metadata.jsonl with one line a picture, such as {example}"
    )


def _read_rows(metadata: Path) -> list[Row]:
    try:
        text = metadata.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{metadata} is not UTF-8 text ({error.reason} at byte {error.start}); save it as UTF-8"
        ) from error
    rows = list(_jsonl_rows(text, metadata) if metadata.suffix == ".jsonl" else _csv_rows(text, metadata))
    if not rows:
        raise ValueError(f"{metadata} is empty; expected one row a picture, with {FILE_COLUMN!r} and a caption")
    if not any(FILE_COLUMN in row.fields for row in rows):
        return [
            Row(row.line, {_OTHER_NAMES.get(name, name): value for name, value in row.fields.items()}) for row in rows
        ]
    return rows


def _jsonl_rows(text: str, metadata: Path) -> Iterator[Row]:
    # Only "\n" ends a line: str.splitlines also breaks at U+2028, which JSON allows within a caption.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{metadata}, line {number}: broken JSON, {error.msg} at column {error.colno}; "
                "expected one object a line"
            ) from error
        if not isinstance(fields, dict):
            raise ValueError(f"{metadata}, line {number}: got a {type(fields).__name__}; expected one object a line")
        yield Row(number, fields)


def _csv_rows(text: str, metadata: Path) -> Iterator[Row]:
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    try:
        for fields in reader:
            newlines = sum(value.count("\n") for value in fields.values() if isinstance(value, str))
            start = reader.line_num - newlines
            if None in fields:
                raise ValueError(
                    f"{metadata}, line {start}: more fields than the header has columns; "
                    "put double quotes around a caption that holds commas"
                )
            yield Row(start, fields)
    except csv.Error as error:
        raise ValueError(
            f"{metadata}, in the row from line {reader.line_num + 1}: {error}; check its quotes"
        ) from error


def _check_columns(rows: Sequence[Row], metadata: Path, caption_column: str) -> None:
    columns = list(dict.fromkeys(name for row in rows for name in row.fields))
    listed = ", ".join(map(repr, columns))
    if FILE_COLUMN not in columns:
        raise ValueError(
            f"{metadata} has no column {FILE_COLUMN!r}, only {listed}; "
            "it must give each picture's path relative to the folder"
        )
    if caption_column not in columns:
        others = [name for name in columns if name != FILE_COLUMN]
        nearest = difflib.get_close_matches(caption_column, others, n=1, cutoff=0.0)
        way_out = f"the nearest is {nearest[0]!r}: pass it as caption_column" if nearest else "add the captions"
        raise ValueError(f"{metadata} has no caption column {caption_column!r}, only {listed}; {way_out}")


def _file_names(rows: Sequence[Row], metadata: Path) -> list[str]:
    """Return the listed paths, normalised, after checking that each is a different file inside the folder."""
    line_by_name: dict[str, int] = {}
    for row in rows:
        name = _file_name(row, metadata)
        if name in line_by_name:
            raise ValueError(
                f"{metadata}, line {row.line}: {FILE_COLUMN} {name!r} is already listed in line {line_by_name[name]}; "
                "keep one of the two"
            )
        line_by_name[name] = row.line
    missing = [name for name in line_by_name if not (metadata.parent / name).is_file()]
    if missing:
        raise FileNotFoundError(
            f"{metadata} lists {count_of(len(missing), 'file')} that {metadata.parent} does not hold: "
            f"{shortened(map(repr, missing), len(missing))}; add the files or remove their rows"
        )
    return list(line_by_name)


def _file_name(row: Row, metadata: Path) -> str:
    name = row.fields.get(FILE_COLUMN)
    if not isinstance(name, str) or not name.strip():
        got = f"got {name!r}" if FILE_COLUMN in row.fields else "it is not there"
        raise ValueError(
            f"{metadata}, line {row.line}: the row has no {FILE_COLUMN!r} ({got}); give the picture's path"
        )
    return inner_path(name, FILE_COLUMN, row, metadata)


def inner_path(name: str, column: str, row: Row, metadata: Path) -> str:
    """Return a path that a row gives, normalised, after checking that it stays inside the metadata's folder."""
    path = PurePosixPath(name)
    if ".." in path.parts or PureWindowsPath(name).anchor:
        raise ValueError(
            f"{metadata}, line {row.line}: {column} {name!r} may lead out of {metadata.parent}; "
            "expected a path relative to that folder, without '..'"
        )
    return path.as_posix()


def _captions(rows: Sequence[Row], metadata: Path, column: str) -> list[str]:
    faults = [f"line {row.line} ({fault})" for row in rows if (fault := _caption_fault(row, column))]
    if faults:
        raise ValueError(
            f"{metadata} has {count_of(len(faults), 'unusable caption')} in {column!r}: "
            f"{shortened(faults, len(faults))}; expected text in every row"
        )
    return [row.fields[column] for row in rows]


def _caption_fault(row: Row, column: str) -> str | None:
    caption = row.fields.get(column)
    if caption is None:
        return "null" if column in row.fields else "not there"
    if not isinstance(caption, str):
        return f"the {type(caption).__name__} {caption!r}"
    return None if caption.strip() else "empty"


def count_of(number: int, noun: str) -> str:
    """Write a number with its noun: "1 file", "2 files"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def shortened(items: Iterable[str], total: int) -> str:
    """List the first few of `total` items, and count the rest."""
    return ", ".join(islice(items, LISTED_AT_MOST)) + (
        f" and {total - LISTED_AT_MOST} more" if total > LISTED_AT_MOST else ""
    )
