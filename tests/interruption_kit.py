"""Training runs in processes of their own, which may be killed: forked from one that has imported everything."""

import multiprocessing
import os
import signal
import time

FORKING = multiprocessing.get_context("forkserver")
FORKING.set_forkserver_preload(["interruption_kit", "mmpreproj.recipes.train", "mmpreproj.cli", "tensorboard"])


class SignallingFile:
    """A screen that swallows what it is shown, and asks its process to stop when it is shown a text."""

    def __init__(self, text, number):
        self.text, self.number = text, number

    def write(self, shown):
        if self.text is not None and self.text in shown:
            os.kill(os.getpid(), self.number)
        return len(shown)

    def flush(self):
        pass


def train(values, settings, text=None, number=signal.SIGTERM):
    """Run a training run; `text` is what it is sent a signal at when it says so."""
    import torch
    from rich.console import Console

    from mmpreproj.recipes.train import run_training
    from mmpreproj.training.config import TrainConfig

    torch.set_num_threads(1)
    console = Console(file=SignallingFile(text, number), width=200)
    run_training(TrainConfig(**values), console=console, **settings)


def start(config, *, text=None, number=signal.SIGTERM, **settings):
    """Start a run in another process."""
    process = FORKING.Process(target=train, args=(config.model_dump(), settings, text, number))
    process.start()
    return process


def count_lines(path):
    return path.read_bytes().count(b"\n") if path.is_file() else 0


def wait_for(condition, *, alive, seconds=120):
    """Wait until something is so, or a process has ended; tell whether it is."""
    end = time.monotonic() + seconds
    while not condition():
        if not alive() or time.monotonic() > end:
            return condition()
        time.sleep(0.002)
    return True
