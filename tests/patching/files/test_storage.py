import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from torch import nn

import mmpreproj
from mmpreproj import PreProjConfig
from mmpreproj.files import write_atomically
from mmpreproj.patching.families import find_family

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
FILES = ["README.md", CONFIG, WEIGHTS, "profile.png"]


@pytest.fixture
def saved(make_transformer, style, shake, tmp_path) -> Path:
    """A folder with a trained adapter in it, made for the tiny transformer of this style."""
    model = make_transformer(style)
    mmpreproj.patch(model)
    shake(model)
    return mmpreproj.save(model, tmp_path / "adapter")


def adapter_values(model: nn.Module) -> dict[str, torch.Tensor]:
    """The adapter's weights by the names they have in a file, without that of the adapter."""
    name = mmpreproj.adapters(model)[0]
    named = mmpreproj.named_parameters(model)
    return {key.replace(f".adapters.{name}.", "."): value.detach().clone() for key, value in named}


def edit_config(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    values = json.loads((folder / CONFIG).read_text())
    change(values)
    (folder / CONFIG).write_text(json.dumps(values))


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    weights = load_file(folder / WEIGHTS)
    change(weights)
    save_file(weights, folder / WEIGHTS)


# Round trip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "values",
    [
        {},
        {"share": "stream", "blocks": {"last": 1}},
        {"skip": False, "expansion": 0.5, "blocks": [0]},
        {"init": "zero"},
    ],
    ids=str,
)
def test_round_trip_is_bit_equal(make_transformer, style, predict, shake, tmp_path, dtype, values: dict[str, Any]):
    model, other = make_transformer(style).to(dtype), make_transformer(style).to(dtype)
    report = mmpreproj.patch(model, PreProjConfig(**values), name="first")
    shake(model)
    assert mmpreproj.save(model, tmp_path) == tmp_path
    loaded = mmpreproj.load(other, str(tmp_path), name="second")
    assert mmpreproj.adapters(other) == ("second",)
    assert loaded.sites == report.sites
    before, after = adapter_values(model), adapter_values(other)
    assert list(before) == list(after)
    assert all(torch.equal(before[key], after[key]) and after[key].dtype == dtype for key in before)
    assert torch.equal(predict(other), predict(model))
    assert all(parameter.requires_grad for parameter in mmpreproj.parameters(other))


def test_files_are_named_and_filled_as_documented(make_transformer, style, tmp_path, shake):
    model, config = make_transformer(style), PreProjConfig(expansion=1.5, blocks={"last": 2})
    mmpreproj.patch(model, config, name="mine")
    shake(model)
    mmpreproj.save(model, tmp_path / "deep" / "folder", base_model="someone/some-base")
    assert sorted(os.listdir(tmp_path / "deep" / "folder")) == FILES
    values = json.loads((tmp_path / "deep" / "folder" / CONFIG).read_text())
    assert values["format_version"] == 1
    assert (values["library"], values["library_version"]) == ("mmpreproj", mmpreproj.__version__)
    assert values["base"] == {
        "model_class": "SD3Transformer2DModel",
        "width": 32,
        "depth": 2,
        "heads": 2,
        "name_or_path": "someone/some-base",
        "settings": {
            "qk_norm": "rms_norm" if style == "sd35" else None,
            "dual_attention_layers": [0] if style == "sd35" else [],
        },
    }
    assert PreProjConfig.from_dict(values["config"]) == config
    weights = load_file(tmp_path / "deep" / "folder" / WEIGHTS)
    assert "mine" not in " ".join(weights)
    assert weights.keys() == adapter_values(model).keys()
    assert "transformer_blocks.0.attn.preproj.content_skip.shared.map.weight" in weights


def test_name_of_the_adapter_never_enters_a_file(make_transformer, tmp_path):
    for name in ("default", "another"):
        model = make_transformer()
        torch.manual_seed(0)
        mmpreproj.patch(model, name=name)
        mmpreproj.save(model, tmp_path / name)
    for file in FILES:
        assert (tmp_path / "default" / file).read_bytes() == (tmp_path / "another" / file).read_bytes()


@pytest.mark.parametrize(
    ("kept", "wanted"),
    [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float32, torch.float16)],
)
def test_loaded_weights_take_the_dtype_of_the_model(make_transformer, shake, tmp_path, kept, wanted):
    model, other = make_transformer().to(kept), make_transformer().to(wanted)
    mmpreproj.patch(model)
    shake(model)
    mmpreproj.save(model, tmp_path)
    assert {value.dtype for value in load_file(tmp_path / WEIGHTS).values()} == {kept}
    mmpreproj.load(other, tmp_path)
    before, after = adapter_values(model), adapter_values(other)
    assert all(after[key].dtype == wanted and torch.equal(after[key], before[key].to(wanted)) for key in before)


