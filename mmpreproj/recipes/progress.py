"""What a person sees while a job runs: bars with steps, loss, pictures per second and the time left."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from mmpreproj.training.loop import StepRecord


class Reporter:
    """Progress bars on a terminal, a line now and then elsewhere; silent where `show` is false.

    Args:
        console: where to write.
        show: false on processes other than the main one.
    """

    def __init__(self, console: Console, *, show: bool = True) -> None:
        self.console = console
        self.show = show
        self._tasks: dict[str, TaskID] = {}
        self._finished: set[str] = set()
        self._held_out: float | None = None
        self._progress = Progress(
            TextColumn("{task.description:<9}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(elapsed_when_finished=False),
            TextColumn("{task.fields[detail]}"),
            console=console,
            disable=not (show and console.is_terminal),
        )

    def __enter__(self) -> Reporter:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.stop()

    def say(self, text: str) -> None:
        """Write a line above the bars; a long one is left whole, since it may be a command to be copied."""
        if self.show:
            self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def stage(self, name: str, done: int, total: int, *, detail: str = "") -> None:
        """Show how far a stage has come."""
        if name not in self._tasks:
            self._tasks[name] = self._progress.add_task(name, total=total, detail=detail)
        self._progress.update(self._tasks[name], completed=done, detail=detail)
        if self.show and not self.console.is_terminal and done == total and name not in self._finished:
            self._finished.add(name)
            self.say(f"{name}: {done} of {total}")

    def step(self, record: StepRecord, total: int) -> None:
        """Show a training step."""
        if record.held_out is not None:
            self._held_out = record.held_out
        if record.loss is None:
            return
        held_out = "" if self._held_out is None else f"  held-out {self._held_out:.4f}"
        parts = ", ".join(f"{name} {loss:.4f}" for name, loss in record.losses.items())
        each = f" ({parts})" if len(record.losses) > 1 else ""
        detail = f"loss {record.loss:.4f}{each}{held_out}  {record.pictures_per_second:.1f} pictures/s"
        self.stage("training", record.step, total, detail=detail)
        if len(record.held_out_losses) > 1:
            parts = ", ".join(f"{name} {loss:.4f}" for name, loss in record.held_out_losses.items())
            self.say(f"held out at step {record.step}: {parts}")
        if self.show and not self.console.is_terminal and (record.held_out is not None or record.step % 50 == 0):
            self.say(f"step {record.step} of {total}  {detail}")
