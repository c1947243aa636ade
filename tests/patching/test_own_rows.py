"""Models that the table does not know, patched by a row of one's own: plain modules, and rows that are wrong."""

import copy
import re
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers import SD3Transformer2DModel
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mmpreproj
from mmpreproj import PointPathConfig, Positions, PreProjConfig
from mmpreproj.patching.families import FAMILIES, AttentionSite, Family, Stream, find_family

PAGE = Path(__file__).parents[2] / "docs" / "own_models.md"
D, HEADS, DEPTH = 16, 2, 3
IMAGE = Stream("image", argument="x", position=0, output=0)
TEXT = Stream("text", argument="context", position=1, output=1, discarded_by="is_last")
ROW = Family(
    model_class="PlainMMDiT",
    blocks="blocks",
    sites=(AttentionSite("attn", (IMAGE, TEXT)),),
    width="x_qkv.in_features",
    heads="num_heads",
    norm="LayerNorm and a modulation per stream",
    gate="a gate per stream",
    positions="none",
)
Pair = namedtuple("Pair", ["image", "text"])


@dataclass
class Attended:
    image: Tensor
    text: Tensor | None


class Attention(nn.Module):
    """Joint attention of two streams, which gives its outputs in the form that `wrap` makes of them."""

    def __init__(self, *, last: bool = False) -> None:
        super().__init__()
        self.num_heads, self.is_last, self.nothing, self.label = HEADS, last, None, "joint"
        self.wrap: Callable[[Tensor, Tensor | None], Any] = as_tuple
        self.x_qkv, self.context_qkv = nn.Linear(D, 3 * D), nn.Linear(D, 3 * D)
        self.x_proj, self.context_proj = nn.Linear(D, D), None if last else nn.Linear(D, D)

    def forward(self, x: Tensor, context: Tensor, scale: float | None = None, *, flag: bool = False) -> Any:
        joint = torch.cat([self.context_qkv(context), self.x_qkv(x)], dim=1)
        q, k, v = joint.unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2).flatten(2)
        text, image = out[:, : context.shape[1]], out[:, context.shape[1] :]
        return self.wrap(self.x_proj(image), None if self.context_proj is None else self.context_proj(text))


def as_tuple(image: Tensor, text: Tensor | None) -> tuple[Tensor, Tensor | None]:
    return image, text


class Block(nn.Module):
    def __init__(self, *, last: bool = False) -> None:
        super().__init__()
        self.is_last, self.by_place = last, True
        self.norm = nn.LayerNorm(D, elementwise_affine=False)
        self.attn = Attention(last=last)
        self.x_ada, self.context_ada = nn.Linear(D, 3 * D), nn.Linear(D, 3 * D)
        self.x_mlp, self.context_mlp = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor, context: Tensor, temb: Tensor) -> tuple[Tensor, Tensor]:
        shift, scale, gate = self.x_ada(temb)[:, None].chunk(3, dim=-1)
        context_shift, context_scale, context_gate = self.context_ada(temb)[:, None].chunk(3, dim=-1)
        normed = self.norm(x) * (1 + scale) + shift
        context_normed = self.norm(context) * (1 + context_scale) + context_shift
        if self.by_place:
            out = self.attn(normed, context_normed)
        else:
            out = self.attn(context=context_normed, x=normed)
        attended, context_attended = unwrap_output(out)
        x = x + gate * attended
        x = x + self.x_mlp(self.norm(x))
        if not self.is_last:
            context = context + context_gate * context_attended
            context = context + self.context_mlp(self.norm(context))
        return x, context


def unwrap_output(out: Any) -> tuple[Tensor, Tensor | None]:
    if isinstance(out, dict):
        return out["image"], out["text"]
    if isinstance(out, (Pair, Attended)):
        return out.image, out.text
    return tuple(out)


class PlainMMDiT(nn.Module):
    """No diffusers in it, no config, no dtype and no device."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_x, self.embed_context, self.embed_t = nn.Linear(4, D), nn.Linear(6, D), nn.Linear(1, D)
        self.blocks = nn.ModuleList(Block(last=index == DEPTH - 1) for index in range(DEPTH))
        self.out = nn.Linear(D, 4)
        self.checkpointed = False

    def forward(self, x: Tensor, context: Tensor, sigma: Tensor) -> Tensor:
        x, context, temb = self.embed_x(x), self.embed_context(context), self.embed_t(sigma[:, None])
        for block in self.blocks:
            if self.checkpointed:
                x, context = checkpoint(block, x, context, temb, use_reentrant=False)
            else:
                x, context = block(x, context, temb)
        return self.out(x)


def make_model(**attributes: Any) -> PlainMMDiT:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = PlainMMDiT().eval()
    for name, value in attributes.items():
        setattr(model, name, value)
    return model


def make_inputs() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(2, 7, 4, generator=generator),
        torch.randn(2, 5, 6, generator=generator),
        torch.tensor([0.2, 0.9]),
    )


def predict(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(*make_inputs())


def with_streams(*streams: Stream, **changes: Any) -> Family:
    return replace(ROW, sites=(AttentionSite("attn", streams),), **changes)


@pytest.fixture
def model() -> PlainMMDiT:
    return make_model()


@pytest.fixture
def patched(model: PlainMMDiT, shake: Callable[..., None]) -> PlainMMDiT:
    mmpreproj.patch(model, family=ROW)
    shake(model)
    return model


# The documentation


def doc_blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)


def test_the_page_runs_as_it_stands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in doc_blocks():
        exec(compile(block, PAGE.name, "exec"), names)
    assert names["losses"][-1] < 0.8 * names["losses"][0]
    assert (tmp_path / "my-adapter" / "adapter_config.json").is_file()
    assert not mmpreproj.is_patched(names["fresh"])
    attention = names["reference"].joint_blocks[0].attn
    assert set(attention.preproj.adapters["default"].content_skip) == {"shared"}


# The equation


def skip_and_features(attention: nn.Module, x_hat: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `x_tilde` and `W_skip · x_tilde` from an adapter's weights alone."""
    state = attention.preproj.adapters["default"].state_dict()
    hidden = x_hat @ state["pre_projection.shared.up.weight"].T
    x_tilde = x_hat + (hidden / (1 + torch.exp(-hidden))) @ state["pre_projection.shared.down.weight"].T
    return x_tilde, x_tilde @ state["content_skip.shared.map.weight"].T