def test_initial_norms_survive(make_transformer, style, shake, tmp_path):
    model, other = make_transformer(style), make_transformer(style)
    mmpreproj.patch(model)
    shake(model)
    expected = mmpreproj.profile(model)
    mmpreproj.save(model, tmp_path / "first")
    mmpreproj.load(other, tmp_path / "first")
    assert mmpreproj.profile(other) == expected
    mmpreproj.save(other, tmp_path / "second")
    assert (tmp_path / "second" / CONFIG).read_text() == (tmp_path / "first" / CONFIG).read_text()


def test_loading_leaves_the_random_state_alone(make_transformer, style, saved):
    model = make_transformer(style)
    before = torch.get_rng_state()
    mmpreproj.load(model, saved)
    assert torch.equal(torch.get_rng_state(), before)


def test_remove_and_load_under_one_name_any_number_of_times(make_transformer, style, saved, predict, snapshot):
    model = make_transformer(style)
    before, outputs = snapshot(model), []
    for _ in range(3):
        mmpreproj.load(model, saved, name="mine")
        outputs.append(predict(model))
        mmpreproj.unpatch(model, "mine")
        before.check(model)
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


def test_subfolder(make_transformer, style, saved):
    report = mmpreproj.load(make_transformer(style), saved.parent, subfolder="adapter")
    assert report.blocks == (0, 1)


def test_loading_leaves_everything_else_alone(make_transformer, style, saved, snapshot):
    model = make_transformer(style).requires_grad_(False)
    model.transformer_blocks[0].train()
    before = snapshot(model)
    mmpreproj.load(model, saved)
    mmpreproj.unpatch(model)
    before.check(model)


# Refusals


@pytest.fixture
def refuses(make_transformer, style, predict, snapshot) -> Callable[..., None]:
    """Check that a load fails with an error that says why, and that the model is exactly what it was."""

    def check(folder: Any, error: type[Exception], match: str, model: nn.Module | None = None, **options: Any) -> None:
        model = make_transformer(style) if model is None else model
        before, output = snapshot(model), predict(model)
        state = torch.get_rng_state()
        with pytest.raises(error, match=match):
            mmpreproj.load(model, folder, **options)
        before.check(model)
        assert torch.equal(predict(model), output)
        assert torch.equal(torch.get_rng_state(), state)

    return check


@pytest.mark.parametrize(
    ("overrides", "found"),
    [
        ({"attention_head_dim": 24, "caption_projection_dim": 48}, "width 48, depth 2, 2 heads"),
        ({"num_layers": 3}, "width 32, depth 3, 2 heads"),
        ({"num_layers": 1}, "width 32, depth 1, 2 heads"),
        ({"attention_head_dim": 8, "num_attention_heads": 4}, "width 32, depth 2, 4 heads"),
    ],
)
@pytest.mark.parametrize("blocks", ["all", [1], {"last": 2}], ids=str)
def test_another_size_is_refused_with_both_named(
    make_transformer, style, tmp_path, refuses, overrides: dict[str, int], found: str, blocks: Any
):
    model = make_transformer(style)
    mmpreproj.patch(model, PreProjConfig(blocks=blocks))
    mmpreproj.save(model, tmp_path)
    match = (
        r"was made for SD3Transformer2DModel of width 32, depth 2, 2 heads, qk_norm .*, dual_attention_layers .*, "
        f"but this model is SD3Transformer2DModel of {found}"
    )
    refuses(tmp_path, ValueError, match, make_transformer(style, **overrides))


def test_another_class_is_refused_with_both_named(make_transformer, style, saved, refuses):
    model = make_transformer(style)
    row = replace(find_family(model), model_class="OtherTransformer")
    match = "was made for SD3Transformer2DModel of .* but this model is OtherTransformer of"
    refuses(saved, ValueError, match, model, family=row)


def test_a_subclass_takes_the_adapter_of_its_class_and_the_other_way_round(make_transformer, style, saved, predict):
    model, other = make_transformer(style), make_transformer(style)
    other.__class__ = type("OtherTransformer", (type(other),), {})
    mmpreproj.load(model, saved)
    mmpreproj.load(other, saved)
    assert torch.equal(predict(other), predict(model))
    mmpreproj.save(other, saved)
    mmpreproj.unpatch(model)
    mmpreproj.load(model, saved)
    assert torch.equal(predict(other), predict(model))


