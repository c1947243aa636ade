"""Two runs that would write to one output at the same time: the second is refused, as long as the first lives."""

import errno
import fcntl
import os
import signal

import locking_kit
import pytest
from interruption_kit import FORKING, count_lines, start, wait_for

from mmpreproj.recipes.dry_run import dry_run
from mmpreproj.recipes.locking import locked
from mmpreproj.training.config import ConfigError
from mmpreproj.training.loop import make_accelerator


@pytest.fixture
def hold():
    """Lock an output in another process; returns it once it holds the lock, and the process that it has begun."""
    processes = []

    def begin(output, *, leave=False):
        here, there = FORKING.Pipe()
        process = FORKING.Process(target=locking_kit.hold, args=(str(output), there, leave))
        process.start()
        processes.append(process)
        assert here.poll(120)
        return process, here.recv()

    yield begin
    for process in processes:
        process.kill()
        process.join()


@pytest.fixture
def accelerator(make_config):
    return make_accelerator(make_config())


def test_a_second_run_is_refused_until_the_first_is_killed(make_config, run):
    config = make_config(steps=2000, checkpoint_every=3)
    process = start(config)
    try:
        assert wait_for(lambda: count_lines(config.output / "metrics.jsonl") > 5, alive=process.is_alive)
        told = rf"output: another run is writing to .*run \(process {process.pid} on .+\); wait until .*another output"
        for settings in ({}, {"overwrite": True}, {"resume": "latest"}):
            with pytest.raises(ConfigError, match=told):
                run(config, **settings)
        assert process.is_alive()
    finally:
        process.kill()
        process.join()
    done, _ = run(make_config(steps=1), overwrite=True)
    assert done.saved.is_dir()
    assert not list(config.output.parent.rglob("*.lock"))


def test_two_names_of_one_output_are_one_and_another_output_is_free(hold, accelerator, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to("run")
    hold(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"another run is writing to .*link"), locked(tmp_path / "link", accelerator):
        pass
    with locked(tmp_path / "other", accelerator):
        pass


def test_the_lock_of_a_killed_run_is_gone_though_what_loaded_its_data_lives_on(hold, accelerator, tmp_path):
    process, child = hold(tmp_path / "run", leave=True)
    process.kill()
    process.join()
    try:
        with locked(tmp_path / "run", accelerator):
            pass
    finally:
        os.kill(child, signal.SIGKILL)


def test_nothing_is_left_of_a_lock(accelerator, tmp_path):
    before = set(tmp_path.iterdir())
    output = tmp_path / "runs" / "deep" / "run"
    with locked(output, accelerator):
        assert (output.parent / ".run.lock").read_text().startswith(f"process {os.getpid()} on ")
        assert not output.exists()
    assert set(tmp_path.iterdir()) == before


def test_a_run_that_waited_at_a_lock_that_was_removed_takes_the_new_one(hold, accelerator, tmp_path, monkeypatch):
    """Between opening the file and locking it, the run that held it may end, and another begin."""
    stock, calls = fcntl.lockf, []

    def late(handle, kind):
        if not calls:
            (tmp_path / ".run.lock").unlink()
            hold(tmp_path / "run")
        calls.append(handle)
        return stock(handle, kind)

    monkeypatch.setattr(fcntl, "lockf", late)
    with pytest.raises(ConfigError, match="another run is writing"), locked(tmp_path / "run", accelerator):
        pass


def test_where_nothing_can_be_written_beside_the_output_the_lock_is_in_it(hold, accelerator, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / ".run.lock").mkdir()  # in the way
    hold(tmp_path / "run")
    assert (tmp_path / "run" / ".lock").is_file()
    with pytest.raises(ConfigError, match="another run is writing"), locked(tmp_path / "run", accelerator):
        pass


def test_a_disk_without_locks_is_warned_of(accelerator, tmp_path, monkeypatch, caplog):
    def refuse(handle, kind):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    (tmp_path / "run").mkdir()
    with locked(tmp_path / "run", accelerator):
        pass
    assert "run cannot be locked ([Errno 37] No locks available), so a second run" in caplog.text


def test_a_dry_run_takes_no_lock(hold, make_config):
    hold(make_config().output)
    assert dry_run(make_config()).parameters
