"""Being asked to stop: the first signal is noted, the second acts, and the handlers that were there come back."""

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

import mmpreproj
from mmpreproj.training.checkpoints import checkpoints
from mmpreproj.training.loop import TrainingStoppedError, train
from mmpreproj.training.stopping import SIGNALS, leave_stopping_to_parent, listening


@pytest.fixture(autouse=True)
def handlers_are_put_back():
    before = {kind: signal.getsignal(kind) for kind in SIGNALS}
    yield
    assert {kind: signal.getsignal(kind) for kind in SIGNALS} == before


@pytest.fixture
def set_handler():
    """Set a signal's handler for the length of a test."""
    before = {}

    def change(kind, handler):
        before.setdefault(kind, signal.signal(kind, handler))

    yield change
    for kind, handler in before.items():
        signal.signal(kind, handler)


@pytest.mark.parametrize("kind", SIGNALS)
def test_a_signal_is_noted_and_ends_nothing(kind):
    with listening() as stop:
        assert stop.asked is None
        os.kill(os.getpid(), kind)
        assert stop.asked is kind


@pytest.mark.parametrize("first", SIGNALS)
@pytest.mark.parametrize("second", SIGNALS)
def test_a_second_signal_of_either_kind_acts_as_it_did_before(set_handler, first, second):
    heard = []
    for kind in SIGNALS:
        set_handler(kind, lambda number, frame: heard.append(number))
    with listening():
        os.kill(os.getpid(), first)
        assert heard == []
        os.kill(os.getpid(), second)
        assert heard == [second]


@pytest.mark.parametrize("ending", ["ends", "fails", "is asked to stop"])
def test_handlers_are_put_back_however_it_ends(set_handler, ending):
    def mine(number, frame):
        raise AssertionError

    set_handler(signal.SIGTERM, mine)
    before = [signal.getsignal(kind) for kind in SIGNALS]
    try:
        with listening():
            assert signal.getsignal(signal.SIGTERM) is not mine
            if ending == "fails":
                raise KeyError
            if ending == "is asked to stop":
                os.kill(os.getpid(), signal.SIGTERM)
    except KeyError:
        pass
    assert [signal.getsignal(kind) for kind in SIGNALS] == before


def test_a_signal_that_was_ignored_stays_ignored(set_handler):
    """As `nohup` and shells arrange for what runs in the background."""
    set_handler(signal.SIGINT, signal.SIG_IGN)
    with listening() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.asked is None
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.asked is signal.SIGTERM


def test_nothing_is_installed_outside_the_main_thread():
    before, found = [signal.getsignal(kind) for kind in SIGNALS], []

    def elsewhere():
        with listening() as stop:
            found.extend([[signal.getsignal(kind) for kind in SIGNALS], stop.asked])

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert found == [before, None]


# --- a run -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def begin(make_transformer, make_pictures, make_config):
    """Train, and send the process a signal during the step after one."""

    def run(*, step, kind=signal.SIGTERM, times=1, **changes):
        transformer = make_transformer()
        mmpreproj.patch(transformer)

        def on_step(record):
            if record.step == step:
                for _ in range(times):
                    os.kill(os.getpid(), kind)

        return train(transformer, make_pictures(), make_config(**changes), on_step=on_step)

    return run


@pytest.mark.parametrize("kind", SIGNALS)
@pytest.mark.parametrize("every", [0, 2], ids=["no checkpoints", "every other step"])
def test_a_run_that_is_asked_to_stop_saves_and_says_where(begin, make_config, kind, every):
    match = rf"{kind.name} came and was heard: stopped after step 3 of 9; saved in .*step-000003\. .*--resume latest"
    with pytest.raises(TrainingStoppedError, match=match) as stopped:
        begin(step=2, kind=kind, steps=9, checkpoint_every=every)
    (*_, last) = checkpoints(make_config().output / "checkpoints")
    assert (stopped.value.step, stopped.value.signal, stopped.value.checkpoint) == (3, kind, last)


def test_a_signal_during_the_last_step_leaves_a_run_that_is_done(begin, make_config):
    begin(step=2, steps=3)
    assert checkpoints(make_config().output / "checkpoints") == []


def test_a_second_interrupt_ends_a_run_at_once(begin, make_config):
    with pytest.raises(KeyboardInterrupt):
        begin(step=2, kind=signal.SIGINT, times=2, steps=9)
    assert checkpoints(make_config().output / "checkpoints") == []


def test_another_thread_trains_and_hears_nothing(begin):
    done = []
    thread = threading.Thread(target=lambda: done.append(begin(step=None)))
    thread.start()
    thread.join()
    assert len(done) == 1


# --- processes that load ---------------------------------------------------------------------------------------------

WORKER = """
    import signal, time
    from mmpreproj.training.stopping import leave_stopping_to_parent

    leave_stopping_to_parent(0)
    print("ready", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("kind", SIGNALS)
def test_a_process_that_loads_outlives_the_first_signal_and_not_the_second(kind):
    command = [sys.executable, "-c", textwrap.dedent(WORKER)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as worker:
        assert worker.stdout.readline() == b"ready\n"
        worker.send_signal(kind)
        with pytest.raises(subprocess.TimeoutExpired):
            worker.wait(0.3)
        worker.send_signal(kind)
        assert worker.wait(10) == -kind


def test_a_run_whose_loaders_are_asked_too_saves(make_transformer, make_pictures, make_config):
    """Terminals and schedulers send a signal to every process of a group."""
    transformer = make_transformer()
    mmpreproj.patch(transformer)

    def on_step(record):
        if record.step == 2:
            processes = [str(worker.pid) for worker in multiprocessing.active_children()]
            assert len(processes) == 2
            # By another process: a worker that its own parent asks to end does so, and counts as one that is done.
            subprocess.run(["kill", "-TERM", *processes, str(os.getpid())], check=True)
            time.sleep(0.3)  # until dead workers would be noticed

    with pytest.raises(TrainingStoppedError, match="SIGTERM came and was heard: stopped after step 3 of 9"):
        config = make_config(steps=9, data={"folder": ".", "workers": 2})
        train(transformer, make_pictures(), config, on_step=on_step)
    assert [path.name for path in checkpoints(config.output / "checkpoints")] == ["step-000003"]


def test_stopping_is_left_to_the_parent_by_a_function_that_every_start_method_can_send():
    assert pickle.loads(pickle.dumps(leave_stopping_to_parent)) is leave_stopping_to_parent
