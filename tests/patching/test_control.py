"""Strength and switches of adapters, and several of them on one model.

That the sum itself is right is compared with a float64 reference in `test_equations.py`.
"""

import copy
import math
from collections.abc import Callable, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import mmpreproj
from mmpreproj import Positions, PreProjConfig

A = PreProjConfig()
B = PreProjConfig(share="stream", expansion=0.5)


@pytest.fixture
def make_pair(make_transformer, shake) -> Callable[[str], nn.Module]:
    """Build a model with the trained adapters `a` and `b`, which differ in sharing and width."""

    def make(style: str) -> nn.Module:
        model = make_transformer(style)
        mmpreproj.patch(model, A, name="a")
        mmpreproj.patch(model, B, name="b")
        shake(model)
        return model

    return make


@pytest.fixture
def pair(make_pair, style) -> nn.Module:
    """Two adapters on a model, once of each style."""
    return make_pair(style)


@pytest.fixture
def dual(make_pair) -> nn.Module:
    """Two adapters on a model with dual attention, where the style makes no difference."""
    return make_pair("sd35")


@pytest.fixture
def states(predict, snapshot) -> Callable[[nn.Module], Callable[[], None]]:
    """Record scales, switches, values and output; call the result to check that nothing has changed since."""

    def record(model: nn.Module) -> Callable[[], None]:
        before, scales, output = snapshot(model), mmpreproj.scales(model), predict(model)
        switches = {name: mmpreproj.is_enabled(model, name) for name in mmpreproj.adapters(model)}

        def check() -> None:
            before.check(model)
            assert mmpreproj.scales(model) == scales
            assert {name: mmpreproj.is_enabled(model, name) for name in mmpreproj.adapters(model)} == switches
            assert torch.equal(predict(model), output)

        return check

    return record


def blow_up(model: nn.Module) -> None:
    """Give the adapters the largest finite values there are, so that their own output overflows."""
    with torch.no_grad():
        for parameter in mmpreproj.parameters(model):
            largest = torch.finfo(parameter.dtype).max
            parameter.copy_(torch.where(torch.rand_like(parameter) < 0.5, largest, -largest))


# The base, bit for bit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("huge", [False, True], ids=["trained", "huge"])
@pytest.mark.parametrize("off", ["scale 0", "scale -0", "a list", "by block", "by name", "disable", "unpatch"])
def test_an_adapter_that_is_off_leaves_the_base_bit_for_bit(transformer, predict, shake, dtype, huge: bool, off: str):
    transformer.to(dtype)
    base = predict(transformer)
    mmpreproj.patch(transformer, A, name="a")
    mmpreproj.patch(transformer, B, name="b")
    shake(transformer)
    if huge:
        blow_up(transformer)
    patched = predict(transformer)
    assert not torch.equal(patched, base)
    assert patched.isfinite().all() != huge
    {
        "scale 0": lambda: mmpreproj.set_scale(transformer, 0),
        "scale -0": lambda: mmpreproj.set_scale(transformer, -0.0),
        "a list": lambda: mmpreproj.set_scale(transformer, [0.0, 0.0]),
        "by block": lambda: mmpreproj.set_scale(transformer, {0: 0.0, 1: 0.0}),
        "by name": lambda: mmpreproj.set_scale(transformer, {"a": 0.0, "b": [0, 0]}),
        "disable": lambda: mmpreproj.disable(transformer),
        "unpatch": lambda: mmpreproj.unpatch(transformer),
    }[off]()
    assert torch.equal(predict(transformer), base)


def test_scale_0_leaves_the_gradients_of_the_base(transformer, make_inputs, shake):
    found = []
    for patched in (False, True):
        if patched:
            mmpreproj.patch(transformer)
            shake(transformer)
            mmpreproj.set_scale(transformer, 0)
        inputs = make_inputs()
        inputs["hidden_states"].requires_grad_(True)
        transformer(**inputs, return_dict=False)[0].square().mean().backward()
        found.append(inputs["hidden_states"].grad)
    assert torch.equal(*found)
    assert all(not parameter.grad.any() for parameter in mmpreproj.parameters(transformer))


