"""Pictures from a saved model: what is found, what is drawn, what the files are called."""

import json
import logging
import shutil
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import mmpreproj
from mmpreproj.pipelines import PreProjSD3Pipeline
from mmpreproj.recipes.generate import Sampling, best_device, describe, generate, parse_size, write_pictures
from mmpreproj.recipes.loading import load_pipeline


@pytest.fixture
def adapter(trained):
    return trained["probe"][0].saved


@pytest.fixture
def pipeline(base):
    pipe = PreProjSD3Pipeline.from_pretrained(base)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def adapter_of(pipeline):
    return {name: value.detach().float() for name, value in mmpreproj.named_parameters(pipeline.transformer)}


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(value, second[name]) for name, value in first.items())


def pixels(images):
    return np.stack([np.asarray(image) for image in images]).astype(int)


# --- loading ---------------------------------------------------------------------------------------------------------


def test_an_adapters_folder_finds_its_base(trained, adapter):
    pipeline = load_pipeline(str(adapter))
    assert same(adapter_of(pipeline), adapter_of(trained["probe"][0].pipeline))


def test_an_adapter_is_put_onto_a_base(trained, adapter, base):
    assert same(adapter_of(load_pipeline(str(base), adapter=str(adapter))), adapter_of(load_pipeline(str(adapter))))


def test_a_pipelines_folder_comes_with_its_adapter_if_it_has_one(trained, base):
    run, _ = trained["full"]
    assert same(adapter_of(load_pipeline(str(run.saved))), adapter_of(run.pipeline))
    assert not mmpreproj.is_patched(load_pipeline(str(base)).transformer)


def test_weights_take_the_dtype_asked_for(adapter):
    transformer = load_pipeline(str(adapter), dtype=torch.bfloat16).transformer
    assert {parameter.dtype for parameter in transformer.parameters()} == {torch.bfloat16}


def test_a_folder_that_is_neither_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"holds neither a pipeline \(model_index.json\) nor an adapter"):
        load_pipeline(str(tmp_path))


def test_an_adapter_onto_an_adapter_is_refused(adapter):
    with pytest.raises(ValueError, match="is an adapter itself; give its base as --model"):
        load_pipeline(str(adapter), adapter=str(adapter))


def test_an_adapter_takes_the_place_of_the_one_that_the_model_carries(trained, base, adapter):
    pipeline = load_pipeline(str(trained["full"][0].saved), adapter=str(adapter))
    assert same(adapter_of(pipeline), adapter_of(load_pipeline(str(base), adapter=str(adapter))))
    assert not same(adapter_of(pipeline), adapter_of(load_pipeline(str(trained["full"][0].saved))))


def test_an_adapter_that_does_not_name_its_base_is_refused_with_the_way_out(adapter, tmp_path):
    shutil.copytree(adapter, tmp_path / "lost")
    path = tmp_path / "lost" / "adapter_config.json"
    values = json.loads(path.read_text())
    values["base"]["name_or_path"] = None
    path.write_text(json.dumps(values))
    with pytest.raises(ValueError, match=r"does not say where its base is; name the base as --model, .*--adapter"):
        load_pipeline(str(tmp_path / "lost"))


def test_an_adapters_base_that_has_moved_is_named(adapter, tmp_path):
    shutil.copytree(adapter, tmp_path / "lost")
    path = tmp_path / "lost" / "adapter_config.json"
    values = json.loads(path.read_text())
    values["base"]["name_or_path"] = str(tmp_path / "moved-away")
    path.write_text(json.dumps(values))
    with pytest.raises((OSError, ValueError), match="moved-away"):
        load_pipeline(str(tmp_path / "lost"))


def test_what_was_loaded_is_told_in_a_line(adapter, base):
    assert "SD3Transformer2DModel with its adapter, " in describe(load_pipeline(str(adapter)))
    assert "SD3Transformer2DModel without an adapter, " in describe(load_pipeline(str(base)))


# --- generating ------------------------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_picture_and_another_seed_another(pipeline):
    def draw(seed):
        return pixels(generate(pipeline, ["red apple"], Sampling(steps=3, seed=seed))[0][1])

    assert np.array_equal(draw(1), draw(1))
    assert not np.array_equal(draw(1), draw(2))


