"""The life of an adapter with positions: on and off a model, to a file and back, copied, scaled, switched, swapped."""

import copy
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import SD3Transformer2DModel
from diffusers.models.attention_processor import JointAttnProcessor2_0
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import mmpreproj
from mmpreproj import Positions, PreProjConfig
from mmpreproj.patching import lifecycle
from mmpreproj.patching.positions.life import masks_padding

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
CONTENT = PreProjConfig(blocks=[1])  # so that positions reach attentions that nothing else is on
LEARNED = PreProjConfig(positions=Positions(text="diagonal", absolute="remove"))
WHOLE = PreProjConfig(pre_projection=False, skip=False, positions=Positions(start="full"))  # without any parameter
MASK = PreProjConfig(mask_padding=True)
KINDS = {"content": CONTENT, "learned": LEARNED, "whole": WHOLE, "mask": MASK}
POSITIONED = [config for config in KINDS.values() if config.needs_processor]


def relative(a: Tensor, b: Tensor) -> float:
    return float(torch.linalg.vector_norm(a.double() - b.double()) / torch.linalg.vector_norm(b.double()))


def paths(model: nn.Module) -> list[str]:
    """Paths of the joint attentions."""
    return [name for name, _ in model.named_modules() if name.split(".")[-1] in ("attn", "attn2")]


def gains(model: nn.Module, name: str | None = None) -> dict[str, Tensor]:
    return {key: value for key, value in mmpreproj.named_parameters(model, name) if "rotary_gain" in key}


def processors(model: nn.Module) -> dict[str, int]:
    """Identities of the attention processors."""
    return {path: id(processor) for path, processor in model.attn_processors.items()}


def kinds_of_processors(model: nn.Module) -> set[str]:
    return {type(processor).__name__ for processor in model.attn_processors.values()}


def content_free(**values: Any) -> PreProjConfig:
    """Settings of an adapter that is positions and nothing else."""
    return PreProjConfig(pre_projection=False, skip=False, positions=Positions(**values))


@pytest.fixture
def make_saved(make_transformer, style, shake, tmp_path) -> Callable[..., Path]:
    """Save a trained adapter of these settings, made for the tiny transformer of this style."""
    numbers = itertools.count()

    def make(config: PreProjConfig, seed: int = 7) -> Path:
        model = make_transformer(style)
        mmpreproj.patch(model, config)
        shake(model, seed=seed)
        return mmpreproj.save(model, tmp_path / f"adapter{next(numbers)}", card=False)

    return make


@pytest.fixture
def freshly_loaded(make_transformer, style, predict) -> Callable[..., Tensor]:
    """The output with adapters that were loaded onto a model without any, at a scale."""

    def run(*folders: Path, scale: Any = 1) -> Tensor:
        model = make_transformer(style)
        for index, folder in enumerate(folders):
            mmpreproj.load(model, folder, name=f"fresh{index}")
        mmpreproj.set_scale(model, scale)
        return predict(model)

    return run


# On and off


@pytest.mark.parametrize("config", POSITIONED, ids=["learned", "whole", "mask"])
def test_unpatch_leaves_the_base_bit_for_bit(transformer, predict, snapshot, shake, config: PreProjConfig):
    # Flags and hooks of somebody else must come through too.
    transformer.requires_grad_(False)
    transformer.transformer_blocks[0].train()
    calls: list[str] = []
    for module in (transformer, transformer.pos_embed, transformer.transformer_blocks[0].attn):
        module.register_forward_pre_hook(lambda module, args, kwargs: calls.append("before"), with_kwargs=True)
        module.register_forward_hook(lambda module, args, output: calls.append("after"))
    before, own, base = snapshot(transformer), processors(transformer), predict(transformer)
    mmpreproj.patch(transformer, config)
    shake(transformer)
    assert processors(transformer) != own
    assert config.positions is None or not torch.equal(predict(transformer), base)
    mmpreproj.unpatch(transformer)
    before.check(transformer)
    assert processors(transformer) == own
    assert kinds_of_processors(transformer) == {"JointAttnProcessor2_0"}
    assert torch.equal(predict(transformer), base)
    mmpreproj.check_intact(transformer)
    assert not [key for key in vars(transformer) if "preproj" in key]
    assert calls[:6] == ["before", "before", "after", "before", "after", "after"]


