"""Taking a run up again: everything it leaves is what it would have left, and what is refused costs nothing."""

import json
import os
import shutil

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from mmpreproj.recipes.train import run_training
from mmpreproj.training.checkpoints import checkpoints
from mmpreproj.training.config import ConfigError, read_config
from mmpreproj.training.loop import TrainingStoppedError

NAMES = ("step", "loss", "held_out", "grad_norm", "learning_rate", "losses", "held_out_losses")


def records(config):
    lines = (config.output / "metrics.jsonl").read_text().splitlines()
    return [{name: json.loads(line)[name] for name in NAMES} for line in lines]


def tree(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def weights(folder):
    """The trained weights that a run has left, by their files."""
    return {name: load_file(folder / name) for name in tree(folder) if name.endswith(".safetensors")}


def same(first, second):
    return first.keys() == second.keys() and all(
        first[file].keys() == second[file].keys()
        and all(torch.equal(value, second[file][name]) for name, value in first[file].items())
        for file in first
    )


@pytest.fixture
def stop(monkeypatch, make_config):
    """Run until a step, as if a signal had come."""
    import os
    import signal

    from mmpreproj.recipes.train import watching

    def run_until(config, step):
        with monkeypatch.context() as patching:
            stock = watching.Watch.step

            def step_and_ask(watch, record):
                stock(watch, record)
                if record.step == step - 1:
                    os.kill(os.getpid(), signal.SIGTERM)

            patching.setattr(watching.Watch, "step", step_and_ask)
            with pytest.raises(TrainingStoppedError, match=rf"stopped after step {step} of"):
                run_training(config)

    return run_until


@pytest.fixture
def wide_pictures(pictures):
    """Of two shapes, so that there are several buckets."""
    for place, path in enumerate(sorted(pictures.glob("*.png"))):
        Image.new("RGB", (32, 16) if place % 2 else (16, 16), ("red", "green", "blue")[place % 3]).save(path)
    return pictures


CASES = {
    "adapter": {},
    "everything at once": {
        "lora": {"rank": 2, "dropout": 0.1},
        "ema": {"decay": 0.9},
        "gradient_accumulation": 2,
        "data": {"resolution": 16, "aspect": "buckets", "flip": 0.5, "workers": 2},
        "validation": {"prompts": ["red square"], "steps": 2, "count": 1, "height": 16, "width": 16},
    },
    "full": {"mode": "full", "adapter": None},
}


@pytest.mark.parametrize(
    "case", [case if case != "full" else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
def test_a_run_that_was_stopped_leaves_what_one_that_was_not_leaves(
    run, stop, make_config, saved_pipelines, wide_pictures, tmp_path, case
):
    changes = {"steps": 5, "evaluate_every": 2, "model": str(saved_pipelines["latents"]), **CASES[case]}
    changes["data"] = {"resolution": 16, **changes.get("data", {})}
    at_once, _ = run(make_config(output=tmp_path / "at once", **changes))
    config = make_config(output=tmp_path / "stopped", **changes)
    stop(config, 3)
    assert [path.name for path in checkpoints(config.output / "checkpoints")] == ["step-000002", "step-000003"]
    resumed, _ = run(config, resume="latest")
    assert same(weights(resumed.saved), weights(at_once.saved))
    assert records(config) == records(at_once.config)
    assert [record.step for record in resumed.history] == [0, 1, 2, 3, 4, 5]
    assert resumed.held_out_loss == at_once.held_out_loss
    files = ({name for name in tree(one.config.output) if not name.startswith(("tensorboard", "checkpoints"))}
             for one in (resumed, at_once))  # fmt: skip
    assert next(files) == next(files)
    for name, pixels in tree(at_once.config.output / "previews").items():
        assert (config.output / "previews" / name).read_bytes() == pixels


@pytest.fixture
def begun(run, make_config, base, tmp_path):
    """A finished run of five steps, on a base of its own, with checkpoints of its second and fourth."""
    own = shutil.copytree(base, tmp_path / "base")
    done, _ = run(make_config(steps=5, model=str(own)))
    return done


def test_a_finished_run_takes_its_last_steps_again(run, begun):
    before, lines = tree(begun.config.output), records(begun.config)
    run(begun.config, resume="latest")
    after = tree(begun.config.output)
    assert records(begun.config) == lines
    name = "adapter/adapter_model.safetensors"
    assert after[name] == before[name]


def test_a_run_killed_after_its_last_checkpoint_only_writes_its_results(run, make_config):
    config = make_config(steps=4)
    run(config)
    before = (config.output / "adapter" / "adapter_model.safetensors").read_bytes()
    shutil.rmtree(config.output / "adapter")
    resumed, _ = run(config, resume="latest")
    assert (resumed.saved / "adapter_model.safetensors").read_bytes() == before
    assert [record.step for record in resumed.history] == [0, 1, 2, 3, 4]


def test_going_back_to_an_earlier_step_drops_what_came_after_it(run, stop, begun):
    stop_at, folder = 3, begun.config.output / "checkpoints"
    lines = records(begun.config)
    config = begun.config.model_copy(update={"checkpoint_every": 0})
    run(config, resume="2")
    assert [path.name for path in checkpoints(folder)] == ["step-000002"]
    assert records(config) == lines
    assert stop_at < len(lines)


def test_half_a_line_and_later_ones_in_the_records_are_written_anew(run, begun):
    lines, path = records(begun.config), begun.config.output / "metrics.jsonl"
    text = path.read_text()
    path.write_text(text + text.splitlines()[-1][:40])
    run(begun.config, resume="latest")
    assert records(begun.config) == lines


def test_with_the_output_moved_a_run_goes_on_from_the_path_of_a_checkpoint(run, begun, make_config, tmp_path):
    moved = make_config(
        steps=5, model=begun.config.model, output=tmp_path / "new place", evaluate_every=1, trackers=()
    )
    resumed, _ = run(moved, resume=str(begun.config.output / "checkpoints" / "step-000004"))
    assert same(weights(resumed.saved), weights(begun.saved))
    assert read_config(moved.output / "config.yaml") == moved


# --- loss of power ---------------------------------------------------------------------------------------------------


def test_records_are_on_the_disk_before_the_checkpoint_that_counts_on_them(run, make_config, monkeypatch):
    flushed, stock = [], os.fsync

    def note(handle):
        flushed.append((os.path.basename(os.readlink(f"/proc/self/fd/{handle}")), os.fstat(handle).st_size))
        stock(handle)

    monkeypatch.setattr(os, "fsync", note)
    config = make_config(steps=4, checkpoint_every=2)
    run(config)
    order = [name for name, _ in flushed if name in ("metrics.jsonl", "progress.json")]
    assert order == ["metrics.jsonl", "progress.json"] * 2
    lines = (config.output / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    sizes = [size for name, size in flushed if name == "metrics.jsonl"]
    assert sizes == [len(b"".join(lines[:count])) for count in (3, 5)]  # with that of step 0


def test_records_that_end_before_the_checkpoint_are_told_and_gone_on_without(run, begun):
    path = begun.config.output / "metrics.jsonl"
    before = records(begun.config)
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:3]) + '{"step": 3, "lo')
    resumed, screen = run(begun.config, resume="latest")
    assert "warning: metrics.jsonl ends at step 2, before 4" in screen
    assert records(begun.config) == [record for record in before if record["step"] not in (3, 4)]
    assert resumed.held_out_loss == begun.held_out_loss
    kept = [path.name for path in checkpoints(begun.config.output / "checkpoints")]
    assert kept == ["step-000002", "step-000004"]  # the one that was gone on from, too


# --- refusals --------------------------------------------------------------------------------------------------------


def change_a_picture(pictures):
    Image.new("RGB", (20, 20), "white").save(pictures / "03.png")
    return {}


def change_a_caption(pictures):
    path = pictures / "metadata.jsonl"
    path.write_text(path.read_text().replace("green square", "green tree"))
    return {}


def change_the_base(pictures, model="transformer"):
    base = next(pictures.parent.glob("base"))
    path = next((base / model).glob("*.safetensors"))
    save_file({name: value + 0.01 for name, value in load_file(path).items()}, path)
    return {}


def change_the_text_encoder(pictures):
    return change_the_base(pictures, "text_encoder")


REFUSALS = {
    "another base": (change_the_base, "latest", r"the pictures or captions are no longer those"),
    "another text encoder": (change_the_text_encoder, "latest", r"the pictures or captions are no longer those"),
    "other settings": (lambda pictures: {"seed": 3}, "latest", r"seed was 0, is 3"),
    "another rate": (
        lambda pictures: {"optimizer": {"learning_rate": 1e-3, "warmup_steps": 0}},
        "latest",
        r"optimizer\.learning_rate was 0\.01, is 0\.001",
    ),
    "another picture": (change_a_picture, "latest", r"the pictures or captions are no longer those"),
    "another caption": (change_a_caption, "latest", r"the pictures or captions are no longer those"),
    "no such step": (lambda pictures: {}, "3", r"no checkpoint '3' to go on from; there are step-000002, step-000004"),
    "another folder": (
        lambda pictures: {"output": pictures.parent / "other"},
        "latest",
        r"other/checkpoints holds none",
    ),
}


@pytest.mark.parametrize("refusal", REFUSALS)
def test_what_is_refused_costs_nothing_of_the_run(run, begun, make_config, pictures, refusal):
    change, which, match = REFUSALS[refusal]
    before = tree(begun.config.output)
    changes = change(pictures)
    with pytest.raises(ConfigError, match=rf"--resume: .*{match}"):
        run(make_config(**({"steps": 5, "model": begun.config.model} | changes)), resume=which)
    assert tree(begun.config.output) == before
    assert not (pictures.parent / "other").exists()


def test_other_settings_are_refused_before_the_model_is_loaded(begun, make_config, run, tmp_path):
    with pytest.raises(ConfigError, match=r"--resume: .*model was .*, is '.*no-such-model'"):
        run(make_config(steps=5, model=str(tmp_path / "no-such-model")), resume="latest")


def test_overwriting_removes_checkpoints_that_are_not_whole_too(run, begun, make_config):
    folder = begun.config.output / "checkpoints"
    (folder / "step-000004" / "progress.json").unlink()
    (folder / ".step-000009.partial").mkdir()
    run(make_config(steps=5, checkpoint_every=0), overwrite=True)
    assert list(folder.iterdir()) == []


def test_a_damaged_earlier_checkpoint_costs_no_later_one(run, begun):
    damaged = begun.config.output / "checkpoints" / "step-000002" / "state" / "optimizer.bin"
    data = damaged.read_bytes()
    damaged.write_bytes(data[:100] + bytes(200) + data[300:])
    before = tree(begun.config.output)
    with pytest.raises(ConfigError, match="step-000002"):
        run(begun.config, resume="2")
    after = tree(begun.config.output)
    assert {name: after[name] for name in before if "tfevents" not in name} == {
        name: value for name, value in before.items() if "tfevents" not in name
    }


def test_going_on_in_another_folder_costs_nothing_that_is_there(run, begun, make_config, tmp_path):
    other, _ = run(make_config(steps=2, seed=7, output=tmp_path / "other"))
    before = tree(other.config.output)
    checkpoint = begun.config.output / "checkpoints" / "step-000002"
    config = begun.config.model_copy(update={"output": tmp_path / "other"})
    with pytest.raises(ConfigError, match="holds the results of an earlier run"):
        run(config, resume=str(checkpoint))
    assert tree(other.config.output) == before
    run(config, resume=str(checkpoint), overwrite=True)
    assert records(config) == records(begun.config)
