"""The rows of a folder's metadata: metadata.jsonl, metadata.csv or metadata.parquet."""

# Parsed here and not by `datasets`: its imagefolder builder accepts rows without a file, lists missing files as rows,
# turns the CSV captions "None" and "007" into null and 7, and reports no line numbers.
from __future__ import annotations

import csv
import difflib
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmpreproj.data.sources.faults import settle
from mmpreproj.data.sources.pictures import SkippedPicture

METADATA_NAMES = ("metadata.jsonl", "metadata.csv", "metadata.parquet")
FILE_COLUMN = "file_name"
OTHER_FILE_COLUMN = "image"  # as others call it; read where there is no file_name


@dataclass(frozen=True)
class Row:
    """One row of a metadata file, as it was read."""

    place: str  # where the row starts: "metadata.jsonl, line 7", from 1; "metadata.parquet, row 7", from 0
    fields: Mapping[str, Any]


@dataclass(frozen=True)
class Table:
    """A metadata file, as far as it could be read."""

    path: Path
    columns: Sequence[str]
    rows: Sequence[Row]


def find_metadata(folder: Path) -> Path | None:
    """Return a folder's metadata file, or None.

    Raises:
        ValueError: if there are several.
    """
    found = [name for name in METADATA_NAMES if (folder / name).is_file()]
    if len(found) > 1:
        raise ValueError(f"{folder} holds both {' and '.join(found)}; keep one, so that captions are certain")
    return folder / found[0] if found else None


def read_table(path: Path, wanted: Sequence[str], *, faults: list[SkippedPicture]) -> Table:
    """Read a metadata file's rows.

    Args:
        path: the file; its suffix says how it is read.
        wanted: the columns that are needed besides the pictures' paths; a Parquet file's others are not read.
        faults: the list to append what is no row to.

    Raises:
        ImportError: if the file is Parquet and `pyarrow` is not installed.
        ValueError: if the file as a whole cannot be read, or has no rows.
    """
    if path.suffix == ".parquet":
        table = _parquet_table(path, wanted)
    else:
        rows = list((_jsonl_rows if path.suffix == ".jsonl" else _csv_rows)(_text(path), path, faults))
        table = Table(path, list(dict.fromkeys(name for row in rows for name in row.fields)), rows)
    if not table.rows:
        settle(faults, "raise", where=str(path), usable=0)
        raise ValueError(f"{path} is empty; expected one row a picture, with {FILE_COLUMN!r} and a caption")
    if FILE_COLUMN in table.columns:
        return table
    name_of = {OTHER_FILE_COLUMN: FILE_COLUMN}
    rows = [
        Row(row.place, {name_of.get(name, name): value for name, value in row.fields.items()}) for row in table.rows
    ]
    return Table(path, [name_of.get(name, name) for name in table.columns], rows)


def check_column(columns: Sequence[str], column: str, *, where: str, content: str, argument: str) -> None:
    """Make sure that there is a column.

    Args:
        columns: those there are.
        column: the one that is needed.
        where: what the error calls the data.
        content: what the column is for, in words.
        argument: by which another column is chosen.

    Raises:
        ValueError: naming the columns there are, and the nearest.
    """
    if column in columns:
        return
    others = [name for name in columns if name != FILE_COLUMN]
    nearest = difflib.get_close_matches(column, others, n=1, cutoff=0.0)
    way_out = f"the nearest is {nearest[0]!r}: pass it as {argument}" if nearest else "add it"
    raise ValueError(
        f"{where} has no column {column!r} with the {content}, only {', '.join(map(repr, columns))}; {way_out}"
    )


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8 text ({error.reason} at byte {error.start}); save it as UTF-8"
        ) from error


def _jsonl_rows(text: str, path: Path, faults: list[SkippedPicture]) -> Iterator[Row]:
    # Only "\n" ends a line: str.splitlines also breaks at U+2028, which JSON allows within a caption.
    for number, line in enumerate(text.split("\n"), start=1):
        place = f"{path.name}, line {number}"
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as error:  # ValueError: a number too long is no JSONDecodeError
            detail = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
            faults.append(SkippedPicture(place, f"broken JSON, {detail}; expected one object a line"))
            continue
        if isinstance(fields, dict):
            yield Row(place, fields)
        else:
            faults.append(SkippedPicture(place, f"got a {type(fields).__name__}, expected one object a line"))


def _csv_rows(text: str, path: Path, faults: list[SkippedPicture]) -> Iterator[Row]:
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    _check_header(reader, path)
    while True:
        done = reader.reader.line_num  # the DictReader's own stays behind where a row is broken
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            last = reader.reader.line_num
            lines = f"lines {done + 1} to {last}" if last > done + 1 else f"line {done + 1}"
            faults.append(SkippedPicture(f"{path.name}, {lines}", f"{error}; check the quotes"))
            continue
        newlines = sum(value.count("\n") for value in fields.values() if isinstance(value, str))
        place = f"{path.name}, line {reader.line_num - newlines}"
        if None in fields:
            reason = "more fields than the header has columns; put double quotes around a caption that holds commas"
            faults.append(SkippedPicture(place, reason))
        else:
            yield Row(place, fields)


def _check_header(reader: csv.DictReader[str], path: Path) -> None:
    try:
        columns = list(reader.fieldnames or ())
    except csv.Error as error:
        raise ValueError(f"{path}: the header cannot be read: {error}; check its quotes") from error
    twice = sorted({name for name in columns if columns.count(name) > 1})
    if twice:
        raise ValueError(f"{path} has two columns {twice[0]!r}; rename or remove one")


def _parquet_table(path: Path, wanted: Sequence[str]) -> Table:
    try:
        import pyarrow as arrow
        from pyarrow import parquet
    except ImportError as error:
        raise ImportError(f"{path.name} needs the package 'pyarrow'; run: pip install 'mmpreproj[data]'") from error
    try:
        with parquet.ParquetFile(path) as file:
            columns = list(file.schema_arrow.names)
            file_column = FILE_COLUMN if FILE_COLUMN in columns else OTHER_FILE_COLUMN
            read = file.read(columns=[name for name in columns if name in {file_column, *wanted}])
    except (arrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} cannot be read as Parquet ({error}); write it again") from error
    if file_column in columns and arrow.types.is_nested(read.schema.field(file_column).type):
        raise ValueError(
            f"{path} holds the pictures themselves in its column {file_column!r}, not their paths; "
            "read it as a data set: HubDatasetSource('parquet', data_files=…)"
        )
    rows = [Row(f"{path.name}, row {number}", fields) for number, fields in enumerate(read.to_pylist())]
    return Table(path, columns, rows)
