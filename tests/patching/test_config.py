import dataclasses
import json
import re
from typing import Any

import pytest

from mmpreproj import PreProjConfig

DEFAULTS = {
    "expansion": 1.25,
    "pre_projection": True,
    "skip": True,
    "share": "block",
    "blocks": "all",
    "dual_attention": True,
    "init": "paper",
    "init_std": 1e-4,
    "positions": None,
    "points": None,
    "mask_padding": False,
}

GOOD: list[dict[str, Any]] = [
    {},
    {"expansion": 2},
    {"expansion": 0.25, "init": "zero", "init_std": 1e-2},
    {"share": "stream", "blocks": [0, 3], "dual_attention": False},
    {"blocks": {"last": 2}, "skip": False},
    {"blocks": (5,), "pre_projection": False},
]

NUMBER = "a (finite )?number above 0"
BLOCKS = r'"all", a list of block indices such as \[0, 5\], or \{"last": n\}'
BAD: list[tuple[str, Any, type[Exception], str]] = [
    *(
        (field, value, error, NUMBER)
        for field in ("expansion", "init_std")
        for value, error in [
            ("1.25", TypeError),
            (None, TypeError),
            (True, TypeError),
            ([1.25], TypeError),
            (0, ValueError),
            (-1.0, ValueError),
            (float("nan"), ValueError),
            (float("inf"), ValueError),
        ]
    ),
    *(
        (field, value, TypeError, "True or False")
        for field in ("pre_projection", "skip", "dual_attention")
        for value in (1, 0, "yes", None)
    ),
    *(("share", value, ValueError, "'block', 'stream'") for value in ("blocks", "", None, True, ["block"])),
    *(("init", value, ValueError, "'paper', 'zero'") for value in ("random", "Zero", 0, None)),
    *(("blocks", value, TypeError, BLOCKS) for value in (3, 1.5, None, True, {0, 1})),
    *(
        ("blocks", value, ValueError, BLOCKS)
        for value in (
            "last",
            "",
            [],
            [-1],
            [True],
            [1.0],
            ["0"],
            {},
            {"first": 1},
            {"last": 0},
            {"last": -2},
            {"last": True},
            {"last": 1.0},
            {"last": 1, "first": 1},
        )
    ),
]


def test_defaults_are_the_documented_ones():
    assert PreProjConfig().to_dict() == DEFAULTS


@pytest.mark.parametrize("values", GOOD)
def test_json_round_trip(values: dict[str, Any]):
    config = PreProjConfig(**values)
    again = PreProjConfig.from_json(config.to_json())
    assert again == config
    assert hash(again) == hash(config)
    assert again.to_json() == config.to_json()
    assert PreProjConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_config_is_frozen():
    config = PreProjConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.expansion = 2.0


@pytest.mark.parametrize("blocks", [[0, 1], {"last": 1}])
def test_config_shares_nothing_that_can_change(blocks: Any):
    config = PreProjConfig(blocks=blocks)
    expected = config.to_json()
    given, returned = blocks, config.to_dict()["blocks"]
    for value in (given, returned):
        value.update(last=7) if isinstance(value, dict) else value.append(7)
    assert config.to_json() == expected


def test_order_of_blocks_does_not_matter():
    assert PreProjConfig(blocks=[2, 0]) == PreProjConfig(blocks=(0, 2))
    assert PreProjConfig(blocks=[2, 0]) != PreProjConfig(blocks=[0, 1])


@pytest.mark.parametrize(("field", "value", "error", "takes"), BAD)
def test_bad_field_is_named_with_what_it_got_and_takes(field: str, value: Any, error: type[Exception], takes: str):
    with pytest.raises(error, match=rf"^{field} must be .*{takes}") as caught:
        PreProjConfig(**{field: value})
    assert re.search(rf"got {re.escape(repr(value))}( \({type(value).__name__}\))?$", str(caught.value))


def test_a_block_named_twice_is_refused():
    with pytest.raises(ValueError, match=r"^blocks names a block twice: \[0, 0\]"):
        PreProjConfig(blocks=[0, 0])


def test_a_config_that_adds_nothing_is_refused():
    with pytest.raises(ValueError, match="pre_projection and skip are both False"):
        PreProjConfig(pre_projection=False, skip=False)


def test_unknown_key_is_answered_with_the_nearest_field():
    with pytest.raises(ValueError, match=r"no field 'expantion'; did you mean 'expansion'\?"):
        PreProjConfig.from_dict({"expantion": 1.25})
    with pytest.raises(ValueError, match=r"no field 'zzz'(?!.*did you mean).*Fields: expansion, .*, init_std"):
        PreProjConfig.from_dict({"zzz": 1})


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [("all", (0, 1, 2, 3)), ([3, 0], (0, 3)), ({"last": 1}, (3,)), ({"last": 4}, (0, 1, 2, 3))],
)
def test_block_indices(blocks: Any, expected: tuple[int, ...]):
    assert PreProjConfig(blocks=blocks).block_indices(4) == expected


def test_blocks_that_a_model_does_not_have_are_refused():
    with pytest.raises(ValueError, match=r"blocks: \[4, 9\] do not exist; the model has 4 blocks, 0 to 3"):
        PreProjConfig(blocks=[0, 9, 4]).block_indices(4)
    with pytest.raises(ValueError, match="blocks: the last 5 were asked for, but the model has 4 blocks"):
        PreProjConfig(blocks={"last": 5}).block_indices(4)


def test_zero_init_starts_at_zero_whatever_the_std():
    assert PreProjConfig(init="zero", init_std=0.5).start_std == 0
    assert PreProjConfig(init_std=0.5).start_std == 0.5
