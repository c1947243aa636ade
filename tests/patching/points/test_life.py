"""The life of an adapter with a point path: on and off a model, to a file and back, copied, scaled, swapped."""

import copy
import io
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from diffusers import SD3Transformer2DModel
from huggingface_hub import ModelCard
from points_kit import clouds, drawn, moved, noisy, with_points
from positions_kit import relative
from rich.console import Console
from safetensors.torch import load_file
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import mmpreproj
from mmpreproj import Positions, PreProjConfig
from mmpreproj.patching.families import find_family
from mmpreproj.patching.lifecycle import detached
from mmpreproj.patching.points.hooks import add_points, bring_points, find_point_layer, unpack_points
from mmpreproj.points import PointPathConfig, add_point_path
from mmpreproj.recipes.inspect import inspect_adapter
from mmpreproj.recipes.tables import print_summary

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PATH = "preproj_points.adapters"
KEYS = {
    f"preproj_points.{key}"
    for key in (
        "embedding.up.weight",
        "embedding.down.weight",
        "pooling.map.weight",
        "head.modulation.weight",
        "head.out.weight",
    )
}


@pytest.fixture
def make_patched(make_transformer, style, shake) -> Callable[..., nn.Module]:
    """Build a trained adapter with a point path on the tiny transformer of this style."""

    def make(config: PreProjConfig | None = None, *, seed: int = 7, name: str = "default") -> nn.Module:
        model = make_transformer(style)
        mmpreproj.patch(model, config or with_points(), name=name)
        shake(model, seed=seed)
        return model

    return make


def same(one: nn.Module, other: nn.Module) -> bool:
    """Whether two models draw and move the same, bit for bit."""
    return torch.equal(drawn(one, clouds()), drawn(other, clouds())) and torch.equal(moved(one), moved(other))


def path_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return {key: value for key, value in mmpreproj.named_parameters(model) if "preproj_points" in key}


# On and off


@pytest.mark.parametrize("way", ["with the adapter", "after it"])
def test_unpatch_leaves_the_base_bit_for_bit(transformer, snapshot, shake, way: str):
    # Flags and hooks of somebody else must come through too.
    transformer.requires_grad_(False)
    transformer.transformer_blocks[0].train()
    calls: list[str] = []
    for module in (transformer, transformer.time_text_embed, transformer.transformer_blocks[0].attn):
        module.register_forward_pre_hook(lambda module, args, kwargs: calls.append("before"), with_kwargs=True)
        module.register_forward_hook(lambda module, args, output: calls.append("after"))
    before, base = snapshot(transformer), drawn(transformer)
    mmpreproj.patch(transformer, with_points() if way == "with the adapter" else None)
    if way == "after it":
        add_point_path(transformer)
    shake(transformer)
    mmpreproj.check_intact(transformer)
    assert relative(drawn(transformer, clouds()), drawn(transformer)) > 1e-3
    mmpreproj.unpatch(transformer)
    before.check(transformer)
    assert torch.equal(drawn(transformer), base)
    assert not [key for key in vars(transformer) if "preproj" in key]
    assert calls[:6] == ["before", "before", "after", "before", "after", "after"]


@pytest.mark.parametrize("gone", ["with", "without"])
def test_one_of_two_adapters_comes_off(transformer, snapshot, make_transformer, style, shake, gone: str, tmp_path):
    before = snapshot(transformer)
    for name, config in (("with", with_points()), ("without", PreProjConfig(share="stream"))):
        alone = make_transformer(style)
        mmpreproj.patch(alone, config)
        shake(alone, seed=len(name))
        mmpreproj.save(alone, tmp_path / name, card=False)
        mmpreproj.load(transformer, tmp_path / name, name=name)
    mmpreproj.unpatch(transformer, gone)
    mmpreproj.check_intact(transformer)
    left = make_transformer(style)
    mmpreproj.load(left, tmp_path / ("with" if gone == "without" else "without"))
    assert torch.equal(drawn(transformer), drawn(left))
    if gone == "without":
        assert same(transformer, left)
    else:
        assert find_point_layer(transformer) is None
    mmpreproj.unpatch(transformer)
    before.check(transformer)


