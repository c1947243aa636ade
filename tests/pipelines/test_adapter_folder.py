"""Several adapters in a pipeline's folder: kept exactly, never mixed, and refused when a save was broken off."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import mmpreproj
from mmpreproj import PreProjConfig
from mmpreproj.patching.files import format as adapter_files
from mmpreproj.patching.hooks import layer_of
from mmpreproj.patching.lookup import patched_attentions
from mmpreproj.pipelines import PreProjSD3Pipeline, adapter_folder
from mmpreproj.pipelines.adapter_folder import load_adapters, save_adapters

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CONFIGS = {
    "style": PreProjConfig(),
    "b": PreProjConfig(share="stream", blocks=[1]),
    "third": PreProjConfig(skip=False),
}


def weights_of(model):
    return {key: value.clone() for key, value in mmpreproj.named_parameters(model)}


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(value, second[key]) for key, value in first.items())


def tree(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def state(model):
    """Everything about a model's adapters that a folder keeps."""
    names = mmpreproj.adapters(model)
    order = {path: list(layer_of(attention).adapters) for path, attention in patched_attentions(model)}
    return set(names), order, mmpreproj.scales(model), {name: mmpreproj.is_enabled(model, name) for name in names}


@pytest.fixture
def make_several(make_pixel_pipeline, shake):
    """Build a pipeline with three adapters of different kinds, scales and switches."""

    def make(seed: int = 2):
        pipe = make_pixel_pipeline(patched=False)
        for name, config in CONFIGS.items():
            mmpreproj.patch(pipe.transformer, config, name=name)
        shake(pipe.transformer, seed=seed)
        mmpreproj.set_scale(pipe.transformer, {"style": [0.1, 1 / 3], "b": -0.7})
        mmpreproj.disable(pipe.transformer, "third")
        return pipe

    return make


@pytest.fixture
def base(make_pixel_pipeline):
    return make_pixel_pipeline(patched=False).transformer


# --- there and back --------------------------------------------------------------------------------------------------


def test_names_order_scales_switches_and_weights_come_back(make_several, draw, tmp_path):
    pipe = make_several()
    before = state(pipe.transformer)
    assert list(before[1].values()) == [["style", "third"], ["style", "b", "third"]]
    assert before[2]["style"][1] == 1 / 3
    pipe.save_pretrained(tmp_path / "model")
    loaded = PreProjSD3Pipeline.from_pretrained(tmp_path / "model")
    assert state(loaded.transformer) == before == state(pipe.transformer)
    assert same(weights_of(loaded.transformer), weights_of(pipe.transformer))
    np.testing.assert_allclose(draw(loaded), draw(pipe), atol=1e-5)
    mmpreproj.enable(loaded.transformer)
    assert not np.allclose(draw(loaded), draw(pipe), atol=1e-3)


@pytest.mark.parametrize("change", ["name", "scale", "switch"])
def test_one_adapter_keeps_its_name_scale_and_switch_too(make_pixel_pipeline, draw, tmp_path, change):
    pipe = make_pixel_pipeline(patched=False)
    mmpreproj.patch(pipe.transformer, name="style" if change == "name" else "default")
    if change == "scale":
        mmpreproj.set_scale(pipe.transformer, {1: 0.25})
    if change == "switch":
        mmpreproj.disable(pipe.transformer)
    pipe.save_pretrained(tmp_path / "model")
    loaded = PreProjSD3Pipeline.from_pretrained(tmp_path / "model")
    assert state(loaded.transformer) == state(pipe.transformer)
    np.testing.assert_allclose(draw(loaded), draw(pipe), atol=1e-5)


def test_the_default_adapter_alone_lies_in_the_folder_itself(make_pixel_pipeline, tmp_path):
    make_pixel_pipeline().save_pretrained(tmp_path / "model")
    files = {path.name for path in (tmp_path / "model" / "preproj").iterdir()}
    assert files == {"adapter_config.json", "adapter_model.safetensors"}