def by_hand(block: Block, bare: Block, x: Tensor, context: Tensor, temb: Tensor) -> tuple[Tensor, Tensor]:
    """Compute a block: the equation of the paper, the skip before the gate."""
    x_shift, x_scale, x_gate = bare.x_ada(temb)[:, None].chunk(3, dim=-1)
    c_shift, c_scale, c_gate = bare.context_ada(temb)[:, None].chunk(3, dim=-1)
    x_tilde, x_skip = skip_and_features(block.attn, bare.norm(x) * (1 + x_scale) + x_shift)
    c_tilde, c_skip = skip_and_features(block.attn, bare.norm(context) * (1 + c_scale) + c_shift)
    x_attn, c_attn = bare.attn(x_tilde, c_tilde)
    x = x + x_gate * (x_attn + x_skip)
    x = x + bare.x_mlp(bare.norm(x))
    if not bare.is_last:
        context = context + c_gate * (c_attn + c_skip)
        context = context + bare.context_mlp(bare.norm(context))
    return x, context


@pytest.mark.parametrize("by_place", [True, False])
def test_blocks_compute_the_papers_equation(patched, by_place: bool):
    bare, base = make_model(), predict(make_model())
    for block in patched.blocks:
        block.by_place = by_place
    x, context, sigma = make_inputs()
    with torch.no_grad():
        x, context, temb = bare.embed_x(x), bare.embed_context(context), bare.embed_t(sigma[:, None])
        for block, own in zip(patched.blocks, bare.blocks, strict=True):
            x, context = by_hand(block, own, x, context, temb)
        expected = bare.out(x)
    torch.testing.assert_close(predict(patched), expected, rtol=1e-4, atol=1e-5)
    assert (expected - base).norm() > 0.02 * base.norm()


@pytest.mark.parametrize("share", ["block", "stream"])
def test_zero_init_is_the_base_bit_for_bit(model, share):
    base = predict(model)
    mmpreproj.patch(model, PreProjConfig(init="zero", share=share), family=ROW)
    assert torch.equal(predict(model), base)


def test_paper_init_is_the_base_within_a_thousandth(model):
    base = predict(model)
    mmpreproj.patch(model, family=ROW)
    assert 0 < (predict(model) - base).norm() <= 1e-3 * base.norm()


# Life


def test_unpatching_leaves_no_trace_and_no_cost(model, snapshot):
    before, base = snapshot(model), predict(model)
    attributes = {path: set(vars(module)) for path, module in model.named_modules()}
    mmpreproj.patch(model, family=ROW)
    mmpreproj.unpatch(model)
    before.check(model)
    assert {path: set(vars(module)) for path, module in model.named_modules()} == attributes
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert torch.equal(predict(model), base)


def test_hooks_are_on_the_attentions_alone(patched):
    hooked = [path for path, part in patched.named_modules() if part._forward_hooks or part._forward_pre_hooks]
    assert hooked == [f"blocks.{index}.attn" for index in range(DEPTH)]


@pytest.mark.parametrize("share", ["block", "stream"])
def test_every_parameter_gets_a_gradient(model, shake, share):
    mmpreproj.patch(model, PreProjConfig(share=share), family=ROW)
    shake(model)
    model.requires_grad_(False)
    mmpreproj.thaw(model)
    model(*make_inputs()).square().mean().backward()
    for name, parameter in mmpreproj.named_parameters(model):
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name


def test_the_last_text_has_no_skip_and_unread_says_the_same_as_discarded_by(model):
    said = mmpreproj.patch(model, family=ROW)
    assert [site.skipped for site in said.sites] == [("image", "text")] * (DEPTH - 1) + [("image",)]
    unread = with_streams(IMAGE, replace(TEXT, discarded_by=None), unread=("text",))
    assert mmpreproj.patch(make_model(), family=unread).sites == said.sites


def test_followed_by_says_whether_the_last_text_is_read():
    row = with_streams(IMAGE, replace(TEXT, discarded_by=None), unread=("text",), followed_by="single")
    for followers in ([], [nn.Identity()]):
        report = mmpreproj.patch(make_model(single=nn.ModuleList(followers)), family=row)
        assert ("text" in report.sites[-1].skipped) == bool(followers)


