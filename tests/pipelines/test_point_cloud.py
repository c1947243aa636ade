"""Pictures of a point cloud: `point_cloud=` against clouds given to the transformer by hand."""

import copy
import inspect

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, StableDiffusion3Img2ImgPipeline, StableDiffusion3Pipeline

import mmpreproj
from mmpreproj import PointPathConfig, Positions, PreProjConfig
from mmpreproj.patching.hooks import POINT_CLOUD, POINT_MASK
from mmpreproj.pipelines import PreProjSD3Pipeline
from mmpreproj.points import add_point_path

SKIPPING = {"skip_guidance_layers": [0], "skip_layer_guidance_start": 0.0, "skip_layer_guidance_stop": 1.0}


def cloud(count=12, *, seed=0, features=0):
    return np.random.default_rng(seed).standard_normal((count, 3 + features)).astype(np.float32)


def head_of(pipe):
    return pipe.transformer.preproj_points.path


@pytest.fixture
def make_pipe(make_pixel_pipeline):
    """Build a pipeline on a BERT and a transformer whose point path does something."""

    def make(points=None, **settings):
        return make_pixel_pipeline(config=PreProjConfig(points=points or PointPathConfig(), **settings))

    return make


def beside(shown, *, guided=True, copies=1):
    """The doubled batch by hand: a padded cloud for each picture, behind as many without."""
    longest = max(map(len, shown))
    clouds, mask = torch.zeros(len(shown), longest, shown[0].shape[1]), torch.zeros(len(shown), longest).bool()
    for place, points in enumerate(shown):
        clouds[place, : len(points)], mask[place, : len(points)] = torch.from_numpy(points), True
    clouds, mask = clouds.repeat_interleave(copies, 0), mask.repeat_interleave(copies, 0)
    if guided:
        clouds, mask = torch.cat([torch.zeros_like(clouds), clouds]), torch.cat([torch.zeros_like(mask), mask])
    return {"joint_attention_kwargs": {POINT_CLOUD: clouds, POINT_MASK: mask}}


# --- as by hand ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("guidance", [1.0, 4.0])
@pytest.mark.parametrize("features", [0, 3])
def test_a_cloud_is_the_doubled_batch_by_hand(make_pipe, draw, guidance, features):
    pipe, shown = make_pipe(PointPathConfig(features=features)), cloud(features=features)
    by_hand = draw(pipe, guidance_scale=guidance, **beside([shown], guided=guidance > 1))
    assert np.array_equal(draw(pipe, guidance_scale=guidance, point_cloud=shown), by_hand)
    assert np.abs(by_hand - draw(pipe, guidance_scale=guidance)).max() > 1e-3


@pytest.mark.parametrize("kind", [np.float64, np.float32, "tensor", "double tensor", "bfloat16 batch", "list"])
def test_arrays_tensors_batches_and_lists_are_clouds(make_pipe, draw, kind):
    pipe, shown = make_pipe(), np.round(cloud(), 1)  # whole numbers of tenths hold in every kind, but for bfloat16
    tensor = torch.from_numpy(shown)
    given, expected = {
        np.float64: (shown.astype(np.float64), shown),
        np.float32: (shown, shown),
        "tensor": (tensor, shown),
        "double tensor": (tensor.double(), shown),
        "bfloat16 batch": (tensor.bfloat16()[None], tensor.bfloat16().float().numpy()),
        "list": ([shown], shown),
    }[kind]
    assert np.array_equal(draw(pipe, point_cloud=given), draw(pipe, **beside([expected])))


def test_one_cloud_for_all_prompts_or_one_each(make_pipe, draw):
    pipe, prompts = make_pipe(), ["red apple", "green tree"]
    first, second = cloud(12, seed=1), cloud(30, seed=2)
    settings = {"generator": [torch.Generator().manual_seed(seed) for seed in (1, 2)]}

    def pictures(**given):
        settings["generator"] = [torch.Generator().manual_seed(seed) for seed in (1, 2)]
        return draw(pipe, prompts, **settings, **given)

    assert np.array_equal(pictures(point_cloud=first), pictures(**beside([first, first])))
    each = pictures(point_cloud=[first, second])
    assert np.array_equal(each, pictures(**beside([first, second])))
    assert np.abs(each - pictures(point_cloud=[second, first])).max() > 1e-3
    for index, (prompt, shown) in enumerate(zip(prompts, (first, second), strict=True)):
        lone = draw(pipe, prompt, generator=torch.Generator().manual_seed(index + 1), point_cloud=shown)
        np.testing.assert_allclose(each[index], lone[0], atol=1e-5)
    batch = np.stack([first, cloud(12, seed=3)])
    assert np.array_equal(pictures(point_cloud=batch), pictures(point_cloud=list(batch)))


