"""PEFT on language models beside an adapter: LoRA before it and after it, and tuned prefixes and prompts."""

import copy
import importlib.metadata
from typing import Any

import pytest
import torch
from language_models import ROWS, generated, logits, lora_target, make_ids, make_model, make_patched, shake
from packaging import version
from peft import (
    LoraConfig,
    PeftModel,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    get_peft_model,
    inject_adapter_in_model,
)
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers.integrations.peft import MIN_PEFT_VERSION

import mmpreproj
from mmpreproj import PreProjConfig


@pytest.fixture(params=ROWS)
def row(request: pytest.FixtureRequest) -> str:
    """A row of the table, by its model class."""
    return request.param


def config(row: str, **settings: Any) -> LoraConfig:
    settings = {"target_modules": [lora_target(row)]} | settings
    return LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", fan_in_fan_out=row == "GPT2LMHeadModel", **settings)


def wrapped(model: nn.Module, row: str) -> nn.Module:
    return get_peft_model(model, config(row))


def integrated(model: nn.Module, row: str) -> nn.Module:
    model.add_adapter(config(row))
    return model


def injected(model: nn.Module, row: str) -> nn.Module:
    return inject_adapter_in_model(config(row), model)


TOO_OLD = version.parse(importlib.metadata.version("peft")) < version.parse(MIN_PEFT_VERSION)
WAYS = (
    wrapped,
    injected,
    pytest.param(integrated, marks=pytest.mark.skipif(TOO_OLD, reason=f"transformers needs PEFT {MIN_PEFT_VERSION}")),
)


def shake_lora(model: nn.Module, *, seed: int = 4) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_" in key:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)


def with_both(row: str, put_on: Any, order: str) -> nn.Module:
    """Build a tiny model with LoRA and an adapter of ours, put on in either order, both at a size that matters."""
    model = make_model(row)
    if order == "ours first":
        mmpreproj.patch(model)
    model = put_on(model, row)
    if order == "lora first":
        mmpreproj.patch(model)
    shake(model)
    shake_lora(model)
    return model.eval()


@pytest.mark.parametrize("put_on", WAYS)
def test_the_order_does_not_matter(row, put_on):
    one, other = (with_both(row, put_on, order) for order in ("ours first", "lora first"))
    assert torch.equal(logits(one), logits(other))
    assert torch.equal(generated(one), generated(other, use_cache=False))
    assert (logits(one) - logits(make_patched(row))).abs().max() > 1e-2
    mmpreproj.check_intact(one)
    lora = put_on(make_model(row), row).eval()
    shake_lora(lora)
    mmpreproj.unpatch(one)
    assert torch.equal(logits(one), logits(lora))


@pytest.mark.parametrize("order", ["ours first", "lora first"])
def test_merging_lora_keeps_ours(row, order):
    model = with_both(row, wrapped, order)
    expected = logits(model)
    merged = model.merge_and_unload()
    assert not any("lora_" in key for key in merged.state_dict())
    torch.testing.assert_close(logits(merged), expected, rtol=1e-4, atol=1e-4)
    assert mmpreproj.adapters(merged) == ("default",)
    mmpreproj.check_intact(merged)
    mmpreproj.set_scale(merged, 0)
    assert (logits(merged) - expected).abs().max() > 1e-2


@pytest.mark.parametrize("order", ["ours first", "lora first"])
def test_unloading_lora_keeps_ours(row, order):
    model = with_both(row, wrapped, order).unload()
    assert torch.equal(logits(model), logits(make_patched(row)))


@pytest.mark.parametrize("put_on", WAYS)
def test_lora_freezes_ours_and_thaw_trains_both(row, put_on):
    model = make_model(row)
    mmpreproj.patch(model)
    model = put_on(model, row)
    assert not any(parameter.requires_grad for parameter in mmpreproj.parameters(model))
    mmpreproj.thaw(model)
    shake(model)
    shake_lora(model)
    ids = make_ids()
    model(input_ids=ids, labels=ids).loss.backward()
    moved = {key for key, parameter in model.named_parameters() if parameter.grad is not None}
    assert all("lora_" in key or ".preproj." in key for key in moved)
    assert all(parameter.grad.abs().max() > 0 for parameter in mmpreproj.parameters(model))
    assert any("lora_" in key for key in moved)


@pytest.mark.parametrize("order", ["ours first", "lora first"])
def test_each_is_saved_alone_and_both_come_together_again(row, order, tmp_path):
    model = with_both(row, wrapped, order)
    model.save_pretrained(tmp_path / "lora")
    mmpreproj.save(model, tmp_path / "ours", card=False)
    fresh = make_model(row)
    if order == "ours first":
        mmpreproj.load(fresh, tmp_path / "ours")
    fresh = PeftModel.from_pretrained(fresh, str(tmp_path / "lora"))
    if order == "lora first":
        mmpreproj.load(fresh, tmp_path / "ours")
    assert torch.equal(logits(fresh.eval()), logits(model))
    plain = make_model(row)
    mmpreproj.load(plain, tmp_path / "ours")
    assert torch.equal(logits(plain), logits(make_patched(row)))


@pytest.mark.parametrize("order", ["ours first", "lora first"])
def test_lora_on_every_linear_map_leaves_ours_alone(row, order, tmp_path):
    def everywhere(model: nn.Module, row: str) -> nn.Module:
        return get_peft_model(model, config(row, target_modules="all-linear"))

    model = with_both(row, everywhere, order)
    on = [name for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)]
    assert on and not [name for name in on if "preproj" in name]
    mmpreproj.save(model, tmp_path, card=False)
    plain = make_model(row)
    mmpreproj.load(plain, tmp_path)
    assert torch.equal(logits(plain), logits(make_patched(row)))
    assert torch.equal(logits(model.unload()), logits(plain))


PROMPTS = {
    "prefix": lambda: PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    "prompt": lambda: PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    "encoder": lambda: PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=4, encoder_hidden_size=16),
}


@pytest.mark.parametrize("kind", PROMPTS)
def test_tuned_prefixes_and_prompts_live_beside_an_adapter(row, kind):
    base = get_peft_model(make_model(row), PROMPTS[kind]()).eval()
    expected = logits(base)
    model = copy.deepcopy(base)
    mmpreproj.patch(model, PreProjConfig(init="zero"))
    assert torch.equal(logits(model), expected)
    shake(model)
    assert (logits(model) - expected).abs().max() > 1e-2
    mmpreproj.thaw(model)
    ids = make_ids()
    model(input_ids=ids, labels=ids).loss.backward()
    trained = [key for key, parameter in model.named_parameters() if parameter.requires_grad]
    assert any("prompt_encoder" in key for key in trained) and any(".preproj." in key for key in trained)
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters() if p.requires_grad)
    mmpreproj.unpatch(model)
    assert torch.equal(logits(model), expected)


def test_lora_turned_off_for_a_block_leaves_ours_alone(row):
    model = with_both(row, wrapped, "ours first")
    with model.disable_adapter():
        assert torch.equal(logits(model), logits(make_patched(row)))
    lora = with_both(row, wrapped, "ours first")
    mmpreproj.unpatch(lora)
    with mmpreproj.disabled(model):
        assert torch.equal(logits(model), logits(lora))
