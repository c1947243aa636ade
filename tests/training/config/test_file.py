"""The training configuration: what is read, what is written, and every way to be refused."""

import re
from pathlib import Path

import pytest
import yaml

from mmpreproj.patching.config import PreProjConfig
from mmpreproj.patching.points.settings import PointPathConfig
from mmpreproj.training.config import (
    ConfigError,
    OptimizerConfig,
    ScratchModel,
    TrainConfig,
    read_config,
    write_config,
)

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
SHIPPED = ("furniture_points.yaml", "quickstart.yaml", "sd3_medium_probe.yaml", "sd35_medium_probe.yaml")
FROM_NOTHING = ("furniture_points.yaml", "quickstart.yaml")
MINIMAL = {"model": "some/base", "output": "runs/x", "data": {"folder": "pics"}}
SCRATCH = {**MINIMAL, "mode": "full", "model": {"width": 32, "heads": 2}}


@pytest.fixture
def write(tmp_path):
    def run(values):
        path = tmp_path / "run.yaml"
        path.write_text(values if isinstance(values, str) else yaml.safe_dump(values), encoding="utf-8")
        return path

    return run


@pytest.fixture
def read(write):
    return lambda values, *overrides: read_config(write(values), overrides)


@pytest.fixture
def refusal(read):
    """The message with which values are refused."""

    def run(values, *overrides):
        with pytest.raises(ConfigError) as caught:
            read(values, *overrides)
        return str(caught.value)

    return run


# --- reading and writing ---------------------------------------------------------------------------------------------


def test_every_shipped_file_is_a_configuration():
    assert {path.name for path in CONFIGS.glob("*.yaml")} == set(SHIPPED)
    for name in SHIPPED:
        config = read_config(CONFIGS / name)
        points = PointPathConfig(shown=64) if name == "furniture_points.yaml" else None
        assert config.adapter == PreProjConfig(points=points), name
        assert isinstance(config.model, ScratchModel) == (config.mode == "full") == (name in FROM_NOTHING)


@pytest.mark.parametrize("name", SHIPPED)
def test_what_is_written_is_read_back_equal(tmp_path, name):
    config = read_config(CONFIGS / name)
    write_config(config, tmp_path / "copy.yaml")
    assert read_config(tmp_path / "copy.yaml") == config


def test_no_value_is_lost_on_the_way_to_a_file_and_back(tmp_path):
    config = TrainConfig(
        model="1e5",
        output=tmp_path / "a: b #c",
        mode="full",
        adapter={"blocks": {"last": 2}, "init_std": 1e-5, "share": "stream"},
        data={"folder": "007", "caption_column": "no", "always_train": ("2e-3", "null", "é 🍎", "a: b")},
        optimizer={"betas": (0.5, 0.6), "adapter_learning_rate": 1e-7},
        flow={"shift": 3.0},
    )
    write_config(config, tmp_path / "copy.yaml")
    assert read_config(tmp_path / "copy.yaml") == config
    without = config.model_copy(update={"adapter": None})
    write_config(without, tmp_path / "copy.yaml")
    assert read_config(tmp_path / "copy.yaml") == without


def test_a_model_is_a_name_or_the_sizes_of_a_new_one(read):
    assert read(MINIMAL).model == "some/base"
    assert read(SCRATCH).model == ScratchModel(width=32, heads=2)


def test_adapter_is_the_papers_unless_given_and_null_in_mode_full_for_none(read):
    assert read(MINIMAL).adapter == PreProjConfig()
    assert read({**MINIMAL, "adapter": {"expansion": 2, "blocks": [1, 0]}}).adapter.blocks == (0, 1)
    assert read({**MINIMAL, "mode": "full", "adapter": None}).adapter is None


@pytest.mark.parametrize("text", ["2e-3", "2E-3", "2.e-3", "0.2e-2", ".2e-2", "2.0e-3", "0.002"])
def test_scientific_numbers_are_numbers(read, text):
    adapter = f"adapter: {{init_std: {text}}}\n"
    config = read(f"model: m\noutput: o\ndata: {{folder: p}}\n{adapter}", f"optimizer.learning_rate={text}")
    assert config.adapter.init_std == config.optimizer.learning_rate == pytest.approx(2e-3)


def test_whole_numbers_may_be_scientific_and_signs_are_kept(read):
    config = read(MINIMAL, "steps=1e3", "flow.logit_mean=-1e-1")
    assert (config.steps, config.flow.logit_mean) == (1000, -0.1)


def test_text_in_quotes_stays_text(read):
    assert read('model: m\noutput: o\ndata: {folder: p, always_train: ["1e3", "3"]}').data.always_train == ("1e3", "3")


# --- overrides -------------------------------------------------------------------------------------------------------


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


