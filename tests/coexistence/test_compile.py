"""torch.compile and torch.export: one graph, never built anew for a scale, a swap or a second resolution."""

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
from mmpreproj import PreProjConfig

WAYS = ("model", "blocks", "wrapped blocks")
BRIEF_WAYS = ("model", *(pytest.param(way, marks=pytest.mark.slow) for way in WAYS[1:]))


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


@pytest.fixture
def make_pair(make_transformer, shake) -> Callable[..., tuple[nn.Module, nn.Module]]:
    """Build two equal patched transformers, one to compile and one to compare with."""

    def make(style: str = "sd3") -> tuple[nn.Module, nn.Module]:
        pair = []
        for _ in range(2):
            model = make_transformer(style, pos_embed_max_size=16)
            torch.manual_seed(0)
            mmpreproj.patch(model)
            shake(model)
            pair.append(model)
        return pair[0], pair[1]

    return make


@pytest.fixture
def other_adapter(make_pair, shake, tmp_path) -> Path:
    """A saved adapter of the same shape and other weights."""
    model, _ = make_pair()
    shake(model, seed=7)
    return mmpreproj.save(model, tmp_path / "other", card=False)


@pytest.mark.parametrize(
    ("way", "backend"), [("model", "eager"), ("model", "aot_eager"), ("blocks", "eager"), ("wrapped blocks", "eager")]
)
def test_compiled_in_full_graphs_equals_eager(make_pair, style, predict, way, backend):
    model, eager = make_pair(style)
    close(predict(compiled_by(way, model, backend=backend)), predict(eager))
    assert not counters["graph_break"]


@pytest.mark.slow
def test_compiled_by_inductor_equals_eager(make_transformer, predict, shake):
    if not any(map(shutil.which, ("g++", "clang++", "c++"))):
        pytest.skip("inductor needs a C++ compiler")
    model = make_transformer(num_layers=1)
    mmpreproj.patch(model)
    shake(model)
    compiled = torch.compile(model, fullgraph=True)
    for scale in (1.0, 0.3):
        mmpreproj.set_scale(model, scale)
        close(predict(compiled), predict(model))


@pytest.mark.parametrize("way", WAYS)
def test_scales_and_swaps_build_no_graph_anew(make_pair, predict, graphs, way, other_adapter):
    model, eager = make_pair()
    compiled = compiled_by(way, model, backend=graphs)
    outputs = [predict(compiled)]
    built = graphs.frame_count
    assert built == (1 if way == "model" else len(model.transformer_blocks))
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


@pytest.mark.parametrize("way", BRIEF_WAYS)
@torch.no_grad()
def test_one_dynamic_graph_serves_every_resolution(make_pair, graphs, way):
    model, eager = make_pair()
    compiled = compiled_by(way, model, backend=graphs, dynamic=True)
    first, *others = pictures((8, 12, 5), (6, 20, 5), (16, 4, 7), (24, 26, 9))  # a square one specialises even stock
    close(compiled(**first)[0], eager(**first)[0])
    with torch._dynamo.config.patch(error_on_recompile=True):
        for picture in others:
            close(compiled(**picture)[0], eager(**picture)[0])
    assert graphs.frame_count == (1 if way == "model" else 2)


@pytest.mark.slow
@torch.no_grad()
def test_resolutions_cost_no_more_graphs_than_in_the_base(make_transformer):
    counts = []
    for patched in (False, True):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("eager")
        model = make_transformer(num_layers=1, pos_embed_max_size=16)
        if patched:
            mmpreproj.patch(model)
        compiled = torch.compile(model, fullgraph=True, backend=counter)  # dynamic=None: found out by dynamo
        for picture in pictures((8, 8, 5), (16, 16, 5), (8, 12, 7)):
            compiled(**picture)
        counts.append(counter.frame_count)
    assert counts[0] == counts[1]


# What comes and goes after a model has run compiled