@pytest.mark.parametrize("removal", ["first, second", pytest.param("second, first", marks=pytest.mark.slow), "both"])
@pytest.mark.parametrize("pair", itertools.product(KINDS, repeat=2), ids=" and ".join)
def test_two_adapters_come_off_in_any_order(
    transformer, predict, snapshot, make_saved, freshly_loaded, pair: tuple[str, str], removal: str
):
    before, own, base = snapshot(transformer), processors(transformer), predict(transformer)
    folders = {name: make_saved(KINDS[kind], seed) for seed, (name, kind) in enumerate(zip("ab", pair, strict=True))}
    for name, folder in folders.items():
        mmpreproj.load(transformer, folder, name=name)
    needing = {name: KINDS[kind].needs_processor for name, kind in zip("ab", pair, strict=True)}
    ours = processors(transformer)
    assert (ours != own) == any(needing.values())
    torch.testing.assert_close(predict(transformer), freshly_loaded(*folders.values()), rtol=1e-6, atol=1e-6)
    if removal == "both":
        mmpreproj.unpatch(transformer)
    else:
        gone, left = ("a", "b") if removal == "first, second" else ("b", "a")
        mmpreproj.unpatch(transformer, gone)
        mmpreproj.check_intact(transformer)
        assert processors(transformer) == (ours if needing[left] else own)
        assert ("preproj" in transformer._modules) == ("preproj" in transformer.pos_embed._modules) == needing[left]
        assert torch.equal(predict(transformer), freshly_loaded(folders[left]))
        mmpreproj.unpatch(transformer, left)
    before.check(transformer)
    assert processors(transformer) == own
    assert torch.equal(predict(transformer), base)


def test_patching_again_and_again_leaves_one_set_of_hooks(transformer, predict, snapshot, make_saved):
    folder, before, outputs = make_saved(LEARNED), snapshot(transformer), []
    for _ in range(3):
        mmpreproj.load(transformer, folder)
        outputs.append(predict(transformer))
        mmpreproj.load(transformer, make_saved(WHOLE), name="other")
        assert len(transformer._forward_pre_hooks) == len(transformer.pos_embed._forward_hooks) == 1
        mmpreproj.unpatch(transformer)
        before.check(transformer)
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])


def test_a_processor_put_in_after_patching_is_not_taken_away(transformer, predict):
    base = predict(transformer)
    mmpreproj.patch(transformer, LEARNED)
    other = JointAttnProcessor2_0()
    transformer.set_attn_processor(other)
    mmpreproj.unpatch(transformer)
    assert set(processors(transformer).values()) == {id(other)}
    assert torch.equal(predict(transformer), base)


def test_a_model_unpatched_while_fused_is_its_base_when_unfused(make_transformer, predict):
    model = make_transformer()
    base = predict(model)
    mmpreproj.patch(model, LEARNED)
    model.fuse_qkv_projections()
    mmpreproj.unpatch(model)
    model.unfuse_qkv_projections()
    assert torch.equal(predict(model), base)
    mmpreproj.patch(model, LEARNED)
    mmpreproj.unpatch(model)
    assert kinds_of_processors(model) == {"JointAttnProcessor2_0"}


def test_an_adapter_patched_in_inference_mode_can_be_scaled_and_trained(transformer, make_inputs):
    with torch.inference_mode():
        mmpreproj.patch(transformer, LEARNED)
        transformer(**make_inputs())
    mmpreproj.set_scale(transformer, 0.5)
    transformer(**make_inputs(), return_dict=False)[0].square().mean().backward()
    assert all(gain.grad is not None and gain.grad.all() for gain in gains(transformer).values())


def test_weights_may_be_assigned_to_a_patched_model_on_meta(make_transformer, style, predict, shake):
    config = PreProjConfig(positions=Positions(absolute="remove", scaling="yarn"))
    model = make_transformer(style)
    with torch.device("meta"):
        empty = make_transformer(style)
    for each in (model, empty):
        mmpreproj.patch(each, config)
        mmpreproj.set_scale(each, 0.5)
    shake(model)
    empty.load_state_dict(model.state_dict(), assign=True)
    empty.pos_embed.pos_embed = model.pos_embed.pos_embed
    assert torch.equal(predict(empty), predict(model))


