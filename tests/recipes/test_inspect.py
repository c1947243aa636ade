"""What is inside a saved adapter, read from its two files alone."""

import io
import json
import shutil

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

import mmpreproj
from mmpreproj.patching.config import PreProjConfig
from mmpreproj.patching.positions.settings import Positions
from mmpreproj.recipes.inspect import inspect_adapter
from mmpreproj.recipes.tables import print_summary


@pytest.fixture
def adapter(trained, tmp_path):
    """A copy that may be damaged."""
    return shutil.copytree(trained["probe"][0].saved, tmp_path / "adapter")


def test_the_profile_is_that_of_the_model(trained):
    run, _ = trained["probe"]
    summary, expected = inspect_adapter(run.saved), mmpreproj.profile(run.pipeline.transformer)
    assert len(summary.profile) == len(expected) == 2
    for found, row in zip(summary.profile, expected, strict=True):
        assert (found.block, found.attention, found.weights) == (row.block, row.attention, row.weights)
        for name in ("skip", "skip_initial", "down", "down_initial"):
            assert getattr(found, name) == pytest.approx(getattr(row, name), rel=1e-6), name
        assert found.skip != found.skip_initial


@pytest.mark.parametrize(
    "config",
    [
        PreProjConfig(share="stream", blocks=[0, 2, 10]),
        PreProjConfig(skip=False, blocks={"last": 1}),
        PreProjConfig(pre_projection=False),
        PreProjConfig(dual_attention=False, init="zero"),
        PreProjConfig(blocks=[1], positions=Positions()),
        PreProjConfig(pre_projection=False, skip=False, positions=Positions(text="none")),
        PreProjConfig(pre_projection=False, skip=False, positions=Positions(start="full")),
        PreProjConfig(pre_projection=False, skip=False, mask_padding=True),
    ],
)
def test_every_kind_of_adapter_is_read_in_the_order_of_the_blocks(make_transformer, shake, tmp_path, config):
    transformer = make_transformer("sd35", num_layers=11)
    report = mmpreproj.patch(transformer, config)
    shake(transformer)
    summary = inspect_adapter(mmpreproj.save(transformer, tmp_path / "adapter"))
    expected = mmpreproj.profile(transformer)
    assert [(row.block, row.attention, row.weights) for row in summary.profile] == [
        (row.block, row.attention, row.weights) for row in expected
    ]
    assert str(summary.profile) == str(expected)
    assert summary.parameters == report.parameters
    assert summary.saved.config == config


def test_sizes_and_dtypes_are_those_of_the_file(trained):
    run, _ = trained["probe"]
    summary = inspect_adapter(str(run.saved))
    assert summary.parameters == sum(parameter.numel() for parameter in mmpreproj.parameters(run.pipeline.transformer))
    assert summary.dtypes == ("float32",)
    assert summary.bytes == (run.saved / "adapter_model.safetensors").stat().st_size
    assert (summary.saved.base.width, summary.saved.base.depth, summary.saved.base.heads) == (32, 2, 2)


def test_the_adapter_is_found_in_pipelines_runs_and_checkpoints(trained):
    probe, full = trained["probe"][0], trained["full"][0]
    assert inspect_adapter(probe.config.output).folder == probe.saved
    assert inspect_adapter(full.config.output).folder == full.saved / "preproj"
    assert inspect_adapter(full.saved).folder == full.saved / "preproj"
    checkpoints = full.config.output / "checkpoints"
    assert inspect_adapter(checkpoints / "step-000002").folder == checkpoints / "step-000002" / "preproj"


