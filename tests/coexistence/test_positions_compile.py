"""Rotary positions beside torch.compile and torch.export: as for an adapter without them, in every resolution.

Torch runs the hooks of a compiled model outside of its graph, so the tables, which a pre-hook of the model makes, get
a small graph of their own; with `torch._dynamo.config.wrap_top_frame` they are part of the one graph.
"""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

import mmpreproj
from mmpreproj import Positions, PreProjConfig

KINDS = {"identity": Positions(), "full": Positions(start="full", absolute="remove")}
SCALINGS = {
    **KINDS,
    "linear": Positions(scaling="linear"),
    "ntk": Positions(scaling="ntk"),
    "yarn": Positions(start="full", scaling="yarn"),
    "diagonal": Positions(text="diagonal", scaling="linear"),
}
WAYS = ("model", "blocks", "wrapped blocks")
SLOW = pytest.mark.slow
TWO_WAYS = ("model", "blocks", pytest.param("wrapped blocks", marks=SLOW))
MODEL_ALONE = ("model", *(pytest.param(way, marks=SLOW) for way in WAYS[1:]))
BRIEF_SCALINGS = [pytest.param(kind, marks=() if kind == "identity" else SLOW) for kind in SCALINGS]
BUILT = {"model": 2, "blocks": 2, "wrapped blocks": 2}  # tables and model; two blocks


def compiled_by(way: str, model: nn.Module, **options: Any) -> nn.Module:
    """Compile a whole model, or each of its blocks in place, or a wrapper around each."""
    if way == "model":
        return torch.compile(model, fullgraph=True, **options)
    for index, block in enumerate(model.transformer_blocks):
        if way == "blocks":
            block.compile(fullgraph=True, **options)
        else:
            model.transformer_blocks[index] = torch.compile(block, fullgraph=True, **options)
    return model


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def apart(one: Tensor, other: Tensor) -> None:
    assert float((one - other).norm() / other.norm()) > 1e-3


def pictures(*sizes: tuple[int, int, int]) -> list[dict[str, Any]]:
    """Build inputs of several latent heights and widths and text lengths."""
    generator = torch.Generator().manual_seed(1)
    return [
        {
            "hidden_states": torch.randn(2, 4, height, width, generator=generator),
            "encoder_hidden_states": torch.randn(2, tokens, 24, generator=generator),
            "pooled_projections": torch.randn(2, 20, generator=generator),
            "timestep": torch.tensor([100.0, 700.0]),
            "return_dict": False,
        }
        for height, width, tokens in sizes
    ]