def test_patching_again_and_again_leaves_one_set_of_hooks(transformer, snapshot):
    before = snapshot(transformer)
    for _ in range(3):
        mmpreproj.patch(transformer, with_points())
        embedder = transformer.time_text_embed
        for hooks in (transformer._forward_pre_hooks, embedder._forward_pre_hooks, embedder._forward_hooks):
            assert len(hooks) == 1
        mmpreproj.unpatch(transformer)
        before.check(transformer)


def test_a_path_added_later_is_the_one_given_at_once(make_transformer, style, shake):
    together, later = make_transformer(style), make_transformer(style)
    mmpreproj.patch(together, with_points(features=2))
    mmpreproj.patch(later)
    add_point_path(later, PointPathConfig(features=2))
    for one in (together, later):
        shake(one)
    given = clouds(features=2)
    assert torch.equal(drawn(together, given), drawn(later, given))
    assert [key for key, _ in mmpreproj.named_parameters(later)] == [
        key for key, _ in mmpreproj.named_parameters(together)
    ]
    assert mmpreproj.report(later) == mmpreproj.report(together)


def test_a_path_is_added_to_the_adapter_that_is_named(transformer, tmp_path):
    mmpreproj.patch(transformer, name="a")
    mmpreproj.patch(transformer, name="b")
    with pytest.raises(ValueError, match=r"several adapters, a, b; say which with name="):
        add_point_path(transformer)
    with pytest.raises(ValueError, match=r"carries no adapter 'c'; it carries a, b"):
        add_point_path(transformer, name="c")
    assert find_point_layer(transformer) is None
    add_point_path(transformer, name="b")
    assert {key.split(".")[2] for key in path_parameters(transformer)} == {"b"}
    assert mmpreproj.report(transformer, name="a").points is None
    for name, there in (("a", set()), ("b", KEYS)):
        weights = load_file(mmpreproj.save(transformer, tmp_path / name, name=name) / WEIGHTS)
        assert {key for key in weights if key.startswith("preproj_points")} == there
    mmpreproj.unpatch(transformer, "b")
    add_point_path(transformer, name="a")


def test_a_path_takes_the_switch_and_the_strength_that_its_adapter_has_now(make_transformer, shake):
    model = make_transformer()
    mmpreproj.patch(model)
    mmpreproj.set_scale(model, [0.0, 0.5])
    with mmpreproj.disabled(model):
        add_point_path(model)
        path = find_point_layer(model).path
        assert not path.takes_part
    assert path.takes_part and path.scale.factor == 0.25
    mmpreproj.disable(model)
    assert not path.takes_part
    mmpreproj.enable(model)
    assert path.takes_part


def test_what_makes_the_conditioning_keeps_its_own_weights_alone(make_patched, make_transformer, style):
    """Others load its state dict strictly, or copy it."""
    embedder, base = make_patched().time_text_embed, make_transformer(style).time_text_embed
    assert list(embedder.state_dict()) == list(base.state_dict())
    assert [path for path, _ in embedder.named_modules()] == [path for path, _ in base.named_modules()]
    base.load_state_dict(embedder.state_dict())


def test_a_path_is_made_in_the_mode_and_dtype_of_its_model(make_transformer):
    model = make_transformer().to(torch.bfloat16).train()
    mmpreproj.patch(model, with_points())
    layer = find_point_layer(model)
    assert all(module.training for module in layer.modules())
    assert {parameter.dtype for parameter in layer.parameters()} == {torch.bfloat16}
    model.eval()
    assert not any(module.training for module in layer.modules())
    model.float()
    assert {parameter.dtype for parameter in layer.parameters()} == {torch.float32}


def test_a_path_made_in_inference_mode_can_be_scaled_and_trained(transformer, make_inputs):
    with torch.inference_mode():
        mmpreproj.patch(transformer)
        add_point_path(transformer)
        drawn(transformer, clouds())
    mmpreproj.set_scale(transformer, 0.5)
    kwargs = {"joint_attention_kwargs": clouds(), "return_dict": False}
    transformer(**make_inputs(), **kwargs)[0].square().mean().backward()
    assert path_parameters(transformer)[f"{PATH}.default.pooling.map.weight"].grad.any()


