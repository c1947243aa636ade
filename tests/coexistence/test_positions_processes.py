"""Two processes on the CPU with rotary positions: DDP, FSDP2 and diffusers' context parallelism do what one does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import processes_kit
import pytest
import torch
from diffusers import ContextParallelConfig
from diffusers.models import attention_dispatch
from diffusers.models._modeling_parallel import ContextParallelInput, ContextParallelOutput
from processes_kit import WORLD, meeting, run_in_processes
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import mmpreproj
from mmpreproj import Positions, PreProjConfig
from mmpreproj.patching.files.format import read_weights

pytestmark = pytest.mark.slow  # without positions, two processes are in the default tests: test_processes.py
KINDS = {
    "identity": Positions(),
    "full": Positions(start="full", absolute="remove"),
    "yarn": Positions(text="diagonal", scaling="yarn", base_size=3),
}
SPLIT = {0: ContextParallelInput(split_dim=1, expected_dims=3, split_output=True)}
GATHER = {"proj_out": ContextParallelOutput(gather_dim=1, expected_dims=3)}
BY_OUTPUT = {"pos_embed": SPLIT, "context_embedder": SPLIT} | GATHER
BY_INPUT = {
    "transformer_blocks.0": {
        name: ContextParallelInput(split_dim=1, expected_dims=3) for name in ("hidden_states", "encoder_hidden_states")
    }
} | GATHER
PLANS = {"by output": BY_OUTPUT, "by input": BY_INPUT}
DEGREES: dict[str, dict[str, Any]] = {
    "ulysses": {"ulysses_degree": WORLD},
    "ulysses anything": {"ulysses_degree": WORLD, "ulysses_anything": True},
    "ring": {"ring_degree": WORLD},
    "ring anything": {"ring_degree": WORLD, "ring_anything": True},
}


def build_patched(kind: str) -> nn.Module:
    """Build a tiny transformer with positions of a kind."""
    return processes_kit.build_patched(PreProjConfig(share="stream", positions=KINDS[kind]))


def batch(rank: int | None = None, *, height: int = 8, width: int = 12, tokens: int = 6) -> dict[str, Any]:
    """Build a batch of two, or the half of it that one process sees."""
    generator = torch.Generator().manual_seed(1)
    inputs = {
        "hidden_states": torch.randn(2, 4, height, width, generator=generator),
        "encoder_hidden_states": torch.randn(2, tokens, 24, generator=generator),
        "pooled_projections": torch.randn(2, 20, generator=generator),
        "timestep": torch.tensor([100.0, 700.0]),
    }
    if rank is not None:
        inputs = {key: value[rank : rank + 1] for key, value in inputs.items()}
    return inputs | {"return_dict": False}


def step(model: nn.Module, inputs: dict[str, Any]) -> None:
    """Take one step of SGD on the adapter; every parameter must have a gradient."""
    optimizer = torch.optim.SGD(mmpreproj.parameters(model), lr=0.5)
    model(**inputs)[0].square().mean().backward()
    for name, parameter in mmpreproj.named_parameters(model):
        assert parameter.grad is not None, name
    optimizer.step()


# What each process does


def sharded(model: nn.Module, **options: Any) -> nn.Module:
    """Shard every block, and what is left, over the processes."""
    mesh = init_device_mesh("cpu", (WORLD,))
    for block in model.transformer_blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def train(rank: int, folder: Path, kind: str) -> None:
    for way, wrap in (("ddp", DistributedDataParallel), ("fsdp", sharded)):
        model = wrap(build_patched(kind))
        step(model, batch(rank))
        mmpreproj.save(model, folder / f"{way} {kind} {rank}", card=False)


def run_in_low_precision(rank: int, folder: Path, kind: str) -> None:
    """Let FSDP2 cast weights and inputs to bfloat16."""

    def work() -> Tensor:
        model = sharded(build_patched(kind), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        with torch.no_grad():
            return model(**batch())[0]

    save_file(attempt(work), folder / f"low {kind} {rank}")


def enable_on_cpu(model: nn.Module, plan: dict[str, Any], **settings: Any) -> None:
    """Enable diffusers' context parallelism, which takes a rank modulo the number of accelerators: on a CPU, of 0."""
    mesh_shape = (settings.get("ring_degree", 1), settings.get("ulysses_degree", 1))
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("ring", "ulysses"))
    with mock.patch("torch.accelerator.device_count", return_value=1):
        model.enable_parallelism(config=ContextParallelConfig(**settings, mesh=mesh), cp_plan=plan)


@contextmanager
def native_attention_that_gives_its_sums() -> Iterator[None]:
    """Let diffusers' native backend run in a ring on the CPU, where no backend of its own can.

    The ring needs the log-sum-exp of the scores. `native` refuses to give it, though torch's kernel for the CPU does.
    """
    original = attention_dispatch._native_attention_forward_op

    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
        out, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value)
        return out.transpose(1, 2), sums.transpose(1, 2)

    attention_dispatch._native_attention_forward_op = forward
    try:
        yield
    finally:
        attention_dispatch._native_attention_forward_op = original


