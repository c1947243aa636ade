"""The trainer on two processes: DDP and FSDP2 do what one process does, save whole files, and end together."""

from __future__ import annotations

import dataclasses
import errno
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dist_cp
from accelerate.state import PartialState
from accelerate.utils import DeepSpeedPlugin, DistributedType, FullyShardedDataParallelPlugin
from diffusers import SD3Transformer2DModel
from processes_kit import WORLD, build_patched, meeting, run_in_processes
from torch import nn
from training_kit import (
    CASES,
    plain_accelerator,
    random_pictures,
    run,
    sharding_accelerator,
    told_of_others,
)

import mmpreproj
from mmpreproj import PreProjConfig
from mmpreproj.data.encoding import LatentsInMemory
from mmpreproj.patching.files.format import read_weights
from mmpreproj.training import checkpoints as checkpoints_module
from mmpreproj.training import processes
from mmpreproj.training.checkpoints import checkpoints
from mmpreproj.training.config import ConfigError
from mmpreproj.training.loop import TrainingDivergedError, TrainingStoppedError, train
from mmpreproj.training.processes import on_every_process, on_main_process
from mmpreproj.training.sharing import check_sharing
from mmpreproj.training.trainable import select_trainable

ACCELERATORS = {"ddp": plain_accelerator, "fsdp2": sharding_accelerator}
RUNS = [(way, name) for name, case in CASES.items() for way in case.ways]
SAVED = [(way, name) for way, name in RUNS if "checkpoint_every" not in CASES[name].settings]
RESUMED = [("fsdp2", "adapter"), ("fsdp2", "full")]  # under DDP, see where one is asked to stop


# --- what each of two processes does -----------------------------------------------------------------------------


def train_cases(rank: int, folder: Path) -> None:
    """Take every run, and take some again from their first checkpoint."""
    for way, name in RUNS:
        case, place = CASES[name], folder / way / name
        config = case.config(place, processes=WORLD)
        first = place / "checkpoints" / "step-000003"
        for told, resume in {"told": None, **({"again": first} if (way, name) in RESUMED else {})}.items():
            given = case.model(config), case.pictures(), config, ACCELERATORS[way](config)
            torch.save(run(*given, held_out=case.held_out(), resume=resume), folder / f"{way}-{name}-{told}-{rank}.pt")


def stop_one(rank: int, folder: Path) -> None:
    """Ask one process to stop after its second step, and go on."""
    case = CASES["adapter"]
    config = case.config(folder / "stopped", processes=WORLD, checkpoint_every=0)

    def ask(record: Any) -> None:
        if rank == 1 and record.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(TrainingStoppedError) as stopped:
        train(case.model(config), case.pictures(), config, accelerator=plain_accelerator(config), on_step=ask)
    again = run(
        case.model(config),
        case.pictures(),
        config,
        plain_accelerator(config),
        resume=stopped.value.checkpoint,
    )
    asked = stopped.value.signal and stopped.value.signal.name
    torch.save((stopped.value.step, asked, again), folder / f"stopped-{rank}.pt")


def diverge(rank: int, folder: Path) -> None:
    """Give one process a picture without a finite loss; and one, of a weight, a part that is not finite."""
    case = CASES["full"]
    values = torch.stack([torch.full((4, 8, 8), torch.nan if place == 1 else 0.5) for place in range(4)])
    poisoned = dataclasses.replace(random_pictures(4), latents=LatentsInMemory(values))
    for way, make in ACCELERATORS.items():
        config = case.config(folder / "diverged" / way, processes=WORLD)
        with pytest.raises(TrainingDivergedError) as met:
            train(case.model(config), poisoned, config, accelerator=make(config))
        (folder / f"diverged-{way}-{rank}").write_text(str(met.value), encoding="utf-8")
    config = case.config(folder / "diverged" / "part", processes=WORLD, steps=1)
    model = case.model(config)

    def break_part(record: Any) -> None:
        if rank == 1 and record.step == 1:
            with torch.no_grad():
                model.transformer_blocks[0].attn.to_q.weight.to_local().fill_(torch.nan)

    with pytest.raises(TrainingDivergedError, match="a trained weight is not finite after the update at step 1"):
        train(model, random_pictures(), config, accelerator=sharding_accelerator(config), on_step=break_part)
    (folder / f"broken-{rank}").touch()


