"""Casting, quantising and copying a model: the adapter keeps its type, dtype and scale, and gives the base back."""

from __future__ import annotations

import copy
from collections.abc import Callable

import bitsandbytes as bnb
import pytest
import torch
from optimum.quanto import freeze, qint8, quantize
from torch import Tensor, nn
from torchao.quantization import Int8WeightOnlyConfig, quantize_

import mmpreproj
from mmpreproj.core.linear_map import LinearMap
from mmpreproj.core.scale import Scale
from mmpreproj.patching.files.format import read_weights

FP8 = torch.float8_e4m3fn
ORDERS = ("before", "after")


def relative(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).norm() / other.double().norm())


def own_types(model: nn.Module) -> list[tuple[str, type, type, torch.dtype]]:
    """Describe every module and parameter of the adapters."""
    return [
        (path, type(module), type(parameter), parameter.dtype)
        for path, module in model.named_modules()
        if ".preproj." in path
        for parameter in module.parameters(recurse=False)
    ]


def state(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Read all parameters and buffers of a base, quantised ones by their parts."""
    tensors = []
    for key, value in (*model.named_parameters(), *model.named_buffers()):
        parts = value.__tensor_flatten__()[0] if hasattr(value, "__tensor_flatten__") else []
        tensors += [(f"{key}.{part}", getattr(value, part)) for part in parts] or [(key, value)]
    return tensors


def patch(model: nn.Module, shake: Callable) -> mmpreproj.PatchReport:
    torch.manual_seed(0)
    report = mmpreproj.patch(model)
    shake(model)
    return report


# Quantised bases


def torchao_int8(model: nn.Module) -> None:
    quantize_(model, Int8WeightOnlyConfig())


def quanto_int8(model: nn.Module) -> None:
    quantize(model, weights=qint8)
    freeze(model)


def _bitsandbytes(model: nn.Module, make: Callable[[nn.Linear], nn.Linear]) -> None:
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                quantised = make(child)
                quantised.bias = child.bias
                setattr(module, name, quantised)
    model.to("cpu")  # here it quantises


def bitsandbytes_8bit(model: nn.Module) -> None:
    def make(linear: nn.Linear) -> nn.Linear:
        made = bnb.nn.Linear8bitLt(linear.in_features, linear.out_features, has_fp16_weights=False)
        made.weight = bnb.nn.Int8Params(linear.weight.detach().clone(), requires_grad=False, has_fp16_weights=False)
        return made

    _bitsandbytes(model, make)


def bitsandbytes_4bit(model: nn.Module) -> None:
    def make(linear: nn.Linear) -> nn.Linear:
        made = bnb.nn.Linear4bit(linear.in_features, linear.out_features, compute_dtype=torch.float32)
        made.weight = bnb.nn.Params4bit(linear.weight.detach().clone(), requires_grad=False, quant_type="nf4")
        return made

    _bitsandbytes(model, make)


# What a quantised linear layer computes: its effective weight is read off the identity matrix.
QUANTISERS = {torchao_int8: 1e-4, quanto_int8: 1e-4, bitsandbytes_8bit: 2e-2, bitsandbytes_4bit: 1e-2}


def dequantised(quantised: nn.Module, plain: nn.Module) -> nn.Module:
    """Give a plain copy of a model the weights that its quantised twin's linear layers have in effect."""
    result = copy.deepcopy(plain)
    twins = dict(quantised.named_modules())
    with torch.no_grad():
        for path, module in result.named_modules():
            if isinstance(module, nn.Linear):
                twin = twins[path]
                effective = twin(torch.eye(module.in_features)) - (0 if twin.bias is None else twin.bias)
                module.weight.copy_(effective.T)
            elif isinstance(module, nn.Conv2d) and hasattr(twins[path].weight, "dequantize"):
                module.weight.copy_(twins[path].weight.dequantize())
    return result


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("quantiser", QUANTISERS)
def test_a_quantised_base_leaves_the_adapter_as_it_is(
    make_transformer, style, predict, shake, quantiser, order, tmp_path
):
    plain = make_transformer(style)
    bare = make_transformer(style)
    quantiser(bare)
    reference = dequantised(bare, plain)
    base, before = predict(bare), state(bare)
    patch(reference, shake)
    patch(plain, shake)
    model = make_transformer(style)
    for step in (quantiser, lambda one: patch(one, shake))[:: 1 if order == "before" else -1]:
        step(model)
    assert own_types(model) == own_types(plain)
    assert any(kind is LinearMap for _, kind, _, _ in own_types(model))
    found = predict(model)
    assert relative(found, predict(reference)) < QUANTISERS[quantiser]
    assert relative(found, base) > 0.05
    mmpreproj.save(model, tmp_path, card=False)
    unquantised = mmpreproj.save(plain, tmp_path / "plain", card=False)
    saved = read_weights(tmp_path)
    assert all(torch.equal(saved[key], value) for key, value in read_weights(unquantised).items())
    mmpreproj.set_scale(model, 0.0)
    assert torch.equal(predict(model), base)
    mmpreproj.unpatch(model)
    assert torch.equal(predict(model), base)
    after = state(model)
    assert [key for key, _ in after] == [key for key, _ in before]
    for (key, value), (_, expected) in zip(after, before, strict=True):
        assert value.dtype == expected.dtype and torch.equal(value, expected), key


# Layerwise casting


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("order", ORDERS)
def test_layerwise_casting_stores_the_base_in_fp8_and_not_the_adapter(
    make_transformer, style, make_inputs, shake, order, compute
):
    def run(one: nn.Module) -> Tensor:
        with torch.no_grad():
            return one(**make_inputs(compute), return_dict=False)[0]

    def cast(one: nn.Module) -> None:
        one.enable_layerwise_casting(storage_dtype=FP8, compute_dtype=compute)

    bare, model = make_transformer(style).to(compute), make_transformer(style).to(compute)
    cast(bare)
    reference = make_transformer(style).to(compute)
    with torch.no_grad():  # rounded by hand
        for (key, value), (_, stored) in zip(reference.named_parameters(), bare.named_parameters(), strict=True):
            value.copy_(stored.to(compute))
            assert stored.dtype in (FP8, compute), key
    patch(reference, shake)
    reports = []
    for step in (cast, lambda one: reports.append(patch(one, shake)))[:: 1 if order == "before" else -1]:
        step(model)
    assert {parameter.dtype for parameter in mmpreproj.parameters(model)} == {compute}
    assert model.transformer_blocks[0].attn.to_q.weight.dtype == FP8
    for _ in range(2):
        assert torch.equal(run(model), run(reference))
    assert not torch.equal(run(model), run(bare))
    name = str(compute).removeprefix("torch.")
    note = f"the adapter is {name}; the base is kept in float8_e4m3fn too, which the adapter takes no part in"
    assert reports[0].notes == ((note,) if order == "before" else ())
    mmpreproj.set_scale(model, 0.0)
    assert torch.equal(run(model), run(bare))
    mmpreproj.unpatch(model)
    assert torch.equal(run(model), run(bare))
    for (key, value), (_, stored) in zip(model.named_parameters(), bare.named_parameters(), strict=True):
        assert value.dtype == stored.dtype and torch.equal(value.float(), stored.float()), key


# Casts and copies of the whole model


def scale_values(model: nn.Module) -> set[tuple[torch.dtype, float]]:
    return {(module.value.dtype, module.value.item()) for module in model.modules() if isinstance(module, Scale)}


@pytest.mark.parametrize(
    ("cast", "dtype"),
    [
        (lambda model: model.to(torch.bfloat16), torch.bfloat16),
        (lambda model: model.to(dtype=torch.float16), torch.float16),
        (lambda model: model.half(), torch.float16),
        (lambda model: model.bfloat16(), torch.bfloat16),
        (lambda model: model.double(), torch.float64),
        (lambda model: model.half().float(), torch.float32),
    ],
)
def test_a_cast_model_keeps_its_scale_to_the_last_bit(
    transformer, style, make_transformer, predict, cast, dtype, shake
):
    patch(transformer, shake)
    mmpreproj.set_scale(transformer, 0.7)
    cast(transformer)
    exact = {(torch.float32, torch.tensor(0.7).item())}
    assert scale_values(transformer) == exact
    assert {parameter.dtype for parameter in mmpreproj.parameters(transformer)} == {dtype}
    found = predict(transformer)
    assert found.dtype == dtype
    late = make_transformer(style).to(dtype)  # the scale set after the cast
    mmpreproj.patch(late)
    late.load_state_dict(transformer.state_dict())
    mmpreproj.set_scale(late, 0.7)
    assert torch.equal(predict(late), found)
    mmpreproj.set_scale(late, 0.6)
    assert not torch.equal(predict(late), found)


def test_a_model_made_on_meta_has_its_scale_once_it_has_memory(make_transformer, predict, shake):
    model = make_transformer()
    patch(model, shake)
    mmpreproj.set_scale(model, 0.7)
    expected, values, buffers = predict(model), model.state_dict(), dict(model.named_buffers())
    empty = copy.deepcopy(model).to("meta")
    assert all(parameter.is_meta for parameter in empty.parameters())
    mmpreproj.set_scale(empty, 0.7)
    empty.to_empty(device="cpu")
    assert scale_values(empty) == {(torch.float32, torch.tensor(0.7).item())}
    empty.load_state_dict(values)
    empty.pos_embed.pos_embed.copy_(buffers["pos_embed.pos_embed"])
    assert torch.equal(predict(empty), expected)


def test_a_copy_keeps_weights_scales_switches_and_its_own_life(transformer, predict, shake, duplicate):
    base = predict(transformer)
    patch(transformer, shake)
    mmpreproj.patch(transformer, name="second")
    mmpreproj.set_scale(transformer, {"default": [0.7, 0.2], "second": 3.0})
    mmpreproj.disable(transformer, "second")
    expected = predict(transformer)
    twin = duplicate(transformer)
    assert mmpreproj.scales(twin) == mmpreproj.scales(transformer)
    assert mmpreproj.is_enabled(twin, "default") and not mmpreproj.is_enabled(twin, "second")
    mmpreproj.check_intact(twin)
    assert torch.equal(predict(twin), expected)
    mmpreproj.set_scale(twin, 0.0)
    assert torch.equal(predict(twin), base)
    assert torch.equal(predict(transformer), expected)
    mmpreproj.unpatch(twin)
    assert torch.equal(predict(twin), base)
    assert mmpreproj.adapters(transformer) == ("default", "second")