@pytest.mark.parametrize("dual_attention", [True, False])
def test_bases_of_one_size_are_told_apart(make_transformer, tmp_path, refuses, dual_attention: bool):
    """SD3-medium and SD3.5-medium have the same class, width, depth and number of heads."""
    model = make_transformer("sd3")
    mmpreproj.patch(model, PreProjConfig(dual_attention=dual_attention))
    mmpreproj.save(model, tmp_path)
    match = (
        r"made for .* 2 heads, qk_norm None, dual_attention_layers \[\], "
        r"but this model is .* 2 heads, qk_norm 'rms_norm', dual_attention_layers \[0\]"
    )
    refuses(tmp_path, ValueError, match, make_transformer("sd35"))


def test_a_file_that_does_not_tell_the_settings_of_its_base_loads(make_transformer, style, saved, predict):
    model, other = make_transformer(style), make_transformer(style)
    mmpreproj.load(model, saved)
    edit_config(saved, lambda values: values["base"].pop("settings"))
    mmpreproj.load(other, saved)
    assert torch.equal(predict(other), predict(model))


def test_a_model_without_joint_blocks_is_refused(saved):
    model = nn.Linear(4, 4)
    with pytest.raises(TypeError, match="Linear has no attention blocks"):
        mmpreproj.load(model, saved)
    assert list(model.state_dict()) == ["weight", "bias"]


def test_a_patched_model_is_refused(make_transformer, style, saved, refuses):
    model = make_transformer(style)
    mmpreproj.patch(model)
    refuses(saved, ValueError, "already patched under the name 'default'", model)


def test_a_bad_name_is_refused(saved, refuses):
    refuses(saved, ValueError, "name must be a non-empty string without dots", name="a.b")


def test_an_adapter_with_dual_attention_does_not_fit_a_model_without(make_transformer, tmp_path, refuses):
    model = make_transformer("sd35")
    mmpreproj.patch(model)
    mmpreproj.save(model, tmp_path)
    match = r"dual_attention_layers \[0\], but this model is .* dual_attention_layers \[\]"
    refuses(tmp_path, ValueError, match, make_transformer("sd3"))


def test_truncated_weights_are_refused(saved, refuses):
    content = (saved / WEIGHTS).read_bytes()
    for length in (0, 5, 100, len(content) // 2, len(content) - 1):
        (saved / WEIGHTS).write_bytes(content[:length])
        refuses(saved, ValueError, rf"{WEIGHTS} is damaged or not a safetensors file")


def test_weights_of_another_format_are_refused(saved, refuses):
    torch.save({"weight": torch.zeros(2)}, saved / WEIGHTS)
    refuses(saved, ValueError, rf"{WEIGHTS} is damaged or not a safetensors file")


def test_missing_files_are_refused(saved, refuses, tmp_path):
    (saved / WEIGHTS).rename(tmp_path / WEIGHTS)
    refuses(saved, FileNotFoundError, rf"holds no {WEIGHTS}")
    (saved / CONFIG).unlink()
    refuses(saved, FileNotFoundError, rf"holds no {CONFIG}, so it is not an adapter saved by mmpreproj")
    refuses(saved, FileNotFoundError, rf"holds no {CONFIG}", subfolder="nothing-here")


@pytest.mark.parametrize("source", ["nothing-here", "nobody/nothing-here", "./a/b/c/d", "/a/b"])
def test_a_source_that_is_nowhere_is_refused(refuses, source: str):
    refuses(source, FileNotFoundError, f"no adapter at '{source}': it is no folder, and the hub gives no such")


def test_an_adapter_of_peft_is_refused(saved, refuses):
    LoraConfig(target_modules=["to_q"]).save_pretrained(saved)
    refuses(saved, ValueError, rf"{CONFIG} was not written by mmpreproj but by PEFT \(peft_type 'LORA'\)")


@pytest.mark.parametrize("text", ["[]", "3", '"text"', "null", "{}", '{"library": "other"}'])
def test_a_foreign_config_is_refused(saved, refuses, text: str):
    (saved / CONFIG).write_text(text)
    refuses(saved, ValueError, rf"{CONFIG} was not written by mmpreproj$")


@pytest.mark.parametrize("content", [b"", b"{", b'{"library": "mmpreproj",}', b"\xff\xfe\x00"])
def test_broken_json_is_refused(saved, refuses, content: bytes):
    (saved / CONFIG).write_bytes(content)
    refuses(saved, ValueError, rf"{CONFIG} is not valid JSON .*; the file is damaged")


def test_a_newer_format_is_refused(saved, refuses):
    edit_config(saved, lambda values: values.update(format_version=2, library_version="9.0.0"))
    match = rf"format version 2, this mmpreproj {mmpreproj.__version__} reads 1; it was written by version '9.0.0'"
    refuses(saved, ValueError, match)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda values: values.pop("base"), "'base'"),
        (lambda values: values.pop("config"), "'config'"),
        (lambda values: values["base"].pop("width"), "width"),
        (lambda values: values["base"].update(colour="red"), "colour"),
        (lambda values: values.update(base=None), ""),
        (lambda values: values["base"].update(width="32"), "base.width must be a whole number; got '32'"),
        (lambda values: values["base"].update(settings="abc"), "base.settings must be a mapping; got 'abc'"),
        (
            lambda values: values["initial_norms"]["transformer_blocks.0.attn"]["skip"].update(shared="x"),
            "initial_norms of transformer_blocks.0.attn must be numbers; got 'x'",
        ),
        (lambda values: values.update(config=None), ""),
        (lambda values: values["config"].update(expansion="1.25"), "expansion must be a number above 0; got '1.25'"),
        (lambda values: values["config"].update(expantion=1.25), "did you mean 'expansion'"),
        (lambda values: values["config"].update(blocks="some"), "blocks must be"),
        (lambda values: values.update(initial_norms=None), ""),
        (lambda values: values.update(initial_norms=[]), ""),
        (lambda values: values.update(initial_norms={"transformer_blocks.0.attn": {}}), ""),
    ],
)
def test_an_incomplete_or_bad_config_is_refused(saved, refuses, change: Callable[[dict[str, Any]], Any], match: str):
    edit_config(saved, change)
    refuses(saved, ValueError, rf"{CONFIG} is incomplete or has a bad value.*{match}")


