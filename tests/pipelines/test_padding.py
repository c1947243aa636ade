"""Padding of prompts is kept from attention where the adapter was trained so, and nowhere else."""

import re

import numpy as np
import pytest
import torch

import mmpreproj
from mmpreproj import PreProjConfig
from mmpreproj.pipelines import PreProjSD3Pipeline

CONFIG = PreProjConfig(mask_padding=True, init="zero")


@pytest.fixture(params=["generic", "clip and t5", "clip alone"])
def pipe(request, make_pixel_pipeline, stock_components):
    """A pipeline whose transformer masks padding, with each kind of text encoders."""
    if request.param == "generic":
        pipe = make_pixel_pipeline(patched=False)
    else:
        if request.param == "clip alone":
            stock_components |= {"text_encoder_3": None, "tokenizer_3": None}
        pipe = PreProjSD3Pipeline(**stock_components)
    mmpreproj.patch(pipe.transformer, CONFIG)
    return pipe


def watch(pipe, calls):
    """Note what the transformer is called with, before anything is made of it."""

    def note(_, args, kwargs):
        calls.append(kwargs)

    pipe.transformer.register_forward_pre_hook(note, with_kwargs=True, prepend=True)


def spoil_padding(pipe):
    """Have `encode_prompt` give other embeddings at padding, and the same at text."""
    encode = pipe.encode_prompt

    def spoiled(prompt, *args, negative_prompt=None, **settings):
        length = settings["max_sequence_length"]
        embeds, negative, pooled, negative_pooled = encode(prompt, *args, negative_prompt=negative_prompt, **settings)
        for tensor, text in ((embeds, prompt), (negative, negative_prompt or "")):
            if tensor is not None:
                tensor[~pipe.encode_prompt_mask([text], max_sequence_length=length).expand(len(tensor), -1)] += 2.0
        return embeds, negative, pooled, negative_pooled

    pipe.encode_prompt = spoiled


def test_the_mask_covers_what_the_prompt_is_encoded_into(pipe):
    prompts = ["red", "red apple green tree", ""]
    mask = pipe.encode_prompt_mask(prompts, max_sequence_length=16)
    embeds = pipe.encode_prompt(prompts, None, None, max_sequence_length=16)[0]
    assert mask.dtype == torch.bool
    assert mask.shape == embeds.shape[:2]
    counts = mask.sum(dim=1)
    assert counts[1] > counts[0] > counts[2] > 0
    assert (mask.int().diff(dim=1) <= 0)[:, :7].all()  # text comes first


def test_generic_embeddings_are_zero_just_where_the_mask_says_padding(make_pixel_pipeline):
    pipe = make_pixel_pipeline()
    prompts = ["red", "red apple"]
    zero = (pipe.encode_prompt(prompts, None, None)[0] == 0).all(dim=-1)
    assert torch.equal(zero, ~pipe.encode_prompt_mask(prompts))


def test_a_lone_prompt_is_one(pipe):
    lone, listed = (pipe.encode_prompt_mask(prompt, max_sequence_length=16) for prompt in ("red apple", ["red apple"]))
    assert torch.equal(lone, listed)


def test_t5_places_are_padding_where_there_is_no_t5(stock_components):
    stock_components |= {"text_encoder_3": None, "tokenizer_3": None}
    mask = PreProjSD3Pipeline(**stock_components).encode_prompt_mask(["red"], max_sequence_length=12)
    assert mask.shape == (1, 16 + 12)
    assert not mask[:, 16:].any()


def test_each_encoder_reads_its_own_prompt(stock_components):
    pipe = PreProjSD3Pipeline(**stock_components)
    same, other = (
        pipe.encode_prompt_mask(["red"], *more, max_sequence_length=16) for more in ((), (["red apple"], ["a"]))
    )
    assert other[:, :16].sum() > same[:, :16].sum()
    assert other[:, 16:].sum() < same[:, 16:].sum()


@pytest.mark.parametrize("guidance", [1.0, 4.0])
def test_the_picture_does_not_depend_on_padding(pipe, draw, guidance):
    settings = {"guidance_scale": guidance, "negative_prompt": "green", "num_images_per_prompt": 2}
    expected = draw(pipe, **settings)
    spoil_padding(pipe)
    np.testing.assert_allclose(draw(pipe, **settings), expected, atol=1e-5)