def test_an_adapter_is_saved_and_loaded(patched, tmp_path):
    mmpreproj.save(patched, tmp_path)
    fresh = make_model()
    report = mmpreproj.load(fresh, tmp_path, family=ROW)
    assert report.parameters == sum(parameter.numel() for parameter in mmpreproj.parameters(patched))
    assert torch.equal(predict(fresh), predict(patched))
    mmpreproj.load(fresh, tmp_path, name="second")  # by the row that is there
    mmpreproj.set_scale(fresh, {"default": 0.0, "second": 1.0})
    assert torch.equal(predict(fresh), predict(patched))
    mmpreproj.load(fresh, tmp_path, name="second", replace=True, family=ROW)
    assert torch.equal(predict(fresh), predict(patched))


def test_scale_switches_and_profile(patched):
    base = predict(make_model())
    full = predict(patched)
    mmpreproj.set_scale(patched, {0: 0.0, 1: 0.0, 2: 0.0})
    assert torch.equal(predict(patched), base)
    mmpreproj.set_scale(patched, 1)
    assert torch.equal(predict(patched), full)
    with mmpreproj.disabled(patched):
        assert torch.equal(predict(patched), base)
    assert [row.block for row in mmpreproj.profile(patched)] == list(range(DEPTH))
    assert str(mmpreproj.report(patched)).startswith("adapter 'default' on PlainMMDiT: 3 blocks, 3 attentions")
    mmpreproj.check_intact(patched)


def test_checkpointing_gives_the_same_gradients(patched):
    found = []
    for checkpointed in (False, True):
        patched.zero_grad()
        patched.checkpointed = checkpointed
        patched(*make_inputs()).square().mean().backward()
        found.append({name: parameter.grad.clone() for name, parameter in mmpreproj.named_parameters(patched)})
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_it_compiles_without_a_graph_break(patched):
    expected = predict(patched)
    torch.compiler.reset()
    compiled = torch.compile(patched, backend="eager", fullgraph=True)
    torch.testing.assert_close(predict(compiled), expected)


def test_attentions_that_are_compiled_already_are_patched_by_what_they_wrap(patched, shake, snapshot):
    model = make_model()
    for block in model.blocks:
        block.attn = torch.compile(block.attn, backend="eager")
    base, before = predict(model), snapshot(model)
    with pytest.raises(ValueError, match=r"blocks.0.attn takes no argument 'hidden' .* takes x, context, scale"):
        mmpreproj.patch(model, family=with_streams(replace(IMAGE, argument="hidden")))
    with pytest.raises(ValueError, match=r"position of the text stream is 2, but blocks.0.attn takes 'context' at"):
        mmpreproj.patch(model, family=with_streams(IMAGE, replace(TEXT, position=2)))
    mmpreproj.patch(model, family=ROW)
    shake(model)
    torch.testing.assert_close(predict(model), predict(patched))
    mmpreproj.unpatch(model)
    before.check(model)
    assert torch.equal(predict(model), base)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_parts_in_torchscript_are_let_be(patched, shake, tmp_path):
    model, fresh = make_model(), make_model()
    for each in (model, fresh):
        each.embed_t = torch.jit.script(each.embed_t)
    mmpreproj.patch(model, family=ROW)
    shake(model)
    assert torch.equal(predict(model), predict(patched))
    mmpreproj.save(model, tmp_path)
    mmpreproj.load(fresh, tmp_path, family=ROW)
    assert torch.equal(predict(fresh), predict(patched))
    mmpreproj.unpatch(fresh)
    assert torch.equal(predict(fresh), predict(make_model()))


def test_a_stream_that_a_call_leaves_out_may_have_no_output(shake):
    class Optional(ThreeStreams):
        def forward(self, text: Tensor, image: Tensor | None = None) -> Any:
            if image is None:
                return self.maps[0](text)[..., :D]
            return super().forward(text, image, image)[1:]

    attention = Optional()
    model = nn.Module()
    model.blocks = nn.ModuleList([nn.ModuleDict({"attn": attention})])
    text, image = torch.randn(1, 3, D), torch.randn(1, 2, D)
    alone = attention(text)
    mmpreproj.patch(
        model, family=with_streams(Stream("text", "text", 0, 0), Stream("image", "image", 1, 1), width="width")
    )
    shake(model)
    assert attention(text).shape == alone.shape and not torch.equal(attention(text), alone)
    assert len(attention(text, image)) == 2


def test_copies_are_whole(patched, duplicate):
    twin = duplicate(patched)
    assert torch.equal(predict(twin), predict(patched))
    mmpreproj.unpatch(twin)
    assert mmpreproj.is_patched(patched)
    assert torch.equal(predict(twin), predict(make_model()))


def test_lora_of_the_base_lives_beside_it(patched, tmp_path):
    expected = predict(patched)
    inject_adapter_in_model(LoraConfig(target_modules=["x_qkv", "x_proj"], init_lora_weights=False), patched)
    assert not torch.equal(predict(patched), expected)
    mmpreproj.save(patched, tmp_path)  # width and heads are read off what PEFT wrapped
    fresh = make_model()
    mmpreproj.load(fresh, tmp_path, family=ROW)
    assert torch.equal(predict(fresh), expected)


