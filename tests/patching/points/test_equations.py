"""The way of points against a slow float64 reference that is written from the block's parts, in numpy.

Source: arXiv 2403.03206 (figure 2) for the block, arXiv 2604.10791 for pre-projection and skip. Nothing here calls the
package to compute; it only reads weights by their names in the state dict.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from points_kit import Clouds, clouds, drawn, dtype_of, moved, noisy, prompt, with_points
from positions_kit import attentions, picture, relative
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import mmpreproj
from mmpreproj import PreProjConfig
from mmpreproj.points import PointPathConfig, add_point_path, point_velocity

Weights = dict[str, np.ndarray]


@dataclass(frozen=True)
class Variant:
    """The way as it is, or with one deliberate mistake, to see that the comparison would notice it."""

    gate_skip: bool = True
    skip_reads_features: bool = True
    feed_forward: bool = True
    dual: bool = True
    dual_reads_its_own: bool = True
    normalise: bool = True
    spread_features: bool = False


@dataclass(frozen=True)
class Adapter:
    """What the reference must know of an adapter beside its weights."""

    name: str = "default"
    key: str = "shared"
    scale: float = 1.0


def linear(w: Weights, name: str, x: np.ndarray) -> np.ndarray:
    """`W x + b`; the bias where there is one."""
    return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def layer_norm(x: np.ndarray, eps: float = 1e-6) -> np.ndarray:
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps)


def modulate(x: np.ndarray, shift: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return layer_norm(x) * (1 + scale) + shift


def mlp(w: Weights, name: str, x: np.ndarray) -> np.ndarray:
    hidden = linear(w, f"{name}.net.0.proj", x)
    hidden = 0.5 * hidden * (1 + np.tanh(np.sqrt(2 / np.pi) * (hidden + 0.044715 * hidden**3)))
    return linear(w, f"{name}.net.2", hidden)


def embedding(w: Weights, point: np.ndarray, config: PointPathConfig, name: str) -> np.ndarray:
    """A point `[3 + F]`, as wide as the noise, to its token `[D]`."""
    inputs = [1.0, *point]
    for octave in range(config.frequencies):
        inputs += [math.sin(2**octave * math.pi * x / 4) for x in point[:3]]
        inputs += [math.cos(2**octave * math.pi * x / 4) for x in point[:3]]
    path = f"preproj_points.adapters.{name}.embedding"
    return linear(w, f"{path}.down", silu(linear(w, f"{path}.up", np.array(inputs))))


def skip(w: Weights, attention: str, x_hat: np.ndarray, adapters: Sequence[Adapter], variant: Variant) -> np.ndarray:
    """`Σ sᵢ Wᵢ (x_hat + Δᵢ(x_hat))` of one token `[D]`."""
    total = np.zeros_like(x_hat)
    for adapter in adapters:
        path = f"{attention}.preproj.adapters.{adapter.name}"
        if f"{path}.content_skip.{adapter.key}.map.weight" not in w:
            continue
        source, projection = x_hat, f"{path}.pre_projection.{adapter.key}"
        if f"{projection}.up.weight" in w and variant.skip_reads_features:
            source = x_hat + linear(w, f"{projection}.down", silu(linear(w, f"{projection}.up", x_hat)))
        total = total + adapter.scale * linear(w, f"{path}.content_skip.{adapter.key}.map", source)
    return total


def block(
    w: Weights, path: str, token: np.ndarray, temb: np.ndarray, adapters: Sequence[Adapter], variant: Variant
) -> np.ndarray:
    """One token `[D]` through one block without its attention."""
    parts = linear(w, f"{path}.norm1.linear", silu(temb))
    shift, scale, gate, mlp_shift, mlp_scale, mlp_gate, *second = np.split(parts, len(parts) // len(token))
    around = skip(w, f"{path}.attn", modulate(token, shift, scale), adapters, variant)
    out = token + (gate * around if variant.gate_skip else around)
    if second and variant.dual:
        shift2, scale2, gate2 = second if variant.dual_reads_its_own else (shift, scale, second[2])
        out = out + gate2 * skip(w, f"{path}.attn2", modulate(token, shift2, scale2), adapters, variant)
    if variant.feed_forward:
        out = out + mlp_gate * mlp(w, f"{path}.ff", modulate(out, mlp_shift, mlp_scale))
    return out


def walk(w: Weights, token: np.ndarray, temb: np.ndarray, adapters: Sequence[Adapter], variant: Variant) -> np.ndarray:
    """One token `[D]` through the blocks that have a way around an attention of theirs."""
    for index in range(2):
        path = f"transformer_blocks.{index}"
        if any(key.startswith(f"{path}.attn") and ".content_skip." in key for key in w):
            token = block(w, path, token, temb, adapters, variant)
    return token


def normalised(cloud: np.ndarray, config: PointPathConfig, variant: Variant) -> np.ndarray:
    """A cloud `[P, 3 + F]` in the unit ball, times the spread."""
    places = cloud[:, :3]
    if config.normalise == "unit_ball" and variant.normalise:
        places = places - (places.min(axis=0) + places.max(axis=0)) / 2
        places = places / max(math.hypot(*place) for place in places)
    others = cloud[:, 3:] * (config.spread if variant.spread_features else 1)
    return np.concatenate([places * config.spread, others], axis=1)


def reference_conditioning(
    w: Weights,
    cloud: np.ndarray,
    temb: np.ndarray,
    config: PointPathConfig,
    adapters: Sequence[Adapter],
    variant: Variant,
) -> np.ndarray:
    """What a cloud `[P, 3 + F]` of an adapter, the first, makes of `temb` `[D]`."""
    tokens = [
        walk(w, embedding(w, point, config, adapters[0].name), temb, adapters, variant)
        for point in normalised(cloud, config, variant)
    ]
    normed = np.stack([layer_norm(token, 1e-5) for token in tokens])
    pooled = np.concatenate([normed.mean(axis=0), normed.max(axis=0)])
    path = f"preproj_points.adapters.{adapters[0].name}.pooling.map"
    return temb + adapters[0].scale * linear(w, path, pooled)


def reference_velocity(
    w: Weights,
    point: np.ndarray,
    temb: np.ndarray,
    config: PointPathConfig,
    adapters: Sequence[Adapter],
    variant: Variant,
) -> np.ndarray:
    """The velocity of a noisy point `[3 + F]`."""
    name = f"preproj_points.adapters.{adapters[0].name}.head"
    token = walk(w, embedding(w, point, config, adapters[0].name), temb, adapters, variant)
    scale, shift = np.split(linear(w, f"{name}.modulation", silu(temb)), 2)
    return linear(w, f"{name}.out", layer_norm(token) * (1 + scale) + shift)


def weights_of(model: nn.Module) -> Weights:
    return {key: value.numpy() for key, value in model.state_dict().items()}


def temb_of(model: nn.Module) -> np.ndarray:
    """The base's conditioning for the fixed prompts `[2, D]`."""
    given = prompt(torch.float64)
    with torch.no_grad():
        return model.time_text_embed(given["timestep"], given["pooled_projections"]).numpy()


