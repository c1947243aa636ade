"""Two processes on the CPU: DDP trains a point path as one process does; blocks that FSDP shards refuse points."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from points_kit import clouds, drawn, moved, noisy, prompt, with_points
from positions_kit import picture
from processes_kit import WORLD, build_patched, meeting, run_in_processes
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import mmpreproj
from mmpreproj.patching.files.format import read_weights
from mmpreproj.points import add_point_path, point_velocity

pytestmark = pytest.mark.slow  # two processes


def build() -> nn.Module:
    """Build a tiny transformer with a point path."""
    return build_patched(with_points())


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
    return run_in_processes(__file__, tmp_path_factory.mktemp("processes"))


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


if __name__ == "__main__":
    with meeting() as (rank, folder):
        model = DistributedDataParallel(build())
        mmpreproj.save(step(model, rank), folder / f"ddp{rank}", card=False)
        refuse_shards(rank, folder)
