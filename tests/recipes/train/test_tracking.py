"""What trackers are told, read back from TensorBoard's own files; and what they cost where they are not there."""

import importlib.util
import json

import numpy as np
import pytest
from accelerate import PartialState
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import mmpreproj.recipes.train.tracking as tracking
from mmpreproj.recipes.train.tracking import Trackers, check_trackers
from mmpreproj.training.config import ConfigError
from mmpreproj.training.loop import StepRecord


@pytest.fixture(autouse=True)
def started(fresh_accelerate):
    """Start what accelerate's trackers ask whether they are on the main process, as a run does."""
    PartialState()


def read_board(output):
    """Read a run's event files: scalars by name, as (step, value), and pictures by name, as (step, height, width)."""
    events = EventAccumulator(str(output / "tensorboard"), size_guidance={"scalars": 0, "images": 0})
    events.Reload()
    scalars = {name: [(one.step, one.value) for one in events.Scalars(name)] for name in events.Tags()["scalars"]}
    images = {
        name: [(one.step, one.height, one.width) for one in events.Images(name)] for name in events.Tags()["images"]
    }
    return scalars, images


def near(points):
    """Give values the precision of TensorBoard's, 32 bits."""
    return [(step, pytest.approx(value, rel=1e-6)) for step, value in points]


@pytest.fixture
def watched(run, make_config):
    """A run of four steps that draws a prompt at every second."""
    rates = {"learning_rate": 1e-2, "learning_rates": {"biases": 5e-4}, "warmup_steps": 0}
    prompts = {"prompts": ["red apple", "blue"], "count": 2, "steps": 2}
    return run(
        make_config(
            steps=4,
            evaluate_every=2,
            checkpoint_every=2,
            validation=prompts,
            thaw=["biases"],
            optimizer=rates,
        )
    )[0]


def test_tensorboard_holds_losses_rates_of_each_part_skip_norms_and_pictures(watched):
    scalars, images = read_board(watched.config.output)
    trained = [record for record in watched.history if record.step]
    assert scalars["loss/training"] == near([(one.step, one.loss) for one in trained])
    measured = [(one.step, one.held_out) for one in watched.history if one.held_out is not None]
    assert [step for step, _ in measured] == [0, 2, 4]
    assert scalars["held out/pictures"] == near(measured)
    assert scalars["gradient norm"] == near([(one.step, one.grad_norm) for one in trained])
    assert scalars["pictures per second"] == near([(one.step, one.pictures_per_second) for one in trained])
    for part, first in (("adapter", 1e-2), ("biases", 5e-4)):
        found = scalars[f"learning rate/{part}"]
        assert found == near([(one.step, one.learning_rates[part]) for one in trained])
        assert found[0][1] == pytest.approx(first) and [step for step, _ in found] == [1, 2, 3, 4]
    skips = {name: [step for step, _ in points] for name, points in scalars.items() if name.startswith("skip norm/")}
    assert skips == {f"skip norm/block {block} attn": [2, 4] for block in (0, 1)}
    assert all(value > 0 for name in skips for _, value in scalars[name])
    with Image.open(watched.config.output / "previews" / "pictures-000004.png") as image:
        width, height = image.size
    assert images == {"pictures": [(step, height, width) for step in (0, 2, 4)]}