def test_one_adapter_off_leaves_the_other_as_it_is_alone(pair, predict):
    alone = copy.deepcopy(pair)
    mmpreproj.unpatch(alone, "a")
    expected = predict(alone)
    mmpreproj.set_scale(pair, {"a": 0})
    assert torch.equal(predict(pair), expected)
    mmpreproj.set_scale(pair, {"a": 1})
    mmpreproj.disable(pair, "a")
    assert torch.equal(predict(pair), expected)


# Scales


@pytest.mark.parametrize("values", [{}, {"skip": False}, {"pre_projection": False}, {"blocks": [1]}], ids=str)
def test_output_varies_with_scale(transformer, predict, shake, values: dict[str, Any]):
    mmpreproj.patch(transformer, PreProjConfig(**values))
    shake(transformer)
    outputs = []
    for scale in (-2, -1, 0, 0.5, 1, 1.5, 4):
        mmpreproj.set_scale(transformer, scale)
        outputs.append(predict(transformer))
        assert outputs[-1].isfinite().all()
    for index, output in enumerate(outputs):
        assert all((output - other).abs().max() > 1e-3 for other in outputs[index + 1 :])
    mmpreproj.set_scale(transformer, 1)
    assert torch.equal(predict(transformer), outputs[4])


def test_scale_1_is_the_adapter_as_trained(pair, predict):
    output = predict(pair)
    assert mmpreproj.scales(pair) == {"a": {0: 1.0, 1: 1.0}, "b": {0: 1.0, 1: 1.0}}
    mmpreproj.set_scale(pair, 1)
    assert torch.equal(predict(pair), output)


def test_a_skip_of_scale_s_is_a_skip_of_s_times_the_weights(transformer, predict, shake):
    mmpreproj.patch(transformer, PreProjConfig(pre_projection=False))
    shake(transformer)
    mmpreproj.set_scale(transformer, 2)  # a power of two: no rounding comes between
    scaled = predict(transformer)
    mmpreproj.set_scale(transformer, 1)
    with torch.no_grad():
        for parameter in mmpreproj.parameters(transformer):
            parameter.mul_(2)
    assert torch.equal(predict(transformer), scaled)


@pytest.mark.parametrize(
    ("scale", "a", "b"),
    [
        (0.5, (0.5, 0.5), (0.5, 0.5)),
        (3, (3.0, 3.0), (3.0, 3.0)),
        (np.float32(0.5), (0.5, 0.5), (0.5, 0.5)),
        (Fraction(1, 4), (0.25, 0.25), (0.25, 0.25)),
        ([0.25, 2], (0.25, 2.0), (0.25, 2.0)),
        ((0.25, -2), (0.25, -2.0), (0.25, -2.0)),
        ({1: 0.5}, (1.0, 0.5), (1.0, 0.5)),
        ({"a": 0.7}, (0.7, 0.7), (1.0, 1.0)),
        ({"a": 0.7, "b": 0.3}, (0.7, 0.7), (0.3, 0.3)),
        ({"b": [0.1, 0.2], "a": {0: 5}}, (5.0, 1.0), (0.1, 0.2)),
        ({}, (1.0, 1.0), (1.0, 1.0)),
    ],
    ids=str,
)
def test_every_form_of_scale_reaches_what_it_names(dual, scale: Any, a: Sequence[float], b: Sequence[float]):
    mmpreproj.set_scale(dual, scale)
    assert mmpreproj.scales(dual) == {"a": dict(enumerate(a)), "b": dict(enumerate(b))}
    for name, expected in (("a", a), ("b", b)):
        for block, factor in zip(dual.transformer_blocks, expected, strict=True):
            value = block.attn.preproj.adapters[name].scale.value
            assert value.dtype == torch.float32
            assert value.item() == np.float32(factor)


