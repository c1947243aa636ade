"""What a trial leaves is read as it was written, or refused with the way out."""

import json

import pytest

from mmpreproj.language.trials import RECORD, Trial, TrialRecord, check_settings, read_record, write_record
from mmpreproj.training.config import ConfigError

SETTINGS = {"model": "abc", "training": {"steps": 3, "length": 16}, "lora": None, "betas": (0.9, 0.95)}


def make_record(**changes):
    values = {
        "trial": Trial("docs", "skip", 1e-3, 0),
        "settings": json.loads(json.dumps(SETTINGS)),
        "parameters": 2048,
        "lora_rank": 0,
        "validation_perplexity": 12.34567890123,
        "cache_bytes": 4096,
        "loss": 2.5,
        "step_seconds": 0.01,
        "peak_memory": 123,
        "skip_norms": (0.5, 0.25),
        "initial_skip_norms": (0.1, 0.1),
    }
    return TrialRecord(**(values | changes))


@pytest.mark.parametrize(
    "record",
    [
        make_record(),
        make_record(
            trial=Trial("docs", "base", None, 0),
            loss=None,
            step_seconds=None,
            peak_memory=None,
            skip_norms=(),
            initial_skip_norms=(),
        ),
        make_record(validation_perplexity=float("inf")),
    ],
    ids=["arm", "base", "infinite"],
)
def test_a_record_is_read_as_it_was_written(record, tmp_path):
    write_record(record, tmp_path)
    assert read_record(tmp_path, SETTINGS) == record
    assert [path.name for path in tmp_path.iterdir()] == [RECORD]


def test_there_is_no_record_of_a_trial_that_is_not_done(tmp_path):
    assert read_record(tmp_path, SETTINGS) is None
    assert read_record(tmp_path / "no_such", SETTINGS) is None


def test_each_trial_has_a_folder_of_its_own(tmp_path):
    trials = [Trial(t, a, r, s) for t in "ab" for a in ("skip", "lora") for r in (1e-3, 2e-3) for s in (0, 1)]
    folders = {trial.folder(tmp_path) for trial in trials}
    assert len(folders) == len(trials)
    assert Trial("docs", "skip", 1e-3, 2).folder(tmp_path) == tmp_path / "docs" / "skip" / "lr-0.001" / "seed-2"
    assert Trial("docs", "base", None, 2).folder(tmp_path) == tmp_path / "docs" / "base"


def without(key):
    def damage(text):
        return json.dumps({name: value for name, value in json.loads(text).items() if name != key})

    return damage


DAMAGES = {
    "cut": lambda text: text[:-20],
    "empty": lambda text: "",
    "no object": lambda text: "[1]",
    "no settings": without("settings"),
    "no perplexity": without("validation_perplexity"),
    "no norms": without("skip_norms"),
    "no trial": without("trial"),
    "another key": lambda text: json.dumps(json.loads(text) | {"colour": 1}),
    "no number": lambda text: json.dumps(json.loads(text) | {"skip_norms": 3}),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_record_is_refused(damage, tmp_path):
    write_record(make_record(), tmp_path)
    path = tmp_path / RECORD
    path.write_text(DAMAGES[damage](path.read_text()))
    with pytest.raises(ConfigError, match=rf"{RECORD} is damaged \(.+\); remove the folder that it is in, and the tr"):
        read_record(tmp_path, SETTINGS)


def test_a_record_in_no_encoding_is_refused(tmp_path):
    (tmp_path / RECORD).write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is damaged"):
        read_record(tmp_path, SETTINGS)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        (
            {"training": {"steps": 5, "length": 16}},
            r"settings: training.steps was 3, is 5\. Choose another output, or",
        ),
        (
            {"model": "xyz", "training": {"steps": 3}},
            r'model was "abc", is "xyz"; training.length was 16, is not there',
        ),
        ({"lora": {"rank": 2}}, r"lora was null, is not there; lora.rank was not there, is 2"),
        ({"betas": (0.9, 0.99)}, r"betas was \[0.9, 0.95\], is \[0.9, 0.99\]"),
        ({"model": "x" * 100}, r"is \"x{78}…"),
    ],
)
def test_a_record_with_other_settings_is_refused_and_each_is_named(changed, told, tmp_path):
    write_record(make_record(), tmp_path)
    with pytest.raises(ConfigError, match=told) as refused:
        read_record(tmp_path, SETTINGS | changed)
    assert str(tmp_path / RECORD) in str(refused.value)


@pytest.mark.parametrize("found", [None, [], "text", {}])
def test_settings_of_another_kind_are_others(found, tmp_path):
    with pytest.raises(ConfigError, match=r"made with other settings: .*or do this"):
        check_settings(found, SETTINGS, tmp_path, way_out="do this")