@pytest.mark.parametrize("guidance", [1.0, 4.0])
def test_several_images_per_prompt_show_the_prompts_cloud(make_pipe, draw, guidance):
    pipe, prompts = make_pipe(), ["red apple", "green tree"]
    shown = [cloud(12, seed=1), cloud(30, seed=2)]
    settings = {"num_images_per_prompt": 2, "guidance_scale": guidance}
    four = draw(pipe, prompts, point_cloud=shown, **settings)
    by_hand = draw(pipe, prompts, **beside(shown, guided=guidance > 1, copies=2), **settings)
    assert four.shape == (4, 8, 8, 3) and np.array_equal(four, by_hand)
    one = draw(pipe, prompts, point_cloud=shown[0], **settings)
    assert np.array_equal(one, draw(pipe, prompts, **beside(shown[:1] * 2, guided=guidance > 1, copies=2), **settings))


def test_given_embeddings_are_counted_as_prompts(make_pipe, draw):
    pipe, prompts, shown = make_pipe(), ["red apple", "green tree"], [cloud(12, seed=1), cloud(30, seed=2)]
    embeds, negative, pooled, negative_pooled = pipe.encode_prompt(prompts, None, None)
    given = {
        "prompt_embeds": embeds,
        "pooled_prompt_embeds": pooled,
        "negative_prompt_embeds": negative,
        "negative_pooled_prompt_embeds": negative_pooled,
    }
    assert np.array_equal(draw(pipe, None, point_cloud=shown, **given), draw(pipe, prompts, point_cloud=shown))
    with pytest.raises(ValueError, match="3 clouds for 2 prompts"):
        draw(pipe, None, point_cloud=[*shown, shown[0]], **given)


def test_skipping_layers_calls_with_the_prompts_alone(stock_components, shake, draw):
    mmpreproj.patch(stock_components["transformer"], PreProjConfig(points=PointPathConfig()))
    shake(stock_components["transformer"])
    pipe, shown, sizes = PreProjSD3Pipeline(**stock_components), cloud(), []

    def note(model, args, kwargs):
        sizes.append(len(kwargs["hidden_states"]))

    pipe.transformer.register_forward_pre_hook(note, with_kwargs=True, prepend=True)
    found = draw(pipe, point_cloud=shown, **SKIPPING)
    assert set(sizes) == {1, 2}
    assert np.abs(found - draw(pipe, **SKIPPING)).max() > 1e-3
    assert np.abs(found - draw(pipe, point_cloud=shown)).max() > 1e-4
    with pytest.raises(ValueError, match="has 2 clouds for a batch of 1"):
        draw(pipe, **beside([shown]), **SKIPPING)


@torch.no_grad()
def test_guidance_leads_towards_the_cloud(make_pipe, draw):
    """Reference: the loop by hand, each half of the guidance by itself, the negative one without the cloud."""
    pipe, shown = make_pipe(), cloud()
    found = draw(pipe, output_type="latent", guidance_scale=3.0, point_cloud=shown)
    tokens, negative, pooled, negative_pooled = pipe.encode_prompt("red apple", None, None)
    latents = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(7))
    scheduler = FlowMatchEulerDiscreteScheduler.from_config(pipe.scheduler.config)
    scheduler.set_timesteps(3)
    for time, sigma, after in zip(scheduler.timesteps, scheduler.sigmas[:-1], scheduler.sigmas[1:], strict=True):
        towards, away = (
            pipe.transformer(
                hidden_states=latents,
                timestep=time[None],
                encoder_hidden_states=text,
                pooled_projections=pool,
                joint_attention_kwargs=extra,
            )[0]
            for text, pool, extra in (
                (tokens, pooled, {POINT_CLOUD: torch.from_numpy(shown)[None]}),
                (negative, negative_pooled, None),
            )
        )
        latents = latents + (after - sigma) * (away + 3.0 * (towards - away))
    torch.testing.assert_close(found, latents, rtol=1e-4, atol=1e-4)


# --- what it does and does not change --------------------------------------------------------------------------------


def test_a_cloud_changes_the_picture_and_another_one_otherwise(make_pipe, draw):
    pipe = make_pipe()
    pictures = [draw(pipe), draw(pipe, point_cloud=cloud()), draw(pipe, point_cloud=cloud(seed=1))]
    for place, picture in enumerate(pictures):
        assert all(np.abs(picture - other).max() > 1e-3 for other in pictures[:place])
    assert np.array_equal(draw(pipe), pictures[0])  # nothing of the cloud stays


