import copy
import io
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    UNet2DModel,
)
from peft import LoraConfig
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

import mmpreproj
from mmpreproj import PreProjConfig
from mmpreproj.patching import lifecycle
from mmpreproj.patching.families import AttentionSite, Family, Stream, find_family

LORA_TARGETS = ["to_q", "to_k", "to_v", "to_out.0"]
D = 32  # token width of the tiny transformers


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(a.double() - b.double()) / torch.linalg.vector_norm(b.double()))


# Start


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("share", ["block", "stream"])
def test_zero_init_is_the_base_bit_for_bit(transformer, predict, dtype, training: bool, share: str):
    transformer.to(dtype).train(training)
    base = predict(transformer)
    mmpreproj.patch(transformer, PreProjConfig(init="zero", share=share))
    assert torch.equal(predict(transformer), base)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_paper_init_is_the_base_within_a_thousandth(transformer, predict, weights, training: bool):
    transformer.to(weights).train(training)
    base = predict(copy.deepcopy(transformer).float())
    mmpreproj.patch(transformer)
    difference = relative(predict(transformer.float()), base)  # measured: 1.2e-4 to 1.9e-4
    assert 0 < difference <= 1e-3


def test_paper_init_in_bf16_arithmetic_stays_within_the_rounding_of_the_base(transformer, predict, make_inputs):
    # One flipped bit in bf16 spreads through the layers: patched and base then differ by 2e-3 to 4e-3, while the base
    # itself is 5e-3 to 9e-3 away from its own fp32 result. So two things are asked: the difference hides in the
    # rounding that the base has anyway, and the result is no further from the truth than before.
    transformer.bfloat16()
    inputs = {key: value.float() for key, value in make_inputs(torch.bfloat16).items()}
    with torch.no_grad():
        exact = copy.deepcopy(transformer).float()(**inputs, return_dict=False)[0]
    base = predict(transformer)
    mmpreproj.patch(transformer)
    patched = predict(transformer)
    rounding = relative(base, exact)
    assert relative(patched, base) < rounding
    assert relative(patched, exact) - rounding <= 1e-3


@pytest.mark.parametrize("training", [False, True])
def test_new_weights_take_dtype_and_mode_of_their_attention(transformer, training: bool):
    transformer.bfloat16().train(training)
    mmpreproj.patch(transformer)
    assert all(parameter.dtype == torch.bfloat16 for parameter in mmpreproj.parameters(transformer))
    assert all(parameter.requires_grad for parameter in mmpreproj.parameters(transformer))
    assert all(module.training == training for module in transformer.modules())


def test_same_seed_same_start(make_transformer):
    states = []
    for seed in (5, 5, 6):
        model = make_transformer()
        torch.manual_seed(seed)
        mmpreproj.patch(model)
        states.append(torch.cat([parameter.flatten() for parameter in mmpreproj.parameters(model)]))
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[0], states[2])


# Gradients


def backward(model: nn.Module, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor | None]:
    model.zero_grad()
    model(**inputs, return_dict=False)[0].square().mean().backward()
    return {name: parameter.grad for name, parameter in mmpreproj.named_parameters(model)}


@pytest.mark.parametrize("share", ["block", "stream"])
def test_every_parameter_gets_a_gradient_in_the_first_step(transformer, make_inputs, share: str):
    mmpreproj.patch(transformer.train(), PreProjConfig(share=share))
    for name, grad in backward(transformer, make_inputs()).items():
        assert grad is not None, f"{name} has no gradient: an error under DDP"
        assert grad.abs().max() > 0, name


@pytest.mark.parametrize("share", ["block", "stream"])
def test_checkpointing_keeps_the_gradients(transformer, make_inputs, share: str, shake):
    mmpreproj.patch(transformer.train(), PreProjConfig(share=share))
    shake(transformer)
    plain = {name: grad.clone() for name, grad in backward(transformer, make_inputs()).items()}
    transformer.enable_gradient_checkpointing()
    checkpointed = backward(transformer, make_inputs())
    assert plain.keys() == checkpointed.keys()
    for name, grad in plain.items():
        torch.testing.assert_close(checkpointed[name], grad, rtol=1e-6, atol=1e-9, msg=name)


