"""Read documents into memory-mapped data sets: from the hub, from folders of `datasets`, and from files."""

from __future__ import annotations

import csv
import glob
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmpreproj.language.config import SplitNames, TextSource
from mmpreproj.language.texts.caching import bars_from
from mmpreproj.training.config.section import ConfigError

if TYPE_CHECKING:
    from datasets import Dataset

SAVED = ("state.json", "dataset_dict.json")  # what `save_to_disk` leaves of one split, and of several
ALSO_VALIDATION = ("valid", "val", "dev", "eval")  # what data sets call it, too
READING = 1  # raise when files are read in another way, so that nothing stale comes out of the cache
LONGEST_CELL = 2**31 - 1  # characters of a CSV cell; Python's own limit is 131072


def read_documents(source: TextSource, *, origin: str) -> dict[str, Dataset]:
    """Read the splits that a source has.

    Args:
        source: where the text is.
        origin: what errors call the configuration.

    Returns:
        `train`, and `validation` and `test` where the source has them; each with the one column `text`, on disk.

    Raises:
        ConfigError: if there is nothing to read, or it is no text.
        ImportError: if `datasets` is not installed.
    """
    try:
        import datasets  # noqa: F401
    except ImportError as error:
        raise ImportError(f"{origin}: text needs the package 'datasets'; run: pip install 'mmpreproj[lm]'") from error
    try:
        return _from_data_set(source) if source.dataset else {"train": _from_files(source)}
    except ConfigError as error:
        raise ConfigError(f"{origin}: {error}") from error


# --- data sets ---


def _from_data_set(source: TextSource) -> dict[str, Dataset]:
    """Take the splits that there are, each with its text alone."""
    place = Path(str(source.dataset)).expanduser()
    name = str(place) if place.exists() else str(source.dataset)
    loaded = _load(name, source, split=None)
    found = {}
    for role in ("train", "validation", "test"):
        asked = getattr(source.splits, role)
        base = asked.split("[")[0]
        if base not in loaded:
            _refuse_missing(role, base, loaded, name, source.splits)
            continue
        part = loaded[base] if base == asked else _load(name, source, split=asked)
        found[role] = _text_alone(part, source.column, f"{name}, split {asked!r}")
    return found


def _load(name: str, source: TextSource, *, split: str | None) -> Any:
    """Load all splits, as a mapping, or one."""
    import datasets

    saved = any((Path(name) / file).is_file() for file in SAVED)
    if saved and split is not None:
        raise ConfigError(f"splits: {name} was saved to disk, of which no part {split!r} can be taken; save that part")
    try:
        if not saved:
            return datasets.load_dataset(name, source.subset, revision=source.revision, split=split)
        loaded = datasets.load_from_disk(name)
    except (ConnectionError, FileNotFoundError) as error:
        raise ConfigError(
            f"dataset: {name!r} cannot be loaded: {error}; check the name, or, without a network, load it once with "
            "one so that it is in the cache, or name a folder or files"
        ) from error
    except (ValueError, IndexError, datasets.exceptions.DatasetsError) as error:
        raise ConfigError(f"dataset: {name!r} cannot be loaded: {error}") from error
    return loaded if isinstance(loaded, dict) else {str(loaded.split or "train"): loaded}


def _refuse_missing(role: str, base: str, loaded: Collection[str], name: str, splits: SplitNames) -> None:
    """Refuse a split that is not there, unless it is one of those that can be taken from train."""
    there = ", ".join(map(repr, loaded))
    if role == "train" or base != SplitNames.model_fields[role].default:
        raise ConfigError(f"splits.{role}: {name} has no split {base!r}, only {there}; name one of them")
    for other in ALSO_VALIDATION if role == "validation" else ():
        if other in loaded and other not in (splits.train, splits.test):
            raise ConfigError(
                f"splits.{role}: {name} has no split {base!r}, but {other!r}; set splits.{role}: {other}"
            )


def _text_alone(part: Dataset, column: str, where: str) -> Dataset:
    """Return the column with the documents, under the name `text`."""
    import datasets

    _check_column(part.column_names, column, where)
    feature = part.features[column]
    if not (isinstance(feature, datasets.Value) and feature.dtype in ("string", "large_string")):
        raise ConfigError(f"column: {where}: {column!r} holds {feature}; expected text, name another column")
    part = part.select_columns([column])
    return part if column == "text" else part.rename_column(column, "text")


# --- files ---


