"""What a person sees of a study."""

import io

import pytest
from rich.console import Console

from mmpreproj.recipes.probe import progress
from mmpreproj.recipes.probe.progress import StudyReporter, duration


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def shown(**settings):
    screen = io.StringIO()
    return screen, Console(file=screen, width=120, **settings)


def test_elsewhere_than_on_a_terminal_there_is_a_line_a_training(clock):
    screen, console = shown()
    with StudyReporter(console) as reporter:
        reporter.begin(12)
        reporter.trial_is_done()  # was there
        for number in range(2):
            reporter.trial_starts()
            for step in range(1, 31):
                reporter.stage(f"docs: skip {number}: steps", step, 30, detail="loss 2.0000")
                clock[0] += 1
            reporter.trial_is_done(f"docs: skip {number}: fine")
    assert screen.getvalue().splitlines() == [
        "[ 2/12] docs: skip 0: fine (30 s, about 5 min left)",
        "[ 3/12] docs: skip 1: fine (30 s, about 4 min left)",
    ]


def test_a_stage_that_takes_long_gives_a_sign_of_life(clock):
    screen, console = shown()
    with StudyReporter(console) as reporter:
        reporter.begin(1)
        for step in range(1, 151):
            clock[0] += 1
            reporter.stage("docs: skip: steps", step, 150, detail="loss 2.0000")
    assert screen.getvalue().splitlines() == [
        "docs: skip: steps: 61 of 150, loss 2.0000",
        "docs: skip: steps: 122 of 150, loss 2.0000",
    ]


def test_on_a_terminal_there_are_two_bars_however_many_stages_there_were():
    screen, console = shown(force_terminal=True)
    with StudyReporter(console) as reporter:
        reporter.begin(40)
        for number in range(40):
            reporter.stage(f"docs: arm {number}: steps", 1, 2, detail="loss 2.0000")
            reporter.trial_is_done("fine")
        assert len(reporter._progress.tasks) == 2
        assert [task.completed for task in reporter._progress.tasks] == [40, 1]
    assert "40/40" in screen.getvalue()


def test_other_processes_show_nothing():
    for settings in ({}, {"force_terminal": True}):
        screen, console = shown(**settings)
        with StudyReporter(console, show=False) as reporter:
            reporter.begin(2)
            reporter.stage("steps", 1, 2)
            reporter.trial_is_done("fine")
            reporter.say("a word")
        assert screen.getvalue() == ""


@pytest.mark.parametrize(
    ("seconds", "told"),
    [(0.21, "0.2 s"), (42.4, "42 s"), (89, "89 s"), (95, "2 min"), (5000, "83 min"), (7300, "2 h 2 min")],
)
def test_times_are_told_in_their_units(seconds, told):
    assert duration(seconds) == told
