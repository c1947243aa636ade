"""Swapping a saved adapter in for the one that has its name: `load(…, replace=True)`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mmpreproj
from mmpreproj import PreProjConfig

WEIGHTS = "adapter_model.safetensors"
OTHER_SHAPES = [{"share": "stream"}, {"blocks": [1]}, {"expansion": 0.5}, {"skip": False}, {"pre_projection": False}]


@pytest.fixture
def make_saved(make_transformer, style, shake, tmp_path) -> Callable[..., Path]:
    """Save an adapter of the given settings, trained otherwise than the one on `model`."""

    def make(**values: Any) -> Path:
        model = make_transformer(style)
        mmpreproj.patch(model, PreProjConfig(**values))
        shake(model, seed=7)
        return mmpreproj.save(model, tmp_path / "adapter", card=False)

    return make


@pytest.fixture
def model(transformer, shake) -> nn.Module:
    """A model with the trained adapters `mine` and `beside`."""
    mmpreproj.patch(transformer, name="mine")
    mmpreproj.patch(transformer, PreProjConfig(share="stream", blocks=[0]), name="beside")
    shake(transformer)
    return transformer


@pytest.fixture
def freshly_loaded(make_transformer, style, predict) -> Callable[..., torch.Tensor]:
    """The output with an adapter that was loaded onto a model without any, at a scale."""

    def run(folder: Path, scale: Any = 1) -> torch.Tensor:
        other = make_transformer(style)
        mmpreproj.load(other, folder, name="mine")
        mmpreproj.set_scale(other, {"mine": scale})
        return predict(other)

    return run


def values_of(model: nn.Module, name: str) -> dict[str, torch.Tensor]:
    return {key: value.detach().clone() for key, value in mmpreproj.named_parameters(model, name)}


def test_equal_shapes_are_swapped_in_place(model, make_saved, predict, freshly_loaded):
    folder = make_saved()
    mmpreproj.set_scale(model, {"mine": [0.5, -0.25]})
    frozen, *_ = mmpreproj.parameters(model, "mine")
    frozen.requires_grad_(False)
    parameters = {key: (id(value), value.requires_grad) for key, value in mmpreproj.named_parameters(model)}
    beside, before = values_of(model, "beside"), values_of(model, "mine")
    report = mmpreproj.load(model, folder, name="mine", replace=True)
    assert (report.name, report.blocks) == ("mine", (0, 1))
    assert {key: (id(value), value.requires_grad) for key, value in mmpreproj.named_parameters(model)} == parameters
    assert all(torch.equal(beside[key], value) for key, value in values_of(model, "beside").items())
    assert not any(torch.equal(before[key], value) for key, value in values_of(model, "mine").items())
    assert mmpreproj.scales(model)["mine"] == {0: 0.5, 1: -0.25}
    mmpreproj.unpatch(model, "beside")
    assert torch.equal(predict(model), freshly_loaded(folder, [0.5, -0.25]))


def test_an_optimiser_goes_on_with_what_was_swapped_in(model, make_saved, make_inputs):
    optimiser = torch.optim.SGD(mmpreproj.parameters(model, "mine"), lr=0.1)
    mmpreproj.load(model, make_saved(), name="mine", replace=True)
    before = values_of(model, "mine")
    model(**make_inputs(), return_dict=False)[0].square().mean().backward()
    optimiser.step()
    assert not any(torch.equal(before[key], value) for key, value in values_of(model, "mine").items())


def test_a_swap_brings_its_own_profile(model, make_saved, make_transformer, style):
    folder, other = make_saved(init_std=0.01), make_transformer(style)
    mmpreproj.load(other, folder)
    expected = mmpreproj.profile(other)
    mmpreproj.load(model, folder, name="mine", replace=True)
    assert mmpreproj.profile(model, name="mine") == expected


@pytest.mark.parametrize("values", [{}, *OTHER_SHAPES], ids=str)
@pytest.mark.parametrize("trainable", [True, False])
def test_a_swap_takes_over_scale_switch_and_whether_it_trains(
    model, make_saved, predict, freshly_loaded, values: dict[str, Any], trainable: bool
):
    folder = make_saved(**values)
    for parameter in mmpreproj.parameters(model, "mine"):
        parameter.requires_grad_(trainable)
    mmpreproj.set_scale(model, {"mine": [0.5, 0.3]})
    mmpreproj.disable(model, "mine")
    report = mmpreproj.load(model, folder, name="mine", replace=True)
    assert set(mmpreproj.adapters(model)) == {"mine", "beside"}
    assert not mmpreproj.is_enabled(model, "mine")
    assert mmpreproj.is_enabled(model, "beside")
    assert all(parameter.requires_grad == trainable for parameter in mmpreproj.parameters(model, "mine"))
    expected = {block: (0.5, 0.3)[block] for block in report.blocks}
    assert mmpreproj.scales(model)["mine"] == expected
    mmpreproj.unpatch(model, "beside")
    mmpreproj.enable(model, "mine")
    assert torch.equal(predict(model), freshly_loaded(folder, expected))


@pytest.mark.parametrize("values", OTHER_SHAPES, ids=str)
def test_another_shape_is_swapped_in_whole(
    model, make_transformer, style, make_saved, predict, snapshot, values: dict[str, Any]
):
    other = make_transformer(style)
    mmpreproj.load(other, make_saved(**values), name="mine")
    beside = {key: id(value) for key, value in mmpreproj.named_parameters(model, "beside")}
    report = mmpreproj.load(model, make_saved(**values), name="mine", replace=True)
    assert report.sites == mmpreproj.load(make_transformer(style), make_saved(**values), name="mine").sites
    assert {key: id(value) for key, value in mmpreproj.named_parameters(model, "beside")} == beside
    mmpreproj.check_intact(model)
    mmpreproj.unpatch(model, "beside")
    assert list(model.state_dict()) == list(other.state_dict())
    assert torch.equal(predict(model), predict(other))
    mmpreproj.unpatch(model)
    bare = make_transformer(style)
    assert list(model.state_dict()) == list(bare.state_dict())
    assert torch.equal(predict(model), predict(bare))


def test_a_swap_of_the_only_adapter_and_back(transformer, make_saved, shake, predict, snapshot, tmp_path):
    before, base = snapshot(transformer), predict(transformer)
    mmpreproj.patch(transformer, name="mine")
    shake(transformer)
    output = predict(transformer)
    first, second = mmpreproj.save(transformer, tmp_path / "first"), make_saved(share="stream")
    for _ in range(2):
        mmpreproj.load(transformer, second, name="mine", replace=True)
        assert not torch.equal(predict(transformer), output)
        mmpreproj.load(transformer, first, name="mine", replace=True)
        assert torch.equal(predict(transformer), output)
    mmpreproj.unpatch(transformer)
    before.check(transformer)
    assert torch.equal(predict(transformer), base)


def test_a_name_that_is_not_there_is_a_plain_load(make_transformer, style, make_saved, predict, freshly_loaded):
    folder = make_saved()
    model = make_transformer(style)
    mmpreproj.load(model, folder, name="mine", replace=True)
    assert mmpreproj.adapters(model) == ("mine",)
    assert torch.equal(predict(model), freshly_loaded(folder))
    with pytest.raises(ValueError, match="name must be a non-empty string without dots"):
        mmpreproj.load(model, folder, name="a.b", replace=True)


def test_without_replace_a_taken_name_is_refused(model, make_saved, snapshot):
    before = snapshot(model)
    with pytest.raises(ValueError, match=r"already patched under the name 'mine'.*replace=True"):
        mmpreproj.load(model, make_saved(), name="mine")
    before.check(model)


def test_a_swap_in_place_keeps_what_a_finer_adapter_can_hold(make_transformer, style, make_saved):
    """A trainer keeps the adapter in fp32 on a bf16 base; the swap must not round to the base's dtype."""
    folder, exact, model = make_saved(), make_transformer(style), make_transformer(style).bfloat16()
    mmpreproj.load(exact, folder, name="mine")
    mmpreproj.patch(model, name="mine")
    for parameter in mmpreproj.parameters(model):
        parameter.data = parameter.data.float()
    mmpreproj.load(model, folder, name="mine", replace=True)
    expected = values_of(exact, "mine")
    assert all(torch.equal(expected[key], value) for key, value in values_of(model, "mine").items())


