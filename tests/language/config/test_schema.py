"""The schema for editors of a study: it is current, says what the reader does, and describes every field."""

import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml

from mmpreproj.language.config import StudyConfig
from mmpreproj.language.config.schema import study_schema
from mmpreproj.training.config import ConfigError, parse_config, read_config
from mmpreproj.training.config.file import _Loader
from mmpreproj.training.config.schema import write_schema

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
SHIPPED = sorted(CONFIGS.glob("probe_*.yaml"))
MINIMAL = {"model": "some/model", "output": "runs/x", "texts": {"wiki": {"files": "a.txt"}}}
SCHEMA = study_schema()
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
    return {"StudyConfig": SCHEMA, **SCHEMA["$defs"]}


def test_the_file_is_what_the_classes_say(tmp_path):
    write_schema(SCHEMA, tmp_path / "a.json")
    written = (CONFIGS / "study.schema.json").read_text(encoding="utf-8")
    assert written == (tmp_path / "a.json").read_text(encoding="utf-8"), (
        "configs/study.schema.json is older than the configuration's classes; write it anew with "
        "python -m mmpreproj.language.config.schema configs/study.schema.json"
    )


@pytest.mark.slow  # another process imports torch
def test_the_command_writes_the_file_and_asks_for_its_name(tmp_path):
    command = [sys.executable, "-m", "mmpreproj.language.config.schema"]
    subprocess.run([*command, str(tmp_path / "a.json")], check=True)
    assert json.loads((tmp_path / "a.json").read_text(encoding="utf-8")) == SCHEMA
    without = subprocess.run(command, capture_output=True, text=True)
    assert without.returncode == 1
    assert (
        "give the file to write: python -m mmpreproj.language.config.schema configs/study.schema.json"
        in without.stderr
    )


def test_it_is_a_schema_of_the_draft_it_names():
    assert SCHEMA["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert list(SCHEMA["properties"]) == list(StudyConfig.model_fields)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_studies_name_it_first_and_are_valid_as_they_are_and_as_written_out(path):
    text = path.read_text(encoding="utf-8")
    assert text.splitlines()[0] == "# yaml-language-server: $schema=study.schema.json"
    assert not faults(yaml.load(text, _Loader))
    assert not faults(read_config(path, kind=StudyConfig).model_dump(mode="json"))


@pytest.mark.parametrize(
    "change",
    [
        {"model": {"name": "m", "gguf_file": "a.gguf", "revision": None}},
        {"arms": "skip", "seeds": 1, "learning_rates": 1e-3, "arm_learning_rates": {"skip": [1e-2]}},
        {"arms": "skip", "learning_rates": [1e-3], "arm_learning_rates": {"pre_projection+skip+lora": 1e-2}},
        {"texts": {"2024": {"dataset": "d", "splits": {"train": "train[:10]"}}, "b-c_d": {"files": ["a", "b"]}}},
        {"training": {"precision": False, "micro_batch_size": None}},
        {"lora": {"targets": "q_proj", "matched_targets": ["a", "b"]}},
        {"evaluation": {"tasks": [{"file": "a.jsonl", "kind": "last_word"}], "lm_eval": "hellaswag", "limit": None}},
        {"adapter": {"blocks": {"last": 2}, "expansion": 2}},
        {"optimizer": {"settings": {"a": 1, "b": None}, "betas": [0.9, 0.95]}},
    ],
)
def test_what_is_read_is_valid(change):
    values = {**MINIMAL, **change}
    parse_config(values, origin="here", kind=StudyConfig)
    assert not faults(values)


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"arm": []}, ""),
        ({"model": 3}, "model"),
        ({"model": {"dtype": "float32"}}, "model"),
        ({"arms": "skp"}, "arms"),
        ({"arms": []}, "arms"),
        ({"arms": ["skip", "skip"]}, "arms"),
        ({"seeds": 2**32}, "seeds"),
        ({"learning_rates": [0]}, "learning_rates.0"),
        ({"learning_rates": []}, "learning_rates"),
        ({"arm_learning_rates": {"skp": [1, 2, 3]}}, "arm_learning_rates"),
        ({"arm_learning_rates": {"skip": [1, 2, 0]}}, "arm_learning_rates.skip.2"),
        ({"arm_learning_rates": {"skip": []}}, "arm_learning_rates.skip"),
        ({"texts": {}}, "texts"),
        ({"texts": {"a b": {"files": "a"}}}, "texts"),
        ({"texts": {"x" * 65: {"files": "a"}}}, "texts"),
        ({"texts": {"a": {"fils": "a"}}}, "texts.a"),
        ({"texts": {"a": {"files": "a", "held_out": 0.5}}}, "texts.a.held_out"),
        ({"training": {"steps": 0}}, "training.steps"),
        ({"training": {"precision": True}}, "training.precision"),
        ({"evaluation": {"tasks": [{"file": "a", "name": "a/b"}]}}, "evaluation.tasks.0.name"),
        ({"evaluation": {"resamples": 1}}, "evaluation.resamples"),
        ({"adapter": {"blocks": []}}, "adapter.blocks"),
    ],
)
def test_what_is_refused_for_its_type_key_or_range_is_invalid_there(change, where):
    values = {**MINIMAL, **change}
    with pytest.raises(ConfigError):
        parse_config(values, origin="here", kind=StudyConfig)
    assert where in faults(values)


@pytest.mark.parametrize("field", ["model", "output", "texts"])
def test_what_must_be_given_is_required(field):
    assert faults({key: value for key, value in MINIMAL.items() if key != field}) == {""}


@pytest.mark.parametrize("owner", holders())
def test_every_object_and_field_is_described_and_no_other_key_is_taken(owner):
    node = holders()[owner]
    assert node["additionalProperties"] is False
    assert node["description"]
    for name, value in node["properties"].items():
        assert len(value["description"]) > 5, name
        assert "None" not in value["description"], f"{name}: YAML says null"


def test_defaults_are_those_that_are_read():
    plain = parse_config(MINIMAL, origin="here", kind=StudyConfig)
    found = [({name: value["default"]}) for name, value in SCHEMA["properties"].items() if "default" in value]
    for name, owner in (
        ("lora", "LanguageLora"),
        ("training", "LanguageTraining"),
        ("optimizer", "LanguageOptimizer"),
        ("evaluation", "EvaluationConfig"),
    ):
        properties = SCHEMA["$defs"][owner]["properties"]
        found += [{name: {field: value["default"]}} for field, value in properties.items()]
    assert len(found) > 30
    for change in found:
        assert parse_config({**MINIMAL, **change}, origin="here", kind=StudyConfig) == plain, change
