"""Every multimodal transformer of the table: the equation in its blocks, and an adapter's life on it."""

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any

import diffusers
import pytest
import torch
from diffusers import DiTTransformer2DModel, ModelMixin, SD3MultiControlNetModel
from diffusers.models import controlnets, transformers
from diffusers.models.transformers.transformer_flux import FluxIPAdapterAttnProcessor
from family_models import (
    APART,
    CALLS,
    CASES,
    CONFIGS,
    HEADS,
    ROWS,
    TEXT_WIDTH,
    WIDTH,
    family_of,
    gradients,
    make_call,
    make_config,
    make_model,
    make_patched,
    predict,
    row_of,
    shake,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mmpreproj
from mmpreproj import PointPathConfig, Positions, PreProjConfig
from mmpreproj.patching.families import REFUSED, joint_blocks
from mmpreproj.patching.lookup import attention_sites

FEED_FORWARD = ("ff", "txt_ff", "img_mlp", "txt_mlp")
BREAKING = {
    ("HiDreamImageTransformer2DModel", "block"),  # its experts take as many tokens as are routed to them
    ("HiDreamImageTransformer2DModel", "model"),
    ("HunyuanVideo15Transformer3DModel", "model"),  # it asks whether the picture's embeddings are zero
}
"""What dynamo cannot trace whole, patched or not, as it depends on the values of tokens or masks."""


STOCK_FAULTS = {"ChromaTransformer2DModel": {"attention_mask": None}}
"""What diffusers 0.42.1 gets wrong under checkpointing: it leaves the mask out of Chroma's single blocks."""
BRIEF = (
    "SD3Transformer2DModel",
    "AuraFlowTransformer2DModel",
    "FluxTransformer2DModel",
    "Flux2Transformer2DModel",
    "QwenImageTransformer2DModel",
    "HiDreamImageTransformer2DModel",
    "HunyuanVideoTransformer3DModel",
    "CogView4Transformer2DModel",
    "JoyImageEditTransformer3DModel",
)
"""One of each make of attention, for what takes seconds."""


@pytest.fixture(params=ROWS)
def row(request: pytest.FixtureRequest) -> str:
    """A row of the table, by its model class."""
    return request.param


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> str:
    """A row of the table, or one with other settings of its model."""
    return request.param


def attentions(model: nn.Module, case: str) -> list[tuple[str, nn.Module]]:
    """List a model's joint attentions and their paths."""
    return [(path, attention) for _, path, _, attention in attention_sites(model, family_of(case))]


def test_every_row_of_the_table_has_a_tiny_model():
    assert set(CONFIGS) == set(CALLS) == set(ROWS)
    for name in ROWS:
        assert type(make_model(name)).__name__ == name


# The equation


def streams_of(attention: nn.Module, args: tuple, kwargs: dict) -> tuple[inspect.BoundArguments, list[str]]:
    """Find what of a call are tokens `[B, N, D]`, by their shape alone."""
    call = inspect.signature(type(attention).forward).bind(attention, *args, **kwargs)
    names = [
        name
        for name, value in call.arguments.items()
        if isinstance(value, Tensor) and value.dim() == 3 and value.shape[-1] in (WIDTH, TEXT_WIDTH)
    ]
    return call, names


def by_hand(attention: nn.Module, weights: dict[int, dict[str, Tensor]]) -> None:
    """Have a bare attention give `attention(x_tilde) + W_skip x_tilde`, its outputs told apart by their length."""
    stock = attention.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        call, names = streams_of(attention, args, kwargs)
        skips = {}
        for name in names:
            x_hat = call.arguments[name]
            own = weights[x_hat.shape[-1]]
            hidden = x_hat @ own["up"].T
            x_tilde = x_hat + (hidden / (1 + torch.exp(-hidden))) @ own["down"].T
            call.arguments[name] = x_tilde
            skips[x_tilde.shape[1]] = x_tilde @ own["skip"].T if "skip" in own else 0
        assert len(skips) == len(names), "streams of one length"
        output = stock(*call.args[1:], **call.kwargs)
        if isinstance(output, Tensor):
            return output + skips[output.shape[1]]
        return tuple(part + skips[part.shape[1]] if part is not None else None for part in output)

    attention.forward = forward


def weights_of(attention: nn.Module) -> dict[int, dict[str, Tensor]]:
    """Read `W_up`, `W_down` and `W_skip` of an adapter by the width of the tokens that they are for."""
    state = attention.preproj.adapters["default"].state_dict()
    found: dict[int, dict[str, Tensor]] = {}
    for key, value in state.items():
        part = {"up.weight": "up", "down.weight": "down", "map.weight": "skip"}.get(key.split(".", 2)[-1])
        if part is not None:
            found.setdefault(value.shape[0 if part == "down" else 1], {})[part] = value
    return found


def test_the_model_computes_the_papers_equation_in_every_attention(case):
    patched, bare = make_patched(case), make_model(case)
    base = predict(bare, case)
    for (_, ours), (_, attention) in zip(attentions(patched, case), attentions(bare, case), strict=True):
        by_hand(attention, weights_of(ours))
    found, expected = predict(patched, case), predict(bare, case)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    assert (found - base).norm() > 0.02 * base.norm()


def test_a_stream_has_a_skip_exactly_where_its_output_is_read(case):
    """Noise on a bare attention's output tells whether anything reads it."""
    model = make_model(case)
    base = predict(model, case)
    report = mmpreproj.patch(make_model(case), PreProjConfig(share="stream"))
    for site, (_, _, place, attention) in zip(report.sites, attention_sites(model, family_of(case)), strict=True):
        assert site.projected == tuple(stream.name for stream in place.streams)
        for stream in place.streams:

            def disturb(module, args, output, index=stream.output):
                parts = list(output) if isinstance(output, tuple) else [output]
                if parts[index] is not None:
                    parts[index] = parts[index] + torch.linspace(-1, 1, parts[index].shape[-1])
                return tuple(parts) if isinstance(output, tuple) else parts[0]

            handle = attention.register_forward_hook(disturb)
            is_read = not torch.equal(predict(model, case), base)
            handle.remove()
            assert (stream.name in site.skipped) == is_read, (site.path, stream.name)


def test_each_streams_skip_reaches_the_output(row):
    model = make_patched(row, PreProjConfig(share="stream"))
    before = predict(model, row)
    for path, attention in attentions(model, row):
        for stream, skip in attention.preproj.adapters["default"].content_skip.items():
            with torch.no_grad():
                skip.map.weight.neg_()
            assert not torch.equal(predict(model, row), before), (path, stream)
            with torch.no_grad():
                skip.map.weight.neg_()
    assert torch.equal(predict(model, row), before)


def block_outputs(model: nn.Module, row: str) -> list[Tensor]:
    """Run a model and return what its first double block gives."""
    seen: list[Any] = []
    handle = joint_blocks(model, family_of(row))[0].register_forward_hook(
        lambda module, args, output: seen.append(output)
    )
    predict(model, row)
    handle.remove()
    return list(seen[0])


def test_the_gate_is_of_the_kind_that_the_row_says(row):
    """Without feed-forward, a block adds `gate ⊙ W_skip x_hat`: twice the scale, twice the change.

    AuraFlow's skip is read by the feed-forward alone, and so does nothing here. Mochi's is normed, and so stays of
    one size however large the scale.
    """
    model = make_model(row)
    block = joint_blocks(model, family_of(row))[0]
    for path, module in block.named_modules():
        if path.split(".")[-1].startswith(FEED_FORWARD):
            for parameter in module.parameters():
                nn.init.zeros_(parameter)
    before = block_outputs(model, row)
    mmpreproj.patch(model, make_config(row, pre_projection=False, blocks=[0], dual_attention=False))
    shake(model)
    changes = []
    gate = family_of(row).gate
    for scale in (1e4, 2e4) if "a norm of attention's output" in gate else (1, 2):
        mmpreproj.set_scale(model, scale)
        changes.append([now - base for now, base in zip(block_outputs(model, row), before, strict=True)])
    for once, twice in zip(*changes, strict=True):
        if "through the feed-forward" in gate:
            assert torch.equal(twice, torch.zeros_like(twice))
        elif "a norm of attention's output" in gate:
            assert once.abs().max() > 1e-2
            torch.testing.assert_close(twice, once, rtol=1e-3, atol=1e-3 * float(once.abs().max()))
        else:
            assert once.abs().max() > 1e-2
            torch.testing.assert_close(twice, 2 * once, rtol=1e-3, atol=1e-3 * float(once.abs().max()))


def test_an_ip_adapter_gives_a_third_output_that_is_left_alone():
    def make() -> nn.Module:
        model = make_model("FluxTransformer2DModel")
        for block in model.transformer_blocks:
            torch.manual_seed(0)
            block.attn.set_processor(FluxIPAdapterAttnProcessor(WIDTH, WIDTH, num_tokens=(2,), scale=[1.0]))
        return model

    def run(model: nn.Module) -> Tensor:
        call = make_call("FluxTransformer2DModel")
        generator = torch.Generator().manual_seed(4)
        tokens = [torch.randn(2, 2, WIDTH, generator=generator)]
        # what the model makes of image embeddings, given to the double blocks as it does
        with torch.no_grad():
            return model(**call, joint_attention_kwargs={"ip_hidden_states": tokens}, return_dict=False)[0]

    model, hand = make(), make()
    for one in (model, hand):
        one.single_transformer_blocks = nn.ModuleList()  # they take no such tokens
    base = run(model)
    mmpreproj.patch(model, PreProjConfig(init="zero"))
    assert torch.equal(run(model), base)
    shake(model)
    case = "FluxTransformer2DModel"
    for (_, ours), (_, attention) in zip(attentions(model, case), attentions(hand, case), strict=True):
        stock = attention.processor

        class ByHand(nn.Module):
            """The stock processor with the equation around it, the third output as it was."""

            def __init__(self, stock: nn.Module, weights: dict[int, dict[str, Tensor]]) -> None:
                super().__init__()
                self.stock, self.weights = stock, weights[WIDTH]

            def forward(self, attn, hidden_states, encoder_hidden_states=None, **further):
                tilde = []
                for x_hat in (hidden_states, encoder_hidden_states):
                    up = x_hat @ self.weights["up"].T
                    tilde.append(x_hat + up * up.sigmoid() @ self.weights["down"].T)
                image, text, extra = self.stock(attn, *tilde, **further)
                return image + tilde[0] @ self.weights["skip"].T, text + tilde[1] @ self.weights["skip"].T, extra

            def __call__(
                self,
                attn,
                hidden_states,
                encoder_hidden_states=None,
                attention_mask=None,
                image_rotary_emb=None,
                ip_hidden_states=None,
                ip_adapter_masks=None,
            ):
                return self.forward(
                    attn,
                    hidden_states,
                    encoder_hidden_states,
                    image_rotary_emb=image_rotary_emb,
                    ip_hidden_states=ip_hidden_states,
                )

        attention.set_processor(ByHand(stock, weights_of(ours)))
    torch.testing.assert_close(run(model), run(hand), rtol=1e-4, atol=1e-4)


# Start


def shares(case: str) -> tuple[str, ...]:
    """List the ways of sharing that a case's model takes."""
    return ("stream",) if row_of(case) in APART else ("block", "stream")


WAYS = [pytest.param(case, share, id=f"{case}-{share}") for case in CASES for share in shares(case)]


@pytest.mark.parametrize(("case", "share"), WAYS)
def test_zero_init_is_the_base_bit_for_bit(case: str, share: str):
    model = make_model(case)
    base = predict(model, case)
    mmpreproj.patch(model, PreProjConfig(init="zero", share=share))
    assert torch.equal(predict(model, case), base)


def test_paper_init_is_the_base_within_a_thousandth(case):
    """The change is relative to what the skip is added to: where a norm of attention's output takes both, to that."""
    model = make_model(case, std=0.3 if "a norm of attention's output" in family_of(case).gate else 0.1)
    base = predict(model, case)
    torch.manual_seed(0)
    mmpreproj.patch(model, make_config(case))
    assert 0 < (predict(model, case) - base).norm() <= 1e-3 * base.norm()


# Life


def test_patching_and_unpatching_leave_no_trace(case, snapshot):
    model = make_model(case)
    before, base = snapshot(model), predict(model, case)
    report = mmpreproj.patch(model, make_config(case))
    shake(model)
    assert not torch.equal(predict(model, case), base)
    added = set(model.state_dict()) - set(before.values)
    assert added and all(".preproj." in key for key in added)
    assert report.parameters == sum(parameter.numel() for parameter in mmpreproj.parameters(model))
    assert report.base_parameters == sum(value.numel() for key, value in model.named_parameters() if key not in added)
    mmpreproj.unpatch(model)
    before.check(model)
    assert torch.equal(predict(model, case), base)


def test_a_scale_of_zero_and_a_disabled_adapter_are_the_base(row):
    model = make_model(row)
    base = predict(model, row)
    mmpreproj.patch(model, make_config(row))
    shake(model)
    moved = predict(model, row)
    mmpreproj.set_scale(model, 0)
    assert torch.equal(predict(model, row), base)
    mmpreproj.set_scale(model, 1)
    with mmpreproj.disabled(model):
        assert torch.equal(predict(model, row), base)
    assert torch.equal(predict(model, row), moved)


@pytest.mark.parametrize(("case", "share"), WAYS)
def test_every_parameter_of_the_adapter_gets_a_gradient_and_no_other(case: str, share: str):
    model = make_patched(case, PreProjConfig(share=share)).train()
    model.requires_grad_(False)
    mmpreproj.thaw(model)
    for name, grad in gradients(model, case).items():
        assert grad is not None, f"{name} has no gradient: an error under DDP"
        assert grad.abs().max() > 0, name
    ours = dict(mmpreproj.named_parameters(model))
    assert {key for key, parameter in model.named_parameters() if parameter.grad is not None} == set(ours)


def test_checkpointing_keeps_the_gradients(row):
    model = make_patched(row).train()
    changes = STOCK_FAULTS.get(row, {})
    plain = {name: grad.clone() for name, grad in gradients(model, row, **changes).items()}
    checkpointed_blocks = []

    def checkpointed(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        checkpointed_blocks.append(block)
        return checkpoint(block.__call__, *args, use_reentrant=False, **kwargs)

    # diffusers' own function takes no keywords, with which HunyuanImage calls it
    model.enable_gradient_checkpointing(checkpointed)
    again = gradients(model, row, **changes)
    assert set(joint_blocks(model, family_of(row))) <= set(checkpointed_blocks)
    for name, grad in plain.items():
        torch.testing.assert_close(again[name], grad, rtol=1e-5, atol=1e-6 * float(grad.abs().max()), msg=name)


def test_save_and_load_into_a_fresh_base(case, tmp_path):
    model = make_patched(case, PreProjConfig(share="stream"))
    mmpreproj.save(model, tmp_path, card=False)
    fresh = make_model(case)
    mmpreproj.load(fresh, tmp_path)
    assert torch.equal(predict(fresh, case), predict(model, case))


def compiled(model: nn.Module, row: str, part: str, *, fullgraph: bool = True) -> nn.Module:
    """Compile a model, its double blocks or their attentions, each in one graph unless told otherwise."""
    torch._dynamo.reset()
    parts = {
        "model": [model],
        "block": list(joint_blocks(model, family_of(row))),
        "attention": [attention for _, attention in attentions(model, row)],
    }
    for module in parts[part]:
        module.compile(backend="eager", fullgraph=fullgraph)
    return model


@pytest.mark.parametrize(
    ("row", "part"),
    [
        pytest.param(row, part, marks=() if part == "attention" and row in BRIEF else pytest.mark.slow)
        for row in ROWS
        for part in ("attention", "block", "model")
    ],
)
def test_what_the_base_compiles_in_one_graph_still_does_and_stays_equal(row: str, part: str):
    whole = (row, part) not in BREAKING
    if not whole:
        with pytest.raises(torch._dynamo.exc.TorchDynamoException):
            predict(compiled(make_model(row), row, part), row)
    model = make_patched(row)
    base = predict(model, row)
    found = predict(compiled(model, row, part, fullgraph=whole), row)
    torch.testing.assert_close(found, base, rtol=1e-5, atol=1e-5 * float(base.abs().max()))


def test_the_profile_and_the_report_number_the_double_blocks(row):
    model = make_model(row)
    report = mmpreproj.patch(model, make_config(row))
    assert report.blocks == (0, 1)
    rows = list(mmpreproj.profile(model))
    paths = [f"{family_of(row).blocks}.{one.block}.{one.attention}" for one in rows]
    assert list(dict.fromkeys(paths)) == [site.path for site in report.sites]
    for one in rows:
        width = TEXT_WIDTH if one.weights == "text" else WIDTH
        assert one.down_initial == pytest.approx(1e-4 * width * 1.25**0.5, rel=0.2)
        assert one.skip_initial is None or one.skip_initial == pytest.approx(1e-4 * width, rel=0.2)
    assert row in str(report)
    for _, attention in attentions(model, row):
        assert family_of(row).width_of(attention) == WIDTH
        assert family_of(row).heads_of(attention) == HEADS


def test_only_the_last_block_is_patched(row):
    model = make_model(row)
    report = mmpreproj.patch(model, make_config(row, blocks={"last": 1}))
    assert report.blocks == (1,)
    assert {one.block for one in mmpreproj.profile(model)} == {1}
    assert not any(f"{family_of(row).blocks}.0." in key for key, _ in mmpreproj.named_parameters(model))


@pytest.mark.parametrize("row", BRIEF)
def test_the_card_names_the_base(row, tmp_path):
    mmpreproj.save(make_patched(row), tmp_path)
    assert row in (tmp_path / "README.md").read_text()


def test_another_base_is_refused(tmp_path, snapshot):
    mmpreproj.save(make_patched("FluxTransformer2DModel"), tmp_path, card=False)
    for name, overrides, found in (
        ("FluxControlNetModel", {}, "FluxControlNetModel of width 32"),
        ("FluxTransformer2DModel", {"num_single_layers": 0}, "num_single_layers 0"),
        ("FluxTransformer2DModel", {"num_layers": 3}, "depth 3"),
    ):
        model = make_model(name, **overrides)
        before = snapshot(model)
        with pytest.raises(
            ValueError, match=rf"made for FluxTransformer2DModel of width 32, .*this model is .*{found}"
        ):
            mmpreproj.load(model, tmp_path)
        before.check(model)


# Refusals


@pytest.mark.parametrize("row", APART)
def test_one_set_of_weights_for_streams_of_different_widths_is_refused(row, snapshot):
    model = make_model(row)
    before = snapshot(model)
    told = rf"share must be 'stream' for {row}: .*attn1 have different widths \(image 32 and text 24\).*'block'"
    with pytest.raises(ValueError, match=told):
        mmpreproj.patch(model)
    before.check(model)


SEAMLESS = [name for name in ROWS if family_of(name).seam is None]


@pytest.mark.parametrize("name", SEAMLESS)
def test_positions_mask_and_points_are_refused_with_the_reason(name, snapshot):
    model = make_model(name)
    before = snapshot(model)
    own = "absolute" if "absolute" in family_of(name).positions else "rotary at queries and keys"
    for config in (PreProjConfig(positions=Positions()), PreProjConfig(mask_padding=True)):
        with pytest.raises(ValueError, match=rf"cannot be set on {name}.*leave both out.* its own positions \({own}"):
            mmpreproj.patch(model, config)
    with pytest.raises(ValueError, match=rf"points cannot go through {name}.*SD3Transformer2DModel"):
        mmpreproj.patch(model, make_config(name, points=PointPathConfig()))
    before.check(model)


def model_classes() -> Iterator[str]:
    """Iterate over the names of the model classes of diffusers' transformers and ControlNets."""
    for package in (transformers, controlnets):
        for found in pkgutil.iter_modules(package.__path__):
            module = importlib.import_module(f"{package.__name__}.{found.name}")
            for name, value in vars(module).items():
                if inspect.isclass(value) and issubclass(value, ModelMixin) and value.__module__ == module.__name__:
                    yield name


def test_every_model_class_of_diffusers_is_bound_or_refused_with_a_reason():
    found, bound = set(model_classes()), set(ROWS)
    assert bound <= found
    assert found - bound - set(REFUSED) == set(), "bind these with a row, or say why not in families/refused.py"
    assert bound & set(REFUSED) == set()
    if diffusers.__version__ == "0.42.1":  # another version may have dropped a class
        assert set(REFUSED) <= found


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: SD3MultiControlNetModel([]), "SD3MultiControlNetModel .* knows: it only holds several ControlNets"),
        (
            lambda: DiTTransformer2DModel(
                num_attention_heads=1, attention_head_dim=8, num_layers=1, sample_size=4, norm_num_groups=1
            ),
            "DiTTransformer2DModel .* knows: its attention reads one stream alone",
        ),
    ],
    ids=["several", "one stream"],
)
def test_a_refused_class_is_told_its_reason(make: Callable[[], nn.Module], reason: str, snapshot):
    model = make()
    derived = type("Derived", (type(model),), {})
    before = snapshot(model)
    with pytest.raises(TypeError, match=rf"{reason}.*FluxTransformer2DModel.*Family\(…\).*family=…"):
        mmpreproj.patch(model)
    before.check(model)
    model.__class__ = derived
    with pytest.raises(TypeError, match=reason.replace(reason.split(" ")[0], "Derived")):
        mmpreproj.patch(model)


@pytest.mark.parametrize("row", BRIEF)
def test_subclasses_are_covered(row):
    model = make_model(row)
    model.__class__ = type("Derived", (type(model),), {})
    report = mmpreproj.patch(model)
    assert report.model_class == "Derived"
    assert report.blocks == (0, 1)