def test_each_sub_folder_is_an_adapter_of_its_own(make_several, base, tmp_path):
    pipe = make_several()
    pipe.save_pretrained(tmp_path / "model")
    report = mmpreproj.load(base, tmp_path / "model" / "preproj" / "b", name="mine")
    assert report.blocks == (1,)
    expected = {key: value for key, value in weights_of(pipe.transformer).items() if ".b." in key}
    assert same({key.replace(".mine.", ".b."): value for key, value in weights_of(base).items()}, expected)


def test_a_loaded_pipeline_saves_the_same_again(make_several, tmp_path):
    make_several().save_pretrained(tmp_path / "first")
    PreProjSD3Pipeline.from_pretrained(tmp_path / "first").save_pretrained(tmp_path / "second")
    first, second = tmp_path / "first" / "preproj", tmp_path / "second" / "preproj"
    assert (second / "adapters.json").read_bytes() == (first / "adapters.json").read_bytes()
    for name in CONFIGS:
        weights = [load_file(folder / name / "adapter_model.safetensors") for folder in (first, second)]
        assert same(*weights)


# --- one save over another -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("second", ["single", "several", "fewer", "none"])
@pytest.mark.parametrize("first", ["single", "several"])
def test_nothing_of_an_earlier_save_is_left(make_pixel_pipeline, make_several, tmp_path, first, second):
    def make(kind, seed):
        if kind in ("single", "none"):
            return make_pixel_pipeline(patched=kind == "single")
        pipe = make_several(seed)
        if kind == "fewer":
            mmpreproj.unpatch(pipe.transformer, "style")
        return pipe

    pipe = make(second, 9)
    make(first, 3).save_pretrained(tmp_path / "model")
    pipe.save_pretrained(tmp_path / "model")
    pipe.save_pretrained(tmp_path / "fresh")
    assert tree(tmp_path / "model" / "preproj") == tree(tmp_path / "fresh" / "preproj")
    assert not [path.name for path in (tmp_path / "model").iterdir() if path.name.startswith(".")]
    assert (tmp_path / "model" / "preproj").exists() == (second != "none")


class BrokenOffError(Exception):
    """Stands for a kill."""


@pytest.mark.parametrize("second", ["single", "several"])
@pytest.mark.parametrize("first", ["single", "several", "none"])
def test_a_save_broken_off_anywhere_leaves_the_old_the_new_or_an_error(
    make_pixel_pipeline, make_several, tmp_path, monkeypatch, first, second
):
    """Break the save off before each move and each removal of a file in turn."""
    makers = {"single": lambda seed: make_pixel_pipeline(), "several": make_several}
    old = makers[first](3).transformer if first != "none" else None
    new = makers[second](9).transformer
    if first == second == "single":
        with torch.no_grad():
            next(iter(mmpreproj.parameters(new))).add_(1)
    replace, unlink = adapter_folder.os.replace, adapter_folder.Path.unlink
    outcomes, after = [], 0
    while True:
        folder = tmp_path / f"{after}" / "preproj"
        if old is not None:
            save_adapters(old, folder)
        left = [after]

        def count(function, left=left):
            def counted(*args, **kwargs):
                if left[0] == 0:
                    raise BrokenOffError
                left[0] -= 1
                return function(*args, **kwargs)

            return counted

        with monkeypatch.context() as patched:
            patched.setattr(adapter_folder.os, "replace", count(replace))
            patched.setattr(adapter_folder.Path, "unlink", count(unlink))
            patched.setattr(adapter_files.os, "replace", adapter_folder.os.replace)
            try:
                save_adapters(new, folder)
                finished = True
            except BrokenOffError:
                finished = False
        outcomes.append(outcome(folder, make_pixel_pipeline(patched=False).transformer, old, new))
        if finished:
            break
        after += 1
    assert after >= 2
    assert outcomes[-1] == "new"
    order = ["old", "refused", "new"]
    assert [order.index(found) for found in outcomes] == sorted(order.index(found) for found in outcomes)


