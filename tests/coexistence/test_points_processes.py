"""Two processes on the CPU: DDP trains a point path as one process does; blocks that FSDP shards refuse points."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from diffusers import SD3Transformer2DModel
from points_kit import clouds, drawn, moved, noisy, prompt, with_points
from positions_kit import picture
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import mmpreproj
from mmpreproj.patching.files.format import read_weights
from mmpreproj.points import add_point_path, point_velocity

WORLD = 2


def build() -> nn.Module:
    """A transformer whose adapter alone is trained, the same in every process."""
    torch.manual_seed(0)
    model = SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=24,
        caption_projection_dim=32,
        pooled_projection_dim=20,
        pos_embed_max_size=8,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    ).requires_grad_(False)
    mmpreproj.patch(model, with_points())
    with torch.no_grad():
        for parameter in mmpreproj.parameters(model):
            parameter.normal_(std=0.2)
    return model


def loss_of_both(model: nn.Module, rank: int | None = None) -> Tensor:
    """A picture with a cloud, and the velocity of points; of one process's half where a rank is given."""
    part = slice(None) if rank is None else slice(rank, rank + 1)
    inputs = {key: value[part] for key, value in picture(8, 8, 5).items()}
    given = {key: value[part] for key, value in clouds().items()}
    drawing = model(**inputs, joint_attention_kwargs=given, return_dict=False)[0]
    velocity = point_velocity(model, noisy()[part], **{key: value[part] for key, value in prompt().items()})
    return drawing.square().mean() + (velocity - 1).square().mean()


def step(model: nn.Module, rank: int | None = None) -> nn.Module:
    """Take one step of SGD on the adapter."""
    optimizer = torch.optim.SGD(mmpreproj.parameters(model), lr=0.5)
    loss_of_both(model, rank).backward()
    assert all(parameter.grad is not None for parameter in mmpreproj.parameters(model))
    optimizer.step()
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run this file as two processes, and return the folder that they wrote to."""
    folder = tmp_path_factory.mktemp("processes")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), str(folder)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(WORLD)
    ]
    try:
        logs = [process.communicate(timeout=240)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert all(process.returncode == 0 for process in processes), "\n".join(logs)
    return folder


def test_a_step_in_two_processes_is_the_step_in_one(folder, tmp_path):
    expected = read_weights(mmpreproj.save(step(build()), tmp_path, card=False))
    files = [read_weights(folder / f"ddp{rank}") for rank in range(WORLD)]
    assert files[0].keys() == expected.keys()
    start = read_weights(mmpreproj.save(build(), tmp_path / "start", card=False))
    for key, value in expected.items():
        assert not torch.equal(value, start[key])
        assert torch.equal(files[0][key], files[1][key])
        torch.testing.assert_close(files[0][key], value, rtol=1e-4, atol=1e-6, msg=key)


def test_sharded_blocks_are_refused_in_every_process(folder):
    """Whether clouds or points are given, and a new path too; see `refuse_shards`."""
    assert all((folder / f"refused{rank}").exists() for rank in range(WORLD))


def refuse_shards(rank: int, folder: Path) -> None:
    mesh = init_device_mesh("cpu", (WORLD,))
    model, plain = build(), build()
    for block in model.transformer_blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    message = "points cannot go through blocks that FSDP shards over processes.*DistributedDataParallel"
    with torch.no_grad():
        torch.testing.assert_close(drawn(model), drawn(plain))
    with pytest.raises(RuntimeError, match=message):
        drawn(model, clouds())
    other = build()
    mmpreproj.unpatch(other)
    mmpreproj.patch(other)
    for block in other.transformer_blocks:
        fully_shard(block, mesh=mesh)
    with pytest.raises(ValueError, match=r"sharded across processes already.*to a model without shards"):
        add_point_path(other)
    blocks_alone = build()
    for block in blocks_alone.transformer_blocks:
        fully_shard(block, mesh=mesh)
    with pytest.raises(RuntimeError, match=message):
        moved(blocks_alone)
    older = build().requires_grad_(True)
    for index, block in enumerate(older.transformer_blocks):
        older.transformer_blocks[index] = FullyShardedDataParallel(block, device_id=torch.device("cpu"))
    wrapped = build().requires_grad_(True)
    wrapped.preproj_points = FullyShardedDataParallel(wrapped.preproj_points, device_id=torch.device("cpu"))
    mmpreproj.check_intact(wrapped)
    with torch.no_grad():
        torch.testing.assert_close(drawn(older), drawn(plain))
        torch.testing.assert_close(drawn(wrapped), drawn(plain))
    for run in (moved, lambda one: drawn(one, clouds())):
        with pytest.raises(RuntimeError, match=message):
            run(older)
    (folder / f"refused{rank}").touch()


def main(rank: int, folder: Path) -> None:
    """Do the work of one process."""
    torch.set_num_threads(1)
    meeting = f"file://{folder / 'meeting'}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=WORLD, timeout=timedelta(seconds=60))
    try:
        model = DistributedDataParallel(build())
        mmpreproj.save(step(model, rank), folder / f"ddp{rank}", card=False)
        refuse_shards(rank, folder)
        dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