# Where it is


@pytest.mark.parametrize("blocks", [[1], [0], {"last": 1}], ids=str)
def test_blocks_restrict_the_content_and_positions_are_everywhere(transformer, blocks: Any):
    report = mmpreproj.patch(transformer, PreProjConfig(blocks=blocks, positions=Positions()))
    inside = {0} if blocks == [0] else {1}
    assert [site.path for site in report.sites] == paths(transformer)
    for site in report.sites:
        adapter = transformer.get_submodule(site.path).preproj.adapters["default"]
        assert bool(adapter.pre_projection) == bool(adapter.content_skip) == (site.block in inside)
        assert set(adapter.rotary_gain) == ({"image"} if site.path.endswith("attn2") else {"image", "text"})
        assert bool(site.projected) == bool(site.skipped) == (site.block in inside)
    assert kinds_of_processors(transformer) == {"RotaryJointAttnProcessor"}


def test_without_dual_attention_attn2_has_positions_and_nothing_else(make_transformer, predict, shake):
    model = make_transformer("sd35")
    mmpreproj.patch(model, PreProjConfig(dual_attention=False, positions=Positions()))
    shake(model)
    names = [name for name, _ in mmpreproj.named_parameters(model) if ".attn2." in name]
    assert names == ["transformer_blocks.0.attn2.preproj.adapters.default.rotary_gain.image.gain"]
    whole = predict(model)
    with torch.no_grad():
        model.get_parameter(names[0]).zero_()
    assert relative(predict(model), whole) > 1e-4, "its queries and keys are turned"


@pytest.mark.parametrize("start", ["identity", "full"])
def test_an_adapter_may_be_positions_alone(transformer, predict, shake, start: str):
    base = predict(transformer)
    report = mmpreproj.patch(transformer, content_free(start=start))
    names = [name for name, _ in mmpreproj.named_parameters(transformer)]
    assert names == list(gains(transformer))
    assert (
        report.parameters
        == len(names) * 2
        == (0 if start == "full" else 2 * (2 * len(paths(transformer)) - dual(transformer)))
    )
    shake(transformer, std=1.0)
    assert relative(predict(transformer), base) > 1e-3


def dual(model: nn.Module) -> int:
    return sum(path.endswith("attn2") for path in paths(model))


@pytest.mark.parametrize("text", ["1d", "none"])
def test_the_report_lists_positions(transformer, text: str):
    positions = Positions(text=text, scaling="linear")
    report = mmpreproj.patch(transformer, content_free(text=text, scaling="linear"))
    streams = ("image",) if text == "none" else ("image", "text")
    assert report.blocks == (0, 1) and report.streams == streams
    assert report.positions == Positions(**{**positions.to_dict(), "base_size": 4})
    for site in report.sites:
        assert site.projected == site.skipped == ()
        assert site.rotated == (("image",) if site.path.endswith("attn2") else streams)
        assert f"{site.path}: pre-projection -; skip -; positions {', '.join(site.rotated)}; " in str(report)
    assert f"positions: text {text}, image 2d, absolute keep, " in str(report)
    assert "scaling linear, base_size 4" in str(report)
    mmpreproj.patch(transformer, name="content")
    assert "positions" not in str(mmpreproj.patch(transformer, name="other"))


def test_gains_are_profiled_from_their_start(transformer, shake):
    mmpreproj.patch(transformer, LEARNED)
    assert {row.gain for row in mmpreproj.profile(transformer).gains} == {0.0}
    shake(transformer)
    rows = {(row.block, row.attention, row.stream): row.gain for row in mmpreproj.profile(transformer).gains}
    for name, gain in gains(transformer).items():
        _, block, attention, *_, stream, _ = name.split(".")
        assert rows.pop((int(block), attention, stream)) == pytest.approx(float(gain.detach().abs().mean()))
    assert not rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gains_take_dtype_and_mode_of_their_attention_and_start_at_zero(transformer, dtype):
    transformer.to(dtype)
    mmpreproj.patch(transformer, LEARNED)
    for gain in gains(transformer).values():
        assert gain.dtype == dtype and gain.requires_grad and not gain.any()
    assert not any(module.training for module in transformer.modules())
    mmpreproj.unpatch(transformer)
    mmpreproj.patch(transformer.train(), LEARNED)
    assert all(module.training for module in transformer.modules())