def outcome(folder, model, old, new):
    """Say which adapters a folder gives; fail if they are a mixture."""
    home = adapter_folder.find_adapter(folder.parent, {})
    if home is None:
        assert old is None  # nothing was there before either
        return "old"
    try:
        load_adapters(model, home)
    except (ValueError, FileNotFoundError):
        assert not mmpreproj.is_patched(model)
        return "refused"
    for name, expected in (("old", old), ("new", new)):
        if expected is not None and state(model) == state(expected) and same(weights_of(model), weights_of(expected)):
            return name
    pytest.fail("a mixture was loaded")


def test_a_folder_whose_list_is_missing_says_that_saving_was_broken_off(make_several, base, tmp_path):
    make_several().save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "preproj" / "adapters.json").unlink()
    with pytest.raises(ValueError, match=r"holds the adapters b, style, third, but no adapters\.json.*broken off"):
        PreProjSD3Pipeline.from_pretrained(tmp_path / "model")


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["a/b", "a\\b", "/etc", "nul", "COM1", " a", "a ", "a:b", "a\nb", "a\0", "*", "~", "x" * 65, "é̂", "$HOME"]
)
def test_names_that_cannot_be_folders_are_refused_before_anything_is_written(make_pixel_pipeline, tmp_path, name):
    pipe = make_pixel_pipeline()
    mmpreproj.patch(pipe.transformer, name=name)
    with pytest.raises(ValueError, match=r"is saved in a folder of its name, which .*; carry it under another name"):
        pipe.save_pretrained(tmp_path / "model")
    assert not list(tmp_path.rglob("adapter*")) and not (tmp_path / "model").exists()


@pytest.mark.parametrize("name", ["Style-2", "_x", "a b", "ü", "画风", "7"])
def test_ordinary_names_are_folders(make_pixel_pipeline, tmp_path, name):
    pipe = make_pixel_pipeline(patched=False)
    try:
        mmpreproj.patch(pipe.transformer, name=name)
    except ValueError:
        pytest.skip("no name of an adapter")
    pipe.save_pretrained(tmp_path / "model")
    assert mmpreproj.adapters(PreProjSD3Pipeline.from_pretrained(tmp_path / "model").transformer) == (name,)


def test_names_that_differ_in_case_alone_are_refused(make_pixel_pipeline, tmp_path):
    pipe = make_pixel_pipeline()
    mmpreproj.patch(pipe.transformer, name="Default")
    with pytest.raises(ValueError, match=r"'Default' .* which differs from 'default' in case alone"):
        pipe.save_pretrained(tmp_path / "model")


def test_an_adapter_that_is_not_finite_leaves_the_earlier_save(make_several, tmp_path):
    pipe = make_several()
    pipe.save_pretrained(tmp_path / "model")
    before = tree(tmp_path)
    with torch.no_grad():
        list(mmpreproj.parameters(pipe.transformer, "third"))[-1].fill_(float("nan"))
    with pytest.raises(ValueError, match="NaN or infinite"):
        pipe.save_pretrained(tmp_path / "model")
    assert tree(tmp_path) == before
    with pytest.raises(ValueError, match="NaN or infinite"):
        pipe.save_pretrained(tmp_path / "new")
    assert not (tmp_path / "new").exists()


def edit(change):
    def apply(folder):
        path = folder / "adapters.json"
        values = json.loads(path.read_text())
        change(values)
        path.write_text(json.dumps(values))

    return apply


def entry(change):
    return edit(lambda values: change(values["adapters"]))


def stranger(folder):
    path = folder / "third" / "adapter_model.safetensors"
    save_file({**load_file(path), "stranger": torch.zeros(1)}, path)