# Patch and unpatch


def test_unpatch_leaves_the_base_bit_for_bit(transformer, predict, snapshot, shake):
    # Flags and hooks of somebody else must come through too.
    transformer.requires_grad_(False)
    transformer.proj_out.requires_grad_(True)
    transformer.transformer_blocks[0].train()
    attention = transformer.transformer_blocks[0].attn
    calls = []
    attention.register_forward_pre_hook(lambda module, args, kwargs: calls.append("before"), with_kwargs=True)
    attention.register_forward_hook(lambda module, args, output: calls.append("after"))
    before, base = snapshot(transformer), predict(transformer)
    mmpreproj.patch(transformer)
    shake(transformer)
    assert not torch.equal(predict(transformer), base)
    mmpreproj.unpatch(transformer)
    before.check(transformer)
    assert torch.equal(predict(transformer), base)
    assert calls == ["before", "after"] * 3


def test_patch_touches_nothing_of_the_base(transformer, snapshot):
    transformer.requires_grad_(False)
    transformer.pos_embed.requires_grad_(True)
    transformer.transformer_blocks[1].train()
    before = snapshot(transformer)
    mmpreproj.patch(transformer)
    assert all(parameter.requires_grad for parameter in mmpreproj.parameters(transformer))
    values = transformer.state_dict()
    assert all(torch.equal(values[key], value) for key, value in before.values.items())
    now = snapshot(transformer).structure
    for part in ("parameters", "buffers", "modules"):
        assert [entry for entry in now[part] if "preproj" not in entry[0]] == before.structure[part]
    assert [key for key in now["keys"] if "preproj" not in key] == before.structure["keys"]
    patched = {path for path in now["hooks"] if now["hooks"][path] != before.structure["hooks"].get(path)}
    attentions = {site.path for site in lifecycle.report(transformer).sites}
    assert {path for path in patched if "preproj" not in path} == attentions


def test_patch_and_unpatch_any_number_of_times_under_one_name(transformer, predict, snapshot, shake):
    before, base, outputs = snapshot(transformer), predict(transformer), []
    for _ in range(3):
        torch.manual_seed(0)
        mmpreproj.patch(transformer, name="mine")
        shake(transformer)
        assert mmpreproj.is_patched(transformer)
        assert mmpreproj.adapters(transformer) == ("mine",)
        outputs.append(predict(transformer))
        mmpreproj.unpatch(transformer, "mine")
        assert not mmpreproj.is_patched(transformer)
        assert mmpreproj.adapters(transformer) == ()
    before.check(transformer)
    assert torch.equal(predict(transformer), base)
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


def test_detached_shows_the_base_for_a_while(transformer, predict, snapshot, shake):
    base_state = snapshot(transformer)
    base = predict(transformer)
    mmpreproj.patch(transformer)
    shake(transformer)
    patched_state, patched = snapshot(transformer), predict(transformer)
    with pytest.raises(RuntimeError, match="on purpose"), lifecycle.detached(transformer) as bare:
        base_state.check(bare)
        assert torch.equal(predict(bare), base)
        raise RuntimeError("on purpose")
    assert torch.equal(predict(transformer), patched)
    assert set(transformer.state_dict()) == set(patched_state.values)


# Settings and the report


def expected_count(config: PreProjConfig, *, streams: int, skips: int) -> int:
    """`2·e·d²` for the pre-projection and `d²` for the skip, once if shared, once per stream otherwise."""
    hidden = max(1, round(config.expansion * D))
    streams, skips = (1, 1) if config.share == "block" else (streams, skips)
    return config.pre_projection * streams * 2 * hidden * D + config.skip * skips * D * D


