"""Checkpoints: whole or not there, the newest few kept, loadable by what they are for."""

import pytest
import torch
from diffusers import SD3Transformer2DModel

import mmpreproj
from mmpreproj.training.checkpoints import checkpoints, write_checkpoint, write_weights


@pytest.fixture
def patched(make_transformer, shake):
    transformer = make_transformer()
    mmpreproj.patch(transformer)
    shake(transformer)
    return transformer


@pytest.fixture
def write(patched, tmp_path):
    def run(step, *, mode="probe", keep=2):
        return write_checkpoint(patched, tmp_path / "checkpoints", step=step, mode=mode, keep=keep)

    return run


def same_adapter(first, second):
    pairs = zip(mmpreproj.named_parameters(first), mmpreproj.named_parameters(second), strict=True)
    return all(name == other and torch.equal(value, found) for (name, value), (other, found) in pairs)


@pytest.mark.parametrize("keep", [1, 2, 4])
def test_the_newest_few_are_kept_oldest_first(write, tmp_path, keep):
    for step in (5, 50, 500, 5000):
        write(step, keep=keep)
    expected = ["step-000005", "step-000050", "step-000500", "step-005000"][-keep:]
    assert [path.name for path in checkpoints(tmp_path / "checkpoints")] == expected


def test_only_folders_of_checkpoints_are_listed(write, tmp_path):
    write(1)
    (tmp_path / "checkpoints" / "step-notes.txt").write_text("mine")
    (tmp_path / "checkpoints" / "other").mkdir()
    assert [path.name for path in checkpoints(tmp_path / "checkpoints")] == ["step-000001"]
    assert checkpoints(tmp_path / "nowhere") == []


def test_a_step_written_again_replaces_the_first(write, patched, make_transformer, shake):
    write(1)
    shake(patched, seed=9)
    folder = write(1)
    other = make_transformer()
    mmpreproj.load(other, folder)
    assert same_adapter(patched, other)


def test_a_probe_checkpoint_is_an_adapter(write, patched, make_transformer, predict):
    other = make_transformer()
    mmpreproj.load(other, write(1))
    assert same_adapter(patched, other)
    assert torch.equal(predict(other), predict(patched))


def test_a_full_checkpoint_is_a_stock_transformer_and_an_adapter(write, patched, make_transformer, predict):
    before = predict(patched)
    folder = write(1, mode="full")
    assert torch.equal(predict(patched), before)
    stock, notes = SD3Transformer2DModel.from_pretrained(folder / "transformer", output_loading_info=True)
    assert not (notes["missing_keys"] or notes["unexpected_keys"])
    base = make_transformer().state_dict()
    assert all(torch.equal(value, base[key]) for key, value in stock.state_dict().items())
    mmpreproj.load(stock, folder / "preproj")
    assert torch.equal(predict(stock.eval()), predict(patched))


def test_an_unpatched_model_is_written_whole_in_mode_full(make_transformer, tmp_path, predict):
    transformer = make_transformer()
    write_weights(transformer, tmp_path / "weights", mode="full")
    assert [path.name for path in (tmp_path / "weights").iterdir()] == ["transformer"]
    stock = SD3Transformer2DModel.from_pretrained(tmp_path / "weights" / "transformer").eval()
    assert torch.equal(predict(stock), predict(transformer))


def test_where_the_base_is_goes_into_the_adapters_file(patched, tmp_path):
    folder = write_checkpoint(patched, tmp_path, step=1, mode="probe", keep=1, base_model="some/base")
    assert '"name_or_path": "some/base"' in (folder / "adapter_config.json").read_text()


@pytest.mark.parametrize("mode", ["probe", "full"])
def test_a_failure_half_way_leaves_no_trace_and_keeps_the_older_ones(write, patched, tmp_path, make_transformer, mode):
    write(1, keep=1)
    with torch.no_grad():  # in mode full the base has been written when the adapter is refused
        next(mmpreproj.parameters(patched)).fill_(float("nan"))
    with pytest.raises(ValueError, match="holds NaN"):
        write(2, mode=mode, keep=1)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000001"]
    mmpreproj.load(make_transformer(), tmp_path / "checkpoints" / "step-000001")


def test_a_full_disk_leaves_no_trace(write, tmp_path, monkeypatch):
    from mmpreproj.patching.files import format as adapter_files

    def fail(weights, path, **rest):
        with open(path, "wb") as file:
            file.write(b"half")
        raise OSError(28, "No space left on device")

    write(1)
    monkeypatch.setattr(adapter_files, "save_file", fail)
    with pytest.raises(OSError, match=r"No space left on device: .*adapter_model\.safetensors"):
        write(2)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000001"]


def test_only_folders_that_a_run_wrote_count_as_checkpoints_and_in_the_order_of_their_steps(tmp_path):
    for name in ("step-000002", "step-1000000", "step-999999", "step-000002-best", "step-x"):
        (tmp_path / name).mkdir()
    assert [path.name for path in checkpoints(tmp_path)] == ["step-000002", "step-999999", "step-1000000"]