def differences(
    model: nn.Module,
    config: PointPathConfig,
    adapters: Sequence[Adapter] = (Adapter(),),
    variant: Variant | None = None,
) -> tuple[float, float]:
    """How far code and reference are apart: of the conditioning of clouds, and of the velocity of points."""
    w, temb, variant = weights_of(model), temb_of(model), variant or Variant()
    given, points = (
        clouds(features=config.features, dtype=torch.float64),
        noisy(features=config.features, dtype=torch.float64),
    )
    found: list[Tensor] = []
    handle = model.time_text_embed.register_forward_hook(lambda module, args, result: found.append(result))
    drawn(model, given)
    handle.remove()
    kept = [cloud[mask].numpy() for cloud, mask in zip(given["point_cloud"], given["point_mask"], strict=True)]
    expected = np.stack([reference_conditioning(w, kept[i], temb[i], config, adapters, variant) for i in range(2)])
    velocity = moved(model, points).numpy()
    rows = [
        [reference_velocity(w, point, temb[i], config, adapters, variant) for point in points[i].numpy()]
        for i in (0, 1)
    ]
    assert velocity.shape == np.shape(rows)
    return float(np.abs(found[0].numpy() - expected).max()), float(np.abs(velocity - np.array(rows)).max())


@pytest.fixture
def make_patched(make_transformer, shake) -> Callable[..., nn.Module]:
    """Build a float64 transformer with a point path at a size at which each term matters."""

    def make(style: str = "sd3", config: PreProjConfig | None = None, dtype: torch.dtype = torch.float64) -> nn.Module:
        model = make_transformer(style).to(dtype)
        mmpreproj.patch(model, config or with_points())
        shake(model)
        return model

    return make