def truncate(folder: Path) -> None:
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[: len(content) // 2])


@pytest.mark.parametrize("values", [{}, {"share": "stream"}], ids=str)
@pytest.mark.parametrize(
    ("spoil", "error", "match"),
    [
        (truncate, ValueError, "damaged"),
        (lambda folder: (folder / WEIGHTS).unlink(), FileNotFoundError, f"holds no {WEIGHTS}"),
        (lambda folder: (folder / "adapter_config.json").write_text("{"), ValueError, "not valid JSON"),
    ],
    ids=["truncated", "gone", "no JSON"],
)
def test_an_error_leaves_the_old_adapter(model, make_saved, predict, snapshot, values, spoil, error, match: str):
    folder = make_saved(**values)
    spoil(folder)
    mmpreproj.set_scale(model, {"mine": 0.5})
    before, output, scales = snapshot(model), predict(model), mmpreproj.scales(model)
    with pytest.raises(error, match=match):
        mmpreproj.load(model, folder, name="mine", replace=True)
    before.check(model)
    assert mmpreproj.scales(model) == scales
    assert torch.equal(predict(model), output)


def test_an_adapter_for_another_base_leaves_the_old_one(make_transformer, style, make_saved, predict, snapshot):
    model = make_transformer(style, num_layers=3)
    mmpreproj.patch(model, name="mine")
    before, output = snapshot(model), predict(model)
    with pytest.raises(ValueError, match=r"was made for .* depth 2, .* but this model is .* depth 3"):
        mmpreproj.load(model, make_saved(), name="mine", replace=True)
    before.check(model)
    assert torch.equal(predict(model), output)
