"""Point clouds from a saved model: what is made, what the files hold, and pictures of a cloud."""

import os
import re

import numpy as np
import pytest
import torch
from PIL import Image

import mmpreproj
from mmpreproj import PointPathConfig, PreProjConfig
from mmpreproj.pipelines import PreProjSD3Pipeline, PreProjShapePipeline
from mmpreproj.points import UnreadableCloudError, read_cloud, write_ply
from mmpreproj.recipes.generate import Sampling, generate
from mmpreproj.recipes.shapes import ShapeSampling, generate_shapes, read_cloud_for, write_shapes
from mmpreproj.recipes.view import view_cloud

TETRAHEDRON = "v 0 0 0\nv 1 0 0\nv 0 1 0\nv 0 0 1\nf 1 2 3\nf 1 2 4\nf 1 3 4\nf 2 3 4\n"


@pytest.fixture
def make_pipeline(base, shake):
    """Load the tiny pipeline and give it a point path that does something."""

    def make(points=None, cls=PreProjShapePipeline):
        pipe = cls.from_pretrained(base)
        mmpreproj.patch(pipe.transformer, PreProjConfig(points=points or PointPathConfig()))
        shake(pipe.transformer)
        pipe.set_progress_bar_config(disable=True)
        return pipe

    return make


def ball(count=30, features=0, seed=0):
    return np.random.default_rng(seed).standard_normal((count, 3 + features)).astype(np.float32)


# --- generating ------------------------------------------------------------------------------------------------------


def test_a_cloud_depends_on_prompt_and_seed_not_on_its_neighbours(make_pipeline):
    pipe = make_pipeline().to(torch.float64)  # in which sums come out alike for batches of any size
    many = generate_shapes(pipe, ["green tree", "red apple"], ShapeSampling(points=20, steps=3, seed=4, count=3))
    assert [prompt for prompt, _ in many] == ["green tree", "red apple"]
    assert [cloud.shape for _, clouds in many for cloud in clouds] == [(20, 3)] * 6
    for offset in range(3):
        ((_, (alone,)),) = generate_shapes(pipe, ["red apple"], ShapeSampling(points=20, steps=3, seed=4 + offset))
        np.testing.assert_allclose(alone, many[1][1][offset], atol=1e-6)
    assert np.abs(many[0][1][0] - many[1][1][0]).max() > 1e-3
    assert np.abs(many[0][1][0] - many[0][1][1]).max() > 1e-3


def test_global_randomness_is_neither_read_nor_touched(make_pipeline):
    pipe = make_pipeline()
    state = torch.get_rng_state()
    first = generate_shapes(pipe, ["red"], ShapeSampling(points=20, steps=2))[0][1][0]
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert np.array_equal(generate_shapes(pipe, ["red"], ShapeSampling(points=20, steps=2))[0][1][0], first)


@pytest.mark.parametrize("change", [{"guidance": 1.0}, {"steps": 4}, {"points": 21}, {"seed": 1}])
def test_every_setting_takes_effect(make_pipeline, change):
    pipe = make_pipeline()
    plain, changed = (
        generate_shapes(pipe, ["red"], ShapeSampling(**({"points": 20, "steps": 3} | settings)))[0][1][0]
        for settings in ({}, change)
    )
    assert changed.shape == (change.get("points", 20), 3)
    assert changed.shape != plain.shape or not np.allclose(changed, plain)


def test_the_defaults_are_the_pipelines(make_pipeline):
    pipe = make_pipeline()
    ((_, (cloud,)),) = generate_shapes(pipe, ["red"])
    assert np.array_equal(cloud, pipe("red", generator=torch.Generator().manual_seed(0)).clouds[0])


@pytest.mark.parametrize(("name", "least"), [("points", 2), ("steps", 1), ("count", 1)])
def test_too_few_are_refused(name, least):
    with pytest.raises(ValueError, match=f"{name} must be at least {least}; got {least - 1}"):
        ShapeSampling(**{name: least - 1})


# --- files -----------------------------------------------------------------------------------------------------------