# The reference


@pytest.mark.parametrize(
    ("adapter", "values"),
    [
        ({}, {}),
        ({"share": "stream"}, {"features": 2}),
        ({"pre_projection": False}, {"frequencies": 2}),
        ({"blocks": {"last": 1}}, {"normalise": "none", "spread": 0.5}),
        ({"blocks": [0], "dual_attention": False}, {"features": 1, "spread": 1.5}),
    ],
    ids=str,
)
def test_the_way_of_points_is_that_of_the_reference(make_patched, style, adapter: dict[str, Any], values: dict):
    model = make_patched(style, with_points(adapter=adapter, **values))
    key = "image" if adapter.get("share") == "stream" else "shared"
    assert max(differences(model, PointPathConfig(**values), (Adapter(key=key),))) < 1e-12


def test_several_adapters_sum_with_their_scales(make_patched, style, shake):
    model = make_patched(style)
    mmpreproj.patch(model, PreProjConfig(share="stream", expansion=0.5), name="second")
    shake(model, seed=6)
    mmpreproj.set_scale(model, {"default": 0.75, "second": -1.25})
    adapters = (Adapter(scale=0.75), Adapter("second", "image", -1.25))
    assert max(differences(model, PointPathConfig(), adapters)) < 1e-12
    assert max(differences(model, PointPathConfig(), adapters[:1])) > 1e-3


def test_points_go_where_another_adapter_has_a_way_too(make_patched, style, shake):
    """The path's adapter is on the last block alone, another on the first."""
    model = make_patched(style, with_points(adapter={"blocks": [1]}))
    alone = moved(model)
    mmpreproj.patch(model, PreProjConfig(blocks=[0]), name="second")
    shake(model)
    assert max(differences(model, PointPathConfig(), (Adapter(), Adapter("second")))) < 1e-12
    assert relative(moved(model), alone) > 1e-3


@pytest.mark.parametrize(
    ("mistake", "noticed"),
    [
        ({"gate_skip": False}, "both"),
        ({"skip_reads_features": False}, "both"),
        ({"feed_forward": False}, "both"),
        ({"dual": False}, "both"),
        ({"dual_reads_its_own": False}, "both"),
        ({"normalise": False}, "clouds"),
        ({"spread_features": True}, "clouds"),
    ],
    ids=str,
)
def test_the_comparison_notices_a_mistake(make_patched, mistake: dict[str, bool], noticed: str):
    model = make_patched("sd35", with_points(features=2))
    of_clouds, of_points = differences(model, PointPathConfig(features=2), variant=Variant(**mistake))
    assert of_clouds > 1e-5
    assert (of_points > 1e-5) == (noticed == "both")


