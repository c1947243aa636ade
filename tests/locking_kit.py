"""A process of its own that holds the lock on an output, and may leave one behind that it has begun."""

import os
import time
from pathlib import Path


def hold(output, told, leave):
    """Lock an output and tell of it; with `leave`, by a process begun meanwhile, whose id is told, and which stays."""
    from accelerate import Accelerator

    from mmpreproj.recipes.locking import locked

    with locked(Path(output), Accelerator(cpu=True)):
        child = os.fork() if leave else os.getpid()
        if child:
            told.send(child)
        time.sleep(60)