def test_a_fault_in_an_override_is_named_as_one_in_the_file(refusal):
    assert "stepz: unknown key; did you mean 'steps'?" in refusal(MINIMAL, "stepz=3")
    assert "steps: Input should be a valid integer (got {'x': 3})" in refusal(MINIMAL, "steps.x=3")


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sd3_medium_probe", "configs/sd3_medium_probe.yaml", "sd3_medium_probe.yaml"])
def test_a_shipped_file_is_found_by_its_name_from_anywhere(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    assert read_config(name, ["data.folder=pictures"]).steps > 0
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "sd3_medium_probe.yaml").write_text("one's own")
    (tmp_path / "sd3_medium_probe.yaml").write_text("one's own")
    if name.endswith(".yaml"):
        with pytest.raises(ConfigError, match="should hold key: value lines"):
            read_config(name)


def test_what_no_key_is_called_elsewhere_is_a_key_here():
    for section in (TrainConfig, OptimizerConfig):
        assert set(section.also_called.values()) <= set(section.model_fields)
        assert not set(section.also_called) & set(section.model_fields)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no configuration file .*nowhere\.yaml"):
        read_config(tmp_path / "nowhere.yaml")


@pytest.mark.parametrize(
    ("text", "match"),
    [("a: [1", "is not valid YAML"), ("- a", "found list"), ("", "found NoneType"), ("hello", "found str")],
)
def test_a_file_that_is_no_mapping_is_named(refusal, text, match):
    message = refusal(text)
    assert "run.yaml" in message
    assert match in message


def test_a_file_that_is_no_text_is_named(tmp_path):
    (tmp_path / "run.yaml").write_bytes(b"\xff\xfe\x00model")
    with pytest.raises(ConfigError, match=r"run\.yaml is not valid YAML"):
        read_config(tmp_path / "run.yaml")


@pytest.mark.parametrize(
    ("change", "field", "hint"),
    [
        ({"stps": 1}, "stps", "did you mean 'steps'?"),
        ({"data": {"folder": "p", "resolutoin": 1}}, "data.resolutoin", "did you mean 'resolution'?"),
        ({"optimizer": {"learning_rat": 1}}, "optimizer.learning_rat", "did you mean 'learning_rate'?"),
        ({"flow": {"shfit": 1}}, "flow.shfit", "did you mean 'shift'?"),
        ({"mode": "full", "model": {"widht": 32}}, "model.widht", "did you mean 'width'?"),
        ({"adapter": {"expansoin": 1}}, "adapter", "no field 'expansoin'; did you mean 'expansion'?"),
        ({"zzz": 1}, "zzz", "keys here: model, output, mode"),
        ({"flow": {"zzz": 1}}, "flow.zzz", "keys here: logit_mean, logit_std, shift"),
        ({"optimizer": {"lr": 1e-3}}, "optimizer.lr", "did you mean 'learning_rate'?"),
        ({"max_train_steps": 5}, "max_train_steps", "did you mean 'steps'?"),
        ({"train_batch_size": 5}, "train_batch_size", "did you mean 'batch_size'?"),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest_valid_one(refusal, change, field, hint):
    message = refusal({**MINIMAL, **change})
    assert "run.yaml cannot be used" in message
    assert f"  {field}: " in message
    assert hint in message


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"steps": "many"}, "steps: Input should be a valid integer.*got 'many'"),
        ({"steps": 1.5}, r"steps: .*got 1\.5"),
        ({"data": "pics"}, "data: .*got 'pics'"),
        ({"mode": "prob"}, "mode: Input should be 'probe' or 'full'.*got 'prob'"),
        ({"precision": "fp8"}, "precision: .*'bf16'.*got 'fp8'"),
        ({"gradient_checkpointing": "maybe"}, "gradient_checkpointing: .*boolean.*got 'maybe'"),
        ({"adapter": "big"}, "adapter: .*got 'big'"),
        ({"adapter": {"expansion": "big"}}, "adapter: expansion must be a number above 0; got 'big'"),
        ({"optimizer": {"betas": [0.9]}}, r"optimizer\.betas\.1: missing"),
        ({"model": 3}, "model: give a hub id, a folder, or the sizes .*got 3"),
        ({"mode": "full", "model": {"width": "wide"}}, r"model\.width: .*got 'wide'"),
        ({1: 2}, "1: Keys should be strings"),
        ({"steps": True}, "steps: give a number, not true or false .got True"),
        ({"caption_dropout": False}, "caption_dropout: give a number, not true or false .got False"),
        ({"optimizer": {"learning_rate": True}}, r"optimizer\.learning_rate: give a number, not true or false"),
        ({"optimizer": {"adapter_learning_rate": True}}, r"optimizer\.adapter_learning_rate: give a number"),
        ({"flow": {"shift": True}}, r"flow\.shift: give a number, not true or false"),
    ],
)
def test_a_wrong_type_is_named_with_field_and_value(refusal, change, expected):
    assert re.search(expected, refusal({**MINIMAL, **change}))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"steps": 0}, "steps: Input should be greater than or equal to 1 (got 0)"),
        ({"batch_size": 0}, "batch_size: "),
        ({"gradient_accumulation": 0}, "gradient_accumulation: "),
        ({"caption_dropout": 1.5}, "caption_dropout: Input should be less than or equal to 1 (got 1.5)"),
        ({"keep_checkpoints": 0}, "keep_checkpoints: "),
        ({"held_out_levels": 0}, "held_out_levels: "),
        ({"seed": -1}, "seed: "),
        ({"seed": 2**32}, "seed: "),
        ({"optimizer": {"learning_rate": 0}}, "optimizer.learning_rate: Input should be greater than 0 (got 0)"),
        ({"optimizer": {"learning_rate": float("inf")}}, "optimizer.learning_rate: Input should be a finite number"),
        ({"optimizer": {"max_grad_norm": float("nan")}}, "optimizer.max_grad_norm: Input should be a finite number"),
        ({"optimizer": {"betas": [0.9, 1.0]}}, "optimizer.betas.1: Input should be less than 1 (got 1.0)"),
        ({"flow": {"logit_std": 0}}, "flow.logit_std: "),
        ({"flow": {"logit_mean": float("nan")}}, "flow.logit_mean: Input should be a finite number"),
        ({"data": {"folder": "p", "resolution": 4}}, "data.resolution: "),
        ({"data": {"folder": "p", "held_out": -1}}, "data.held_out: "),
        ({"adapter": {"expansion": -1}}, "adapter: expansion must be a finite number above 0; got -1"),
        ({"mode": "full", "model": {"width": 4, "heads": 2}}, "model.width: "),
        ({"mode": "full", "model": {"text_tokens": 513}}, "model.text_tokens: "),
    ],
)
def test_a_value_out_of_range_is_named_with_field_and_value(refusal, change, expected):
    assert expected in refusal({**MINIMAL, **change})