@pytest.mark.parametrize(
    "way",
    ["model", pytest.param("blocks", marks=pytest.mark.slow), pytest.param("wrapped blocks", marks=pytest.mark.slow)],
)
def test_adapters_that_come_and_go_after_a_run_are_noticed(make_transformer, predict, shake, way):
    model, eager = make_transformer(), make_transformer()
    compiled = compiled_by(way, model, backend="eager")
    base = predict(compiled)
    steps = (
        lambda one: mmpreproj.patch(one),
        lambda one: mmpreproj.patch(one, PreProjConfig(share="stream", skip=False), name="second"),
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
    mmpreproj.unpatch(compiled, "default")
    mmpreproj.unpatch(eager, "default")
    close(predict(compiled), predict(eager))
    mmpreproj.unpatch(compiled)
    close(predict(compiled), base)
    assert not counters["graph_break"]


@pytest.mark.parametrize("way", BRIEF_WAYS)
def test_a_swap_of_another_shape_is_noticed(make_pair, make_transformer, predict, shake, way, tmp_path):
    narrow = make_transformer()
    mmpreproj.patch(narrow, PreProjConfig(expansion=0.5, share="stream"))
    shake(narrow, seed=8)
    mmpreproj.save(narrow, tmp_path, card=False)
    model, eager = make_pair()
    compiled = compiled_by(way, model, backend="eager")
    before = predict(compiled)
    for one in (compiled, eager):
        mmpreproj.load(one, tmp_path, replace=True)
    apart(predict(compiled), before)
    close(predict(compiled), predict(eager))


@pytest.mark.parametrize("way", BRIEF_WAYS)
def test_disabled_is_the_base_and_costs_one_more_graph(make_pair, make_transformer, predict, graphs, way):
    model, eager = make_pair()
    compiled = compiled_by(way, model, backend=graphs)
    base, patched = predict(make_transformer(pos_embed_max_size=16)), predict(eager)
    apart(base, patched)
    for _ in range(3):
        close(predict(compiled), patched)
        with mmpreproj.disabled(compiled):
            close(predict(compiled), base)
    assert graphs.frame_count == 2 * (1 if way == "model" else 2)


# Files and wrappers


@pytest.mark.parametrize("way", WAYS)
def test_files_of_a_compiled_model_are_those_of_a_plain_one(make_pair, way, tmp_path):
    model, eager = make_pair()
    compiled = compiled_by(way, model, backend="eager")
    for one, folder in ((compiled, "compiled"), (eager, "eager")):
        mmpreproj.save(one, tmp_path / folder)
    files = [sorted((tmp_path / folder).iterdir()) for folder in ("compiled", "eager")]
    assert [file.name for file in files[0]] == [file.name for file in files[1]]
    for one, other in zip(*files, strict=True):
        assert one.read_bytes() == other.read_bytes(), one.name


@pytest.mark.parametrize("patch_first", [True, False])
def test_wrapped_blocks_take_and_give_back_an_adapter(make_transformer, predict, shake, snapshot, patch_first):
    model = make_transformer()
    before, base = snapshot(model), predict(model)
    if patch_first:
        mmpreproj.patch(model)
    compiled_by("wrapped blocks", model, backend="eager")
    if not patch_first:
        mmpreproj.patch(model)
    shake(model)
    apart(predict(model), base)
    mmpreproj.check_intact(model)
    assert set(mmpreproj.scales(model)["default"]) == {0, 1}
    assert [row.block for row in mmpreproj.profile(model)] == [0, 1]
    mmpreproj.unpatch(model)
    close(predict(model), base)
    for index, block in enumerate(model.transformer_blocks):
        model.transformer_blocks[index] = block._orig_mod
    before.check(model)


def test_training_compiled_gives_the_gradients_of_eager(make_pair, make_inputs):
    gradients = []
    for one, compile_it in zip(make_pair(), (True, False), strict=True):
        run = torch.compile(one, fullgraph=True, backend="aot_eager") if compile_it else one
        run(**make_inputs(), return_dict=False)[0].square().mean().backward()
        gradients.append({name: parameter.grad for name, parameter in mmpreproj.named_parameters(one)})
    assert gradients[0].keys() == gradients[1].keys()
    for name, expected in gradients[1].items():
        torch.testing.assert_close(gradients[0][name], expected, rtol=1e-4, atol=1e-7, msg=name)


# torch.export


@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_exported_equals_eager_and_follows_scale_and_swap(make_pair, make_inputs, other_adapter, strict):
    model, _ = make_pair()
    inputs = make_inputs() | {"return_dict": False}
    program = torch.export.export(model, (), inputs, strict=strict)
    exported = program.module()
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


def test_an_exported_model_survives_its_file(make_pair, make_inputs, tmp_path):
    model, _ = make_pair()
    inputs = make_inputs() | {"return_dict": False}
    mmpreproj.set_scale(model, 0.7)
    torch.export.save(torch.export.export(model, (), inputs), tmp_path / "model.pt2")
    with torch.no_grad():
        close(torch.export.load(tmp_path / "model.pt2").module()(**inputs)[0], model(**inputs)[0])
