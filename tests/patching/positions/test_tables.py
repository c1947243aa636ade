"""Settings of positions, and the rotary tables that are made from them."""

import dataclasses
import json
import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from mmpreproj import Positions, PreProjConfig
from mmpreproj.core.rotary import diagonal_angles, grid_angles, rotate, temperature, text_angles
from mmpreproj.core.rotary_gain import RotaryGain
from mmpreproj.patching.positions.tables import KEPT, Grid, RotaryTables, rotary_tables

CPU = torch.device("cpu")
WIDTH, BASE = 16, 6
SCALINGS = ("linear", "ntk", "yarn")

DEFAULTS = {
    "text": "1d",
    "image": "2d",
    "absolute": "keep",
    "theta": 10_000.0,
    "start": "identity",
    "scaling": "none",
    "base_size": None,
}
GOOD: list[dict[str, Any]] = [
    {},
    {"text": "diagonal", "theta": 100, "start": "full", "absolute": "remove"},
    {"text": "none", "scaling": "linear", "base_size": 64},
    {"image": "none"},
    {"text": "none", "image": "none", "absolute": "remove"},
    *({"scaling": scaling, "base_size": 2} for scaling in SCALINGS),
]
CHOICES = {
    "text": "'1d', 'none', 'diagonal'",
    "image": "'2d', 'none'",
    "absolute": "'keep', 'remove'",
    "start": "'identity', 'full'",
    "scaling": "'none', 'linear', 'ntk', 'yarn'",
}
BAD: list[tuple[str, Any, type[Exception], str]] = [
    *(
        (field, value, ValueError, f"one of {choices}")
        for field, choices in CHOICES.items()
        for value in ("zzz", "", "None", None, True, 0, ["none"])
    ),
    *(("theta", value, TypeError, "a number above 0") for value in ("10000", None, True, [1.0])),
    *(("theta", value, ValueError, "a finite number above 0") for value in (0, -1.0, float("nan"), float("inf"))),
    *(("base_size", value, TypeError, "a whole number of patches") for value in (64.0, "64", True, [64])),
    *(("base_size", value, ValueError, "at least 2 patches") for value in (1, 0, -64)),
]


def make(
    positions: Positions, rows: int = 4, columns: int = 5, length: int = 7, *, width: int = WIDTH, device: Any = CPU
) -> RotaryTables:
    return rotary_tables(positions, Grid(rows, columns, length), head_width=width, device=device)


def equal(left: RotaryTables, right: RotaryTables) -> bool:
    """Tell whether two sizes' tables are the same bit for bit, None where the other is None."""
    return all(
        a is b if a is None or b is None else torch.equal(a, b) and a.dtype == b.dtype
        for a, b in zip(left, right, strict=True)
    )


def present(tables: RotaryTables) -> list[Tensor]:
    return [table for table in tables if table is not None]


def test_defaults_are_the_documented_ones():
    assert Positions().to_dict() == DEFAULTS


@pytest.mark.parametrize("values", GOOD)
def test_dict_round_trip(values: dict[str, Any]):
    positions = Positions(**values)
    again = Positions.from_dict(json.loads(json.dumps(positions.to_dict())))
    assert again == positions
    assert hash(again) == hash(positions)
    assert positions.to_dict() == DEFAULTS | values


@pytest.mark.parametrize("values", GOOD)
def test_round_trip_within_a_config(values: dict[str, Any]):
    config = PreProjConfig(positions=Positions(**values))
    again = PreProjConfig.from_json(config.to_json())
    assert again == config
    assert again.positions == Positions(**values)
    assert hash(again) == hash(config)
    assert again.to_json() == config.to_json()
    assert PreProjConfig.from_dict({"positions": values}) == config
    assert PreProjConfig.from_dict({"positions": Positions(**values)}) == config


def test_positions_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Positions().theta = 2.0


def test_whole_numbers_of_theta_are_the_same_settings():
    assert Positions(theta=100) == Positions(theta=100.0)
    assert isinstance(Positions(theta=100).theta, float)


