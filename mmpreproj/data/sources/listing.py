"""Which files of a folder are pictures, and which of the paths that a row may give."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path, PurePosixPath, PureWindowsPath

PICTURE_SUFFIXES = frozenset({".avif", ".bmp", ".gif", ".jfif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"})
RESOURCE_FORKS = "__MACOSX"  # the folder that macOS adds to zip archives: its "pictures" hold Finder's notes


def check_folder(folder: Path) -> None:
    """Make sure that a folder is there.

    Raises:
        FileNotFoundError: if it is not.
        ValueError: if it is a file.
    """
    if not folder.exists():
        raise FileNotFoundError(f"the picture folder {folder} does not exist; check the path")
    if not folder.is_dir():
        raise ValueError(f"{folder} is a file; expected the folder that holds the pictures and their captions")


def find_files(folder: Path, suffixes: Collection[str]) -> set[str]:
    """Return the relative paths of all files with one of the suffixes, in the folder and below.

    Hidden files and folders and macOS's resource forks are left out; links to folders are not followed.

    Args:
        folder: where to look.
        suffixes: in lower case, with the dot; files match in either case.
    """
    found = set()
    for parent, subfolders, files in os.walk(folder):
        subfolders[:] = [name for name in subfolders if not is_set_aside(name)]
        for file in files:
            if Path(file).suffix.lower() in suffixes and not is_set_aside(file):
                found.add((Path(parent) / file).relative_to(folder).as_posix())
    return found


def is_set_aside(name: str) -> bool:
    """Whether a file or folder of this name is hidden, or holds macOS's notes about others."""
    return name.startswith(".") or name == RESOURCE_FORKS


def inner_path(name: str) -> str:
    """Normalise a relative path, with `/` between subfolders.

    Raises:
        ValueError: with the reason, if it may lead out of the folder that it is relative to.
    """
    path = PurePosixPath(name)
    if ".." in path.parts or PureWindowsPath(name).anchor:
        raise ValueError(f"{name!r} may lead out of the folder, expected a path relative to it, without '..'")
    return path.as_posix()


def picture_path(name: str) -> str:
    """Normalise the relative path of a picture.

    Raises:
        ValueError: with the reason, if it may lead out of the folder or is none of a picture.
    """
    path = inner_path(name)
    if any(map(is_set_aside, PurePosixPath(path).parts)):
        raise ValueError(f"{name!r} is hidden, or one of macOS's resource forks; such files are not opened")
    if PurePosixPath(path).suffix.lower() not in PICTURE_SUFFIXES:
        raise ValueError(f"{name!r} is no picture; expected one of {', '.join(sorted(PICTURE_SUFFIXES))}")
    return path
