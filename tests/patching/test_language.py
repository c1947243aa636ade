"""Causal language models: the paper's equation in every row's blocks, and an adapter's life on them."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from language_models import (
    ROWS,
    WIDTH,
    attention_of,
    blocks_of,
    generated,
    logits,
    make_ids,
    make_model,
    make_patched,
    shake,
)
from torch import Tensor, nn
from transformers import LlamaForSequenceClassification, OPTConfig, OPTForCausalLM

import mmpreproj
from mmpreproj import PointPathConfig, Positions, PreProjConfig
from mmpreproj.patching.families import FAMILIES, AttentionSite, Family, Stream


@pytest.fixture(params=ROWS)
def row(request: pytest.FixtureRequest) -> str:
    """A row of the table, by its model class."""
    return request.param


@dataclass(frozen=True)
class Parts:
    """What a block calls its parts, and how it adds them up."""

    norm: str = "input_layernorm"
    attention: str = "self_attn"
    after_attention: str | None = None
    feed_forward_norm: str = "post_attention_layernorm"
    after_feed_forward: str | None = None
    parallel: bool = False


_SANDWICH = Parts(
    after_attention="post_attention_layernorm",
    feed_forward_norm="pre_feedforward_layernorm",
    after_feed_forward="post_feedforward_layernorm",
)
PARTS = dict.fromkeys(ROWS, Parts()) | {
    "GPTNeoXForCausalLM": Parts(attention="attention", parallel=True),
    "GPT2LMHeadModel": Parts(norm="ln_1", attention="attn", feed_forward_norm="ln_2"),
    "Gemma2ForCausalLM": _SANDWICH,
    "Gemma3ForCausalLM": _SANDWICH,
}
BLOCKS = [pytest.param(name, PARTS[name], {}, id=name) for name in ROWS]
BLOCKS.append(
    pytest.param(
        "GPTNeoXForCausalLM", Parts(attention="attention"), {"use_parallel_residual": False}, id="GPTNeoX in sequence"
    )
)
WITHOUT = ("increment", "skip", "features in the skip")


def reference(
    block: nn.Module, parts: Parts, weights: dict[str, Tensor], x: Tensor, call: dict, *, without=""
) -> Tensor:
    """`x + attention(x_tilde) + W_skip x_tilde` and the feed-forward, from a bare block's own parts in float64."""

    def part(name: str | None, tokens: Tensor) -> Tensor:
        return tokens if name is None else getattr(block, name)(tokens)

    up, down, skip = (weights[key] for key in ("up", "down", "skip"))
    x_hat = part(parts.norm, x)
    hidden = x_hat @ up.T
    increment = (hidden / (1 + torch.exp(-hidden))) @ down.T
    x_tilde = x_hat if without == "increment" else x_hat + increment
    attended = getattr(block, parts.attention)(x_tilde, **call)[0]
    read = x_hat if without == "features in the skip" else x_tilde
    around = 0 if without == "skip" else read @ skip.T
    after = x + part(parts.after_attention, attended + around)
    beside = x if parts.parallel else after
    return after + part(parts.after_feed_forward, block.mlp(part(parts.feed_forward_norm, beside)))


def as_double(value):
    """Turn every floating tensor of a call's arguments to float64."""
    if isinstance(value, tuple):
        return tuple(map(as_double, value))
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def weights_of(attention: nn.Module) -> dict[str, Tensor]:
    """Read `W_up`, `W_down` and `W_skip` in float64."""
    state = {key: value.double() for key, value in attention.preproj.adapters["default"].state_dict().items()}
    return {
        "up": state["pre_projection.shared.up.weight"],
        "down": state["pre_projection.shared.down.weight"],
        "skip": state["content_skip.shared.map.weight"],
    }