@pytest.mark.parametrize("lost", [None, "bring", "child", "both"])
def test_a_path_of_a_model_inside_another_module_is_checked_and_taken_off(make_patched, make_transformer, style, lost):
    model = make_patched()
    outer = nn.ModuleDict({"transformer": model, "other": make_transformer(style)})
    mmpreproj.check_intact(outer)
    assert {key for key, _ in mmpreproj.named_parameters(outer) if "preproj_points" in key} == {
        f"transformer.{PATH}.default.{key.removeprefix('preproj_points.')}" for key in KEYS
    }
    if lost in ("bring", "both"):
        model._forward_pre_hooks.clear()
    if lost in ("child", "both"):
        del model.preproj_points
    if lost is not None:
        with pytest.raises(ValueError, match=r"has lost its point path, or a hook of it"):
            mmpreproj.check_intact(outer)
    mmpreproj.unpatch(outer)
    mmpreproj.check_intact(outer)
    assert not [name for name, _ in outer.named_modules() if "preproj" in name]
    assert not [module for module in outer.modules() if module._forward_hooks or module._forward_pre_hooks]
    assert torch.equal(drawn(model), drawn(outer["other"]))


def test_weights_may_be_assigned_to_a_model_on_meta(make_patched, make_transformer, style):
    model = make_patched()
    with torch.device("meta"):
        empty = make_transformer(style)
        mmpreproj.patch(empty, with_points())
    empty.load_state_dict(model.state_dict(), assign=True)
    empty.pos_embed.pos_embed = model.pos_embed.pos_embed
    assert same(empty, model)


# What is refused


def test_a_model_without_an_adapter_takes_no_path(transformer, snapshot):
    before = snapshot(transformer)
    with pytest.raises(ValueError, match=r"SD3Transformer2DModel is not patched; call mmpreproj\.patch"):
        add_point_path(transformer)
    before.check(transformer)


def test_a_path_needs_the_content_skip(transformer):
    mmpreproj.patch(transformer, PreProjConfig(skip=False))
    with pytest.raises(ValueError, match=r"by its content skip alone, but skip is False; set skip=True"):
        add_point_path(transformer)
    assert find_point_layer(transformer) is None
    with pytest.raises(ValueError, match=r"by its content skip alone"):
        with_points(adapter={"skip": False})


@pytest.mark.parametrize("wrong", [{"features": 2}, True, "points"], ids=str)
def test_what_is_no_config_is_refused(transformer, wrong: Any):
    mmpreproj.patch(transformer)
    with pytest.raises(TypeError, match=r"points must be a PointPathConfig or None; got"):
        add_point_path(transformer, wrong)
    assert find_point_layer(transformer) is None
    assert mmpreproj.report(transformer).points is None


def test_a_model_takes_one_path(transformer, tmp_path):
    mmpreproj.patch(transformer, with_points(), name="first")
    message = r"'first' has a point path on this SD3Transformer2DModel already.*unpatch\(model, 'first'\) first"
    saved = mmpreproj.save(transformer, tmp_path, card=False)
    for add in (
        lambda: add_point_path(transformer),
        lambda: mmpreproj.patch(transformer, with_points(), name="second"),
        lambda: mmpreproj.load(transformer, saved, name="second"),
    ):
        with pytest.raises(ValueError, match=message):
            add()
        assert mmpreproj.adapters(transformer) == ("first",)
    mmpreproj.patch(transformer, name="second")
    with pytest.raises(ValueError, match=message):
        add_point_path(transformer, name="second")
    with pytest.raises(ValueError, match=message):
        mmpreproj.load(transformer, saved, name="second", replace=True)


def test_a_family_without_a_way_for_points_is_refused(transformer, snapshot):
    before, family = snapshot(transformer), replace(find_family(transformer), points=None)
    with pytest.raises(ValueError, match=r"points cannot go through SD3Transformer2DModel: its row names no way"):
        mmpreproj.patch(transformer, with_points(), family=family)
    before.check(transformer)
    mmpreproj.patch(transformer, family=family)
    with pytest.raises(ValueError, match=r"its row names no way for them"):
        add_point_path(transformer)
    mmpreproj.check_intact(transformer)