@pytest.mark.parametrize(
    ("values", "blocks"),
    [
        ({}, (0, 1, 2)),
        ({"share": "stream"}, (0, 1, 2)),
        ({"expansion": 0.25}, (0, 1, 2)),
        ({"expansion": 0.01}, (0, 1, 2)),
        ({"expansion": 2, "share": "stream", "skip": False}, (0, 1, 2)),
        ({"skip": False}, (0, 1, 2)),
        ({"pre_projection": False}, (0, 1, 2)),
        ({"pre_projection": False, "share": "stream"}, (0, 1, 2)),
        ({"pre_projection": False, "blocks": [2]}, (2,)),
        ({"dual_attention": False}, (0, 1, 2)),
        ({"blocks": [1]}, (1,)),
        ({"blocks": [2, 0]}, (0, 2)),
        ({"blocks": {"last": 2}}, (1, 2)),
    ],
    ids=str,
)
def test_report_lists_blocks_streams_and_parameters(
    make_transformer, style: str, values: dict[str, Any], blocks: tuple[int, ...], predict
):
    model, config = make_transformer(style, num_layers=3), PreProjConfig(**values)
    base_names, base_count = set(model.state_dict()), sum(parameter.numel() for parameter in model.parameters())
    report = mmpreproj.patch(model, config)
    rows = []
    for block in blocks:
        skips = ("image",) if block == 2 else ("image", "text")
        rows.append((block, "attn", ("image", "text"), skips))
        if style == "sd35" and block == 0 and config.dual_attention:
            rows.append((block, "attn2", ("image",), ("image",)))
    found = [(site.block, site.path, site.projected, site.skipped, site.parameters) for site in report.sites]
    assert found == [
        (
            block,
            f"transformer_blocks.{block}.{child}",
            streams if config.pre_projection else (),
            skips if config.skip else (),
            expected_count(config, streams=len(streams), skips=len(skips)),
        )
        for block, child, streams, skips in rows
    ]
    assert report.blocks == blocks
    assert report.streams == (("image",) if blocks == (2,) and not config.pre_projection else ("image", "text"))
    assert report.parameters == sum(site.parameters for site in report.sites)
    assert report.base_parameters == base_count
    assert (report.name, report.model_class) == ("default", "SD3Transformer2DModel")
    assert f"{report.parameters:,} parameters" in str(report)
    assert all(site.path in str(report) for site in report.sites)

    new = {name: parameter for name, parameter in model.named_parameters() if name not in base_names}
    named = dict(mmpreproj.named_parameters(model))
    assert named.keys() == new.keys()
    assert all(named[name] is parameter for name, parameter in new.items())
    assert [id(parameter) for parameter in mmpreproj.parameters(model)] == [id(value) for value in named.values()]
    assert sum(parameter.numel() for parameter in named.values()) == report.parameters
    assert set(model.state_dict()) - base_names == new.keys()
    assert torch.isfinite(predict(model)).all()


@pytest.mark.parametrize("values", [{"skip": False}, {"pre_projection": False}, {"blocks": [1]}, {"expansion": 0.5}])
def test_each_setting_changes_the_output(transformer, predict, shake, values: dict[str, Any]):
    base = predict(transformer)
    mmpreproj.patch(transformer, PreProjConfig(**values))
    shake(transformer)
    assert relative(predict(transformer), base) > 1e-2


def test_unpatched_dual_attention_is_left_alone(make_transformer, predict, shake):
    model = make_transformer("sd35")
    mmpreproj.patch(model, PreProjConfig(dual_attention=False))
    shake(model)
    attention = model.transformer_blocks[0].attn2
    assert not hasattr(attention, "preproj")
    assert not attention._forward_hooks
    assert not attention._forward_pre_hooks


