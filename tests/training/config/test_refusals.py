"""Every way for a configuration to be refused: the message names field, value and the way out."""

import re
from pathlib import Path

import pytest

from mmpreproj.patching.points.settings import PointPathConfig
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
    read_config,
)

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
MINIMAL = {"model": "some/base", "output": "runs/x", "data": {"folder": "pics"}}
SCRATCH = {**MINIMAL, "mode": "full", "model": {"width": 32, "heads": 2}}
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


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("a: [1", "is not valid YAML"),
        ("- a", "found a list"),
        ("", "found nothing"),
        ("hello", "found text"),
        ("output: 2026-13-01", "is not valid YAML: month must be in 1..12"),
        ("steps: !!int x", "is not valid YAML"),
        ("steps: !!bool x", "is not valid YAML"),
        ("steps: !!timestamp x", "is not valid YAML"),
        ("steps: " + "9" * 5000, "is not valid YAML"),
        ("a: " + "[" * 5000, "is not valid YAML"),
        ("? [a]\n: b", "is not valid YAML"),
        ("steps: 1\nseed: 1\nsteps: 2", "is not valid YAML: the key 'steps' is there twice"),
        ("data: {folder: a, folder: b}", "the key 'folder' is there twice"),
        ("model: a\nmodel: b", "the key 'model' is there twice (line 2, column 1)"),
        ("data:\n\tfolder: a", "(line 2, column 1); YAML takes spaces, not tabs"),
        ("model m\noutput: o", "(line 2, column 7); look for a missing colon"),
        ("model: a\n---\nmodel: b", "leave out the line ---"),
        ("model: m\0", r"the character '\x00' (place 9) is not allowed; remove it"),
    ],
)
def test_a_file_that_is_no_mapping_is_named(refusal, text, match):
    message = refusal(text)
    assert "run.yaml" in message
    assert match in message


def test_a_file_that_is_no_text_is_named(tmp_path):
    (tmp_path / "run.yaml").write_bytes(b"\xff\xfe\x00model")
    with pytest.raises(ConfigError, match=r"run\.yaml is not text in UTF-8 .byte 1.; save it as UTF-8"):
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
        (
            {"flow": {"zzz": 1}},
            "flow.zzz",
            "keys here: scheme, logit_mean, logit_std, mode_scale, shift, shift_resolution",
        ),
        ({"optimizer": {"lr": 1e-3}}, "optimizer.lr", "did you mean 'learning_rate'?"),
        ({"max_train_steps": 5}, "max_train_steps", "did you mean 'steps'?"),
        ({"train_batch_size": 5}, "train_batch_size", "did you mean 'batch_size'?"),
        ({"learning_rate": 5}, "learning_rate", "did you mean 'optimizer.learning_rate'?"),
        ({"data": {"mix": [{"folder": "p"}, {"path": "p", "folder": "p"}]}}, "data.mix.1.path", "mean 'folder'?"),
        ({"data": {"mix": [{"folder": "p", "foo": 1}]}}, "data.mix.0.foo", "keys here: source, folder, dataset"),
        ({"data": {"mix": [{"folder": "p", "flip": 1}]}}, "data.mix.0.flip", "keys here: source, folder, dataset"),
        ({"data": {"folder": "p", "image_column": "a"}}, "data.image_column", "did you mean 'picture_column'?"),
        ({"optimizer": {"learning_rates": {"lroa": 1}}}, "optimizer.learning_rates.lroa", "did you mean 'lora'?"),
        ({"lora": {"r": 4}}, "lora.r", "did you mean 'rank'?"),
        ({"lora": {"target_modules": []}}, "lora.target_modules", "did you mean 'targets'?"),
        ({"ema": {"ema_decay": 0.9}}, "ema.ema_decay", "did you mean 'decay'?"),
        ({"validation": {"validation_prompt": "x"}}, "validation.validation_prompt", "did you mean 'prompts'?"),
        ({"points": {"flow": {"shfit": 1}}}, "points.flow.shfit", "did you mean 'shift'?"),
        ({"mode": "full", "model": {"name": "x"}}, "model.name", "keys here: width, heads"),
        ({"mode": "full", "model": {"sizes": "x"}}, "model.sizes", "keys here: width, heads"),
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
        ({"optimizer": {"learning_rates": {"adapter": True}}}, r"optimizer\.learning_rates\.adapter: give a number"),
        ({"flow": {"shift": True}}, r"flow\.shift: give a number, not true or false"),
        ({"optimizer": {"betas": [True, 0.9]}}, r"optimizer\.betas: give a number, not true or false"),
        ({"data": {"folder": "p", "background": [True, 0, 0]}}, r"data\.background: give a number, not true or false"),
        ({"data": {"mix": [{"folder": "p", "repeats": True}]}}, r"data\.mix\.0\.repeats: give a number, not true"),
        ({"data": {"mix": ["p"]}}, r"data\.mix\.0: give settings, .*keys here: source, folder, .*got 'p'"),
        ({"data": {"mix": {"folder": "p"}}}, r"data\.mix: give a list, such as \[a, b\] .got {'folder': 'p'}"),
        (
            {"lora": True},
            r"lora: give settings, such as {key: value}, or {} for the defaults; keys here: rank, .*got True",
        ),
        ({"ema": 0.99}, r"ema: give settings, .*keys here: decay, warmup .got 0\.99"),
        ({"validation": "a cat"}, r"validation: give settings, .*keys here: prompts, .*got 'a cat'"),
        ({"validation": {"prompts": 3}}, r"validation\.prompts: give a list, such as \[a, b\] .got 3"),
        ({"thaw": "norms"}, r"thaw: give a list, such as \[a, b\] .got 'norms'"),
        ({"thaw": ["norm"]}, r"thaw\.0: Input should be 'norms' or 'biases' .got 'norm'"),
        ({"trackers": ["mlflow"]}, r"trackers\.0: Input should be 'tensorboard' or 'wandb' .got 'mlflow'"),
        ({"optimizer": {"settings": [1]}}, r"optimizer\.settings: give settings, such as {key: value}, .*got \[1\]"),
        (
            {"optimizer": {"settings": {"eps": [1]}}},
            r"optimizer\.settings\.eps: Input should be a valid number or a valid integer or .*got \[1\]",
        ),
        (
            {"optimizer": {"settings": {"float": [1]}}},
            r"optimizer\.settings\.float: Input should be a valid number or",
        ),
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