def test_a_picture_does_not_depend_on_its_neighbours(pipeline):
    many = generate(pipeline, ["green tree", "red apple"], Sampling(steps=3, seed=4, count=3))
    assert [prompt for prompt, _ in many] == ["green tree", "red apple"]
    assert [len(images) for _, images in many] == [3, 3]
    for offset in range(3):
        alone = generate(pipeline, ["red apple"], Sampling(steps=3, seed=4 + offset))[0][1]
        assert np.abs(pixels(alone)[0] - pixels(many[1][1])[offset]).max() <= 1  # of 255: batches round differently
    assert not np.array_equal(pixels(many[0][1]), pixels(many[1][1]))


def test_global_randomness_is_neither_read_nor_touched(pipeline):
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = pixels(generate(pipeline, ["red apple"], Sampling(steps=2))[0][1])
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert np.array_equal(pixels(generate(pipeline, ["red apple"], Sampling(steps=2))[0][1]), first)


@pytest.mark.parametrize("change", [{"guidance": 1.0}, {"negative_prompt": "green"}, {"steps": 4}, {"size": 12}])
def test_every_setting_takes_effect(pipeline, change):
    plain, changed = (
        generate(pipeline, ["red apple"], Sampling(**({"steps": 3} | settings)))[0][1][0] for settings in ({}, change)
    )
    assert changed.size == (change.get("size", 8),) * 2
    assert changed.size != plain.size or not np.array_equal(pixels([changed]), pixels([plain]))


def test_a_size_beyond_the_models_positions_is_refused_with_the_largest(pipeline):
    largest = pipeline.transformer.config.pos_embed_max_size * pipeline.transformer.config.patch_size
    assert generate(pipeline, ["x"], Sampling(steps=1, size=largest))[0][1][0].size == (largest, largest)
    with pytest.raises(ValueError, match=f"size: {largest + 2} pixels are more .* takes {largest} at most"):
        generate(pipeline, ["x"], Sampling(steps=1, size=largest + 2))


def test_a_size_may_be_a_width_and_a_height(pipeline):
    largest = pipeline.transformer.config.pos_embed_max_size * pipeline.transformer.config.patch_size
    for size in ((12, 8), (6, largest), (10, 10)):
        assert generate(pipeline, ["x"], Sampling(steps=1, size=size))[0][1][0].size == size
    square, pair = (generate(pipeline, ["x"], Sampling(steps=2, size=size))[0][1] for size in (12, (12, 12)))
    assert np.array_equal(pixels(square), pixels(pair))
    for size in ((largest + 2, 8), (8, largest + 2)):
        with pytest.raises(ValueError, match=f"size: {largest + 2} pixels are more .* takes {largest} at most"):
            generate(pipeline, ["x"], Sampling(steps=1, size=size))


@pytest.mark.parametrize(
    ("size", "match"),
    [
        (9, "size: 9 pixels do not divide into patches of 2; take 8 or 10$"),
        ((8, 15), "size: 15 pixels do not divide into patches of 2; take 14 or 16$"),
        ((1, 8), "size: 1 pixels do not divide into patches of 2; take 2$"),
    ],
)
def test_sides_divide_into_patches(pipeline, size, match):
    with pytest.raises(ValueError, match=match):
        generate(pipeline, ["x"], Sampling(steps=1, size=size))


def test_patches_are_counted_in_pixels_of_the_picture(saved_pipelines):
    pipeline = PreProjSD3Pipeline.from_pretrained(saved_pipelines["latents"])
    assert generate(pipeline, ["x"], Sampling(steps=1, size=(12, 8)))[0][1][0].size == (12, 8)
    with pytest.raises(ValueError, match="size: 10 pixels do not divide into patches of 4; take 8 or 12"):
        generate(pipeline, ["x"], Sampling(steps=1, size=(12, 10)))


@pytest.mark.parametrize(
    ("text", "size"), [("64", 64), ("48x32", (48, 32)), ("48X32", (48, 32)), ("48×32", (48, 32)), (" 8 ", 8)]
)
def test_sizes_are_read_from_text(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "x", "48x", "x32", "48x32x8", "-4", "4.5", "48 32", "big"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match="size: expected a side such as 64, or width and height such as 48x32; got"):
        parse_size(text)