def test_gains_of_a_bf16_base_may_be_kept_finer(make_transformer, style, make_saved, predict):
    """A trainer does so: what is loaded takes the base's dtype, what is changed in place keeps its own."""
    folder, model = make_saved(LEARNED), make_transformer(style).bfloat16()
    expected = load_file(folder / WEIGHTS)
    mmpreproj.load(model, folder, name="mine")
    assert all(parameter.dtype == torch.bfloat16 for parameter in mmpreproj.parameters(model))
    for parameter in mmpreproj.parameters(model):
        parameter.data = parameter.data.float()
    mmpreproj.load(model, folder, name="mine", replace=True)
    for name, gain in gains(model).items():
        assert torch.equal(gain, expected[name.replace(".adapters.mine.", ".")])
    assert predict(model).dtype == torch.bfloat16 and predict(model).isfinite().all()


# To a file and back


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "config",
    [
        *POSITIONED,
        PreProjConfig(blocks=[1], share="stream", positions=Positions(image="none", theta=50.0)),
        PreProjConfig(dual_attention=False, mask_padding=True, positions=Positions(scaling="ntk")),
        content_free(text="none", scaling="yarn", base_size=2),
        content_free(text="none", image="none", absolute="remove"),
    ],
    ids=lambda config: str(config.positions.to_dict() if config.positions else None)[:60],
)
def test_round_trip_is_bit_equal(make_transformer, style, predict, shake, tmp_path, dtype, config: PreProjConfig):
    model, other = make_transformer(style).to(dtype), make_transformer(style).to(dtype)
    report = mmpreproj.patch(model, config, name="first")
    shake(model)
    mmpreproj.save(model, tmp_path / "first", card=False)
    loaded = mmpreproj.load(other, tmp_path / "first", name="second")
    assert (loaded.sites, loaded.positions) == (report.sites, report.positions)
    for (before, one), (after, value) in zip(
        mmpreproj.named_parameters(model), mmpreproj.named_parameters(other), strict=True
    ):
        assert after == before.replace(".adapters.first.", ".adapters.second.")
        assert torch.equal(one, value)
    assert torch.equal(predict(other), predict(model))
    mmpreproj.check_intact(other)
    mmpreproj.save(other, tmp_path / "second", card=False)
    for file in (CONFIG, WEIGHTS):
        assert (tmp_path / "second" / file).read_bytes() == (tmp_path / "first" / file).read_bytes()


@pytest.mark.parametrize("config", POSITIONED, ids=["learned", "whole", "mask"])
def test_every_kind_can_be_saved_with_its_card(make_transformer, tmp_path, config: PreProjConfig):
    model, other = make_transformer(), make_transformer()
    mmpreproj.patch(model, config)
    mmpreproj.save(model, tmp_path)
    pictures = ["profile.png"] if any(True for _ in mmpreproj.parameters(model)) else []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["README.md", CONFIG, WEIGHTS, *pictures]
    mmpreproj.load(other, tmp_path)


def test_files_hold_gains_and_positions(transformer, shake, tmp_path):
    mmpreproj.patch(transformer, LEARNED, name="mine")
    shake(transformer)
    mmpreproj.save(transformer, tmp_path)
    weights = load_file(tmp_path / WEIGHTS)
    assert "mine" not in " ".join(weights)
    expected = {key.replace(".adapters.mine.", "."): value for key, value in mmpreproj.named_parameters(transformer)}
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[key], value) for key, value in expected.items())
    for path in paths(transformer):
        assert weights[f"{path}.preproj.rotary_gain.image.gain"].shape == (2,), "one a head"
        assert (f"{path}.preproj.rotary_gain.text.gain" in weights) != path.endswith("attn2")
    config = json.loads((tmp_path / CONFIG).read_text())["config"]
    assert config["positions"] == Positions(text="diagonal", absolute="remove").to_dict()
    assert config["mask_padding"] is False


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, None),
        ({"base_size": 7}, 7),
        ({"scaling": "yarn"}, 4),
        ({"scaling": "linear", "base_size": 3}, 3),
    ],
    ids=str,
)
def test_the_base_size_of_a_scaling_is_kept_in_the_file(make_transformer, tmp_path, values, expected: int | None):
    model = make_transformer()
    mmpreproj.patch(model, content_free(**values))
    mmpreproj.save(model, tmp_path, card=False)
    assert json.loads((tmp_path / CONFIG).read_text())["config"]["positions"]["base_size"] == expected
    other = make_transformer(sample_size=16)  # made for pictures twice as large, with the same table
    assert mmpreproj.load(other, tmp_path).positions == Positions(**values | {"base_size": expected})


