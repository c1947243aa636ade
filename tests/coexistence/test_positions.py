"""Rotary positions beside checkpointing, LoRA, offloading, casting and copies.

Each is compared with the same patched model without the other machinery.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, cpu_offload_with_hook, disk_offload, dispatch_model
from diffusers.hooks import apply_group_offloading
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

import mmpreproj
from mmpreproj import Positions, PreProjConfig

CPU = torch.device("cpu")
KINDS = {"identity": Positions(), "full": Positions(start="full", absolute="remove")}
ORDERS = ("before", "after")

Change = Callable[[nn.Module], Any]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """A pretrained base with learned gains, or a model from nothing with rotary positions alone."""
    return request.param


@pytest.fixture
def style() -> str:
    """The style with everything: dual attention in the first block, joint attention alone in the second, and norms."""
    return "sd35"


@pytest.fixture
def patch(kind, shake) -> Change:
    """Put an adapter with positions on a model, all of it at a size that matters."""

    def put(model: nn.Module) -> None:
        torch.manual_seed(0)
        mmpreproj.patch(model, PreProjConfig(positions=KINDS[kind]))
        shake(model)

    return put


@pytest.fixture
def patched(make_transformer, style, patch) -> nn.Module:
    """A patched model without anything else."""
    model = make_transformer(style)
    patch(model)
    return model


@pytest.fixture
def make_both(make_transformer, style, patch) -> Callable[[Change, str], nn.Module]:
    """Build the patched model again, changed by something else before or after it was patched."""

    def make(change: Change, order: str) -> nn.Module:
        model = make_transformer(style)
        for step in (change, patch)[:: 1 if order == "before" else -1]:
            step(model)
        return model

    return make


@pytest.fixture
def predict(make_inputs) -> Callable[[nn.Module], Tensor]:
    """Run a transformer on pictures that are not square, without gradients."""

    def run(model: nn.Module, dtype: torch.dtype = torch.float32) -> Tensor:
        inputs = {key: value.to(dtype) for key, value in wide(make_inputs()).items()}
        with torch.no_grad():
            return model(**inputs, return_dict=False)[0]

    return run


def wide(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Give a batch latents that are wider than high."""
    return inputs | {"hidden_states": torch.cat([inputs["hidden_states"]] * 2, dim=-1)[..., :12]}


def apart(one: Tensor, other: Tensor) -> bool:
    return float((one - other).norm() / other.norm()) > 1e-3


def test_the_positions_of_these_tests_act(make_transformer, style, patched, predict, shake):
    bare = make_transformer(style)
    torch.manual_seed(0)
    mmpreproj.patch(bare)
    shared = bare.load_state_dict(patched.state_dict(), strict=False)
    assert not shared.missing_keys and all("rotary_gain" in key for key in shared.unexpected_keys)
    assert apart(predict(patched), predict(bare))
    mmpreproj.set_scale(patched, 0.0)
    assert torch.equal(predict(patched), predict(make_transformer(style)))


def test_checkpointing_keeps_the_gradients(patched, make_inputs, kind):
    def gradients() -> dict[str, Tensor]:
        patched.zero_grad()
        patched(**wide(make_inputs()), return_dict=False)[0].square().mean().backward()
        return {name: parameter.grad.clone() for name, parameter in patched.named_parameters()}

    expected = gradients()
    patched.train()
    patched.enable_gradient_checkpointing()
    found = gradients()
    assert any("rotary_gain" in name for name in expected) == (kind == "identity")
    for name, gradient in expected.items():
        assert "preproj" not in name or gradient.abs().max() > 0, name
        torch.testing.assert_close(found[name], gradient, rtol=1e-6, atol=1e-9, msg=name)


# LoRA


def lora(model: nn.Module) -> nn.Module:
    return get_peft_model(model, LoraConfig(r=4, target_modules=["to_q", "to_k", "to_v", "to_out.0", "add_k_proj"]))


def shake_lora(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)


@pytest.mark.parametrize("by_peft_model", [False, True], ids=["add_adapter", "get_peft_model"])
@pytest.mark.parametrize("order", ORDERS)
def test_lora_comes_and_goes_beside_positions(
    make_transformer, style, patch, patched, predict, by_peft_model, order, make_inputs
):
    ours, model = predict(patched), make_transformer(style)
    if order == "after":
        patch(model)
    if by_peft_model:
        model = lora(model)
    else:
        model.add_adapter(LoraConfig(r=4, target_modules=["to_q", "to_k", "to_v", "to_out.0", "add_k_proj"]))
    if order == "before":
        patch(model)
    assert torch.equal(predict(model), ours)  # its B starts at zero
    shake_lora(model)
    both, other = predict(model), lora(copy.deepcopy(patched))
    shake_lora(other)
    assert apart(both, ours)
    torch.testing.assert_close(both, predict(other), rtol=1e-6, atol=1e-6)
    mmpreproj.thaw(model)
    model(**wide(make_inputs()), return_dict=False)[0].square().mean().backward()
    assert all(parameter.grad.abs().max() > 0 for parameter in mmpreproj.parameters(model))
    bare = model.unload() if by_peft_model else (model.unload_lora(), model)[1]
    assert torch.equal(predict(bare), ours)
    mmpreproj.check_intact(bare)
    mmpreproj.unpatch(bare)
    assert torch.equal(predict(bare), predict(make_transformer(style)))


# Offloading