def test_what_clouds_add_reaches_blocks_and_output_as_conditioning(make_patched, make_transformer, style):
    """A twin without a path draws the same once its conditioning is the reference's."""
    model, twin = make_patched(style), make_patched(style, PreProjConfig())
    twin.load_state_dict(model.state_dict(), strict=False)
    given = clouds(dtype=torch.float64)
    kept = [cloud[mask].numpy() for cloud, mask in zip(given["point_cloud"], given["point_mask"], strict=True)]
    w, temb = weights_of(model), temb_of(model)
    expected = np.stack(
        [reference_conditioning(w, kept[i], temb[i], PointPathConfig(), (Adapter(),), Variant()) for i in range(2)]
    )
    without = drawn(twin)
    twin.time_text_embed.register_forward_hook(lambda *_: torch.from_numpy(expected))
    torch.testing.assert_close(drawn(model, given), drawn(twin), rtol=0, atol=1e-11)
    assert relative(drawn(twin), without) > 1e-3


# Sets of points


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 0.0), (torch.float32, 1e-6)], ids=["fp64", "fp32"])
def test_points_have_no_order(make_patched, style, dtype: torch.dtype, bound: float):
    model = make_patched(style, dtype=dtype)
    order = torch.randperm(6)
    points = noisy(dtype=dtype)
    bound = max(bound, 1e-13)  # matrix products sum in an order of their own for each number of rows
    assert relative(moved(model, points[:, order]), moved(model, points)[:, order]) <= bound
    given = clouds(dtype=dtype)
    order = torch.randperm(7)
    shuffled = {key: value[:, order] for key, value in given.items()}
    assert relative(drawn(model, shuffled), drawn(model, given)) <= bound


def test_a_points_velocity_depends_on_itself_alone(make_patched, style):
    model = make_patched(style)
    points = noisy(dtype=torch.float64)
    velocity = moved(model, points)
    changed = points.clone()
    changed[:, 2] += 1
    difference = (moved(model, changed) - velocity).abs().amax(dim=(0, 2))
    assert difference[2] > 1e-3 and difference[torch.arange(6) != 2].max() == 0
    torch.testing.assert_close(moved(model, points[:, 4:5]), velocity[:, 4:5], rtol=0, atol=1e-13)
    twice = moved(model, torch.cat([points, points], dim=1))
    torch.testing.assert_close(twice, torch.cat([velocity, velocity], dim=1), rtol=0, atol=1e-13)


def test_large_clouds_go_through_a_block_in_parts_unless_all_is_kept_for_a_gradient(make_patched, style, monkeypatch):
    model = make_patched(style)
    points, seen = noisy(23, dtype=dtype_of(model)), []
    whole = moved(model, points)
    for block in model.transformer_blocks:
        block.ff.register_forward_hook(lambda module, args, result: seen.append(result.shape[1]))
    monkeypatch.setattr("mmpreproj.patching.points.path.POINTS_AT_ONCE_ON_CPU", 10)  # of two clouds
    torch.testing.assert_close(moved(model, points), whole, rtol=1e-5, atol=1e-6)
    assert seen == [5, 5, 5, 5, 3] * 2
    seen.clear()
    point_velocity(model, points, **prompt(dtype_of(model)))
    assert seen == [23, 23]


@pytest.mark.parametrize("padding", [0.0, 1e30, torch.inf, torch.nan])
def test_neither_values_nor_number_of_padding_points_matter(make_patched, style, padding: float):
    model = make_patched(style)
    given = clouds(dtype=torch.float64)
    expected = drawn(model, given)
    points = given["point_cloud"].masked_fill(~given["point_mask"][..., None], padding)
    more = torch.full((2, 5, 3), padding, dtype=torch.float64)
    padded = {
        "point_cloud": torch.cat([more, points, more], dim=1),
        "point_mask": torch.cat([torch.zeros(2, 5).bool(), given["point_mask"], torch.zeros(2, 5).bool()], dim=1),
    }
    torch.testing.assert_close(drawn(model, padded), expected, rtol=0, atol=1e-12)
    gradients = [gradients_of(model, kwargs) for kwargs in (given, padded)]
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=0, atol=1e-12, msg=name)


