"""Point clouds from prompts, against an Euler loop by hand and against each other."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import cpu_offload
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler, StableDiffusion3Pipeline

import mmpreproj
from mmpreproj import PointPathConfig, PreProjConfig
from mmpreproj.pipelines import PreProjSD3Pipeline, PreProjShapePipeline, shapes
from mmpreproj.points import point_velocity

PIPELINES = Path(__file__).resolve().parents[2] / "pipelines"
WITH_POINTS = PreProjConfig(points=PointPathConfig())


def seeds(*numbers):
    return [torch.Generator().manual_seed(number) for number in numbers]


@pytest.fixture
def make_pipe(make_pixel_pipeline):
    """Build a shape pipeline on a BERT and a transformer whose point path does something."""

    def make(points=None, **overrides):
        config = PreProjConfig(points=points or PointPathConfig())
        pipe = PreProjShapePipeline(**make_pixel_pipeline(config=config, **overrides).components)
        pipe.set_progress_bar_config(disable=True)
        return pipe

    return make


@pytest.fixture
def make_stock_pipe(stock_components, shake):
    """Build a shape pipeline on the components of stock SD3: CLIP, T5 and a VAE."""

    def make(**overrides):
        mmpreproj.patch(stock_components["transformer"], WITH_POINTS)
        shake(stock_components["transformer"])
        pipe = PreProjShapePipeline(**(stock_components | overrides))
        pipe.set_progress_bar_config(disable=True)
        return pipe

    return make


def make_clouds(pipe, prompt="red apple", **kwargs):
    """Make clouds of 16 points in three steps from a fixed seed."""
    given = kwargs.keys() & {"generator", "noise"}
    settings = {"num_points": 16, "num_inference_steps": 3} | ({} if given else {"generator": seeds(7)[0]})
    return pipe(prompt, **(settings | kwargs)).clouds


def by_hand(pipe, noise, text, negative=None, *, steps, guidance):
    """Flow from noise to clouds by Euler steps, one line each."""
    spread = 2.0
    points, times = noise, [(steps - step) / steps for step in range(steps + 1)]
    for now, after in itertools.pairwise(times):

        def velocity(pooled, points=points, now=now):
            timestep = torch.full((len(points),), 1000.0 * now)
            return point_velocity(pipe.transformer, points, timestep=timestep, pooled_projections=pooled)

        found = velocity(text)
        if negative is not None:
            found = (1 - guidance) * velocity(negative) + guidance * found
        points = points + (after - now) * found
    return torch.cat([points[..., :3] / spread, points[..., 3:]], dim=-1)


# --- what comes out --------------------------------------------------------------------------------------------------


def test_a_cloud_is_an_array_or_a_tensor_of_any_number_of_points(make_pipe):
    pipe = make_pipe()
    for count in (1, 5, 300):
        clouds = make_clouds(pipe, num_points=count)
        assert isinstance(clouds, np.ndarray) and clouds.dtype == np.float32
        assert clouds.shape == (1, count, 3) and np.isfinite(clouds).all()
    tensor = make_clouds(pipe, output_type="pt")
    assert isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float32
    assert np.array_equal(tensor.numpy(), make_clouds(pipe))
    (lone,) = pipe("red apple", num_points=16, num_inference_steps=3, generator=seeds(7)[0], return_dict=False)
    assert np.array_equal(lone, make_clouds(pipe))


def test_features_come_out_beside_the_coordinates(make_pipe):
    clouds = make_clouds(make_pipe(PointPathConfig(features=4)))
    assert clouds.shape == (1, 16, 7) and np.ptp(clouds, axis=1).min() > 0


def test_points_at_once_are_bounded_and_change_nothing(make_pipe, monkeypatch):
    pipe, prompts = make_pipe(), ["red apple", "green tree"]
    whole, sizes = make_clouds(pipe, prompts), []
    monkeypatch.setattr(shapes, "POINTS_AT_ONCE", 10)

    def note(model, points, **kwargs):
        sizes.append(points.shape[:2].numel())
        return point_velocity(model, points, **kwargs)

    monkeypatch.setattr(shapes, "point_velocity", note)
    np.testing.assert_allclose(make_clouds(pipe, prompts), whole, atol=1e-5)
    assert max(sizes) == 10 and sum(sizes) == 3 * 2 * 2 * 16
    monkeypatch.setattr(shapes, "POINTS_AT_ONCE", 1)  # fewer than clouds: one point of each
    np.testing.assert_allclose(make_clouds(pipe, prompts), whole, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("guidance", [0.0, 1.0, 1.5, 4.0])
def test_clouds_are_euler_steps_by_hand(make_pipe, guidance):
    pipe, noise = make_pipe(PointPathConfig(features=1)), torch.randn(2, 16, 4)
    prompts = ["red apple", "green tree"]
    _, _, text, negative = pipe.encode_prompt(prompts, None, None, negative_prompt="heart")
    found = make_clouds(
        pipe,
        prompts,
        noise=noise,
        negative_prompt="heart",
        guidance_scale=guidance,
        num_inference_steps=4,
        output_type="pt",
    )
    guided = negative if guidance > 1 else None
    torch.testing.assert_close(
        found, by_hand(pipe, noise, text, guided, steps=4, guidance=guidance), rtol=1e-4, atol=1e-4
    )


def test_no_guidance_computes_half(make_pipe, monkeypatch):
    pipe, calls = make_pipe(), []

    def note(*args, **kwargs):
        calls.append(args)
        return point_velocity(*args, **kwargs)

    monkeypatch.setattr(shapes, "point_velocity", note)
    for guidance, expected in ((1.0, 3), (2.0, 6)):
        calls.clear()
        make_clouds(pipe, guidance_scale=guidance)
        assert len(calls) == expected


def test_prompt_negative_prompt_guidance_and_steps_change_the_cloud(make_pipe):
    pipe = make_pipe()
    settings = [{}, {"prompt": "green tree"}, {"negative_prompt": "heart"}, {"guidance_scale": 1.0}]
    settings.append({"num_inference_steps": 4})
    clouds = [make_clouds(pipe, **change) for change in settings]
    for place, cloud in enumerate(clouds):
        assert all(np.abs(cloud - other).max() > 1e-4 for other in clouds[:place])
    assert np.array_equal(make_clouds(pipe, negative_prompt=""), clouds[0])


@pytest.mark.parametrize("settings", [{"shift": 3.0}, {"use_dynamic_shifting": True}, {"use_karras_sigmas": True}])
def test_the_schedule_of_pictures_does_not_matter(make_pipe, settings):
    shifted = make_pipe(scheduler=FlowMatchEulerDiscreteScheduler(**settings))
    assert np.array_equal(make_clouds(shifted), make_clouds(make_pipe()))


def test_the_pipelines_scheduler_is_left_as_it_was(make_pipe):
    pipe = make_pipe()
    before = pipe.scheduler.timesteps.clone()
    make_clouds(pipe)
    assert torch.equal(pipe.scheduler.timesteps, before)


# --- seeds and batches -----------------------------------------------------------------------------------------------


def test_same_seed_same_cloud_and_another_seed_another(make_pipe):
    pipe = make_pipe()
    assert np.array_equal(make_clouds(pipe), make_clouds(pipe))
    assert not np.array_equal(make_clouds(pipe), make_clouds(pipe, generator=seeds(8)[0]))


def test_without_a_generator_the_global_one_draws(make_pipe):
    pipe = make_pipe()
    first, second = (make_clouds(pipe, generator=None) for _ in range(2))
    assert not np.array_equal(first, second)
    torch.manual_seed(0)
    expected = make_clouds(pipe, generator=None)
    torch.manual_seed(0)
    assert np.array_equal(make_clouds(pipe, generator=None), expected)


def test_a_cloud_does_not_depend_on_its_neighbours(make_pipe):
    pipe = make_pipe()
    batch = make_clouds(pipe, ["red apple", "green tree"], generator=seeds(1, 2), negative_prompt=["tree", "heart"])
    for index, (prompt, negative) in enumerate((("red apple", "tree"), ("green tree", "heart"))):
        lone = make_clouds(pipe, prompt, generator=seeds(index + 1), negative_prompt=negative)
        np.testing.assert_allclose(batch[index], lone[0], atol=1e-5)


def test_a_point_does_not_depend_on_the_other_points(make_pipe):
    pipe, noise = make_pipe(), torch.randn(1, 16, 3)
    whole = make_clouds(pipe, noise=noise)
    np.testing.assert_allclose(make_clouds(pipe, noise=noise[:, 4:7], num_points=3), whole[:, 4:7], atol=1e-5)
    order = torch.randperm(16)
    np.testing.assert_allclose(make_clouds(pipe, noise=noise[:, order]), whole[:, order], atol=1e-5)


def test_several_shapes_per_prompt_keep_the_order_of_prompts(make_pipe):
    pipe = make_pipe()
    four = make_clouds(
        pipe,
        ["red apple", "green tree"],
        num_shapes_per_prompt=2,
        generator=seeds(1, 2, 3, 4),
        negative_prompt=["heart", "tree"],
    )
    assert four.shape == (4, 16, 3)
    for index, (prompt, negative) in enumerate([("red apple", "heart")] * 2 + [("green tree", "tree")] * 2):
        lone = make_clouds(pipe, prompt, negative_prompt=negative, generator=seeds(index + 1))
        np.testing.assert_allclose(four[index], lone[0], atol=1e-5)


def test_noise_takes_the_place_of_the_generator(make_pipe):
    pipe = make_pipe()
    noise = torch.randn(1, 16, 3, generator=seeds(7)[0])
    assert np.array_equal(make_clouds(pipe, noise=noise), make_clouds(pipe))
    assert np.array_equal(make_clouds(pipe, noise=noise.double()), make_clouds(pipe))


# --- text ------------------------------------------------------------------------------------------------------------


def test_given_embeddings_make_what_their_prompt_makes(make_pipe):
    pipe = make_pipe()
    _, _, pooled, negative = pipe.encode_prompt(["red apple", "green tree"], None, None)
    expected = make_clouds(pipe, ["red apple", "green tree"], num_shapes_per_prompt=2)
    textless = make_pipe(text_encoder=None, tokenizer=None)
    given = {"pooled_prompt_embeds": pooled, "negative_pooled_prompt_embeds": negative, "num_shapes_per_prompt": 2}
    for other in (pipe, textless):
        assert np.array_equal(make_clouds(other, None, **given), expected)
    found = make_clouds(textless, None, pooled_prompt_embeds=pooled[:1], guidance_scale=1.0)
    assert np.array_equal(found, make_clouds(pipe, guidance_scale=1.0))


@pytest.mark.parametrize("without_t5", [False, True])
def test_clip_encoders_make_clouds(make_stock_pipe, without_t5):
    pipe = make_stock_pipe(**({"text_encoder_3": None, "tokenizer_3": None} if without_t5 else {}))
    _, _, text, negative = pipe.encode_prompt(["red", "green"], None, None)
    noise = torch.randn(2, 16, 3)
    found = make_clouds(pipe, ["red", "green"], noise=noise, output_type="pt")
    with torch.no_grad():
        expected = by_hand(pipe, noise, text, negative, steps=3, guidance=2.0)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert not np.array_equal(found[0], found[1])


# --- dtypes and places -----------------------------------------------------------------------------------------------


def test_bfloat16_makes_float32_clouds_close_to_float32s(make_pipe):
    pipe = make_pipe()
    expected = make_clouds(pipe)
    pipe.transformer.bfloat16()
    found = make_clouds(pipe)
    assert found.dtype == np.float32
    assert np.abs(found - expected).mean() < 0.1 * expected.std()  # rough steps enlarge what is rounded
    pooled = torch.zeros(1, 24)  # float32, as they may lie in a file
    assert np.isfinite(make_clouds(pipe, None, pooled_prompt_embeds=pooled, guidance_scale=1.0)).all()


@pytest.mark.parametrize("style", ["sd3", "sd35"], indirect=True)
def test_every_style_of_transformer_makes_clouds(make_pipe, make_transformer, shake, style):
    transformer = make_transformer(style, in_channels=3, out_channels=3, pooled_projection_dim=24)
    mmpreproj.patch(transformer, WITH_POINTS)
    shake(transformer)
    assert np.isfinite(make_clouds(make_pipe(transformer=transformer))).all()


@pytest.mark.parametrize("way", ["whole", "leaves", "groups"])
def test_offloading_changes_no_cloud(make_stock_pipe, way):
    pipe, cpu = make_stock_pipe(), torch.device("cpu")
    expected = make_clouds(pipe)
    if way == "whole":
        pipe.enable_model_cpu_offload(device="cpu")
    elif way == "leaves":
        cpu_offload(pipe.transformer, execution_device=cpu)
    else:
        pipe.transformer.enable_group_offload(cpu, offload_type="block_level", num_blocks_per_group=1)
    for _ in range(2):
        np.testing.assert_allclose(make_clouds(pipe), expected, atol=1e-5)


def test_layerwise_casting_keeps_clouds_close(make_stock_pipe):
    pipe = make_stock_pipe()
    expected = make_clouds(pipe)
    pipe.transformer.bfloat16()
    pipe.transformer.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.bfloat16)
    assert np.abs(make_clouds(pipe) - expected).mean() < 0.2 * expected.std()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("offload", ["enable_model_cpu_offload", "enable_sequential_cpu_offload"])
def test_offloading_from_a_gpu_changes_no_cloud(make_stock_pipe, offload):
    pipe = make_stock_pipe()
    expected = make_clouds(pipe.to("cuda"))
    getattr(pipe.to("cpu"), offload)()
    for _ in range(2):
        np.testing.assert_allclose(make_clouds(pipe), expected, atol=1e-3)
    assert {parameter.device.type for parameter in pipe.transformer.parameters()} <= {"cpu", "meta"}


def test_no_gradients_are_kept(make_pipe):
    assert not make_clouds(make_pipe(), output_type="pt").requires_grad


def test_the_progress_bar_can_be_disabled(make_pipe, capfd):
    pipe = make_pipe()
    make_clouds(pipe)
    assert capfd.readouterr().err == ""
    pipe.set_progress_bar_config(disable=False)
    make_clouds(pipe)
    assert "3/3" in capfd.readouterr().err


# --- folders and other pipelines -------------------------------------------------------------------------------------


def load_directly(folder, **kwargs):
    return PreProjShapePipeline.from_pretrained(folder, **kwargs)


def load_as_custom_pipeline(folder, **kwargs):
    file = str(PIPELINES / "shapes.py")
    return DiffusionPipeline.from_pretrained(folder, custom_pipeline=file, trust_remote_code=True, **kwargs)


@pytest.mark.parametrize("load", [load_directly, load_as_custom_pipeline])
def test_a_saved_folder_makes_the_same_clouds(make_pipe, tmp_path, load):
    pipe = make_pipe()
    pipe.save_pretrained(tmp_path / "model")
    assert (tmp_path / "model" / "preproj" / "adapter_config.json").is_file()
    loaded = load(tmp_path / "model")
    assert type(loaded) is PreProjShapePipeline
    np.testing.assert_allclose(make_clouds(loaded), make_clouds(pipe), atol=1e-5)


def test_one_folder_serves_both_classes(make_pipe, draw, tmp_path):
    pipe = make_pipe()
    pipe.save_pretrained(tmp_path / "model")
    pictures = PreProjSD3Pipeline.from_pretrained(tmp_path / "model")
    np.testing.assert_allclose(draw(pictures), draw(PreProjSD3Pipeline(**pipe.components)), atol=1e-5)
    pictures.save_pretrained(tmp_path / "again")
    loaded = PreProjShapePipeline.from_pretrained(tmp_path / "again")
    np.testing.assert_allclose(make_clouds(loaded), make_clouds(pipe), atol=1e-5)


def test_the_folder_around_the_adapter_is_a_stock_one(make_stock_pipe, tmp_path):
    make_stock_pipe().save_pretrained(tmp_path / "model")
    stock = DiffusionPipeline.from_pretrained(tmp_path / "model")
    assert type(stock) is StableDiffusion3Pipeline
    assert not any("preproj" in key for key in stock.transformer.state_dict())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_from_pipe_shares_components_both_ways_as_they_are(make_pipe, draw, dtype):
    pipe = make_pipe()
    pipe.transformer.to(dtype)
    expected = make_clouds(pipe)
    pictures = PreProjSD3Pipeline.from_pipe(pipe)
    assert type(pictures) is PreProjSD3Pipeline and pictures.transformer is pipe.transformer
    picture = draw(pictures)
    back = PreProjShapePipeline.from_pipe(pictures)
    back.set_progress_bar_config(disable=True)
    assert type(back) is PreProjShapePipeline and back.transformer is pipe.transformer
    assert {parameter.dtype for parameter in mmpreproj.parameters(pipe.transformer)} == {dtype}
    assert np.array_equal(make_clouds(back), expected)
    assert np.array_equal(draw(pictures), picture)


def test_a_loaded_pipeline_still_knows_its_adapter_after_from_pipe(make_pipe, tmp_path):
    make_pipe().save_pretrained(tmp_path / "model")
    pictures = PreProjSD3Pipeline.from_pretrained(tmp_path / "model")
    made = PreProjShapePipeline.from_pipe(pictures)
    assert made.name_or_path == pictures.name_or_path
    assert mmpreproj.adapters(made.transformer) == ("default",)


# --- what is refused -------------------------------------------------------------------------------------------------


def test_a_transformer_without_a_point_path_is_refused(make_pixel_pipeline):
    for patched in (False, True):
        pipe = PreProjShapePipeline.from_pipe(make_pixel_pipeline(patched=patched))
        with pytest.raises(ValueError, match="SD3Transformer2DModel has no point path; add one with mmpreproj"):
            make_clouds(pipe)


def test_a_path_that_does_not_generate_is_refused(make_pipe):
    with pytest.raises(ValueError, match="made with generate=False, so it generates no clouds"):
        make_clouds(make_pipe(PointPathConfig(generate=False)))


def test_an_adapter_without_effect_is_refused(make_pipe):
    pipe = make_pipe()
    expected = make_clouds(pipe)
    with mmpreproj.disabled(pipe.transformer), pytest.raises(ValueError, match="switched off or at scale 0"):
        make_clouds(pipe)
    mmpreproj.set_scale(pipe.transformer, 0)
    with pytest.raises(ValueError, match=r"call mmpreproj\.enable\(model\) and mmpreproj\.set_scale"):
        make_clouds(pipe)
    mmpreproj.set_scale(pipe.transformer, 1)
    assert np.array_equal(make_clouds(pipe), expected)


@pytest.mark.parametrize("name", ["num_points", "num_inference_steps", "num_shapes_per_prompt"])
@pytest.mark.parametrize("value", [0, -1, 2.0, True, None, "3"])
def test_counts_are_whole_numbers(make_pipe, name, value):
    with pytest.raises(ValueError, match=f"{name} must be a whole number of at least 1; got {value!r}"):
        make_clouds(make_pipe(), **{name: value})


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"output_type": "pil"}, ValueError, "output_type must be one of 'np', 'pt'; got 'pil'"),
        ({"guidance_scale": float("nan")}, ValueError, "guidance_scale must be a finite number; got nan"),
        ({"guidance_scale": float("inf")}, ValueError, "guidance_scale must be a finite number; got inf"),
        ({"prompt": None}, ValueError, "give either prompt or pooled_prompt_embeds"),
        ({"pooled_prompt_embeds": torch.zeros(1, 24)}, ValueError, "give either prompt or pooled_prompt_embeds"),
        ({"prompt": []}, TypeError, r"prompt must be a string or a list of strings; got \[\]"),
        ({"prompt": 3}, TypeError, r"prompt must be a string or a list of strings; got 3 \(int\)"),
        ({"prompt": ["red", 3]}, TypeError, "prompt 1 must be a string"),
        ({"negative_prompt": ["a", "b"]}, TypeError, "negative_prompt must be a string like prompt"),
        ({"prompt": ["a"], "negative_prompt": ["a", "b"]}, ValueError, "2 entries for 1 prompts"),
        ({"negative_pooled_prompt_embeds": torch.zeros(1, 24)}, ValueError, "beside prompt, negative_prompt does"),
        ({"noise": torch.zeros(1, 16, 4)}, ValueError, r"shape \[1, 16, 3\]; got \[1, 16, 4\]"),
        ({"noise": torch.zeros(1, 15, 3)}, ValueError, r"shape \[1, 16, 3\]; got \[1, 15, 3\]"),
        ({"noise": np.zeros((1, 16, 3))}, ValueError, "noise must be a tensor of the shape .* got ndarray"),
        ({"generator": seeds(1, 2)}, ValueError, "there are 2 generators for 1 clouds; give one, or one for each"),
        ({"prompt": ["a", "b"], "generator": seeds(1)}, ValueError, "there are 1 generators for 2 clouds"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(make_pipe, change, error, match):
    with pytest.raises(error, match=match):
        make_clouds(make_pipe(), **change)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({}, "guidance needs negative_pooled_prompt_embeds beside pooled_prompt_embeds"),
        ({"negative_prompt": "tree"}, "negative_prompt goes with prompt; beside pooled_prompt_embeds"),
        ({"pooled_prompt_embeds": torch.zeros(24)}, r"a tensor \[24, 24\], negative ones too; got \[24\]"),
        ({"pooled_prompt_embeds": torch.zeros(2, 20)}, r"a tensor \[2, 24\], negative ones too; got \[2, 20\]"),
        ({"negative_pooled_prompt_embeds": torch.zeros(2, 24)}, r"a tensor \[1, 24\], .* got \[2, 24\]"),
        ({"negative_pooled_prompt_embeds": [0.0] * 24}, r"a tensor \[1, 24\], .* got list"),
    ],
)
def test_embeddings_that_do_not_fit_are_refused(make_pipe, given, match):
    both = {"pooled_prompt_embeds": torch.zeros(1, 24)} | given
    if "pooled_prompt_embeds" in given:
        both["negative_pooled_prompt_embeds"] = torch.zeros(1, 24)
    with pytest.raises(ValueError, match=match):
        make_clouds(make_pipe(), None, **both)


def test_prompts_without_an_encoder_are_refused(make_pipe):
    with pytest.raises(ValueError, match="no text_encoder, tokenizer"):
        make_clouds(make_pipe(text_encoder=None, tokenizer=None))


def test_clouds_that_are_not_finite_are_refused(make_pipe):
    pipe = make_pipe()
    with torch.no_grad():
        next(iter(pipe.transformer.preproj_points.path.head.parameters())).fill_(float("nan"))
    with pytest.raises(ValueError, match="the generated points are NaN or infinite; load the model in bfloat16"):
        make_clouds(pipe)
    with pytest.raises(ValueError, match="the generated points are NaN or infinite"):
        make_clouds(make_pipe(), noise=torch.full((1, 16, 3), float("inf")))


def test_a_lost_adapter_is_refused(make_pipe, make_transformer, tmp_path):
    make_pipe().save_pretrained(tmp_path / "model")
    pipe = PreProjShapePipeline.from_pretrained(tmp_path / "model")
    pipe.transformer = make_transformer(in_channels=3, out_channels=3, pooled_projection_dim=24)
    with pytest.raises(ValueError, match="was put in afterwards and carries none"):
        make_clouds(pipe)