def test_the_card_says_that_a_row_is_needed(patched, make_transformer, tmp_path):
    mmpreproj.save(patched, tmp_path / "own")
    assert 'mmpreproj.load(pipe.transformer, ".", family=row)' in (tmp_path / "own" / "README.md").read_text()
    stock = make_transformer("sd3")
    mmpreproj.patch(stock)
    mmpreproj.save(stock, tmp_path / "stock")
    assert 'mmpreproj.load(pipe.transformer, ".")' in (tmp_path / "stock" / "README.md").read_text()


def test_new_weights_take_the_dtype_of_their_attention(model):
    mmpreproj.patch(model.bfloat16(), family=ROW)
    assert {parameter.dtype for parameter in mmpreproj.parameters(model)} == {torch.bfloat16}


def test_positions_and_points_are_refused_with_the_reason(model, snapshot):
    before = snapshot(model)
    with pytest.raises(ValueError, match=r"cannot be set on PlainMMDiT: its row names no seam"):
        mmpreproj.patch(model, PreProjConfig(positions=Positions()), family=ROW)
    with pytest.raises(ValueError, match=r"points cannot go through PlainMMDiT: its row names no way"):
        mmpreproj.patch(model, PreProjConfig(points=PointPathConfig()), family=ROW)
    before.check(model)


# The model's config


@dataclass
class PlainConfig:
    patch: Any = 2
    grid: Any = ((1, 2), (3, 4))


