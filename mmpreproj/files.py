"""Files, on the standard library alone: written whole or not at all, and the error for those that cannot be read."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar


class UnreadableFileError(Exception):
    """A file of data that cannot be read.

    Attributes:
        kind: what it should have been, in words.
        name: what its source calls it.
        reason: why it could not be read, in words.
    """

    kind: ClassVar[str] = "file"

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)
        self.name = name
        self.reason = reason

    def __str__(self) -> str:
        return f"cannot read the {self.kind} {self.name!r}: {self.reason}"


def write_atomically(path: Path, write: Callable[[str], Any]) -> None:
    """Call `write` on a temporary file beside `path`, then move it over `path` in one step.

    Raises:
        OSError: if the file cannot be written; `path` is named, and is as it was.
    """
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    os.close(handle)
    try:
        write(temporary)
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
    finally:
        Path(temporary).unlink(missing_ok=True)


def remove_left_over(folder: Path) -> None:
    """Remove the temporary files that a process killed in `write_atomically` has left in a folder."""
    for path in folder.glob(".*.????????"):
        if path.is_file():
            path.unlink(missing_ok=True)


def flush_file(path: Path) -> None:
    """Make sure that a file and its name are on the disk, and not only on their way; a missing one is passed over.

    Raises:
        OSError: if it cannot be put there; `path` is named.
    """
    if not path.is_file():
        return
    try:
        with path.open("rb") as file:
            os.fsync(file.fileno())
        flush_folder(path.parent)
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


def flush_folder(folder: Path) -> None:
    """Make sure that the names of a folder's files are on the disk, where its system can tell."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _umask() -> int:
    current = os.umask(0)  # there is no way to ask for it alone
    os.umask(current)
    return current
