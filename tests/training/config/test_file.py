"""The training configuration as a file: what is read, what is written, where it is found."""

from pathlib import Path

import pytest

from mmpreproj.patching.config import PreProjConfig
from mmpreproj.patching.points.settings import PointPathConfig
from mmpreproj.training.config import ConfigError, ScratchModel, TrainConfig, read_config, write_config

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
SHIPPED = ("furniture_points.yaml", "quickstart.yaml", "sd3_medium_probe.yaml", "sd35_medium_probe.yaml")
FROM_NOTHING = ("furniture_points.yaml", "quickstart.yaml")
MINIMAL = {"model": "some/base", "output": "runs/x", "data": {"folder": "pics"}}
SCRATCH = {**MINIMAL, "mode": "full", "model": {"width": 32, "heads": 2}}


# --- reading and writing ---------------------------------------------------------------------------------------------


def test_every_shipped_file_is_a_configuration():
    # Studies, probe_*.yaml, are read in tests/language/test_config.py.
    assert {path.name for path in CONFIGS.glob("*.yaml") if not path.name.startswith("probe_")} == set(SHIPPED)
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
        optimizer={"betas": (0.5, 0.6), "learning_rates": {"adapter": 1e-7}},
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


def test_yaml_may_merge_a_section_and_change_a_value_of_it(read):
    text = "model: m\noutput: o\ndata: {mix: [&a {folder: p, repeats: 2}, {<<: *a, folder: q}]}"
    assert [(str(part.folder), part.repeats) for part in read(text).data.mix] == [("p", 2), ("q", 2)]


# --- finding ---------------------------------------------------------------------------------------------------------


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


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no configuration file .*nowhere\.yaml"):
        read_config(tmp_path / "nowhere.yaml")
