"""The pipeline against its parent, real components throughout."""

import inspect
import itertools
import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler, StableDiffusion3Pipeline
from safetensors.torch import load_file, save_file

import mmpreproj
from mmpreproj.pipelines import PreProjSD3Pipeline, adapter_folder

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def adapter_of(pipe):
    return {key: value.clone() for key, value in mmpreproj.named_parameters(pipe.transformer)}


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(value, second[key]) for key, value in first.items())


def alike(first, second):
    """Compare pictures of one model in two places of memory, where products may round differently in the last bit."""
    return np.allclose(first, second, atol=1e-5)


def patched(components, shake):
    mmpreproj.patch(components["transformer"])
    shake(components["transformer"])
    return PreProjSD3Pipeline(**components)


def load_directly(folder, **kwargs):
    return PreProjSD3Pipeline.from_pretrained(folder, **kwargs)


@pytest.fixture(params=["class", "custom_pipeline"])
def load(request, custom_pipeline):
    """Both ways to load a folder with its adapter."""
    if request.param == "class":
        return load_directly
    return lambda folder, **kwargs: DiffusionPipeline.from_pretrained(
        folder, custom_pipeline=custom_pipeline, trust_remote_code=True, **kwargs
    )


# --- as its parent ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("without_t5", [False, True])
def test_unpatched_pictures_equal_the_stock_pipelines(stock_components, draw, without_t5):
    if without_t5:
        stock_components |= {"text_encoder_3": None, "tokenizer_3": None}
    ours, stock = PreProjSD3Pipeline(**stock_components), StableDiffusion3Pipeline(**stock_components)
    for settings in ({}, {"guidance_scale": 1.0}, {"negative_prompt": "green", "prompt_2": "tree", "clip_skip": 1}):
        assert np.array_equal(draw(ours, **settings), draw(stock, **settings))


def test_prompt_embeddings_equal_the_stock_pipelines(stock_components):
    ours, stock = PreProjSD3Pipeline(**stock_components), StableDiffusion3Pipeline(**stock_components)
    found, expected = (pipe.encode_prompt("red", "apple", None) for pipe in (ours, stock))
    assert all(torch.equal(first, second) for first, second in zip(found, expected, strict=True))


def test_skip_layer_guidance_and_dynamic_shifting_equal_the_stock_pipelines(stock_components, draw):
    stock_components["scheduler"] = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    ours, stock = PreProjSD3Pipeline(**stock_components), StableDiffusion3Pipeline(**stock_components)
    settings = {"skip_guidance_layers": [0], "skip_layer_guidance_stop": 1.0, "skip_layer_guidance_start": 0.0}
    assert np.array_equal(draw(ours, **settings), draw(stock, **settings))
    assert not np.array_equal(draw(ours, **settings), draw(ours))


def test_signatures_are_the_parents():
    def shown(cls, name):
        return list(inspect.signature(getattr(cls, name)).parameters.values())

    def with_optional_length(parameters):
        changes = {"max_sequence_length": {"default": None, "annotation": "int | None"}}
        return [parameter.replace(**changes.get(parameter.name, {})) for parameter in parameters]

    for name in ("encode_prompt", "save_pretrained"):
        assert shown(PreProjSD3Pipeline, name) == with_optional_length(shown(StableDiffusion3Pipeline, name))
    *parents, cloud = shown(PreProjSD3Pipeline, "__call__")
    assert parents == with_optional_length(shown(StableDiffusion3Pipeline, "__call__"))
    assert (cloud.name, cloud.kind, cloud.default) == ("point_cloud", inspect.Parameter.KEYWORD_ONLY, None)


@pytest.mark.parametrize("output_type", ["pil", "np", "pt", "latent"])
def test_every_output_type_and_the_tuple_equal_the_stock_pipelines(stock_components, draw, output_type):
    ours, stock = PreProjSD3Pipeline(**stock_components), StableDiffusion3Pipeline(**stock_components)
    found, expected = (draw(pipe, output_type=output_type) for pipe in (ours, stock))
    assert type(found) is type(expected)
    assert np.array_equal(np.asarray(found[0]), np.asarray(expected[0]))
    generator = torch.Generator().manual_seed(7)
    lone = ours("red apple", num_inference_steps=3, generator=generator, output_type=output_type, return_dict=False)
    assert isinstance(lone, tuple) and type(lone[0]) is type(expected)


