"""Texts are as long in generation as in training, where no call says otherwise, by what is stored with the model."""

import copy
import json
import logging

import pytest
import torch
from diffusers import DiffusionPipeline, StableDiffusion3Pipeline

import mmpreproj
from mmpreproj import PreProjConfig
from mmpreproj.patching.text_length import set_text_length, text_length
from mmpreproj.pipelines import PreProjSD3Pipeline, PreProjShapePipeline
from mmpreproj.pipelines.length import LENGTH_KEY

CLIP = 16  # tokens of the tiny CLIP tokenizers, which come before T5's


@pytest.fixture
def pipe(stock_components):
    """A pipeline with CLIP and T5, without an adapter."""
    return PreProjSD3Pipeline(**stock_components)


@pytest.fixture
def make_patched(pipe):
    """Patch the pipeline with adapters of these lengths."""

    def make(**lengths):
        for name, length in lengths.items():
            mmpreproj.patch(pipe.transformer, PreProjConfig(expansion=0.25), name=name)
            set_text_length(pipe.transformer, length, name=name)
        return pipe

    return make


def lengths_of(pipe, *args, **settings):
    """Return how many tokens T5 gets, from the embeddings and from the mask."""
    embeds = pipe.encode_prompt("red apple", None, None, *args, do_classifier_free_guidance=False, **settings)[0]
    return embeds.shape[1] - CLIP, pipe.encode_prompt_mask(["red apple"], **settings).shape[1] - CLIP


def seen_by_the_transformer(pipe, draw, **settings):
    """Return how many tokens of T5's the transformer is called with."""
    seen = []
    hook = pipe.transformer.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["encoder_hidden_states"].shape[1] - CLIP), with_kwargs=True
    )
    draw(pipe, **settings)
    hook.remove()
    return set(seen)


def test_without_anything_stored_it_is_the_stock_length(pipe):
    assert pipe.max_sequence_length == 256
    stock = StableDiffusion3Pipeline(**pipe.components).encode_prompt("red apple", None, None)[0]
    assert pipe.encode_prompt("red apple", None, None)[0].shape == stock.shape
    assert lengths_of(pipe) == (256, 256)


def test_an_adapters_length_is_the_default_and_a_callers_goes_before_it(make_patched, draw):
    pipe = make_patched(default=12)
    assert lengths_of(pipe) == (12, 12)
    assert lengths_of(pipe, max_sequence_length=9) == (9, 9)
    assert seen_by_the_transformer(pipe, draw, max_sequence_length=None) == {12}
    assert seen_by_the_transformer(pipe, draw, max_sequence_length=9) == {9}


def test_a_length_given_by_place_counts(make_patched):
    pipe = make_patched(default=12)
    #          device, count, guided, embeddings and negative texts, clip_skip, length, lora_scale
    further = [None, 1, False, *[None] * 8, 9]
    assert pipe.encode_prompt("red apple", None, None, *further)[0].shape[1] == CLIP + 9


def test_of_several_adapters_the_largest_counts_switched_on_or_not(make_patched):
    pipe = make_patched(a=12, b=20, c=None)
    assert pipe.max_sequence_length == 20
    mmpreproj.disable(pipe.transformer, "b")
    assert pipe.max_sequence_length == 20
    mmpreproj.unpatch(pipe.transformer, "b")
    assert pipe.max_sequence_length == 12
    mmpreproj.unpatch(pipe.transformer)
    assert pipe.max_sequence_length == 256