def test_scale_of_a_block_reaches_both_its_attentions(make_transformer, predict, shake):
    model = make_transformer("sd35")
    mmpreproj.patch(model, PreProjConfig(blocks=[0]))
    shake(model)
    block, seen = model.transformer_blocks[0], []
    for attention in (block.attn, block.attn2):
        attention.preproj.adapters["default"].scale.register_forward_hook(
            lambda module, args, output: seen.append(torch.equal(output, 0.5 * args[0]))
        )
    mmpreproj.set_scale(model, {0: 0.5})
    predict(model)
    assert seen == [True] * 6, "an increment and a skip for image and text of attn and for the image of attn2"


def test_a_block_of_scale_0_is_a_block_without_the_adapter(transformer, make_transformer, style, predict, shake):
    mmpreproj.patch(transformer)
    shake(transformer)
    mmpreproj.set_scale(transformer, [1, 0])
    other = make_transformer(style)
    mmpreproj.patch(other, PreProjConfig(blocks=[0]))
    whole = dict(mmpreproj.named_parameters(transformer))
    with torch.no_grad():
        for name, parameter in mmpreproj.named_parameters(other):
            parameter.copy_(whole[name])
    assert torch.equal(predict(transformer), predict(other))


def test_adapters_on_different_blocks(make_transformer, style, predict, shake):
    model = make_transformer(style, num_layers=3)
    mmpreproj.patch(model, PreProjConfig(blocks=[0, 2]), name="outer")
    mmpreproj.patch(model, PreProjConfig(blocks=[1]), name="inner")
    shake(model)
    mmpreproj.set_scale(model, [0.1, 0.2, 0.3])
    assert mmpreproj.scales(model) == {"outer": {0: 0.1, 2: 0.3}, "inner": {1: 0.2}}
    mmpreproj.set_scale(model, {"outer": {2: 0.5}, "inner": {1: 0.6}})
    assert mmpreproj.scales(model) == {"outer": {0: 0.1, 2: 0.5}, "inner": {1: 0.6}}
    with pytest.raises(ValueError, match=r"scale of 'inner': the adapter is not on blocks \[0, 2\]; it is on \[1\]"):
        mmpreproj.set_scale(model, {"inner": {0: 1, 1: 1, 2: 1}})
    output = predict(model)
    mmpreproj.unpatch(model, "inner")
    assert [hasattr(block.attn, "preproj") for block in model.transformer_blocks] == [True, False, True]
    assert not torch.equal(predict(model), output)


WRONG = [
    ([1.0], ValueError, "1 numbers for a model of 2 blocks; give one each"),
    ([1.0] * 3, ValueError, "3 numbers for a model of 2 blocks"),
    ([], ValueError, "0 numbers for a model of 2 blocks"),
    ({2: 1.0}, ValueError, r"the adapter is not on blocks \[2\]; it is on \[0, 1\]"),
    ({-1: 1.0}, ValueError, r"the adapter is not on blocks \[-1\]"),
    ({True: 1.0}, TypeError, "got the key True"),
    ({0.0: 1.0}, TypeError, r"got the key 0\.0"),
    (math.nan, ValueError, "must be finite in float32; got nan"),
    (math.inf, ValueError, "must be finite in float32; got inf"),
    (1e39, ValueError, "must be finite"),  # infinite in float32
    (-1e39, ValueError, "must be finite"),
    (10**400, ValueError, "must be finite"),
    ([0.5, -math.inf], ValueError, "must be finite in float32; got -inf"),
    ({0: 0.5, 1: math.nan}, ValueError, "must be finite in float32; got nan"),
    (True, TypeError, r"got True \(bool\)"),
    ([0.5, False], TypeError, r"got False \(bool\)"),
    ("0.5", TypeError, r"got '0.5' \(str\)"),
    ("ab", TypeError, r"got 'ab' \(str\)"),
    (b"ab", TypeError, r"got b'ab' \(bytes\)"),
    ([0.5, "1"], TypeError, r"got '1' \(str\)"),
    (None, TypeError, r"got None \(NoneType\)"),
    (1j, TypeError, r"\(complex\)"),
    (Decimal("0.5"), TypeError, r"\(Decimal\)"),
    ({0.5}, TypeError, r"\(set\)"),
    ([[0.5], [0.5]], TypeError, r"got \[0\.5\] \(list\)"),
]


