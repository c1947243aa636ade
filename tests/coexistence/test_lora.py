"""LoRA beside an adapter, put on before or after it, by diffusers and by PEFT: neither touches the other."""

import copy

import pytest
import torch
from diffusers.utils import recurse_remove_peft_layers
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import set_peft_model_state_dict
from safetensors.torch import load_file
from torch import nn

import mmpreproj
from mmpreproj import PreProjConfig

ATTENTION = ["to_q", "to_k", "to_v", "to_out.0", "add_k_proj"]


def config(targets=None) -> LoraConfig:
    return LoraConfig(r=4, lora_alpha=8, target_modules=targets or ATTENTION)


class ByDiffusers:
    """`transformer.add_adapter` and `unload_lora`."""

    @staticmethod
    def put_on(model, targets=None):
        model.add_adapter(config(targets))
        return model

    @staticmethod
    def take_off(model):
        model.unload_lora()
        return model


class ByInjection:
    """PEFT's `inject_adapter_in_model`."""

    @staticmethod
    def put_on(model, targets=None):
        return inject_adapter_in_model(config(targets), model)

    @staticmethod
    def take_off(model):
        recurse_remove_peft_layers(model)
        return model


class ByPeftModel:
    """PEFT's wrapper, through which every function of ours looks."""

    @staticmethod
    def put_on(model, targets=None):
        return get_peft_model(model, config(targets))

    @staticmethod
    def take_off(model):
        return model.unload()


@pytest.fixture
def style() -> str:
    """The style with everything: dual attention in the first block, joint attention alone in the second, and norms."""
    return "sd35"


@pytest.fixture(params=[ByDiffusers, ByInjection, ByPeftModel])
def lora(request):
    return request.param


@pytest.fixture(params=["lora first", "ours first"])
def put_both(request, lora, shake):
    """Put LoRA and an adapter of ours on a model, in either order, both at a size that matters."""

    def put(model, targets=None, adapter=None):
        if request.param == "ours first":
            mmpreproj.patch(model, adapter)
        model = lora.put_on(model, targets)
        if request.param == "lora first":
            mmpreproj.patch(model, adapter)
        shake(model)
        shake_lora(model)
        return model

    return put


def lora_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if "lora_" in name}


def shake_lora(model: nn.Module, *, std: float = 0.2) -> None:
    """Make a LoRA matter; its B starts at zero."""
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in lora_parameters(model).values():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)


def lora_state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in get_peft_model_state_dict(model).items()}


def same(first, second) -> bool:
    return first.keys() == second.keys() and all(torch.equal(value, second[key]) for key, value in first.items())


def apart(*outputs: torch.Tensor) -> bool:
    return all((one - other).abs().max() > 1e-3 for index, one in enumerate(outputs) for other in outputs[index + 1 :])


# --- neither sees the other ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("targets", [None, "all-linear", r".*\.attn\.to_[qk]"])
def test_loras_keys_are_those_without_us_and_ours_is_not_wrapped(make_transformer, lora, put_both, style, targets):
    alone = lora.put_on(make_transformer(style), targets)
    shake_lora(alone)
    both = put_both(make_transformer(style), targets)
    assert same(lora_state(both), lora_state(alone))
    assert list(lora_parameters(both)) == list(lora_parameters(alone))
    assert [key for key in both.state_dict() if "preproj" not in key] == list(alone.state_dict())
    wrapped = [name for name, module in both.named_modules() if isinstance(module, BaseTunerLayer)]
    assert wrapped and not [name for name in wrapped if "preproj" in name]
    assert not [name for name in lora_parameters(both) if "preproj" in name]
    mmpreproj.check_intact(both)


def test_our_file_is_the_same_with_and_without_lora(make_transformer, put_both, shake, style, tmp_path):
    alone = make_transformer(style)
    mmpreproj.patch(alone)
    shake(alone)
    both = put_both(make_transformer(style))
    files = [mmpreproj.save(model, tmp_path / name, card=False) for name, model in (("a", alone), ("b", both))]
    assert same(*(load_file(folder / "adapter_model.safetensors") for folder in files))
    assert [name for name, _ in mmpreproj.named_parameters(both)] == [
        name for name, _ in mmpreproj.named_parameters(alone)
    ]


def test_each_of_the_two_acts(make_transformer, lora, put_both, predict, shake, style):
    base = make_transformer(style)
    ours = copy.deepcopy(base)
    mmpreproj.patch(ours)
    shake(ours)
    theirs = lora.put_on(copy.deepcopy(base))
    shake_lora(theirs)
    assert apart(*map(predict, (base, ours, theirs, put_both(make_transformer(style)))))


# --- either goes -----------------------------------------------------------------------------------------------------