@pytest.mark.parametrize(
    ("values", "streams"),
    [
        ({}, ("image", "text")),
        ({"text": "diagonal"}, ("image", "text")),
        ({"text": "none"}, ("image",)),
        ({"image": "none"}, ("text",)),
        ({"text": "none", "image": "none", "absolute": "remove"}, ()),
    ],
)
def test_streams_that_are_turned_are_those_with_a_table(values: dict[str, Any], streams: tuple[str, ...]):
    positions = Positions(**values)
    tables = make(positions)
    assert positions.streams == streams
    assert tuple(name for name in ("image", "text") if getattr(tables, name) is not None) == streams
    assert tables.temperature is None


@pytest.mark.parametrize(("field", "value", "error", "takes"), BAD)
def test_bad_field_is_named_with_what_it_got_and_takes(field: str, value: Any, error: type[Exception], takes: str):
    with pytest.raises(error, match=rf"^positions\.{field} must be {takes}; got {re.escape(repr(value))}"):
        Positions(**{field: value})
    with pytest.raises(error, match=rf"^positions\.{field} must be {takes}"):
        PreProjConfig.from_dict({"positions": {field: value}})


@pytest.mark.parametrize("absolute", ["keep", "remove"])
def test_diagonal_text_without_an_image_to_continue_is_refused(absolute: Any):
    with pytest.raises(ValueError, match=r"^positions\.text 'diagonal' continues the image's, but .*image is 'none'"):
        Positions(text="diagonal", image="none", absolute=absolute)


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("absolute", ["keep", "remove"])
def test_scaling_without_an_image_is_refused(scaling: Any, absolute: Any):
    with pytest.raises(ValueError, match=rf"^positions\.scaling '{scaling}' is of image positions, but .* 'none'"):
        Positions(image="none", scaling=scaling, absolute=absolute)


def test_positions_that_change_nothing_are_refused():
    with pytest.raises(ValueError, match=r"^positions would change nothing: text and image are 'none' and absolute"):
        Positions(text="none", image="none")


def test_unknown_key_is_answered_with_the_nearest_field():
    with pytest.raises(ValueError, match=r"^positions has no field 'thetta'; did you mean 'theta'\?"):
        Positions.from_dict({"thetta": 100.0})
    with pytest.raises(ValueError, match=r"^positions has no field 'zzz'(?!.*did you mean).*Fields: text, .*_size"):
        PreProjConfig.from_dict({"positions": {"zzz": 1}})


@pytest.mark.parametrize("value", ["2d", 3, ["text"], True])
def test_positions_of_another_type_are_refused(value: Any):
    with pytest.raises(TypeError, match=rf"^positions must be a mapping of its fields; got {re.escape(repr(value))}"):
        Positions.from_dict(value)
    with pytest.raises(TypeError, match=r"^positions must be a mapping of its fields"):
        PreProjConfig.from_dict({"positions": value})
    with pytest.raises(TypeError, match=rf"^positions must be a Positions or None; got {re.escape(repr(value))}"):
        PreProjConfig(positions=value)


def test_plain_values_in_place_of_positions_are_refused():
    with pytest.raises(TypeError, match=r"^positions must be a Positions or None; got \{'text': '1d'\}"):
        PreProjConfig(positions={"text": "1d"})


def test_a_config_from_before_there_were_positions_has_none():
    old = {key: value for key, value in PreProjConfig().to_dict().items() if key not in ("positions", "mask_padding")}
    config = PreProjConfig.from_dict(old)
    assert config == PreProjConfig()
    assert config.positions is None
    assert config.mask_padding is False


@pytest.mark.parametrize("value", [1, 0, "yes", None])
def test_bad_mask_padding_is_refused(value: Any):
    with pytest.raises(TypeError, match=rf"^mask_padding must be True or False; got {re.escape(repr(value))}"):
        PreProjConfig(mask_padding=value)