CONFIGS = {
    "dataclass": PlainConfig,
    "dict": lambda **values: {"patch": 2, "grid": ((1, 2), (3, 4))} | values,
    "namespace": lambda **values: SimpleNamespace(**({"patch": 2, "grid": ((1, 2), (3, 4))} | values)),
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_settings_are_read_from_any_config_and_tell_bases_apart(tmp_path, kind, snapshot):
    row = replace(ROW, settings=("patch", "grid"))
    model = make_model(config=CONFIGS[kind]())
    mmpreproj.patch(model, family=row)
    mmpreproj.save(model, tmp_path)
    mmpreproj.load(make_model(config=CONFIGS[kind]()), tmp_path, family=row)
    other = make_model(config=CONFIGS[kind](patch=4))
    before = snapshot(other)
    with pytest.raises(ValueError, match=r"patch 2, grid \[\[1, 2\], \[3, 4\]\], but this model is .*patch 4"):
        mmpreproj.load(other, tmp_path, family=row)
    before.check(other)


# Streams


class ThreeStreams(nn.Module):
    """An image and two texts, their outputs in another order than they come in."""

    def __init__(self) -> None:
        super().__init__()
        self.width, self.num_heads = D, HEADS
        self.maps = nn.ModuleList(nn.Linear(D, 3 * D) for _ in range(3))

    def forward(self, text: Tensor, image: Tensor, more: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        streams = (text, image, more)
        joint = torch.cat([maps(tokens) for maps, tokens in zip(self.maps, streams, strict=True)], dim=1)
        out = F.scaled_dot_product_attention(*joint.chunk(3, dim=-1))
        text_out, image_out, more_out = out.split([tokens.shape[1] for tokens in streams], dim=1)
        return more_out, text_out, image_out


class OneStream(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.width, self.num_heads, self.qkv = D, HEADS, nn.Linear(D, 3 * D)

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*self.qkv(x).chunk(3, dim=-1))


class Stack(nn.Module):
    """Blocks of one attention each, whose outputs are sorted by `order` and added."""

    def __init__(self, attention: Callable[[], nn.Module], order: tuple[int, ...], depth: int = 2) -> None:
        super().__init__()
        self.order = order
        self.blocks = nn.ModuleList(nn.ModuleDict({"attn": attention()}) for _ in range(depth))

    def forward(self, *streams: Tensor) -> tuple[Tensor, ...]:
        for block in self.blocks:
            out = block["attn"](*streams)
            outputs = out if isinstance(out, tuple) else (out,)
            streams = tuple(x + outputs[place] for x, place in zip(streams, self.order, strict=True))
        return streams


def expected_of(stack: Stack, bare: Stack, streams: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    for block, own in zip(stack.blocks, bare.blocks, strict=True):
        parts = [skip_and_features(block["attn"], x) for x in streams]
        out = own["attn"](*(features for features, _ in parts))
        outputs = out if isinstance(out, tuple) else (out,)
        streams = tuple(
            x + outputs[place] + skip for x, place, (_, skip) in zip(streams, bare.order, parts, strict=True)
        )
    return streams


@pytest.mark.parametrize(
    ("attention", "order", "arguments"),
    [(ThreeStreams, (1, 2, 0), ("text", "image", "more")), (OneStream, (0,), ("x",))],
)
@torch.no_grad()
def test_any_number_of_streams_with_outputs_in_any_order(attention, order, arguments, shake):
    stack = Stack(attention, order)
    bare = copy.deepcopy(stack)
    streams = tuple(
        Stream(f"{argument} tokens", argument=argument, position=place, output=order[place])
        for place, argument in enumerate(arguments)
    )
    report = mmpreproj.patch(stack, family=with_streams(*streams, width="width"))
    assert report.streams == tuple(sorted(f"{argument} tokens" for argument in arguments))
    shake(stack)
    tokens = tuple(torch.randn(2, 3 + place, D) for place in range(len(order)))
    torch.testing.assert_close(stack(*tokens), expected_of(stack, bare, tokens), rtol=1e-4, atol=1e-5)


def test_streams_of_several_widths_take_weights_of_their_own(snapshot):
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.num_heads, self.x_map, self.context_map = HEADS, nn.Linear(D, D), nn.Linear(6, D)

        def forward(self, x: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
            q, k = self.x_map(x), self.context_map(context)
            return F.scaled_dot_product_attention(q, k, k), context

    stack = Stack(Wide, (0, 1))
    row = with_streams(
        IMAGE, Stream("text", "context", 1, 1, width="context_map.in_features"), width="x_map.in_features"
    )
    before = snapshot(stack)
    with pytest.raises(
        ValueError, match=r"share must be 'stream' for PlainMMDiT: .*blocks.0.attn.*image 16 and text 6"
    ):
        mmpreproj.patch(stack, family=row)
    before.check(stack)
    mmpreproj.patch(stack, PreProjConfig(share="stream"), family=row)
    stack(torch.randn(1, 3, D), torch.randn(1, 4, 6))


@pytest.mark.parametrize(("wrap", "kind"), [(lambda image, text: [image, text], list), (Pair, Pair)])
def test_attention_may_give_a_list_or_a_named_tuple(patched, wrap, kind):
    expected = predict(patched)
    for block in patched.blocks:
        block.attn.wrap = wrap
    assert torch.equal(predict(patched), expected)
    assert type(patched.blocks[0].attn(torch.randn(1, 3, D), torch.randn(1, 2, D))) is kind


@pytest.mark.parametrize(
    ("wrap", "kind"), [(lambda image, text: {"image": image, "text": text}, "dict"), (Attended, "Attended")]
)
def test_what_is_no_tuple_is_refused_when_the_model_runs(model, wrap, kind):
    for block in model.blocks:
        block.attn.wrap = wrap
    predict(model)  # the model itself takes it
    mmpreproj.patch(model, family=ROW)
    with pytest.raises(ValueError, match=rf"Attention gives {kind}, .*image stream at output 0.*return a tensor, or"):
        predict(model)


def test_an_attention_that_takes_whatever_comes_is_reached_by_place(shake):
    class Wrapped(Attention):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    model, plain = make_model(), make_model()
    for block in model.blocks:
        block.attn.__class__ = Wrapped
    for each in (model, plain):
        mmpreproj.patch(each, family=ROW)
        shake(each)
    assert torch.equal(predict(model), predict(plain))


def test_blocks_without_the_attention_are_passed_over(model):
    model.blocks[1].other = model.blocks[1].attn
    del model.blocks[1].attn
    assert mmpreproj.patch(model, family=ROW).blocks == (0, 2)


# Rows that are wrong


def wrong_rows() -> dict[str, tuple[Callable[[], Any], str]]:
    """Make rows with one fault each, and what the error says."""
    return {
        "blocks absent": (
            lambda: replace(ROW, blocks="layers"),
            r"'layers' should be a non-empty torch.nn.ModuleList, found NoneType. Correct Family.blocks.*: blocks$",
        ),
        "blocks no list": (lambda: replace(ROW, blocks="embed_x"), r"'embed_x' should be .*, found Linear.* blocks$"),
        "blocks empty": (lambda: replace(ROW, blocks=""), r"Family.blocks must not be empty"),
        "blocks no text": (lambda: replace(ROW, blocks=3), r"Family.blocks must be a text such as .*; got 3"),
        "child absent": (
            lambda: replace(ROW, sites=(AttentionSite("self_attn", (IMAGE,)),)),
            r"looked for: self_attn\). Correct AttentionSite.child; the children .* are norm, attn, x_ada",
        ),
        "one child of two absent": (
            lambda: replace(ROW, sites=(*ROW.sites, AttentionSite("attn2", (IMAGE,)))),
            r"looked for: attn2\)",
        ),
        "child no module": (
            lambda: replace(ROW, sites=(AttentionSite("is_last", (IMAGE,)),)),
            r"AttentionSite.child='is_last': blocks.0.is_last is bool, no torch.nn.Module",
        ),
        "child never called": (
            lambda: replace(ROW, sites=(AttentionSite("halves", (IMAGE,)),)),
            r"child='halves': blocks.0.halves is ModuleDict, which has no forward, and so is never called",
        ),
        "child numbered": (
            lambda: replace(ROW, sites=(AttentionSite("attns.0", (IMAGE,)),)),
            r"AttentionSite.child must have no numbered part.*'attns.0'",
        ),
        "one child twice": (
            lambda: replace(ROW, sites=(*ROW.sites, *ROW.sites)),
            r"AttentionSite.child is 'attn' twice",
        ),
        "argument absent": (
            lambda: with_streams(replace(IMAGE, argument="hidden")),
            r"blocks.0.attn takes no argument 'hidden' for the image stream; its forward takes x, context, scale",
        ),
        "position wrong": (
            lambda: with_streams(IMAGE, replace(TEXT, position=2)),
            r"position of the text stream is 2, but blocks.0.attn takes 'context' at place 1 of x, context, scale. "
            "Correct Stream.position",
        ),
        "position of a keyword": (
            lambda: with_streams(Stream("image", "flag", 0, 0)),
            r"position of the image stream is 0, where blocks.0.attn takes 'x'; 'flag' is taken by keyword alone",
        ),
        "position no number": (lambda: replace(IMAGE, position="0"), r"Stream.position must be a whole number.*'0'"),
        "position negative": (lambda: replace(IMAGE, position=-1), r"Stream.position must be 0 or more.*-1"),
        "output negative": (lambda: replace(IMAGE, output=-1), r"Stream.output must be 0 or more.*-1"),
        "width absent": (
            lambda: replace(ROW, width="query_dim"),
            r"Family.width='query_dim' is no attribute of this Attention.*there: num_heads 2, x_qkv.in_features 16",
        ),
        "width no number": (lambda: replace(ROW, width="x_qkv"), r"Family.width='x_qkv' is Linear, no whole number"),
        "width a truth": (lambda: replace(ROW, width="is_last"), r"Family.width='is_last' is False, no whole number"),
        "own width absent": (
            lambda: with_streams(IMAGE, replace(TEXT, width="text_dim")),
            r"width of the text stream='text_dim' is no attribute",
        ),
        "heads absent": (lambda: replace(ROW, heads="heads"), r"Family.heads='heads' is no attribute.*num_heads 2"),
        "heads a text": (lambda: replace(ROW, heads="label"), r"Family.heads='label' is str, no whole number"),
        "unread unknown": (
            lambda: replace(ROW, unread=("txt",)),
            r"Family.unread names 'txt', which is no stream of its sites: image, text",
        ),
        "unread a text": (lambda: replace(ROW, unread="text"), r"Family.unread must be a tuple.*'text'.*comma"),
        "discarded_by absent": (
            lambda: with_streams(IMAGE, replace(TEXT, discarded_by="pre_only")),
            r"discarded_by of the text stream='pre_only' is no attribute of this Attention",
        ),
        "taken_by absent": (
            lambda: with_streams(IMAGE, replace(TEXT, taken_by="add_k_proj")),
            r"taken_by of the text stream='add_k_proj' is no attribute of this Attention",
        ),
        "no stream taken": (
            lambda: with_streams(replace(IMAGE, taken_by="nothing")),
            r"AttentionSite.streams is empty",
        ),
        "followed_by absent": (
            lambda: replace(ROW, followed_by="single_blocks"),
            r"Family.followed_by='single_blocks' is no attribute of this PlainMMDiT",
        ),
        "followed_by no list": (
            lambda: replace(ROW, followed_by="out"),
            r"Family.followed_by='out' is Linear, no list of modules",
        ),
        "two of one name": (
            lambda: with_streams(IMAGE, replace(TEXT, name="image")),
            r"Stream.name of 'attn' is 'image' twice",
        ),
        "two of one argument": (
            lambda: with_streams(IMAGE, replace(TEXT, argument="x")),
            r"argument of 'attn' is 'x'",
        ),
        "two of one output": (lambda: with_streams(IMAGE, replace(TEXT, output=0)), r"output of 'attn' is 0 twice"),
        "a name with a dot": (lambda: replace(IMAGE, name="a.b"), r"Stream.name must have no dot.*'a.b'"),
        "a name of torch": (lambda: replace(IMAGE, name="keys"), r"Stream.name must .* no attribute .*'keys'"),
        "no streams": (lambda: with_streams(), r"AttentionSite.streams is empty"),
        "streams no tuple": (
            lambda: AttentionSite("attn", IMAGE),
            r"AttentionSite.streams must be a tuple.*its comma",
        ),
        "streams no streams": (lambda: AttentionSite("attn", ("x",)), r"streams must hold Stream entries.*got 'x'"),
        "no sites": (lambda: replace(ROW, sites=()), r"Family.sites is empty"),
        "sites no tuple": (lambda: replace(ROW, sites=ROW.sites[0]), r"Family.sites must be a tuple.*its comma"),
        "settings absent": (
            lambda: replace(ROW, settings=("patch_size",)),
            r"Family.settings names 'patch_size', but PlainMMDiT does not have it in its dict. Give model.config",
        ),
        "settings that no file holds": (
            lambda: replace(ROW, settings=("dtype",)),
            r"Family.settings names 'dtype', whose value torch.float32 cannot be written to a file",
        ),
        **{
            f"{field} no text": (
                lambda field=field: replace(ROW, **{field: 3}),
                rf"Family.{field} must be a text such as .*; got 3",
            )
            for field in ("model_class", "norm", "gate", "positions")
        },
        "dual no truth": (
            lambda: replace(ROW, sites=(replace(ROW.sites[0], dual="no"),)),
            r"AttentionSite.dual must be True or False; got 'no'",
        ),
        "seam no seam": (lambda: replace(ROW, seam="x"), r"Family.seam must be a PositionSeam or None; got 'x'"),
        "points no seam": (lambda: replace(ROW, points=3), r"Family.points must be a PointSeam or None; got 3"),
        "a class": (lambda: Family, r"family must be a mmpreproj.patching.families.Family, a row .*; got <class"),
        "a name": (lambda: "SD3Transformer2DModel", r"family must be a .*Family.*; got 'SD3Transformer2DModel'"),
        "a dict": (lambda: vars(ROW), r"family must be a .*Family.*; got \{"),
    }


@pytest.mark.parametrize("fault", wrong_rows())
def test_a_wrong_row_is_refused_before_anything_is_changed(fault, snapshot):
    model = make_model(config={"dtype": torch.float32})
    for block in model.blocks:
        block.halves = nn.ModuleDict()
    make, match = wrong_rows()[fault]
    before = snapshot(model)
    with pytest.raises((TypeError, ValueError), match=match):
        mmpreproj.patch(model, family=make())
    before.check(model)
    assert not mmpreproj.is_patched(model)


def test_settings_without_a_config_are_refused(model, snapshot):
    before = snapshot(model)
    with pytest.raises(ValueError, match=r"names 'patch', but PlainMMDiT has no config to read it from"):
        mmpreproj.patch(model, family=replace(ROW, settings=("patch",)))
    before.check(model)


def test_width_and_heads_are_looked_for_where_nothing_is_patched_too(model, snapshot):
    """A saved file says both, of the first block."""
    streams = (replace(IMAGE, width="x_qkv.in_features"), replace(TEXT, width="context_qkv.in_features"))
    before = snapshot(model)
    with pytest.raises(ValueError, match=r"Family.width='dim' is no attribute"):
        mmpreproj.patch(model, family=with_streams(*streams, width="dim"))
    del model.blocks[0].attn.num_heads
    with pytest.raises(ValueError, match=r"Family.heads='num_heads' is no attribute"):
        mmpreproj.patch(model, PreProjConfig(blocks=[1]), family=ROW)
    before.check(model)


def test_lists_will_do_for_tuples(model):
    row = replace(ROW, sites=[AttentionSite("attn", [IMAGE, TEXT])], unread=["text"], settings=[])
    mmpreproj.patch(model, family=row)
    assert hash(row) == hash(replace(ROW, unread=("text",)))


def test_blocks_that_share_their_attention_are_refused(model, snapshot):
    model.blocks[1].attn = model.blocks[0].attn
    before = snapshot(model)
    with pytest.raises(ValueError, match=r"blocks.0.attn and blocks.1.attn are one and the same module"):
        mmpreproj.patch(model, family=ROW)
    before.check(model)


@pytest.mark.parametrize("own", [nn.Linear(2, 2), 3], ids=["child", "attribute"])
def test_an_attention_that_has_the_adapters_name_for_something_else_is_refused(model, snapshot, own):
    model.blocks[1].attn.preproj = own
    before = snapshot(model)
    with pytest.raises(
        ValueError, match=rf"blocks.1.attn has a 'preproj' of its own \({type(own).__name__}\).*Rename it in the model"
    ):
        mmpreproj.patch(model, family=ROW)
    before.check(model)
    assert model.blocks[1].attn.preproj is own and not mmpreproj.is_patched(model)


@pytest.mark.parametrize(
    ("row", "match"),
    [
        (
            with_streams(IMAGE, Stream("text", "scale", 2, 1, discarded_by="is_last")),
            r"Attention gives \[2, 7, 16\], \[2, 5, 16\], and the row has the text stream at output 1, but the call "
            r"brought it no tokens \('scale' or place 2\). Correct Stream.argument",
        ),
        (
            with_streams(replace(IMAGE, output=2), TEXT),
            r"Attention gives \[2, 7, 16\], \[2, 5, 16\], and the row has the image stream at output 2: there are 2. "
            "Correct Stream.output",
        ),
        (
            with_streams(replace(IMAGE, output=1), replace(TEXT, output=0)),
            r"image stream at output 1: it is not \[2, 7, 16\]. Correct Stream.output",
        ),
        (
            with_streams(IMAGE, replace(TEXT, discarded_by=None)),
            r"Attention gives \[2, 7, 16\], NoneType, .*text stream at output 1: it is not.*discarded_by or Family",
        ),
        (
            replace(ROW, width="num_heads"),
            r"image stream's tokens are \[2, 7, 16\], but .* tokens 2 wide, as the model's row says. Correct Family",
        ),
        (
            with_streams(Stream("image", "scale", 2, 0)),
            r"Attention was called with 2 positional arguments and the keywords none, so with no stream of its row "
            r"\('scale' or place 2\)",
        ),
    ],
    ids=["one never given", "no such output", "outputs exchanged", "nobody reads it", "width wrong", "never given"],
)
def test_what_only_a_call_shows_is_refused_by_the_first(model, row, match, snapshot):
    before, base = snapshot(model), predict(model)
    mmpreproj.patch(model, family=row)
    with pytest.raises(ValueError, match=match):
        predict(model)
    mmpreproj.unpatch(model)
    before.check(model)
    assert torch.equal(predict(model), base)


def test_an_argument_that_brings_no_tensor_is_refused(shake):
    class Listed(OneStream):
        def forward(self, streams: list[Tensor]) -> Tensor:
            return super().forward(torch.cat(streams, dim=1))

    attention = Listed()
    model = nn.Module()
    model.blocks = nn.ModuleList([nn.ModuleDict({"attn": attention})])
    mmpreproj.patch(model, family=with_streams(Stream("image", "streams", 0, 0), width="width"))
    with pytest.raises(
        TypeError, match=r"'streams', .* image stream, was given list, no tensor \[B, N, D\] of normed"
    ):
        attention([torch.randn(1, 3, D)])


def test_the_pages_table_quotes_what_is_said():
    """Each phrase in the first column of the table of errors is in the source of one."""
    table = PAGE.read_text(encoding="utf-8").split("## Errors")[1]
    quoted = [
        phrase for row in re.findall(r"^\| (`.*?) \|", table, flags=re.MULTILINE) for phrase in row.split(" or ")
    ]
    source = "".join(path.read_text(encoding="utf-8") for path in Path(mmpreproj.__file__).parent.rglob("*.py"))
    joined = re.sub(r'"\s*\n\s*f?"', "", source)
    assert len(quoted) > 15
    for phrase in quoted:
        assert phrase.strip("`") in joined, phrase


# Classes


def test_an_unknown_class_is_told_of_rows_and_of_the_classes_that_have_one(model, patched, tmp_path, snapshot):
    bare = make_model()
    before = snapshot(bare)
    with pytest.raises(TypeError) as raised:
        mmpreproj.patch(bare)
    said = str(raised.value)
    assert "PlainMMDiT has no attention blocks that mmpreproj knows" in said
    assert all(row.model_class in said for row in FAMILIES)
    assert re.search(
        r"Family\(…\) and pass that row as patch\(model, config, family=…\), and so to load.*docs/own_mod", said
    )
    mmpreproj.save(patched, tmp_path)
    with pytest.raises(TypeError, match=r"PlainMMDiT has no attention blocks .*family=….*to load"):
        mmpreproj.load(bare, tmp_path)
    before.check(bare)


def test_load_tells_rows_of_another_name_or_another_attention(patched, tmp_path, snapshot):
    mmpreproj.save(patched, tmp_path)
    bare = make_model()
    before = snapshot(bare)
    with pytest.raises(ValueError, match=r"made for PlainMMDiT of width 16, .* but this model is Other of width 16"):
        mmpreproj.load(bare, tmp_path, family=replace(ROW, model_class="Other"))
    with pytest.raises(TypeError, match=r"looked for: other\)"):
        mmpreproj.load(bare, tmp_path, family=replace(ROW, sites=(AttentionSite("other", (IMAGE,)),)))
    with pytest.raises(TypeError, match=r"family must be a .*Family"):
        mmpreproj.load(bare, tmp_path, family="PlainMMDiT")
    for block in bare.blocks:
        block.other = copy.deepcopy(block.attn)
    again = snapshot(bare)
    with pytest.raises(ValueError, match=r"0 of 9 keys match; missing \['blocks.0.other"):
        mmpreproj.load(bare, tmp_path, family=replace(ROW, sites=(AttentionSite("other", (IMAGE, TEXT)),)))
    again.check(bare)
    assert before.structure != again.structure


def test_a_second_adapter_takes_the_row_that_is_there(patched):
    with pytest.raises(
        ValueError, match=r"PlainMMDiT was patched by the row for PlainMMDiT; .*unpatch\(model\) first"
    ):
        mmpreproj.patch(patched, name="second", family=replace(ROW, norm="another"))
    with pytest.raises(TypeError, match=r"family must be"):
        mmpreproj.patch(patched, name="second", family=3)
    mmpreproj.patch(patched, name="second", family=ROW)
    mmpreproj.patch(patched, name="third")
    assert mmpreproj.adapters(patched) == ("default", "second", "third")


def test_a_class_of_another_package_with_a_name_of_the_table_is_told_of_rows(model, snapshot, tmp_path, shake):
    model.__class__ = type("SD3Transformer2DModel", (PlainMMDiT,), {"__module__": "another.package"})
    before = snapshot(model)
    with pytest.raises(
        TypeError, match=r"'transformer_blocks' should be .* row of your own as family=… if this is another SD3Trans"
    ):
        mmpreproj.patch(model)
    before.check(model)
    mmpreproj.patch(model, family=ROW)
    shake(model)
    mmpreproj.save(model, tmp_path)
    with pytest.raises(TypeError, match=r"if this is another SD3Transformer2DModel than the table's"):
        mmpreproj.unpatch(model)
        mmpreproj.load(model, tmp_path)
    mmpreproj.load(model, tmp_path, family=ROW)


def test_a_subclass_of_a_bound_class_needs_no_row_and_may_have_one_of_its_own(
    make_transformer, predict, shake, tmp_path
):
    class Derived(SD3Transformer2DModel):
        pass

    stock, derived = make_transformer("sd35"), make_transformer("sd35")
    derived.__class__ = Derived
    assert find_family(derived) is find_family(stock)
    for model in (stock, derived):
        mmpreproj.patch(model)
        shake(model)
    assert torch.equal(predict(derived), predict(stock))
    mmpreproj.unpatch(derived)
    image = Stream("image", argument="hidden_states", position=0, output=0)
    own = replace(find_family(stock), model_class="Derived", sites=(AttentionSite("attn2", (image,)),))
    report = mmpreproj.patch(derived, family=own)
    assert [site.path for site in report.sites] == ["transformer_blocks.0.attn2"]
    mmpreproj.save(derived, tmp_path)
    mmpreproj.unpatch(derived)
    mmpreproj.load(derived, tmp_path, family=own)
    mmpreproj.unpatch(derived)
    with pytest.raises(ValueError, match=r"made for Derived of .* but this model is SD3Transformer2DModel of"):
        mmpreproj.load(derived, tmp_path)


@pytest.mark.parametrize("row", FAMILIES, ids=lambda row: row.model_class)
def test_the_rows_of_the_table_can_be_made_anew(row):
    assert replace(row) == row
