"""The schema for editors: it is current, says what a configuration's reader does, and describes every field."""

import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml

from mmpreproj.patching.config import PreProjConfig
from mmpreproj.training.config import ConfigError, Section, SourceConfig, TrainConfig, find_config, read_config
from mmpreproj.training.config.file import _Loader, parse_config
from mmpreproj.training.config.schema import json_schema, train_schema, write_schema

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
SHIPPED = sorted(path for path in CONFIGS.glob("*.yaml") if not path.name.startswith("probe_"))  # those are studies
MINIMAL = {"model": "some/base", "output": "runs/x", "data": {"folder": "pics"}}
SCHEMA = train_schema()
CHECK = jsonschema.Draft202012Validator(SCHEMA)


def faults(values):
    """Where a schema refuses values, as the dotted keys of the innermost complaints."""
    found, pending = set(), list(CHECK.iter_errors(values))
    while pending:
        error = pending.pop()
        pending += error.context or ()
        found.add(".".join(map(str, error.absolute_path)))
    return found


def holders():
    """Every object that the schema describes with its properties, by name."""
    return {"TrainConfig": SCHEMA, **SCHEMA["$defs"]}


# --- the file --------------------------------------------------------------------------------------------------------


def test_the_file_is_what_the_classes_say():
    written = json.loads((CONFIGS / "train.schema.json").read_text(encoding="utf-8"))
    assert written == SCHEMA, (
        "configs/train.schema.json is older than the configuration's classes; write it anew with "
        "python -m mmpreproj.training.config.schema configs/train.schema.json"
    )


def test_the_file_is_written_in_the_order_of_the_classes(tmp_path):
    write_schema(SCHEMA, tmp_path / "a.json")
    assert (tmp_path / "a.json").read_text(encoding="utf-8") == (CONFIGS / "train.schema.json").read_text("utf-8")
    assert list(SCHEMA["properties"]) == list(TrainConfig.model_fields)


@pytest.mark.slow  # another process imports torch
def test_the_command_writes_the_file_and_asks_for_its_name(tmp_path):
    command = [sys.executable, "-m", "mmpreproj.training.config.schema"]
    subprocess.run([*command, str(tmp_path / "a.json")], check=True)
    assert json.loads((tmp_path / "a.json").read_text(encoding="utf-8")) == SCHEMA
    without = subprocess.run(command, capture_output=True, text=True)
    assert without.returncode == 1
    assert "give the file to write" in without.stderr