@pytest.mark.parametrize("values", [{"mask_padding": True}, {"positions": Positions()}])
def test_positions_or_a_mask_are_enough_for_an_adapter_and_need_our_processor(values: dict[str, Any]):
    config = PreProjConfig(pre_projection=False, skip=False, **values)
    assert config.needs_processor
    assert PreProjConfig.from_json(config.to_json()) == config
    assert not PreProjConfig().needs_processor
    with pytest.raises(ValueError, match="there are no positions and no mask_padding"):
        PreProjConfig(pre_projection=False, skip=False)


@pytest.mark.parametrize("scaling", ["none", *SCALINGS])
def test_tables_follow_every_setting(scaling: Any):
    settings = {"width": WIDTH, "theta": 50.0}
    image = grid_angles(8, 9, scaling=scaling, base=BASE, **settings)
    plain = Positions(theta=50.0, scaling=scaling, base_size=BASE)
    tables = make(plain, 8, 9, 7)
    assert torch.equal(tables.image, image)
    assert torch.equal(tables.text, text_angles(7, **settings))
    tables = make(dataclasses.replace(plain, text="diagonal"), 8, 9, 7)
    assert torch.equal(tables.image, image)
    start = 4 if scaling == "none" else BASE // 2
    assert torch.equal(tables.text, diagonal_angles(7, start=start, **settings))
    assert {table.dtype for table in present(tables)} == {torch.float32}


def test_only_yarn_has_a_temperature():
    tables = {scaling: make(Positions(scaling=scaling, base_size=BASE), 8, 9) for scaling in ("none", *SCALINGS)}
    assert [scaling for scaling, table in tables.items() if table.temperature is not None] == ["yarn"]
    assert torch.equal(tables["yarn"].temperature, temperature(8, 9, base=BASE))


@pytest.mark.parametrize("text", ["1d", "diagonal"])
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize(("rows", "columns"), [(6, 6), (5, 6), (3, 2), (1, 1)])
def test_up_to_the_base_every_scaling_is_none_bit_for_bit(text: Any, scaling: Any, rows: int, columns: int):
    scaled = make(Positions(text=text, scaling=scaling, base_size=BASE), rows, columns)
    expected = make(Positions(text=text), rows, columns)
    assert equal(scaled._replace(temperature=None), expected)
    assert scaled.temperature is None or scaled.temperature.item() == 1


@pytest.mark.parametrize("text", ["1d", "diagonal"])
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize(("rows", "columns"), [(7, 6), (9, 14), (1, 30)])
def test_text_does_not_change_with_larger_pictures_when_they_are_scaled(
    text: Any, scaling: Any, rows: int, columns: int
):
    positions = Positions(text=text, scaling=scaling, base_size=BASE)
    assert torch.equal(make(positions, rows, columns).text, make(positions, BASE, BASE).text)


@pytest.mark.parametrize(("rows", "columns"), [(7, 6), (9, 14), (1, 30), (2, 3)])
def test_without_scaling_diagonal_text_starts_after_the_picture_whatever_its_size(rows: int, columns: int):
    """Its place is where the diagonal of a still larger picture goes on, whose centre is patch 20."""
    tables = make(Positions(text="diagonal", base_size=BASE), rows, columns)
    diagonal = grid_angles(40, 40, width=WIDTH, theta=10_000.0).unflatten(0, (40, 40)).diagonal().T
    start = 20 + max(rows, columns) // 2
    expected = diagonal[start : start + 7]
    torch.testing.assert_close(tables.text[: len(expected)], expected, rtol=1e-6, atol=0)


def test_tables_of_a_size_are_kept():
    assert same(make(Positions()), make(Positions()))
    assert same(make(Positions(theta=100)), make(Positions(theta=100.0))), "equal settings need not be the same object"


def test_a_picture_of_another_text_keeps_its_table():
    first, second = make(Positions(), length=3), make(Positions(), length=4)
    assert first.image is second.image
    assert first.text is not second.text