def attempt(work: Callable[[], Tensor]) -> dict[str, Tensor]:
    """Give back the result, or the error's text in bytes, so that one failure hides no other."""
    try:
        return {"output": work().contiguous()}
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        return {"error": torch.tensor(list(text.encode()), dtype=torch.uint8)}


def share_the_context(rank: int, folder: Path, kind: str) -> None:
    """Run a picture with its tokens, image's and text's, split over the processes."""
    for degree, settings in DEGREES.items():
        odd = {"height": 10, "tokens": 5} if "anything" in degree else {}
        for plan, places in PLANS.items():

            def work(
                settings: dict[str, Any] = settings, places: dict[str, Any] = places, odd: dict[str, int] = odd
            ) -> Tensor:
                model = build_patched(kind)
                enable_on_cpu(model, places, **settings)
                with torch.no_grad():
                    return model(**batch(**odd))[0]

            if "ring" in degree:
                with native_attention_that_gives_its_sums():
                    result = attempt(work)
            else:
                result = attempt(work)
            save_file(result, folder / f"context {degree} {plan} {kind} {rank}")


def share_a_masked_context(rank: int, folder: Path, kind: str) -> None:
    def work() -> Tensor:
        model = build_patched(kind)
        enable_on_cpu(model, BY_INPUT, ulysses_degree=WORLD)
        with torch.no_grad():
            return model(**batch(), joint_attention_kwargs={"attention_mask": mask()})[0]

    save_file(attempt(work), folder / f"masked {kind} {rank}")


def ring_without_help(rank: int, folder: Path, kind: str) -> None:
    def work() -> Tensor:
        model = build_patched(kind)
        enable_on_cpu(model, BY_INPUT, ring_degree=WORLD)
        with torch.no_grad():
            return model(**batch())[0]

    save_file(attempt(work), folder / f"helpless {kind} {rank}")


def mask() -> Tensor:
    return torch.arange(6)[None] < torch.tensor([[3], [5]])


WORKS = (train, run_in_low_precision, share_the_context, share_a_masked_context, ring_without_help)

# What is expected of it


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run this file as two processes, and return the folder that they wrote to."""
    return run_in_processes(__file__, tmp_path_factory.mktemp("processes"))


def result(path: Path) -> Tensor:
    """Read what a process computed, or fail with the error it met."""
    found = load_file(path)
    if "error" in found:
        pytest.fail(bytes(found["error"].tolist()).decode())
    return found["output"]


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Learned gains; rotary positions alone; or a picture beyond the base."""
    return request.param


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_a_step_in_two_processes_is_the_step_in_one(folder, kind, way, tmp_path):
    model = build_patched(kind)
    start = [parameter.detach().clone() for parameter in mmpreproj.parameters(model)]
    step(model, batch())
    for before, parameter in zip(start, mmpreproj.parameters(model), strict=True):
        assert not torch.equal(before, parameter)
    expected = read_weights(mmpreproj.save(model, tmp_path / "single", card=False))
    for rank in range(WORLD):
        found = read_weights(folder / f"{way} {kind} {rank}")
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-6, msg=key)


def test_fsdp_in_bfloat16_computes_angles_in_float32(folder, kind):
    """FSDP2 casts every floating tensor that a block is called with."""
    model, inputs = build_patched(kind), batch()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = parameter.to(torch.bfloat16)
        cast = {key: value.to(torch.bfloat16) for key, value in inputs.items() if isinstance(value, Tensor)}
        expected = model(**(inputs | cast))[0]
    for rank in range(WORLD):
        assert torch.equal(result(folder / f"low {kind} {rank}"), expected)


@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize("plan", PLANS)
def test_a_context_in_two_processes_is_the_context_in_one(folder, kind, degree, plan):
    """But for a removed table, whose patches must not be split before it is removed: that is refused."""
    odd = {"height": 10, "tokens": 5} if "anything" in degree else {}
    model = build_patched(kind)
    with torch.no_grad():
        expected = model(**batch(**odd))[0]
        mmpreproj.set_scale(model, 0.0)
        assert (model(**batch(**odd))[0] - expected).abs().max() > 1e-2
    for rank in range(WORLD):
        if (kind, plan) == ("full", "by output"):
            with pytest.raises(pytest.fail.Exception, match="split the inputs of the first block in cp_plan"):
                result(folder / f"context {degree} {plan} {kind} {rank}")
            continue
        found = result(folder / f"context {degree} {plan} {kind} {rank}")
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_masked_context_in_two_processes_is_the_one_in_one(folder, kind):
    """A process joins its share of image and text, so keys come process by process."""
    with torch.no_grad():
        expected = build_patched(kind)(**batch(), joint_attention_kwargs={"attention_mask": mask()})[0]
    for rank in range(WORLD):
        found = result(folder / f"masked {kind} {rank}")
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_ring_on_the_cpu_needs_the_help_it_gets_here(folder, kind):
    """If this fails, diffusers has learned it, and `native_attention_that_gives_its_sums` can go."""
    with pytest.raises(pytest.fail.Exception, match="Native attention does not support return_lse=True"):
        result(folder / f"helpless {kind} 0")


if __name__ == "__main__":
    with meeting("cpu:gloo") as place:
        for work in WORKS:
            for kind in KINDS:
                work(*place, kind)
