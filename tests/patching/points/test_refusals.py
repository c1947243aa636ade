"""What the point path refuses, and with which words."""

import re
from typing import Any

import numpy as np
import pytest
import torch
from points_kit import clouds, drawn, moved, noisy, prompt, with_points
from torch import Tensor, nn

import mmpreproj
from mmpreproj import PreProjConfig
from mmpreproj.points import batch_clouds, point_velocity


@pytest.fixture
def patched(make_transformer, shake) -> nn.Module:
    """A transformer with a point path for one feature."""
    model = make_transformer("sd35")
    mmpreproj.patch(model, with_points(features=1))
    shake(model)
    return model


def cloud() -> Tensor:
    return clouds(features=1)["point_cloud"]


def spoilt(value: float, *, at: tuple[int, int, int] = (1, 2, 0)) -> Tensor:
    points = cloud()
    points[at] = value
    return points


def one_place() -> Tensor:
    points = cloud()
    points[1, :, :3] = points[1, :1, :3]
    return points


@pytest.mark.parametrize(
    ("points", "error", "message"),
    [
        (cloud().numpy(), TypeError, r"point_cloud must be a floating-point tensor \[B, P, 4\]; got ndarray"),
        (cloud().long(), TypeError, r"point_cloud must be a floating-point tensor \[B, P, 4\]; got torch\.int64"),
        ([[0.0] * 4], TypeError, r"must be a floating-point tensor \[B, P, 4\]; got list"),
        (cloud()[..., :3], ValueError, r"shape \[B, P, 4\] .* 3 coordinates and 1 features.*; got \[2, 7, 3\]"),
        (cloud()[0], ValueError, r"must have the shape \[B, P, 4\] .*; got \[7, 4\]"),
        (cloud()[:, :0], ValueError, r"with at least one point: .*; got \[2, 0, 4\]"),
        (cloud()[:1], ValueError, r"point_cloud has 1 clouds for a batch of 2\. With guidance .*negative prompts"),
        (torch.cat([cloud(), cloud()]), ValueError, r"point_cloud has 4 clouds for a batch of 2"),
        (spoilt(torch.nan), ValueError, r"point_cloud 1 has NaN or infinite values; remove those points first"),
        (spoilt(-torch.inf, at=(0, 6, 2)), ValueError, r"point_cloud 0 has NaN or infinite values"),
        (spoilt(torch.nan, at=(0, 0, 3)), ValueError, r"point_cloud 0 has NaN or infinite values"),
        (one_place(), ValueError, r"point_cloud 1 is degenerate: all its points are one and the same"),
        (cloud()[:, :1], ValueError, r"point_cloud 0 is degenerate: .*at least two different points"),
    ],
)
def test_what_is_no_batch_of_clouds_is_refused(patched, points: Any, error: type, message: str):
    with pytest.raises(error, match=message):
        drawn(patched, {"point_cloud": points})


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.ones(2, 6).bool(), r"point_mask must be truth values \[2, 7\], .*; got torch\.bool \[2, 6\]"),
        (torch.ones(2, 7, 1).bool(), r"point_mask must be truth values \[2, 7\].*; got torch\.bool \[2, 7, 1\]"),
        (torch.ones(7).bool(), r"point_mask must be truth values \[2, 7\].*; got torch\.bool \[7\]"),
        (torch.ones(2, 7), r"true at points and false at padding; got torch\.float32 \[2, 7\]"),
        (np.ones((2, 7), dtype=bool), r"point_mask must be truth values \[2, 7\].*; got ndarray"),
    ],
)
def test_what_is_no_mask_is_refused(patched, mask: Any, message: str):
    with pytest.raises(ValueError, match=message):
        drawn(patched, {"point_cloud": cloud(), "point_mask": mask})


def test_what_padding_holds_is_not_refused(patched):
    given = clouds(features=1)
    given["point_cloud"][1, -1] = torch.nan
    assert drawn(patched, given).isfinite().all()
    given["point_mask"][1] = False
    given["point_cloud"][1] = torch.inf
    assert drawn(patched, given).isfinite().all()


def test_only_the_points_that_count_make_a_cloud_degenerate(patched):
    given = clouds(features=1)
    given["point_mask"][1] = torch.arange(7) == 3
    with pytest.raises(ValueError, match=r"point_cloud 1 is degenerate.*or false in all of its mask for no cloud"):
        drawn(patched, given)


