"""Training on one process and on two: the problems, the accelerators, and what a run leaves to be compared."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from processes_kit import WORLD, build_patched
from torch import Tensor, nn

from mmpreproj import PointPathConfig, PreProjConfig
from mmpreproj.core.sharding import whole
from mmpreproj.data.encoding import EncodedPictures, LatentsInMemory, TextEmbeddings
from mmpreproj.training.config import TrainConfig
from mmpreproj.training.loop import StepRecord, make_accelerator, train
from mmpreproj.training.lora import inject_lora

PLAIN, POINTS = PreProjConfig(), PreProjConfig(points=PointPathConfig(shown=8))
SGD = {"name": "sgd", "learning_rate": 1e-2, "warmup_steps": 0}  # Adam magnifies rounding where gradients are tiny


class LatentsOfTwoSizes(LatentsInMemory):
    """Latents of which every third is half as high; they cannot be parted."""

    def read(self, index: int, *, mirrored: bool = False) -> tuple[Tensor, Tensor | None]:
        value, deviation = super().read(index, mirrored=mirrored)
        return (value[:, :4] if index % 3 == 2 else value), deviation

    def subset(self, indices: Sequence[int]) -> LatentsOfTwoSizes:
        raise NotImplementedError("the size of these goes by their place")


def random_pictures(count: int = 10, *, seed: int = 11, sizes: int = 1) -> EncodedPictures:
    """Build encoded pictures that fit `processes_kit.build_patched`, of one size or of two."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    values = draw(count, 4, 8, 8)
    return EncodedPictures(
        latents=LatentsInMemory(values) if sizes == 1 else LatentsOfTwoSizes(values),
        captions=tuple(f"caption {index}" for index in range(count)),
        text=TextEmbeddings(draw(count, 5, 24), draw(count, 20), torch.arange(5) < 1 + torch.arange(count)[:, None]),
        text_index=torch.arange(count),
        empty=TextEmbeddings(draw(1, 5, 24), draw(1, 20), torch.arange(5)[None] < 2),
        groups=() if sizes == 1 else tuple(index % 3 == 2 for index in range(count)),
    )


def random_triplets(count: int = 10) -> EncodedPictures:
    """Build encoded pictures of which every fourth has no cloud."""
    clouds = torch.randn(count, 32, 3, generator=torch.Generator().manual_seed(5)) / 4
    there = torch.arange(count) % 4 != 1
    return random_pictures(count).with_clouds(clouds * there[:, None, None], there)


@contextmanager
def told_of_others(rank: int) -> Iterator[None]:
    """Tell accelerate of the processes that have met, as its launcher would on a machine without a GPU."""
    for name, value in (("RANK", rank), ("WORLD_SIZE", WORLD)):
        os.environ |= {name: str(value), f"LOCAL_{name}": str(value)}
    os.environ["ACCELERATE_USE_CPU"] = "true"
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def plain_accelerator(config: TrainConfig) -> Accelerator:
    """Make the trainer's accelerator anew: DDP, where processes have met."""
    AcceleratorState._reset_state(reset_partial_state=True)
    return make_accelerator(config)


def sharding_accelerator(config: TrainConfig) -> Accelerator:
    """Make the trainer's accelerator anew, with FSDP2 of `configs/accelerate/fsdp2.yaml`."""
    AcceleratorState._reset_state(reset_partial_state=True)
    begin_sharding(config.precision)
    return make_accelerator(config)


def fsdp2() -> FullyShardedDataParallelPlugin:
    """Make the plugin of `configs/accelerate/fsdp2.yaml`."""
    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["JointTransformerBlock"],
        state_dict_type="SHARDED_STATE_DICT",
        cpu_ram_efficient_loading=False,
    )


def begin_sharding(precision: str = "no") -> None:
    """Let accelerators shard with FSDP2 on the CPU too, where accelerate itself switches it on for GPUs alone.

    Everything else that accelerate and torch do for FSDP2 is done on the CPU as it is there.
    """
    plugin = fsdp2()
    if precision != "no":
        plugin.set_mixed_precision(precision)
    Accelerator(mixed_precision=precision).state.fsdp_plugin = plugin
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP  # as accelerate notes it


def gathered(model: nn.Module) -> dict[str, Tensor]:
    """Collect a model's weights, whole; every process calls this."""
    return {name: whole(value.detach()).clone() for name, value in model.state_dict().items()}


def run(
    model: nn.Module, pictures: EncodedPictures, config: TrainConfig, accelerator: Accelerator, **settings: Any
) -> dict[str, Any]:
    """Train; returns what the records say, and the weights."""
    records: list[StepRecord] = []
    train(model, pictures, config, accelerator=accelerator, on_step=records.append, **settings)
    taken = [record for record in records if record.step]
    return {
        "losses": [value for record in taken for value in record.losses.values()],
        "norms": [record.grad_norm for record in taken],
        "held_out": [value for record in records for value in record.held_out_losses.values()],
        "weights": gathered(model),
    }


@dataclass(frozen=True)
class Case:
    """A run that is taken on one process and on two."""

    settings: dict[str, Any]
    ways: tuple[str, ...] = ("ddp", "fsdp2")
    adapter: PreProjConfig = PLAIN
    pictures: Callable[[], EncodedPictures] = random_pictures
    held_out: Callable[[], EncodedPictures] = field(default=lambda: random_pictures(3, seed=2))

    def config(self, folder: Path, *, processes: int = 1, **changes: Any) -> TrainConfig:
        """Six steps, each of four pictures in all."""
        values: dict[str, Any] = {
            "model": "base",
            "output": folder,
            "data": {"folder": folder},
            "steps": 6,
            "batch_size": 4 // processes,
            "evaluate_every": 3,
            "checkpoint_every": 3,
            "optimizer": {"learning_rate": 1e-3, "warmup_steps": 0},
        }
        return TrainConfig(**(values | self.settings | changes))

    def model(self, config: TrainConfig) -> nn.Module:
        model = build_patched(self.adapter)
        if config.precision == "bf16":
            model.to(torch.bfloat16)
        if config.lora is not None:
            inject_lora(model, config.lora)
        return model


CASES = {
    "adapter": Case(
        {"ema": {"decay": 0.5, "warmup": False}, "gradient_accumulation": 2},
        pictures=lambda: random_pictures(sizes=2),
    ),
    "lora": Case({"lora": {"rank": 2}, "optimizer": SGD}),
    "full": Case({"mode": "full", "optimizer": SGD}),
    "half": Case({"precision": "bf16", "optimizer": SGD, "checkpoint_every": 0}),
    "points": Case(
        {
            "adapter": POINTS,
            "data": {"folder": "here", "points_column": "cloud"},
            "points": {"stored": 32, "per_step": 6},
            "optimizer": SGD,
        },
        ways=("ddp",),
        adapter=POINTS,
        pictures=random_triplets,
        held_out=lambda: random_triplets(4),
    ),
}
