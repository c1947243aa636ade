"""Numbers of the configuration: their ranges, and what is no number."""

import pytest

from mmpreproj.training.config import (
    ConfigError,
    DataConfig,
    EmaConfig,
    FlowConfig,
    GroupRates,
    LoraSettings,
    OptimizerConfig,
    PointTraining,
    ScratchModel,
    SourceConfig,
    TrainConfig,
    ValidationConfig,
    parse_config,
)

MINIMAL = {"model": "some/base", "output": "runs/x", "data": {"folder": "pics"}}
SECTIONS = {
    SourceConfig: {"folder": "p"},
    DataConfig: {"folder": "p"},
    ScratchModel: {},
    LoraSettings: {},
    FlowConfig: {},
    PointTraining: {},
    GroupRates: {},
    OptimizerConfig: {},
    EmaConfig: {},
    ValidationConfig: {},
    TrainConfig: MINIMAL,
}


def parse(**changes):
    return parse_config({**MINIMAL, **changes}, origin="here")


def refusal(**changes):
    with pytest.raises(ConfigError) as caught:
        parse(**changes)
    return str(caught.value)


def fields_of(*kinds):
    """Fields that are one of these JSON types, as (section, field)."""
    found = []
    for section in SECTIONS:
        for name, value in section.model_json_schema()["properties"].items():
            types = {branch.get("type") for branch in value.get("anyOf", [value])}
            if types & set(kinds):
                found.append(pytest.param(section, name, id=f"{section.__name__}.{name}"))
    return found


@pytest.mark.parametrize(("section", "field"), fields_of("number", "integer"))
def test_truth_values_are_no_numbers(section, field):
    for value in (True, False):
        with pytest.raises(ValueError, match=rf"(?s){field}.*give a number, not true or false"):
            section(**{**SECTIONS[section], field: value})


@pytest.mark.parametrize(("section", "field"), fields_of("number"))
def test_numbers_are_finite(section, field):
    for value in (float("nan"), float("inf"), -float("inf")):
        with pytest.raises(ValueError, match=field):
            section(**{**SECTIONS[section], field: value})


@pytest.mark.parametrize("field", ["background", "more_resolutions"])
def test_truth_values_are_no_numbers_in_lists(field):
    assert f"data.{field}: give a number, not true or false" in refusal(data={"folder": "p", field: [True, 9, 9]})


def test_truth_values_stay_themselves_where_they_are_meant():
    chosen = {"nesterov": True, "eps": 1, "betas": None, "mode": "x", "decay": 0.5}
    read = parse(optimizer={"settings": chosen}).optimizer.settings
    assert [(value, type(value)) for value in read.values()] == [(value, type(value)) for value in chosen.values()]
    assert parse(ema={"warmup": False}).ema.warmup is False


@pytest.mark.parametrize("section", SECTIONS)
def test_sections_are_not_changed_once_they_are_made(section):
    made = section(**SECTIONS[section])
    with pytest.raises(ValueError, match="frozen"):
        setattr(made, next(iter(section.model_fields)), 1)


@pytest.mark.parametrize(
    ("section", "values"),
    [
        (DataConfig, {"background": [0, 0]}),
        (DataConfig, {"background": [0, 0, 256]}),
        (DataConfig, {"flip": 1.1}),
        (DataConfig, {"max_aspect": 0.9}),
        (DataConfig, {"max_enlargement": 0}),
        (DataConfig, {"workers": -1}),
        (DataConfig, {"workers": 65}),
        (DataConfig, {"held_out_seed": -1}),
        (DataConfig, {"aspect": "stretch"}),
        (DataConfig, {"on_error": "ignore"}),
        (DataConfig, {"held_out_by": "word"}),
        (EmaConfig, {"decay": 0}),
        (EmaConfig, {"decay": 1}),
        (LoraSettings, {"rank": 0}),
        (LoraSettings, {"alpha": 0}),
        (LoraSettings, {"dropout": 1}),
        (GroupRates, {"lora": 0}),
        (OptimizerConfig, {"schedule_cycles": 0}),
        (OptimizerConfig, {"schedule": "step"}),
        (FlowConfig, {"mode_scale": 1.76}),
        (FlowConfig, {"scheme": "sigmas"}),
        (FlowConfig, {"shift_resolution": 0}),
        (ValidationConfig, {"count": 0}),
        (ValidationConfig, {"guidance": -1}),
        (ValidationConfig, {"height": 7}),
        (ScratchModel, {"qk_norm": "layer_norm"}),
        (ScratchModel, {"width": 10, "heads": 3}),
    ],
)
def test_sections_have_their_ranges(section, values):
    with pytest.raises(ValueError, match=next(iter(values))):
        section(**{**SECTIONS[section], **values})