def test_a_family_of_ones_own(make_transformer, predict, shake):
    image = Stream("image", argument="hidden_states", position=0, output=0)
    row = Family(
        model_class="Mine",
        blocks="transformer_blocks",
        sites=(AttentionSite("attn2", (image,)),),
        width="query_dim",
        heads="heads",
        norm="",
        gate="",
        positions="",
    )
    model = make_transformer("sd35")
    assert [site.path for site in mmpreproj.patch(model, family=row).sites] == ["transformer_blocks.0.attn2"]
    with pytest.raises(TypeError, match=r"no joint attention in transformer_blocks \(looked for: attn2\)"):
        mmpreproj.patch(make_transformer("sd3"), family=row)


def test_subclasses_are_covered(make_transformer):
    class Derived(SD3Transformer2DModel):
        pass

    model = Derived(**{key: value for key, value in make_transformer().config.items() if not key.startswith("_")})
    assert mmpreproj.patch(model).model_class == "Derived"


# Refusals


def test_models_of_unknown_classes_are_refused(snapshot):
    unet = UNet2DModel(
        sample_size=8,
        block_out_channels=(32,),
        layers_per_block=1,
        down_block_types=("DownBlock2D",),
        up_block_types=("UpBlock2D",),
    )
    for model in (nn.Linear(4, 4), unet, AutoencoderKL(block_out_channels=(32,), norm_num_groups=8)):
        before = snapshot(model)
        with pytest.raises(
            TypeError, match=rf"{type(model).__name__} has no attention blocks .*SD3Transformer2DModel"
        ):
            mmpreproj.patch(model)
        before.check(model)


def test_a_known_class_without_blocks_is_refused(make_transformer):
    model = make_transformer()
    model.transformer_blocks = nn.ModuleList()
    with pytest.raises(TypeError, match=r"'transformer_blocks' should be a non-empty torch\.nn\.ModuleList"):
        mmpreproj.patch(model)


def test_a_pipeline_is_answered_with_its_transformer(make_transformer):
    pipe = StableDiffusion3Pipeline(
        transformer=make_transformer(),
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=None,
        **{f"{kind}{number}": None for kind in ("text_encoder", "tokenizer") for number in ("", "_2", "_3")},
    )
    for call in (mmpreproj.patch, mmpreproj.unpatch, mmpreproj.is_patched, mmpreproj.parameters, mmpreproj.profile):
        with pytest.raises(TypeError, match=r"got StableDiffusion3Pipeline; pass its transformer, pipe\.transformer"):
            call(pipe)
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module, got SimpleNamespace$"):
        mmpreproj.patch(SimpleNamespace())


def test_patching_twice_under_one_name_is_refused(transformer, predict, snapshot):
    mmpreproj.patch(transformer)
    before, output = snapshot(transformer), predict(transformer)
    with pytest.raises(ValueError, match=r"already patched under the name 'default'; .*unpatch.*replace=True"):
        mmpreproj.patch(transformer)
    before.check(transformer)
    assert torch.equal(predict(transformer), output)


@pytest.mark.parametrize(
    ("blocks", "match"),
    [
        ([0, 2], r"blocks: \[2\] do not exist; the model has 2 blocks, 0 to 1"),
        ({"last": 3}, "the last 3 were asked for, but the model has 2 blocks"),
    ],
)
def test_blocks_out_of_range_are_refused(transformer, snapshot, blocks: Any, match: str):
    before = snapshot(transformer)
    with pytest.raises(ValueError, match=match):
        mmpreproj.patch(transformer, PreProjConfig(blocks=blocks))
    before.check(transformer)


@pytest.mark.parametrize("name", ["", "a.b", ".", None, 3, b"default"])
def test_bad_names_are_refused(transformer, snapshot, name: Any):
    before = snapshot(transformer)
    with pytest.raises(ValueError, match=r"name must be a non-empty string without dots; got"):
        mmpreproj.patch(transformer, name=name)
    before.check(transformer)