def test_files_are_called_by_prompt_and_seed_and_hold_the_cloud(tmp_path):
    rows = [("Red apple!", [ball(seed=1), ball(40, seed=2)]), ("red, apple", [ball(seed=3)])]
    paths = write_shapes(rows, tmp_path / "new" / "folder", seed=7)
    stems = ["red-apple-7", "red-apple-8", "red-apple-2-7"]
    assert [path.name for path in paths] == [f"{stem}.{suffix}" for stem in stems for suffix in ("ply", "png")]
    clouds = [cloud for _, made in rows for cloud in made]
    for place, cloud in enumerate(clouds):
        assert np.array_equal(read_cloud(paths[2 * place]), cloud)
        Image.open(paths[2 * place + 1]).verify()


def test_features_are_kept_beside_the_coordinates(tmp_path):
    cloud = ball(features=4)
    paths = write_shapes([("red", [cloud])], tmp_path)
    assert [path.name for path in paths] == ["red-0.ply", "red-0.png", "red-0.npy"]
    assert np.array_equal(read_cloud(paths[0]), cloud[:, :3])
    assert np.array_equal(read_cloud(paths[2], features=4), cloud)


# --- a picture of a file ---------------------------------------------------------------------------------------------


def test_clouds_and_meshes_are_drawn(tmp_path):
    write_ply(tmp_path / "ball.ply", ball())
    (tmp_path / "tetrahedron.obj").write_text(TETRAHEDRON)
    for name in ("ball.ply", "tetrahedron.obj"):
        view_cloud(tmp_path / name, tmp_path / f"{name}.png")
        assert (np.asarray(Image.open(tmp_path / f"{name}.png").convert("L")) < 200).any()
    view_cloud(tmp_path / "ball.ply", tmp_path / "other.png", up="z", count=10)
    assert (tmp_path / "other.png").read_bytes() != (tmp_path / "ball.ply.png").read_bytes()


def test_a_file_whose_name_is_not_utf8_is_drawn(tmp_path):
    cloud = tmp_path / os.fsdecode(b"\xff\xfe.npy")
    np.save(cloud, ball())
    view_cloud(cloud, tmp_path / "a.png")
    Image.open(tmp_path / "a.png").verify()


def test_what_cannot_be_read_is_named_and_nothing_is_drawn(tmp_path):
    with pytest.raises(UnreadableCloudError, match=r"cannot read the point cloud '.*none.ply': there is no such file"):
        view_cloud(tmp_path / "none.ply", tmp_path / "a.png")
    assert not (tmp_path / "a.png").exists()


# --- pictures of a cloud ---------------------------------------------------------------------------------------------


def test_a_cloud_is_read_with_the_features_of_the_path(make_pipeline, tmp_path):
    np.save(tmp_path / "wide.npy", ball(features=4))
    for features in (0, 2):
        pipe = make_pipeline(PointPathConfig(features=features))
        assert np.array_equal(read_cloud_for(pipe, tmp_path / "wide.npy"), ball(features=4)[:, : 3 + features])
    write_ply(tmp_path / "narrow.ply", ball())
    with pytest.raises(UnreadableCloudError, match="it has 3 columns; expected at least 5: x, y, z and 2 features"):
        read_cloud_for(pipe, tmp_path / "narrow.ply")


def test_a_model_without_a_path_is_refused(base, tmp_path):
    with pytest.raises(ValueError, match=re.escape("SD3Transformer2DModel has no point path")):
        read_cloud_for(PreProjSD3Pipeline.from_pretrained(base), tmp_path / "chair.ply")


def test_pictures_are_shown_what_to_draw(make_pipeline):
    pipe = make_pipeline(cls=PreProjSD3Pipeline)
    settings = Sampling(steps=2, count=2)
    bare = generate(pipe, ["red", "green"], settings)
    shown = generate(pipe, ["red", "green"], settings, point_cloud=ball())
    for (_, without), (prompt, found) in zip(bare, shown, strict=True):
        generators = [torch.Generator().manual_seed(seed) for seed in (0, 1)]
        call = {"num_inference_steps": 2, "guidance_scale": 5.0, "negative_prompt": "", "num_images_per_prompt": 2}
        expected = pipe(prompt, generator=generators, point_cloud=ball(), **call).images
        for picture, other, same in zip(found, without, expected, strict=True):
            assert np.array_equal(np.asarray(picture), np.asarray(same))
            assert not np.array_equal(np.asarray(picture), np.asarray(other))