def edit(folder: Path, change: Callable[[dict[str, Any]], Any], *, copy_too: bool = True) -> None:
    """Change the config, and its copy in the weights or take that away."""
    values = json.loads((folder / CONFIG).read_text())
    change(values)
    text = json.dumps(values)
    (folder / CONFIG).write_text(text)
    save_file(load_file(folder / WEIGHTS), folder / WEIGHTS, metadata={"mmpreproj": text} if copy_too else None)


@pytest.mark.parametrize("copy_too", [True, False])
def test_an_adapter_of_a_version_without_positions_still_loads(
    make_transformer, style, make_saved, freshly_loaded, predict, copy_too: bool
):
    folder = make_saved(CONTENT)
    expected, model = freshly_loaded(folder), make_transformer(style)
    edit(
        folder, lambda values: [values["config"].pop(key) for key in ("positions", "mask_padding")], copy_too=copy_too
    )
    report = mmpreproj.load(model, folder)
    assert report.positions is None
    assert kinds_of_processors(model) == {"JointAttnProcessor2_0"}
    assert torch.equal(predict(model), expected)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda values: values["config"]["positions"].update(text="2d"), r"bad value: positions\.text must be one of"),
        (
            lambda values: values["config"]["positions"].update(thetta=1),
            "positions has no field 'thetta'; did you mean",
        ),
        (lambda values: values["config"].update(positions=["1d"]), "positions must be a mapping of its fields"),
        (lambda values: values["config"].update(positions=None), r"does not fit its config: .*rotary_gain"),
        (lambda values: values["config"]["positions"].update(start="full"), r"does not fit its config: .*rotary_gain"),
        (lambda values: values["config"].update(mask_padding=1), "mask_padding must be True or False; got 1"),
    ],
)
def test_a_file_with_bad_positions_is_refused_and_nothing_changes(
    make_transformer, style, make_saved, predict, snapshot, change, match: str
):
    folder, model = make_saved(LEARNED), make_transformer(style)
    edit(folder, change)
    before, own, base = snapshot(model), processors(model), predict(model)
    with pytest.raises(ValueError, match=match):
        mmpreproj.load(model, folder)
    before.check(model)
    assert processors(model) == own
    assert torch.equal(predict(model), base)


@pytest.mark.parametrize("replace", [False, True])
def test_loading_beside_a_foreign_processor_is_refused_and_nothing_changes(
    transformer, make_saved, predict, snapshot, replace: bool
):
    mmpreproj.patch(transformer, name="mine")
    transformer.set_attn_processor(ForeignProcessor())
    before, own, output = snapshot(transformer), processors(transformer), predict(transformer)
    with pytest.raises(ValueError, match=r"to be JointAttnProcessor2_0, .* found ForeignProcessor"):
        mmpreproj.load(transformer, make_saved(LEARNED), name="mine" if replace else "other", replace=replace)
    before.check(transformer)
    assert processors(transformer) == own
    assert torch.equal(predict(transformer), output)


class ForeignProcessor(JointAttnProcessor2_0):
    """What somebody else might put in."""


# Beside the base's own files


def test_a_patched_state_dict_has_gains_and_nothing_else_of_positions(transformer, shake):
    base = list(transformer.state_dict())
    mmpreproj.patch(transformer, LEARNED, name="learned")
    mmpreproj.patch(transformer, WHOLE, name="whole")
    keys = list(transformer.state_dict())
    assert set(keys) - set(base) == {name for name, _ in mmpreproj.named_parameters(transformer)}
    assert not [key for key in keys if "whole" in key]
    assert {key.split(".preproj.")[0] for key in gains(transformer)} == set(paths(transformer))
    with lifecycle.detached(transformer):
        assert list(transformer.state_dict()) == base