def test_a_run_that_is_taken_up_again_drops_later_steps(run, make_config, watched):
    config = watched.config
    before, _ = read_board(config.output)
    done, _ = run(config, resume=str(config.output / "checkpoints" / "step-000002"))
    scalars, images = read_board(config.output)
    assert [step for step, _ in scalars["loss/training"]] == [1, 2, 3, 4], "no step twice"
    assert scalars["loss/training"] == before["loss/training"]
    assert [step for step, *_ in images["pictures"]] == [0, 2, 4]
    lines = [json.loads(line) for line in (config.output / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4] == [record.step for record in done.history]


def test_losses_of_several_modalities_are_told_one_by_one(make_config):
    config = make_config()
    trackers = Trackers(config)
    losses = {"pictures": 0.25, "points": 0.5}
    trackers.step(StepRecord(1, 0.75, None, 1e-3, 1.0, 2.0, losses=losses, held_out_losses=losses), profile={})
    trackers.close()
    scalars, _ = read_board(config.output)
    assert scalars == {
        "loss/training": [(1, 0.75)],
        "loss/pictures": [(1, 0.25)],
        "loss/points": [(1, 0.5)],
        "held out/pictures": [(1, 0.25)],
        "held out/points": [(1, 0.5)],
        "gradient norm": [(1, 1.0)],
        "pictures per second": [(1, 2.0)],
    }


def test_a_picture_is_shown_as_it_is_in_its_file(make_config, tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "p.png")
    config = make_config()
    trackers = Trackers(config)
    trackers.picture("shapes", tmp_path / "p.png", step=3)
    trackers.close()
    events = EventAccumulator(str(config.output / "tensorboard"))
    events.Reload()
    (image,) = events.Images("shapes")
    (config.output / "back.png").write_bytes(image.encoded_image_string)
    with Image.open(config.output / "back.png") as back:
        assert image.step == 3 and np.array_equal(np.asarray(back), pixels)


@pytest.mark.parametrize("changes", [{"trackers": []}, {}], ids=["no tracker", "another process"])
def test_without_a_tracker_none_is_written(make_config, tmp_path, changes):
    config = make_config(**changes)
    trackers = Trackers(config, is_main=bool(changes))
    trackers.step(StepRecord(1, 0.5, None, 1e-3, 1.0, 2.0), profile={"block 0 attn": 1.0})
    trackers.picture("shapes", tmp_path / "nowhere.png", step=1)
    trackers.close()
    assert not config.output.exists()


def test_a_run_without_trackers_leaves_no_folder_for_them(run, make_config):
    done, _ = run(make_config(steps=1, trackers=[]))
    assert (done.config.output / "metrics.jsonl").is_file()
    assert not (done.config.output / "tensorboard").exists()


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_tracker_that_is_not_installed_is_refused_before_anything(run, make_config, monkeypatch, tmp_path, name):
    monkeypatch.setattr(
        tracking, "find_spec", lambda asked: None if asked == name else importlib.util.find_spec(asked)
    )
    config = make_config(trackers=[name], model=str(tmp_path / "nowhere"))  # loading would fail with another error
    with pytest.raises(ConfigError, match=rf"trackers: {name} needs .* pip install {name}, or set trackers: \[\]"):
        run(config)
    assert not config.output.exists()
    check_trackers(make_config(trackers=[]))


def test_weights_and_biases_is_told_the_same(make_config, monkeypatch, tmp_path):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    config = make_config(trackers=["wandb"])
    config.output.mkdir()
    Image.new("RGB", (4, 4), "red").save(tmp_path / "p.png")
    trackers = Trackers(config)
    (run,) = [tracker.run for tracker in trackers._trackers]
    told, log = {}, run.log
    monkeypatch.setattr(run, "log", lambda values, step: told.update({(step, name): values[name] for name in values}))
    trackers.picture("pictures", tmp_path / "p.png", step=1)
    record = StepRecord(1, 0.5, 0.25, 1e-3, 1.0, 2.0, held_out_losses={"pictures": 0.25}, learning_rates={"lora": 1.0})
    trackers.step(record, profile={"block 0 attn": 0.125})
    monkeypatch.setattr(run, "log", log)
    for (step, name), value in told.items():
        log({name: value}, step=step)  # it takes them
    settings = dict(run.config)
    trackers.close()
    assert told.pop((1, "pictures"))[0].image.size == (4, 4)
    assert told == {
        (1, "loss/training"): 0.5,
        (1, "held out/pictures"): 0.25,
        (1, "learning rate/lora"): 1.0,
        (1, "skip norm/block 0 attn"): 0.125,
        (1, "gradient norm"): 1.0,
        (1, "pictures per second"): 2.0,
    }
    assert settings["steps"] == 3 and settings["data"]["resolution"] == 8
    (folder,) = (config.output / "wandb").glob("offline-run-*")
    assert list(folder.glob("*.wandb")) and list(folder.rglob("pictures_*.png"))