FAILING = {  # on one process, by the function that fails there
    "the folder": ("ddp", 0, checkpoints_module, "clean"),
    "the state": ("ddp", 0, accelerate.accelerator, "save_accelerator_state"),
    "another's random numbers": ("ddp", 1, accelerate.accelerator, "save_accelerator_state"),
    "the shared state": ("fsdp2", 0, accelerate.accelerator, "save_accelerator_state"),
    "a part of the shared state": ("fsdp2", 1, dist_cp.FileSystemWriter, "write_data"),
    "the adapter": ("fsdp2", 0, checkpoints_module, "write_weights"),
    "the end": ("ddp", 0, checkpoints_module, "_put_in_place"),
}


def fill_disk(rank: int, folder: Path) -> None:
    """Let one process find no room while a checkpoint is written, and tell what each then ends with."""

    def fail(*given: Any, **settings: Any) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    case = CASES["adapter"]
    for what, (way, failing, place, name) in FAILING.items():
        config = case.config(folder / "full disk" / what, processes=WORLD, steps=2, checkpoint_every=1)
        with pytest.MonkeyPatch.context() as patching:

            def fill(record: Any, place: Any = place, name: str = name, failing: int = failing) -> None:
                if record.step == 2 and rank == failing:
                    patching.setattr(place, name, fail)

            with pytest.raises(OSError) as met:
                train(case.model(config), case.pictures(), config, accelerator=ACCELERATORS[way](config), on_step=fill)
        (folder / f"full disk-{what}-{rank}").write_text(str(met.value), encoding="utf-8")


def leave_other_alone(rank: int, folder: Path) -> None:
    """Fail on one process for a reason of its own, and see what becomes of the other."""
    case = CASES["adapter"]
    config = case.config(folder / "alone", processes=WORLD, checkpoint_every=0)

    def fail(record: Any) -> None:
        if rank == 1 and record.step == 2:
            raise OSError("no space left")

    met = OSError if rank == 1 else RuntimeError  # gloo's, once the other is gone
    try:
        train(case.model(config), case.pictures(), config, accelerator=plain_accelerator(config), on_step=fail)
    except met as error:
        (folder / f"alone-{rank}").write_text(str(error), encoding="utf-8")


# --- what they left ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run this file as two processes, and return the folder that they wrote to."""
    return run_in_processes(__file__, tmp_path_factory.mktemp("processes"))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[dict[str, Any], Path]]:
    """The same runs on one process: what they told, and where they wrote."""
    found = {}
    for name, case in CASES.items():
        config = case.config(tmp_path_factory.mktemp(name))
        told = run(case.model(config), case.pictures(), config, plain_accelerator(config), held_out=case.held_out())
        found[name] = told, config.output
    return found


def read(folder: Path, name: str) -> list[Any]:
    """What each of the processes wrote."""
    return [torch.load(folder / f"{name}-{rank}.pt") for rank in range(WORLD)]


def check_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for key in ("losses", "norms", "held_out"):
        assert found[key] == pytest.approx(expected[key], rel=1e-5), key
    check_weights(found["weights"], expected["weights"])