def test_order_place_and_size_of_a_cloud_do_not_matter(make_pipe, draw):
    pipe, shown = make_pipe(), cloud()
    expected = draw(pipe, point_cloud=shown)
    np.testing.assert_allclose(draw(pipe, point_cloud=shown[::-1].copy()), expected, atol=1e-5)
    np.testing.assert_allclose(draw(pipe, point_cloud=100 * shown + 7), expected, atol=1e-3)
    as_it_is = make_pipe(PointPathConfig(normalise="none"))
    assert np.abs(draw(as_it_is, point_cloud=2 * shown) - draw(as_it_is, point_cloud=shown)).max() > 1e-3


def test_a_path_that_is_not_trained_changes_nothing(make_pixel_pipeline, draw):
    pipe = make_pixel_pipeline()
    before = draw(pipe)
    add_point_path(pipe.transformer)
    assert np.array_equal(draw(pipe, point_cloud=cloud()), before)


@pytest.mark.parametrize("off", ["scale 0", "disabled"])
def test_an_adapter_without_effect_draws_the_base(make_pixel_pipeline, make_pipe, draw, off):
    base, pipe = draw(make_pixel_pipeline(patched=False)), make_pipe()
    shown = draw(pipe, point_cloud=cloud())
    mmpreproj.set_scale(pipe.transformer, 0) if off == "scale 0" else mmpreproj.disable(pipe.transformer)
    assert np.array_equal(draw(pipe, point_cloud=cloud()), base)
    mmpreproj.set_scale(pipe.transformer, 1) if off == "scale 0" else mmpreproj.enable(pipe.transformer)
    assert np.array_equal(draw(pipe, point_cloud=cloud()), shown)


def test_no_cloud_is_the_call_as_before(make_pipe, draw):
    pipe = make_pipe()
    assert np.array_equal(draw(pipe, point_cloud=None), draw(pipe))


def test_the_callers_arguments_are_left_alone(make_pipe, draw):
    pipe, shown, given = make_pipe(), cloud(), {}
    before = shown.copy()
    draw(pipe, point_cloud=shown, joint_attention_kwargs=given)
    assert given == {} and np.array_equal(shown, before)


def test_offloading_changes_no_picture(stock_components, shake, draw):
    mmpreproj.patch(stock_components["transformer"], PreProjConfig(points=PointPathConfig()))
    shake(stock_components["transformer"])
    pipe = PreProjSD3Pipeline(**stock_components)
    expected = draw(pipe, point_cloud=cloud())
    pipe.enable_model_cpu_offload(device="cpu")
    for _ in range(2):
        np.testing.assert_allclose(draw(pipe, point_cloud=cloud()), expected, atol=1e-5)


def test_bfloat16_shows_the_cloud_too(make_pipe, draw):
    pipe = make_pipe()
    pipe.transformer.bfloat16()
    shown, bare = draw(pipe, point_cloud=cloud()), draw(pipe)
    assert np.isfinite(shown).all() and np.abs(shown - bare).max() > 1e-2


# --- with other things -----------------------------------------------------------------------------------------------


def test_clouds_go_together_with_positions_and_padding(make_pipe, draw):
    pipe, shown = make_pipe(positions=Positions(), mask_padding=True), [cloud(12, seed=1), cloud(30, seed=2)]
    prompts = ["red apple", "green"]
    found = draw(pipe, prompts, point_cloud=shown)
    masks = [pipe.encode_prompt_mask(["", ""]), pipe.encode_prompt_mask(prompts)]
    by_hand = beside(shown)
    by_hand["joint_attention_kwargs"]["attention_mask"] = torch.cat(masks)
    assert np.array_equal(found, draw(pipe, prompts, **by_hand))
    assert np.abs(found - draw(pipe, prompts)).max() > 1e-3
    given = {"joint_attention_kwargs": {"attention_mask": torch.cat(masks)}}
    assert np.array_equal(found, draw(pipe, prompts, point_cloud=shown, **given))
    everything = {"joint_attention_kwargs": {"attention_mask": torch.ones_like(torch.cat(masks))}}
    assert np.abs(found - draw(pipe, prompts, point_cloud=shown, **everything)).max() > 1e-4


@pytest.mark.parametrize("cls", [StableDiffusion3Pipeline, StableDiffusion3Img2ImgPipeline])
def test_a_stock_pipeline_shows_a_cloud_given_by_hand(stock_components, shake, draw, cls):
    mmpreproj.patch(stock_components["transformer"], PreProjConfig(points=PointPathConfig()))
    shake(stock_components["transformer"])
    shown, extra = cloud(), {}
    if cls is StableDiffusion3Img2ImgPipeline:
        extra = {"image": torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(3)), "strength": 0.7}
    stock = cls(**stock_components)
    found = draw(stock, **beside([shown]), **extra)
    assert np.abs(found - draw(stock, **extra)).max() > 1e-3
    if not extra:
        assert np.array_equal(found, draw(PreProjSD3Pipeline(**stock_components), point_cloud=shown))