@pytest.mark.parametrize(("scale", "error", "match"), WRONG, ids=lambda value: repr(value)[:40])
def test_a_bad_scale_is_refused_and_nothing_changes(dual, states, scale: Any, error, match: str):
    mmpreproj.set_scale(dual, {"a": [0.2, 0.4], "b": -1})
    unchanged = states(dual)
    for whole, name in ((scale, "a"), ({"a": 0.9, "b": scale}, "b")):
        with pytest.raises(error, match=rf"scale of '{name}'.*{match}"):
            mmpreproj.set_scale(dual, whole)
    unchanged()


def test_a_name_that_is_not_there_is_refused_and_nothing_changes(pair, states):
    unchanged = states(pair)
    for scale in ({"c": 0.5}, {"a": 0.5, "c": 0.5}, {"a": 0.5, 0: 0.5}):
        with pytest.raises(ValueError, match=r"carries no adapter ('c'|0); it carries a, b"):
            mmpreproj.set_scale(pair, scale)
    calls = (mmpreproj.disable, mmpreproj.enable, mmpreproj.is_enabled, mmpreproj.thaw, mmpreproj.unpatch)
    for call in calls:
        with pytest.raises(ValueError, match="carries no adapter 'c'; it carries a, b"):
            call(pair, "c")
    with pytest.raises(ValueError, match="carries no adapter 'c'"), mmpreproj.disabled(pair, "c"):
        pass
    unchanged()


def test_an_unpatched_model_is_refused(transformer):
    calls = (mmpreproj.scales, mmpreproj.disable, mmpreproj.enable, mmpreproj.is_enabled, mmpreproj.thaw)
    for call in (*calls, lambda model: mmpreproj.set_scale(model, 0.5), lambda model: mmpreproj.set_scale(model, {})):
        with pytest.raises(ValueError, match=r"SD3Transformer2DModel is not patched; call mmpreproj\.patch"):
            call(transformer)
    with pytest.raises(ValueError, match="is not patched"), mmpreproj.disabled(transformer):
        pass


# What scales survive


def check_survived(dual: nn.Module, change: Callable[[nn.Module], nn.Module]) -> None:
    mmpreproj.set_scale(dual, {"a": [0.7, 0.1], "b": 1 / 3})
    mmpreproj.disable(dual, "b")
    model = change(dual)
    assert mmpreproj.scales(model) == {"a": {0: 0.7, 1: 0.1}, "b": {0: 1 / 3, 1: 1 / 3}}
    assert mmpreproj.is_enabled(model, "a")
    assert not mmpreproj.is_enabled(model, "b")
    for block, factor in zip(model.transformer_blocks, (0.7, 0.1), strict=True):
        value = block.attn.preproj.adapters["a"].scale.value
        assert value.dtype == torch.float32
        assert value.item() == np.float32(factor)


def test_scales_and_switches_survive_a_copy_exactly(dual, duplicate):
    check_survived(dual, duplicate)


@pytest.mark.parametrize(
    "cast",
    [
        lambda model: model.to(torch.bfloat16),
        lambda model: model.half().float(),
        lambda model: model.double(),
        lambda model: model.to("meta").to_empty(device="cpu"),
    ],
    ids=["bf16", "half and back", "double", "meta and back"],
)
def test_scales_and_switches_survive_a_cast_exactly(dual, cast: Callable[[nn.Module], nn.Module]):
    check_survived(dual, cast)


def test_a_copy_has_scales_and_switches_of_its_own(pair, predict):
    output = predict(pair)
    twin = copy.deepcopy(pair)
    assert torch.equal(predict(twin), output)
    mmpreproj.set_scale(twin, 0.3)
    mmpreproj.disable(twin, "a")
    assert torch.equal(predict(pair), output)
    assert mmpreproj.scales(pair)["b"] == {0: 1.0, 1: 1.0}


