"""The lock on a run's output: a second run that would write there at the same time is refused."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from accelerate import Accelerator

from mmpreproj.training.config import ConfigError
from mmpreproj.training.processes import on_main_process

logger = logging.getLogger(__name__)


@contextmanager
def locked(output: Path, accelerator: Accelerator) -> Iterator[None]:
    """Keep other runs out of a folder for the length of a `with` block; every process of the run enters it.

    The main process holds a lock of the operating system's, which ends with it, however it ends. The file that is
    locked, `.NAME.lock` beside the folder (in it, where nothing can be written beside it), is removed at the end; one
    that a killed process has left locks nothing. Where the disk has no locks, as some network file systems, that is
    only warned of.

    Raises:
        ConfigError: on every process, if another run holds the lock; its process and machine are named.
    """
    with ExitStack() as stack:
        on_main_process(accelerator, lambda: stack.enter_context(_held(output)))
        yield


@contextmanager
def _held(output: Path) -> Iterator[None]:
    folder = output.resolve()  # one lock for all paths that lead there
    beside = folder.with_name(f".{folder.name}.lock") if folder.name else folder / ".lock"
    made = [parent for parent in beside.parents if not parent.exists()]
    taken = _take_first((beside, folder / ".lock"), output)
    try:
        yield
    finally:
        if taken is not None:
            path, handle = taken
            path.unlink(missing_ok=True)
            os.close(handle)
        with suppress(OSError):  # of a run that was refused, they are empty
            for parent in made:
                parent.rmdir()


def _take_first(paths: tuple[Path, ...], output: Path) -> tuple[Path, int] | None:
    """Lock the first file that can be; None, with a warning, if none can."""
    reasons = []
    for path in paths:
        try:
            if path is paths[0]:
                path.parent.mkdir(parents=True, exist_ok=True)
            return path, _take(path, output)
        except (OSError, ImportError) as error:
            reasons.append(error)
    logger.warning(
        "output: %s cannot be locked (%s), so a second run that writes there would not be noticed; start none",
        output,
        reasons[0],
    )
    return None


def _take(path: Path, output: Path) -> int:
    """Lock a file, and return its handle."""
    # A record lock: unlike `flock`'s, it is not passed on to the processes that load data, which may outlive this one.
    from fcntl import LOCK_EX, LOCK_NB, lockf  # not there on Windows

    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            lockf(handle, LOCK_EX | LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            holder = os.read(handle, 200).decode(errors="replace") or "one that has just begun"
            os.close(handle)
            raise ConfigError(
                f"output: another run is writing to {output} ({holder}); wait until it has ended, or choose another "
                "output"
            ) from error
        except OSError:
            os.close(handle)
            raise
        with suppress(FileNotFoundError):
            if os.path.samestat(path.stat(), os.fstat(handle)):
                break
        os.close(handle)  # the run that held it has removed it since
    with suppress(OSError):  # a full disk locks as well
        os.truncate(handle, 0)
        os.write(handle, f"process {os.getpid()} on {socket.gethostname()}".encode())
    return handle