def test_without_the_setting_it_does(make_pixel_pipeline, draw):
    pipe = make_pixel_pipeline()
    expected = draw(pipe)
    spoil_padding(pipe)
    assert np.abs(draw(pipe) - expected).max() > 1e-3


def test_negative_prompts_come_first_and_pictures_of_a_prompt_together(pipe, draw):
    calls = []
    watch(pipe, calls)
    draw(pipe, ["red", "red apple"], negative_prompt=["green tree heart", ""], num_images_per_prompt=2)
    texts = ["green tree heart"] * 2 + [""] * 2 + ["red"] * 2 + ["red apple"] * 2
    expected = pipe.encode_prompt_mask(texts, max_sequence_length=16)
    assert torch.equal(calls[0]["joint_attention_kwargs"]["padding_mask"], expected)


def test_skip_layer_guidance_takes_the_prompts_half(pipe, draw):
    settings = {"skip_guidance_layers": [0], "skip_layer_guidance_stop": 1.0, "skip_layer_guidance_start": 0.0}
    expected = draw(pipe, negative_prompt="green", **settings)
    spoil_padding(pipe)
    np.testing.assert_allclose(draw(pipe, negative_prompt="green", **settings), expected, atol=1e-5)


def test_a_callers_mask_goes_before_ours_and_its_dictionary_is_left_alone(pipe, draw):
    calls = []
    watch(pipe, calls)
    everything = torch.ones_like(pipe.encode_prompt_mask(["red apple"], max_sequence_length=16))
    given = {"attention_mask": everything.repeat(2, 1)}
    draw(pipe, joint_attention_kwargs=given)
    assert calls[0]["joint_attention_kwargs"]["attention_mask"] is given["attention_mask"]
    assert list(given) == ["attention_mask"]


def test_embeddings_without_a_mask_are_refused(pipe, draw):
    embeds, _, pooled, _ = pipe.encode_prompt("red apple", None, None, max_sequence_length=16)
    given = {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled}
    with pytest.raises(ValueError, match=re.escape("pass joint_attention_kwargs={'attention_mask': …}")):
        draw(pipe, None, guidance_scale=1.0, **given)
    mask = pipe.encode_prompt_mask(["red apple"], max_sequence_length=16)
    picture = draw(pipe, None, guidance_scale=1.0, joint_attention_kwargs={"attention_mask": mask}, **given)
    np.testing.assert_allclose(picture, draw(pipe, guidance_scale=1.0), atol=1e-5)  # encoded with gradients


def test_an_adapter_that_does_not_act_masks_nothing(pipe, draw):
    with mmpreproj.disabled(pipe.transformer):
        disabled = draw(pipe)
    mmpreproj.set_scale(pipe.transformer, 0.0)
    unscaled = draw(pipe)
    mmpreproj.unpatch(pipe.transformer)
    assert np.array_equal(disabled, draw(pipe))
    assert np.array_equal(unscaled, draw(pipe))


def test_the_setting_is_saved_with_the_pipeline(make_pixel_pipeline, draw, tmp_path):
    pipe = make_pixel_pipeline(patched=False)
    mmpreproj.patch(pipe.transformer, CONFIG)
    pipe.save_pretrained(tmp_path / "model")
    loaded = PreProjSD3Pipeline.from_pretrained(tmp_path / "model")
    assert np.array_equal(draw(loaded), draw(pipe))
    spoil_padding(loaded)
    np.testing.assert_allclose(draw(loaded), draw(pipe), atol=1e-5)


def test_a_prompt_that_is_none_is_refused_as_in_the_parent(pipe):
    for prompt in (5, None):
        with pytest.raises(ValueError, match="`prompt`"):
            pipe(prompt)


@pytest.mark.parametrize("change", [(1.0, 0.0), (0.0, 1.0), (1.0, [1.0, -1.0])])
def test_a_callback_that_changes_the_scale_decides_of_the_mask_too(make_pixel_pipeline, draw, change):
    def picture(spoiled):
        pipe = make_pixel_pipeline(patched=False)
        mmpreproj.patch(pipe.transformer, CONFIG)
        before, after = change
        mmpreproj.set_scale(pipe.transformer, before)
        if spoiled:
            spoil_padding(pipe)

        def switch(pipe, step, timestep, tensors):
            mmpreproj.set_scale(pipe.transformer, after)
            return {}

        return draw(pipe, callback_on_step_end=switch)

    moved = np.abs(picture(True) - picture(False)).max()
    assert moved < 1e-5 if 0.0 not in change else moved > 1e-4
