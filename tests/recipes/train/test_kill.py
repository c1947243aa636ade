"""Runs whose process ends: killed at any instant, asked by a signal, or with a disk that is full."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest
import yaml
from interruption_kit import count_lines, start, wait_for

from mmpreproj.training.checkpoints import checkpoints, find_checkpoint
from mmpreproj.training.config import ConfigError
from mmpreproj.training.progress import check_progress

NAMES = ("step", "loss", "held_out", "grad_norm", "learning_rate", "losses", "held_out_losses")


def records(config):
    lines = (config.output / "metrics.jsonl").read_text().splitlines()
    return [{name: json.loads(line)[name] for name in NAMES} for line in lines]


def adapter(config):
    return (config.output / "adapter" / "adapter_model.safetensors").read_bytes()


def finish(config, **settings):
    process = start(config, **settings)
    process.join(120)
    assert process.exitcode == 0


def go_on(config):
    """How a run in this folder is started again: from its last checkpoint, else anew."""
    return {"overwrite": True} if find_latest(config) is None else {"resume": "latest"}


def find_latest(config):
    try:
        return find_checkpoint(config.output / "checkpoints", "latest")
    except ConfigError:
        return None


# --- killed ----------------------------------------------------------------------------------------------------------


class Killing:
    """Kills a run again and again: after a random time since it came to a step, or since it had taken its last."""

    def __init__(self, config, *, seed):
        self.config, self.random, self.kills = config, random.Random(seed), 0

    def kill(self, step, longest):
        """Start or take up the run, and kill it within a time after it told of a step."""
        process = start(self.config, **go_on(self.config))
        metrics = self.config.output / "metrics.jsonl"
        before = count_lines(metrics)
        # A line a step, and one before the first; the lines of an earlier process are there from the start.
        wait_for(lambda: count_lines(metrics) > max(step, before - 1), alive=process.is_alive)
        time.sleep(self.random.uniform(0, longest))
        process.kill()
        process.join()
        self.kills += process.exitcode == -signal.SIGKILL
        latest = find_latest(self.config)
        if latest is not None:
            check_progress(latest, self.config)


def check_kills(make_config, tmp_path, *, steps, places, seed, **changes):
    """Fail unless a run that is killed at these steps leaves what one that is not does."""
    changes = {"steps": steps, "checkpoint_every": 1, "evaluate_every": 3, **changes}
    at_once = make_config(output=tmp_path / "at once", **changes)
    finish(at_once)
    killing = Killing(make_config(output=tmp_path / "killed", **changes), seed=seed)
    for step, longest in places:
        killing.kill(step, longest)
    config = killing.config
    finish(config, **go_on(config))
    assert adapter(config) == adapter(at_once)
    assert records(config) == records(at_once)
    assert [record["step"] for record in records(config)] == list(range(steps + 1))
    hidden = [path for path in config.output.rglob(".*")]
    assert hidden == []
    return killing.kills


def test_a_run_that_is_killed_three_times_leaves_the_bits_of_one_that_is_not(make_config, tmp_path):
    places = [(2, 0.05), (4, 0.05), (6, 0.02)]
    kills = check_kills(make_config, tmp_path, steps=6, places=places, seed=1)
    assert kills >= 2  # the last may come when the run is done


def test_what_a_kill_after_the_last_step_left_is_cleaned_when_the_run_is_taken_up(make_config, tmp_path):
    config = make_config(output=tmp_path / "run", steps=2, checkpoint_every=1, evaluate_every=2)
    finish(config)
    (config.output / "checkpoints" / ".step-000000.removed").mkdir()
    finish(config, **go_on(config))
    assert not list(config.output.rglob(".*"))


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 2])
def test_a_run_that_is_killed_at_twenty_instants_leaves_the_bits_of_one_that_is_not(make_config, tmp_path, every):
    """Before the first checkpoint, in steps, in saves, and while the results are written."""
    training = [(step, 0.2) for step in range(16)]
    results = [(16, longest) for longest in (0.02, 0.1, 0.3, 0.5)]
    changes = {"checkpoint_every": every, "lora": {"rank": 2, "dropout": 0.1}, "ema": {"decay": 0.9}}
    kills = check_kills(make_config, tmp_path, steps=16, places=training + results, seed=7, **changes)
    assert kills >= 16


# --- asked to stop ---------------------------------------------------------------------------------------------------


@pytest.fixture
def command(make_config, tmp_path):
    """Start `mmpreproj train` on a file, as a person would."""

    def begin(**changes):
        config = make_config(**changes)
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
        process = subprocess.Popen(
            [sys.executable, "-m", "mmpreproj", "train", str(path)],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        return config, process

    return begin


@pytest.mark.parametrize(
    ("number", "to_group"),
    [
        pytest.param(signal.SIGINT, False, id="an interrupt"),
        pytest.param(signal.SIGTERM, True, id="a scheduler's signal to the whole group", marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, True, id="a terminal's interrupt of the whole group", marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, False, id="a scheduler's signal", marks=pytest.mark.slow),
    ],
)
def test_a_command_that_is_asked_to_stop_saves_says_where_and_can_be_taken_up(
    command, make_config, tmp_path, number, to_group
):
    changes = {"steps": 24, "checkpoint_every": 0, "data": {"workers": 2 if to_group else 0}}
    config, process = command(**changes)
    metrics = config.output / "metrics.jsonl"
    assert wait_for(lambda: count_lines(metrics) > 2, alive=lambda: process.poll() is None)
    (os.killpg if to_group else os.kill)(process.pid, number)
    _, told = process.communicate(timeout=120)
    (checkpoint,) = checkpoints(config.output / "checkpoints")
    assert f"{number.name} came and was heard" in told and str(checkpoint) in told.replace("\n", "")
    assert "Traceback" not in told
    assert process.returncode == 128 + number
    finish(config, resume="latest")
    at_once = make_config(output=tmp_path / "at once", **changes)
    finish(at_once)
    assert adapter(config) == adapter(at_once)
    assert records(config) == records(at_once)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, 1)])
def test_a_signal_before_training_ends_the_process_as_ever(make_config, number, status):
    """An interrupt by Python's exception, which the process of a test tells as status 1."""
    config = make_config()
    process = start(config, text="pictures: ", number=number)
    process.join(120)
    assert process.exitcode == status
    assert not config.output.exists()