def test_the_state_dict_of_a_patched_model_loads_strictly_into_another(
    transformer, make_transformer, style, predict, shake
):
    other = make_transformer(style, seed=9)
    for model in (transformer, other):
        mmpreproj.patch(model, LEARNED)
    shake(transformer)
    other.load_state_dict(transformer.state_dict(), strict=True)
    assert torch.equal(predict(other), predict(transformer))


@pytest.mark.parametrize("way", ["patched", "detached"])
def test_what_save_pretrained_wrote_reloads_as_the_base(transformer, predict, shake, tmp_path, way: str):
    base, keys = predict(transformer), set(transformer.state_dict())
    mmpreproj.patch(transformer, LEARNED)
    shake(transformer)
    if way == "detached":
        with lifecycle.detached(transformer) as bare:
            bare.save_pretrained(tmp_path)
    else:
        transformer.save_pretrained(tmp_path)
    written = set(load_file(tmp_path / "diffusion_pytorch_model.safetensors"))
    own = {name for name, _ in mmpreproj.named_parameters(transformer)}
    assert written == (keys if way == "detached" else keys | own)
    reloaded = SD3Transformer2DModel.from_pretrained(tmp_path).eval()
    assert not mmpreproj.is_patched(reloaded)
    assert torch.equal(predict(reloaded), base)


def test_a_detached_model_is_its_base_and_comes_back_whole(transformer, predict, shake, snapshot):
    base = predict(transformer)
    for name, config in KINDS.items():
        mmpreproj.patch(transformer, config, name=name)
    shake(transformer)
    before, own, output = snapshot(transformer), processors(transformer), predict(transformer)
    with lifecycle.detached(transformer):
        assert torch.equal(predict(transformer), base)
        with lifecycle.detached(transformer):
            assert torch.equal(predict(transformer), base)
    before.check(transformer)
    assert processors(transformer) == own
    assert torch.equal(predict(transformer), output)
    with mmpreproj.disabled(transformer), lifecycle.detached(transformer):
        pass
    assert torch.equal(predict(transformer), output)


# Copies


@pytest.mark.parametrize("kind", ["learned", "whole"])
def test_a_copy_is_whole_and_its_own(transformer, predict, shake, snapshot, duplicate, kind: str):
    base = predict(transformer)
    mmpreproj.patch(transformer, KINDS[kind], name="mine")
    shake(transformer)
    mmpreproj.set_scale(transformer, [0.5, 0.25])
    before, output = snapshot(transformer), predict(transformer)
    twin = duplicate(transformer)
    assert torch.equal(predict(twin), output)
    mmpreproj.check_intact(twin)
    assert mmpreproj.scales(twin) == mmpreproj.scales(transformer)
    assert twin.preproj is twin.pos_embed.preproj
    assert not set(processors(twin).values()) & set(processors(transformer).values())
    mmpreproj.set_scale(twin, 0)
    assert torch.equal(predict(twin), base)
    mmpreproj.unpatch(twin)
    assert torch.equal(predict(twin), base)
    assert list(twin.state_dict()) == [key for key in transformer.state_dict() if "preproj" not in key]
    assert kinds_of_processors(twin) == {"JointAttnProcessor2_0"}
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in twin.modules())
    before.check(transformer)
    assert torch.equal(predict(transformer), output)


def test_a_copy_of_a_switched_off_model_stays_off(transformer, predict, shake, duplicate):
    base = predict(transformer)
    mmpreproj.patch(transformer, LEARNED)
    shake(transformer)
    output = predict(transformer)
    mmpreproj.disable(transformer)
    twin = duplicate(transformer)
    assert torch.equal(predict(twin), base)
    mmpreproj.enable(twin)
    assert torch.equal(predict(twin), output)
    assert torch.equal(predict(transformer), base)


# Scales and switches


@pytest.mark.parametrize("block", [0, 1])
def test_the_scale_of_a_block_is_that_of_its_angles(transformer, predict, shake, block: int):
    """By a power of two, so that no rounding comes between."""
    mmpreproj.patch(transformer, content_free())
    shake(transformer)
    output = predict(transformer)
    mmpreproj.set_scale(transformer, {block: 0.5})
    scaled = predict(transformer)
    assert relative(scaled, output) > 1e-4
    mmpreproj.set_scale(transformer, 1)
    with torch.no_grad():
        for name, gain in gains(transformer).items():
            gain.mul_(0.5 if f"blocks.{block}." in name else 1)
    assert torch.equal(predict(transformer), scaled)