def recorded(model: nn.Module, name: str, parts: Parts) -> Iterator[tuple[int, Tensor, dict, Tensor]]:
    """Run a model and list, per block, its index, its input, what it calls its attention with, and its output."""
    seen: dict[int, list] = {}
    handles = []
    for index, block in enumerate(blocks_of(model, name)):

        def note(module, args, kwargs, output, index=index):
            seen[index] = [args[0] if args else kwargs["hidden_states"], seen.get(index), output]

        def note_call(module, args, kwargs, index=index):
            seen[index] = {key: value for key, value in kwargs.items() if key != "hidden_states"}

        handles.append(block.register_forward_hook(note, with_kwargs=True))
        attention = getattr(block, parts.attention)
        handles.append(attention.register_forward_pre_hook(note_call, with_kwargs=True))
    logits(model, use_cache=False)
    for handle in handles:
        handle.remove()
    return ((index, *values) for index, values in seen.items())


@pytest.mark.parametrize(("name", "parts", "overrides"), BLOCKS)
def test_a_block_is_the_papers_equation(name, parts, overrides):
    model = make_patched(name, **overrides)
    bare = make_model(name, **overrides).double()
    for index, x, call, output in recorded(model, name, parts):
        weights = weights_of(attention_of(blocks_of(model, name)[index], name))
        arguments = {key: as_double(value) for key, value in call.items()}

        def by_hand(without="", index=index, weights=weights, x=x, arguments=arguments):
            with torch.no_grad():
                block = blocks_of(bare, name)[index]
                return reference(block, parts, weights, x.double(), arguments, without=without)

        torch.testing.assert_close(output.double(), by_hand(), rtol=1e-4, atol=1e-4)
        for mistake in WITHOUT:
            assert (output - by_hand(mistake)).abs().max() > 1e-2, mistake


def test_every_row_of_the_table_has_a_tiny_model():
    table = {family.model_class for family in FAMILIES}
    assert set(ROWS) < table
    for name in ROWS:
        assert type(make_model(name)).__name__ == name


def test_a_zero_start_is_the_base_bit_for_bit(row):
    model = make_model(row)
    base, text = logits(model), generated(model)
    mmpreproj.patch(model, PreProjConfig(init="zero"))
    assert torch.equal(logits(model), base)
    assert torch.equal(generated(model), text)


def test_the_papers_start_is_nearly_the_base(row):
    model = make_model(row)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(5)  # to a stream of size 1 or more, as trained models have
    base = logits(model)
    mmpreproj.patch(model)
    assert 0 < (logits(model) - base).norm() < 1e-3 * base.norm()


def test_patching_and_unpatching_leave_no_trace(row, snapshot):
    model = make_model(row)
    before, base, text = snapshot(model), logits(model), generated(model)
    report = mmpreproj.patch(model)
    shake(model)
    assert (logits(model) - base).abs().max() > 0.1
    added = set(model.state_dict()) - set(before.values)
    assert added and all(".preproj." in key for key in added)
    assert report.parameters == sum(parameter.numel() for parameter in mmpreproj.parameters(model))
    mmpreproj.unpatch(model)
    before.check(model)
    assert torch.equal(logits(model), base)
    assert torch.equal(generated(model), text)


def test_a_scale_of_zero_and_a_disabled_adapter_are_the_base(row):
    model = make_model(row)
    base = logits(model)
    mmpreproj.patch(model)
    shake(model)
    moved = logits(model)
    mmpreproj.set_scale(model, 0)
    assert torch.equal(logits(model), base)
    mmpreproj.set_scale(model, 1)
    with mmpreproj.disabled(model):
        assert torch.equal(logits(model), base)
    assert torch.equal(logits(model), moved)


def test_save_and_load_into_a_fresh_base(row, tmp_path):
    model = make_patched(row)
    mmpreproj.save(model, tmp_path)
    fresh = make_model(row)
    mmpreproj.load(fresh, tmp_path)
    assert torch.equal(logits(fresh), logits(model))
    assert torch.equal(generated(fresh), generated(model))


