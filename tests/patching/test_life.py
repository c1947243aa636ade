"""Any order of patch, load, swap, scale, switch, LoRA and removal gives what a plain reference predicts.

The reference is a copy of the base whose attentions are wrapped by a module that spells the equations out with raw
weights, and whose linear layers have the LoRA merged. It shares no code with the package.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from peft import LoraConfig
from safetensors.torch import load_file
from torch import Tensor, nn

import mmpreproj
from mmpreproj import PreProjConfig

NAMES = ("first", "second", "third")
CONFIGS = (
    PreProjConfig(),
    PreProjConfig(expansion=0.5),
    PreProjConfig(share="stream"),
    PreProjConfig(skip=False, blocks=[0]),
    PreProjConfig(pre_projection=False, share="stream", dual_attention=False),
    PreProjConfig(blocks={"last": 1}, init="zero"),
)
RANK, ALPHA = 2, 3
LORA_TARGETS = (["to_q", "to_v", "add_k_proj"], ["ff.net.2", "to_out.0"], "all-linear")
NUMBERS = st.sampled_from([-2.0, -0.5, 0.0, 0.25, 0.5, 1.0, 1.5])  # exact in the float32 of the buffer
SIZES = st.one_of(
    NUMBERS, st.lists(NUMBERS, min_size=2, max_size=2), st.dictionaries(st.integers(0, 1), NUMBERS, min_size=1)
)


@dataclass
class Plain:
    """What the reference knows of an adapter: raw weights by their names in a file, scale by block, switch."""

    weights: dict[str, Tensor]
    scales: dict[int, float]
    enabled: bool = True
    trainable: bool = True

    @staticmethod
    def from_weights(weights: dict[str, Tensor]) -> Plain:
        return Plain(weights, {int(key.split(".")[1]): 1.0 for key in weights})


class PlainAttention(nn.Module):
    """An attention with `x_tilde = x_hat + Σ s Δ(x_hat)` before it and `Σ s W (x_hat + Δ(x_hat))` around it."""

    def __init__(self, attention: nn.Module, block: int, child: str) -> None:
        super().__init__()
        self.attention, self.block, self.path = attention, block, f"transformer_blocks.{block}.{child}.preproj"
        self.adapters: list[Plain] = []

    def around(self, x_hat: Tensor, stream: str) -> tuple[Tensor, Tensor]:
        features, bypass = x_hat, torch.zeros_like(x_hat)
        for adapter in self.adapters:
            for key in ("shared", stream):
                up = adapter.weights.get(f"{self.path}.pre_projection.{key}.up.weight")
                down = adapter.weights.get(f"{self.path}.pre_projection.{key}.down.weight")
                skip = adapter.weights.get(f"{self.path}.content_skip.{key}.map.weight")
                delta = F.silu(x_hat @ up.T) @ down.T if up is not None else torch.zeros_like(x_hat)
                if up is not None:
                    features = features + adapter.scales[self.block] * delta
                if skip is not None:
                    bypass = bypass + adapter.scales[self.block] * ((x_hat + delta) @ skip.T)
        return features, bypass

    def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None) -> Any:
        image, image_skip = self.around(hidden_states, "image")
        if encoder_hidden_states is None:
            return self.attention(hidden_states=image) + image_skip
        text, text_skip = self.around(encoder_hidden_states, "text")
        image_out, text_out = self.attention(hidden_states=image, encoder_hidden_states=text)
        return image_out + image_skip, text_out + text_skip


class Reference:
    """The base, adapters as raw tensors, and a LoRA as changes of the base's weights."""

    def __init__(self, base: nn.Module, inputs: dict[str, Tensor]) -> None:
        self.model, self.inputs = copy.deepcopy(base), inputs
        self.linear = {path: module for path, module in self.model.named_modules() if isinstance(module, nn.Linear)}
        self.before = {path: module.weight.detach().clone() for path, module in self.linear.items()}
        self.attentions = []
        for index, block in enumerate(self.model.transformer_blocks):
            for child in ("attn", "attn2"):
                if getattr(block, child, None) is not None:
                    self.attentions.append(PlainAttention(getattr(block, child), index, child))
                    setattr(block, child, self.attentions[-1])

    @torch.no_grad()
    def output(self, adapters: dict[str, Plain], lora: dict[str, tuple[Tensor, Tensor]]) -> Tensor:
        for attention in self.attentions:
            attention.adapters = [adapter for adapter in adapters.values() if adapter.enabled]
        for path, module in self.linear.items():
            module.weight.copy_(self.before[path])
            if path in lora:
                a, b = lora[path]
                module.weight.add_(ALPHA / RANK * b @ a)
        return self.model(**self.inputs, return_dict=False)[0]