def test_components_pass_to_the_stock_pipeline_and_back(stock_components, shake, draw):
    pipe = patched(stock_components, shake)
    stock = StableDiffusion3Pipeline(**pipe.components)
    back = PreProjSD3Pipeline(**stock.components)
    assert np.array_equal(draw(pipe), draw(stock))
    assert np.array_equal(draw(pipe), draw(back))


# --- text, batches, callbacks ----------------------------------------------------------------------------------------


def test_prompt_guidance_and_negative_prompt_change_the_picture(make_pixel_pipeline, draw):
    pipe = make_pixel_pipeline()
    pictures = [
        draw(pipe, guidance_scale=1.0),
        draw(pipe),
        draw(pipe, "green tree"),
        draw(pipe, guidance_scale=2.0),
        draw(pipe, negative_prompt="green heart"),
    ]
    assert all(not np.array_equal(first, second) for first, second in itertools.combinations(pictures, 2))
    assert np.array_equal(draw(pipe, negative_prompt=""), draw(pipe))


def test_same_seed_same_picture_and_another_seed_another(make_pixel_pipeline, draw):
    pipe = make_pixel_pipeline()
    assert np.array_equal(draw(pipe), draw(pipe))
    assert not np.array_equal(draw(pipe), draw(pipe, generator=torch.Generator().manual_seed(8)))


def test_a_batch_is_its_prompts_one_by_one(make_pixel_pipeline, draw):
    pipe = make_pixel_pipeline()
    prompts, generators = ["red apple", "green tree"], [torch.Generator().manual_seed(seed) for seed in (1, 2)]
    batch = draw(pipe, prompts, generator=generators, negative_prompt=["tree", "heart"])
    for index, (prompt, negative) in enumerate(zip(prompts, ("tree", "heart"), strict=True)):
        generator = torch.Generator().manual_seed(index + 1)
        lone = draw(pipe, prompt, generator=generator, negative_prompt=negative)
        np.testing.assert_allclose(batch[index], lone[0], atol=1e-5)


def test_several_images_per_prompt_keep_the_order_of_prompts(make_pixel_pipeline, draw):
    pipe = make_pixel_pipeline()
    seeds = [torch.Generator().manual_seed(seed) for seed in (1, 2, 1, 2)]
    four = draw(pipe, ["red apple", "green tree"], num_images_per_prompt=2, generator=seeds)
    assert four.shape == (4, 8, 8, 3)
    lone = draw(pipe, "green tree", generator=torch.Generator().manual_seed(2))
    np.testing.assert_allclose(four[3], lone[0], atol=1e-5)


def test_callbacks_see_and_replace_latents(make_pixel_pipeline, draw):
    steps = []

    def note(pipe, step, timestep, tensors):
        steps.append(step)
        return {"latents": torch.zeros_like(tensors["latents"])}

    picture = draw(make_pixel_pipeline(), callback_on_step_end=note)
    assert steps == [0, 1, 2]
    assert np.all(picture == 0.5)


def test_given_embeddings_draw_what_their_prompt_draws(make_pixel_pipeline, draw):
    pipe = make_pixel_pipeline()
    embeds, negative, pooled, negative_pooled = pipe.encode_prompt("red apple", None, None)
    given = {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled}
    both = {"negative_prompt_embeds": negative, "negative_pooled_prompt_embeds": negative_pooled}
    assert np.array_equal(draw(pipe, None, **given), draw(pipe))
    textless = make_pixel_pipeline(text_encoder=None, tokenizer=None)
    assert np.array_equal(draw(textless, None, **given, **both), draw(pipe))


def test_the_prompt_length_of_training_is_the_length_of_generation(make_pixel_pipeline, tmp_path):
    pipe = make_pixel_pipeline()
    pipe.save_pretrained(tmp_path / "model")
    embeds = load_directly(tmp_path / "model").encode_prompt("red apple", None, None)[0]
    assert embeds.shape[1] == pipe.tokenizer.model_max_length == 8