def test_scales_are_settings_and_no_weights(pair, tmp_path):
    keys = list(pair.state_dict())
    mmpreproj.set_scale(pair, 0.3)
    assert list(pair.state_dict()) == keys
    assert not any("scale" in key for key in keys)
    pair.load_state_dict(pair.state_dict())
    assert mmpreproj.scales(pair)["a"] == {0: 0.3, 1: 0.3}
    mmpreproj.save(pair, tmp_path, name="a")
    mmpreproj.load(pair, tmp_path, name="c")
    assert mmpreproj.scales(pair)["c"] == {0: 1.0, 1: 1.0}


# Switches


def test_disabled_shows_the_base_for_a_while(transformer, predict, shake, states):
    base = predict(transformer)
    mmpreproj.patch(transformer)
    shake(transformer)
    unchanged = states(transformer)
    with mmpreproj.disabled(transformer) as model:
        assert model is transformer
        assert not mmpreproj.is_enabled(transformer)
        assert torch.equal(predict(transformer), base)
    assert mmpreproj.is_enabled(transformer)
    unchanged()


def test_disabled_nests(pair, predict):
    outputs = {"both": predict(pair)}
    with mmpreproj.disabled(pair, "a"):
        outputs["b"] = predict(pair)
        with mmpreproj.disabled(pair):
            outputs["none"] = predict(pair)
            with mmpreproj.disabled(pair, "b"):
                assert torch.equal(predict(pair), outputs["none"])
            assert torch.equal(predict(pair), outputs["none"])
        assert torch.equal(predict(pair), outputs["b"])
        assert [mmpreproj.is_enabled(pair, name) for name in ("a", "b")] == [False, True]
    assert torch.equal(predict(pair), outputs["both"])
    values = list(outputs.values())
    assert not any(torch.equal(values[i], values[j]) for i in range(3) for j in range(i))


def test_disabled_ends_with_an_exception_too(pair, states):
    mmpreproj.disable(pair, "b")
    unchanged = states(pair)
    with pytest.raises(RuntimeError, match="on purpose"), mmpreproj.disabled(pair):
        raise RuntimeError("on purpose")
    unchanged()
    assert not mmpreproj.is_enabled(pair, "b")


def test_an_adapter_may_be_removed_while_disabled(pair, predict):
    with mmpreproj.disabled(pair):
        mmpreproj.unpatch(pair, "a")
    assert mmpreproj.adapters(pair) == ("b",)
    assert mmpreproj.is_enabled(pair)


def test_enable_and_disable_keep_scale_and_weights(pair, states):
    mmpreproj.set_scale(pair, {"a": 0.3})
    unchanged = states(pair)
    mmpreproj.disable(pair, "a")
    mmpreproj.disable(pair, "a")
    assert [mmpreproj.is_enabled(pair, name) for name in ("a", "b")] == [False, True]
    assert mmpreproj.scales(pair)["a"] == {0: 0.3, 1: 0.3}
    mmpreproj.enable(pair, "a")
    unchanged()
    mmpreproj.disable(pair)
    assert [mmpreproj.is_enabled(pair, name) for name in ("a", "b")] == [False, False]
    mmpreproj.enable(pair)
    unchanged()


def test_a_scale_set_while_disabled_counts_once_enabled(pair, predict):
    mmpreproj.set_scale(pair, 0.5)
    expected = predict(pair)
    mmpreproj.set_scale(pair, 1)
    with mmpreproj.disabled(pair):
        mmpreproj.set_scale(pair, 0.5)
    assert torch.equal(predict(pair), expected)


