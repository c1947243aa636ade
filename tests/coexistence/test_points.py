"""The point path beside everything else: compilers, checkpoints, LoRA, offloading, casting, positions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import disk_offload, dispatch_model
from accelerate.hooks import CpuOffload, ModelHook, add_hook_to_module
from diffusers import SD3ControlNetModel
from offloads_kit import CPU, group_block_level, group_leaf_level, sequential, sequential_with_buffers, whole_model
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer
from points_kit import clouds, drawn, moved, noisy, prompt, with_points
from positions_kit import picture, relative
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torchao.quantization import Int8WeightOnlyConfig, quantize_

import mmpreproj
from mmpreproj import Positions, PreProjConfig
from mmpreproj.patching.files.format import read_weights
from mmpreproj.patching.points.hooks import find_point_layer, velocity_of_points
from mmpreproj.patching.points.path import PointLayer
from mmpreproj.points import add_point_path, point_velocity

BUILT = 2  # graphs: what brings clouds, a hook that torch calls on its own, and the model


@pytest.fixture
def make_patched(make_transformer, shake) -> Callable[..., nn.Module]:
    """Build a trained adapter with a point path on a transformer with dual attention in its first block."""

    def make(config: PreProjConfig | None = None, *, style: str = "sd35", **overrides: Any) -> nn.Module:
        model = make_transformer(style, **overrides)
        torch.manual_seed(0)
        mmpreproj.patch(model, config or with_points())
        shake(model)
        return model

    return make


@pytest.fixture
def adapter(make_patched, tmp_path) -> Path:
    """The folder of its adapter."""
    return mmpreproj.save(make_patched(), tmp_path / "adapter", card=False)


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Start from an empty cache, and leave none."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def graphs(fresh_dynamo) -> CompileCounterWithBackend:
    """A backend that counts the graphs it is given, and runs them as they are."""
    return CompileCounterWithBackend("eager")


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def same(one: nn.Module, other: nn.Module) -> None:
    """Both draw, draw with clouds, and move points alike, bit for bit."""
    for run in (drawn, lambda model: drawn(model, clouds()), moved):
        assert torch.equal(run(one), run(other))


# torch.compile


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_compiled_in_full_graphs_equals_eager(make_patched, fresh_dynamo, backend):
    model = make_patched(num_layers=1)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    with torch.no_grad():
        inputs = picture(8, 8, 5) | {"return_dict": False}
        for given in (clouds(), None):
            close(compiled(**inputs, joint_attention_kwargs=given)[0], drawn(model, given))
    assert not counters["graph_break"]


def test_scales_build_no_graph_anew(make_patched, graphs):
    model = make_patched(num_layers=1)
    compiled = torch.compile(model, fullgraph=True, backend=graphs)
    inputs = picture(8, 8, 5) | {"return_dict": False, "joint_attention_kwargs": clouds()}
    outputs = []
    with torch.no_grad():
        compiled(**inputs)
        with torch._dynamo.config.patch(error_on_recompile=True):
            for scale in (0.0, 0.7, [1.5], {0: 3.0}):
                mmpreproj.set_scale(model, scale)
                outputs.append(compiled(**inputs)[0])
                close(outputs[-1], drawn(model, clouds()))
    assert graphs.frame_count == BUILT
    assert all(relative(one, other) > 1e-3 for i, one in enumerate(outputs) for other in outputs[i + 1 :])


def test_one_dynamic_graph_serves_every_number_of_points(make_patched, graphs):
    model = make_patched(num_layers=1)
    compiled = torch.compile(model, fullgraph=True, backend=graphs, dynamic=True)
    inputs = picture(8, 12, 5) | {"return_dict": False}
    with torch.no_grad():
        compiled(**inputs, joint_attention_kwargs=clouds(9))
        with torch._dynamo.config.patch(error_on_recompile=True):
            for count in (5, 64, 333):
                given = clouds(count)
                found = compiled(**inputs, joint_attention_kwargs=given)[0]
                close(found, model(**inputs, joint_attention_kwargs=given)[0])
    assert graphs.frame_count == BUILT


def test_velocities_compile_too(make_patched, graphs):
    model = make_patched(num_layers=1)
    compiled = torch.compile(velocity_of_points, fullgraph=True, backend=graphs, dynamic=True)
    with torch.no_grad():
        for count, scale in ((9, 1.0), (5, 0.5), (64, 0.2)):
            mmpreproj.set_scale(model, scale)
            points = noisy(count)
            close(compiled(model, points, **prompt()), moved(model, points))
    assert graphs.frame_count == 1 and not counters["graph_break"]


@pytest.mark.parametrize("way", ["model", "blocks", "wrapped blocks"])
def test_compiled_models_and_blocks_move_points_as_they_are(make_patched, fresh_dynamo, way):
    """What is called for points are the parts of blocks, which nothing compiled; results are those of eager."""
    model, eager = make_patched(num_layers=1), make_patched(num_layers=1)
    for index, block in enumerate(model.transformer_blocks):
        if way == "blocks":
            block.compile(fullgraph=True, backend="eager")
        elif way == "wrapped blocks":
            model.transformer_blocks[index] = torch.compile(block, fullgraph=True, backend="eager")
    compiled = torch.compile(model, fullgraph=True, backend="eager") if way == "model" else model
    with torch.no_grad():
        inputs = picture(8, 8, 5) | {"return_dict": False, "joint_attention_kwargs": clouds()}
        close(compiled(**inputs)[0], drawn(eager, clouds()))
        close(point_velocity(compiled, noisy(), **prompt()), moved(eager))
    mmpreproj.check_intact(compiled)
    assert not counters["graph_break"]


def test_a_path_that_comes_after_a_compiled_run_is_noticed(make_transformer, shake, fresh_dynamo):
    model = make_transformer(num_layers=1)
    mmpreproj.patch(model)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    inputs = picture(8, 8, 5) | {"return_dict": False}
    with torch.no_grad():
        compiled(**inputs)
        add_point_path(compiled)
        shake(model)
        close(compiled(**inputs, joint_attention_kwargs=clouds())[0], drawn(model, clouds()))
        mmpreproj.unpatch(compiled)
        close(compiled(**inputs)[0], drawn(make_transformer(num_layers=1)))


@pytest.mark.slow
def test_training_compiled_gives_the_gradients_of_eager(make_patched, fresh_dynamo):
    model, eager = make_patched(num_layers=1), make_patched(num_layers=1)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for one in (compiled, eager):
        loss_of_both(one).backward()
    same_gradients(model, eager, rtol=1e-4, atol=1e-6)


def test_exported_equals_eager_and_follows_the_scale(make_patched):
    model = make_patched(num_layers=1)
    inputs = picture(8, 8, 5) | {"return_dict": False, "joint_attention_kwargs": clouds()}
    exported = torch.export.export(model, (), inputs).module()
    with torch.no_grad():
        for scale in (1.0, 0.3):
            mmpreproj.set_scale(model, scale)
            close(exported(**inputs)[0], drawn(model, clouds()))


# Training


def loss_of_both(model: nn.Module) -> Tensor:
    """A picture with a cloud, and the velocity of points."""
    drawing = model(**picture(8, 8, 5), joint_attention_kwargs=clouds(), return_dict=False)[0]
    return drawing.square().mean() + (point_velocity(model, noisy(), **prompt()) - 1).square().mean()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {name: parameter.grad for name, parameter in mmpreproj.named_parameters(model)}
    assert all(gradient is not None for gradient in found.values())
    return found


def same_gradients(one: nn.Module, other: nn.Module, **tolerance: float) -> None:
    found, expected = gradients(one), gradients(other)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient.abs().max() > 0, name
        torch.testing.assert_close(found[name], gradient, msg=name, **tolerance)


def test_checkpointed_gradients_are_the_gradients(make_patched):
    model, plain = make_patched(), make_patched()
    model.enable_gradient_checkpointing()
    ran: list[int] = []
    model.transformer_blocks[0].ff.register_forward_hook(lambda *_: ran.append(1))
    for one in (model.train(), plain.train()):
        loss_of_both(one).backward()
    assert len(ran) == 6, "pictures, clouds and points, each run again in the backward pass"
    same_gradients(model, plain, rtol=0, atol=0)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoints_of_ones_own_kind_do_too(make_patched, use_reentrant):
    def checkpoint(module: Callable, *args: Any) -> Any:
        return torch.utils.checkpoint.checkpoint(module, *args, use_reentrant=use_reentrant)

    model, plain = make_patched(), make_patched()
    model.enable_gradient_checkpointing(checkpoint)
    for one in (model.train(), plain.train()):
        one.requires_grad_(True)
        loss_of_both(one).backward()
    same_gradients(model, plain, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_keeps_near_the_exact_values_and_every_gradient_finite(make_patched, dtype):
    model, exact = make_patched(), make_patched()
    with torch.autocast("cpu", dtype=dtype):
        assert relative(drawn(model, clouds()), drawn(exact, clouds())) < 0.05
        assert relative(moved(model), moved(exact)) < 0.05
        loss = loss_of_both(model)
    loss.backward()
    assert all(gradient.isfinite().all() for gradient in gradients(model).values())


# LoRA


LORA = {"r": 4, "lora_alpha": 8, "init_lora_weights": False}


@pytest.mark.parametrize("order", ["lora first", "ours first"])
@pytest.mark.parametrize("targets", [["to_q", "to_v", "add_k_proj", "ff.net.2"], "all-linear"], ids=["some", "all"])
def test_lora_and_points_do_not_touch_each_other(make_transformer, adapter, order, targets):
    model, bare = make_transformer("sd35"), make_transformer("sd35")
    steps = [
        lambda: model.add_adapter(LoraConfig(target_modules=targets, **LORA)),
        lambda: mmpreproj.load(model, adapter),
    ]
    for step in steps if order == "lora first" else reversed(steps):
        step()
    wrapped = [name for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)]
    assert wrapped and not [name for name in wrapped if "preproj" in name]
    with_lora = drawn(model, clouds()), moved(model)
    model.disable_adapters()
    mmpreproj.load(bare, adapter)
    same(model, bare)
    model.enable_adapters()
    assert torch.equal(drawn(model, clouds()), with_lora[0])
    assert relative(drawn(model, clouds()), drawn(bare, clouds())) > 1e-3
    assert relative(moved(model), moved(bare)) > 1e-3, "points pass through LoRA on feed-forward and conditioning"
    mmpreproj.thaw(model)
    loss_of_both(model).backward()
    gradients(model)
    model.unload_lora()
    same(model, bare)
    mmpreproj.check_intact(model)


@pytest.mark.parametrize("order", ["lora first", "ours first"])
def test_a_conditioning_that_peft_copies_keeps_one_path(make_transformer, adapter, make_patched, order, tmp_path):
    """`modules_to_save` copies the module that carries hooks of the path; the path is no part of it."""
    model, bare = make_transformer("sd35"), make_patched()
    config = LoraConfig(target_modules=["to_q"], modules_to_save=["time_text_embed"], r=4)  # zero at the start
    if order == "ours first":
        mmpreproj.load(model, adapter)
    wrapped = get_peft_model(model, config)
    if order == "lora first":
        mmpreproj.load(wrapped, adapter)
    same(model, bare)
    with wrapped.disable_adapter():  # the module that was copied is called then
        same(model, bare)
    mmpreproj.check_intact(wrapped)
    assert mmpreproj.report(wrapped).parameters == mmpreproj.report(bare).parameters
    assert [name for name, _ in mmpreproj.named_parameters(wrapped)] == [
        name for name, _ in mmpreproj.named_parameters(bare)
    ]
    assert len([module for module in wrapped.modules() if isinstance(module, PointLayer)]) == 1
    assert not [key for key in get_peft_model_state_dict(wrapped) if "preproj" in key]
    mmpreproj.thaw(wrapped)
    for one in (wrapped, bare):
        loss_of_both(one).backward()
    same_gradients(wrapped, bare, rtol=0, atol=0)
    copied = model.time_text_embed.modules_to_save["default"]
    assert all(parameter.grad.any() for parameter in copied.timestep_embedder.parameters())
    with torch.no_grad():
        for one in (wrapped, bare):
            for index, parameter in enumerate(mmpreproj.parameters(one)):
                parameter.add_(0.01 * (index + 1))
    same(model, bare)
    folders = [mmpreproj.save(one, tmp_path / name, card=False) for one, name in ((wrapped, "a"), (bare, "b"))]
    assert len({(folder / "adapter_model.safetensors").read_bytes() for folder in folders}) == 1
    for scale in (0.5, 0.0, 1.0):
        for one in (wrapped, bare):
            mmpreproj.set_scale(one, scale)
        assert torch.equal(drawn(model, clouds()), drawn(bare, clouds()))
    for one in (wrapped, bare):
        mmpreproj.load(one, adapter, replace=True)
    same(model, bare)
    mmpreproj.unpatch(wrapped)
    assert not [name for name, module in wrapped.named_modules() if "preproj" in name]
    assert torch.equal(drawn(model), drawn(make_transformer("sd35")))
    assert not [module for module in wrapped.modules() if module._forward_hooks or module._forward_pre_hooks]


# Offloading


def group_two_blocks(model: nn.Module) -> None:
    model.enable_group_offload(CPU, CPU, offload_type="block_level", num_blocks_per_group=2)


def device_map(model: nn.Module) -> None:
    dispatch_model(model, {name: "cpu" for name, _ in model.named_children()}, force_hooks=True)


OFFLOADS = (
    group_block_level,
    group_two_blocks,
    group_leaf_level,
    sequential,
    sequential_with_buffers,
    whole_model,
    device_map,
)


@pytest.mark.parametrize("order", ["before", "after", "between"])
@pytest.mark.parametrize(
    "offload",
    [
        pytest.param(way, marks=() if way in (group_leaf_level, sequential) else pytest.mark.slow)
        for way in (*OFFLOADS, "disk")
    ],
)
def test_offloaded_equals_not_offloaded(make_transformer, make_patched, adapter, offload, order, tmp_path):
    """Offloaded before or after the adapter comes, or between it and a path that is added to it."""
    model, plain = make_transformer("sd35"), make_patched()
    if offload == "disk":

        def offload(one: nn.Module) -> None:
            disk_offload(one, str(tmp_path / "offload"), execution_device=CPU)

    if order == "before":
        offload(model)
        mmpreproj.load(model, adapter)
    elif order == "after":
        mmpreproj.load(model, adapter)
        offload(model)
    else:
        mmpreproj.patch(model)
        offload(model)
        add_point_path(model)
        mmpreproj.load(model, adapter, replace=True)
    for _ in range(2):  # onto the device and off again
        same(model, plain)
    for scale in (0.0, [0.3, 2.0], 1.0):
        for one in (model, plain):
            mmpreproj.set_scale(one, scale)
        assert torch.equal(drawn(model, clouds()), drawn(plain, clouds()))
    same(model, plain)
    mmpreproj.save(model, tmp_path / "again", card=False)
    assert all(
        torch.equal(value, read_weights(tmp_path / "again")[key]) for key, value in read_weights(adapter).items()
    )
    mmpreproj.check_intact(model)
    mmpreproj.unpatch(model)
    assert torch.equal(drawn(model), drawn(make_transformer("sd35")))


def test_points_move_first_of_all_on_an_offloaded_model(make_transformer, make_patched, adapter):
    """No picture was drawn before, which would have brought weights along."""
    for offload in OFFLOADS:
        model = make_transformer("sd35")
        mmpreproj.load(model, adapter)
        offload(model)
        assert torch.equal(moved(model), moved(make_patched())), offload.__name__


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside another hook"])
def test_a_model_offloaded_whole_is_brought_back_for_points(make_patched, beside):
    model, plain, brought = make_patched(), make_patched(), []

    class Watching(CpuOffload):
        def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            brought.append(module)
            return super().pre_forward(module, *args, **kwargs)

    add_hook_to_module(model, Watching(CPU))
    if beside:
        add_hook_to_module(model, ModelHook(), append=True)
    assert torch.equal(moved(model), moved(plain))
    assert brought == [model]


@pytest.mark.parametrize("offload", [group_block_level, group_two_blocks, group_leaf_level])
def test_points_read_no_weight_while_its_group_is_offloaded(make_patched, offload):
    """On one device nothing moves, so a group's weights are made NaN for as long as it is offloaded."""
    model, plain = make_patched(), make_patched()
    offload(model)
    hooks = [module._diffusers_hook.get_hook("group_offloading") for module in model.modules() if grouped(module)]
    for group in {id(hook.group): hook.group for hook in hooks}.values():
        hide(group)
    for run in (moved, lambda one: drawn(one, clouds()), drawn, moved):
        assert torch.equal(run(model), run(plain))
    assert all(parameter.isnan().all() for parameter in find_point_layer(model).parameters())