def test_a_mask_without_a_cloud_is_refused(patched):
    with pytest.raises(ValueError, match=r"point_mask was given without point_cloud"):
        drawn(patched, {"point_mask": clouds()["point_mask"]})


@pytest.mark.parametrize("key", ["point_cloud", "point_mask"])
@pytest.mark.parametrize("blocks", ["all", [1]], ids=str)
def test_points_for_an_adapter_without_a_path_are_refused(transformer, key: str, blocks: Any):
    mmpreproj.patch(transformer, PreProjConfig(blocks=blocks))
    with pytest.raises(ValueError, match=rf"{key} was given to a model without a point path; add one with"):
        drawn(transformer, {key: clouds()[key]})


def test_clouds_for_a_path_that_only_generates_are_refused(transformer):
    mmpreproj.patch(transformer, with_points(condition=False))
    with pytest.raises(ValueError, match=r"made with condition=False, so clouds cannot condition pictures"):
        drawn(transformer, clouds())
    assert moved(transformer).shape == (2, 6, 3)


# Velocities


def test_a_path_that_only_conditions_has_no_velocity(transformer):
    mmpreproj.patch(transformer, with_points(generate=False))
    with pytest.raises(ValueError, match=r"made with generate=False, so it generates no clouds"):
        moved(transformer)


@pytest.mark.parametrize("patch", [False, True])
def test_a_model_without_a_path_has_no_velocity(transformer, patch: bool):
    if patch:
        mmpreproj.patch(transformer)
    with pytest.raises(ValueError, match=r"SD3Transformer2DModel has no point path; add one with .*add_point_path"):
        moved(transformer)


def test_what_is_switched_off_has_no_velocity(patched):
    message = r"switched off or at scale 0, so it generates no clouds; call mmpreproj\.enable"
    with mmpreproj.disabled(patched), pytest.raises(ValueError, match=message):
        moved(patched, features=1)
    for off, on in (
        (lambda: mmpreproj.disable(patched), lambda: mmpreproj.enable(patched)),
        (lambda: mmpreproj.set_scale(patched, 0), lambda: mmpreproj.set_scale(patched, [0, 1])),
    ):
        off()
        with pytest.raises(ValueError, match=message):
            moved(patched, features=1)
        on()
        assert moved(patched, features=1).isfinite().all()


@pytest.mark.parametrize("shape", [(2, 6, 3), (6, 4), (2, 0, 4), (2, 6, 4, 1)], ids=str)
def test_points_of_another_shape_are_refused(patched, shape: tuple[int, ...]):
    with pytest.raises(ValueError, match=r"points must have the shape \[B, P, 4\], P at least 1; got"):
        moved(patched, torch.randn(shape))


@pytest.mark.parametrize(
    "points", [noisy(features=1).long(), noisy(features=1).numpy(), None], ids=["int", "np", "no"]
)
def test_points_that_are_no_floating_point_tensor_are_refused(patched, points: Any):
    with pytest.raises(TypeError, match=r"points must be a floating-point tensor \[B, P, 4\]; got"):
        point_velocity(patched, points, **prompt())


@pytest.mark.parametrize("name", ["timestep", "pooled_projections"])
@pytest.mark.parametrize("rows", [None, 1, 3])
def test_conditioning_of_another_batch_is_refused(patched, name: str, rows: int | None):
    given = prompt()
    given[name] = torch.tensor(1.0) if rows is None else given[name][:1].repeat_interleave(rows, dim=0)
    with pytest.raises(ValueError, match=rf"{name} must have one row for each of 2 clouds; got \["):
        point_velocity(patched, noisy(features=1), **given)


@pytest.mark.parametrize("shape", [(2, 24), (2, 1, 20), (2,)], ids=str)
def test_pooled_text_of_another_width_is_refused(patched, shape: tuple[int, ...]):
    given = prompt() | {"pooled_projections": torch.zeros(shape)}
    message = r"pooled_projections must have the shape \[2, 20\], as wide as the model's pooled_projection_dim; got "
    with pytest.raises(ValueError, match=message + re.escape(str([*shape]))):
        point_velocity(patched, noisy(features=1), **given)