def test_text_takes_the_transformers_dtype(make_pixel_pipeline, draw):
    pipe = make_pixel_pipeline()
    pipe.transformer.bfloat16()
    assert pipe.text_encoder.dtype == torch.float32
    assert pipe.encode_prompt("red", None, None)[0].dtype == torch.bfloat16
    assert np.isfinite(draw(pipe)).all()


def test_a_batch_of_negative_prompts_must_match(make_pixel_pipeline, draw):
    with pytest.raises(ValueError, match="1 entries for 2 prompts"):
        draw(make_pixel_pipeline(), ["red", "green"], negative_prompt=["tree"])


@pytest.mark.parametrize("argument", ["prompt_2", "prompt_3", "negative_prompt_2", "negative_prompt_3", "clip_skip"])
def test_arguments_of_other_encoders_are_refused_with_a_generic_one(make_pixel_pipeline, draw, argument):
    with pytest.raises(ValueError, match=f"{argument} has no use with the single text encoder BertModel"):
        draw(make_pixel_pipeline(), **{argument: 1 if argument == "clip_skip" else "tree"})


def test_a_text_encoder_of_another_width_is_refused(make_pixel_pipeline, make_bert, draw):
    encoder, tokenizer = make_bert(16)
    with pytest.raises(ValueError, match=r"width 16, but the transformer's joint_attention_dim is 24"):
        draw(make_pixel_pipeline(text_encoder=encoder, tokenizer=tokenizer))


def test_a_prompt_without_a_text_encoder_is_refused(make_pixel_pipeline, draw):
    textless = make_pixel_pipeline(text_encoder=None, tokenizer=None)
    with pytest.raises(ValueError, match="pass prompt_embeds"):
        draw(textless)
    embeds, _, pooled, _ = make_pixel_pipeline().encode_prompt("red apple", None, None)
    with pytest.raises(ValueError, match="negative_prompt_embeds"):
        draw(textless, None, prompt_embeds=embeds, pooled_prompt_embeds=pooled)


def test_incomplete_or_mixed_text_encoders_are_refused(make_pixel_pipeline, stock_components, clip_and_t5, draw):
    half = PreProjSD3Pipeline(**(stock_components | {"text_encoder_2": None, "tokenizer_2": None}))
    with pytest.raises(ValueError, match="no text_encoder_2, tokenizer_2"):
        draw(half)
    with pytest.raises(ValueError, match="which stands alone, but text_encoder_3 is there too"):
        draw(make_pixel_pipeline(text_encoder_3=clip_and_t5["text_encoder_3"]))
    with pytest.raises(ValueError, match="without a tokenizer"):
        draw(make_pixel_pipeline(tokenizer=None))


def test_given_embeddings_of_another_length_need_their_own_negatives(make_pixel_pipeline, draw):
    pipe = make_pixel_pipeline()
    given = {"prompt_embeds": torch.zeros(1, 5, 24), "pooled_prompt_embeds": torch.zeros(1, 24)}
    with pytest.raises(ValueError, match=r"\[1, 8, 24\], but prompt_embeds are \[1, 5, 24\]"):
        draw(pipe, None, **given)


# --- latents and pixels ----------------------------------------------------------------------------------------------


def test_without_a_vae_pixels_are_the_latents(make_pixel_pipeline, draw):
    pipe = make_pixel_pipeline()
    latents = draw(pipe, output_type="latent")
    assert pipe.vae_scale_factor == 1 and latents.shape == (1, 3, 8, 8)
    expected = (latents / 2 + 0.5).clamp(0, 1).permute(0, 2, 3, 1).numpy()
    assert np.array_equal(draw(pipe), expected)
    pixels = torch.rand(2, 3, 8, 8)
    assert pipe.encode_latents(pixels) is pixels