def test_taking_ours_off_gives_lora_alone_bit_for_bit(make_transformer, lora, put_both, predict, style):
    alone = lora.put_on(make_transformer(style))
    shake_lora(alone)
    both = put_both(make_transformer(style))
    mmpreproj.unpatch(both)
    assert not mmpreproj.is_patched(both)
    assert same(both.state_dict(), alone.state_dict())
    assert torch.equal(predict(both), predict(alone))
    bare = lora.take_off(both)
    base = make_transformer(style)
    assert same(bare.state_dict(), base.state_dict())
    assert torch.equal(predict(bare), predict(base))


def test_taking_lora_off_gives_ours_alone_bit_for_bit(make_transformer, lora, put_both, predict, shake, style):
    base = make_transformer(style)
    alone = copy.deepcopy(base)
    mmpreproj.patch(alone)
    shake(alone)
    bare = lora.take_off(put_both(make_transformer(style)))
    assert not isinstance(bare, PeftModel)
    mmpreproj.check_intact(bare)
    assert same(bare.state_dict(), alone.state_dict())
    assert torch.equal(predict(bare), predict(alone))
    mmpreproj.unpatch(bare)
    assert same(bare.state_dict(), base.state_dict())
    assert torch.equal(predict(bare), predict(base))


def test_deleting_or_disabling_lora_by_name_leaves_ours(make_transformer, predict, shake, style):
    model = make_transformer(style)
    mmpreproj.patch(model)
    shake(model)
    ours = predict(model)
    for name in ("first", "second"):
        model.add_adapter(config(), adapter_name=name)
    shake_lora(model)
    model.set_adapters(["first", "second"], [1.0, 1.0])
    both = predict(model)
    model.disable_lora()
    assert torch.equal(predict(model), ours)
    model.enable_lora()
    model.set_adapters(["first", "second"], [0.0, 0.0])
    assert torch.equal(predict(model), ours)
    model.set_adapters(["second"], [1.0])
    second = predict(model)
    assert apart(ours, second, both)
    model.delete_adapters("first")
    assert torch.equal(predict(model), second)
    model.delete_adapters("second")
    assert torch.equal(predict(model), ours)
    model.add_adapter(config(), adapter_name="first")  # under the same name again
    assert torch.equal(predict(model), ours)


# --- training --------------------------------------------------------------------------------------------------------


def test_thawing_makes_ours_trainable_again_and_leaves_the_rest(make_transformer, lora, put_both, style):
    model = put_both(make_transformer(style))
    flags = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    assert {flag for name, flag in flags.items() if "preproj" not in name and "lora_" not in name} == {False}
    mmpreproj.thaw(model)
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == (flags[name] or "preproj" in name), name
        assert flags[name] or "lora_" not in name, name


def test_injecting_lora_freezes_ours_and_thaw_takes_one_adapter_by_name(transformer, lora):
    mmpreproj.patch(transformer)
    mmpreproj.patch(transformer, name="second")
    model = lora.put_on(transformer)
    assert not any(parameter.requires_grad for parameter in mmpreproj.parameters(model))
    mmpreproj.thaw(model, "second")
    trained = {name: parameter.requires_grad for name, parameter in mmpreproj.named_parameters(model)}
    assert {flag for name, flag in trained.items() if ".second." in name} == {True}
    assert {flag for name, flag in trained.items() if ".default." in name} == {False}


def test_both_train_side_by_side(make_transformer, put_both, make_inputs, style):
    model = put_both(make_transformer(style))
    mmpreproj.thaw(model)
    model(**make_inputs(), return_dict=False)[0].square().mean().backward()
    missing = [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad != (parameter.grad is not None and bool(parameter.grad.abs().sum() > 0))
    ]
    assert not missing


# --- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("load_lora_first", [True, False])
def test_saved_apart_and_loaded_in_either_order_they_give_the_same(
    make_transformer, lora, put_both, predict, style, tmp_path, load_lora_first
):
    both = put_both(make_transformer(style))
    expected, weights = predict(both), lora_state(both)
    mmpreproj.save(both, tmp_path / "ours", card=False)
    model = make_transformer(style)
    if not load_lora_first:
        mmpreproj.load(model, tmp_path / "ours")
    model = lora.put_on(model)
    set_peft_model_state_dict(model, weights)
    if load_lora_first:
        mmpreproj.load(model, tmp_path / "ours")
    assert torch.equal(predict(model), expected)


@pytest.mark.parametrize("load_lora_first", [True, False])
def test_a_file_of_save_lora_adapter_holds_lora_alone(make_transformer, predict, shake, tmp_path, load_lora_first):
    both = ByDiffusers.put_on(make_transformer())
    mmpreproj.patch(both)
    shake(both)
    shake_lora(both)
    both.save_lora_adapter(tmp_path / "lora")
    mmpreproj.save(both, tmp_path / "ours", card=False)
    (file,) = (tmp_path / "lora").glob("*.safetensors")
    assert not [key for key in load_file(file) if "preproj" in key]
    model = make_transformer()
    steps = [
        lambda: model.load_lora_adapter(tmp_path / "lora", prefix=None, use_safetensors=True),
        lambda: mmpreproj.load(model, tmp_path / "ours"),
    ]
    for step in steps if load_lora_first else reversed(steps):
        step()
    assert torch.equal(predict(model), predict(both))


