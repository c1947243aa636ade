"""What positions cannot be put on, and what takes them off without a word."""

from dataclasses import replace

import pytest
import torch
from diffusers.models.attention_processor import (
    FusedJointAttnProcessor2_0,
    JointAttnProcessor2_0,
    PAGCFGJointAttnProcessor2_0,
    PAGJointAttnProcessor2_0,
)
from positions_kit import NOWHERE, output, picture, positioned, relative
from torch import nn

import mmpreproj
from mmpreproj import Positions, PreProjConfig
from mmpreproj.patching.families import find_family


def set_pag(model: nn.Module) -> None:
    model.transformer_blocks[1].attn.set_processor(PAGJointAttnProcessor2_0())


REPLACED = [
    (lambda model: model.set_attn_processor(JointAttnProcessor2_0()), "JointAttnProcessor2_0"),
    (lambda model: model.fuse_qkv_projections(), "FusedJointAttnProcessor2_0"),
    (set_pag, "PAGJointAttnProcessor2_0"),
    (
        lambda model: model.transformer_blocks[0].attn.set_processor(PAGCFGJointAttnProcessor2_0()),
        "PAGCFGJointAttnProcessor2_0",
    ),
]


@pytest.mark.parametrize(("damage", "found"), REPLACED, ids=[name for _, name in REPLACED])
@pytest.mark.parametrize("config", [positioned(), PreProjConfig(mask_padding=True)], ids=["positions", "mask"])
def test_a_processor_put_in_the_place_of_ours_is_refused(transformer, damage, found: str, config: PreProjConfig):
    inputs = picture(8, 8, 5)
    mmpreproj.patch(transformer, config)
    mmpreproj.check_intact(transformer)
    processors, expected = transformer.attn_processors, output(transformer, inputs)
    damage(transformer)
    with pytest.raises(ValueError, match=f"^{found} was put in the place of .* by their positions"):
        output(transformer, inputs)
    with pytest.raises(
        ValueError, match=rf"lost the attention processor .* transformer_blocks\.\d\.attn: {found} was"
    ):
        mmpreproj.check_intact(transformer)
    transformer.set_attn_processor(processors)
    mmpreproj.check_intact(transformer)
    assert torch.equal(output(transformer, inputs), expected)


def test_with_the_adapter_off_another_processor_may_stand_in(transformer, make_transformer, style):
    inputs = picture(8, 8, 5)
    base = output(transformer, inputs)
    mmpreproj.patch(transformer, positioned(start="full", absolute="remove"))
    transformer.set_attn_processor(JointAttnProcessor2_0())
    with mmpreproj.disabled(transformer):
        assert torch.equal(output(transformer, inputs), base)
    with pytest.raises(ValueError, match="was put in the place of"):
        output(transformer, inputs)


def test_an_unfused_model_has_its_positions_again(make_transformer, shake):
    model = make_transformer()
    mmpreproj.patch(model, PreProjConfig(positions=Positions()))
    shake(model)
    expected = output(model, picture(8, 8, 5))
    model.fuse_qkv_projections()
    model.unfuse_qkv_projections()
    mmpreproj.check_intact(model)
    assert torch.equal(output(model, picture(8, 8, 5)), expected)


@pytest.mark.parametrize(("damage", "found"), REPLACED[1:], ids=[name for _, name in REPLACED[1:]])
@pytest.mark.parametrize("config", [positioned(), PreProjConfig(mask_padding=True)], ids=["positions", "mask"])
@pytest.mark.parametrize("beside", [False, True])
def test_a_foreign_processor_is_refused_before_patching(
    transformer, snapshot, damage, found: str, config: PreProjConfig, beside: bool
):
    if beside:
        mmpreproj.patch(transformer, name="beside")
    damage(transformer)
    before, processors = snapshot(transformer), transformer.attn_processors
    with pytest.raises(
        ValueError, match=rf"\.attn to be JointAttnProcessor2_0, which ours stands in for; found {found}"
    ):
        mmpreproj.patch(transformer, config)
    before.check(transformer)
    assert transformer.attn_processors == processors
    assert mmpreproj.adapters(transformer) == (("beside",) if beside else ())


def test_without_positions_a_fused_model_is_patched_as_ever(make_transformer):
    model = make_transformer()
    model.fuse_qkv_projections()
    mmpreproj.patch(model, PreProjConfig(init="zero"))
    assert isinstance(model.transformer_blocks[0].attn.processor, FusedJointAttnProcessor2_0)


def test_hooks_that_were_taken_off_the_model_are_noticed(transformer):
    for table in (transformer._forward_pre_hooks, transformer.pos_embed._forward_hooks):
        mmpreproj.patch(transformer, positioned(absolute="remove"))
        mmpreproj.check_intact(transformer)
        table.clear()
        with pytest.raises(ValueError, match="has lost the hooks that make its positions"):
            mmpreproj.check_intact(transformer)
        mmpreproj.unpatch(transformer)
        mmpreproj.check_intact(transformer)