@pytest.mark.parametrize("name", ["keys", "values", "items", "type", "forward", "training", "0", "a b", "ü"])
def test_names_that_collide_with_attributes_of_torch_work_or_are_refused_in_our_words(
    transformer, predict, snapshot, name: str
):
    before, base = snapshot(transformer), predict(transformer)
    try:
        mmpreproj.patch(transformer, PreProjConfig(init="zero"), name=name)
    except ValueError as error:
        assert "name must" in str(error)
        assert repr(name) in str(error)
    else:
        assert mmpreproj.adapters(transformer) == (name,)
        assert torch.equal(predict(transformer), base)
        mmpreproj.unpatch(transformer, name)
    before.check(transformer)


def test_what_is_not_there_cannot_be_found_or_removed(transformer, snapshot, tmp_path):
    calls = (
        mmpreproj.unpatch,
        mmpreproj.parameters,
        mmpreproj.named_parameters,
        mmpreproj.profile,
        lambda model: mmpreproj.save(model, tmp_path),
    )
    for call in calls:
        with pytest.raises(ValueError, match=r"SD3Transformer2DModel is not patched; call mmpreproj\.patch"):
            call(transformer)
    before = snapshot(transformer)
    mmpreproj.patch(transformer, name="mine")
    calls = (
        mmpreproj.unpatch,
        mmpreproj.parameters,
        mmpreproj.named_parameters,
        lambda model, name: mmpreproj.profile(model, name=name),
        lambda model, name: mmpreproj.save(model, tmp_path, name=name),
    )
    for call in calls:
        with pytest.raises(ValueError, match="carries no adapter 'yours'; it carries mine"):
            call(transformer, "yours")
    mmpreproj.unpatch(transformer)
    with pytest.raises(ValueError, match="is not patched"):
        mmpreproj.unpatch(transformer)
    before.check(transformer)
    assert not list(tmp_path.iterdir())


# Beside other tools


def test_positional_call_of_the_attention_meets_the_adapter(make_transformer, shake):
    model = make_transformer()
    mmpreproj.patch(model)
    shake(model)
    attention = model.transformer_blocks[0].attn
    image, text = torch.randn(2, 6, D), torch.randn(2, 4, D)
    with torch.no_grad():
        named = attention(hidden_states=image, encoder_hidden_states=text)
        for placed in (attention(image, text), attention(image, encoder_hidden_states=text)):
            assert torch.equal(placed[0], named[0])
            assert torch.equal(placed[1], named[1])
        mmpreproj.unpatch(model)
        base = attention(image, text)
    assert relative(named[0], base[0]) > 1e-2
    assert relative(named[1], base[1]) > 1e-2


def test_deepcopy_gives_an_independent_patched_model(transformer, predict, snapshot, shake):
    before, base = snapshot(transformer), predict(transformer)
    mmpreproj.patch(transformer)
    shake(transformer)
    patched = predict(transformer)
    twin = copy.deepcopy(transformer)
    mmpreproj.unpatch(transformer)
    before.check(transformer)
    assert torch.equal(predict(twin), patched)
    mmpreproj.unpatch(twin)
    assert torch.equal(predict(twin), base)
    assert list(twin.state_dict()) == list(transformer.state_dict())


def test_pickle_keeps_a_patched_model_whole(transformer, predict, shake):
    base = predict(transformer)
    mmpreproj.patch(transformer, name="mine")
    shake(transformer)
    buffer = io.BytesIO()
    torch.save(transformer, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    assert mmpreproj.adapters(loaded) == ("mine",)
    assert torch.equal(predict(loaded), predict(transformer))
    mmpreproj.unpatch(loaded)
    assert torch.equal(predict(loaded), base)
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in loaded.modules())


def test_compiled_in_one_graph_equals_eager(transformer, predict, shake):
    mmpreproj.patch(transformer)
    shake(transformer)
    torch._dynamo.reset()
    compiled = torch.compile(transformer, fullgraph=True, backend="eager")
    torch.testing.assert_close(predict(compiled), predict(transformer), rtol=1e-6, atol=1e-6)