@pytest.mark.parametrize("factors", [{}, {"shift_factor": None}, {"shift_factor": None, "scaling_factor": None}])
def test_kl_latents_are_shifted_and_scaled_both_ways(make_pixel_pipeline, make_transformer, make_vae, factors):
    vae = make_vae(**factors)
    pipe = make_pixel_pipeline(transformer=make_transformer(), vae=vae)
    scale, shift = vae.config.scaling_factor or 1.0, vae.config.shift_factor or 0.0
    pixels = torch.rand(2, 3, 16, 16) * 2 - 1
    with torch.no_grad():
        drawn = [pipe.encode_latents(pixels, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
        sample = vae.encode(pixels).latent_dist.sample(torch.Generator().manual_seed(1))
        assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
        torch.testing.assert_close(drawn[0], (sample - shift) * scale)
        torch.testing.assert_close(pipe.decode_latents(drawn[0]), vae.decode(sample).sample)


@pytest.mark.parametrize("factors", [{}, {"shift_factor": None, "scaling_factor": None}])
def test_drawn_latents_are_the_posteriors_mean_and_deviation_times_noise(
    make_pixel_pipeline, make_transformer, make_vae, factors
):
    vae = make_vae(**factors)
    pipe = make_pixel_pipeline(transformer=make_transformer(), vae=vae)
    scale, shift = vae.config.scaling_factor or 1.0, vae.config.shift_factor or 0.0
    pixels = torch.rand(2, 3, 16, 16) * 2 - 1
    with torch.no_grad():
        mean, deviation = pipe.encode_posterior(pixels)
        posterior = vae.encode(pixels).latent_dist
        drawn = pipe.encode_latents(pixels, torch.Generator().manual_seed(1))
    noise = torch.randn(mean.shape, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(mean, (posterior.mode() - shift) * scale)
    torch.testing.assert_close(deviation, posterior.logvar.exp().sqrt() * scale)
    torch.testing.assert_close(drawn, mean + deviation * noise)


def test_where_there_is_no_posterior_there_is_no_deviation(make_pixel_pipeline, make_transformer, make_vae):
    pixels = torch.rand(1, 3, 16, 16) * 2 - 1
    bare, tiny = make_pixel_pipeline(), make_pixel_pipeline(transformer=make_transformer(), vae=make_vae("tiny"))
    with torch.no_grad():
        for pipe in (bare, tiny):
            mean, deviation = pipe.encode_posterior(pixels)
            assert torch.equal(mean, pipe.encode_latents(pixels)) and deviation is None


def test_the_posterior_is_in_the_vaes_dtype_and_the_same_when_offloaded(
    make_pixel_pipeline, make_transformer, make_vae
):
    pixels = torch.rand(1, 3, 16, 16) * 2 - 1
    pipe = make_pixel_pipeline(transformer=make_transformer(), vae=make_vae().bfloat16())
    with torch.no_grad():
        before = pipe.encode_posterior(pixels)
        assert {part.dtype for part in before} == {torch.bfloat16}
        pipe.enable_model_cpu_offload(device="cpu")
        for expected, found in zip(before, pipe.encode_posterior(pixels), strict=True):
            torch.testing.assert_close(found, expected)


def test_tiny_autoencoder_draws_and_encodes(make_pixel_pipeline, make_transformer, make_vae, draw):
    transformer = make_transformer(pooled_projection_dim=24)
    pipe = make_pixel_pipeline(transformer=transformer, vae=make_vae("tiny"))
    assert pipe.vae_scale_factor == 2
    assert draw(pipe).shape == (1, 16, 16, 3)
    with torch.no_grad():
        assert pipe.encode_latents(torch.zeros(1, 3, 16, 16)).shape == (1, 4, 8, 8)


def test_the_vae_keeps_its_own_dtype(make_pixel_pipeline, make_transformer, make_vae, draw):
    transformer = make_transformer(pooled_projection_dim=24).bfloat16()
    pipe = make_pixel_pipeline(transformer=transformer, vae=make_vae())
    assert pipe.vae.dtype == torch.float32
    assert np.isfinite(draw(pipe)).all()
    pipe.vae.bfloat16()
    with torch.no_grad():
        assert pipe.encode_latents(torch.zeros(1, 3, 16, 16)).dtype == torch.bfloat16


def test_offloading_changes_no_picture(stock_components, shake, draw):
    pipe = patched(stock_components, shake)
    expected = draw(pipe)
    pipe.enable_model_cpu_offload(device="cpu")
    for _ in range(2):
        assert alike(draw(pipe), expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("offload", ["enable_model_cpu_offload", "enable_sequential_cpu_offload"])
def test_offloading_from_a_gpu_changes_no_picture(stock_components, shake, draw, offload):
    pipe = patched(stock_components, shake)
    expected = draw(pipe.to("cuda"))
    getattr(pipe.to("cpu"), offload)()
    for _ in range(2):
        np.testing.assert_allclose(draw(pipe), expected, atol=1e-3)
    assert {parameter.device.type for parameter in pipe.vae.parameters()} <= {"cpu", "meta"}


def test_latents_that_are_not_finite_are_refused(make_pixel_pipeline, draw):
    def overflow(pipe, step, timestep, tensors):
        return {"latents": tensors["latents"] * float("inf")}

    pipe = make_pixel_pipeline()
    with pytest.raises(ValueError, match=r"192 of 192 latents before decoding .* torch\.float32\. float16 overflows"):
        draw(pipe, callback_on_step_end=overflow)


def test_a_vae_that_overflows_is_named(make_pixel_pipeline, make_transformer, make_vae):
    pipe = make_pixel_pipeline(transformer=make_transformer(), vae=make_vae())
    with torch.no_grad():
        pipe.vae.decoder.conv_out.bias.fill_(float("nan"))
        pipe.vae.quant_conv.bias.fill_(float("nan"))
        with pytest.raises(ValueError, match=r"pixels are NaN or infinite: the VAE ran in torch\.float32"):
            pipe.decode_latents(torch.zeros(1, 4, 8, 8))
        for encode in (pipe.encode_latents, pipe.encode_posterior):
            with pytest.raises(ValueError, match=r"latents after encoding are NaN"):
                encode(torch.zeros(1, 3, 16, 16))


def test_a_deviation_that_is_not_finite_is_named(make_pixel_pipeline, make_transformer, make_vae):
    pipe = make_pixel_pipeline(transformer=make_transformer(), vae=make_vae())
    with torch.no_grad():
        pipe.vae.quant_conv.bias[4:].fill_(float("nan"))
        with pytest.raises(ValueError, match=r"256 of 256 standard deviations of latents are NaN .* torch\.float32"):
            pipe.encode_posterior(torch.zeros(1, 3, 16, 16))


def test_pixels_of_another_shape_are_refused(make_pixel_pipeline):
    pipe = make_pixel_pipeline()
    for encode in (pipe.encode_latents, pipe.encode_posterior):
        with pytest.raises(ValueError, match=r"\[B, 3, H, W\]; got \[3, 8, 8\]"):
            encode(torch.zeros(3, 8, 8))


@pytest.mark.parametrize("output_type", ["jpeg", None])
def test_an_unknown_output_type_is_refused(make_pixel_pipeline, draw, output_type):
    with pytest.raises(ValueError, match="output_type must be one of 'pil', 'np', 'pt', 'latent'"):
        draw(make_pixel_pipeline(), output_type=output_type)


def test_latents_that_are_no_picture_need_a_vae(make_pixel_pipeline, make_transformer, draw):
    pipe = make_pixel_pipeline(transformer=make_transformer(pooled_projection_dim=24))
    assert draw(pipe, output_type="latent").shape == (1, 4, 8, 8)
    with pytest.raises(ValueError, match="4 channels, which are no picture without a VAE"):
        draw(pipe)


# --- saving and loading ----------------------------------------------------------------------------------------------


def test_a_saved_pipeline_draws_the_same_pictures(make_pixel_pipeline, load, draw, tmp_path):
    pipe = make_pixel_pipeline()
    pipe.save_pretrained(tmp_path / "model")
    loaded = load(tmp_path / "model")
    assert type(loaded) is PreProjSD3Pipeline
    assert same(adapter_of(loaded), adapter_of(pipe))
    assert same(loaded.transformer.state_dict(), pipe.transformer.state_dict())
    assert alike(draw(loaded), draw(pipe))
    mmpreproj.unpatch(loaded.transformer)
    assert not np.allclose(draw(loaded), draw(pipe), atol=0.05)


def test_saving_leaves_the_pipeline_as_it_was(make_pixel_pipeline, draw, tmp_path):
    pipe = make_pixel_pipeline()
    before = draw(pipe)
    pipe.save_pretrained(tmp_path / "model")
    assert mmpreproj.is_patched(pipe.transformer)
    assert np.array_equal(draw(pipe), before)


def test_the_base_part_is_a_stock_pipeline(stock_components, shake, draw, tmp_path):
    pipe = patched(stock_components, shake)
    pipe.save_pretrained(tmp_path / "model")
    index = json.loads((tmp_path / "model" / "model_index.json").read_text())
    assert index["_class_name"] == "StableDiffusion3Pipeline" and "preproj" not in index
    keys = load_file(tmp_path / "model" / "transformer" / "diffusion_pytorch_model.safetensors").keys()
    assert not [key for key in keys if "preproj" in key]
    mmpreproj.unpatch(pipe.transformer)
    for cls in (DiffusionPipeline, StableDiffusion3Pipeline):
        stock = cls.from_pretrained(tmp_path / "model")
        assert type(stock) is StableDiffusion3Pipeline
        assert same(stock.transformer.state_dict(), pipe.transformer.state_dict())
        assert alike(draw(stock), draw(pipe))


def test_a_stock_folder_loads_unpatched(stock_components, load, draw, tmp_path):
    stock = StableDiffusion3Pipeline(**stock_components)
    stock.save_pretrained(tmp_path / "model")
    loaded = load(tmp_path / "model")
    assert not mmpreproj.is_patched(loaded.transformer)
    assert alike(draw(loaded), draw(stock))


def test_saving_unpatched_leaves_no_earlier_adapter(make_pixel_pipeline, load, tmp_path):
    make_pixel_pipeline().save_pretrained(tmp_path / "model")
    make_pixel_pipeline(patched=False).save_pretrained(tmp_path / "model")
    assert not (tmp_path / "model" / "preproj").exists()
    assert not mmpreproj.is_patched(load(tmp_path / "model").transformer)


def test_a_loaded_pipeline_saves_again(make_pixel_pipeline, load, draw, tmp_path):
    pipe = make_pixel_pipeline()
    pipe.save_pretrained(tmp_path / "first")
    load(tmp_path / "first").save_pretrained(tmp_path / "second")
    shutil.rmtree(tmp_path / "first")
    assert alike(draw(load(tmp_path / "second")), draw(pipe))


def test_variants_and_formats_pass_through(make_pixel_pipeline, load, draw, tmp_path):
    pipe = make_pixel_pipeline()
    pipe.save_pretrained(tmp_path / "model", variant="fp16", max_shard_size="20KB")
    assert len(list((tmp_path / "model" / "transformer").glob("*fp16-0000*.safetensors"))) > 1
    assert alike(draw(load(tmp_path / "model", variant="fp16")), draw(pipe))


def test_the_dtype_asked_for_is_the_adapters_too(make_pixel_pipeline, load, draw, tmp_path):
    make_pixel_pipeline().save_pretrained(tmp_path / "model")
    loaded = load(tmp_path / "model", dtype=torch.bfloat16)
    assert {value.dtype for value in adapter_of(loaded).values()} == {torch.bfloat16}
    assert np.isfinite(draw(loaded)).all()


def test_a_patched_transformer_that_is_passed_stays_as_it_is(make_pixel_pipeline, shake, load, tmp_path):
    make_pixel_pipeline().save_pretrained(tmp_path / "model")
    mine = make_pixel_pipeline()
    shake(mine.transformer, seed=9)
    before = adapter_of(mine)
    assert same(adapter_of(load(tmp_path / "model", transformer=mine.transformer)), before)


def test_an_unpatched_transformer_that_is_passed_gets_the_folders_adapter(make_pixel_pipeline, load, tmp_path):
    pipe = make_pixel_pipeline()
    pipe.save_pretrained(tmp_path / "model")
    base = make_pixel_pipeline(patched=False).transformer
    loaded = load(tmp_path / "model", transformer=base)
    assert loaded.transformer is base and same(adapter_of(loaded), adapter_of(pipe))


def test_components_may_be_left_out_or_replaced_when_loading(stock_components, make_vae, load, tmp_path):
    PreProjSD3Pipeline(**stock_components).save_pretrained(tmp_path / "model")
    vae = make_vae("tiny")
    loaded = load(tmp_path / "model", text_encoder_3=None, tokenizer_3=None, vae=vae)
    assert loaded.text_encoder_3 is None and loaded.tokenizer_3 is None and loaded.vae is vae


def test_from_pipe_takes_components_as_they_are(make_pixel_pipeline, tmp_path):
    make_pixel_pipeline().save_pretrained(tmp_path / "model")
    pipe = load_directly(tmp_path / "model")
    mmpreproj.unpatch(pipe.transformer)
    made = PreProjSD3Pipeline.from_pipe(pipe)
    assert made.transformer is pipe.transformer and not mmpreproj.is_patched(pipe.transformer)
    assert made.name_or_path == pipe.name_or_path == tmp_path / "model"


def test_from_pipe_casts_nothing_unless_told_to(stock_components, shake, draw):
    """diffusers' own casts what both pipelines share to float32."""
    pipe = patched(stock_components, shake)
    pipe.transformer.bfloat16()
    made = PreProjSD3Pipeline.from_pipe(pipe)
    assert (made.transformer.dtype, made.vae.dtype) == (torch.bfloat16, torch.float32)
    assert adapter_of(made).keys() and {value.dtype for value in adapter_of(made).values()} == {torch.bfloat16}
    assert PreProjSD3Pipeline.from_pipe(pipe, dtype=torch.float64).vae.dtype == torch.float64


@pytest.mark.parametrize("file", ["adapter_model.safetensors", "adapter_config.json"])
def test_a_damaged_adapter_is_refused(make_pixel_pipeline, load, tmp_path, file):
    make_pixel_pipeline().save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "preproj" / file).write_bytes(b"\x00 not this")
    with pytest.raises(ValueError, match=file):
        load(tmp_path / "model")


def test_half_an_adapter_is_refused(make_pixel_pipeline, load, tmp_path):
    make_pixel_pipeline().save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "preproj" / "adapter_model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"adapter_model\.safetensors"):
        load(tmp_path / "model")


def test_the_weights_alone_are_a_whole_adapter(make_pixel_pipeline, load, tmp_path):
    """A first save that was broken off before the config was written."""
    pipe = make_pixel_pipeline()
    pipe.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "preproj" / "adapter_config.json").unlink()
    weights = dict(mmpreproj.named_parameters(pipe.transformer))
    found = dict(mmpreproj.named_parameters(load(tmp_path / "model").transformer))
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[key], weights[key]) for key in weights)