@pytest.mark.parametrize(
    ("damage", "error", "match"),
    [
        (lambda folder: (folder / "adapters.json").write_text("{"), ValueError, r"adapters\.json is damaged"),
        (lambda folder: (folder / "adapters.json").write_bytes(b"\xff"), ValueError, r"adapters\.json is damaged"),
        (lambda folder: (folder / "adapters.json").write_text("[]"), ValueError, r"adapters\.json is damaged"),
        (edit(lambda values: values.update(format_version=2)), ValueError, "format version 2, expected 1"),
        (edit(lambda values: values.update(adapters={})), ValueError, "lists no adapter"),
        (entry(lambda of: of["b"].update(enabled="no")), ValueError, "enabled must be true or false"),
        (entry(lambda of: of["b"]["scales"].update({"1": "x"})), ValueError, "scale must be a number"),
        (entry(lambda of: of["b"]["scales"].update({"1": float("inf")})), ValueError, "must be finite"),
        (entry(lambda of: of["b"]["scales"].update({"5": 1.0})), ValueError, r"not on blocks \[5\]"),
        (entry(lambda of: of.update({"../x": of["b"]})), ValueError, "of its name"),
        (entry(lambda of: of.update(x=of["b"])), FileNotFoundError, "preproj/x"),
        (lambda folder: shutil.rmtree(folder / "third"), FileNotFoundError, "preproj/third"),
        (stranger, ValueError, "stranger"),
    ],
)
def test_damage_is_refused_and_leaves_the_model_bare(make_several, base, snapshot, tmp_path, damage, error, match):
    make_several().save_pretrained(tmp_path / "model")
    damage(tmp_path / "model" / "preproj")
    before = snapshot(base)
    with pytest.raises(error, match=match):
        load_adapters(base, tmp_path / "model" / "preproj")
    before.check(base)
    with pytest.raises(error, match=match):
        PreProjSD3Pipeline.from_pretrained(tmp_path / "model")


# --- the hub ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def snapshot_folder(make_several, tmp_path):
    """A pipeline with three adapters as huggingface_hub caches the repository `somebody/tiny`."""
    repository = tmp_path / "cache" / "models--somebody--tiny"
    make_several().save_pretrained(repository / "snapshots" / COMMIT)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    return repository / "snapshots" / COMMIT


def load_from_hub(tmp_path):
    return PreProjSD3Pipeline.from_pretrained("somebody/tiny", cache_dir=tmp_path / "cache", local_files_only=True)


def test_a_cached_hub_model_brings_its_adapters(snapshot_folder, make_several, tmp_path):
    assert state(load_from_hub(tmp_path).transformer) == state(make_several().transformer)


@pytest.mark.parametrize("missing", ["preproj", "preproj/b", "preproj/adapters.json"])
def test_adapters_still_on_the_hub_are_fetched(snapshot_folder, make_several, tmp_path, monkeypatch, missing):
    shutil.copytree(snapshot_folder / "preproj", tmp_path / "on-the-hub")
    path = snapshot_folder / missing
    path.unlink() if path.is_file() else shutil.rmtree(path)
    calls = []

    def download(repo_id, **settings):
        calls.append(settings["allow_patterns"])
        shutil.copytree(tmp_path / "on-the-hub", snapshot_folder / "preproj", dirs_exist_ok=True)
        return str(snapshot_folder)

    monkeypatch.setattr(adapter_folder, "snapshot_download", download)
    assert state(load_from_hub(tmp_path).transformer) == state(make_several().transformer)
    assert calls == [["model_index.json", "preproj/*"]]


@pytest.mark.parametrize(("kind", "carries"), [("none", "none"), ("single", "a single one without a name")])
def test_pushing_over_named_adapters_on_the_hub_is_refused(make_pixel_pipeline, monkeypatch, tmp_path, kind, carries):
    pipe = make_pixel_pipeline(patched=kind == "single")
    pipe.save_pretrained(tmp_path)
    monkeypatch.setattr(adapter_folder, "file_exists", lambda repo_id, path, **_: path == "preproj/adapters.json")
    with pytest.raises(ValueError, match=f"holds named adapters in preproj/, but this pipeline carries {carries};"):
        pipe._upload_folder(tmp_path, "somebody/tiny")