def test_a_model_that_processes_share_already_takes_no_path(make_transformer, tmp_path):
    model = make_transformer()
    mmpreproj.patch(model)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        wrapped = DistributedDataParallel(model)
        with pytest.raises(ValueError, match=r"inside DistributedDataParallel.*first, then wrap"):
            add_point_path(wrapped)
    finally:
        dist.destroy_process_group()
    assert find_point_layer(model) is None


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({"features": -1}, ValueError, r"points\.features must be between 0 and 1024; got -1"),
        ({"features": 1.0}, TypeError, r"points\.features must be a whole number; got 1\.0 \(float\)"),
        ({"frequencies": True}, TypeError, r"points\.frequencies must be a whole number; got True"),
        ({"frequencies": 17}, ValueError, r"points\.frequencies must be between 0 and 16; got 17"),
        ({"normalise": "box"}, ValueError, r"points\.normalise must be one of 'unit_ball', 'none'; got 'box'"),
        ({"spread": 0}, ValueError, r"points\.spread must be a finite number above 0; got 0"),
        ({"spread": float("nan")}, ValueError, r"points\.spread must be a finite number above 0; got nan"),
        ({"spread": "2"}, TypeError, r"points\.spread must be a number above 0; got '2'"),
        ({"condition": 1}, TypeError, r"points\.condition must be True or False; got 1"),
        ({"generate": None}, TypeError, r"points\.generate must be True or False; got None"),
        ({"condition": False, "generate": False}, ValueError, r"both False, so points would do nothing"),
        ({"feature": 1}, ValueError, r"points has no field 'feature'; did you mean 'features'\?"),
    ],
    ids=str,
)
def test_bad_settings_are_refused_by_name(values: dict[str, Any], error: type, message: str):
    with pytest.raises(error, match=message):
        PointPathConfig.from_dict(values)
    with pytest.raises(error, match=message):
        PreProjConfig.from_dict({"points": values})


@pytest.mark.parametrize("values", [[], "points", 3], ids=str)
def test_points_in_a_file_must_be_a_mapping(values: Any):
    with pytest.raises(TypeError, match=r"points must be a mapping of its fields; got"):
        PreProjConfig.from_dict({"points": values})


# Settings as text


@pytest.mark.parametrize(
    "points", [None, PointPathConfig(), PointPathConfig(features=3, normalise="none", spread=1, generate=False)]
)
def test_settings_go_to_plain_values_and_back(points: PointPathConfig | None):
    config = PreProjConfig(points=points, blocks=[1], positions=Positions())
    values = json.loads(json.dumps(config.to_dict()))
    assert PreProjConfig.from_dict(values) == PreProjConfig.from_json(config.to_json()) == config
    assert hash(PreProjConfig.from_dict(values)) == hash(config)
    assert values["points"] == (None if points is None else points.to_dict())
    assert hash(config) != hash(PreProjConfig(points=PointPathConfig(features=9), blocks=[1], positions=Positions()))


def test_settings_are_filled_in_and_a_spread_is_a_float():
    assert PreProjConfig.from_dict({"points": {}}) == PreProjConfig(points=PointPathConfig())
    assert type(PointPathConfig(spread=3).spread) is float


# Files


@pytest.mark.parametrize(
    ("values", "left_out"), [({}, ()), ({"condition": False}, ("pooling",)), ({"generate": False}, ("head",))], ids=str
)
def test_a_file_holds_the_path_and_no_name_of_an_adapter(make_patched, values: dict, left_out: tuple, tmp_path):
    model = make_patched(with_points(**values), name="somebody")
    weights = load_file(mmpreproj.save(model, tmp_path, card=False) / WEIGHTS)
    expected = {key for key in KEYS if not any(part in key for part in left_out)}
    assert {key for key in weights if not key.startswith("transformer_blocks.")} == expected
    assert not [key for key in weights if "somebody" in key]
    assert sum(weight.numel() for weight in weights.values()) == sum(p.numel() for p in mmpreproj.parameters(model))


@pytest.mark.parametrize("features", [0, 2])
def test_a_saved_path_comes_back_bit_for_bit(make_patched, make_transformer, style, features: int, tmp_path):
    model = make_patched(with_points(features=features, spread=1.5))
    mmpreproj.save(model, tmp_path, card=False)
    fresh, state = make_transformer(style), torch.get_rng_state()
    report = mmpreproj.load(fresh, tmp_path, name="other")
    assert torch.equal(torch.get_rng_state(), state)
    assert report.points == PointPathConfig(features=features, spread=1.5)
    given = clouds(features=features)
    assert torch.equal(drawn(fresh, given), drawn(model, given))
    assert torch.equal(moved(fresh, features=features), moved(model, features=features))
    mmpreproj.save(fresh, tmp_path / "again", card=False)
    assert (tmp_path / "again" / WEIGHTS).read_bytes() == (tmp_path / WEIGHTS).read_bytes()