def gradients_of(model: nn.Module, given: Clouds) -> dict[str, Tensor]:
    model.zero_grad()
    output = model(**picture(8, 8, 5, torch.float64), joint_attention_kwargs=given, return_dict=False)[0]
    output.square().mean().backward()
    return {name: p.grad for name, p in mmpreproj.named_parameters(model) if p.grad is not None}


def test_a_cloud_acts_on_its_own_picture_alone(make_patched, style):
    model, given = make_patched(style), clouds(dtype=torch.float64)
    plain, both = drawn(model), drawn(model, given)
    assert relative(both[0], plain[0]) > 1e-3 and relative(both[1], plain[1]) > 1e-3
    mask = given["point_mask"].clone()
    mask[0] = False
    second = drawn(model, given | {"point_mask": mask})
    assert torch.equal(second[0], plain[0]), "no points is no cloud"
    torch.testing.assert_close(second[1], both[1], rtol=0, atol=1e-13)


def test_a_cloud_can_be_anywhere_and_of_any_size_in_the_unit_ball_and_not_as_it_is(make_patched):
    given = clouds(dtype=torch.float64)
    other = given | {"point_cloud": given["point_cloud"] * 37 - 5}
    model = make_patched(config=with_points())
    torch.testing.assert_close(drawn(model, other), drawn(model, given), rtol=0, atol=1e-12)
    model = make_patched(config=with_points(normalise="none"))
    assert relative(drawn(model, other), drawn(model, given)) > 1e-3


def test_masks_may_be_left_out_or_whole_numbers(make_patched):
    model, given = make_patched(), clouds(dtype=torch.float64)
    numbers = given | {"point_mask": given["point_mask"].long()}
    assert torch.equal(drawn(model, numbers), drawn(model, given))
    alone = {"point_cloud": given["point_cloud"]}
    ones = alone | {"point_mask": torch.ones(2, 7, dtype=torch.bool)}
    assert torch.equal(drawn(model, alone), drawn(model, ones))
    assert torch.equal(drawn(model, {"point_cloud": None, "point_mask": None}), drawn(model))


def test_half_precision_clouds_are_the_numbers_they_are(make_patched):
    """A cloud of bfloat16 numbers is worked on in fp32 until it is a token."""
    model, given = make_patched(dtype=torch.float32), clouds(dtype=torch.bfloat16)
    wide = given | {"point_cloud": given["point_cloud"].float()}
    assert torch.equal(drawn(model, given), drawn(model, wide))


def test_the_callers_own_arguments_are_left_as_they_are(make_patched):
    model, given = make_patched(), clouds(dtype=torch.float64)
    before = {key: value.clone() for key, value in given.items()}
    first = drawn(model, given)
    assert given.keys() == before.keys() and all(torch.equal(given[key], before[key]) for key in given)
    inputs = picture(8, 8, 5, torch.float64)
    keys = ("hidden_states", "encoder_hidden_states", "pooled_projections", "timestep")
    with torch.no_grad():
        positional = model(*(inputs[key] for key in keys), None, given, False)[0]
    assert torch.equal(positional, first)


# No attention


