"""Any configuration: what is read is written whole and read back equal, and nonsense is refused by one error alone."""

import datetime

import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

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
    read_config,
    write_config,
)

MINIMAL = {"model": "some/base", "output": "runs/x", "data": {"folder": "pics"}}
SECTIONS = (
    TrainConfig,
    ScratchModel,
    LoraSettings,
    DataConfig,
    SourceConfig,
    OptimizerConfig,
    GroupRates,
    EmaConfig,
    FlowConfig,
    PointTraining,
    ValidationConfig,
)


# --- what is kept of a run -------------------------------------------------------------------------------------------


def test_every_field_is_written(tmp_path):
    write_config(parse_config(MINIMAL, origin="here"), tmp_path / "copy.yaml")
    written = yaml.safe_load((tmp_path / "copy.yaml").read_text(encoding="utf-8"))
    assert list(written) == list(TrainConfig.model_fields)
    for name, section in (
        ("data", DataConfig),
        ("optimizer", OptimizerConfig),
        ("flow", FlowConfig),
        ("points", PointTraining),
        ("validation", ValidationConfig),
    ):
        assert list(written[name]) == list(section.model_fields)


NAMES = st.text(st.characters(exclude_characters="\0"), min_size=1, max_size=8).filter(
    str.strip
)  # some may not be blank
RATES = st.floats(min_value=1e-9, max_value=1e3)


def sections(**fields):
    """Mappings of some of these fields."""
    return st.fixed_dictionaries({}, optional=fields)


SOURCES = st.one_of(
    st.fixed_dictionaries({"folder": NAMES}, optional={"caption_column": NAMES, "repeats": RATES}),
    st.fixed_dictionaries(
        {"source": st.just("dataset"), "dataset": NAMES},
        optional={"subset": NAMES, "data_files": NAMES | st.lists(NAMES), "split": NAMES},
    ),
    st.fixed_dictionaries({"source": st.just("shards"), "shards": NAMES | st.lists(NAMES, min_size=1)}),
    st.just({"source": "openmoji"}),
)
DATA = st.builds(
    lambda source, more: {**source, **more},
    SOURCES | st.lists(SOURCES, min_size=1, max_size=3).map(lambda mix: {"mix": mix}),
    sections(
        flip=st.floats(0, 1),
        background=st.lists(st.integers(0, 255), min_size=3, max_size=3),
        always_train=st.lists(NAMES),
        more_resolutions=st.sampled_from([[], [256], [256, 1024]]),
        cache=NAMES,
        held_out_seed=st.none() | st.integers(0, 9),
    ),
)
VALUES = st.fixed_dictionaries(
    {"model": NAMES, "output": NAMES, "data": DATA},
    optional={
        "lora": st.none()
        | sections(rank=st.integers(1, 99), alpha=st.none() | RATES, targets=NAMES | st.lists(NAMES)),
        "ema": st.none() | sections(decay=st.floats(0.1, 0.99), warmup=st.booleans()),
        "validation": sections(prompts=NAMES | st.lists(NAMES), guidance=st.floats(0, 9), width=st.just(64)),
        "optimizer": sections(
            settings=st.dictionaries(NAMES, st.none() | st.booleans() | st.integers() | RATES | NAMES, max_size=3),
            learning_rates=sections(adapter=RATES, lora=RATES),
        ),
        "trackers": st.lists(st.sampled_from(["tensorboard", "wandb"])),
        "push_to_hub": st.none() | NAMES,
        "adapter": st.sampled_from(
            [{}, {"blocks": [1, 0]}, {"blocks": {"last": 1}, "expansion": 2}, {"positions": {}}]
        ),
        "precision": st.sampled_from(["no", False, "bf16"]),
    },
)
QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@QUICK
@given(VALUES)
def test_whatever_was_read_is_written_and_read_back_equal(tmp_path, values):
    config = parse_config(values, origin="here")
    write_config(config, tmp_path / "copy.yaml")
    again = read_config(tmp_path / "copy.yaml")
    assert again == config
    assert again.model_dump() == config.model_dump()


# --- nonsense --------------------------------------------------------------------------------------------------------


KEYS = st.sampled_from(sorted({name for section in SECTIONS for name in section.model_fields}))
PLAIN = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.dates(),
    st.sampled_from(["folder", "full", "probe", "bf16", "all", "name", "sizes"]),
)
NONSENSE = st.recursive(
    PLAIN,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS | PLAIN, inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(KEYS | PLAIN, NONSENSE, max_size=6))
@example({"adapter": {"blocks": {"last": {}}}})
@example({"model": {"sizes": {"sizes": 1}}})
@example({"data": {"mix": [[], {"foo": {"foo": 1}}]}, "": 1, "\ud800": {}})
@example({"optimizer": {"settings": {"float": {"float": []}, 1: 2}}})
@example({"output": datetime.date(2026, 1, 1), None: None})
def test_nonsense_is_refused_and_nothing_else_is_raised(values):
    try:
        config = parse_config({"output": "o", **values}, origin="here")
    except ConfigError as error:
        assert str(error).startswith("here cannot be used:\n  ")
    else:
        assert isinstance(config, TrainConfig)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(KEYS | st.text(max_size=3) | st.sampled_from(["0", "mix"]), min_size=1, max_size=4), st.text(max_size=8)
)
@example(["data", "mix", "0", "folder"], "!!int x")
@example(["data", "mix", "9" * 5000], "1")
def test_nonsense_in_an_override_is_refused_and_nothing_else_is_raised(tmp_path, keys, text):
    path = tmp_path / "run.yaml"
    path.write_text("model: m\noutput: o\ndata: {mix: [{folder: p}]}", encoding="utf-8")
    try:
        config = read_config(path, [".".join(keys) + "=" + text])
    except ConfigError as error:
        assert str(error)
    else:
        assert isinstance(config, TrainConfig)