def test_files_from_before_there_were_points_still_load(make_patched, make_transformer, style, tmp_path):
    model = make_patched(PreProjConfig())
    mmpreproj.save(model, tmp_path, card=False)
    values = json.loads((tmp_path / CONFIG).read_text())
    assert values["config"].pop("points") is None
    (tmp_path / CONFIG).write_text(json.dumps(values))
    fresh = make_transformer(style)
    assert mmpreproj.load(fresh, tmp_path).points is None
    assert torch.equal(drawn(fresh), drawn(model))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (with_points(), with_points()),
        (with_points(features=1), with_points()),
        (with_points(), with_points(spread=1.0)),
        (with_points(), with_points(generate=False)),
        (with_points(), PreProjConfig()),
        (PreProjConfig(), with_points()),
        (with_points(), with_points(adapter={"blocks": [1]})),
    ],
    ids=["same", "width", "spread", "parts", "taken off", "put on", "blocks"],
)
def test_a_swap_is_the_other_adapter(make_patched, before: PreProjConfig, after: PreProjConfig, tmp_path):
    model, other = make_patched(before), make_patched(after, seed=9)
    mmpreproj.save(other, tmp_path, card=False)
    kept = path_parameters(model)
    mmpreproj.set_scale(model, 0.5)
    mmpreproj.set_scale(other, 0.5)
    mmpreproj.load(model, tmp_path, replace=True)
    mmpreproj.check_intact(model)
    assert (find_point_layer(model) is None) == (after.points is None)
    assert torch.equal(drawn(model), drawn(other))
    if after.points is not None:
        assert torch.equal(drawn(model, clouds()), drawn(other, clouds()))
        assert find_point_layer(model).path.scale.factor == 0.5
    if after.points is not None and after.points.generate:
        assert torch.equal(moved(model), moved(other))
    now = path_parameters(model)
    in_place = before == after
    assert in_place == (now.keys() == kept.keys() and all(now[key] is kept[key] for key in now))


def test_a_swap_of_another_shape_stays_switched_off_and_frozen(make_patched, tmp_path):
    model, other = make_patched(), make_patched(with_points(features=1))
    mmpreproj.save(other, tmp_path, card=False)
    for parameter in mmpreproj.parameters(model):
        parameter.requires_grad_(False)
    mmpreproj.disable(model)
    mmpreproj.load(model, tmp_path, replace=True)
    assert not any(parameter.requires_grad for parameter in mmpreproj.parameters(model))
    assert not find_point_layer(model).path.takes_part
    mmpreproj.thaw(model)
    assert all(parameter.requires_grad for parameter in mmpreproj.parameters(model))


def test_a_file_whose_path_does_not_fit_leaves_the_model_as_it_was(make_patched, make_transformer, style, tmp_path):
    folder = mmpreproj.save(make_patched(), tmp_path, card=False)
    values = json.loads((folder / CONFIG).read_text())
    values["config"]["points"]["features"] = 1
    (folder / CONFIG).write_text(json.dumps(values))
    model = make_transformer(style)
    with pytest.raises(ValueError, match=r"preproj_points\.embedding\.up\.weight has shape .*, expected"):
        mmpreproj.load(model, folder)
    assert not mmpreproj.is_patched(model) and find_point_layer(model) is None


# Strength


@pytest.mark.parametrize("way", ["scale", "disable", "disabled"])
def test_off_is_the_base_bit_for_bit_with_a_cloud_given(make_patched, make_transformer, style, way: str):
    model, base = make_patched(), drawn(make_transformer(style))
    on = drawn(model, clouds())
    assert relative(on, base) > 1e-3
    if way == "disabled":
        with mmpreproj.disabled(model):
            assert torch.equal(drawn(model, clouds()), base)
    else:
        if way == "scale":
            mmpreproj.set_scale(model, 0)
        else:
            mmpreproj.disable(model)
        assert torch.equal(drawn(model, clouds()), base)
        mmpreproj.set_scale(model, 1)
        mmpreproj.enable(model)
    assert torch.equal(drawn(model, clouds()), on)