def test_a_disabled_adapter_is_not_computed(pair):
    calls = []
    for name in ("a", "b"):
        skip = pair.transformer_blocks[0].attn.preproj.adapters[name]
        skip.register_forward_hook(lambda module, args, output, name=name: calls.append(name))
    attention = pair.transformer_blocks[0].attn
    with mmpreproj.disabled(pair, "a"):
        attention(hidden_states=torch.randn(1, 3, 32), encoder_hidden_states=torch.randn(1, 2, 32))
    assert calls == ["b", "b"]


# Several adapters


def test_adapters_are_listed_in_the_order_of_their_coming(pair):
    assert mmpreproj.adapters(pair) == ("a", "b")
    mmpreproj.unpatch(pair, "a")
    mmpreproj.patch(pair, A, name="a")
    assert mmpreproj.adapters(pair) == ("b", "a")


@pytest.mark.parametrize("order", [("a", "b"), ("b", "a")])
def test_order_of_removal_does_not_matter(transformer, predict, snapshot, shake, order: tuple[str, str]):
    before, base = snapshot(transformer), predict(transformer)
    configs = {"a": A, "b": B}
    first, second = order
    mmpreproj.patch(transformer, configs[second], name=second)
    shake(transformer)
    alone, state = predict(transformer), snapshot(transformer)
    mmpreproj.patch(transformer, configs[first], name=first)
    assert mmpreproj.adapters(transformer) == (second, first)
    assert not torch.equal(predict(transformer), alone)
    mmpreproj.unpatch(transformer, first)
    state.check(transformer)
    assert torch.equal(predict(transformer), alone)
    mmpreproj.unpatch(transformer, second)
    before.check(transformer)
    assert torch.equal(predict(transformer), base)


@pytest.mark.parametrize("kept", ["a", "b"])
def test_removing_one_leaves_the_other_as_it_was_alone(make_transformer, style, pair, predict, kept: str):
    mmpreproj.set_scale(pair, {kept: [0.3, -0.6]})
    alone = make_transformer(style)
    mmpreproj.patch(alone, {"a": A, "b": B}[kept], name=kept)
    mmpreproj.set_scale(alone, {kept: [0.3, -0.6]})
    values = dict(mmpreproj.named_parameters(pair, kept))
    with torch.no_grad():
        for name, parameter in mmpreproj.named_parameters(alone):
            parameter.copy_(values[name])
    mmpreproj.unpatch(pair, "b" if kept == "a" else "a")
    assert torch.equal(predict(pair), predict(alone))
    assert list(pair.state_dict()) == list(alone.state_dict())
    assert all(parameter is values[name] for name, parameter in mmpreproj.named_parameters(pair))


def test_two_halves_are_the_whole(transformer, predict, shake):
    mmpreproj.patch(transformer, PreProjConfig(pre_projection=False), name="whole")
    shake(transformer)
    expected = predict(transformer)
    weights = [parameter.clone() for parameter in mmpreproj.parameters(transformer)]
    mmpreproj.patch(transformer, PreProjConfig(pre_projection=False), name="again")
    with torch.no_grad():
        for parameter, weight in zip(mmpreproj.parameters(transformer, "again"), weights, strict=True):
            parameter.copy_(weight)
    mmpreproj.set_scale(transformer, 0.5)
    torch.testing.assert_close(predict(transformer), expected)


def test_parameters_are_those_of_the_named_adapter_or_of_all(pair):
    a, b, both = (dict(mmpreproj.named_parameters(pair, name)) for name in ("a", "b", None))
    assert both.keys() == a.keys() | b.keys()
    assert not a.keys() & b.keys()
    assert all(".adapters.a." in name for name in a)
    assert all(".adapters.b." in name for name in b)
    for name, named in (("a", a), ("b", b), (None, both)):
        assert [id(parameter) for parameter in mmpreproj.parameters(pair, name)] == list(map(id, named.values()))
    own = {name: parameter for name, parameter in pair.named_parameters() if ".preproj." in name}
    assert own.keys() == both.keys()
    assert all(own[name] is parameter for name, parameter in both.items())