class Life(RuleBasedStateMachine):
    """A patched model beside its reference; class attributes are set by the test."""

    make_base: Callable[[], nn.Module]
    inputs: dict[str, Tensor]
    snapshot: type
    folders: list[Path]

    def __init__(self) -> None:
        super().__init__()
        self.model = type(self).make_base()
        self.reference = Reference(self.model, self.inputs)
        self.base = self.snapshot(self.model)
        self.base_output = self.run()
        self.flags = self.flags_of_base()
        self.plain: dict[str, Plain] = {}
        self.lora: dict[str, tuple[Tensor, Tensor]] = {}

    def run(self) -> Tensor:
        with torch.no_grad():
            return self.model(**self.inputs, return_dict=False)[0]

    def flags_of_base(self) -> dict[str, dict[str, bool]]:
        def is_ours(path: str) -> bool:
            return "preproj" in path or "lora_" in path

        def plain(path: str) -> str:
            return path.replace(".base_layer", "")

        named, modules = self.model.named_parameters(), self.model.named_modules()
        return {
            "requires_grad": {plain(key): value.requires_grad for key, value in named if not is_ours(key)},
            "training": {plain(path): module.training for path, module in modules if not is_ours(path)},
        }

    def present(self) -> st.SearchStrategy[str]:
        return st.sampled_from(sorted(self.plain))

    def absent(self) -> st.SearchStrategy[str]:
        return st.sampled_from(sorted(set(NAMES) - set(self.plain)))

    # Adapters come and go

    @precondition(lambda self: len(self.plain) < len(NAMES))
    @rule(data=st.data(), config=st.sampled_from(CONFIGS), seed=st.integers(0, 3))
    def patch(self, data: st.DataObject, config: PreProjConfig, seed: int) -> None:
        name = data.draw(self.absent())
        mmpreproj.patch(self.model, config, name=name)
        generator, weights = torch.Generator().manual_seed(seed), {}
        for key, parameter in mmpreproj.named_parameters(self.model, name):
            value = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.2
            parameter.data.copy_(value)
            weights[key.replace(f".adapters.{name}.", ".")] = value
        self.plain[name] = Plain.from_weights(weights)

    @precondition(lambda self: len(self.plain) < len(NAMES))
    @rule(data=st.data(), which=st.integers(0, len(CONFIGS) - 1), replace=st.booleans())
    def load(self, data: st.DataObject, which: int, replace: bool) -> None:
        name, folder = data.draw(self.absent()), self.folders[which]
        mmpreproj.load(self.model, folder, name=name, replace=replace)
        self.plain[name] = Plain.from_weights(load_file(folder / "adapter_model.safetensors"))

    @precondition(lambda self: self.plain)
    @rule(data=st.data(), which=st.integers(0, len(CONFIGS) - 1))
    def swap(self, data: st.DataObject, which: int) -> None:
        name, folder = data.draw(self.present()), self.folders[which]
        old, new = self.plain[name], Plain.from_weights(load_file(folder / "adapter_model.safetensors"))
        first = next(iter(old.scales.values()))
        mmpreproj.load(self.model, folder, name=name, replace=True)
        new.scales = {block: old.scales.get(block, first) for block in new.scales}
        new.enabled, new.trainable = old.enabled, old.trainable
        self.plain[name] = new

    @precondition(lambda self: self.plain)
    @rule(data=st.data())
    def patch_under_a_taken_name(self, data: st.DataObject) -> None:
        with pytest.raises(ValueError, match="already patched under the name"):
            mmpreproj.patch(self.model, CONFIGS[0], name=data.draw(self.present()))

    @precondition(lambda self: self.plain)
    @rule(data=st.data())
    def unpatch_one(self, data: st.DataObject) -> None:
        name = data.draw(self.present())
        mmpreproj.unpatch(self.model, name)
        del self.plain[name]

    @precondition(lambda self: self.plain)
    @rule()
    def unpatch_all(self) -> None:
        mmpreproj.unpatch(self.model)
        self.plain.clear()

    # Strength and switches

    @precondition(lambda self: self.plain)
    @rule(data=st.data(), size=SIZES)
    def set_scale_of_one(self, data: st.DataObject, size: Any) -> None:
        self._set_scale({data.draw(self.present()): size})

    @precondition(lambda self: self.plain)
    @rule(size=SIZES)
    def set_scale_of_all(self, size: Any) -> None:
        self._set_scale(size)

    def _set_scale(self, scale: Any) -> None:
        by_name = isinstance(scale, dict) and isinstance(next(iter(scale)), str)
        wanted = scale if by_name else dict.fromkeys(self.plain, scale)
        if any(isinstance(size, dict) and set(size) - set(self.plain[name].scales) for name, size in wanted.items()):
            with pytest.raises(ValueError, match="the adapter is not on blocks"):
                mmpreproj.set_scale(self.model, scale)
            return
        mmpreproj.set_scale(self.model, scale)
        for name, size in wanted.items():
            sizes = size if isinstance(size, dict) else dict(enumerate(size if isinstance(size, list) else [size] * 2))
            scales = self.plain[name].scales
            scales.update({block: number for block, number in sizes.items() if block in scales})

    @precondition(lambda self: self.plain)
    @rule(data=st.data(), on=st.booleans())
    def switch(self, data: st.DataObject, on: bool) -> None:
        name = data.draw(st.one_of(st.none(), self.present()))
        (mmpreproj.enable if on else mmpreproj.disable)(self.model, name)
        for switched in self.plain if name is None else (name,):
            self.plain[switched].enabled = on

    @precondition(lambda self: self.plain)
    @rule()
    def look_at_the_base_for_a_while(self) -> None:
        with mmpreproj.disabled(self.model):
            self.compare({})

    # LoRA

    @precondition(lambda self: not self.lora)
    @rule(layers=st.sampled_from(LORA_TARGETS), seed=st.integers(0, 3))
    def add_lora(self, layers: Any, seed: int) -> None:
        base = [(value, value.requires_grad) for key, value in self.model.named_parameters() if "preproj" not in key]
        self.model.add_adapter(LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=layers), adapter_name="style")
        for value, flag in base:  # PEFT freezes everything but its own
            value.requires_grad_(flag)
        for plain in self.plain.values():
            plain.trainable = False
        generator, halves = torch.Generator().manual_seed(seed), {}
        for key, parameter in self.model.named_parameters():
            if ".lora_" in key:
                value = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3
                parameter.data.copy_(value)
                halves[key] = value
        paths = [key.removesuffix(".lora_A.style.weight") for key in halves if ".lora_A." in key]
        self.lora = {
            path: (halves[f"{path}.lora_A.style.weight"], halves[f"{path}.lora_B.style.weight"]) for path in paths
        }
        assert self.lora

    @precondition(lambda self: self.lora)
    @rule()
    def remove_lora(self) -> None:
        self.model.unload_lora()
        self.lora = {}

    @precondition(lambda self: self.plain)
    @rule(data=st.data())
    def thaw(self, data: st.DataObject) -> None:
        name = data.draw(self.present())
        mmpreproj.thaw(self.model, name)
        self.plain[name].trainable = True

    # What always holds

    def compare(self, adapters: dict[str, Plain]) -> None:
        output, expected = self.run(), self.reference.output(adapters, self.lora)
        # Normed queries and keys go through float32 in the base.
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
        silent = all(not plain.enabled or not any(plain.scales.values()) for plain in adapters.values())
        if silent and not self.lora:
            assert torch.equal(output, self.base_output)

    @invariant()
    def output_is_what_the_reference_predicts(self) -> None:
        self.compare(self.plain)

    @invariant()
    def flags_of_everything_else_are_untouched(self) -> None:
        assert self.flags_of_base() == self.flags
        for name, plain in self.plain.items():
            assert all(
                parameter.requires_grad == plain.trainable for parameter in mmpreproj.parameters(self.model, name)
            )

    @invariant()
    def what_can_be_asked_is_what_was_done(self) -> None:
        assert set(mmpreproj.adapters(self.model)) == set(self.plain)
        assert mmpreproj.is_patched(self.model) == bool(self.plain)
        mmpreproj.check_intact(self.model)
        if self.plain:
            assert mmpreproj.scales(self.model) == {name: plain.scales for name, plain in self.plain.items()}
        for name, plain in self.plain.items():
            assert mmpreproj.is_enabled(self.model, name) == plain.enabled

    @invariant()
    def without_adapters_the_base_is_back(self) -> None:
        if not self.plain and not self.lora:
            self.base.check(self.model)
        elif not self.plain:
            assert not any("preproj" in key for key in (*self.model.state_dict(), *vars(self.model)))

    def teardown(self) -> None:
        if self.plain:
            self.unpatch_all()
        if self.lora:
            self.remove_lora()
        self.base.check(self.model)
        assert torch.equal(self.run(), self.base_output)