def test_the_card_is_of_a_language_model(tmp_path):
    model = make_model("LlamaForCausalLM")
    mmpreproj.patch(model)
    mmpreproj.save(model, tmp_path)
    card = (tmp_path / "README.md").read_text()
    assert 'mmpreproj.load(model, ".")' in card
    assert "transformers" in card.partition("---\n\n")[0]
    assert "pipe" not in card and "diffusers" not in card


def test_the_profile_has_a_row_for_each_layer(row):
    model = make_patched(row)
    rows = list(mmpreproj.profile(model))
    depth = len(blocks_of(model, row))
    assert [one.block for one in rows] == list(range(depth))
    for one, block in zip(rows, blocks_of(model, row), strict=True):
        weights = weights_of(attention_of(block, row))
        assert one.skip == pytest.approx(float(weights["skip"].norm()), rel=1e-5)
        assert one.down == pytest.approx(float(weights["down"].norm()), rel=1e-5)
        assert one.skip_initial == pytest.approx(1e-4 * WIDTH, rel=0.2)


def test_every_parameter_of_the_adapter_gets_a_gradient_and_no_other(row):
    model = make_patched(row)
    model.requires_grad_(False)
    mmpreproj.thaw(model)
    ids = make_ids()
    model(input_ids=ids, labels=ids).loss.backward()
    ours = dict(mmpreproj.named_parameters(model))
    assert all(parameter.grad is not None and parameter.grad.abs().max() > 0 for parameter in ours.values())
    assert {key for key, parameter in model.named_parameters() if parameter.grad is not None} == set(ours)


def test_only_some_layers_are_patched(row):
    model = make_model(row)
    mmpreproj.patch(model, PreProjConfig(blocks={"last": 1}))
    assert [one.block for one in mmpreproj.profile(model)] == [len(blocks_of(model, row)) - 1]
    assert not any(".0.attn.preproj" in key or ".0.self_attn.preproj" in key for key in model.state_dict())


@pytest.mark.parametrize(
    ("other", "overrides", "found"),
    [
        ("LlamaForCausalLM", {"hidden_size": 64}, "LlamaForCausalLM of width 64"),
        ("LlamaForCausalLM", {"num_key_value_heads": 4}, "num_key_value_heads 4"),
        ("LlamaForCausalLM", {"num_hidden_layers": 3}, "depth 3"),
        ("LlamaForCausalLM", {"intermediate_size": 96}, "intermediate_size 96"),
        ("MistralForCausalLM", {}, "MistralForCausalLM of width 32"),
        ("GPTNeoXForCausalLM", {}, "GPTNeoXForCausalLM of width 32"),
    ],
)
def test_another_base_is_refused_and_both_are_named(tmp_path, snapshot, other, overrides, found):
    mmpreproj.save(make_patched("LlamaForCausalLM"), tmp_path, card=False)
    model = make_model(other, **overrides)
    before = snapshot(model)
    made_for = r"made for LlamaForCausalLM of width 32, depth 2, 4 heads, num_key_value_heads 2"
    with pytest.raises(ValueError, match=rf"{made_for}.* but this model is .*{found}"):
        mmpreproj.load(model, tmp_path)
    before.check(model)


@pytest.mark.parametrize("parallel", [True, False])
def test_an_adapter_knows_whether_the_feed_forward_is_beside_attention(tmp_path, parallel):
    mmpreproj.save(make_patched("GPTNeoXForCausalLM", use_parallel_residual=parallel), tmp_path, card=False)
    model = make_model("GPTNeoXForCausalLM", use_parallel_residual=not parallel)
    with pytest.raises(ValueError, match=rf"use_parallel_residual {parallel}.*use_parallel_residual {not parallel}"):
        mmpreproj.load(model, tmp_path)


