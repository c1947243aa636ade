"""A pipeline notices that its adapter is gone: broken off its transformer, or left behind with another transformer."""

import copy
import gc
import pickle
import re
import weakref

import numpy as np
import pytest
import torch
from accelerate import cpu_offload
from diffusers import StableDiffusion3Pipeline

import mmpreproj
from mmpreproj.pipelines import PreProjSD3Pipeline


@pytest.fixture
def folder(make_pixel_pipeline, tmp_path):
    make_pixel_pipeline().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def loaded(folder):
    return PreProjSD3Pipeline.from_pretrained(folder)


@pytest.fixture
def base(make_pixel_pipeline):
    return make_pixel_pipeline(patched=False).transformer


def refused(folder):
    words = (
        f"was loaded with the adapter in {folder / 'preproj'}, but the SD3Transformer2DModel that is its transformer "
        "now was put in afterwards and carries none. Put it on with mmpreproj.load(pipe.transformer, "
        f"{str(folder / 'preproj')!r})"
    )
    return pytest.raises(ValueError, match=re.escape(words) + r".*PreProjSD3Pipeline\(\*\*pipe\.components\)")


def test_hooks_that_were_cleared_are_noticed_before_anything_runs(make_pixel_pipeline, draw, tmp_path):
    pipe = make_pixel_pipeline()
    pipe.transformer.transformer_blocks[1].attn._forward_hooks.clear()
    for call in (draw, lambda pipe: pipe.save_pretrained(tmp_path / "model")):
        with pytest.raises(ValueError, match=r"lost the adapter 'default' at transformer_blocks\.1\.attn"):
            call(pipe)
    assert not (tmp_path / "model").exists()
    mmpreproj.unpatch(pipe.transformer)
    assert np.array_equal(draw(pipe), draw(make_pixel_pipeline(patched=False)))


def test_an_exchanged_transformer_without_the_adapter_is_refused(loaded, base, folder, draw, tmp_path):
    expected = draw(loaded)
    loaded.transformer = base
    for call in (draw, lambda pipe: pipe.save_pretrained(tmp_path / "other")):
        with refused(folder):
            call(loaded)
    assert not (tmp_path / "other").exists()
    mmpreproj.load(loaded.transformer, folder / "preproj")  # the first way out
    np.testing.assert_allclose(draw(loaded), expected, atol=1e-5)


def test_a_pipeline_made_anew_goes_on_without_the_adapter(loaded, base, draw):
    loaded.transformer = base
    stock = StableDiffusion3Pipeline(**loaded.components)
    anew = PreProjSD3Pipeline(**loaded.components)
    assert anew.transformer is base and stock.transformer is base
    assert not np.array_equal(draw(anew), draw(PreProjSD3Pipeline.from_pretrained(loaded.name_or_path)))


def test_a_transformer_that_is_gone_for_good_is_refused_too(loaded, base, folder, draw):
    loaded.transformer = base
    gc.collect()
    with refused(folder):
        draw(loaded)


def test_the_pipeline_does_not_keep_an_exchanged_transformer_alive(loaded, base):
    gone = weakref.ref(loaded.transformer)
    loaded.transformer = base
    gc.collect()
    assert gone() is None


def test_taking_the_adapter_off_is_deliberate(loaded, make_pixel_pipeline, draw):
    mmpreproj.unpatch(loaded.transformer)
    np.testing.assert_allclose(draw(loaded), draw(make_pixel_pipeline(patched=False)), atol=1e-5)


def test_another_patched_transformer_is_welcome(loaded, make_pixel_pipeline, shake, draw):
    other = make_pixel_pipeline()
    shake(other.transformer, seed=9)
    loaded.transformer = other.transformer
    np.testing.assert_allclose(draw(loaded), draw(other), atol=1e-5)


def test_a_pipeline_that_loaded_no_adapter_takes_any_transformer(make_pixel_pipeline, base, draw):
    pipe = make_pixel_pipeline()
    pipe.transformer = base
    assert np.isfinite(draw(pipe)).all()


@pytest.mark.parametrize("unpatched", [False, True])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pipe: pickle.loads(pickle.dumps(pipe)), copy.copy])
def test_copies_remember_their_own_transformer(loaded, base, folder, draw, copied, unpatched):
    twin = copied(loaded)
    if unpatched:
        mmpreproj.unpatch(twin.transformer)
    np.testing.assert_allclose(draw(twin), draw(twin), atol=1e-6)
    twin.transformer = base
    with refused(folder):
        draw(twin)


def test_a_copy_of_a_pipeline_with_an_exchanged_transformer_is_refused_like_it(loaded, base, folder, draw):
    loaded.transformer = base
    with refused(folder):
        draw(copy.deepcopy(loaded))


def to(pipe):
    assert pipe.to("cpu", torch.float32) is pipe


def compiled(pipe):
    pipe.transformer = torch.compile(pipe.transformer, backend="eager")


@pytest.mark.parametrize(
    "change",
    [
        to,
        compiled,
        lambda pipe: pipe.enable_model_cpu_offload(device="cpu"),
        lambda pipe: cpu_offload(pipe.transformer, torch.device("cpu")),
        lambda pipe: pipe.enable_group_offload(onload_device=torch.device("cpu"), offload_type="leaf_level"),
        lambda pipe: pipe.transformer.fuse_qkv_projections(),
    ],
)
@pytest.mark.parametrize("unpatched", [False, True])
def test_moving_offloading_and_compiling_are_no_exchange(loaded, draw, change, unpatched):
    if unpatched:
        mmpreproj.unpatch(loaded.transformer)
    expected = draw(loaded)
    torch._dynamo.reset()
    change(loaded)
    np.testing.assert_allclose(draw(loaded), expected, atol=1e-4)


@pytest.mark.parametrize("unpatched", [False, True])
def test_from_pipe_goes_on_working_both_ways(loaded, draw, unpatched):
    if unpatched:
        mmpreproj.unpatch(loaded.transformer)
    expected = draw(loaded)
    stock = StableDiffusion3Pipeline.from_pipe(loaded)
    back = PreProjSD3Pipeline.from_pipe(stock)
    assert back.transformer is stock.transformer is loaded.transformer
    for pipe in (back, PreProjSD3Pipeline.from_pipe(loaded)):
        assert np.array_equal(draw(pipe), expected)


def test_a_pipeline_loaded_without_its_transformer_encodes_saves_and_remembers_the_adapter(
    folder, base, draw, tmp_path
):
    pipe = PreProjSD3Pipeline.from_pretrained(folder, transformer=None)
    whole = PreProjSD3Pipeline.from_pretrained(folder)
    with torch.no_grad():
        for found, expected in zip(
            pipe.encode_prompt("x", None, None), whole.encode_prompt("x", None, None), strict=True
        ):
            assert torch.equal(found, expected)
    pipe.save_pretrained(tmp_path / "encoders")
    assert not (tmp_path / "encoders" / "preproj").exists()
    pipe.transformer = base
    with refused(folder):
        draw(pipe, height=8, width=8)
    mmpreproj.load(pipe.transformer, folder / "preproj")
    draw(pipe, height=8, width=8)
