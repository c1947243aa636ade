"""Rotary maths against a slow float64 reference, timm and diffusers, and what is said of each scaling."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from diffusers.models.embeddings import apply_rotary_emb, get_1d_rotary_pos_embed
from diffusers.models.transformers.transformer_flux import FluxPosEmbed
from diffusers.models.transformers.transformer_qwenimage import QwenEmbedRope, apply_rotary_emb_qwen
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.layers import apply_rot_embed, build_rotary_pos_embed
from torch import Tensor

from mmpreproj.core.rotary import (
    axis_angles,
    diagonal_angles,
    diagonal_start,
    frequencies,
    grid_angles,
    rotate,
    temperature,
    text_angles,
)

WIDTH, THETA = 32, 10_000.0
SCALINGS = ("linear", "ntk", "yarn")
SIZES = [(4, 4), (5, 3), (1, 7), (6, 9), (16, 5)]  # rows and columns, even and odd

# A base, and a size at most as large, or larger.
WITHIN_BASE = st.integers(2, 96).flatmap(lambda base: st.tuples(st.just(base), st.integers(1, base)))
BEYOND_BASE = st.integers(2, 96).flatmap(lambda base: st.tuples(st.just(base), st.integers(base + 1, 8 * base)))
PROPERTY = settings(deadline=None, derandomize=True, database=None)

Rotate = Callable[[Tensor, Tensor, Tensor], Tensor]


def slow_frequencies(width: int, theta: float) -> list[float]:
    return [theta ** (-2 * pair / width) for pair in range(width // 2)]


def slow_axis(
    count: int, width: int, theta: float, scaling: str = "none", base: int | None = None
) -> list[list[float]]:
    """Angles of each patch along an axis; with a scaling written as in the papers, for a size beyond the base."""
    speeds = slow_frequencies(width, theta)
    stretch, middle = 1.0, math.ceil(count / 2)
    if base is not None and count > base and scaling != "none":
        stretch, middle = (count - 1) / (base - 1), math.ceil(base / 2)
    if scaling == "linear":
        return [[(patch / stretch - middle) * speed for speed in speeds] for patch in range(count)]
    if scaling == "ntk":
        speeds = slow_frequencies(width, theta * stretch ** (width / (width - 2)))
    if scaling == "yarn":
        speeds = [slow_yarn(speed, stretch, base) for speed in speeds]
    return [[(patch - stretch * middle) * speed for speed in speeds] for patch in range(count)]


def slow_yarn(speed: float, stretch: float, base: int) -> float:
    """`h(f) = (1 - γ) f/s + γ f`, the ramp γ from wavelengths of one base to those of a 32nd; arXiv 2309.00071."""
    turns = base / (2 * math.pi / speed)
    ramp = min(max((turns - 1) / (32 - 1), 0.0), 1.0)
    return (1 - ramp) * speed / stretch + ramp * speed


def slow_grid(rows: int, columns: int, width: int, theta: float, **scaling: Any) -> list[list[float]]:
    by_row, by_column = (slow_axis(count, width // 2, theta, **scaling) for count in (rows, columns))
    return [by_row[row] + by_column[column] for row in range(rows) for column in range(columns)]


def slow_rotate(tokens: Tensor, angles: Tensor) -> Tensor:
    """Turn tokens `[B, N, H, D]` pair by pair by angles `[N, H, D/2]`."""
    turned = torch.zeros(tokens.shape, dtype=torch.float64)
    for batch, place, head in torch.cartesian_prod(*(torch.arange(size) for size in tokens.shape[:3])).tolist():
        for pair in range(tokens.shape[3] // 2):
            angle = angles[place, head, pair].item()
            x, y = tokens[batch, place, head, 2 * pair : 2 * pair + 2].tolist()
            turned[batch, place, head, 2 * pair] = x * math.cos(angle) - y * math.sin(angle)
            turned[batch, place, head, 2 * pair + 1] = x * math.sin(angle) + y * math.cos(angle)
    return turned


def check_angles(angles: Tensor, expected: Sequence[Sequence[float]]) -> None:
    torch.testing.assert_close(angles.double(), torch.tensor(expected).double(), rtol=2e-6, atol=1e-6)


def turn(tokens: Tensor, angles: Tensor) -> Tensor:
    """Turn tokens by a table `[N, D/2]` that all heads share."""
    return rotate(tokens, angles.cos()[:, None], angles.sin()[:, None])


def logits(query: Tensor, key: Tensor) -> Tensor:
    return torch.einsum("bqhd,bkhd->bhqk", query, key) / query.shape[-1] ** 0.5


def make_queries_and_keys(count: int) -> tuple[Tensor, Tensor]:
    return torch.randn(2, count, 3, WIDTH), torch.randn(2, count, 3, WIDTH)


def speeds(angles: Tensor) -> Tensor:
    """Radians per patch of each pair, from the angles `[count, P]` of an axis."""
    return (angles[-1].double() - angles[0].double()) / (len(angles) - 1)


@pytest.fixture(params=["eager", "compiled"])
def rotation(request: pytest.FixtureRequest) -> Iterator[Rotate]:
    """`rotate` on complex numbers, and on real ones as a graph has it."""
    yield rotate if request.param == "eager" else torch.compile(rotate, backend="eager", fullgraph=True)
    torch._dynamo.reset()


@pytest.mark.parametrize(("length", "width", "theta"), [(1, 2, 100.0), (5, 16, 10_000.0), (77, 64, 500.0)])
def test_text_angles_are_those_of_the_slow_reference(length: int, width: int, theta: float):
    speeds = slow_frequencies(width, theta)
    expected = [[place * speed for speed in speeds] for place in range(length)]
    check_angles(text_angles(length, width=width, theta=theta), expected)


@pytest.mark.parametrize(("length", "start", "width"), [(1, 0, 4), (5, 3, 16), (77, 32, 64)])
def test_diagonal_angles_are_those_of_the_slow_reference(length: int, start: int, width: int):
    speeds = slow_frequencies(width // 2, THETA)
    expected = [2 * [(start + place) * speed for speed in speeds] for place in range(length)]
    check_angles(diagonal_angles(length, start=start, width=width, theta=THETA), expected)


@pytest.mark.parametrize("width", [4, 12, 64])
@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_grid_angles_are_those_of_the_slow_reference(rows: int, columns: int, width: int):
    check_angles(grid_angles(rows, columns, width=width, theta=500.0), slow_grid(rows, columns, width, 500.0))


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("base", [2, 5, 8])
@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_scaled_angles_are_those_of_the_slow_reference(rows: int, columns: int, base: int, scaling: Any):
    found = grid_angles(rows, columns, width=WIDTH, theta=THETA, scaling=scaling, base=base)
    check_angles(found, slow_grid(rows, columns, WIDTH, THETA, scaling=scaling, base=base))


@pytest.mark.parametrize("count", [2, 3, 8, 9, 64, 65])
def test_position_zero_is_the_patch_at_half_the_count_rounded_up(count: int):
    angles = axis_angles(count, width=WIDTH, theta=THETA)
    assert (angles == 0).all(dim=-1).nonzero().flatten().tolist() == [math.ceil(count / 2)]


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("scaling", ["none", *SCALINGS])
def test_default_dtype_does_not_matter(default: torch.dtype, scaling: Any):
    def make() -> list[Tensor]:
        return [
            grid_angles(9, 601, width=16, theta=THETA, scaling=scaling, base=6),
            text_angles(600, width=16, theta=THETA),
            diagonal_angles(600, start=3, width=16, theta=THETA),
            temperature(9, 601, base=6),
        ]

    expected = make()
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        found = make()
    finally:
        torch.set_default_dtype(before)
    assert {table.dtype for table in found} == {torch.float32}
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.parametrize("scaling", ["none", *SCALINGS])
def test_tables_are_made_on_the_device_that_is_asked_for(scaling: Any):
    device = torch.device("meta")
    tables = [
        frequencies(16, theta=THETA, device=device),
        grid_angles(9, 12, width=16, theta=THETA, scaling=scaling, base=6, device=device),
        text_angles(5, width=16, theta=THETA, device=device),
        diagonal_angles(5, start=3, width=16, theta=THETA, device=device),
        temperature(9, 12, base=6, device=device),
    ]
    assert {table.device for table in tables} == {device}


@pytest.mark.parametrize("heads", [1, 3], ids=["shared", "per head"])
def test_rotation_is_that_of_the_slow_reference(rotation: Rotate, heads: int):
    tokens, angles = torch.randn(2, 5, 3, 8), torch.randn(5, heads, 4) * 4
    expected = slow_rotate(tokens, angles.expand(5, 3, 4))
    torch.testing.assert_close(rotation(tokens, angles.cos(), angles.sin()).double(), expected, rtol=0, atol=2e-6)


def test_rotation_takes_tokens_in_any_order_of_memory(rotation: Rotate):
    tokens, angles = torch.randn(2, 3, 5, 8), torch.randn(5, 3, 4)
    heads_first, copied = tokens.transpose(1, 2), tokens.transpose(1, 2).contiguous()
    cos, sin = angles.cos(), angles.sin()
    torch.testing.assert_close(rotation(heads_first, cos, sin), rotation(copied, cos, sin), rtol=0, atol=1e-6)


def test_rotation_preserves_norms(rotation: Rotate):
    tokens, angles = torch.randn(2, 5, 3, WIDTH), torch.randn(5, 3, WIDTH // 2) * 10
    turned = rotation(tokens, angles.cos(), angles.sin())
    assert (turned - tokens).norm() > tokens.norm() / 2, "they were turned at all"
    torch.testing.assert_close(turned.norm(dim=-1), tokens.norm(dim=-1), rtol=1e-6, atol=0)
    pairs = [x.unflatten(-1, (-1, 2)).norm(dim=-1) for x in (turned, tokens)]
    torch.testing.assert_close(*pairs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_angle_zero_gives_the_tokens_bit_for_bit(rotation: Rotate, dtype: torch.dtype):
    tokens, angles = torch.randn(2, 50, 3, WIDTH).to(dtype), torch.zeros(50, 1, WIDTH // 2)
    turned = rotation(tokens, angles.cos(), angles.sin())
    assert turned.dtype == dtype
    assert torch.equal(turned, tokens)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_tokens_are_turned_in_float32(rotation: Rotate, dtype: torch.dtype):
    tokens, angles = torch.randn(2, 50, 3, WIDTH).to(dtype), torch.randn(50, 3, WIDTH // 2)
    turned = rotation(tokens, angles.cos(), angles.sin())
    assert turned.dtype == dtype
    assert torch.equal(turned, rotation(tokens.float(), angles.cos(), angles.sin()).to(dtype))


def test_float64_tokens_are_turned_in_float64(rotation: Rotate):
    tokens, angles = torch.randn(2, 5, 3, 8, dtype=torch.float64), torch.randn(5, 3, 4, dtype=torch.float64)
    turned = rotation(tokens, angles.cos(), angles.sin())
    assert turned.dtype == torch.float64
    torch.testing.assert_close(turned, slow_rotate(tokens, angles), rtol=0, atol=1e-14)


def test_gradients_are_those_of_float64_rotation_matrices(rotation: Rotate):
    inputs = [torch.randn(2, 5, 3, 8), torch.randn(5, 3, 4), torch.randn(5, 3, 4)]  # tokens, cosine, sine
    weights = torch.randn(2, 5, 3, 8)
    ours = [value.clone().requires_grad_() for value in inputs]
    (rotation(*ours) * weights).sum().backward()

    tokens, cos, sin = reference = [value.double().requires_grad_() for value in inputs]
    matrices = torch.stack([cos, -sin, sin, cos], dim=-1).unflatten(-1, (2, 2))  # [N, H, D/2, 2, 2]
    turned = torch.einsum("nhpij,bnhpj->bnhpi", matrices, tokens.unflatten(-1, (-1, 2))).flatten(-2)
    (turned * weights).sum().backward()
    for found, expected in zip(ours, reference, strict=True):
        torch.testing.assert_close(found.grad.double(), expected.grad, rtol=1e-6, atol=2e-6)


def test_compiled_rotation_has_no_complex_numbers_and_agrees_with_the_eager_one():
    dtypes: set[torch.dtype] = set()

    def backend(graph: torch.fx.GraphModule, example_inputs: list[Tensor]) -> Callable[..., Any]:
        nodes = (node.meta.get("example_value") for node in graph.graph.nodes)
        dtypes.update(value.dtype for value in nodes if isinstance(value, Tensor))
        return graph

    tokens, angles = torch.randn(2, 50, 3, WIDTH), torch.randn(50, 3, WIDTH // 2)
    compiled = torch.compile(rotate, backend=backend, fullgraph=True)(tokens, angles.cos(), angles.sin())
    torch._dynamo.reset()
    assert dtypes == {torch.float32}
    torch.testing.assert_close(compiled, rotate(tokens, angles.cos(), angles.sin()), rtol=0, atol=1e-6)


@pytest.mark.parametrize("scaling", ["none", *SCALINGS])
@pytest.mark.parametrize(("down", "right"), [(1, 0), (0, 3), (8, 6)])
def test_products_in_a_grid_depend_only_on_relative_position(scaling: Any, down: int, right: int):
    """A window of 4 × 4 patches has the same products wherever it lies in a picture of 12 × 10."""
    query, key = make_queries_and_keys(16)
    angles = grid_angles(12, 10, width=WIDTH, theta=THETA, scaling=scaling, base=6).unflatten(0, (12, 10))
    here, there = (angles[y : y + 4, x : x + 4].flatten(0, 1) for y, x in ((0, 0), (down, right)))
    products = logits(turn(query, here), turn(key, here))
    assert (products - logits(query, key)).abs().max() > 0.1, "positions matter"
    torch.testing.assert_close(logits(turn(query, there), turn(key, there)), products, rtol=0, atol=1e-5)
    assert (logits(turn(query, there), turn(key, here)) - products).abs().max() > 0.1, "so does the difference"


def test_products_in_a_text_depend_only_on_relative_position():
    query, key = make_queries_and_keys(20)
    angles = text_angles(60, width=WIDTH, theta=THETA)
    here, there = angles[:20], angles[40:]
    products = logits(turn(query, here), turn(key, here))
    assert (products - logits(query, key)).abs().max() > 0.1, "positions matter"
    torch.testing.assert_close(logits(turn(query, there), turn(key, there)), products, rtol=0, atol=1e-5)


@pytest.mark.parametrize("side", [6, 7])
def test_products_along_the_diagonal_and_on_into_the_text_depend_only_on_relative_position(side: int):
    query, key = make_queries_and_keys(5)
    diagonal = grid_angles(side, side, width=WIDTH, theta=THETA)[:: side + 1]
    text = diagonal_angles(5, start=diagonal_start(side, side), width=WIDTH, theta=THETA)
    places = torch.cat([diagonal, text])
    products = logits(turn(query, places[:5]), turn(key, places[:5]))
    for first in range(1, side + 1):
        there = places[first : first + 5]
        torch.testing.assert_close(logits(turn(query, there), turn(key, there)), products, rtol=0, atol=1e-5)


@pytest.mark.parametrize("theta", [100.0, THETA])
@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_products_are_timms_which_counts_from_the_corner(rows: int, columns: int, theta: float):
    query, key = make_queries_and_keys(rows * columns)
    sin, cos = build_rotary_pos_embed([rows, columns], dim=WIDTH, in_pixels=False, temperature=theta)
    theirs = (apply_rot_embed(x, sin[:, None], cos[:, None]) for x in (query, key))
    angles = grid_angles(rows, columns, width=WIDTH, theta=theta)
    torch.testing.assert_close(logits(turn(query, angles), turn(key, angles)), logits(*theirs), rtol=0, atol=1e-5)


def test_text_is_turned_as_diffusers_does():
    tokens = torch.randn(2, 77, 3, WIDTH)
    table = get_1d_rotary_pos_embed(WIDTH, torch.arange(77), theta=THETA, use_real=True, freqs_dtype=torch.float64)
    ours = turn(tokens, text_angles(77, width=WIDTH, theta=THETA))
    torch.testing.assert_close(ours, apply_rotary_emb(tokens, table, sequence_dim=1), rtol=0, atol=2e-5)


@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_image_is_turned_as_by_two_axes_of_flux(rows: int, columns: int):
    tokens = torch.randn(2, rows * columns, 3, WIDTH)
    axes = (torch.arange(rows) - math.ceil(rows / 2), torch.arange(columns) - math.ceil(columns / 2))
    table = FluxPosEmbed(theta=10_000, axes_dim=[WIDTH // 2, WIDTH // 2])(torch.cartesian_prod(*axes))
    ours = turn(tokens, grid_angles(rows, columns, width=WIDTH, theta=THETA))
    torch.testing.assert_close(ours, apply_rotary_emb(tokens, table, sequence_dim=1), rtol=0, atol=5e-6)


@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_image_and_text_on_its_diagonal_are_turned_as_by_qwen_image(rows: int, columns: int):
    """But for Qwen-Image's axis of frames, here 8 channels: an image's is 0, and ours has none."""
    embed = QwenEmbedRope(theta=10_000, axes_dim=[8, WIDTH // 2, WIDTH // 2], scale_rope=True)
    image, text = (table[:, 4:] for table in embed((1, rows, columns), max_txt_seq_len=5))
    start = diagonal_start(rows, columns)
    ours = (
        grid_angles(rows, columns, width=WIDTH, theta=THETA),
        diagonal_angles(5, start=start, width=WIDTH, theta=THETA),
    )
    for angles, table in zip(ours, (image, text), strict=True):
        tokens = torch.randn(2, len(angles), 3, WIDTH)
        expected = apply_rotary_emb_qwen(tokens, table, use_real=False)
        torch.testing.assert_close(turn(tokens, angles), expected, rtol=0, atol=5e-6)


@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_diagonal_text_starts_one_after_the_last_position_of_the_larger_side(rows: int, columns: int):
    last = max(axis_angles(count, width=4, theta=THETA)[-1, 0].item() for count in (rows, columns))
    assert diagonal_start(rows, columns) == last + 1


@pytest.mark.parametrize(("rows", "columns"), [(8, 8), (9, 8), (4, 30), (40, 40)])
def test_diagonal_text_starts_after_the_base_on_larger_pictures(rows: int, columns: int):
    assert diagonal_start(rows, columns, base=8) == diagonal_start(8, 8)
    assert diagonal_start(6, 3, base=8) == diagonal_start(6, 3), "smaller pictures have their own diagonal"


@pytest.mark.parametrize("scaling", SCALINGS)
@PROPERTY
@given(sizes=WITHIN_BASE, width=st.sampled_from([4, 6, 16, 32]), theta=st.floats(2.0, 1e6))
def test_up_to_the_base_every_scaling_is_none_bit_for_bit(
    scaling: Any, sizes: tuple[int, int], width: int, theta: float
):
    base, count = sizes
    plain = axis_angles(count, width=width, theta=theta)
    assert torch.equal(axis_angles(count, width=width, theta=theta, scaling=scaling, base=base), plain)


@pytest.mark.parametrize("base", [None, 1])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_scaling_without_a_base_is_refused(scaling: Any, base: int | None):
    with pytest.raises(ValueError, match=f"a scaling needs a base of at least 2 patches along an axis; got {base}"):
        grid_angles(9, 12, width=WIDTH, theta=THETA, scaling=scaling, base=base)


def test_ntk_needs_two_frequencies():
    with pytest.raises(ValueError, match="'ntk' needs a width of at least 4 channels along an axis; got 2"):
        axis_angles(9, width=2, theta=THETA, scaling="ntk", base=4)


@PROPERTY
@given(sizes=BEYOND_BASE)
def test_linear_puts_every_patch_between_the_first_and_last_of_the_base(sizes: tuple[int, int]):
    base, count = sizes
    stock = axis_angles(base, width=WIDTH, theta=THETA)
    scaled = axis_angles(count, width=WIDTH, theta=THETA, scaling="linear", base=base)
    torch.testing.assert_close(scaled[[0, -1]], stock[[0, -1]], rtol=1e-6, atol=1e-6)
    slack = 1e-6 * stock.abs().amax(dim=0)
    assert (scaled >= stock.amin(dim=0) - slack).all()
    assert (scaled <= stock.amax(dim=0) + slack).all()


@PROPERTY
@given(sizes=BEYOND_BASE, width=st.sampled_from([4, 6, 16, 32]))
def test_ntk_keeps_the_fastest_frequency_and_divides_the_slowest(sizes: tuple[int, int], width: int):
    base, count = sizes
    stretch = (count - 1) / (base - 1)
    stock = axis_angles(base, width=width, theta=THETA)
    scaled = axis_angles(count, width=width, theta=THETA, scaling="ntk", base=base)
    found, plain = speeds(scaled).tolist(), slow_frequencies(width, THETA)
    assert found[0] == pytest.approx(plain[0], rel=1e-6)
    assert found[-1] == pytest.approx(plain[-1] / stretch, rel=2e-6)
    assert found == pytest.approx(slow_frequencies(width, THETA * stretch ** (width / (width - 2))), rel=2e-6)
    torch.testing.assert_close(scaled[[0, -1], -1], stock[[0, -1], -1], rtol=2e-6, atol=1e-6)
    assert scaled[:, -1].abs().max() <= stock[:, -1].abs().max() * (1 + 2e-6)


@pytest.mark.parametrize("count", [513, 700, 2048])
def test_yarn_keeps_fast_frequencies_and_divides_slow_ones(count: int):
    base, stretch, plain = 512, (count - 1) / 511, slow_frequencies(64, THETA)
    found = speeds(axis_angles(count, width=64, theta=THETA, scaling="yarn", base=base)).tolist()
    shares = [after / before for after, before in zip(found, plain, strict=True)]
    turns = [base * speed / (2 * math.pi) for speed in plain]
    fast, slow = sum(each > 32 for each in turns), sum(each < 1 for each in turns)
    between = shares[fast:-slow]
    assert min(fast, slow, len(between)) > 2, "there are some of every kind"
    assert shares[:fast] == pytest.approx([1.0] * fast, rel=2e-6)
    assert shares[-slow:] == pytest.approx([1 / stretch] * slow, rel=2e-6)
    assert all(1 / stretch < share < 1 for share in between)
    assert between == sorted(between, reverse=True), "frequencies fall, and so do their shares"


@PROPERTY
@given(sizes=WITHIN_BASE)
def test_temperature_is_one_up_to_the_base(sizes: tuple[int, int]):
    base, count = sizes
    for rows, columns in ((count, count), (count, base), (1, count)):
        assert temperature(rows, columns, base=base).item() == 1


@PROPERTY
@given(sizes=BEYOND_BASE)
def test_temperature_of_a_square_is_yarns(sizes: tuple[int, int]):
    base, count = sizes
    expected = 0.1 * math.log((count - 1) / (base - 1)) + 1
    assert temperature(count, count, base=base).item() == pytest.approx(expected, rel=1e-6)


def test_temperature_goes_by_the_geometric_mean_of_both_axes():
    """Base 5: 9 patches span twice as much, 33 eight times, and 17 four times, which is their mean."""
    assert temperature(9, 33, base=5).item() == pytest.approx(temperature(17, 17, base=5).item(), rel=1e-6)
    assert temperature(3, 65, base=5).item() == pytest.approx(temperature(17, 17, base=5).item(), rel=1e-6)