def test_an_adapter_with_a_foreign_key_is_refused(make_pixel_pipeline, load, tmp_path):
    make_pixel_pipeline().save_pretrained(tmp_path / "model")
    path = tmp_path / "model" / "preproj" / "adapter_model.safetensors"
    save_file({**load_file(path), "stranger": torch.zeros(1)}, path)
    with pytest.raises(ValueError, match="stranger"):
        load(tmp_path / "model")


def test_an_adapter_that_is_not_finite_writes_nothing(make_pixel_pipeline, tmp_path):
    pipe = make_pixel_pipeline()
    with torch.no_grad():
        next(iter(mmpreproj.parameters(pipe.transformer))).fill_(float("nan"))
    with pytest.raises(ValueError, match="NaN or infinite"):
        pipe.save_pretrained(tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_file_in_place_of_the_folder_is_refused(make_pixel_pipeline, tmp_path):
    (tmp_path / "model").write_text("")
    with pytest.raises(ValueError, match="save_directory must be a folder"):
        make_pixel_pipeline().save_pretrained(tmp_path / "model")


# --- the hub ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def snapshot_of(tmp_path):
    """Lay out a pipeline as huggingface_hub caches the repository `somebody/tiny`."""

    def save(pipe):
        repository = tmp_path / "cache" / "models--somebody--tiny"
        pipe.save_pretrained(repository / "snapshots" / COMMIT)
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text(COMMIT)
        return repository / "snapshots" / COMMIT

    return save


def load_from_hub(load, tmp_path, **kwargs):
    return load("somebody/tiny", cache_dir=tmp_path / "cache", local_files_only=True, **kwargs)


def test_a_cached_hub_model_brings_its_adapter(make_pixel_pipeline, load, snapshot_of, tmp_path):
    pipe = make_pixel_pipeline()
    snapshot_of(pipe)
    assert same(adapter_of(load_from_hub(load, tmp_path)), adapter_of(pipe))


def test_a_cached_hub_model_without_an_adapter_loads_offline(make_pixel_pipeline, load, snapshot_of, tmp_path):
    snapshot_of(make_pixel_pipeline(patched=False))
    assert not mmpreproj.is_patched(load_from_hub(load, tmp_path).transformer)


def test_an_adapter_still_on_the_hub_is_fetched_at_the_same_commit(
    make_pixel_pipeline, load, snapshot_of, tmp_path, monkeypatch
):
    pipe = make_pixel_pipeline()
    snapshot = snapshot_of(pipe)
    (snapshot / "preproj").rename(tmp_path / "on-the-hub")
    calls = []

    def download(repo_id, **kwargs):
        calls.append((repo_id, kwargs))
        shutil.copytree(tmp_path / "on-the-hub", snapshot / "preproj")
        return str(snapshot)

    monkeypatch.setattr(adapter_folder, "snapshot_download", download)
    passed = make_pixel_pipeline(patched=False).transformer
    assert same(adapter_of(load_from_hub(load, tmp_path, transformer=passed)), adapter_of(pipe))
    ((repo_id, settings),) = calls
    assert (repo_id, settings["revision"], settings["cache_dir"]) == ("somebody/tiny", COMMIT, tmp_path / "cache")
    assert "preproj/*" in settings["allow_patterns"]


def test_an_adapter_that_cannot_be_fetched_is_an_error(make_pixel_pipeline, load, snapshot_of, tmp_path, monkeypatch):
    from huggingface_hub.errors import LocalEntryNotFoundError

    def offline(repo_id, **kwargs):
        raise LocalEntryNotFoundError("the snapshot is incomplete")

    snapshot_of(make_pixel_pipeline(patched=False))
    monkeypatch.setattr(adapter_folder, "snapshot_download", offline)
    with pytest.raises(ValueError, match=r"preproj/ of somebody/tiny could not be fetched .*incomplete"):
        load_from_hub(load, tmp_path)


def test_a_hub_id_of_which_nothing_was_loaded_is_a_warning(make_pixel_pipeline, snapshot_of, tmp_path, caplog):
    pipe = make_pixel_pipeline()
    snapshot_of(pipe)
    mine = make_pixel_pipeline(patched=False).components
    passed = {key: mine[key] for key in ("transformer", "text_encoder", "tokenizer")}
    loaded = load_from_hub(load_directly, tmp_path, **passed)
    assert not mmpreproj.is_patched(loaded.transformer)
    assert "its adapter, if it has one, was not looked for" in caplog.text


def test_pushing_sends_the_adapter_along(make_pixel_pipeline, tmp_path, monkeypatch):
    sent = []

    def upload(*, folder_path, **_):
        sent.extend(path.name for path in (tmp_path / "model" / "preproj").iterdir())

    utilities = "diffusers.pipelines.pipeline_utils"
    monkeypatch.setattr(f"{utilities}.create_repo", lambda repo_id, **_: SimpleNamespace(repo_id=repo_id))
    monkeypatch.setattr(f"{utilities}.load_or_create_model_card", lambda *_, **__: None)
    monkeypatch.setattr(f"{utilities}.populate_model_card", lambda card: SimpleNamespace(save=lambda path: None))
    monkeypatch.setattr("diffusers.utils.hub_utils.upload_folder", upload)
    monkeypatch.setattr(adapter_folder, "file_exists", lambda *_, **__: False)
    make_pixel_pipeline().save_pretrained(tmp_path / "model", push_to_hub=True, repo_id="somebody/tiny")
    assert sorted(sent) == ["adapter_config.json", "adapter_model.safetensors"]


def test_pushing_a_base_over_an_adapter_on_the_hub_is_refused(make_pixel_pipeline, monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(adapter_folder, "file_exists", lambda repo_id, path, **_: asked.append(path) or True)
    with pytest.raises(ValueError, match="holds an adapter in preproj/, but this pipeline carries none"):
        make_pixel_pipeline(patched=False)._upload_folder(tmp_path, "somebody/tiny", subfolder="small")
    assert asked == ["small/preproj/adapter_config.json"]