def test_it_is_saved_and_loaded_with_the_adapter(make_patched, make_transformer, tmp_path):
    pipe = make_patched(default=12)
    mmpreproj.save(pipe.transformer, tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["max_sequence_length"] == 12
    model = make_transformer()
    mmpreproj.load(model, tmp_path)
    assert text_length(model) == 12


@pytest.mark.parametrize("expansion", [0.25, 0.5])  # in place, and by other modules
def test_replacing_an_adapter_takes_the_new_ones_length(make_patched, make_transformer, tmp_path, expansion):
    pipe = make_patched(default=12)
    mmpreproj.save(pipe.transformer, tmp_path)
    model = make_transformer()
    mmpreproj.patch(model, PreProjConfig(expansion=expansion))
    set_text_length(model, 99)
    mmpreproj.load(model, tmp_path, replace=True)
    assert text_length(model) == 12


def test_without_a_length_the_file_is_as_before_and_loads(make_transformer, tmp_path):
    model, other = make_transformer(), make_transformer()
    mmpreproj.patch(model)
    mmpreproj.save(model, tmp_path)
    assert "max_sequence_length" not in json.loads((tmp_path / "adapter_config.json").read_text())
    mmpreproj.load(other, tmp_path)
    assert text_length(other) is None


@pytest.mark.parametrize("length", [0, -1, "77", True, 7.5])
def test_a_bad_length_in_the_file_is_refused(make_patched, make_transformer, tmp_path, length):
    mmpreproj.save(make_patched(default=12).transformer, tmp_path)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_sequence_length": length}))
    with pytest.raises(ValueError, match=r"adapter_config\.json .*bad value: max_sequence_length must be"):
        mmpreproj.load(make_transformer(), tmp_path)


def test_a_pipelines_adapters_keep_it(make_patched, tmp_path):
    make_patched(a=12, b=20).save_pretrained(tmp_path)
    assert PreProjSD3Pipeline.from_pretrained(tmp_path).max_sequence_length == 20


def test_a_pipeline_without_its_transformer_encodes_as_with_it(make_patched, tmp_path):
    make_patched(a=12, b=20).save_pretrained(tmp_path)
    assert lengths_of(PreProjSD3Pipeline.from_pretrained(tmp_path, transformer=None)) == (20, 20)


def test_a_model_without_an_adapter_keeps_it_in_its_index(pipe, custom_pipeline, tmp_path):
    pipe.register_to_config(**{LENGTH_KEY: 12})
    assert lengths_of(pipe) == (12, 12)
    pipe.save_pretrained(tmp_path / "once")
    loaded = PreProjSD3Pipeline.from_pretrained(tmp_path / "once")
    loaded.save_pretrained(tmp_path / "twice")
    for again in (
        PreProjSD3Pipeline.from_pretrained(tmp_path / "twice"),
        DiffusionPipeline.from_pretrained(tmp_path / "twice", custom_pipeline=custom_pipeline, trust_remote_code=True),
    ):
        assert lengths_of(again) == (12, 12)
        assert PreProjShapePipeline.from_pipe(again).max_sequence_length == 12


def test_stock_diffusers_loads_such_a_model_without_a_word(pipe, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("diffusers"), "propagate", True)
    pipe.register_to_config(**{LENGTH_KEY: 12})
    pipe.save_pretrained(tmp_path)
    stock = StableDiffusion3Pipeline.from_pretrained(tmp_path)
    assert not [record for record in caplog.records if "max_sequence_length" in record.getMessage()]
    assert stock.encode_prompt("red apple", None, None)[0].shape[1] == CLIP + 256


def test_the_adapters_length_goes_before_that_of_its_base(make_patched):
    pipe = make_patched(default=12)
    pipe.register_to_config(**{LENGTH_KEY: 20})
    assert pipe.max_sequence_length == 12
    set_text_length(pipe.transformer, None)
    assert pipe.max_sequence_length == 20


@pytest.mark.parametrize("length", ["12", 0])
def test_a_bad_length_in_the_index_is_refused(pipe, tmp_path, length):
    pipe.save_pretrained(tmp_path)
    path = tmp_path / "model_index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {LENGTH_KEY: length}))
    with pytest.raises(ValueError, match=r"model_index\.json: _max_sequence_length: max_sequence_length must be"):
        PreProjSD3Pipeline.from_pretrained(tmp_path)


def test_a_generic_encoders_tokenizer_still_cuts_it(make_pixel_pipeline):
    pipe = make_pixel_pipeline()
    set_text_length(pipe.transformer, 5)
    assert pipe.encode_prompt("red apple", None, None)[0].shape[1] == 5
    set_text_length(pipe.transformer, 12)
    assert pipe.encode_prompt("red apple", None, None)[0].shape[1] == pipe.tokenizer.model_max_length == 8


@pytest.mark.parametrize(("length", "error", "match"), [(0, ValueError, "at least 1"), (1.5, TypeError, "whole")])
def test_what_is_no_length_is_refused(make_patched, length, error, match):
    pipe = make_patched(default=12)
    with pytest.raises(error, match=f"max_sequence_length must be .*{match}"):
        set_text_length(pipe.transformer, length)
    assert text_length(pipe.transformer) == 12


def test_it_survives_a_deep_copy_and_pickling(make_patched, tmp_path):
    model = make_patched(default=12).transformer
    assert text_length(copy.deepcopy(model)) == 12
    torch.save(model, tmp_path / "model.pt")
    assert text_length(torch.load(tmp_path / "model.pt", weights_only=False)) == 12