def test_compiled_wrapper_is_seen_through(make_transformer, shake, snapshot, tmp_path):
    model = make_transformer()
    before = snapshot(model)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert mmpreproj.patch(compiled).model_class == "SD3Transformer2DModel"
    assert mmpreproj.is_patched(compiled) and mmpreproj.is_patched(model)
    names = [name for name, _ in mmpreproj.named_parameters(compiled)]
    assert names and names == [name for name, _ in mmpreproj.named_parameters(model)]
    assert not any("_orig_mod" in name for name in names)
    shake(compiled)
    mmpreproj.save(compiled, tmp_path)
    expected = [parameter.clone() for parameter in mmpreproj.parameters(model)]
    mmpreproj.unpatch(compiled)
    before.check(model)
    mmpreproj.load(compiled, tmp_path)
    assert all(map(torch.equal, mmpreproj.parameters(model), expected))


def test_a_model_compiled_and_run_before_takes_the_adapter_and_gives_it_back(make_transformer, predict, shake):
    """Dynamo does not guard on hooks, so a cached graph of the base must not be what runs after `patch`."""
    model = make_transformer()
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    base = predict(compiled)
    mmpreproj.patch(compiled)
    shake(compiled)
    assert relative(predict(model), base) > 1e-2
    torch.testing.assert_close(predict(compiled), predict(model), rtol=1e-6, atol=1e-6)
    mmpreproj.unpatch(compiled)
    torch.testing.assert_close(predict(compiled), base, rtol=1e-6, atol=1e-6)


def shake_lora(model: nn.Module, *, std: float = 0.2) -> list[str]:
    """Make the LoRA matter (its B starts at zero) and return its keys."""
    generator = torch.Generator().manual_seed(4)
    keys = []
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            keys.append(name)
            with torch.no_grad():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
    return keys


@pytest.mark.parametrize("lora_first", [True, False])
def test_lora_and_the_adapter_work_side_by_side(transformer, make_transformer, style, predict, shake, lora_first):
    alone = make_transformer(style)
    alone.add_adapter(LoraConfig(r=4, target_modules=LORA_TARGETS))
    keys = shake_lora(alone)
    with_lora_only, base = predict(alone), predict(transformer)

    steps = [
        lambda: transformer.add_adapter(LoraConfig(r=4, target_modules=LORA_TARGETS)),
        lambda: mmpreproj.patch(transformer),
    ]
    for step in steps if lora_first else reversed(steps):
        step()
    shake(transformer)
    with_ours_only = predict(transformer)  # LoRA's B is still zero
    assert shake_lora(transformer) == keys
    assert not any(isinstance(m, BaseTunerLayer) for n, m in transformer.named_modules() if ".preproj" in n)
    both = predict(transformer)
    results = [base, with_lora_only, with_ours_only, both]
    for i, one in enumerate(results):
        for other in results[i + 1 :]:
            assert relative(one, other) > 1e-3
    transformer.disable_adapters()
    assert torch.equal(predict(transformer), with_ours_only)
    transformer.enable_adapters()
    mmpreproj.unpatch(transformer)
    assert torch.equal(predict(transformer), with_lora_only)


def test_fused_projections_leave_the_patched_output(make_transformer, predict, shake):
    model = make_transformer()  # no q/k norm: stock fusing drops those
    mmpreproj.patch(model)
    shake(model)
    before = predict(model)
    model.fuse_qkv_projections()
    torch.testing.assert_close(predict(model), before, rtol=1e-5, atol=1e-5)
    model.unfuse_qkv_projections()
    torch.testing.assert_close(predict(model), before, rtol=1e-5, atol=1e-5)


def test_what_save_pretrained_wrote_reloads_as_the_base(transformer, predict, shake, tmp_path):
    base = predict(transformer)
    mmpreproj.patch(transformer)
    shake(transformer)
    transformer.save_pretrained(tmp_path)
    reloaded = SD3Transformer2DModel.from_pretrained(tmp_path).eval()
    assert not mmpreproj.is_patched(reloaded)
    assert torch.equal(predict(reloaded), base)


