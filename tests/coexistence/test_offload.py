"""Offloading by diffusers and accelerate, from CPU to CPU and disk: before and after patching, nothing changes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import disk_offload, dispatch_model
from accelerate.utils import align_module_device
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, StableDiffusion3Pipeline
from diffusers.hooks import apply_group_offloading
from diffusers.hooks.group_offloading import _is_group_offload_enabled
from offloads_kit import CPU, group_block_level, group_leaf_level, sequential, sequential_with_buffers, whole_model
from torch import Tensor, nn

import mmpreproj
from mmpreproj import PreProjConfig

STYLE = "sd35"  # dual attention in the first block
PARTS = (
    "pos_embed",
    "time_text_embed",
    "context_embedder",
    "transformer_blocks.0",
    "transformer_blocks.1",
    "norm_out",
    "proj_out",
)
OTHERS = (PreProjConfig(), PreProjConfig(expansion=0.5, share="stream"))

Offload = Callable[[nn.Module], Any]


def device_map(model: nn.Module) -> None:
    dispatch_model(model, dict.fromkeys(PARTS, "cpu"), force_hooks=True)


@pytest.fixture(
    params=[
        group_leaf_level,
        sequential,
        device_map,
        "disk",
        *(
            pytest.param(way, marks=pytest.mark.slow)
            for way in (group_block_level, sequential_with_buffers, whole_model, "device_map_with_disk")
        ),
    ],
    ids=lambda way: getattr(way, "__name__", way),
)
def offload(request: pytest.FixtureRequest, tmp_path: Path) -> Offload:
    """One way to offload a model in place."""

    def with_disk(model: nn.Module) -> None:
        places = dict.fromkeys(PARTS, "cpu") | {"transformer_blocks.1": "disk"}
        dispatch_model(model, places, main_device="cpu", offload_dir=str(tmp_path / "offload"), force_hooks=True)

    def disk(model: nn.Module) -> None:
        disk_offload(model, str(tmp_path / "offload"), execution_device=CPU)

    return {"device_map_with_disk": with_disk, "disk": disk}.get(request.param, request.param)


@pytest.fixture
def patched(make_transformer, shake) -> nn.Module:
    """A patched model that nothing offloads."""
    model = make_transformer(STYLE)
    mmpreproj.patch(model)
    shake(model)
    return model


@pytest.fixture
def adapter(patched, tmp_path) -> Path:
    """The folder of its adapter."""
    return mmpreproj.save(patched, tmp_path / "adapter", card=False)


@pytest.fixture
def make_offloaded(make_transformer, adapter, offload) -> Callable[[str], nn.Module]:
    """Build the patched model again, offloaded before or after it was patched."""

    def make(order: str) -> nn.Module:
        model = make_transformer(STYLE)
        for step in (offload, lambda one: mmpreproj.load(one, adapter))[:: 1 if order == "before" else -1]:
            step(model)
        return model

    return make


def group_hook(module: nn.Module) -> Any:
    """Find what diffusers' group offloading put on a module, if anything."""
    registry = getattr(module, "_diffusers_hook", None)
    return None if registry is None else registry.get_hook("group_offloading")


def values(model: nn.Module, name: str) -> dict[str, Tensor]:
    """Read an adapter's weights wherever they are."""
    found = {}
    for path, module in model.named_modules():
        if f".adapters.{name}." in path:
            with align_module_device(module):
                found |= {f"{path}.{key}": value.clone() for key, value in module.named_parameters(recurse=False)}
    return found


@pytest.mark.parametrize("order", ["before", "after"])
def test_offloaded_equals_not_offloaded(make_offloaded, make_transformer, patched, predict, order):
    base, expected = predict(make_transformer(STYLE)), predict(patched)
    model = make_offloaded(order)
    for _ in range(2):  # onto the device and off again
        assert torch.equal(predict(model), expected)
    assert not torch.equal(expected, base)
    mmpreproj.check_intact(model)
    for scale in (0.0, [0.3, 2.0], 1.0):
        for one in (model, patched):
            mmpreproj.set_scale(one, scale)
        assert torch.equal(predict(model), predict(patched))
    with mmpreproj.disabled(model):
        assert torch.equal(predict(model), base)
    assert torch.equal(predict(model), expected)


@pytest.mark.parametrize("order", ["before", "after"])
def test_what_is_saved_and_measured_offloaded_is_the_same(make_offloaded, adapter, patched, predict, order, tmp_path):
    model = make_offloaded(order)
    predict(model)
    mmpreproj.save(model, tmp_path / "again", card=False)
    weights = "adapter_model.safetensors"
    assert (tmp_path / "again" / weights).read_bytes() == (adapter / weights).read_bytes()
    assert mmpreproj.profile(model).rows == mmpreproj.profile(patched).rows


