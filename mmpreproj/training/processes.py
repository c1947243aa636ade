"""What some processes of a run do while the others wait: it succeeds for all, or fails for all."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import TypeVar, cast

from accelerate import Accelerator
from accelerate.utils import gather_object

Value = TypeVar("Value")


def on_every_process(work: Callable[[], Value]) -> list[Value]:
    """Do something on each process, and go on when all have; every process calls this.

    Args:
        work: it must not exchange anything with the other processes, of which one may have failed already.

    Returns:
        What it returned on each process, in the order of their ranks.

    Raises:
        Exception: what it raised here, else what it raised on another process; so all end together, and none waits
            for one that has gone.
    """
    value, error = None, None
    try:
        value = work()
    except Exception as failed:
        error = failed
    told = gather_object([(value, None if error is None else _sendable(error))])
    if error is None:
        error = next((failed for _, failed in told if failed is not None), None)
    if error is not None:
        raise error
    return [cast(Value, value) for value, _ in told]


def on_main_process(accelerator: Accelerator, work: Callable[[], Value]) -> Value:
    """Do something on the main process alone, and go on when it is done; every process calls this.

    Returns:
        What it returned there, on every process; it must be possible to pickle it.

    Raises:
        Exception: what it raised there, on every process.
    """
    return cast(Value, on_every_process(work if accelerator.is_main_process else lambda: None)[0])


def _sendable(error: Exception) -> Exception:
    """Return an error as other processes can be told of it."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # an error's class may be of any kind
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
