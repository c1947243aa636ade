"""Checkpoints: whole or not there, the newest few kept, loadable by what they are for."""

import json
import os
import re
import resource
import shutil
import subprocess

import pytest
import torch
from diffusers import SD3Transformer2DModel
from safetensors.torch import load_file

import mmpreproj
from mmpreproj.training import checkpoints as module
from mmpreproj.training import progress as progress_module
from mmpreproj.training.checkpoints import (
    checkpoint_folders,
    checkpoints,
    clean,
    drop_later,
    find_checkpoint,
    load_checkpoint,
    write_checkpoint,
)
from mmpreproj.training.config import ConfigError
from mmpreproj.training.loop import make_accelerator
from mmpreproj.training.lora import inject_lora
from mmpreproj.training.progress import Progress
from mmpreproj.training.stepper import Scheduler, Stepper
from mmpreproj.training.trainable import select_trainable
from mmpreproj.training.weights import write_weights


@pytest.fixture
def make_stepper(make_transformer, make_pictures, make_config, shake):
    """Build what trains a shaken adapter, and whatever else is asked for."""

    def make(**changes):
        config = make_config(**changes)
        transformer = make_transformer()
        if config.adapter is not None:
            mmpreproj.patch(transformer)
            shake(transformer)
        if config.lora is not None:
            inject_lora(transformer, config.lora)
        select_trainable(transformer, config)
        accelerator = make_accelerator(config)
        return Stepper(transformer, make_pictures(), config, accelerator=accelerator, scheduler=Scheduler())

    return make


@pytest.fixture
def stepper(make_stepper):
    return make_stepper()


@pytest.fixture
def folder(make_config):
    return make_config().output / "checkpoints"


def write(stepper, step):
    return write_checkpoint(stepper, Progress(step=step, pictures=2 * step, seconds=0.5, samples="digest"))


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def same_adapter(first, second):
    pairs = zip(mmpreproj.named_parameters(first), mmpreproj.named_parameters(second), strict=True)
    return all(name == other and torch.equal(value, found) for (name, value), (other, found) in pairs)