@pytest.mark.parametrize("order", ["before", "after"])
def test_a_second_adapter_comes_and_goes_offloaded(make_offloaded, patched, predict, order, tmp_path):
    config = PreProjConfig(share="stream", expansion=0.5)
    alone = predict(patched)
    torch.manual_seed(3)
    mmpreproj.patch(patched, PreProjConfig(share="stream", expansion=0.5, init="zero"), name="second")
    for index, parameter in enumerate(mmpreproj.parameters(patched, "second")):
        nn.init.normal_(parameter, std=0.1 + 0.01 * index)
    mmpreproj.save(patched, tmp_path / "second", name="second", card=False)
    model = make_offloaded(order)
    assert torch.equal(predict(model), alone)
    mmpreproj.load(model, tmp_path / "second", name="second")
    both = predict(model)
    assert torch.equal(both, predict(patched))
    assert not torch.equal(both, alone)
    mmpreproj.unpatch(model, "second")
    assert torch.equal(predict(model), alone)
    mmpreproj.patch(model, config, name="second")
    mmpreproj.unpatch(model, "default")
    mmpreproj.load(model, tmp_path / "second", name="second", replace=True)
    mmpreproj.unpatch(patched, "default")
    assert torch.equal(predict(model), predict(patched))


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize(
    "config", [PreProjConfig(), PreProjConfig(expansion=0.5, share="stream")], ids=["same", "other"]
)
def test_a_swap_offloaded_equals_a_swap_in_memory(
    make_offloaded, make_transformer, patched, predict, shake, order, config, tmp_path
):
    other = make_transformer(STYLE)
    mmpreproj.patch(other, config)
    shake(other, seed=9)
    mmpreproj.save(other, tmp_path / "other", card=False)
    model = make_offloaded(order)
    before = predict(model)
    for one in (model, patched):
        mmpreproj.set_scale(one, 0.6)
        mmpreproj.load(one, tmp_path / "other", replace=True)
        mmpreproj.load(one, tmp_path / "other", name="default", replace=True)
    found = predict(model)
    assert torch.equal(found, predict(patched))
    assert not torch.equal(found, before)
    expected = values(other, "default")
    read = values(model, "default")
    assert read.keys() == expected.keys()
    assert all(torch.equal(read[key], value) for key, value in expected.items())


@pytest.mark.parametrize("order", ["before", "after"])
def test_unpatched_offloaded_is_the_offloaded_base(
    make_offloaded, make_transformer, offload, predict, order, tmp_path
):
    base = predict(make_transformer(STYLE))
    model = make_offloaded(order)
    predict(model)
    mmpreproj.unpatch(model)
    assert not mmpreproj.is_patched(model)
    assert torch.equal(predict(model), base)
    bare = make_transformer(STYLE)
    offload(bare)
    predict(bare)
    assert list(model.state_dict()) == list(bare.state_dict())
    assert [path for path, _ in model.named_modules()] == [path for path, _ in bare.named_modules()]
    for (path, module), (_, expected) in zip(model.named_modules(), bare.named_modules(), strict=True):
        assert hasattr(module, "_hf_hook") == hasattr(expected, "_hf_hook"), path
        assert group_hook(module) is None or group_hook(expected) is not None, path
        assert not module._forward_hooks and not module._forward_pre_hooks, path


@pytest.mark.parametrize("level", [group_block_level, group_leaf_level])
def test_group_offloading_holds_new_weights_too(make_transformer, patched, adapter, level):
    """Its groups keep lists of modules and tensors, made before the adapter came."""
    model = make_transformer(STYLE)
    level(model)
    mmpreproj.load(model, adapter)
    assert _is_group_offload_enabled(model)
    held = set()
    for module in model.modules():
        if (hook := group_hook(module)) is not None:
            held |= {id(tensor) for tensor in (*hook.group.parameters, *hook.group.buffers)}
            for member in hook.group.modules:
                held |= {id(tensor) for tensor in (*member.parameters(), *member.buffers())}
    assert {id(tensor) for tensor in (*model.parameters(), *model.buffers())} <= held


# Group offloading to disk: between runs the tensors of the model hold no values.


def group_on_disk(model: nn.Module, folder: Path) -> None:
    apply_group_offloading(model, CPU, CPU, offload_type="leaf_level", offload_to_disk_path=str(folder / "groups"))


def test_patched_and_then_grouped_on_disk_runs_the_same(patched, predict, tmp_path):
    mmpreproj.set_scale(patched, 0.7)
    expected = predict(patched)
    group_on_disk(patched, tmp_path)
    for _ in range(2):
        assert torch.equal(predict(patched), expected)