def test_it_is_a_schema_of_the_draft_it_names():
    assert SCHEMA["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


def test_every_shipped_file_names_it_in_its_first_line():
    for path in SHIPPED:
        first = path.read_text(encoding="utf-8").splitlines()[0]
        assert first == f"# yaml-language-server: $schema={SCHEMA['$id']}", path
    assert (CONFIGS / SCHEMA["$id"]).is_file()


def test_schema_and_launch_files_are_no_shipped_configurations():
    with pytest.raises(FileNotFoundError) as caught:
        find_config("nowhere")
    assert str(caught.value).endswith("are " + ", ".join(path.stem for path in SHIPPED))
    for name in ("train.schema", "train.schema.json", "study.schema", "study.schema.json", "fsdp2"):
        with pytest.raises(FileNotFoundError, match="no configuration file"):
            find_config(name)


# --- what it takes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_files_are_valid_as_yaml_1_1_and_as_written_out(path):
    for loader in (yaml.SafeLoader, _Loader):
        assert not faults(yaml.load(path.read_text(encoding="utf-8"), loader))
    assert not faults(read_config(path).model_dump(mode="json"))


@pytest.mark.parametrize(
    "change",
    [
        {"precision": False},
        {"precision": "no"},
        {"mode": "full", "model": {"width": 32, "heads": 2, "qk_norm": None}},
        {"adapter": None, "lora": {}},
        {"lora": {"targets": "all-linear", "alpha": 8}},
        {"lora": {"targets": ["attn.to_q"], "alpha": None}},
        {"ema": {"decay": 0.9}},
        {"ema": {}},
        {"data": {"mix": [{"folder": "a", "weight": 1}, {"source": "shards", "shards": "a.tar", "weight": 2.5}]}},
        {"data": {"folder": "p", "more_resolutions": [256], "background": [0, 0, 0]}},
        {"optimizer": {"settings": {"a": 1, "b": True, "c": None, "d": "x"}, "learning_rates": {"lora": 1e-4}}},
        {"validation": {"prompts": "a cat"}},
        {"validation": {"prompts": ["a cat", "a dog"], "height": None}},
        {"adapter": {"blocks": {"last": 2}, "positions": {"text": "diagonal", "base_size": 32}}},
        {"adapter": {"blocks": [0, 3], "points": {}}, "data": {"folder": "p", "points_column": "cloud"}},
        {"steps": 1000.0},
    ],
)
def test_what_is_read_is_valid(change):
    values = {**MINIMAL, **change}
    parse_config(values, origin="here")
    assert not faults(values)


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"stepz": 1}, ""),
        ({"model": 3}, "model"),
        ({"mode": "full", "model": {"widht": 32}}, "model"),
        ({"mode": "prob"}, "mode"),
        ({"steps": 0}, "steps"),
        ({"steps": True}, "steps"),
        ({"seed": 2**32}, "seed"),
        ({"precision": True}, "precision"),
        ({"precision": "fp8"}, "precision"),
        ({"thaw": "norms"}, "thaw"),
        ({"trackers": ["mlflow"]}, "trackers.0"),
        ({"lora": {"r": 4}}, "lora"),
        ({"lora": {"rank": 0}}, "lora.rank"),
        ({"ema": {"decay": 1}}, "ema.decay"),
        ({"data": {"folder": "p", "flip": 2}}, "data.flip"),
        ({"data": {"mix": [{"folder": "p"}, {"folder": "p", "resolution": 64}]}}, "data.mix.1"),
        ({"data": {"mix": [{"folder": "p", "repeats": 0}]}}, "data.mix.0.repeats"),
        ({"data": {"folder": "p", "background": [0, 0]}}, "data.background"),
        ({"data": {"folder": "p", "background": [0, 0, 256]}}, "data.background.2"),
        ({"optimizer": {"learning_rates": {"unet": 1}}}, "optimizer.learning_rates"),
        ({"optimizer": {"settings": {"a": [1]}}}, "optimizer.settings.a"),
        ({"validation": {"prompts": 3}}, "validation.prompts"),
        ({"adapter": "big"}, "adapter"),
        ({"adapter": {"expansoin": 2}}, "adapter"),
        ({"adapter": {"share": "all"}}, "adapter.share"),
        ({"adapter": {"blocks": []}}, "adapter.blocks"),
        ({"adapter": {"blocks": {"last": 0}}}, "adapter.blocks.last"),
        ({"adapter": {"blocks": {"first": 1}}}, "adapter.blocks"),
        ({"adapter": {"positions": {"text": "2d"}}}, "adapter.positions.text"),
        ({"adapter": {"positions": {"txt": "1d"}}}, "adapter.positions"),
        ({"adapter": {"points": {"shown": 7}}}, "adapter.points.shown"),
    ],
)
def test_what_is_refused_for_its_type_key_or_range_is_invalid_there(change, where):
    values = {**MINIMAL, **change}
    with pytest.raises(ConfigError):
        parse_config(values, origin="here")
    assert where in faults(values)


@pytest.mark.parametrize("field", ["model", "output", "data"])
def test_what_must_be_given_is_required(field):
    assert field in SCHEMA["required"]
    assert faults({key: value for key, value in MINIMAL.items() if key != field}) == {""}


BOUNDS = [
    (owner, field, keyword)
    for owner in ("PreProjConfig", "Positions", "PointPathConfig")
    for field, value in SCHEMA["$defs"][owner]["properties"].items()
    for keyword in ("minimum", "maximum", "exclusiveMinimum")
    if keyword in value.get("anyOf", [value])[0]
]