def test_pooled_text_of_a_model_that_does_not_tell_its_width_must_be_flat(patched):
    expected = moved(patched, features=1)
    patched.register_to_config(pooled_projection_dim=None)
    assert torch.equal(moved(patched, features=1), expected)
    with pytest.raises(ValueError, match=r"pooled_projections must have the shape \[2, D_pooled\]; got \[2, 1, 20\]"):
        point_velocity(patched, noisy(features=1), **prompt() | {"pooled_projections": torch.zeros(2, 1, 20)})


def test_blocks_whose_scales_cancel_out_have_no_velocity_and_show_no_cloud(patched):
    given = clouds(features=1)
    mmpreproj.set_scale(patched, [1, -1])
    with pytest.raises(ValueError, match=r"at scale 0, .*a point path takes the mean of its blocks' scales"):
        moved(patched, features=1)
    assert torch.equal(drawn(patched, given), drawn(patched))
    mmpreproj.set_scale(patched, [1, -0.5])
    assert moved(patched, features=1).isfinite().all()
    assert not torch.equal(drawn(patched, given), drawn(patched))


# Clouds of different sizes as one batch


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ([], TypeError, r"clouds must be an array \[P, 3\], or a list of them; got list"),
        ("chair.ply", TypeError, r"clouds must be an array \[P, 3\], or a list of them; got str"),
        (None, TypeError, r"clouds must be an array \[P, 3\], or a list of them; got NoneType"),
        ({"a": 1}, TypeError, r"or a list of them; got dict"),
        ([np.ones((2, 3)), "chair.ply"], ValueError, r"point cloud 0 is degenerate"),
        ([np.eye(3), "chair.ply"], ValueError, r"point cloud 1 is an array of <U9; expected .* real numbers \[P, 3\]"),
        ([np.eye(3), np.eye(3)[:, :2]], ValueError, r"point cloud 1 is of shape \[3, 2\]; expected \[P, 3\]"),
        ([torch.eye(3), torch.zeros(0, 3)], ValueError, r"point cloud 1 is empty; expected at least one point"),
        ([torch.eye(3), torch.eye(3) / 0], ValueError, r"point cloud 1 has NaN or infinite values in 3 of 3 points"),
        (torch.eye(3).expand(2, 3, 3) * 0, ValueError, r"point cloud 0 is degenerate: all of its points \(3\)"),
        ([np.eye(3) * 1e39], ValueError, r"point cloud 0 has NaN or infinite values in 3 of 3 points"),
        ([np.eye(3) * 1e-6 + 1e3], ValueError, r"point cloud 0 is degenerate"),
        ([np.eye(3) > 0], ValueError, r"point cloud 0 is an array of bool; expected .* real numbers"),
        (np.ones(3), ValueError, r"point cloud 0 is of shape \[\]; expected \[P, 3\]"),
    ],
)
def test_what_is_no_list_of_clouds_is_refused(given: Any, error: type, message: str):
    with pytest.raises(error, match=message):
        batch_clouds(given)


def test_features_are_counted():
    with pytest.raises(ValueError, match=r"point cloud 0 is of shape \[3, 3\]; expected \[P, 5\]"):
        batch_clouds(np.eye(3), features=2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float32])
def test_clouds_of_different_sizes_are_padded_and_masked(patched, dtype: torch.dtype):
    first, second = torch.randn(5, 4).to(dtype), np.random.default_rng(0).normal(size=(3, 4))
    points, mask = batch_clouds([first.requires_grad_(True), second], features=1)
    assert points.dtype == torch.float32 and not points.requires_grad
    assert mask.tolist() == [[True] * 5, [True] * 3 + [False] * 2]
    assert torch.equal(points[0], first.detach().float())
    assert torch.equal(points[1, :3], torch.from_numpy(second).float()) and not points[1, 3:].any()
    assert drawn(patched, {"point_cloud": points, "point_mask": mask}).isfinite().all()


def test_one_cloud_a_batch_and_whole_numbers_are_clouds_too():
    one, mask = batch_clouds(np.eye(3, dtype=np.int64))
    assert torch.equal(one, torch.eye(3)[None]) and mask.all()
    many, mask = batch_clouds(torch.eye(3).repeat(2, 1, 1))
    assert many.shape == (2, 3, 3) and mask.all()