def test_thaw_reaches_the_named_adapter_and_nothing_of_the_base(pair):
    pair.requires_grad_(False)
    mmpreproj.thaw(pair, "b")
    assert not any(parameter.requires_grad for parameter in mmpreproj.parameters(pair, "a"))
    assert all(parameter.requires_grad for parameter in mmpreproj.parameters(pair, "b"))
    mmpreproj.thaw(pair)
    names = {name for name, parameter in pair.named_parameters() if parameter.requires_grad}
    assert names == {name for name, _ in mmpreproj.named_parameters(pair)}


def skip_gradients(model: nn.Module, scales: dict[str, float]) -> dict[str, dict[str, torch.Tensor]]:
    """Gradients of a loss that is linear in both skips, by adapter."""
    mmpreproj.set_scale(model, scales)
    model.zero_grad()
    generator = torch.Generator().manual_seed(5)
    image, text = (torch.randn(2, count, 32, generator=generator) for count in (6, 4))
    outputs = model.transformer_blocks[0].attn(hidden_states=image, encoder_hidden_states=text)
    sum(output.sum() for output in outputs).backward()
    found = {name: dict(mmpreproj.named_parameters(model, name)) for name in scales}
    return {
        name: {key: parameter.grad.clone() for key, parameter in own.items() if parameter.grad is not None}
        for name, own in found.items()
    }


def test_gradients_reach_every_adapter_with_its_scale_as_a_factor(transformer, shake):
    config = PreProjConfig(pre_projection=False)
    mmpreproj.patch(transformer, config, name="a")
    mmpreproj.patch(transformer, config, name="b")
    shake(transformer)
    whole = skip_gradients(transformer, {"a": 1, "b": 1})
    scaled = skip_gradients(transformer, {"a": 0.5, "b": -4})
    for name, factor in (("a", 0.5), ("b", -4)):
        assert whole[name].keys() == scaled[name].keys()
        for key, grad in whole[name].items():
            assert grad.abs().max() > 1e-3
            assert torch.equal(scaled[name][key], factor * grad)


def test_every_parameter_of_every_adapter_gets_a_gradient(pair, make_inputs):
    mmpreproj.set_scale(pair, {"a": 0.7, "b": -0.3})
    pair.train()(**make_inputs(), return_dict=False)[0].square().mean().backward()
    for name, parameter in mmpreproj.named_parameters(pair):
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name


def test_what_is_about_one_adapter_asks_which(pair, tmp_path):
    calls = (
        lambda **which: mmpreproj.save(pair, tmp_path / "adapter", **which),
        lambda **which: mmpreproj.profile(pair, **which),
    )
    for call in calls:
        with pytest.raises(ValueError, match="carries several adapters, a, b; say which with name="):
            call()
        call(name="b")
    assert mmpreproj.is_enabled(pair), "all of them"


@pytest.mark.parametrize("name", ["a", "b"])
def test_each_adapter_is_saved_apart(make_transformer, style, pair, predict, tmp_path, name: str):
    other = make_transformer(style)
    mmpreproj.save(pair, tmp_path, name=name)
    mmpreproj.load(other, tmp_path)
    mmpreproj.unpatch(pair, "b" if name == "a" else "a")
    assert torch.equal(predict(other), predict(pair))


def test_a_scale_may_change_between_forward_and_backward(make_transformer, make_inputs, shake):
    """A teacher's pass without the adapter between a student's forward and backward."""
    gradients = []
    for change in (False, True):
        model = make_transformer()
        mmpreproj.patch(model)
        shake(model)
        mmpreproj.set_scale(model, 0.7)
        loss = model(**make_inputs()).sample.square().mean()
        if change:
            mmpreproj.set_scale(model, 0.0)
        loss.backward()
        gradients.append([parameter.grad for parameter in mmpreproj.parameters(model)])
    assert all(torch.equal(first, second) for first, second in zip(*gradients, strict=True))