@pytest.mark.parametrize("blank", ["", "  "])
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda blank: {"model": blank}, "model: is empty; give a hub id, a folder, or the sizes"),
        (lambda blank: {"output": blank}, "output: is empty; give a path, such as . for the current folder"),
        (lambda blank: {"data": {"folder": blank}}, "data.folder: is empty; give a path"),
        (lambda blank: {"data": {"folder": "p", "cache": blank}}, "data.cache: is empty; give a path"),
        (
            lambda blank: {"data": {"folder": "p", "caption_column": blank}},
            "data.caption_column: is empty; give a name",
        ),
        (lambda blank: {"data": {"source": "shards", "shards": [blank]}}, "data.shards: one of them is empty"),
        (lambda blank: {"data": {"source": "dataset", "dataset": blank}}, "source 'dataset' needs dataset"),
        (lambda blank: {"push_to_hub": blank}, "push_to_hub: is empty; give a name, or leave it out"),
    ],
)
def test_what_is_empty_is_named_with_the_way_out(refusal, blank, change, expected):
    assert expected in refusal({**MINIMAL, **change(blank)})


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"data": {"folder": "p", "repeats": 1e300}}, "data.repeats: give at most 10,000, since an epoch is laid out"),
        ({"data": {"mix": [{"folder": "p", "repeats": 1e300}]}}, "data.mix.0.repeats: give at most 10,000"),
        (
            {"data": {"mix": [{"folder": "p", "weight": 1e300}]}},
            "data.mix.0.weight: too large; give a number of at most",
        ),
        ({"steps": 2**32}, "steps: too large; give a number below 4294967296"),
        ({"steps": 1e300}, "steps: too large; give a number below 4294967296"),
        ({"data": {"folder": "p", "held_out": 10**30}}, "data.held_out: too large"),
        ({"optimizer": {"learning_rate": 1e31}}, "optimizer.learning_rate: too large; give a number of at most 1e+30"),
        ({"output": "a\0b"}, "output: has a NUL character in it"),
        ({"output": 5}, "output: give a path as text (got 5)"),
        ({"steps": None}, "(got null, or nothing after the colon)"),
    ],
)
def test_what_nothing_can_be_done_with_is_refused(refusal, change, expected):
    assert expected in refusal({**MINIMAL, **change})


def test_a_byte_order_mark_is_no_fault(tmp_path):
    (tmp_path / "run.yaml").write_bytes(b"\xef\xbb\xbf" + b"model: m\noutput: o\ndata: {folder: p}")
    assert read_config(tmp_path / "run.yaml").model == "m"


@pytest.mark.parametrize("field", ["model", "output", "data"])
def test_what_must_be_given_is_named(refusal, field):
    values = {key: value for key, value in MINIMAL.items() if key != field}
    assert f"  {field}: missing" in refusal(values)


def test_a_folder_source_needs_its_folder(refusal, read):
    assert "data: source 'folder' needs folder" in refusal({**MINIMAL, "data": {}})
    assert read({**MINIMAL, "data": {"source": "openmoji"}}).data.folder is None


def test_probe_without_adapter_is_refused_with_every_way_out(refusal):
    message = refusal({**MINIMAL, "adapter": None})
    assert "mode 'probe'" in message
    assert "set adapter: {}, lora: {} or mode: full" in message


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


def test_a_long_value_is_shortened(refusal):
    message = refusal({**MINIMAL, "steps": "x" * 10_000})
    assert "…" in message
    assert len(message) < 500


def test_every_fault_is_listed_at_once(refusal):
    message = refusal({**MINIMAL, "steps": 0, "stps": 1, "optimizer": {"lr": 1}})
    assert len(message.splitlines()) == 4
    assert all(field in message for field in ("steps: ", "stps: ", "optimizer.lr: "))


@pytest.mark.parametrize("spelling", ["precision=no", "precision=false", "precision='no'"])
def test_full_precision_can_be_asked_for_in_the_words_of_our_own_messages(spelling):
    assert read_config(CONFIGS / "sd3_medium_probe.yaml", [spelling]).precision == "no"


def test_what_no_key_is_called_elsewhere_is_a_key_here():
    for section in SECTIONS:
        assert not set(section.also_called) & set(section.model_fields)
        for name in section.also_called.values():
            field, *inner = name.split(".")
            assert field in section.model_fields
            if inner:  # of a section
                parts = {kind for kind in SECTIONS if kind.__name__ in str(section.model_fields[field].annotation)}
                assert inner[0] in next(iter(parts)).model_fields


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
