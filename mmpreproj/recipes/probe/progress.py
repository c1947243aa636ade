"""What a person sees of a study: how many trainings are done, what is being done now, and about how long is left."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

SIGN_OF_LIFE = 60.0  # seconds, after which a screen that is no terminal is told of a stage that goes on


class StudyReporter:
    """Two bars on a terminal, that of the study and that of the present stage; elsewhere a line for each training.

    Args:
        console: where to write.
        show: false on processes other than the main one.
    """

    def __init__(self, console: Console, *, show: bool = True) -> None:
        self.console = console
        self.show = show
        self.total = self.done = self.made = 0
        self._begun = self._trial_begun = self._told = time.monotonic()
        self._on_terminal = show and console.is_terminal
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[detail]}"),
            console=console,
            disable=not self._on_terminal,
        )
        self._study = self._progress.add_task("trainings", visible=False, detail="")
        self._stage = self._progress.add_task("", visible=False, detail="")
        self._stage_name = ""

    def __enter__(self) -> StudyReporter:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.update(self._stage, visible=False)
        self._progress.stop()

    def begin(self, trials: int) -> None:
        """Tell how many trainings the study has."""
        self.total = trials
        self._begun = self._trial_begun = time.monotonic()
        self._progress.reset(self._study, total=trials, visible=True)

    def say(self, text: str) -> None:
        """Write a line above the bars; a long one is left whole."""
        self._told = time.monotonic()
        if self.show:
            self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def stage(self, name: str, done: int, total: int, *, detail: str = "") -> None:
        """Show how far a stage has come; may be called often."""
        if self._on_terminal:
            if name != self._stage_name:
                self._stage_name = name
                self._progress.reset(self._stage, total=total, visible=True, description=name)
            self._progress.update(self._stage, completed=done, detail=detail)
        elif self.show and time.monotonic() - self._told > SIGN_OF_LIFE:
            self.say(f"{name}: {done} of {total}" + (f", {detail}" if detail else ""))

    def trial_starts(self) -> None:
        """Note when a training begins."""
        self._trial_begun = time.monotonic()

    def trial_is_done(self, told: str | None = None) -> None:
        """Count a training; `told` says how one went that was made now, and is None for one that was there."""
        self.done += 1
        self.made += told is not None
        left = self._left()
        if told is not None:
            taken = f"{duration(time.monotonic() - self._trial_begun)}{', ' if left else ''}{left}"
            self.say(f"[{self.done:>{len(str(self.total))}}/{self.total}] {told} ({taken})")
        self._progress.update(self._study, completed=self.done, detail=left)

    def _left(self) -> str:
        """Estimate by the trainings that were made now, with the scoring of theirs."""
        if not self.made or self.done >= self.total:
            return ""
        each = (time.monotonic() - self._begun) / self.made
        return f"about {duration(each * (self.total - self.done))} left"


def duration(seconds: float) -> str:
    """Write a length of time in the units that a person would take."""
    if seconds < 90:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