@pytest.fixture
def life(make_transformer, make_inputs, shake, snapshot, tmp_path) -> type[Life]:
    """The machine on a tiny SD3.5-style model with mixed flags and somebody else's hooks, and adapters to load."""
    stock = make_transformer("sd35").double()
    stock.requires_grad_(False)
    stock.pos_embed.requires_grad_(True)
    stock.transformer_blocks[1].train()
    folders = []
    for number, config in enumerate(CONFIGS):
        donor = make_transformer("sd35").double()
        mmpreproj.patch(donor, config)
        shake(donor, seed=number)
        folders.append(mmpreproj.save(donor, tmp_path / str(number), card=False))

    def make_base() -> nn.Module:
        model = copy.deepcopy(stock)
        model.transformer_blocks[0].attn.register_forward_hook(lambda module, args, output: None)
        return model

    inputs = make_inputs(torch.float64)
    values = {"make_base": staticmethod(make_base), "inputs": inputs, "snapshot": snapshot, "folders": folders}
    return type("LifeOfATinyModel", (Life,), values)


def run_life(machine: type[Life], *, examples: int) -> None:
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=12,
            derandomize=True,
            deadline=None,
            database=None,
            suppress_health_check=checks,
        ),
    )


def test_any_order_of_events_gives_what_the_reference_predicts(life):
    run_life(life, examples=12)


@pytest.mark.slow
def test_a_hundred_orders_of_events_give_what_the_reference_predicts(life):
    run_life(life, examples=100)