def check_weights(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-6, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize(("way", "name"), [one for one in RUNS if one[1] != "half"])
def test_two_processes_train_as_one_does_on_the_same_global_batch(folder, alone, way, name):
    expected, _ = alone[name]
    start = CASES[name].model(CASES[name].config(folder)).state_dict()
    assert any(not torch.equal(start[key], value) for key, value in expected["weights"].items())
    assert len(expected["norms"]) == 6
    for found in read(folder, f"{way}-{name}-told"):
        check_same(found, expected)


def test_half_precision_is_autocast_under_fsdp2_too(folder, alone):
    """Accelerate's own policy would round the timesteps to half precision."""
    for ddp, fsdp2 in zip(read(folder, "ddp-half-told"), read(folder, "fsdp2-half-told"), strict=True):
        check_same(fsdp2, ddp)
        # Of one process, to what half precision can tell: it rounds otherwise in batches of another size.
        assert fsdp2["losses"] == pytest.approx(alone["half"][0]["losses"], rel=1e-3)


@pytest.mark.parametrize(("way", "name"), RUNS)
def test_both_processes_have_the_same_bits_at_the_end(folder, way, name):
    first, second = read(folder, f"{way}-{name}-told")
    assert all(torch.equal(value, second["weights"][key]) for key, value in first["weights"].items())
    assert first["losses"] == second["losses"]


@pytest.mark.parametrize(("way", "name"), RESUMED)
def test_a_run_that_is_resumed_on_two_processes_goes_on_as_if_it_had_never_stopped(folder, way, name):
    for whole_run, rest in zip(read(folder, f"{way}-{name}-told"), read(folder, f"{way}-{name}-again"), strict=True):
        assert rest["norms"] == pytest.approx(whole_run["norms"][3:], rel=1e-6)
        check_weights(rest["weights"], whole_run["weights"])


@pytest.mark.parametrize(("way", "name"), SAVED)
def test_the_saved_weights_are_whole_and_give_the_trained_model_on_one_process(folder, alone, way, name):
    """Of the runs with an average, too, checkpoints hold the weights themselves; so both are read from files."""
    places = folder / way / name, alone[name][1]
    found, expected = (load(place / "checkpoints" / "step-000006", CASES[name].adapter) for place in places)
    check_weights(found.state_dict(), expected.state_dict())
    generator = torch.Generator().manual_seed(1)
    inputs = {
        "hidden_states": torch.randn(2, 4, 8, 8, generator=generator),
        "encoder_hidden_states": torch.randn(2, 5, 24, generator=generator),
        "pooled_projections": torch.randn(2, 20, generator=generator),
        "timestep": torch.tensor([100.0, 700.0]),
    }
    with torch.no_grad():
        outputs = [model.eval()(**inputs, return_dict=False)[0] for model in (found, expected)]
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)


def load(checkpoint: Path, adapter: PreProjConfig) -> nn.Module:
    """Put what a checkpoint holds onto its base, or onto the one that it holds."""
    if (checkpoint / "transformer").is_dir():
        model = SD3Transformer2DModel.from_pretrained(checkpoint / "transformer")
        mmpreproj.load(model, checkpoint / "preproj")
        return model
    model = build_patched(adapter)
    mmpreproj.unpatch(model)
    if (checkpoint / "lora").is_dir():
        model.load_lora_adapter(checkpoint / "lora" / "pytorch_lora_weights.safetensors", prefix="transformer")
    mmpreproj.load(model, checkpoint)
    return model


def test_only_whole_files_are_left(folder):
    assert not list(folder.rglob(".*partial*")) and not list(folder.rglob(".*removed*"))
    for way, name in SAVED:
        there = checkpoints(folder / way / name / "checkpoints")
        assert [path.name for path in there] == ["step-000003", "step-000006"]
        for path in (folder / way / name).rglob("adapter_model.safetensors"):
            assert all(torch.isfinite(value).all() for value in read_weights(path.parent).values())


def test_both_stop_after_the_same_step_when_one_is_asked_to_and_can_go_on(folder, alone):
    (first, unasked, again), (second, asked, other) = read(folder, "stopped")
    assert first == second == 3  # asked for after the second
    assert (unasked, asked) == (None, "SIGTERM")
    assert [path.name for path in checkpoints(folder / "stopped" / "checkpoints")] == ["step-000003"]
    for found in (again, other):
        check_weights(found["weights"], alone["adapter"][0]["weights"])


@pytest.mark.parametrize("way", ["ddp", "fsdp2"])
def test_both_stop_at_the_same_step_when_one_diverges(folder, way):
    first, second = ((folder / f"diverged-{way}-{rank}").read_text() for rank in range(WORLD))
    assert first == second
    assert "the loss is nan at step 1" in first


def test_both_stop_when_the_part_that_one_has_of_a_weight_is_not_finite(folder):
    """What each must raise is in `diverge`."""
    assert all((folder / f"broken-{rank}").exists() for rank in range(WORLD))


