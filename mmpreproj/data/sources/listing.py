"""Which files of a folder are pictures, and which of the paths that a row may give."""

from __future__ import annotations

import ntpath
import os
import posixpath
from collections.abc import Collection
from pathlib import Path

PICTURE_SUFFIXES = frozenset({".avif", ".bmp", ".gif", ".jfif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"})
RUN_FILES = frozenset({"config.yaml", "metrics.jsonl"})  # what a training run writes first: it marks a run's folder
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


def find_files(folder: Path, suffixes: Collection[str], *, runs: list[str] | None = None) -> set[str]:
    """Return the relative paths of all files with one of the suffixes, in the folder and below.

    Hidden files and folders and macOS's resource forks are left out; links to folders are not followed. So are folders
    below that a training run has written, whose loss curves and previews are no data.

    Args:
        folder: where to look.
        suffixes: in lower case, with the dot; files match in either case.
        runs: where the folders of runs are listed, by their relative paths.
    """
    found = set()
    for parent, subfolders, files in os.walk(folder):
        inner = os.path.relpath(parent, folder).replace(os.sep, "/")
        if inner != "." and RUN_FILES.issubset(files):
            subfolders.clear()
            if runs is not None:
                runs.append(inner)
            continue
        subfolders[:] = [name for name in subfolders if not is_set_aside(name)]
        prefix = "" if inner == "." else f"{inner}/"
        wanted = [file for file in files if _suffix(file) in suffixes and not is_set_aside(file)]
        # A pipe would be waited at for ever; a link that leads nowhere is told of when it is read.
        found |= {prefix + file for file in wanted if _may_be_read(os.path.join(parent, file))}
    return found


def _may_be_read(path: str) -> bool:
    return os.path.isfile(path) or os.path.islink(path)


def is_set_aside(name: str) -> bool:
    """Whether a file or folder of this name is hidden, or holds macOS's notes about others."""
    return name.startswith(".") or name == RESOURCE_FORKS


def inner_path(name: str) -> str:
    """Normalise a relative path, with `/` between subfolders.

    Raises:
        ValueError: with the reason, if it may lead out of the folder that it is relative to.
    """
    # Not by pathlib, which keeps every part of every path that it has seen: 400 bytes for each of many pictures.
    parts = [part for part in name.split("/") if part not in ("", ".")]
    drive, rest = ntpath.splitdrive(name)
    if ".." in parts or drive or rest.startswith(("/", "\\")):
        raise ValueError(f"{name!r} may lead out of the folder, expected a path relative to it, without '..'")
    return "/".join(parts) or "."


def picture_path(name: str) -> str:
    """Normalise the relative path of a picture.

    Raises:
        ValueError: with the reason, if it may lead out of the folder or is none of a picture.
    """
    path = inner_path(name)
    if any(map(is_set_aside, path.split("/"))):
        raise ValueError(f"{name!r} is hidden, or one of macOS's resource forks; such files are not opened")
    if _suffix(path) not in PICTURE_SUFFIXES:
        raise ValueError(f"{name!r} is no picture; expected one of {', '.join(sorted(PICTURE_SUFFIXES))}")
    return path


def _suffix(path: str) -> str:
    return posixpath.splitext(path)[1].lower()