# A square first picture specialises even stock; the other sizes of this one are numbers that the model has none of.
SIZES = ((10, 28, 9), (6, 20, 5), (16, 4, 7), (24, 26, 9), (6, 4, 3))


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    """Start from an empty cache, and leave none."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def graphs() -> CompileCounterWithBackend:
    """A backend that counts the graphs it is given, and runs them as they are."""
    return CompileCounterWithBackend("eager")


@pytest.fixture(params=["identity", pytest.param("full", marks=SLOW)])
def kind(request: pytest.FixtureRequest) -> str:
    """A pretrained base with learned gains, or a model from nothing with rotary positions alone."""
    return request.param


@pytest.fixture
def make(make_transformer, shake) -> Callable[..., nn.Module]:
    """Build a patched transformer with positions; the same for the same arguments."""

    def build(kind: str, style: str = "sd3", *, seed: int = 2, **overrides: Any) -> nn.Module:
        model = make_transformer(style, **({"pos_embed_max_size": 16} | overrides))
        torch.manual_seed(0)
        mmpreproj.patch(model, PreProjConfig(positions=SCALINGS[kind]))
        shake(model, seed=seed)
        return model

    return build


@pytest.fixture
def other_adapter(make, kind, tmp_path) -> Path:
    """A saved adapter of the same shape and other weights."""
    return mmpreproj.save(make(kind, seed=7), tmp_path / "other", card=False)


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=SLOW)])
@pytest.mark.parametrize("way", TWO_WAYS)
@torch.no_grad()
def test_compiled_in_full_graphs_equals_eager(make, make_transformer, kind, way, backend):
    (picture,) = pictures((8, 12, 5))
    eager, bare = make(kind, "sd35"), make_transformer("sd35", pos_embed_max_size=16)
    mmpreproj.patch(bare)
    bare.load_state_dict(eager.state_dict(), strict=False)  # all but the positions
    expected = eager(**picture)[0]
    apart(expected, bare(**picture)[0])
    close(compiled_by(way, make(kind, "sd35"), backend=backend)(**picture)[0], expected)
    assert not counters["graph_break"]


@SLOW
@torch.no_grad()
def test_compiled_by_inductor_equals_eager(make, kind):
    if not any(map(shutil.which, ("g++", "clang++", "c++"))):
        pytest.skip("inductor needs a C++ compiler")
    model = make(kind, num_layers=1)
    (picture,) = pictures((8, 12, 5))
    compiled = torch.compile(model, fullgraph=True)
    for scale in (1.0, 0.3):
        mmpreproj.set_scale(model, scale)
        close(compiled(**picture)[0], model(**picture)[0])


@pytest.mark.parametrize("way", MODEL_ALONE)
def test_scales_and_swaps_build_no_graph_anew(make, kind, predict, graphs, way, other_adapter):
    model, eager = make(kind), make(kind)
    compiled = compiled_by(way, model, backend=graphs)
    outputs = [predict(compiled)]
    built = graphs.frame_count
    assert built == BUILT[way]
    with torch._dynamo.config.patch(error_on_recompile=True):
        for scale in (0.0, 0.7, [0.2, 1.5], {1: 3.0}):
            for one in (compiled, eager):
                mmpreproj.set_scale(one, scale)
            outputs.append(predict(compiled))
            close(outputs[-1], predict(eager))
        for one in (compiled, eager):
            mmpreproj.load(one, other_adapter, replace=True)
        outputs.append(predict(compiled))
        close(outputs[-1], predict(eager))
    assert graphs.frame_count == built
    for i, one in enumerate(outputs):
        for other in outputs[i + 1 :]:
            apart(one, other)


@pytest.mark.parametrize("way", MODEL_ALONE)
@pytest.mark.parametrize("kind", BRIEF_SCALINGS)
@torch.no_grad()
def test_one_dynamic_graph_serves_every_resolution(make, graphs, way, kind):
    """Four patches a side are the base, so the scaled ones grow beyond it; the last picture is smaller again."""
    model, eager = make(kind), make(kind)
    compiled = compiled_by(way, model, backend=graphs, dynamic=True)
    first, *others = pictures(*SIZES)
    close(compiled(**first)[0], eager(**first)[0])
    with torch._dynamo.config.patch(error_on_recompile=True):
        for picture in others:
            close(compiled(**picture)[0], eager(**picture)[0])
    assert graphs.frame_count == BUILT[way]


@torch.no_grad()
def test_a_first_picture_as_high_as_half_a_head_is_wide_costs_one_more_graph(make, graphs):
    """Dynamo takes equal numbers for the same one: with 8 rows of latents and 8 pairs of channels, the rows are fixed.

    The tables' width is a number of its own in the model's graph, since they come from a hook that torch runs outside.
    In SD3.5 half a head is 32, the latents' side of pictures of 256 px.
    """
    compiled = torch.compile(make("identity", num_layers=1), fullgraph=True, backend=graphs, dynamic=True)
    for picture in pictures((8, 28, 9), *SIZES[:2]):
        compiled(**picture)
    assert graphs.frame_count == BUILT["model"] + 1


@torch.no_grad()
def test_with_its_frame_wrapped_a_whole_model_is_one_graph(make, kind, graphs):
    model, eager = make(kind, num_layers=1), make(kind, num_layers=1)
    with torch._dynamo.config.patch(wrap_top_frame=True):
        compiled = torch.compile(model, fullgraph=True, backend=graphs, dynamic=True)
        for picture in pictures(*SIZES[:3]):
            close(compiled(**picture)[0], eager(**picture)[0])
    assert graphs.frame_count == 1


@torch.no_grad()
def test_pictures_beyond_the_table_cost_one_more_graph(make, graphs):
    """Without the absolute positions there is no limit, and beyond it another way through the patch embedding."""
    model, eager = make("full", num_layers=1), make("full", num_layers=1)
    compiled = torch.compile(model, fullgraph=True, backend=graphs, dynamic=True)
    for picture in pictures(SIZES[0], (40, 36, 5), (6, 20, 5), (34, 50, 7)):
        close(compiled(**picture)[0], eager(**picture)[0])
    assert graphs.frame_count == BUILT["model"] + 1


@SLOW
@pytest.mark.parametrize("kind", SCALINGS)
@torch.no_grad()
def test_resolutions_cost_no_more_graphs_than_in_the_base(make, make_transformer, kind):
    """Counted with the tables in the model's graph; outside of it they take one more for each of these."""
    counts = []
    for model in (make_transformer(num_layers=1, pos_embed_max_size=16), make(kind, num_layers=1)):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("eager")
        with torch._dynamo.config.patch(wrap_top_frame=True):
            compiled = torch.compile(model, fullgraph=True, backend=counter)  # dynamic=None: found out by dynamo
            for picture in pictures((8, 8, 5), (16, 16, 5), (8, 12, 7)):
                compiled(**picture)
        counts.append(counter.frame_count)
    assert counts[0] == counts[1]