def test_state_dict_of_a_patched_model_loads_strictly_into_another(
    transformer, make_transformer, style, predict, shake
):
    mmpreproj.patch(transformer)
    shake(transformer)
    other = make_transformer(style, seed=9)
    mmpreproj.patch(other)
    other.load_state_dict(transformer.state_dict(), strict=True)
    assert torch.equal(predict(other), predict(transformer))


def test_a_row_that_names_an_argument_which_is_not_there_is_refused(transformer):
    row = find_family(transformer)
    stream = replace(row.sites[0].streams[0], argument="hidden_statez")
    wrong = replace(row, sites=(AttentionSite("attn", (stream,)),))
    with pytest.raises(ValueError, match=r"takes no argument 'hidden_statez' .* its forward takes hidden_states"):
        mmpreproj.patch(transformer, family=wrong)


def test_a_config_that_is_none_of_ours_is_refused(transformer):
    for config in ("style", {"expansion": 2}):
        with pytest.raises(TypeError, match=r"config must be a PreProjConfig; got .* A name is given as name="):
            mmpreproj.patch(transformer, config)
    assert not mmpreproj.is_patched(transformer)


@pytest.mark.parametrize("by_keyword", [True, False])
def test_full_backward_hooks_on_the_attention_leave_the_adapter_alone(make_transformer, shake, by_keyword: bool):
    """Torch rebuilds the arguments for such hooks, by their own class where it is not `tuple`."""
    model = make_transformer()
    mmpreproj.patch(model)
    shake(model)
    attention = model.transformer_blocks[0].attn
    streams = {"hidden_states": torch.randn(1, 4, 32), "encoder_hidden_states": torch.randn(1, 3, 32)}

    def call() -> torch.Tensor:
        return (attention(**streams) if by_keyword else attention(*streams.values()))[0]

    expected = call()
    attention.register_full_backward_hook(lambda *_: None)
    assert torch.equal(call(), expected)


@pytest.mark.parametrize("rebuild", [tuple, list, lambda args: type(args)(args)])
def test_a_hook_that_rebuilds_the_positional_arguments_does_not_lose_the_skip(transformer, predict, shake, rebuild):
    mmpreproj.patch(transformer)
    shake(transformer)
    expected = predict(transformer)
    attention = transformer.transformer_blocks[0].attn
    attention.register_forward_pre_hook(lambda module, args, kwargs: (tuple(rebuild(args)), kwargs), with_kwargs=True)
    assert torch.equal(predict(transformer), expected)


def test_a_hook_that_rebuilds_the_keyword_arguments_does_not_lose_the_skip(transformer, predict, shake):
    mmpreproj.patch(transformer)
    shake(transformer)
    expected = predict(transformer)
    attention = transformer.transformer_blocks[0].attn
    attention.register_forward_pre_hook(lambda module, args, kwargs: (args, {**kwargs}), with_kwargs=True)
    assert torch.equal(predict(transformer), expected)


def test_a_hook_that_replaces_all_arguments_is_refused(transformer, predict):
    mmpreproj.patch(transformer)
    attention = transformer.transformer_blocks[0].attn
    attention.register_forward_pre_hook(lambda module, args, kwargs: (tuple(args), {**kwargs}), with_kwargs=True)
    with pytest.raises(RuntimeError, match=r"another forward pre-hook .* register that hook with prepend=True"):
        predict(transformer)


def test_weights_may_be_assigned_to_a_patched_model_on_meta(make_transformer, predict, shake):
    model = make_transformer()
    mmpreproj.patch(model)
    shake(model)
    mmpreproj.set_scale(model, 0.5)
    with torch.device("meta"):
        empty = make_transformer()
    mmpreproj.patch(empty)
    mmpreproj.set_scale(empty, 0.5)
    empty.load_state_dict(model.state_dict(), assign=True)
    empty.pos_embed.pos_embed = model.pos_embed.pos_embed
    assert torch.equal(predict(empty), predict(model))
