"""Two processes on the CPU: DDP and FSDP2 train the adapter as one process does, and every file is whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import processes_kit
import pytest
import torch
import torch.distributed as dist
from processes_kit import WORLD, meeting, run_in_processes
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import mmpreproj
from mmpreproj import PreProjConfig
from mmpreproj.patching.files.format import read_weights

WEIGHTS = "adapter_model.safetensors"


def build_patched() -> nn.Module:
    """Build a tiny transformer whose adapter has weights of its own for each stream."""
    return processes_kit.build_patched(PreProjConfig(share="stream"))


def batch(rank: int | None = None) -> dict[str, Any]:
    """Build a batch of two, or the half of it that one process sees."""
    generator = torch.Generator().manual_seed(1)
    inputs = {
        "hidden_states": torch.randn(2, 4, 8, 8, generator=generator),
        "encoder_hidden_states": torch.randn(2, 5, 24, generator=generator),
        "pooled_projections": torch.randn(2, 20, generator=generator),
        "timestep": torch.tensor([100.0, 700.0]),
    }
    if rank is not None:
        inputs = {key: value[rank : rank + 1] for key, value in inputs.items()}
    return inputs | {"return_dict": False}


def step(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    """Take one step of SGD on the adapter; every parameter must have a gradient."""
    optimizer = torch.optim.SGD(mmpreproj.parameters(model), lr=0.5)
    loss = model(**inputs)[0].square().mean()
    loss.backward()
    for name, parameter in mmpreproj.named_parameters(model):
        assert parameter.grad is not None, name
    optimizer.step()
    return loss.detach()


def train_with_ddp(rank: int, folder: Path) -> None:
    model = build_patched()
    parallel = DistributedDataParallel(model)
    assert mmpreproj.is_patched(parallel)
    step(parallel, batch(rank))
    mmpreproj.save(parallel, folder / f"ddp{rank}", card=False)


def sharded() -> nn.Module:
    """Shard every block, and what is left, over the processes."""
    model, mesh = build_patched(), init_device_mesh("cpu", (WORLD,))
    for block in model.transformer_blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def train_with_fsdp(rank: int, folder: Path) -> None:
    model = sharded()
    assert all(hasattr(parameter, "full_tensor") for parameter in mmpreproj.parameters(model))
    step(model, batch(rank))
    mmpreproj.save(model, folder / f"fsdp{rank}", card=False)


def live_with_fsdp(rank: int, folder: Path) -> None:
    model, plain = sharded(), build_patched()

    def check() -> None:
        with torch.no_grad():
            torch.testing.assert_close(model(**batch())[0], plain(**batch())[0])

    check()
    assert mmpreproj.profile(model).rows == mmpreproj.profile(plain).rows
    for scale in (0.0, 0.4):
        for one in (model, plain):
            mmpreproj.set_scale(one, scale)
        check()
    with mmpreproj.disabled(model), mmpreproj.disabled(plain):
        check()
    with pytest.raises(ValueError, match=r"sharded across processes already.*patch first, then shard"):
        mmpreproj.patch(model, name="second")
    other = build_patched()
    with torch.no_grad():
        for parameter in mmpreproj.parameters(other):
            parameter.neg_()
    mmpreproj.save(other, folder / f"other{rank}", card=False)
    with pytest.raises(ValueError, match=r"sharded across processes already.*patch first, then shard"):
        mmpreproj.load(model, folder / f"other{rank}", replace=True)
    check()
    for one in (model, plain):
        mmpreproj.unpatch(one)
    check()
    (folder / f"lived{rank}").touch()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """The adapter's weights after one step in a single process that sees the whole batch."""
    model = build_patched()
    start = [parameter.detach().clone() for parameter in mmpreproj.parameters(model)]
    step(model, batch())
    for before, parameter in zip(start, mmpreproj.parameters(model), strict=True):
        assert not torch.equal(before, parameter)
    return read_weights(mmpreproj.save(model, tmp_path_factory.mktemp("single"), card=False))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run this file as two processes, and return the folder that they wrote to."""
    return run_in_processes(__file__, tmp_path_factory.mktemp("processes"))


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_a_step_in_two_processes_is_the_step_in_one(expected, folder, way):
    for rank in range(WORLD):
        found = read_weights(folder / f"{way}{rank}")
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-6, msg=key)


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_every_process_writes_the_same_whole_file(folder, way):
    assert (folder / f"{way}0" / WEIGHTS).read_bytes() == (folder / f"{way}1" / WEIGHTS).read_bytes()


def test_a_model_that_is_wrapped_already_is_refused(tmp_path):
    saved = mmpreproj.save(build_patched(), tmp_path / "adapter")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        wrapped = DistributedDataParallel(build_patched())
        for add in (lambda: mmpreproj.patch(wrapped, name="b"), lambda: mmpreproj.load(wrapped, saved, name="b")):
            with pytest.raises(ValueError, match=r"inside DistributedDataParallel.*patch or load first, then wrap"):
                add()
        assert mmpreproj.adapters(wrapped) == ("default",)
        mmpreproj.load(wrapped, saved, replace=True)
    finally:
        dist.destroy_process_group()


def test_what_is_asked_of_a_sharded_model_in_each_process_held(folder):
    """Profile, scale, switch and unpatch as on one process; new weights refused: see `live_with_fsdp`."""
    assert all((folder / f"lived{rank}").exists() for rank in range(WORLD))


if __name__ == "__main__":
    with meeting() as place:
        for work in (train_with_ddp, train_with_fsdp, live_with_fsdp):
            work(*place)