def test_the_table_shows_base_blocks_sizes_and_norms(trained, base):
    screen = io.StringIO()
    summary = inspect_adapter(trained["probe"][0].saved)
    print_summary(summary, Console(file=screen, width=200))
    text = screen.getvalue()
    for expected in (
        "SD3Transformer2DModel, width 32, depth 2, 2 heads",
        str(base),
        "2 of 2: 0, 1",
        f"{summary.parameters:,} (float32",
        "expansion=1.25",
        f"written by  mmpreproj {mmpreproj.__version__}",
    ):
        assert expected in text
    for row in summary.profile:
        assert f"{row.skip:.4f} (from {row.skip_initial:.4f})" in text


def test_the_length_of_texts_is_shown_as_far_as_it_is_known(trained, transformer, tmp_path):
    def shown(folder):
        screen = io.StringIO()
        print_summary(inspect_adapter(folder), Console(file=screen, width=200))
        (line,) = [line for line in screen.getvalue().splitlines() if line.startswith("texts")]
        return " ".join(line.split())

    assert shown(trained["probe"][0].saved) == "texts 6 tokens at most (max_sequence_length)"
    mmpreproj.patch(transformer)
    assert shown(mmpreproj.save(transformer, tmp_path / "adapter")) == "texts not recorded"


def test_brackets_in_a_folders_name_are_no_markup(transformer, tmp_path):
    folder = tmp_path / "a [bold] name [/bold]"
    mmpreproj.patch(transformer)
    mmpreproj.save(transformer, folder)
    screen = io.StringIO()
    print_summary(inspect_adapter(folder), Console(file=screen, width=200))
    assert "a [bold] name [/bold]" in screen.getvalue()


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*nowhere"):
        inspect_adapter(tmp_path / "nowhere")


def test_a_folder_without_an_adapter_is_refused(base):
    with pytest.raises(FileNotFoundError, match=r"holds no adapter_config\.json"):
        inspect_adapter(base)


def test_missing_weights_are_refused(adapter):
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"holds no adapter_model\.safetensors"):
        inspect_adapter(adapter)


@pytest.mark.parametrize("text", ["{", "[]", '{"peft_type": "LORA"}'])
def test_a_damaged_or_foreign_config_is_refused(adapter, text):
    (adapter / "adapter_config.json").write_text(text)
    with pytest.raises(ValueError, match=r"adapter_config\.json (is not valid JSON|was not written by mmpreproj)"):
        inspect_adapter(adapter)


def test_an_incomplete_config_is_refused(adapter):
    values = json.loads((adapter / "adapter_config.json").read_text())
    del values["base"]
    (adapter / "adapter_config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match="is incomplete or has a bad value"):
        inspect_adapter(adapter)


def test_truncated_weights_are_refused(adapter):
    path = adapter / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"adapter_model\.safetensors is damaged"):
        inspect_adapter(adapter)


@pytest.mark.parametrize(
    "key", ["lora_A.weight", "transformer_blocks.0.attn.preproj.other.shared.map.weight", "x.preproj"]
)
def test_foreign_weights_are_refused_with_their_key(adapter, key):
    path = adapter / "adapter_model.safetensors"
    save_file({**load_file(path), key: torch.zeros(2, 2)}, path)
    with pytest.raises(ValueError, match=rf"adapter_model\.safetensors is not of an mmpreproj adapter.*{key}"):
        inspect_adapter(adapter)


def test_no_weights_at_all_are_refused(adapter):
    save_file({}, adapter / "adapter_model.safetensors")
    with pytest.raises(ValueError, match="it holds no weights"):
        inspect_adapter(adapter)


@pytest.fixture
def several(make_several):
    return make_several() / "preproj"


def test_several_adapters_are_named_with_the_way_to_see_one(several):
    for folder in (several, several.parent):
        with pytest.raises(ValueError, match=r"several adapters, style, b; name the folder of one.*preproj.style"):
            inspect_adapter(folder)
    for name in ("style", "b"):
        assert inspect_adapter(several / name).folder == several / name


def test_a_lone_adapter_with_a_name_is_found(make_several):
    folder = make_several(("style",))
    assert inspect_adapter(folder).folder == folder / "preproj" / "style"