@pytest.mark.parametrize("way", MODEL_ALONE)
def test_positions_that_come_and_go_after_a_run_are_noticed(make_transformer, predict, shake, kind, way):
    model, eager = make_transformer(num_layers=1), make_transformer(num_layers=1)
    compiled = compiled_by(way, model, backend="eager")
    base = predict(compiled)
    steps = (
        lambda one: mmpreproj.patch(one, PreProjConfig(positions=KINDS[kind])),
        lambda one: mmpreproj.patch(one, PreProjConfig(skip=False, positions=Positions(text="none")), name="second"),
    )
    outputs = [base]
    for step in steps:
        for one in (compiled, eager):
            step(one)
            shake(one)
        outputs.append(predict(compiled))
        close(outputs[-1], predict(eager))
    for i, one in enumerate(outputs):
        for other in outputs[i + 1 :]:
            apart(one, other)
    for one in (compiled, eager):
        mmpreproj.unpatch(one, "default")
    close(predict(compiled), predict(eager))
    mmpreproj.unpatch(compiled)
    close(predict(compiled), base)
    assert not counters["graph_break"]


@pytest.mark.parametrize("way", MODEL_ALONE)
def test_disabled_is_the_base_and_costs_one_more_graph(make, make_transformer, predict, graphs, kind, way):
    model, eager = make(kind), make(kind)
    compiled = compiled_by(way, model, backend=graphs)
    base, patched = predict(make_transformer(pos_embed_max_size=16)), predict(eager)
    apart(base, patched)
    for _ in range(3):
        close(predict(compiled), patched)
        with mmpreproj.disabled(compiled):
            close(predict(compiled), base)
    assert graphs.frame_count == BUILT[way] + (1 if way == "model" else 2)


def test_training_compiled_gives_the_gradients_of_eager(make, make_inputs, kind):
    gradients = []
    for one, compile_it in ((make(kind), True), (make(kind), False)):
        run = torch.compile(one, fullgraph=True, backend="aot_eager") if compile_it else one
        run(**make_inputs(), return_dict=False)[0].square().mean().backward()
        gradients.append({name: parameter.grad for name, parameter in mmpreproj.named_parameters(one)})
    assert gradients[0].keys() == gradients[1].keys()
    assert any("rotary_gain" in name for name in gradients[0]) == (kind == "identity")
    for name, expected in gradients[1].items():
        assert expected.abs().max() > 0, name
        torch.testing.assert_close(gradients[0][name], expected, rtol=1e-4, atol=1e-7, msg=name)


@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=SLOW)])
def test_exported_equals_eager_and_follows_scale_and_swap(make, kind, other_adapter, strict):
    model = make(kind)
    (inputs,) = pictures((8, 12, 5))
    exported = torch.export.export(model, (), inputs, strict=strict).module()
    changes = (
        lambda: None,
        lambda: mmpreproj.set_scale(model, [0.3, 1.4]),
        lambda: mmpreproj.load(model, other_adapter, replace=True),
    )
    outputs = []
    with torch.no_grad():
        for change in changes:
            change()
            outputs.append(exported(**inputs)[0])
            close(outputs[-1], model(**inputs)[0])
    apart(outputs[0], outputs[1])
    apart(outputs[1], outputs[2])