@pytest.mark.parametrize("what", FAILING)
def test_both_are_told_when_one_cannot_write_its_part_of_a_checkpoint(folder, what):
    first, second = ((folder / f"full disk-{what}-{rank}").read_text() for rank in range(WORLD))
    assert first == second
    assert "the checkpoint of step 2 could not be written (no space left); the last good checkpoint is" in first
    assert "step-000001, go on with --resume latest" in first
    assert [
        path.name for path in checkpoints_module.checkpoint_folders(folder / "full disk" / what / "checkpoints")
    ] == ["step-000001"]


@pytest.mark.parametrize("name", ["adapter", "lora", "full"])
def test_the_state_of_shared_weights_holds_what_trains_alone(folder, name):
    config = CASES[name].config(folder)
    model = CASES[name].model(config)
    select_trainable(model, config)
    trained = {key for key, value in model.named_parameters() if value.requires_grad}
    (place,) = (folder / "fsdp2" / name / "checkpoints" / "step-000003" / "state").glob("pytorch_model_fsdp_*")
    saved = dist_cp.FileSystemReader(place).read_metadata().state_dict_metadata
    parameters = dict(model.named_parameters())
    found = {next((own for own in parameters if key.endswith(f".{own}")), None) for key in saved} - {None}
    assert found == trained
    assert (trained == set(parameters)) == (name == "full")


def test_a_process_whose_partner_fails_does_not_wait_for_ever(folder):
    assert (folder / "alone-1").read_text() == "no space left"
    assert (folder / "alone-0").exists()


# --- one for all -------------------------------------------------------------------------------------------------


class Unsendable(Exception):
    """An error whose class pickle cannot build again."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(first)


def test_one_process_has_its_own_value_and_error(tmp_path):
    accelerator = plain_accelerator(CASES["adapter"].config(tmp_path))
    assert on_main_process(accelerator, lambda: 3) == 3
    assert on_every_process(lambda: "a") == ["a"]
    error = Unsendable(1, 2)

    def fail() -> None:
        raise error

    with pytest.raises(Unsendable) as met:
        on_main_process(accelerator, fail)
    assert met.value is error
    assert str(processes._sendable(error)) == "Unsendable: 1"


# --- what cannot be trained so -----------------------------------------------------------------------------------


def test_points_are_refused_where_weights_are_shared_out(tmp_path):
    with pytest.raises(ConfigError, match=r"adapter\.points: .* FSDP does not gather; .*ddp\.yaml or zero2\.yaml"):
        sharding_accelerator(CASES["points"].config(tmp_path))


def test_the_first_fsdp_is_refused(tmp_path):
    accelerator = sharding_accelerator(CASES["full"].config(tmp_path))
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=1)
    with pytest.raises(ConfigError, match=r"FSDP of version 1 .*; set fsdp_version: 2"):
        check_sharing(CASES["full"].config(tmp_path), accelerator)


def test_an_average_is_refused_where_zero_3_leaves_no_weights(tmp_path):
    config = CASES["adapter"].config(tmp_path)
    accelerator = plain_accelerator(config)
    # Accelerate makes no accelerator for DeepSpeed unless it is installed; what is noted is what it would note.
    PartialState._shared_state["distributed_type"] = DistributedType.DEEPSPEED
    accelerator.state.distributed_type = DistributedType.DEEPSPEED
    accelerator.state.deepspeed_plugins = DeepSpeedPlugin(zero_stage=3)
    check_sharing(CASES["full"].config(tmp_path), accelerator)
    with pytest.raises(ConfigError, match=r"ema: ZeRO-3 .*; use fsdp2\.yaml, or leave ema out"):
        check_sharing(config, accelerator)


if __name__ == "__main__":
    with meeting() as place, told_of_others(place[0]):
        for work in (train_cases, stop_one, diverge, fill_disk):
            work(*place)
    rank, there = int(sys.argv[1]), Path(sys.argv[2])
    store = f"file://{there / 'second meeting'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=30))
    leave_other_alone(rank, there)