@pytest.mark.parametrize("size", [0, -8, (8, 0), (8,), (8, 8, 8), [8, 8], 8.0])
def test_a_size_has_pixels(size):
    with pytest.raises(ValueError, match="size must be a side or a width and a height, of at least 1 pixel; got"):
        Sampling(size=size)


def test_rotary_positions_have_no_end(pipeline):
    positions = mmpreproj.Positions(absolute="remove", start="full")
    mmpreproj.patch(pipeline.transformer, mmpreproj.PreProjConfig(positions=positions), name="rope")
    beyond = pipeline.transformer.config.pos_embed_max_size * pipeline.transformer.config.patch_size + 4
    assert generate(pipeline, ["x"], Sampling(steps=1, size=beyond))[0][1][0].size == (beyond, beyond)
    mmpreproj.set_scale(pipeline.transformer, {"rope": 0.5})
    with pytest.raises(ValueError, match="more than this model has positions for"):
        generate(pipeline, ["x"], Sampling(steps=1, size=beyond))


@pytest.mark.parametrize("name", ["steps", "count"])
def test_fewer_than_one_is_refused(name):
    with pytest.raises(ValueError, match=f"{name} must be at least 1; got 0"):
        Sampling(**{name: 0})


def test_the_best_device_is_one_that_works():
    assert torch.zeros(1, device=best_device()).device.type == best_device().type


# --- files -----------------------------------------------------------------------------------------------------------


def shades(count, start=0):
    return [Image.new("RGB", (2, 2), (start + index,) * 3) for index in range(count)]


def test_files_are_called_by_prompt_and_seed(tmp_path):
    paths = write_pictures([("Red apple!", shades(2)), ("é 🍎", shades(1))], tmp_path / "new" / "folder", seed=7)
    assert [path.name for path in paths] == ["red-apple-7.png", "red-apple-8.png", "é-7.png"]
    assert Image.open(paths[1]).getpixel((0, 0)) == (1, 1, 1)


@pytest.mark.parametrize(
    "prompts",
    [
        ("red apple", "red, apple", "Red Apple!", "red apple 2", "red apple"),
        ("", "🍎", "!!!", "prompt", "prompt 2"),
        ("sun 1", "sun", "sun-1"),
        ("a" * 60 + " one", "a" * 60 + " two"),
    ],
)
def test_no_picture_overwrites_another(tmp_path, prompts):
    rows = [(prompt, shades(3, start=10 * place)) for place, prompt in enumerate(prompts)]
    paths = write_pictures(rows, tmp_path)
    assert len({path.name.lower() for path in paths}) == len(paths) == 3 * len(prompts)
    found = [Image.open(path).getpixel((0, 0))[0] for path in paths]
    assert found == [10 * place + offset for place in range(len(prompts)) for offset in range(3)]


def test_names_stay_short_and_inside_the_folder(tmp_path):
    (path, other) = write_pictures([("x/../../y " * 50, shades(1)), ("..", shades(1))], tmp_path)
    assert path.parent == other.parent == tmp_path
    assert len(path.name) < 80


def test_a_model_that_is_nowhere_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no model at 'some/where': no such folder here, and on the hub"):
        load_pipeline("some/where")