def test_a_scale_reaches_the_adapter_that_it_names(transformer, predict, shake):
    for name in ("a", "b"):
        mmpreproj.patch(transformer, content_free(text="diagonal"), name=name)
    shake(transformer)
    mmpreproj.set_scale(transformer, {"a": [0.5, 2], "b": {0: 0.0}})
    scaled = predict(transformer)
    assert mmpreproj.scales(transformer) == {"a": {0: 0.5, 1: 2.0}, "b": {0: 0.0, 1: 1.0}}
    mmpreproj.set_scale(transformer, 1)
    factors = {"a": {0: 0.5, 1: 2.0}, "b": {0: 0.0, 1: 1.0}}
    with torch.no_grad():
        for name, by_block in factors.items():
            for key, gain in gains(transformer, name).items():
                gain.mul_(by_block[int(key.split(".")[1])])
    torch.testing.assert_close(predict(transformer), scaled, rtol=1e-6, atol=1e-6)


def test_positions_are_on_every_block_and_so_are_their_scales(transformer):
    mmpreproj.patch(transformer, PreProjConfig(blocks=[1], positions=Positions()))
    assert mmpreproj.scales(transformer) == {"default": {0: 1.0, 1: 1.0}}
    mmpreproj.set_scale(transformer, {0: 0.5})
    assert mmpreproj.scales(transformer) == {"default": {0: 0.5, 1: 1.0}}


@pytest.mark.parametrize("values", [{}, {"start": "full"}, {"absolute": "remove"}], ids=str)
def test_output_varies_with_scale(transformer, predict, shake, values: dict[str, Any]):
    mmpreproj.patch(transformer, content_free(scaling="yarn", base_size=2, **values))
    shake(transformer, std=1.0)
    outputs = []
    for scale in (-1, 0, 0.5, 1, 1.5):
        mmpreproj.set_scale(transformer, scale)
        outputs.append(predict(transformer))
        assert outputs[-1].isfinite().all()
    assert all(relative(one, other) > 1e-4 for one, other in itertools.combinations(outputs, 2))


def test_switches_bring_back_what_was_there(transformer, predict, shake, snapshot):
    outputs = {"": predict(transformer)}
    for name, config in (("a", LEARNED), ("b", WHOLE)):
        mmpreproj.patch(transformer, config, name=name)
    shake(transformer)
    before = snapshot(transformer)
    outputs["ab"] = predict(transformer)
    for gone, left in ("ab", "ba"):
        mmpreproj.disable(transformer, gone)
        outputs[left] = predict(transformer)
        with mmpreproj.disabled(transformer, left), mmpreproj.disabled(transformer):
            assert torch.equal(predict(transformer), outputs[""])
        assert torch.equal(predict(transformer), outputs[left])
        mmpreproj.enable(transformer, gone)
        assert torch.equal(predict(transformer), outputs["ab"])
    for name in "ab":
        alone = copy.deepcopy(transformer)
        mmpreproj.unpatch(alone, "b" if name == "a" else "a")
        assert torch.equal(predict(alone), outputs[name])
    assert all(relative(one, other) > 1e-3 for one, other in itertools.combinations(outputs.values(), 2))
    before.check(transformer)


def test_gains_are_thawed_with_the_rest(transformer, shake):
    mmpreproj.patch(transformer, LEARNED)
    transformer.add_adapter(LoraConfig(r=2, target_modules=["to_q", "add_k_proj"]))
    assert not any(gain.requires_grad for gain in gains(transformer).values())
    mmpreproj.thaw(transformer)
    assert all(gain.requires_grad for gain in gains(transformer).values())


# Swaps


@pytest.fixture
def model(transformer, shake) -> nn.Module:
    """A model with the trained adapter `mine`, which has positions, at scales of its own."""
    mmpreproj.patch(transformer, LEARNED, name="mine")
    shake(transformer)
    mmpreproj.set_scale(transformer, {"mine": [0.5, -0.25]})
    return transformer