def same(one: RotaryTables, other: RotaryTables) -> bool:
    """Tell whether two sizes' tables are the very same tensors."""
    return all(a is b for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    "other",
    [
        {"positions": Positions(theta=100.0)},
        {"positions": Positions(text="diagonal")},
        {"positions": Positions(scaling="linear", base_size=3)},
        {"rows": 5},
        {"columns": 4},
        {"length": 8},
        {"width": 8},
        {"device": torch.device("meta")},
    ],
    ids=lambda other: next(iter(other)),
)
def test_tables_of_anything_else_are_others(other: dict[str, Any]):
    first = make(Positions())
    second = make(**{"positions": Positions(), **other})
    assert not same(first, second)
    assert {table.device for table in present(second)} == {other.get("device", CPU)}
    assert {table.device for table in present(make(Positions()))} == {CPU}
    assert second.image.is_meta or not equal(first, second)


def test_only_the_last_sizes_are_kept():
    first = make(Positions(), length=1).text
    for length in range(2, KEPT):  # with the picture's table, which every call asks for, they are KEPT
        make(Positions(), length=length)
    assert make(Positions(), length=1).text is first
    for length in range(2, KEPT + 1):
        make(Positions(), length=length)
    assert make(Positions(), length=1).text is not first


@pytest.mark.parametrize("scaling", ["none", "yarn"])
def test_tables_made_in_inference_mode_can_be_trained_through(scaling: Any):
    positions = Positions(scaling=scaling, base_size=3, theta=123.0)  # in no other test, so none is kept
    with torch.inference_mode():
        made = make(positions)
    assert same(make(positions), made), "these very tables are used again"
    assert not any(table.is_inference() or table.requires_grad for table in present(made))
    gain, tokens = RotaryGain(2), torch.randn(1, 20, 2, WIDTH, requires_grad=True)
    turned = gain(made.image)
    strength = 1 if made.temperature is None else made.temperature
    rotate(tokens, turned.cos() * strength, turned.sin() * strength).square().sum().backward()
    assert tokens.grad is not None
    assert gain.gain.grad is not None


def test_tables_are_not_kept_while_a_graph_is_made(monkeypatch: pytest.MonkeyPatch):
    kept = make(Positions())
    with monkeypatch.context() as patched:
        patched.setattr(torch.compiler, "is_compiling", lambda: True)
        first, second = make(Positions()), make(Positions())
    assert len({id(kept), id(first), id(second)}) == 3
    assert equal(first, kept)
    assert same(make(Positions()), kept), "nor do they take a kept one's place"


def test_fake_tables_are_not_kept_for_real_tokens():
    positions = Positions(theta=321.0)  # in no other test, so none is kept
    with FakeTensorMode():
        assert isinstance(make(positions).image, FakeTensor)
    assert not isinstance(make(positions).image, FakeTensor)


@pytest.mark.parametrize("text", ["1d", "diagonal"])
@pytest.mark.parametrize("scaling", ["none", *SCALINGS])
def test_a_graph_makes_the_tables_of_every_size(text: Any, scaling: Any):
    positions = Positions(text=text, scaling=scaling, base_size=BASE)
    graphs = []

    def backend(graph: torch.fx.GraphModule, example_inputs: list[Any]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    def from_shape(tokens: Tensor) -> RotaryTables:
        return make(positions, *tokens.shape)

    compiled = torch.compile(from_shape, backend=backend, fullgraph=True)
    for size in ((4, 5, 7), (9, 14, 8), (6, 30, 11), (5, 3, 20), (8, 7, 6)):
        assert equal(compiled(torch.zeros(size)), make(positions, *size)), size
    torch._dynamo.reset()
    assert len(graphs) <= 2, "one for the first size, one for all others"


@pytest.mark.parametrize("positions", [Positions(), Positions(text="none", scaling="yarn", base_size=3)])
def test_packed_tables_are_whole_numbers_of_the_same_bits(positions: Positions):
    tables = make(positions)
    packed = tables.packed()
    assert not any(table.is_floating_point() for table in present(packed))
    assert equal(packed.unpacked(), tables)


@pytest.mark.parametrize("theta", [1.0, 0.5])
def test_frequencies_that_do_not_fall_are_refused(theta: float):
    with pytest.raises(ValueError, match=r"^positions\.theta must be above 1, so that frequencies fall; got"):
        Positions(theta=theta)