def test_missing_and_surplus_keys_are_refused(saved, refuses):
    whole = load_file(saved / WEIGHTS)
    first = sorted(whole)[0]
    edit_weights(saved, lambda weights: weights.pop(first))
    refuses(
        saved, ValueError, rf"{len(whole) - 1} of {len(whole)} keys match; missing \['{first}'\], not expected \[\]"
    )
    save_file(whole | {"another.weight": torch.zeros(2)}, saved / WEIGHTS)
    refuses(saved, ValueError, rf"{len(whole)} of {len(whole)} keys match; missing \[\].*\['another.weight'\]")
    save_file({f"base_model.{key}": value for key, value in whole.items()}, saved / WEIGHTS)
    refuses(saved, ValueError, rf"does not fit its config: 0 of {len(whole)} keys match")
    save_file({}, saved / WEIGHTS)
    refuses(saved, ValueError, rf"0 of {len(whole)} keys match")


def test_a_wrong_shape_is_refused(saved, refuses):
    last = sorted(load_file(saved / WEIGHTS))[-1]
    edit_weights(saved, lambda weights: weights.update({last: torch.zeros(32, 1)}))  # would broadcast
    refuses(saved, ValueError, rf"{WEIGHTS}: {last} has shape \[32, 1\], expected \[")


def test_weights_beyond_the_range_of_the_model_are_refused(saved, make_transformer, style, refuses):
    last = sorted(load_file(saved / WEIGHTS))[-1]
    edit_weights(saved, lambda weights: weights[last].fill_(1e5))  # infinite in float16
    match = rf"{WEIGHTS}: {last} holds values up to 1e\+05, beyond the range of the model's torch\.float16"
    refuses(saved, ValueError, match, make_transformer(style).half())
    mmpreproj.load(make_transformer(style).bfloat16(), saved)


def test_a_load_that_failed_can_be_repeated_with_the_right_file(saved, make_transformer, style, refuses, predict):
    model, whole = make_transformer(style), (saved / WEIGHTS).read_bytes()
    (saved / WEIGHTS).write_bytes(whole[:100])
    refuses(saved, ValueError, "damaged", model)
    (saved / WEIGHTS).write_bytes(whole)
    mmpreproj.load(model, saved)
    assert mmpreproj.is_patched(model)


# Saving that fails


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_refused_and_the_old_adapter_stays(
    make_transformer, style, saved, predict, value: float
):
    before = {path.name: path.read_bytes() for path in saved.iterdir()}
    model = make_transformer(style)
    mmpreproj.load(model, saved)
    *_, (name, last) = mmpreproj.named_parameters(model)
    with torch.no_grad():
        last[0, 0] = value
    match = rf"{name.replace('adapters.default.', '')} holds NaN or infinite values; nothing was saved"
    with pytest.raises(ValueError, match=match):
        mmpreproj.save(model, saved)
    with pytest.raises(ValueError, match=match):
        mmpreproj.save(model, saved.parent / "new")
    assert not (saved.parent / "new").exists()
    assert {path.name: path.read_bytes() for path in saved.iterdir()} == before
    mmpreproj.load(make_transformer(style), saved)