def test_disabled_blocks_may_overlap(transformer, predict, shake):
    base = predict(transformer)
    mmpreproj.patch(transformer)
    shake(transformer)
    patched = predict(transformer)
    first, second = mmpreproj.disabled(transformer), mmpreproj.disabled(transformer)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert torch.equal(predict(transformer), base)
    second.__exit__(None, None, None)
    assert torch.equal(predict(transformer), patched)


def test_an_adapter_swapped_for_another_shape_while_disabled_takes_part_afterwards(make_transformer, shake, tmp_path):
    model, other = make_transformer(), make_transformer()
    mmpreproj.patch(model)
    mmpreproj.patch(other, PreProjConfig(expansion=0.5))
    shake(other)
    mmpreproj.save(other, tmp_path)
    with mmpreproj.disabled(model):
        mmpreproj.load(model, tmp_path, replace=True)
        assert not mmpreproj.is_enabled(model)
    assert mmpreproj.is_enabled(model)


def test_what_was_patched_in_inference_mode_can_be_changed_and_trained_outside(make_transformer, make_inputs):
    model = make_transformer()
    with torch.inference_mode():
        mmpreproj.patch(model)
        mmpreproj.set_scale(model, 0.5)
    mmpreproj.set_scale(model, 0.25)
    model(**make_inputs()).sample.square().mean().backward()
    assert all(parameter.grad is not None for parameter in mmpreproj.parameters(model))
    with torch.inference_mode():
        model.to(torch.bfloat16)
    mmpreproj.set_scale(model, 0.75)
    assert {float(module.value) for module in model.modules() if type(module).__name__ == "Scale"} == {0.75}


# --- scaling of positions -------------------------------------------------------------------------------------------


def test_a_scaling_chosen_after_training_is_that_of_an_adapter_made_with_it(make_transformer, shake, tmp_path):
    made, chosen = make_transformer(), make_transformer()
    mmpreproj.patch(made, PreProjConfig(positions=Positions(scaling="yarn", base_size=3)))
    mmpreproj.patch(chosen, PreProjConfig(positions=Positions()))
    for model in (made, chosen):
        shake(model)
    inputs = {
        "hidden_states": torch.randn(1, 4, 12, 16),
        "encoder_hidden_states": torch.randn(1, 5, 24),
        "pooled_projections": torch.randn(1, 20),
        "timestep": torch.tensor([300.0]),
        "return_dict": False,
    }
    with torch.no_grad():
        before, expected = chosen(**inputs)[0], made(**inputs)[0]
        assert not torch.equal(before, expected)
        mmpreproj.set_scaling(chosen, "yarn", base_size=3)
        assert torch.equal(chosen(**inputs)[0], expected)
        again = make_transformer()
        mmpreproj.load(again, mmpreproj.save(chosen, tmp_path, card=False))
        assert torch.equal(again(**inputs)[0], expected)
        mmpreproj.set_scaling(chosen, "none")
        assert torch.equal(chosen(**inputs)[0], before)


def test_a_scaling_takes_the_models_base_and_reaches_the_adapter_that_is_named(transformer):
    for name in ("one", "other"):
        mmpreproj.patch(transformer, PreProjConfig(positions=Positions()), name=name)
    mmpreproj.patch(transformer, name="content")
    mmpreproj.set_scaling(transformer, "linear", name="one")
    found = {name: mmpreproj.report(transformer, name=name).positions for name in mmpreproj.adapters(transformer)}
    assert found == {"one": Positions(scaling="linear", base_size=4), "other": Positions(), "content": None}


def test_a_scaling_that_cannot_be_is_refused_and_changes_nothing(transformer):
    mmpreproj.patch(transformer)
    with pytest.raises(ValueError, match="no adapter here has rotary positions"):
        mmpreproj.set_scaling(transformer, "linear")
    mmpreproj.patch(transformer, PreProjConfig(positions=Positions()), name="rope")
    with pytest.raises(ValueError, match=r"positions\.scaling must be one of"):
        mmpreproj.set_scaling(transformer, "cubic")
    assert mmpreproj.report(transformer, name="rope").positions == Positions()
