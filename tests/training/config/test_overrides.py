"""Changes from the command line: what they reach, and how they are refused."""

from pathlib import Path

import pytest

from mmpreproj.training.config import EmaConfig, LoraSettings

MINIMAL = {"model": "some/base", "output": "runs/x", "data": {"folder": "pics"}}


def test_overrides_reach_into_sections_and_leave_their_other_values(read):
    values = {**MINIMAL, "optimizer": {"learning_rate": 1.0, "warmup_steps": 7}}
    config = read(values, "optimizer.learning_rate=2e-3", "steps=5", "mode=full", "data.folder=other/pics")
    assert (config.optimizer.learning_rate, config.optimizer.warmup_steps) == (2e-3, 7)
    assert (config.steps, config.mode, config.data.folder) == (5, "full", Path("other/pics"))


def test_overrides_take_lists_mappings_and_null(read):
    config = read(MINIMAL, "optimizer.betas=[0.8, 0.9]", "adapter.blocks={last: 2}", "flow.shift=null")
    assert (config.optimizer.betas, config.adapter.blocks, config.flow.shift) == ((0.8, 0.9), {"last": 2}, None)


def test_overrides_make_sections_that_the_file_does_not_have(read):
    config = read({"model": "m", "output": "o"}, "data.folder=p", "adapter.expansion=2")
    assert (config.data.folder, config.adapter.expansion) == (Path("p"), 2.0)


def test_the_last_of_two_overrides_counts(read):
    assert read(MINIMAL, "steps=5", "steps=6").steps == 6


def test_the_value_of_an_override_may_hold_equals_signs(read):
    assert read(MINIMAL, "data.folder=a=b").data.folder == Path("a=b")


@pytest.mark.parametrize("override", ["steps", "=3", ""])
def test_an_override_without_key_and_value_is_refused(refusal, override):
    message = refusal(MINIMAL, override)
    assert repr(override) in message
    assert "key=value" in message


def test_an_override_that_is_no_yaml_is_refused(refusal):
    assert "'steps=[1' is not valid YAML" in refusal(MINIMAL, "steps=[1")


def test_overrides_reach_into_lists_and_leave_their_other_entries(read):
    values = {**MINIMAL, "data": {"mix": [{"folder": "a", "repeats": 2}, {"folder": "b"}]}}
    mix = read(values, "data.mix.0.folder=x", "data.mix.1.repeats=3").data.mix
    assert [(str(part.folder), part.repeats) for part in mix] == [("x", 2), ("b", 3)]
    assert read(MINIMAL, "optimizer.betas=[0.8, 0.9]", "optimizer.betas.1=0.5").optimizer.betas == (0.8, 0.5)


@pytest.mark.parametrize("part", ["2", "-1", "first", "²", ""])
def test_an_override_of_an_entry_that_a_list_does_not_have_is_refused(refusal, part):
    values = {**MINIMAL, "data": {"mix": [{"folder": "a"}, {"folder": "b"}]}}
    for override in (f"data.mix.{part}.folder=x", f"data.mix.{part}=x"):
        message = refusal(values, override)
        assert f"the override {override!r} asks for entry {part!r} of a list of 2, counted from 0" in message
        assert "give the whole list in brackets" in message


def test_an_override_changes_one_place_of_a_value_that_an_alias_puts_in_two(read):
    text = "model: m\noutput: o\ndata: {mix: [&a {folder: p}, *a]}"
    assert [str(part.folder) for part in read(text, "data.mix.0.folder=x").data.mix] == ["x", "p"]


def test_overrides_switch_sections_on_and_off(read):
    on = read(MINIMAL, "lora={}", "ema={}", 'validation.prompts=["a","b"]', "optimizer.settings={eps: 1e-6}")
    assert (on.lora, on.ema, on.validation.prompts) == (LoraSettings(), EmaConfig(), ("a", "b"))
    assert on.optimizer.settings == {"eps": 1e-6}
    values = {**MINIMAL, "lora": {"rank": 4}, "ema": {"decay": 0.5}}
    off = read(values, "lora=null", "ema=null", "validation.height=null")
    assert (off.lora, off.ema, off.validation.height) == (None, None, None)
    assert read(values, "lora.alpha=8").lora == LoraSettings(rank=4, alpha=8)


def test_a_fault_in_an_override_is_named_as_one_in_the_file(refusal):
    assert "stepz: unknown key; did you mean 'steps'?" in refusal(MINIMAL, "stepz=3")
    assert "steps: Input should be a valid integer (got {'x': 3})" in refusal(MINIMAL, "steps.x=3")


@pytest.mark.parametrize(
    ("override", "way_out"),
    [
        ("data.mix.0.folder=x", "such as 'data.mix=[{folder: x}]'"),
        ("thaw.0=norms", "such as 'thaw=[norms]'"),
    ],
)
def test_an_override_of_an_entry_where_there_is_no_list_is_refused_with_the_way_out(refusal, override, way_out):
    message = refusal(MINIMAL, override)
    assert f"the override {override!r} asks for entry 0 of" in message
    assert way_out in message


@pytest.mark.parametrize("override", ["data..x=3", "data.=3", ".data=3"])
def test_an_override_with_an_empty_part_is_refused(refusal, override):
    assert f"a part of the key is empty in {override!r}" in refusal(MINIMAL, override)