# --- full disks ------------------------------------------------------------------------------------------------------


@pytest.fixture
def make_disk(tmp_path):
    """Mount a file system of so many KiB."""
    mounted = []

    def make(size):
        if shutil.which("mount") is None or os.geteuid() != 0:
            pytest.skip("only root may mount")
        place = tmp_path / f"disk {size}"
        place.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}k", "tmpfs", str(place)]
        if subprocess.run(command, capture_output=True).returncode:
            pytest.skip("a file system cannot be mounted here")
        mounted.append(place)
        return place

    yield make
    for place in mounted:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


@pytest.mark.parametrize("size", [500, pytest.param(700, marks=pytest.mark.slow)])
def test_a_disk_that_becomes_full_ends_a_run_with_its_last_good_checkpoint(
    run, make_config, make_disk, tmp_path, size
):
    output = make_disk(size) / "run"
    changes = {"steps": 40, "checkpoint_every": 1, "data": {"cache": tmp_path / "cache"}}
    config = make_config(output=output, keep_checkpoints=40, **changes)
    with pytest.raises(OSError, match=r"step-\d+, go on with --resume latest") as failed:
        run(config)
    assert str(output) in str(failed.value)
    assert not list(output.rglob(".*"))
    latest = find_checkpoint(output / "checkpoints", "latest")
    assert str(latest) in str(failed.value)
    roomy = tmp_path / "roomy"
    resumed, _ = run(make_config(output=roomy, keep_checkpoints=1, **changes), resume=str(latest))
    at_once, _ = run(make_config(output=tmp_path / "at once", keep_checkpoints=1, **changes))
    assert adapter(resumed.config) == adapter(at_once.config)


def test_a_disk_that_is_too_full_for_the_records_is_told_by_their_name(run, make_config, make_disk, tmp_path):
    output = make_disk(12) / "run"  # a page of the configuration, and two of records
    config = make_config(
        output=output, steps=80, checkpoint_every=0, trackers=(), data={"cache": tmp_path / "cache", "held_out": 0}
    )
    with pytest.raises(OSError, match=r"No space left on device; there is no checkpoint yet: .*metrics\.jsonl"):
        run(config)
