"""LoRA from the configuration: where it is put, what it leaves trainable, and what is refused."""

import sys

import pytest
import torch
from peft import LoraConfig
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

import mmpreproj
from mmpreproj.training.config import ConfigError, LoraSettings
from mmpreproj.training.lora import inject_lora, lora_parameters


def wrapped(model):
    return {path for path, module in model.named_modules() if isinstance(module, BaseTunerLayer)}


def test_it_is_what_diffusers_puts_on_with_the_same_settings(make_transformer, style):
    ours, theirs = make_transformer(style), make_transformer(style)
    settings = LoraSettings(rank=3, alpha=6, targets=("attn.to_q", "attn.to_out.0"))
    torch.manual_seed(5)
    inject_lora(ours, settings)
    torch.manual_seed(5)
    config = LoraConfig(r=3, lora_alpha=6, target_modules=list(settings.targets), init_lora_weights="gaussian")
    theirs.add_adapter(config)
    expected = theirs.state_dict()
    assert list(ours.state_dict()) == list(expected)
    assert all(torch.equal(value, expected[key]) for key, value in ours.state_dict().items())
    name = "transformer_blocks.0.attn.to_q"
    assert ours.get_submodule(name).scaling == theirs.get_submodule(name).scaling == {"default": 2.0}


def test_without_alpha_the_update_is_not_scaled_and_dropout_is_passed_on(transformer):
    inject_lora(transformer, LoraSettings(rank=5, dropout=0.25))
    layer = transformer.transformer_blocks[0].attn.to_k
    assert layer.scaling == {"default": 1.0}
    assert layer.lora_dropout["default"].p == 0.25


def test_the_model_computes_what_it_did_until_lora_is_trained(transformer, predict):
    before = predict(transformer)
    inject_lora(transformer, LoraSettings())
    assert torch.equal(predict(transformer), before)
    with torch.no_grad():
        for parameter in lora_parameters(transformer):
            parameter.normal_(std=0.2)
    assert not torch.allclose(predict(transformer), before, atol=1e-3)


def test_by_default_every_map_of_the_joint_attentions_gets_it(make_transformer):
    transformer = make_transformer("sd35")
    inject_lora(transformer, LoraSettings())
    expected = {
        path
        for path, module in transformer.named_modules()
        if ".attn." in path and path.split(".")[2] == "attn" and hasattr(module, "base_layer")
    }
    assert wrapped(transformer) == expected
    assert len(expected) == 8 + 7  # the last block has no to_add_out
    assert "transformer_blocks.0.attn2.to_q" not in expected


@pytest.mark.parametrize("points", [None, {}], ids=["no points", "points"])
def test_all_linear_takes_every_linear_layer_of_the_base_and_none_of_ours(make_transformer, points):
    transformer = make_transformer("sd35")
    expected = {path for path, module in transformer.named_modules() if isinstance(module, nn.Linear)}
    mmpreproj.patch(transformer, mmpreproj.PreProjConfig.from_dict({"points": points, "positions": {}}))
    inject_lora(transformer, LoraSettings(targets="all-linear"))
    assert wrapped(transformer) == expected
    mmpreproj.check_intact(transformer)


def test_the_adapter_trains_beside_it_and_the_base_does_not(transformer):
    mmpreproj.patch(transformer)
    inject_lora(transformer, LoraSettings())
    added = {id(parameter) for parameter in (*mmpreproj.parameters(transformer), *lora_parameters(transformer))}
    assert {id(parameter) for parameter in transformer.parameters() if parameter.requires_grad} == added


def test_its_weights_are_two_for_each_layer(transformer):
    assert list(lora_parameters(transformer)) == []
    inject_lora(transformer, LoraSettings(rank=4))
    found = list(lora_parameters(transformer))
    assert len(found) == 2 * len(wrapped(transformer))
    assert all(4 in parameter.shape for parameter in found)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (("attn.to_q", "attn.to_qq"), r"'attn\.to_qq' is no layer of this SD3.*; it has attn\.to_q, "),
        (("to_quer",), r"'to_quer' is no layer .*; it has .*to_q"),
        (("o_q",), r"'o_q' is no layer .*; it has .*to_q"),
        (("nonsense",), r"'nonsense' is no layer .*; it has .*proj"),
        (("attn.to_out",), r"'attn\.to_out' is more than a layer .*; it has attn\.to_out\.0, "),
        (("attn.preproj.adapters.default",), r"'attn\.preproj\.adapters\.default' is more than a layer"),
        (("attn.to_q", "all-linear"), "all-linear stands alone"),
        ((), "is empty, so nothing would train"),
    ],
)
def test_a_target_that_would_train_nothing_is_refused_by_name(transformer, snapshot, targets, message):
    mmpreproj.patch(transformer)
    before = snapshot(transformer)
    with pytest.raises(ConfigError, match=rf"lora\.targets: {message}"):
        inject_lora(transformer, LoraSettings(targets=targets))
    before.check(transformer)


def test_without_peft_the_extra_is_named(transformer, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ImportError, match=r"pip install 'mmpreproj\[lora\]'"):
        inject_lora(transformer, LoraSettings())


def test_a_second_one_of_the_name_is_refused(transformer):
    inject_lora(transformer, LoraSettings())
    with pytest.raises(ValueError, match=r"carries a LoRA 'default' already; .*delete_adapters"):
        inject_lora(transformer, LoraSettings())


def test_it_goes_on_layers_that_another_lora_wraps(transformer):
    transformer.add_adapter(LoraConfig(r=2, target_modules=["to_q"]), adapter_name="style")
    inject_lora(transformer, LoraSettings(targets="attn.to_q"))
    assert set(transformer.transformer_blocks[0].attn.to_q.lora_A) == {"style", "default"}