class CountAttention(TorchFunctionMode):
    """Count calls of PyTorch's attention, and of softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += getattr(func, "__name__", "") in ("scaled_dot_product_attention", "softmax")
        return func(*args, **(kwargs or {}))


def test_no_attention_is_called_for_points(make_patched, style):
    model = make_patched(style)
    calls: list[str] = []
    for path, attention in attentions(model).items():
        attention.register_forward_pre_hook(lambda module, args, path=path: calls.append(path))
        original = attention.processor

        class Counting(type(original)):
            def __call__(self, *args: Any, **kwargs: Any) -> Any:
                calls.append("processor")
                return super().__call__(*args, **kwargs)

        attention.processor = Counting()
    with CountAttention() as counter:
        moved(model)
        assert not calls and not counter.calls
        drawn(model)
        plain, plain_calls = len(calls), counter.calls
        drawn(model, clouds(dtype=torch.float64))
    assert plain == 2 * len(attentions(model)) and len(calls) == 2 * plain
    assert counter.calls == 2 * plain_calls > 0


# What learns


def both_losses(model: nn.Module, given: Clouds | None, points: Tensor | None, dtype: torch.dtype) -> Tensor:
    loss = model(**picture(8, 8, 5, dtype), joint_attention_kwargs=given, return_dict=False)[0].square().mean()
    if points is not None:
        loss = loss + (point_velocity(model, points, **prompt(dtype)) - 1).square().mean()
    return loss


@pytest.mark.parametrize("share", ["block", "stream"])
def test_every_weight_learns_from_a_picture_with_a_cloud_and_points(make_patched, style, share: str):
    model = make_patched(style, with_points(adapter={"share": share}))
    both_losses(model, clouds(dtype=torch.float64), noisy(dtype=torch.float64), torch.float64).backward()
    for name, parameter in mmpreproj.named_parameters(model):
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name


def test_no_weight_is_without_a_gradient_at_the_start(make_transformer, style):
    """Nor at the zero start, where a gradient may be zero; DDP waits for every one."""
    model = make_transformer(style)
    mmpreproj.patch(model, with_points())
    both_losses(model, clouds(), noisy(), torch.float32).backward()
    for name, parameter in mmpreproj.named_parameters(model):
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name


def test_shared_weights_learn_from_text_image_and_points_in_one_backward(make_patched):
    """The gradient of the sum is the sum of the gradients of its parts, and no part's is zero."""
    model = make_patched("sd3")
    inputs = picture(8, 8, 5, torch.float64)
    name = "transformer_blocks.0.attn.preproj.adapters.default.pre_projection.shared.up.weight"
    weight = model.get_parameter(name)
    taken: dict[str, Tensor] = {}
    layer = model.transformer_blocks[0].attn.preproj
    mapped = layer.adapters["default"].pre_projection["shared"].up

    def keep(module: nn.Module, args: tuple[Tensor], result: Tensor) -> None:
        kind = {16: "image", 5: "text", 6: "points"}[result.shape[1]]
        result.register_hook(lambda gradient: taken.update({kind: torch.einsum("bni,bnj->ij", gradient, args[0])}))

    mapped.register_forward_hook(keep)
    loss = model(**inputs, return_dict=False)[0].square().mean()
    (loss + point_velocity(model, noisy(dtype=torch.float64), **prompt(torch.float64)).square().mean()).backward()
    assert set(taken) == {"image", "text", "points"}
    assert all(part.abs().max() > 1e-8 for part in taken.values())
    torch.testing.assert_close(weight.grad, sum(taken.values()), rtol=0, atol=1e-12)


# The start


@pytest.mark.parametrize("init", ["zero", "paper"])
def test_a_new_path_changes_nothing_bit_for_bit(make_transformer, style, init: str):
    outputs = []
    for points in (None, PointPathConfig()):
        model = make_transformer(style)
        torch.manual_seed(3)
        mmpreproj.patch(model, PreProjConfig(init=init, points=points))
        outputs.append(drawn(model))
    added = make_transformer(style)
    torch.manual_seed(3)
    mmpreproj.patch(added, PreProjConfig(init=init))
    add_point_path(added)
    outputs += [drawn(added), drawn(added, clouds()), drawn(model, clouds())]
    assert all(torch.equal(one, outputs[0]) for one in outputs)
    if init == "zero":
        assert torch.equal(outputs[0], drawn(make_transformer(style)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_velocity_starts_at_zero(make_transformer, style, dtype: torch.dtype):
    model = make_transformer(style).to(dtype)
    mmpreproj.patch(model, with_points(features=2))
    points = noisy(features=2)
    velocity = moved(model, points)
    assert velocity.dtype == points.dtype and torch.equal(velocity, torch.zeros_like(points))
