"""A folder of pictures with a text file beside each: the layout of kohya's and many other trainers.

flowers/
  rose.png
  rose.txt            a red rose
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from mmpreproj.data.sources.captions import caption_from_file
from mmpreproj.data.sources.faults import OnError, check_on_error, settle
from mmpreproj.data.sources.listing import PICTURE_SUFFIXES, check_folder, find_files
from mmpreproj.data.sources.pictures import PictureSource, SkippedPicture, read_file

CAPTION_EXTENSIONS = (".txt", ".caption")


class SidecarSource(PictureSource):
    """The pictures of a folder and its subfolders, each with the caption in the text file of the same name.

    `a/rose.png` has its caption in `a/rose.txt`: UTF-8, with or without a byte order mark. Several lines are one
    caption, joined by blanks; kohya's scripts take the first line alone. A number of repeats before a subfolder's name
    (`10_roses`) means nothing here. The captions are read at construction, a picture when asked for.

    Args:
        folder: the folder that holds the pictures.
        extension: what the text files' names end in, such as ".txt" or ".caption".
        on_error: "raise" to name all pictures that cannot be used in one error, "skip" to leave them out and list them
            in `faults`: without a caption, or with one that is empty, not UTF-8, or another picture's too.

    Attributes:
        folder: as given, with `~` expanded.
        captions: one caption a picture.
        names: the pictures' paths, relative to the folder, sorted.
        unpaired: number of text files with that extension that no picture belongs to, and that are ignored.
        faults: the pictures that were left out, each with the reason.
        runs: folders in it that training runs have written, whose pictures are not listed.

    Raises:
        FileNotFoundError: if the folder does not exist, or holds no pictures.
        ValueError: if pictures cannot be used, or the extension can be none of a text file.
    """

    def __init__(self, folder: str | Path, *, extension: str = ".txt", on_error: OnError = "raise") -> None:
        check_on_error(on_error)
        _check_extension(extension)
        self.folder = Path(folder).expanduser()
        check_folder(self.folder)
        runs: list[str] = []
        pictures = sorted(find_files(self.folder, PICTURE_SUFFIXES, runs=runs))
        self.runs = tuple(os.path.join(self.folder, run) for run in sorted(runs))
        if not pictures:
            raise FileNotFoundError(f"no pictures in {self.folder}; check the path")
        texts = {_stem(text): text for text in sorted(find_files(self.folder, {extension.lower()}))}
        pictures_by_stem: dict[str, list[str]] = {}
        for picture in pictures:
            pictures_by_stem.setdefault(_stem(picture), []).append(picture)
        self.names: list[str] = []
        self.captions: list[str] = []
        faults: list[SkippedPicture] = []
        for picture in pictures:
            stem = _stem(picture)
            try:
                caption = self._caption(texts.get(stem), pictures_by_stem[stem], f"{stem}{extension}")
            except ValueError as error:
                faults.append(SkippedPicture(picture, str(error)))
                continue
            self.names.append(picture)
            self.captions.append(caption)
        self.unpaired = len(texts.keys() - pictures_by_stem.keys())
        self.faults = settle(faults, on_error, where=str(self.folder), usable=len(self.names))

    def __len__(self) -> int:
        return len(self.names)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.folder)!r})  # {len(self)} pictures, {self.unpaired} unpaired texts"

    def read(self, index: int) -> bytes:
        """Return one picture's file; see `PictureSource.read`."""
        return read_file(os.path.join(self.folder, self.names[index]), self.names[index])

    def _caption(self, text: str | None, sharing: list[str], expected: str) -> str:
        """Read a caption.

        Args:
            text: the path of its file, or None if there is none.
            sharing: the pictures that the file belongs to.
            expected: the path that is missing where there is none.

        Raises:
            ValueError: with the reason, if there is no caption that can be used.
        """
        if text is None:
            raise ValueError(f"there is no {expected} with its caption")
        if len(sharing) > 1:
            raise ValueError(f"{text} belongs to {' and '.join(sharing)}, give each picture a name of its own")
        try:
            return caption_from_file((self.folder / text).read_bytes())
        except OSError as error:
            raise ValueError(f"{text} cannot be read: {error.strerror}") from error


def find_extension(folder: Path) -> str | None:
    """Return what the names of the text files beside a folder's pictures end in, or None if there are none.

    Raises:
        ValueError: if some end in ".txt" and some in ".caption".
    """
    pictures = _stems(find_files(folder, PICTURE_SUFFIXES))
    found = [extension for extension in CAPTION_EXTENSIONS if pictures & _stems(find_files(folder, {extension}))]
    if len(found) > 1:
        raise ValueError(
            f"{folder} holds both {' and '.join(found)} files beside its pictures; "
            "keep one kind, so that captions are certain"
        )
    return found[0] if found else None


def _check_extension(extension: str) -> None:
    if not extension.startswith(".") or "/" in extension or extension.lower() in PICTURE_SUFFIXES:
        raise ValueError(f"extension is {extension!r}; expected what text files' names end in, such as '.txt'")


def _stems(paths: Iterable[str]) -> set[str]:
    return {_stem(path) for path in paths}


def _stem(path: str) -> str:
    """Return a path without its last suffix."""
    return str(PurePosixPath(path).with_suffix(""))