def test_the_same_positions_are_swapped_in_place(model, make_saved, predict, freshly_loaded):
    folder = make_saved(LEARNED)
    kept = {name: id(module) for name, module in model.named_modules()}
    parameters, own = {key: id(value) for key, value in mmpreproj.named_parameters(model)}, processors(model)
    before = {name: gain.detach().clone() for name, gain in gains(model).items()}
    mmpreproj.load(model, folder, name="mine", replace=True)
    assert {name: id(module) for name, module in model.named_modules()} == kept
    assert {key: id(value) for key, value in mmpreproj.named_parameters(model)} == parameters
    assert processors(model) == own
    assert not any(torch.equal(before[name], gain) for name, gain in gains(model).items())
    assert torch.equal(predict(model), freshly_loaded(folder, scale=[0.5, -0.25]))


OTHERS = [
    CONTENT,
    WHOLE,
    MASK,
    content_free(),
    PreProjConfig(positions=Positions(text="diagonal", absolute="remove", theta=50.0)),
    PreProjConfig(positions=Positions(text="diagonal", absolute="remove"), mask_padding=True),
    PreProjConfig(positions=Positions(text="diagonal", absolute="remove", scaling="yarn", base_size=2)),
    PreProjConfig(positions=Positions(text="diagonal")),
]


@pytest.mark.parametrize("config", OTHERS, ids=range(len(OTHERS)))
@pytest.mark.parametrize("switched_off", [True, False])
def test_other_positions_are_swapped_in_whole_with_scale_and_switch(
    model, make_saved, predict, freshly_loaded, make_transformer, style, config: PreProjConfig, switched_off: bool
):
    base, folder = predict(make_transformer(style)), make_saved(config)
    if switched_off:
        mmpreproj.disable(model)
    report = mmpreproj.load(model, folder, name="mine", replace=True)
    assert report.positions == config.positions
    mmpreproj.check_intact(model)
    assert mmpreproj.scales(model) == {"mine": {block: (0.5, -0.25)[block] for block in report.blocks}}
    if switched_off:
        assert torch.equal(predict(model), base)
        assert not masks_padding(model)
        mmpreproj.enable(model)
    assert masks_padding(model) == config.mask_padding
    assert torch.equal(predict(model), freshly_loaded(folder, scale=[0.5, -0.25]))
    expected = "RotaryJointAttnProcessor" if config.needs_processor else "JointAttnProcessor2_0"
    assert kinds_of_processors(model) == {expected}
    mmpreproj.unpatch(model)
    assert list(model.state_dict()) == list(make_transformer(style).state_dict())
    assert kinds_of_processors(model) == {"JointAttnProcessor2_0"}
    assert torch.equal(predict(model), base)


@pytest.mark.parametrize("order", itertools.permutations(["content", "learned", "whole"]), ids=" ".join)
def test_any_chain_of_swaps_ends_where_a_fresh_load_does(transformer, make_saved, predict, freshly_loaded, order):
    for kind in order:
        folder = make_saved(KINDS[kind])
        mmpreproj.load(transformer, folder, name="mine", replace=True)
        assert torch.equal(predict(transformer), freshly_loaded(folder))


def test_a_swap_beside_another_adapter_keeps_its_processors(transformer, make_saved, predict, freshly_loaded):
    beside, first, second = make_saved(WHOLE), make_saved(LEARNED), make_saved(CONTENT, seed=8)
    mmpreproj.load(transformer, beside, name="beside")
    own = processors(transformer)
    for folder in (first, second, first):
        mmpreproj.load(transformer, folder, name="mine", replace=True)
        assert processors(transformer) == own
        expected = freshly_loaded(beside, folder)
        torch.testing.assert_close(predict(transformer), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("trainable", [True, False])
def test_what_is_swapped_in_trains_if_what_it_replaces_did(model, make_saved, trainable: bool):
    mmpreproj.thaw(model) if trainable else model.requires_grad_(False)
    mmpreproj.load(model, make_saved(OTHERS[4]), name="mine", replace=True)
    assert all(parameter.requires_grad == trainable for parameter in mmpreproj.parameters(model))


def test_what_is_swapped_in_for_an_adapter_without_parameters_can_be_trained(transformer, make_saved):
    mmpreproj.patch(transformer, WHOLE)
    mmpreproj.load(transformer, make_saved(LEARNED), replace=True)
    assert all(parameter.requires_grad for parameter in mmpreproj.parameters(transformer))