def test_weights_without_values_are_refused(make_transformer, tmp_path):
    model = make_transformer().to("meta")
    mmpreproj.patch(model)
    with pytest.raises(ValueError, match="is on the meta device and has no values to save"):
        mmpreproj.save(model, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_write_that_breaks_off_leaves_the_old_file(tmp_path):
    path = tmp_path / WEIGHTS
    path.write_text("old")

    def write_half(target: str) -> None:
        Path(target).write_text("ne")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, write_half)
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == [WEIGHTS]
    write_atomically(path, lambda target: Path(target).write_text("new"))
    assert path.read_text() == "new"
    assert [entry.name for entry in tmp_path.iterdir()] == [WEIGHTS]


def test_saving_over_an_adapter_replaces_it(make_transformer, style, saved, shake, predict):
    model, other = make_transformer(style), make_transformer(style)
    mmpreproj.patch(model, PreProjConfig(share="stream", blocks=[0]))
    shake(model, seed=8)
    mmpreproj.save(model, saved)
    mmpreproj.load(other, saved)
    assert torch.equal(predict(other), predict(model))
    assert sorted(os.listdir(saved)) == FILES


def test_saving_changes_nothing_in_the_model(transformer, snapshot, tmp_path):
    mmpreproj.patch(transformer)
    before, state = snapshot(transformer), torch.get_rng_state()
    mmpreproj.save(transformer, tmp_path)
    before.check(transformer)
    assert torch.equal(torch.get_rng_state(), state)


def test_lora_on_all_linear_leaves_the_adapter_alone(transformer, predict, shake, tmp_path):
    mmpreproj.patch(transformer)
    shake(transformer)
    before, keys = predict(transformer), [key for key, _ in mmpreproj.named_parameters(transformer)]
    transformer.add_adapter(LoraConfig(r=2, target_modules="all-linear"))
    assert any(".lora_A." in key for key, _ in transformer.named_parameters())
    assert [key for key, _ in mmpreproj.named_parameters(transformer)] == keys
    assert torch.equal(predict(transformer), before)
    mmpreproj.save(transformer, tmp_path)
    assert not any("lora" in key or "base_layer" in key for key in load_file(tmp_path / WEIGHTS))


def test_loading_onto_a_model_without_weights_is_refused(make_transformer, style, saved):
    with torch.device("meta"):
        empty = make_transformer(style)
    with pytest.raises(ValueError, match="is on the meta device; load the base's weights before"):
        mmpreproj.load(empty, saved)
    assert not mmpreproj.is_patched(empty)


def test_the_base_is_named_by_its_pipeline_and_not_by_the_folder_inside_it(transformer, tmp_path):
    transformer.register_to_config(_name_or_path="some/model/transformer")
    mmpreproj.patch(transformer)
    mmpreproj.save(transformer, tmp_path)
    assert json.loads((tmp_path / CONFIG).read_text())["base"]["name_or_path"] == "some/model"


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_weights_of_a_dtype_that_no_adapter_has_are_refused(saved, refuses, dtype):
    last = sorted(load_file(saved / WEIGHTS))[-1]
    edit_weights(saved, lambda weights: weights.update({last: weights[last].to(dtype)}))
    refuses(saved, ValueError, rf"{WEIGHTS}: {last} is of {dtype}; an adapter's weights are float32, bfloat16")


def test_files_follow_the_umask(transformer, tmp_path):
    mmpreproj.patch(transformer)
    before = os.umask(0o077)
    try:
        mmpreproj.save(transformer, tmp_path)
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}


def test_an_empty_source_is_no_folder(refuses):
    refuses("", FileNotFoundError, "the source of an adapter is an empty string")


def test_weights_that_are_partitioned_away_are_not_saved_as_empty_ones(transformer, tmp_path):
    """DeepSpeed's ZeRO-3 leaves a parameter with no elements outside of its module's forward."""
    mmpreproj.patch(transformer)
    next(mmpreproj.parameters(transformer)).data = torch.empty(0)
    with pytest.raises(ValueError, match=r"is empty, as DeepSpeed's ZeRO-3 leaves .*GatheredParameters"):
        mmpreproj.save(transformer, tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()