def test_a_saved_pipeline_shows_the_same(make_pipe, draw, tmp_path):
    pipe = make_pipe(PointPathConfig(features=2, generate=False))
    pipe.save_pretrained(tmp_path / "model")
    shown = cloud(features=2)
    loaded = PreProjSD3Pipeline.from_pretrained(tmp_path / "model")
    assert head_of(loaded).head is None
    np.testing.assert_allclose(draw(loaded, point_cloud=shown), draw(pipe, point_cloud=shown), atol=1e-5)


def test_a_copied_pipeline_shows_the_same(make_pipe, draw):
    pipe = make_pipe()
    twin = copy.deepcopy(pipe)
    assert np.array_equal(draw(twin, point_cloud=cloud()), draw(pipe, point_cloud=cloud()))


def test_the_signature_shows_the_argument():
    shown = inspect.signature(PreProjSD3Pipeline.__call__).parameters["point_cloud"]
    assert shown.kind is inspect.Parameter.KEYWORD_ONLY and shown.default is None


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("patched", [False, True])
def test_a_transformer_without_a_point_path_is_refused(make_pixel_pipeline, draw, patched):
    with pytest.raises(ValueError, match="SD3Transformer2DModel has no point path; add one with mmpreproj"):
        draw(make_pixel_pipeline(patched=patched), point_cloud=cloud())


def test_a_path_that_does_not_condition_is_refused(make_pipe, draw):
    with pytest.raises(ValueError, match="made with condition=False, so clouds cannot condition pictures"):
        draw(make_pipe(PointPathConfig(condition=False)), point_cloud=cloud())


def with_value(value):
    shown = cloud()
    shown[5, 1] = value
    return shown


@pytest.mark.parametrize(
    ("shown", "error", "match"),
    [
        (with_value(np.nan), ValueError, "point cloud 0 has NaN or infinite values in 1 of 12 points; the first is"),
        ([cloud(), with_value(np.inf)], ValueError, "point cloud 1 has NaN or infinite values"),
        (cloud(0), ValueError, "point cloud 0 is empty"),
        (cloud(features=1), ValueError, r"point cloud 0 is of shape \[12, 4\]; expected \[P, 3\]"),
        (cloud()[:, :2], ValueError, r"point cloud 0 is of shape \[12, 2\]; expected \[P, 3\]"),
        (np.ones((4, 3)), ValueError, r"point cloud 0 is degenerate: all of its points \(4\) lie in one place"),
        (cloud(1), ValueError, r"point cloud 0 is degenerate: all of its points \(1\)"),
        ([cloud()] * 2, ValueError, "point_cloud has 2 clouds for 1 prompts; give one, or one for each"),
        (np.stack([cloud()] * 3), ValueError, "point_cloud has 3 clouds for 1 prompts"),
        ([], TypeError, r"clouds must be an array \[P, 3\], or a list of them; got list"),
        ("chair.ply", TypeError, r"clouds must be an array \[P, 3\], or a list of them; got str"),
        (3, TypeError, "got int"),
        (cloud() > 0, ValueError, "point cloud 0 is an array of bool"),
    ],
)
def test_what_is_no_cloud_is_refused(make_pipe, draw, shown, error, match):
    with pytest.raises(error, match=match):
        draw(make_pipe(), point_cloud=shown)


def test_the_width_is_that_of_the_path(make_pipe, draw):
    with pytest.raises(ValueError, match=r"point cloud 0 is of shape \[12, 3\]; expected \[P, 6\]"):
        draw(make_pipe(PointPathConfig(features=3)), point_cloud=cloud())


@pytest.mark.parametrize("key", [POINT_CLOUD, POINT_MASK])
def test_clouds_given_twice_are_refused(make_pipe, draw, key):
    given = beside([cloud()])["joint_attention_kwargs"]
    with pytest.raises(ValueError, match="clouds were given twice"):
        draw(make_pipe(), point_cloud=cloud(), joint_attention_kwargs={key: given[key]})


def test_a_call_that_the_parent_refuses_is_refused_as_before(make_pipe, draw):
    pipe = make_pipe()
    for prompt, match in ((None, "Provide either `prompt` or `prompt_embeds`"), (3, "has to be of type `str` or")):
        with pytest.raises(ValueError, match=match):
            draw(pipe, prompt, point_cloud=cloud())