def tree(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# --- which there are -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [1, 2, 4])
def test_the_newest_few_are_kept_oldest_first(make_stepper, folder, keep):
    stepper = make_stepper(keep_checkpoints=keep)
    for step in (5, 50, 500, 5000):
        write(stepper, step)
    expected = ["step-000005", "step-000050", "step-000500", "step-005000"][-keep:]
    assert [path.name for path in checkpoints(folder)] == expected == names(folder)


def test_steps_are_ordered_as_numbers(make_stepper, folder):
    stepper = make_stepper(keep_checkpoints=3)
    for step in (2, 999999, 1000000):
        write(stepper, step)
    assert [path.name for path in checkpoints(folder)] == ["step-000002", "step-999999", "step-1000000"]


def test_only_folders_of_checkpoints_are_listed(stepper, folder):
    write(stepper, 1)
    (folder / "step-notes.txt").write_text("mine")
    (folder / "step-000002.txt").write_text("mine")
    for other in ("other", "step-000001-best", "step-x", "step-000003"):
        (folder / other).mkdir()
    assert [path.name for path in checkpoints(folder)] == ["step-000001"]
    assert checkpoints(folder / "nowhere") == []


def lose_progress(path):
    (path / "progress.json").unlink()


def break_progress(path):
    (path / "progress.json").write_text('{"step": 2, "pict')


def lose_a_file(path):
    (path / "state" / "optimizer.bin").unlink()


def cut_a_file(path):
    os.truncate(path / "adapter_model.safetensors", 20)


def change_a_type(path):
    values = json.loads((path / "progress.json").read_text())
    (path / "progress.json").write_text(json.dumps(values | {"step": "2"}))


def rename(path):
    values = json.loads((path / "progress.json").read_text())
    (path / "progress.json").write_text(json.dumps(values | {"step": 7}))


FAULTS = {
    "no progress": (lose_progress, r"is not whole: it has no progress\.json"),
    "half a progress": (break_progress, r"is not whole: progress\.json is damaged \("),
    "a step that is no number": (change_a_type, r"is not whole: progress\.json is damaged \((.|\n)*step"),
    "a missing file": (lose_a_file, r"is not whole: state/optimizer\.bin is missing"),
    "a file cut short": (cut_a_file, r"is not whole: adapter_model\.safetensors has 20 bytes of \d+"),
    "another name": (rename, r"step-000002 is of step 7"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_not_whole_is_named_and_never_the_latest(stepper, folder, caplog, fault):
    break_it, match = FAULTS[fault]
    first, second = write(stepper, 1), write(stepper, 2)
    break_it(second)
    assert checkpoints(folder) == [first]
    assert find_checkpoint(folder, "latest") == first
    assert "step-000002" in caplog.text and "going on from an earlier one" in caplog.text
    for which in ("2", "step-000002", str(second)):
        with pytest.raises(ConfigError, match=rf"--resume: .*{match}(.|\n)*; there are step-000001"):
            find_checkpoint(folder, which)


def flip(path, place=-1):
    """Change a byte of a file, and not its length."""
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def test_a_changed_byte_of_any_file_is_named_and_never_the_latest(stepper, folder, caplog):
    first, second = write(stepper, 1), write(stepper, 2)
    told = json.loads((second / "progress.json").read_text())
    for name in set(tree(second)) - {"progress.json"}:
        if told["files"][name] == 0:
            continue
        caplog.clear()
        flip(second / name)
        assert find_checkpoint(folder, "latest") == first, name
        assert f"step-000002 is not whole: {name} has other bytes than were written; going on" in caplog.text
        with pytest.raises(ConfigError, match=rf"{re.escape(name)} has other bytes than were written; there are"):
            find_checkpoint(folder, "2")
        flip(second / name)
        assert find_checkpoint(folder, "latest") == second, name


def test_where_every_checkpoint_is_damaged_the_newest_fault_is_told(stepper, folder):
    for step in (1, 2):
        flip(write(stepper, step) / "adapter_model.safetensors")
    with pytest.raises(
        ConfigError, match=r"^--resume: no checkpoint 'latest' to go on from; .*step-000002 is not whole: adapter_mod"
    ):
        find_checkpoint(folder, "latest")


def test_checkpoints_are_listed_without_reading_their_files(stepper, folder, monkeypatch):
    write(stepper, 1)
    flip(write(stepper, 2) / "adapter_model.safetensors")
    monkeypatch.setattr(progress_module, "file_digest", lambda path: pytest.fail(f"{path} is read"))
    assert [path.name for path in checkpoints(folder)] == ["step-000001", "step-000002"]
    assert "step-000002" in module.tell_last(folder)


def test_a_checkpoint_without_digests_is_still_taken(stepper, folder):
    path = write(stepper, 1)
    values = json.loads((path / "progress.json").read_text())
    del values["digests"]
    (path / "progress.json").write_text(json.dumps(values))
    assert find_checkpoint(folder, "latest") == path


def test_no_file_of_a_checkpoint_may_be_missing(stepper, folder):
    path = write(stepper, 1)
    assert set(json.loads((path / "progress.json").read_text())["files"]) == set(tree(path)) - {"progress.json"}
    for name in tree(path):
        moved = (path / name).rename(folder / "elsewhere")
        assert checkpoints(folder) == [], name
        moved.rename(path / name)
    assert checkpoints(folder) == [path]


def test_a_checkpoint_is_found_by_latest_step_name_or_path(stepper, folder):
    first, second = write(stepper, 1), write(stepper, 20)
    assert find_checkpoint(folder, "latest") == second
    assert find_checkpoint(folder, "1") == find_checkpoint(folder, "step-000001") == first
    assert find_checkpoint(folder / "nowhere", str(first)) == first


@pytest.mark.parametrize("which", ["latest", "3", "step-000003", "nowhere/step-000003", "."])
def test_without_that_checkpoint_those_that_there_are_are_listed(stepper, folder, which):
    with pytest.raises(ConfigError, match=rf"--resume: no checkpoint '{which}' to go on from; .*holds none"):
        find_checkpoint(folder, which)
    write(stepper, 1)
    if which != "latest":
        with pytest.raises(ConfigError, match=rf"no checkpoint '{which}' to go on from; there are step-000001"):
            find_checkpoint(folder, which)


# --- what they hold --------------------------------------------------------------------------------------------------


def test_a_probe_checkpoint_is_an_adapter(stepper, make_transformer, predict):
    path = write(stepper, 1)
    other = make_transformer()
    mmpreproj.load(other, path)
    assert same_adapter(stepper.transformer, other)
    stepper.restore_forward()
    assert torch.equal(predict(other), predict(stepper.transformer))


def test_a_full_checkpoint_is_a_stock_transformer_and_an_adapter(make_stepper, make_transformer, predict):
    stepper = make_stepper(mode="full")
    before = predict(stepper.transformer)
    path = write(stepper, 1)
    assert torch.equal(predict(stepper.transformer), before)
    stock, notes = SD3Transformer2DModel.from_pretrained(path / "transformer", output_loading_info=True)
    assert not (notes["missing_keys"] or notes["unexpected_keys"])
    base = make_transformer().state_dict()
    assert all(torch.equal(value, base[key]) for key, value in stock.state_dict().items())
    mmpreproj.load(stock, path / "preproj")
    assert torch.equal(predict(stock.eval()), before)


def test_an_unpatched_model_is_written_whole_in_mode_full(make_transformer, make_config, tmp_path, predict):
    transformer = make_transformer()
    write_weights(transformer, tmp_path / "weights", make_config(mode="full", adapter=None))
    assert names(tmp_path / "weights") == ["transformer"]
    stock = SD3Transformer2DModel.from_pretrained(tmp_path / "weights" / "transformer").eval()
    assert torch.equal(predict(stock), predict(transformer))


def test_a_checkpoint_of_a_lora_has_it_as_diffusers_reads_it(make_stepper, make_transformer):
    from diffusers import StableDiffusion3Pipeline

    stepper = make_stepper(adapter=None, lora={"rank": 2})
    path = write(stepper, 1)
    assert not (path / "adapter_config.json").exists()
    trained = load_file(path / "state" / "trained.safetensors")
    fresh = make_transformer()
    read, metadata = StableDiffusion3Pipeline.lora_state_dict(path / "lora", return_lora_metadata=True)
    StableDiffusion3Pipeline.load_lora_into_transformer(read, fresh, adapter_name="default", metadata=metadata)
    loaded = {name: value for name, value in fresh.named_parameters() if "lora_" in name}
    assert loaded.keys() == trained.keys()
    assert all(torch.equal(loaded[name], value) for name, value in trained.items())


def test_where_the_base_is_goes_into_the_adapters_file(make_stepper):
    path = write(make_stepper(model="some/base"), 1)
    assert '"name_or_path": "some/base"' in (path / "adapter_config.json").read_text()


def test_state_holds_what_trains_and_not_the_base(stepper):
    path = write(stepper, 1)
    trained = load_file(path / "state" / "trained.safetensors")
    assert set(trained) == {name for name, value in stepper.transformer.named_parameters() if value.requires_grad}
    assert "model.safetensors" not in names(path / "state")


def test_what_a_checkpoint_holds_comes_back(make_stepper, shake):
    stepper = make_stepper(ema={"decay": 0.5})
    path = write(stepper, 1)
    kept = {name: value.detach().clone() for name, value in stepper.transformer.named_parameters()}
    shake(stepper.transformer, seed=9)
    stepper.average.update()
    load_checkpoint(path, stepper)
    for name, value in stepper.transformer.named_parameters():
        assert torch.equal(value, kept[name]), name
    assert stepper.average.state_dict()["updates"] == 0


# --- killed, and full disks ------------------------------------------------------------------------------------------


@pytest.fixture
def kill_before(monkeypatch):
    """End the process before the nth call of a function that changes the disk."""

    def arrange(name, nth):
        calls, stock = [], getattr(os, name)

        def counted(*args, **settings):
            calls.append(args)
            if len(calls) == nth:
                os._exit(9)
            return stock(*args, **settings)

        monkeypatch.setattr(os, name, counted)

    return arrange


def in_child(work):
    """Run something in a process of its own, which may end at any instant; return its status."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException:  # pytest goes on in the parent alone
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("keep", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("again", [False, True], ids=["a new step", "a step again"])
@pytest.mark.parametrize(
    "call",
    ["replace", "rmdir", *(pytest.param(call, marks=pytest.mark.slow) for call in ("unlink", "mkdir", "fsync"))],
)
def test_killed_at_any_change_of_the_disk_the_newest_is_always_there(
    make_stepper, folder, kill_before, monkeypatch, again, keep, call
):
    stepper = make_stepper(keep_checkpoints=keep)
    write(stepper, 1)
    before = write(stepper, 2)
    step = 2 if again else 3
    pristine = shutil.copytree(folder, folder.with_name("pristine"))
    for nth in range(1, 100):

        def save(nth=nth):
            kill_before(call, nth)
            write(stepper, step)

        status = in_child(save)
        found = find_checkpoint(folder, "latest")
        assert found.name in {before.name, f"step-{step:06d}"}, nth
        load_checkpoint(found, stepper)
        if status == 0:
            break
        shutil.rmtree(folder)
        shutil.copytree(pristine, folder)  # for the next instant
    assert status == 0 and nth > 1
    assert not [name for name in names(folder) if name.startswith(".")]


def test_what_killed_saves_have_left_is_removed_at_the_next(stepper, folder):
    write(stepper, 1)
    for name in (".step-000001.removed", ".step-000002.partial", ".step-000009.partial"):
        (folder / name / "state").mkdir(parents=True)
        (folder / name / "state" / "half").write_bytes(b"half")
    (folder / ".mine").mkdir()
    write(stepper, 3)
    assert names(folder) == [".mine", "step-000001", "step-000003"]


def test_a_checkpoint_that_was_whole_when_its_process_was_killed_counts(stepper, folder):
    first, second = write(stepper, 1), write(stepper, 2)
    second.rename(folder / ".step-000002.partial")
    assert checkpoints(folder) == [first]
    assert find_checkpoint(folder, "latest") == second
    clean(folder)
    assert names(folder) == ["step-000001", "step-000002"]


def test_everything_that_runs_left_is_listed_to_be_cleared(stepper, folder):
    write(stepper, 1)
    for name in (".step-000002.partial", ".step-000001.removed", "step-000003", "other"):
        (folder / name).mkdir()
    expected = {".step-000001.removed", ".step-000002.partial", "step-000001", "step-000003"}
    assert {path.name for path in checkpoint_folders(folder)} == expected


def test_a_step_written_again_replaces_the_first(stepper, folder, make_transformer, shake):
    write(stepper, 1)
    shake(stepper.transformer, seed=9)
    path = write(stepper, 1)
    other = make_transformer()
    mmpreproj.load(other, path)
    assert same_adapter(stepper.transformer, other)
    assert names(folder) == ["step-000001"]


def test_later_ones_are_of_a_run_that_was_given_up(make_stepper, folder):
    stepper = make_stepper(keep_checkpoints=9)
    for step in (1, 2, 5, 9):
        write(stepper, step)
    drop_later(folder, 5)
    assert names(folder) == ["step-000001", "step-000002", "step-000005"]
    write(stepper, 3)
    assert names(folder) == ["step-000001", "step-000002", "step-000003"]


def test_what_cannot_be_saved_leaves_no_trace_and_keeps_the_older_ones(make_stepper, folder, make_transformer):
    stepper = make_stepper(keep_checkpoints=1)
    write(stepper, 1)
    with torch.no_grad():
        next(mmpreproj.parameters(stepper.transformer)).fill_(float("nan"))
    with pytest.raises(ValueError, match="holds NaN"):
        write(stepper, 2)
    assert names(folder) == ["step-000001"]
    mmpreproj.load(make_transformer(), folder / "step-000001")


@pytest.fixture
def limit_files():
    """Let no file grow beyond so many bytes, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_is_full_at_any_file_keeps_the_last_good_one_and_names_it(make_stepper, folder, limit_files):
    stepper = make_stepper(keep_checkpoints=1)
    limits = sorted({len(data) - 1 for data in tree(write(stepper, 1)).values()})
    before = tree(folder)
    for limit in limits:
        limit_files(limit)
        with pytest.raises(
            OSError, match=r"step 2 could not be written \((.|\n)*good checkpoint is .*step-000001.*checkpoints"
        ):
            write(stepper, 2)
        limit_files(resource.RLIM_INFINITY)
        assert tree(folder) == before and names(folder) == ["step-000001"], limit
        load_checkpoint(find_checkpoint(folder, "latest"), stepper)
    write(stepper, 2)
    assert names(folder) == ["step-000002"]


def test_a_full_disk_before_the_first_checkpoint_is_told_as_such(stepper, folder, limit_files):
    limit_files(100)
    with pytest.raises(OSError, match=r"step 1 could not be written .*there is no checkpoint yet"):
        write(stepper, 1)
    assert names(folder) == []


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    if shutil.which("mount") is None or os.geteuid() != 0:
        pytest.skip("only root may mount")
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("a file system cannot be mounted here")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def test_a_real_disk_that_is_full_keeps_the_last_good_one(make_stepper, small_disk):
    stepper = make_stepper(output=small_disk, keep_checkpoints=2)
    folder, size = small_disk / "checkpoints", 0
    with pytest.raises(
        OSError, match=r"could not be written \((.|\n)*the last good checkpoint is .*step-\d+, go on"
    ) as failed:
        for step in range(1, 100):
            stepper.config = stepper.config.model_copy(update={"keep_checkpoints": step})
            size = len(list(write(stepper, step).parent.iterdir()))
    assert size > 0 and not [name for name in names(folder) if name.startswith(".")]
    last = find_checkpoint(folder, "latest")
    assert str(last) in str(failed.value)
    load_checkpoint(last, stepper)


def test_the_constants_that_others_read_are_those_of_the_files(stepper):
    path = write(stepper, 1)
    assert (path / module.STATE).is_dir() and (path / module.PROGRESS).is_file()