def grouped(module: nn.Module) -> bool:
    registry = getattr(module, "_diffusers_hook", None)
    return registry is not None and registry.get_hook("group_offloading") is not None


def hide(group: Any) -> None:
    """Give a group's tensors their values when it is onloaded, and take them when it is offloaded."""
    tensors = [tensor for member in group.modules for tensor in (*member.parameters(), *member.buffers())]
    tensors += [*group.parameters, *group.buffers]
    values = [tensor.detach().clone() for tensor in tensors]

    def onload() -> None:
        for tensor, value in zip(tensors, values, strict=True):
            tensor.data.copy_(value)

    def offload() -> None:
        for tensor in tensors:
            tensor.data.fill_(torch.nan)

    group.onload_, group.offload_ = onload, offload
    offload()


@pytest.mark.parametrize("offload", [group_block_level, group_leaf_level])
def test_groups_hold_the_weights_of_a_path_that_is_added_to_an_adapter(make_transformer, offload):
    model = make_transformer("sd35")
    mmpreproj.patch(model)
    offload(model)
    add_point_path(model)
    held = set()
    for module in model.modules():
        hook = getattr(module, "_diffusers_hook", None)
        hook = None if hook is None else hook.get_hook("group_offloading")
        if hook is not None:
            members = [tensor for member in hook.group.modules for tensor in (*member.parameters(), *member.buffers())]
            held |= {id(tensor) for tensor in (*hook.group.parameters, *hook.group.buffers, *members)}
    assert {id(tensor) for tensor in (*model.parameters(), *model.buffers())} <= held