@pytest.mark.parametrize("field", ["model", "output", "data"])
def test_what_must_be_given_is_named(refusal, field):
    values = {key: value for key, value in MINIMAL.items() if key != field}
    assert f"  {field}: missing" in refusal(values)


def test_a_folder_source_needs_its_folder(refusal, read):
    assert "data: source 'folder' needs folder" in refusal({**MINIMAL, "data": {}})
    assert read({**MINIMAL, "data": {"source": "openmoji"}}).data.folder is None


def test_probe_without_adapter_is_refused_with_both_ways_out(refusal):
    message = refusal({**MINIMAL, "adapter": None})
    assert "mode 'probe'" in message
    assert "set adapter: {} or mode: full" in message


def test_probe_of_a_new_model_is_refused(refusal):
    assert "mode 'probe' would leave a new model's random weights" in refusal({**SCRATCH, "mode": "probe"})


def test_a_width_that_heads_do_not_divide_is_refused(refusal):
    message = refusal({**SCRATCH, "model": {"width": 32, "heads": 5}})
    assert "model: width 32 must be a multiple of heads 5" in message


def test_faults_in_a_new_models_sizes_are_not_mixed_with_complaints_that_they_are_no_name(refusal):
    message = refusal({**SCRATCH, "model": {"width": 4, "dept": 2}})
    faults = message.splitlines()[1:]
    assert len(faults) == 2
    assert all(fault.startswith(("  model.width: ", "  model.dept: ")) for fault in faults)
    assert not any(noise in message for noise in ("string", "ScratchModel", "sizes", "function-after"))


def test_every_fault_is_listed_at_once(refusal):
    message = refusal({**MINIMAL, "steps": 0, "stps": 1, "optimizer": {"lr": 1}})
    assert len(message.splitlines()) == 4
    assert all(field in message for field in ("steps: ", "stps: ", "optimizer.lr: "))


@pytest.mark.parametrize("spelling", ["precision=no", "precision=false", "precision='no'"])
def test_full_precision_can_be_asked_for_in_the_words_of_our_own_messages(spelling):
    assert read_config(CONFIGS / "sd3_medium_probe.yaml", [spelling]).precision == "no"


# --- points ----------------------------------------------------------------------------------------------------------


POINTED = {**MINIMAL, "adapter": {"points": {"features": 3}}}


def test_points_are_read_with_the_adapter_and_need_clouds(read, refusal):
    config = read(POINTED, "data.points_column=points", "points.stored=64")
    assert config.adapter.points == PointPathConfig(features=3)
    assert (config.trains_points, config.points.stored, config.points.flow.shift) == (True, 64, 1.0)
    assert "the data has no clouds; set data.points_column" in refusal(POINTED)
    assert not read(MINIMAL).trains_points


def test_clouds_that_nobody_would_train_on_are_refused(refusal):
    assert "nothing trains on clouds" in refusal(MINIMAL, "data.points_column=points")
    openmoji = {**MINIMAL, "data": {"source": "openmoji", "points_column": "points"}}
    assert "source 'openmoji' has no metadata" in refusal(openmoji)


def test_mistakes_of_points_are_named(refusal):
    assert "did you mean 'features'" in refusal(POINTED, "adapter.points.feature=3", "data.points_column=points")
    assert "points.dropout" in refusal(POINTED, "points.dropout=2", "data.points_column=points")
    assert "skip is False" in refusal(POINTED, "adapter.skip=false", "data.points_column=points")


def test_furniture_needs_a_folder(refusal):
    assert "sweethome3d-furniture was unpacked" in refusal({**MINIMAL, "data": {"source": "furniture"}})