def test_a_scale_of_zero_is_zero_even_where_the_path_overflows(make_patched, make_transformer, style):
    model = make_patched()
    with torch.no_grad():
        for parameter in path_parameters(model).values():
            parameter.mul_(1e38)
    mmpreproj.set_scale(model, 0)
    assert torch.equal(drawn(model, clouds()), drawn(make_transformer(style)))


def test_scales_of_blocks_act_on_points_and_the_path_takes_their_mean(make_patched):
    model = make_patched()
    path = find_point_layer(model).path
    outputs = []
    for scale in ([1.0, 1.0], [0.5, 1.0], [1.0, 0.5], [0.0, 1.0]):
        mmpreproj.set_scale(model, scale)
        assert path.scale.factor == sum(scale) / 2
        outputs += [(drawn(model, clouds()), moved(model))]
    for index, (one, one_moved) in enumerate(outputs):
        for other, other_moved in outputs[index + 1 :]:
            assert relative(one, other) > 1e-4 and relative(one_moved, other_moved) > 1e-4


def test_an_adapter_that_is_off_lets_the_others_points_through(make_patched, make_transformer, style, shake):
    """What another adapter adds to the way of points comes and goes with its switch."""
    model = make_patched()
    alone = drawn(model, clouds()), moved(model)
    mmpreproj.patch(model, name="second")
    with torch.no_grad():
        for parameter in mmpreproj.parameters(model, "second"):
            parameter.normal_(std=0.2)
    assert relative(moved(model), alone[1]) > 1e-3
    for off in (lambda: mmpreproj.disable(model, "second"), lambda: mmpreproj.set_scale(model, {"second": 0})):
        mmpreproj.enable(model)
        off()
        assert torch.equal(drawn(model, clouds()), alone[0]) and torch.equal(moved(model), alone[1])


# Copies


def test_a_copy_is_whole_and_stands_alone(make_patched, duplicate, tmp_path):
    model = make_patched()
    mmpreproj.set_scale(model, 0.5)
    copied = duplicate(model)
    assert same(copied, model)
    mmpreproj.check_intact(copied)
    before = drawn(model, clouds())
    with torch.no_grad():
        for parameter in mmpreproj.parameters(copied):
            parameter.zero_()
    assert torch.equal(drawn(model, clouds()), before)
    plain = drawn(copied)
    assert torch.equal(drawn(copied, clouds()), plain), "the path of the copy is that of its own model"
    mmpreproj.unpatch(copied)
    assert not copied._forward_pre_hooks and not copied.time_text_embed._forward_hooks
    assert same(model, duplicate(model))


def test_pruned_and_reloaded_by_diffusers_the_base_is_the_base(make_patched, make_transformer, style, tmp_path):
    model = make_patched()
    with detached(model):
        assert not [key for key in model.state_dict() if "preproj" in key]
        model.save_pretrained(tmp_path)
        assert torch.equal(drawn(model), drawn(make_transformer(style)))
    mmpreproj.check_intact(model)
    assert same(model, make_patched())
    plain = SD3Transformer2DModel.from_pretrained(tmp_path).eval()
    assert torch.equal(drawn(plain), drawn(make_transformer(style)))


@pytest.mark.parametrize("positions", [None, Positions(absolute="remove")], ids=["alone", "with positions"])
def test_detached_puts_hooks_back_where_they_were_among_others(make_patched, snapshot, positions):
    model = make_patched(PreProjConfig(positions=positions, points=PointPathConfig()))
    for module in (model, model.time_text_embed):
        module.register_forward_pre_hook(lambda module, args, kwargs: None, with_kwargs=True)
        module.register_forward_hook(lambda module, args, output: None)
    tables = (model._forward_pre_hooks, model.time_text_embed._forward_pre_hooks, model.time_text_embed._forward_hooks)
    before, orders = snapshot(model), [list(table.items()) for table in tables]
    with detached(model):
        assert bring_points not in model._forward_pre_hooks.values()
    before.check(model)
    assert [list(table.items()) for table in tables] == orders


# Lost


