"""Being asked to stop: a signal is noted, and the run saves before it ends."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass
class Stop:
    """Whether this process was asked to stop.

    Attributes:
        asked: the signal that asked; None while none has.
    """

    asked: signal.Signals | None = None


class TrainingStoppedError(RuntimeError):
    """A run that was asked to stop, and has saved how far it came.

    Attributes:
        step: the last step that was taken.
        signal: that this process was asked by; None if another process was asked.
        checkpoint: to go on from.
    """

    def __init__(self, step: int, steps: int, asked: signal.Signals | None, *, checkpoint: Path | None) -> None:
        by = "another process was" if asked is None else f"{asked.name} came and was"
        super().__init__(
            f"{by} heard: stopped after step {step} of {steps}; saved in {checkpoint}. Go on with --resume latest"
        )
        self.step, self.signal, self.checkpoint = step, asked, checkpoint


@contextmanager
def listening() -> Iterator[Stop]:
    """Note SIGINT and SIGTERM instead of dying of them; a second one acts as it did before.

    Only the main thread may set handlers; in another nothing is listened to. A signal that was ignored, as `nohup` and
    shells arrange for what runs in the background, stays ignored.
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    # None is a handler that was not set in Python, and could not be put back.
    before: dict[signal.Signals, Any] = {
        kind: handler for kind in SIGNALS if (handler := signal.getsignal(kind)) not in (signal.SIG_IGN, None)
    }

    def note(number: int, frame: FrameType | None) -> None:
        stop.asked = signal.Signals(number)
        for kind, handler in before.items():
            signal.signal(kind, handler)

    for kind in before:
        signal.signal(kind, note)
    try:
        yield stop
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)


def leave_stopping_to_parent(worker: int) -> None:
    """Let a process that loads data outlive the first SIGINT or SIGTERM, which often go to a whole group of processes.

    The one that trains still needs its batches then, and ends its workers itself.
    """

    def once(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)

    for kind in SIGNALS:
        signal.signal(kind, once)