@pytest.mark.parametrize("config", [PreProjConfig(positions=Positions()), PreProjConfig(mask_padding=True)])
def test_positions_and_mask_are_refused_with_what_the_model_has_of_its_own(row, snapshot, config):
    model = make_model(row)
    before = snapshot(model)
    own = "absolute, learned" if row == "GPT2LMHeadModel" else "rotary at queries and keys"
    with pytest.raises(
        ValueError, match=rf"cannot be set on {row}.*leave both out.* its own positions \({own}.*attention_mask"
    ):
        mmpreproj.patch(model, config)
    before.check(model)


def test_points_are_refused_with_the_models_that_take_them(row, snapshot):
    model = make_model(row)
    before = snapshot(model)
    with pytest.raises(ValueError, match=rf"points cannot go through {row}.*image tokens.*SD3Transformer2DModel"):
        mmpreproj.patch(model, PreProjConfig(points=PointPathConfig()))
    before.check(model)
    mmpreproj.patch(model)
    with pytest.raises(ValueError, match=rf"points cannot go through {row}"):
        mmpreproj.points.add_point_path(model)


def test_a_model_without_its_head_is_refused_with_the_way_to_patch_it(row):
    model = make_model(row)
    bare = model.base_model
    with pytest.raises(
        TypeError, match=rf"{type(bare).__name__} has no attention .*classes: .*{row}.*Family\(…\) and pass.*family=…"
    ):
        mmpreproj.patch(bare)
    known = next(family for family in FAMILIES if family.model_class == row)
    own = replace(known, model_class=type(bare).__name__, blocks=known.blocks.split(".", 1)[1])
    mmpreproj.patch(bare, family=own)
    shake(bare)
    assert torch.equal(logits(model), logits(make_patched(row)))


def test_another_head_is_patched_by_a_row_of_ones_own():
    """A row's class names the base in the file; its blocks are the same ones."""
    config = make_model("LlamaForCausalLM").config
    model = LlamaForSequenceClassification(config).eval()
    with pytest.raises(TypeError, match="LlamaForSequenceClassification has no attention blocks that mmpreproj knows"):
        mmpreproj.patch(model)
    base = logits(model)
    known = next(family for family in FAMILIES if family.model_class == "LlamaForCausalLM")
    mmpreproj.patch(model, family=known)
    shake(model)
    assert (logits(model) - base).abs().max() > 1e-3


def test_a_class_that_no_row_knows_is_patched_by_a_row_of_ones_own():
    config = OPTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=48, vocab_size=97, word_embed_proj_dim=32
    )
    model = OPTForCausalLM(config).eval()
    base = logits(model)
    text = Stream("text", argument="hidden_states", position=0, output=0)
    row = Family(
        model_class="OPTForCausalLM",
        blocks="model.decoder.layers",
        sites=(AttentionSite("self_attn", (text,)),),
        width="embed_dim",
        heads="num_heads",
        norm="before attention, LayerNorm",
        gate="1",
        positions="absolute, learned",
    )
    mmpreproj.patch(model, PreProjConfig(init="zero"), family=row)
    assert torch.equal(logits(model), base)
    shake(model)
    assert torch.equal(generated(model), generated(model, use_cache=False))
    mmpreproj.unpatch(model)
    assert torch.equal(logits(model), base)


def test_copies_are_whole(row, duplicate):
    model = make_patched(row)
    twin = duplicate(model)
    assert torch.equal(logits(twin), logits(model))
    shake(twin, seed=5)
    assert not torch.equal(logits(twin), logits(model))
    mmpreproj.unpatch(twin)
    assert torch.equal(logits(twin), logits(make_model(row)))


def test_two_adapters_are_summed(row):
    model = make_model(row)
    base = logits(model)
    for name in ("one", "two"):
        mmpreproj.patch(model, PreProjConfig(init="zero"), name=name)
    assert torch.equal(logits(model), base)
    shake(model)
    both = logits(model)
    alone = copy.deepcopy(model)
    mmpreproj.unpatch(alone, "two")
    mmpreproj.disable(model, name="two")
    assert torch.equal(logits(model), logits(alone))
    assert not torch.equal(logits(model), both)