def test_an_absolute_folder_that_is_not_there_is_named_too(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no model at '.*nothing': no such folder here"):
        load_pipeline(str(tmp_path / "nothing"))


# --- several adapters ------------------------------------------------------------------------------------------------


def test_a_pipeline_with_several_adapters_comes_with_all_of_them(make_several):
    transformer = load_pipeline(str(make_several(switched_off=("b",)))).transformer
    assert mmpreproj.adapters(transformer) == ("style", "b")
    assert mmpreproj.scales(transformer) == {"style": {0: 0.5, 1: 0.5}, "b": {0: 1.5, 1: 1.5}}
    assert mmpreproj.is_enabled(transformer, "style") and not mmpreproj.is_enabled(transformer, "b")


def test_a_folder_of_several_adapters_is_put_onto_a_base(make_several, trained, base):
    folder = make_several()
    expected = load_pipeline(str(folder))
    for model in (base, trained["full"][0].saved):
        pipeline = load_pipeline(str(model), adapter=str(folder / "preproj"))
        assert same(adapter_of(pipeline), adapter_of(expected))
        assert mmpreproj.scales(pipeline.transformer) == mmpreproj.scales(expected.transformer)
    one = load_pipeline(str(base), adapter=str(folder / "preproj" / "b"))
    assert mmpreproj.adapters(one.transformer) == ("default",)


def test_a_folder_of_several_adapters_finds_its_base(make_several, base):
    folder = make_several()
    pipeline = load_pipeline(str(folder / "preproj"))
    assert same(adapter_of(pipeline), adapter_of(load_pipeline(str(folder))))
    assert same(adapter_of(load_pipeline(str(folder / "preproj" / "b"))), adapter_of_one(pipeline, "b"))
    with pytest.raises(ValueError, match="is an adapter itself; give its base as --model"):
        load_pipeline(str(folder / "preproj"), adapter=str(folder / "preproj"))


def adapter_of_one(pipeline, name):
    parameters = mmpreproj.named_parameters(pipeline.transformer, name)
    return {key.replace(f".{name}.", ".default."): value.detach().float() for key, value in parameters}


def test_the_description_names_the_adapters(make_several, adapter, base):
    assert " without an adapter, " in describe(load_pipeline(str(base)))
    assert " with its adapter, " in describe(load_pipeline(str(adapter)))
    assert " with its adapter style, " in describe(load_pipeline(str(make_several(("style",)))))
    several = load_pipeline(str(make_several(switched_off=("b",))))
    assert " with its adapters style, b (switched off), " in describe(several)


# --- LoRA ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def lora(trained_together):
    return trained_together.config.output / "lora"


@pytest.fixture
def altered(lora, tmp_path):
    """Save a LoRA's weights as a function changes them."""

    def alter(change):
        (tmp_path / "altered").mkdir()
        weights = change(load_file(lora / "pytorch_lora_weights.safetensors"))
        path = tmp_path / "altered" / "pytorch_lora_weights.safetensors"
        save_file({name: value.clone() for name, value in weights.items()}, path)
        return str(path.parent)

    return alter


def test_a_lora_is_told_and_counted_apart(base, adapter, lora):
    for model, patched in ((base, "without an adapter"), (adapter, "with its adapter")):
        alone = load_pipeline(str(model)).transformer.num_parameters()
        both = load_pipeline(str(model), lora=str(lora))
        more = both.transformer.num_parameters() - alone
        assert describe(both) == f"SD3Transformer2DModel {patched}, {alone:,} parameters, and a LoRA of {more:,} more"


def test_a_lora_is_loaded_without_diffusers_warnings(base, lora, caplog):
    level = logging.getLogger("diffusers").level
    with diffusers_heard(caplog):
        load_pipeline(str(base), lora=str(lora))
    assert "No LoRA keys" not in caplog.text
    assert logging.getLogger("diffusers").level == level


@contextmanager
def diffusers_heard(caplog):
    logger = logging.getLogger("diffusers")
    logger.addHandler(caplog.handler)
    try:
        yield
    finally:
        logger.removeHandler(caplog.handler)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (
            lambda weights: weights | {name.replace("blocks.1.", "blocks.5."): weights[name] for name in weights},
            r"has layers that this transformer does not: 14 of its 44 matrices have no place",
        ),
        (
            lambda weights: {name: value.repeat(2, 2) for name, value in weights.items()},
            r"does not fit this transformer: size mismatch",
        ),
        (lambda weights: {"a": torch.zeros(2)}, r"does not fit this transformer: Invalid LoRA"),
        (
            lambda weights: {name.replace("transformer.", "unet.", 1): weights[name] for name in weights},
            r"has nothing for this transformer",
        ),
    ],
)
def test_a_lora_of_another_model_is_refused_in_a_line(base, altered, change, match):
    with pytest.raises(ValueError, match=match) as caught:
        load_pipeline(str(base), lora=altered(change))
    assert "\n" not in str(caught.value)