@pytest.mark.parametrize(
    "touch",
    [
        lambda model, folder: mmpreproj.patch(model, name="second"),
        lambda model, folder: mmpreproj.load(model, folder, name="second"),
        lambda model, folder: mmpreproj.load(model, folder, replace=True),
        lambda model, folder: mmpreproj.unpatch(model),
        lambda model, folder: mmpreproj.save(model, folder / "again"),
        lambda model, folder: mmpreproj.set_scale(model, 0.5),
        lambda model, folder: mmpreproj.profile(model),
    ],
    ids=["patch", "load", "replace", "unpatch", "save", "set_scale", "profile"],
)
def test_what_would_read_or_write_absent_values_is_refused(patched, adapter, predict, touch, tmp_path):
    group_on_disk(patched, tmp_path)
    expected = predict(patched)
    with pytest.raises(ValueError, match=r"group offloading keeps .* on disk .*offload_to_disk_path"):
        touch(patched, adapter)
    assert torch.equal(predict(patched), expected)
    assert mmpreproj.adapters(patched) == ("default",)
    assert not (adapter / "again").exists()


def test_the_base_grouped_on_disk_is_not_patched(make_transformer, predict, tmp_path):
    model = make_transformer(STYLE)
    base = predict(model)
    group_on_disk(model, tmp_path)
    with pytest.raises(ValueError, match="offload_to_disk_path"):
        mmpreproj.patch(model)
    assert torch.equal(predict(model), base)


# What needs a GPU


@pytest.mark.skipif(not torch.cuda.is_available(), reason="offloads from a GPU")
@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("level", ["block_level", "leaf_level"])
@pytest.mark.parametrize("use_stream", [False, True])
def test_group_offloading_from_a_gpu_changes_nothing(
    make_transformer, patched, adapter, make_inputs, level, order, use_stream
):
    inputs = {key: value.cuda() for key, value in make_inputs().items()} | {"return_dict": False}
    model = make_transformer(STYLE)
    if order == "after":
        mmpreproj.load(model, adapter)
    options = {"num_blocks_per_group": 1} if level == "block_level" else {}
    model.enable_group_offload(torch.device("cuda"), CPU, offload_type=level, use_stream=use_stream, **options)
    if order == "before":
        mmpreproj.load(model, adapter)
    patched.cuda()
    with torch.no_grad():
        for scale in (1.0, 0.5):
            for one in (model, patched):
                mmpreproj.set_scale(one, scale)
            for _ in range(2):
                torch.testing.assert_close(model(**inputs)[0], patched(**inputs)[0])
    assert all(parameter.device.type == "cpu" for parameter in mmpreproj.parameters(model))
    mmpreproj.unpatch(model)
    mmpreproj.unpatch(patched)
    with torch.no_grad():
        torch.testing.assert_close(model(**inputs)[0], patched(**inputs)[0])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="diffusers' pipelines offload from a GPU only")
@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("offload_all", ["enable_model_cpu_offload", "enable_sequential_cpu_offload"])
def test_pipeline_offloading_changes_no_latents(make_transformer, adapter, offload_all, order):
    latents = []
    for offloaded in (False, True):
        transformer = make_transformer(STYLE)
        pipe = StableDiffusion3Pipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(),
            transformer=transformer,
            vae=AutoencoderKL(block_out_channels=(32,), latent_channels=4).eval(),
            **dict.fromkeys(("text_encoder", "text_encoder_2", "text_encoder_3")),
            **dict.fromkeys(("tokenizer", "tokenizer_2", "tokenizer_3")),
        )
        pipe.set_progress_bar_config(disable=True)
        if order == "after" or not offloaded:
            mmpreproj.load(transformer, adapter)
        getattr(pipe, offload_all)() if offloaded else pipe.to("cuda")
        if not mmpreproj.is_patched(transformer):
            mmpreproj.load(transformer, adapter)
        tokens, pooled = torch.linspace(-1, 1, 120, device="cuda"), torch.linspace(-1, 1, 20, device="cuda")
        result = pipe(
            prompt_embeds=tokens.reshape(1, 5, 24),
            negative_prompt_embeds=-tokens.reshape(1, 5, 24),
            pooled_prompt_embeds=pooled.reshape(1, 20),
            negative_pooled_prompt_embeds=-pooled.reshape(1, 20),
            height=8,
            width=8,
            num_inference_steps=2,
            latents=torch.linspace(-2, 2, 256).reshape(1, 4, 8, 8).to("cuda"),
            output_type="latent",
        )
        latents.append(result.images.cpu())
    torch.testing.assert_close(latents[1], latents[0])