def test_ours_is_swapped_in_place_beside_lora(make_transformer, put_both, predict, shake, style, tmp_path):
    model = put_both(make_transformer(style))
    expected, weights = predict(model), lora_state(model)
    mmpreproj.save(model, tmp_path / "ours", card=False)
    shake(model, seed=9)
    assert apart(predict(model), expected)
    mmpreproj.load(model, tmp_path / "ours", replace=True)
    assert torch.equal(predict(model), expected)
    assert same(lora_state(model), weights)


# --- strengths -------------------------------------------------------------------------------------------------------


def test_scales_do_not_reach_each_other(make_transformer, lora, put_both, make_inputs, shake, style):
    """Halving is exact in binary, so each halved scale has a bit-equal reference with halved weights."""
    model = put_both(make_transformer(style))
    alone_ours, alone_lora = make_transformer(style), lora.put_on(make_transformer(style))
    mmpreproj.patch(alone_ours)
    shake(alone_ours)
    shake_lora(alone_lora)

    def run(model, scale=None):
        kwargs = {} if scale is None else {"joint_attention_kwargs": {"scale": scale}}
        with torch.no_grad():
            return model(**make_inputs(), return_dict=False, **kwargs)[0]

    full = run(model)
    assert torch.equal(run(model, 1.0), full)
    torch.testing.assert_close(run(model, 0.0), run(alone_ours), rtol=1e-6, atol=1e-6)
    halved = run(model, 0.5)
    assert torch.equal(run(model), full)  # the scale was for one call
    with torch.no_grad():
        for name, parameter in lora_parameters(model).items():
            if "lora_B" in name:
                parameter.mul_(0.5)
    torch.testing.assert_close(run(model), halved, rtol=1e-6, atol=1e-6)
    shake_lora(model)

    mmpreproj.set_scale(model, 0)
    for scale in (None, 0.5):
        assert torch.equal(run(model, scale), run(alone_lora, scale))
    mmpreproj.set_scale(model, 1)
    with mmpreproj.disabled(model):
        assert torch.equal(run(model, 0.5), run(alone_lora, 0.5))
    assert torch.equal(run(model), full)
    mmpreproj.set_scale(model, 0.5)
    mmpreproj.set_scale(alone_ours, 0.5)
    torch.testing.assert_close(run(model, 0.0), run(alone_ours), rtol=1e-6, atol=1e-6)
    assert mmpreproj.scales(model) == mmpreproj.scales(alone_ours)


def test_two_adapters_of_ours_and_a_lora(make_transformer, lora, put_both, predict, style):
    """Reference: the same two of ours with LoRA's product added to the base's weights."""
    model = put_both(make_transformer(style), adapter=PreProjConfig(share="stream"))
    mmpreproj.patch(model, PreProjConfig(blocks=[1]), name="second")
    with torch.no_grad():
        for parameter in mmpreproj.parameters(model, "second"):
            nn.init.normal_(parameter, std=0.2)
    mmpreproj.set_scale(model, {"default": 0.7, "second": [0.0, -0.3]})

    merged = copy.deepcopy(model)
    merged = merged.get_base_model() if isinstance(merged, PeftModel) else merged
    for module in merged.modules():
        if isinstance(module, BaseTunerLayer):
            module.merge()
    recurse_remove_peft_layers(merged)
    assert not lora_parameters(merged)
    torch.testing.assert_close(predict(model), predict(merged), rtol=1e-4, atol=1e-5)

    outputs = [predict(model)]
    mmpreproj.unpatch(model, "second")
    outputs.append(predict(model))
    assert mmpreproj.adapters(model) == ("default",)
    mmpreproj.unpatch(model)
    outputs.append(predict(model))
    assert apart(*outputs)
    alone = lora.put_on(make_transformer(style))
    shake_lora(alone)
    assert torch.equal(outputs[-1], predict(alone))


def test_fusing_lora_into_the_base_leaves_ours(make_transformer, predict, shake, style):
    model = make_transformer(style)
    mmpreproj.patch(model)
    shake(model)
    ours = [parameter.clone() for parameter in mmpreproj.parameters(model)]
    model.add_adapter(config())
    shake_lora(model)
    both = predict(model)
    model.fuse_lora()
    torch.testing.assert_close(predict(model), both, rtol=1e-4, atol=1e-5)
    assert all(map(torch.equal, mmpreproj.parameters(model), ours))
    mmpreproj.unpatch(model)
    lone = make_transformer(style)
    lone.add_adapter(config())
    shake_lora(lone)
    lone.fuse_lora()
    assert torch.equal(predict(model), predict(lone))
    model.unfuse_lora()
    lone.unfuse_lora()
    assert torch.equal(predict(model), predict(lone))
