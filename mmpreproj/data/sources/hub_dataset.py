"""Pictures and captions through the library `datasets`: from the hub, from its cache, or from files on disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmpreproj.data.sources.captions import caption_fault
from mmpreproj.data.sources.faults import OnError, check_on_error, settle
from mmpreproj.data.sources.listing import PICTURE_SUFFIXES
from mmpreproj.data.sources.metadata import check_column
from mmpreproj.data.sources.pictures import PictureSource, SkippedPicture, UnreadablePictureError, read_file

if TYPE_CHECKING:
    from datasets import Dataset

SAVED = ("state.json", "dataset_dict.json")  # what `save_to_disk` leaves of one split, and of several


class HubDatasetSource(PictureSource):
    """The rows of a data set, each with a picture and a caption.

    The pictures stay on disk, where `datasets` maps them into memory, and are given as they were stored. A row with a
    list of captions has its first. No code of a data set is run.

    Args:
        name: a data set of the hub, such as "owner/flowers"; a folder, as `save_to_disk` writes it or with files that
            `datasets` knows; or one of its builders, such as "parquet", "imagefolder" or "webdataset".
        subset: the data set's configuration, where it has several.
        split: which split, or part of it, such as "train[:1000]".
        data_files: the files that a builder reads; paths or patterns.
        picture_column: the column with the pictures.
        caption_column: the column with the captions.
        on_error: "raise" to name all rows without a caption in one error, "skip" to leave them out and list them in
            `faults`.

    Attributes:
        captions: one caption a picture, in the order of the rows.
        names: data set, split and row, such as "flowers/train#12", rows counted from 0.
        faults: the rows that were left out, each with the reason.

    Raises:
        FileNotFoundError: if the data set or its files cannot be found, or not be reached and are not in the cache.
        ImportError: if `datasets` is not installed.
        ValueError: if it has no such split or column, or captions that are no text.
    """

    def __init__(
        self,
        name: str | Path,
        *,
        subset: str | None = None,
        split: str = "train",
        data_files: str | Sequence[str] | Mapping[str, str | Sequence[str]] | None = None,
        picture_column: str = "image",
        caption_column: str = "text",
        on_error: OnError = "raise",
    ) -> None:
        check_on_error(on_error)
        place = Path(name).expanduser()
        loaded = _load(str(place) if place.exists() else str(name), subset, split, data_files)
        where = f"{name}, split {split!r}"
        for column, content in ((picture_column, "pictures"), (caption_column, "captions")):
            argument = "picture_column" if column == picture_column else "caption_column"
            check_column(loaded.column_names, column, where=where, content=content, argument=argument)
        self._pictures = _undecoded(loaded, picture_column, where)
        self._column = picture_column
        self._name = f"{place.name}/{split}"
        faults: list[SkippedPicture] = []
        self._rows: list[int] = []
        self.captions: list[str] = []
        for row, value in enumerate(loaded.select_columns(caption_column)[:][caption_column]):
            caption = value[0] if isinstance(value, list) and value else value
            fault = caption_fault(caption)
            if fault is None:
                self._rows.append(row)
                self.captions.append(caption)
            else:
                faults.append(SkippedPicture(f"{self._name}#{row}", fault))
        self.names = [f"{self._name}#{row}" for row in self._rows]
        self.faults = settle(faults, on_error, where=where, usable=len(self.names))

    def __len__(self) -> int:
        return len(self.names)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._name!r})  # {len(self)} pictures"

    def read(self, index: int) -> bytes:
        """Return one picture as it is stored; see `PictureSource.read`."""
        name = self.names[index]
        picture = self._pictures[self._rows[index]][self._column]
        data, path = (picture["bytes"], picture["path"]) if picture is not None else (None, None)
        if data is not None:
            return bytes(data)
        if path is None:
            raise UnreadablePictureError(name, "the row has no picture")
        if Path(path).suffix.lower() not in PICTURE_SUFFIXES:
            raise UnreadablePictureError(name, f"{path} is no picture file")
        return read_file(Path(path), name)


def _load(name: str, subset: str | None, split: str, data_files: Any) -> Dataset:
    """Load one split, by whichever way its name asks for."""
    try:
        import datasets
    except ImportError as error:
        raise ImportError(f"{name!r} needs the package 'datasets'; run: pip install 'mmpreproj[data]'") from error
    files = list(data_files) if isinstance(data_files, tuple) else data_files
    try:
        if any((Path(name) / file).is_file() for file in SAVED):
            return _saved_split(datasets.load_from_disk(name), split)
        return datasets.load_dataset(name, subset, split=split, data_files=files or None)
    except (ConnectionError, FileNotFoundError) as error:
        raise FileNotFoundError(
            f"the data set {name!r} cannot be loaded: {error}; check the name, or, without a network, load it once "
            "with one so that it is in the cache, or name a folder"
        ) from error
    except IndexError as error:  # how the library fails for a data set that was saved empty
        raise ValueError(f"the data set {name!r} cannot be loaded: it was saved without rows") from error
    except (ValueError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(f"the data set {name!r} cannot be loaded: {error}") from error


def _saved_split(saved: Any, split: str) -> Dataset:
    """Take the split that is asked for from what `save_to_disk` wrote."""
    if isinstance(saved, dict):
        if split not in saved:
            raise ValueError(f"no split {split!r}, only {', '.join(map(repr, saved))}; name one of them")
        return saved[split]
    own = "train" if saved.split is None else str(saved.split)
    if split != own:
        raise ValueError(f"it was saved as the one split {own!r}; got {split!r}, name that")
    return saved


def _undecoded(loaded: Dataset, column: str, where: str) -> Dataset:
    """Return the column of pictures alone, so cast that files come out as they are."""
    import datasets

    feature = loaded.features[column]
    is_binary = isinstance(feature, datasets.Value) and feature.dtype in ("binary", "large_binary")
    is_stored = isinstance(feature, dict) and "bytes" in feature
    if not (isinstance(feature, datasets.Image) or is_binary or is_stored):
        raise ValueError(f"{where}: the column {column!r} holds {feature}; expected pictures, name another column")
    return loaded.select_columns(column).cast_column(column, datasets.Image(decode=False))