def _from_files(source: TextSource) -> Dataset:
    """Write the documents of all files to the cache, in the order of the paths, or find them there."""
    import datasets

    listed = []
    for path in find_files(source.files):
        about = path.stat()
        listed.append((str(path), about.st_size, about.st_mtime_ns))
    arguments = {"files": tuple(listed), "column": source.column, "separator": source.document_separator}
    try:
        with bars_from(sum(size for _, size, _ in listed)):
            return datasets.Dataset.from_generator(
                _documents,
                features=datasets.Features({"text": datasets.Value("string")}),
                gen_kwargs=arguments | {"reading": READING},
                writer_batch_size=64,  # documents held in memory, which may be books
            )
    except datasets.exceptions.DatasetGenerationError as error:
        if isinstance(error.__cause__, (ConfigError, OSError)):
            raise ConfigError(str(error.__cause__)) from error.__cause__
        raise


def find_files(patterns: Sequence[str]) -> list[Path]:
    """List the files that paths and patterns name, each once, sorted.

    Raises:
        ConfigError: naming the pattern that no file matches.
    """
    found: set[Path] = set()
    for pattern in patterns:
        place = Path(pattern).expanduser()
        if place.is_dir():
            raise ConfigError(
                f"files: {pattern!r} is a folder; name its files, such as {pattern.rstrip('/')}/**/*.txt"
            )
        names = [str(place)] if place.is_file() else glob.glob(str(place), recursive=True)
        matching = {Path(name).resolve() for name in names if Path(name).is_file()}
        if not matching:
            raise ConfigError(f"files: no file matches {pattern!r}, looked for from {Path.cwd()}; check the path")
        found |= matching
    return sorted(found)


def _documents(
    files: Sequence[tuple[str, int, int]], column: str, separator: str | None, reading: int
) -> Iterator[dict[str, str]]:
    """Give the documents of files; sizes, times and `reading` are there for the cache, which goes by arguments."""
    for name, *_ in files:
        path = Path(name)
        reader = READERS.get(path.suffix.lower())
        if reader is None:
            text = _decoded(path.read_bytes(), str(path))
            yield from ({"text": part} for part in (text.split(separator) if separator else [text]))
            continue
        for number, row in enumerate(reader(path, column), 1):
            where = f"{path}, row {number}"
            if not isinstance(row, Mapping):
                raise ConfigError(f"files: {where} is no object with columns, but {type(row).__name__}")
            _check_column(row, column, where)
            if row[column] is not None:
                if not isinstance(row[column], str):
                    raise ConfigError(
                        f"column: {where}: {column!r} holds {type(row[column]).__name__}; expected text, name another"
                    )
                yield {"text": row[column]}


def _check_column(columns: Collection[str], column: str, where: str) -> None:
    if column not in columns:
        there = ", ".join(map(repr, columns)) or "none"
        raise ConfigError(
            f"column: {where} has no column {column!r}, only {there}; set column to the one with the text"
        )


def _decoded(data: bytes, where: str) -> str:
    """Decode UTF-8, with or without a byte order mark, and bring line ends to one form."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"files: {where} is not UTF-8 (byte {error.start}); convert it, such as by iconv -f latin1 -t utf-8, or "
            "leave it out"
        ) from error
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _json_lines(path: Path, column: str) -> Iterator[Any]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield _parsed(_decoded(line, f"{path}, line {number},"), f"{path}, line {number},")


def _json(path: Path, column: str) -> Iterator[Any]:
    """Read one object, a list of objects, or, as some name it so, one object a line."""
    text = _decoded(path.read_bytes(), str(path))
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        if not error.msg.startswith("Extra data"):
            raise ConfigError(f"files: {path} is not valid JSON: {error}") from error
        yield from _json_lines(path, column)
    else:
        yield from value if isinstance(value, list) else [value]


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"files: {where} is not valid JSON: {error}") from error


def _csv(path: Path, column: str) -> Iterator[Any]:
    before = csv.field_size_limit(LONGEST_CELL)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            yield from csv.DictReader(file)
    except UnicodeDecodeError as error:
        raise ConfigError(f"files: {path} is not UTF-8; convert it, such as by iconv -f latin1 -t utf-8") from error
    except csv.Error as error:
        raise ConfigError(f"files: {path} is not valid CSV: {error}") from error
    finally:
        csv.field_size_limit(before)


def _parquet(path: Path, column: str) -> Iterator[Any]:
    import pyarrow
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(path)
    except pyarrow.ArrowInvalid as error:
        raise ConfigError(f"files: {path} is not valid parquet: {error}") from error
    _check_column(file.schema_arrow.names, column, str(path))
    for batch in file.iter_batches(batch_size=64, columns=[column]):
        yield from batch.to_pylist()


READERS: dict[str, Callable[[Path, str], Iterator[Any]]] = {
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".json": _json,
    ".csv": _csv,
    ".parquet": _parquet,
}