PARTS = (
    "pos_embed",
    "time_text_embed",
    "context_embedder",
    "transformer_blocks.0",
    "transformer_blocks.1",
    "norm_out",
    "proj_out",
)
OFFLOADS: dict[str, Callable[[nn.Module, Path], Any]] = {
    "block level": lambda model, folder: model.enable_group_offload(
        CPU, CPU, offload_type="block_level", num_blocks_per_group=1
    ),
    "leaf level": lambda model, folder: apply_group_offloading(model, CPU, CPU, offload_type="leaf_level"),
    "sequential": lambda model, folder: cpu_offload(model, execution_device=CPU),
    "sequential with buffers": lambda model, folder: cpu_offload(model, execution_device=CPU, offload_buffers=True),
    "whole model": lambda model, folder: cpu_offload_with_hook(model, execution_device=CPU),
    "device map": lambda model, folder: dispatch_model(model, dict.fromkeys(PARTS, "cpu"), force_hooks=True),
    "device map with disk": lambda model, folder: dispatch_model(
        model,
        dict.fromkeys(PARTS, "cpu") | {"transformer_blocks.1": "disk", "pos_embed": "disk"},
        main_device="cpu",
        offload_dir=str(folder / "offload"),
        force_hooks=True,
    ),
    "disk": lambda model, folder: disk_offload(model, str(folder / "offload"), execution_device=CPU),
}
BRIEF_OFFLOADS = [
    pytest.param(way, marks=() if way in ("leaf level", "sequential") else pytest.mark.slow) for way in OFFLOADS
]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("way", BRIEF_OFFLOADS)
def test_offloaded_equals_not_offloaded(
    make_both, make_transformer, style, patched, predict, shake, way, order, tmp_path
):
    base = predict(make_transformer(style))
    model = make_both(lambda one: OFFLOADS[way](one, tmp_path), "after")
    if order == "before":
        adapter, model = mmpreproj.save(patched, tmp_path / "adapter", card=False), make_transformer(style)
        OFFLOADS[way](model, tmp_path)
        mmpreproj.load(model, adapter)
    expected = predict(patched)
    for _ in range(2):  # onto the device and off again
        assert torch.equal(predict(model), expected)
    mmpreproj.check_intact(model)
    for scale in (0.0, [0.3, 2.0], 1.0):
        for one in (model, patched):
            mmpreproj.set_scale(one, scale)
        assert torch.equal(predict(model), predict(patched))
    with mmpreproj.disabled(model):
        assert torch.equal(predict(model), base)
    shake(patched, seed=9)
    other = mmpreproj.save(patched, tmp_path / "other", card=False)
    mmpreproj.load(model, other, replace=True)
    assert torch.equal(predict(model), predict(patched))
    assert apart(predict(model), expected)
    mmpreproj.unpatch(model)
    assert torch.equal(predict(model), base)


@pytest.mark.parametrize("level", ["block level", "leaf level"])
def test_group_offloading_holds_gains_and_scales_too(make_transformer, style, patched, level, tmp_path):
    """Its groups keep lists of modules and tensors, made before the adapter came."""
    adapter, model = mmpreproj.save(patched, tmp_path / "adapter", card=False), make_transformer(style)
    OFFLOADS[level](model, tmp_path)
    mmpreproj.load(model, adapter)
    registries = [getattr(module, "_diffusers_hook", None) for module in model.modules()]
    hooks = [registry.get_hook("group_offloading") for registry in registries if registry is not None]
    held = set()
    for group in (hook.group for hook in hooks if hook is not None):
        held |= {id(tensor) for tensor in (*group.parameters, *group.buffers)}
        held |= {id(tensor) for module in group.modules for tensor in (*module.parameters(), *module.buffers())}
    assert {id(tensor) for tensor in (*model.parameters(), *model.buffers())} <= held


def test_patched_and_then_grouped_on_disk_runs_the_same(patched, predict, tmp_path):
    mmpreproj.set_scale(patched, 0.7)
    expected = predict(patched)
    apply_group_offloading(patched, CPU, CPU, offload_type="leaf_level", offload_to_disk_path=str(tmp_path / "groups"))
    for _ in range(2):
        assert torch.equal(predict(patched), expected)


# Casting and copies


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("order", ORDERS)
def test_layerwise_casting_leaves_gains_and_angles_alone(
    make_transformer, style, patch, predict, kind, order, compute
):
    def cast(model: nn.Module) -> None:
        model.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=compute)

    bare, model, reference = (make_transformer(style).to(compute) for _ in range(3))
    cast(bare)
    with torch.no_grad():  # rounded by hand
        for value, stored in zip(reference.parameters(), bare.parameters(), strict=True):
            value.copy_(stored.to(compute))
    patch(reference)
    for step in (cast, patch)[:: 1 if order == "before" else -1]:
        step(model)
    assert {parameter.dtype for parameter in mmpreproj.parameters(model)} == {compute}
    for _ in range(2):
        assert torch.equal(predict(model, compute), predict(reference, compute))
    mmpreproj.set_scale(model, 0.0)
    assert torch.equal(predict(model, compute), predict(bare, compute))


def test_a_copy_keeps_positions_scales_switches_and_its_own_life(make_transformer, style, patched, predict, duplicate):
    base = predict(make_transformer(style))
    mmpreproj.patch(patched, PreProjConfig(positions=Positions(text="diagonal", start="full")), name="second")
    mmpreproj.set_scale(patched, {"default": [0.7, 0.2], "second": 0.4})
    both = predict(patched)
    mmpreproj.disable(patched, "second")
    expected = predict(patched)
    assert apart(both, expected)
    twin = duplicate(patched)
    mmpreproj.check_intact(twin)
    assert torch.equal(predict(twin), expected)
    mmpreproj.enable(twin)
    assert torch.equal(predict(twin), both)
    mmpreproj.set_scale(twin, 0.0)
    assert torch.equal(predict(twin), base)
    mmpreproj.unpatch(twin)
    assert torch.equal(predict(twin), base)
    assert torch.equal(predict(patched), expected)
    mmpreproj.check_intact(patched)