@pytest.mark.parametrize(("owner", "field", "keyword"), BOUNDS)
def test_the_adapters_ranges_are_those_that_its_settings_check(owner, field, keyword):
    value = SCHEMA["$defs"][owner]["properties"][field]
    bound = value.get("anyOf", [value])[0][keyword]
    inside, outside = {
        "minimum": (bound, bound - 1),
        "maximum": (bound, bound + 1),
        "exclusiveMinimum": (bound + 1e-6, bound),
    }[keyword]
    part = {"PreProjConfig": None, "Positions": "positions", "PointPathConfig": "points"}[owner]

    def build(number):
        return PreProjConfig.from_dict({part: {field: number}} if part else {field: number})

    build(inside)
    with pytest.raises(ValueError, match=field):
        build(outside)


def test_every_number_of_the_adapter_has_a_range():
    numbers = {
        (owner, field)
        for owner in ("PreProjConfig", "Positions", "PointPathConfig")
        for field, value in SCHEMA["$defs"][owner]["properties"].items()
        if value.get("anyOf", [value])[0].get("type") in ("number", "integer")
    }
    assert numbers == {(owner, field) for owner, field, _ in BOUNDS}


# --- what it tells ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("owner", holders())
def test_every_object_and_field_is_described_and_no_other_key_is_taken(owner):
    node = holders()[owner]
    assert node["additionalProperties"] is False
    assert node["description"]
    for name, value in node["properties"].items():
        assert len(value["description"]) > 5, name
        assert "None" not in value["description"], f"{name}: YAML says null"


def test_descriptions_are_the_docstrings_whole_and_of_parents_too():
    properties = SCHEMA["$defs"]["DataConfig"]["properties"]
    assert properties["folder"]["description"] == "the folder, for `source: folder` and `source: furniture`."
    assert properties["folder"]["description"] in SourceConfig.__doc__
    assert properties["on_error"]["description"].endswith("or `raise`, it ends the run.")
    assert SCHEMA["$defs"]["EmaConfig"]["description"].startswith("An exponential moving average")
    assert "Attributes" not in json.dumps(SCHEMA)


def defaults():
    """Every default that the schema tells, as values with that field alone written out."""
    found = [
        ({**MINIMAL, name: value["default"]}, MINIMAL)
        for name, value in SCHEMA["properties"].items()
        if "default" in value
    ]
    for name, owner in (
        ("optimizer", "OptimizerConfig"),
        ("flow", "FlowConfig"),
        ("points", "PointTraining"),
        ("lora", "LoraSettings"),
        ("ema", "EmaConfig"),
        ("validation", "ValidationConfig"),
        ("adapter", "PreProjConfig"),
        ("data", "DataConfig"),
    ):
        base = MINIMAL.get(name, {})
        for field, value in SCHEMA["$defs"][owner]["properties"].items():
            if field not in base:
                found.append(({**MINIMAL, name: {**base, field: value["default"]}}, {**MINIMAL, name: base}))
    return found


def test_defaults_are_those_that_are_read():
    found = defaults()
    assert len(found) > 90
    for written, left_out in found:
        assert parse_config(written, origin="here") == parse_config(left_out, origin="here"), written


def test_the_adapter_is_described_down_to_positions_and_points():
    adapter = SCHEMA["$defs"]["PreProjConfig"]["properties"]
    assert adapter["share"]["enum"] == ["block", "stream"]
    assert adapter["positions"]["anyOf"][0] == {"$ref": "#/$defs/Positions"}
    assert SCHEMA["$defs"]["Positions"]["properties"]["scaling"]["enum"] == ["none", "linear", "ntk", "yarn"]
    assert SCHEMA["$defs"]["PointPathConfig"]["properties"]["shown"]["default"] == 512


def test_a_field_that_nobody_describes_is_an_error(monkeypatch):
    monkeypatch.setattr(TrainConfig, "__doc__", "Everything.")
    monkeypatch.setattr(Section, "__doc__", "A part.")
    with pytest.raises(KeyError, match="model"):
        json_schema(TrainConfig, name="a.json", title="A")