@pytest.mark.parametrize("lost", ["bring", "unpack", "add", "child", "module"])
def test_a_lost_hook_is_noticed(make_patched, make_transformer, style, lost: str):
    model = make_patched()
    mmpreproj.check_intact(model)
    embedder = model.time_text_embed
    if lost == "child":
        del model.preproj_points
    elif lost == "module":
        model.time_text_embed = make_transformer(style).time_text_embed
    else:
        table, hook = {
            "bring": (model._forward_pre_hooks, bring_points),
            "unpack": (embedder._forward_pre_hooks, unpack_points),
            "add": (embedder._forward_hooks, add_points),
        }[lost]
        del table[next(key for key, found in table.items() if found is hook)]
    with pytest.raises(ValueError, match=r"has lost its point path, or a hook of it"):
        mmpreproj.check_intact(model)
    mmpreproj.unpatch(model)
    mmpreproj.check_intact(model)
    assert torch.equal(drawn(model), drawn(make_transformer(style)))
    assert not model._forward_pre_hooks and not model.time_text_embed._forward_hooks


# What is told


def test_parameters_name_and_count_the_path(make_patched):
    model = make_patched(with_points(features=2, frequencies=3))
    expected = {f"{PATH}.default.{key.removeprefix('preproj_points.')}" for key in KEYS}
    found = path_parameters(model)
    assert set(found) == expected
    assert all(model.get_parameter(key) is parameter for key, parameter in found.items())
    count = 32 * (1 + 3 + 2 + 18) + 32 * 32 + 32 * 64 + 64 * 32 + (3 + 2) * 32
    assert sum(parameter.numel() for parameter in found.values()) == count
    report = mmpreproj.report(model)
    assert report.point_parameters == count
    assert report.parameters == sum(parameter.numel() for parameter in mmpreproj.parameters(model))
    assert report.base_parameters == sum(p.numel() for p in model.parameters()) - report.parameters


def test_a_report_tells_of_points(transformer):
    report = mmpreproj.patch(transformer, with_points(features=3, generate=False))
    assert report.points == PointPathConfig(features=3, generate=False)
    (line,) = (line for line in str(report).splitlines() if line.startswith("  points: "))
    assert "features 3" in line and "generate False" in line and f"{report.point_parameters:,}" in line
    assert f"{report.parameters:,} parameters" in str(report)


def test_a_report_without_points_says_nothing_of_them(transformer):
    report = mmpreproj.patch(transformer)
    assert report.points is None and report.point_parameters == 0
    assert "points" not in str(report)


@pytest.mark.parametrize("points", [None, PointPathConfig(features=3)], ids=["without", "with"])
def test_the_card_tells_of_points(transformer, shake, points: PointPathConfig | None, tmp_path):
    report = mmpreproj.patch(transformer, PreProjConfig(points=points))
    shake(transformer)
    mmpreproj.save(transformer, tmp_path)
    card = ModelCard.load(tmp_path / "README.md").text
    assert f"| parameters | {report.parameters:,} |" in card
    assert ("content skip and point path\n" in card) == (points is not None)
    assert ("point_cloud" in card) == (points is not None)
    assert str(mmpreproj.profile(transformer)) in card
    assert (tmp_path / "profile.png").exists()


@pytest.mark.parametrize("points", [PointPathConfig(), PointPathConfig(features=2, condition=False)], ids=str)
def test_inspect_reads_files_with_a_path(transformer, shake, points: PointPathConfig, tmp_path):
    report = mmpreproj.patch(transformer, PreProjConfig(points=points))
    shake(transformer)
    summary = inspect_adapter(mmpreproj.save(transformer, tmp_path))
    assert summary.parameters == report.parameters
    assert summary.point_parameters == report.point_parameters
    assert str(summary.profile) == str(mmpreproj.profile(transformer))
    screen = io.StringIO()
    print_summary(summary, Console(file=screen, width=300))
    line = next(line for line in screen.getvalue().splitlines() if line.startswith("points"))
    assert f"features {points.features}" in line and f"{report.point_parameters:,}" in line


def test_noisy_points_are_not_changed_in_place(make_patched):
    model, points = make_patched(), noisy()
    before = points.clone()
    moved(model, points)
    assert torch.equal(points, before)
    assert same(copy.deepcopy(model), model)