# Dtypes


@pytest.mark.parametrize("order", ["before", "after"])
def test_layerwise_casting_leaves_the_path_in_its_dtype(make_transformer, adapter, order):
    model = make_transformer("sd35").bfloat16()
    steps = [
        lambda: model.enable_layerwise_casting(torch.float8_e4m3fn, torch.bfloat16),
        lambda: mmpreproj.load(model, adapter),
    ]
    for step in steps if order == "before" else reversed(steps):
        step()
    path = find_point_layer(model)
    assert {parameter.dtype for parameter in path.parameters()} == {torch.bfloat16}
    assert model.transformer_blocks[0].ff.net[2].weight.dtype == torch.float8_e4m3fn
    before = {key: value.clone() for key, value in path.state_dict().items()}
    results = drawn(model, clouds()), moved(model, noisy())
    assert all(result.isfinite().all() for result in results)
    assert all(torch.equal(value, before[key]) for key, value in path.state_dict().items())
    plain = make_transformer("sd35").bfloat16()
    with torch.no_grad():
        for name, module in model.named_modules():
            if any(p.dtype == torch.float8_e4m3fn for p in module.parameters(recurse=False)):
                plain.get_submodule(name).to(torch.float8_e4m3fn).to(torch.bfloat16)
    mmpreproj.load(plain, adapter)
    assert torch.equal(results[0], drawn(plain, clouds()))
    assert torch.equal(results[1], moved(plain, noisy()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_half_precision_model_is_near_the_exact_one(make_patched, dtype):
    model, exact = make_patched().to(dtype), make_patched()
    assert relative(drawn(model, clouds()), drawn(exact, clouds())) < 0.05
    velocity = moved(model, noisy())
    assert velocity.dtype == torch.float32
    assert relative(velocity, moved(exact)) < 0.05
    far = clouds() | {"point_cloud": clouds()["point_cloud"] * 0.01 + 100}
    assert relative(drawn(model, far), drawn(exact, far)) < 0.05, "coordinates are not rounded before the ball"


def test_an_fp32_adapter_serves_a_half_precision_base(make_patched):
    model = make_patched().to(torch.bfloat16)
    for parameter in mmpreproj.parameters(model):
        parameter.data = parameter.data.float()
    assert drawn(model, clouds()).dtype == torch.bfloat16
    assert moved(model, noisy()).isfinite().all()
    inputs = picture(8, 8, 5, torch.bfloat16)
    loss = model(**inputs, joint_attention_kwargs=clouds(), return_dict=False)[0].float().square().mean()
    (loss + (point_velocity(model, noisy(), **prompt(torch.bfloat16)) - 1).square().mean()).backward()
    assert {gradient.dtype for gradient in gradients(model).values()} == {torch.float32}


@pytest.mark.parametrize("order", ["before", "after"])
def test_a_quantised_base_leaves_the_path_as_it_is(make_transformer, adapter, order):
    model, plain = make_transformer("sd35"), make_transformer("sd35")
    steps = [lambda: quantize_(model, Int8WeightOnlyConfig()), lambda: mmpreproj.load(model, adapter)]
    for step in steps if order == "before" else reversed(steps):
        step()
    quantize_(plain, Int8WeightOnlyConfig())
    with torch.no_grad():
        for module in plain.modules():
            if isinstance(module, nn.Linear):
                module.weight = nn.Parameter(module.weight.dequantize())
    mmpreproj.load(plain, adapter)
    path = find_point_layer(model)
    assert {(type(parameter), parameter.dtype) for parameter in path.parameters()} == {(nn.Parameter, torch.float32)}
    assert type(model.transformer_blocks[0].ff.net[2].weight) is not nn.Parameter
    assert relative(drawn(model, clouds()), drawn(plain, clouds())) < 1e-4
    assert relative(moved(model), moved(plain)) < 1e-4


# Other arguments of the model


def test_positions_and_points_go_together(make_patched, make_transformer, shake):
    config = PreProjConfig(positions=Positions(text="diagonal", absolute="remove"), points=with_points().points)
    model = make_patched(config)
    mask = torch.arange(5) < torch.tensor([[5], [3]])
    plain, both = drawn(model), drawn(model, clouds())
    assert relative(both, plain) > 1e-3
    masked = drawn(model, clouds() | {"attention_mask": mask})
    assert relative(masked, both) > 1e-4
    turned = moved(model)
    with torch.no_grad():
        for name, parameter in mmpreproj.named_parameters(model):
            if "rotary_gain" in name:
                parameter.zero_()
    assert torch.equal(moved(model), turned), "points have no positions"
    assert relative(drawn(model, clouds()), both) > 1e-4
    mmpreproj.check_intact(model)
    mmpreproj.unpatch(model)
    assert torch.equal(drawn(model), drawn(make_transformer("sd35")))


def test_positions_of_one_adapter_and_points_of_another(make_patched, shake):
    model = make_patched()
    mmpreproj.patch(model, PreProjConfig(pre_projection=False, skip=False, positions=Positions()), name="positions")
    with torch.no_grad():
        for parameter in mmpreproj.parameters(model, "positions"):
            parameter.fill_(0.7)
    alone = make_patched()
    assert torch.equal(moved(model), moved(alone))
    assert relative(drawn(model, clouds()), drawn(alone, clouds())) > 1e-3
    for name in ("default", "positions"):
        with mmpreproj.disabled(model, name):
            assert torch.equal(drawn(model, clouds()), drawn(alone, clouds())) == (name == "positions")


def test_layers_skipped_for_pictures_are_not_skipped_for_points(make_patched):
    """The conditioning is made before the model learns which layers a picture skips."""
    model, found = make_patched(), []
    model.time_text_embed.register_forward_hook(lambda module, args, result: found.append(result))
    whole, skipped = drawn(model, clouds()), drawn(model, clouds(), skip_layers=[0])
    assert relative(skipped, whole) > 1e-3
    assert torch.equal(found[0], found[1])


def test_controlnet_residuals_are_added_as_ever(make_patched, make_transformer):
    model = make_patched()
    residuals = [torch.randn(2, 16, 32)]
    with_cloud = drawn(model, clouds(), block_controlnet_hidden_states=residuals)
    assert relative(with_cloud, drawn(model, clouds())) > 1e-3
    assert relative(with_cloud, drawn(model, block_controlnet_hidden_states=residuals)) > 1e-3
    controlnet = SD3ControlNetModel.from_transformer(
        make_transformer("sd3"), num_layers=1, num_extra_conditioning_channels=0, load_weights_from_transformer=False
    )
    inputs = picture(8, 8, 5)
    with torch.no_grad():
        (made,) = controlnet(controlnet_cond=inputs["hidden_states"], **inputs, return_dict=False)
    assert drawn(model, clouds(), block_controlnet_hidden_states=list(made)).isfinite().all()


@pytest.mark.parametrize("positions", [None, Positions(absolute="remove")], ids=["alone", "with positions"])
@pytest.mark.parametrize("style", ["sd3", "sd35"])
def test_a_controlnet_made_from_a_model_with_a_path_is_that_of_its_base(
    make_patched, make_transformer, style, positions
):
    """Diffusers copies the weights of the conditioning strictly."""

    def build(transformer: nn.Module) -> nn.Module:
        torch.manual_seed(3)
        made = SD3ControlNetModel.from_transformer(transformer, num_layers=1, num_extra_conditioning_channels=0)
        for block in (made.controlnet_blocks, made.pos_embed_input):
            for parameter in block.parameters():
                nn.init.normal_(parameter, std=0.3)
        return made.eval()

    model = make_patched(PreProjConfig(positions=positions, points=with_points().points), style=style)
    before = drawn(model, clouds())
    controlnet, twin = build(model), build(make_transformer(style))
    assert controlnet.state_dict().keys() == twin.state_dict().keys()
    assert all(torch.equal(value, twin.state_dict()[key]) for key, value in controlnet.state_dict().items())
    assert not [module for module in controlnet.modules() if module._forward_hooks or module._forward_pre_hooks]
    inputs = picture(8, 8, 5)
    with torch.no_grad():
        (made,), (expected,) = (
            one(controlnet_cond=inputs["hidden_states"], **inputs, return_dict=False)[0] for one in (controlnet, twin)
        )
    assert torch.equal(made, expected)
    assert torch.equal(drawn(model, clouds()), before)
    assert relative(drawn(model, clouds(), block_controlnet_hidden_states=[made]), before) > 1e-3


def test_a_lora_scale_in_the_same_arguments_comes_through(make_patched):
    model = make_patched()
    model.add_adapter(LoraConfig(target_modules=["to_q"], **LORA))
    outputs = [drawn(model, clouds() | {"scale": scale}) for scale in (0.0, 1.0)]
    assert relative(*outputs) > 1e-4
    assert torch.equal(outputs[1], drawn(model, clouds()))


def test_forward_chunking_of_the_feed_forward_serves_points(make_patched):
    """Stock chunking splits tokens in equal parts; points are not chunked, and come out the same."""
    model, plain = make_patched(), make_patched()
    model.enable_forward_chunking(chunk_size=8, dim=1)
    close(moved(model), moved(plain))