def test_a_block_called_by_itself_is_refused_unless_nothing_turns_in_it(transformer, make_transformer, style):
    streams = {"hidden_states": torch.randn(2, 6, 32), "encoder_hidden_states": torch.randn(2, 4, 32)}
    call = {**streams, "temb": torch.randn(2, 32)}
    block = transformer.transformer_blocks[0]
    base = block(**call)
    match = r"called without rotary tables, .* call model\(…\), not model\.forward\(…\) or a block by itself"
    mmpreproj.patch(transformer, positioned())
    with pytest.raises(RuntimeError, match=match):
        block(**call)
    with pytest.raises(RuntimeError, match=match):
        transformer.forward(**picture(8, 8, 5))
    with mmpreproj.disabled(transformer):
        assert all(map(torch.equal, block(**call), base))
    mmpreproj.unpatch(transformer)
    mmpreproj.patch(transformer, PreProjConfig(init="zero", positions=NOWHERE))
    assert all(map(torch.equal, block(**call), base))


@pytest.mark.parametrize(
    ("width", "values", "match"),
    [
        (6, {}, "a multiple of 4 channels; this model's are 6 wide"),
        (6, {"text": "none"}, "a multiple of 4 channels; this model's are 6 wide"),
        (6, {"text": "diagonal"}, "a multiple of 4 channels"),
        (2, {"absolute": "remove"}, "a multiple of 4 channels; this model's are 2 wide"),
        (5, {"image": "none"}, "a multiple of 2 channels; this model's are 5 wide"),
        (4, {"scaling": "ntk"}, "'ntk' needs heads of at least 8 channels; this model's have 4"),
    ],
    ids=str,
)
def test_heads_of_a_width_that_cannot_be_turned_are_refused(make_transformer, snapshot, width, values, match: str):
    heads = 4  # the table's width, heads times width, must be a multiple of four
    model = make_transformer(attention_head_dim=width, num_attention_heads=heads, caption_projection_dim=heads * width)
    before = snapshot(model)
    with pytest.raises(ValueError, match=match):
        mmpreproj.patch(model, positioned(**values))
    before.check(model)


@pytest.mark.parametrize(
    ("width", "values"),
    [(6, {"image": "none"}), (5, {"text": "none", "image": "none", "absolute": "remove"}), (4, {"scaling": "yarn"})],
    ids=str,
)
def test_heads_of_a_narrow_width_have_the_positions_that_they_can(make_transformer, shake, width, values):
    model = make_transformer(attention_head_dim=width, num_attention_heads=4, caption_projection_dim=4 * width)
    base = output(model, picture(6, 12, 5))
    mmpreproj.patch(model, positioned(start="full", **values))
    assert relative(output(model, picture(6, 12, 5)), base) > 1e-4


def test_a_row_without_a_seam_is_refused_for_positions_only(transformer, snapshot):
    row = replace(find_family(transformer), seam=None)
    before = snapshot(transformer)
    for config in (positioned(), PreProjConfig(mask_padding=True)):
        with pytest.raises(ValueError, match="cannot be set on SD3Transformer2DModel: its row names no seam"):
            mmpreproj.patch(transformer, config, family=row)
        before.check(transformer)
    mmpreproj.patch(transformer, family=row)


def test_a_model_without_a_patch_embedding_is_refused(transformer, snapshot):
    transformer.pos_embed = nn.Identity()
    before = snapshot(transformer)
    with pytest.raises(ValueError, match=r"positions need SD3Transformer2DModel\.pos_embed to be a PatchEmbed"):
        mmpreproj.patch(transformer, positioned())
    before.check(transformer)


def test_a_base_of_one_patch_is_refused_unless_its_size_is_given(make_transformer, snapshot):
    model = make_transformer(sample_size=2)
    before = snapshot(model)
    with pytest.raises(
        ValueError, match=r"'linear' needs a base of at least 2 patches; .* gives 1\. Set positions\.b"
    ):
        mmpreproj.patch(model, positioned(scaling="linear"))
    before.check(model)
    mmpreproj.patch(model, positioned(scaling="linear", base_size=2))


def test_tokens_that_another_hook_changed_the_number_of_are_refused(transformer):
    mmpreproj.patch(transformer, positioned())

    def lengthen(_, args, kwargs):
        return args, kwargs | {"encoder_hidden_states": kwargs["encoder_hidden_states"].repeat(1, 5, 1)}

    transformer.register_forward_pre_hook(lengthen, with_kwargs=True)
    with pytest.raises(RuntimeError, match="positions for 1 tokens, but 5 came: another hook changed the sizes"):
        output(transformer, picture(8, 8, 1))
