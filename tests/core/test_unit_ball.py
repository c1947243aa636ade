import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mmpreproj.core.unit_ball import unit_ball

EXACT = {"rtol": 0, "atol": 1e-12}
lasting = settings(max_examples=40, deadline=None, derandomize=True)


def slow_unit_ball(cloud: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, list[float], float]:
    """One cloud `[P, 3 + F]`, one point at a time."""
    points = [cloud[i] for i in range(len(cloud)) if mask[i]]
    centre = [(min(p[axis] for p in points) + max(p[axis] for p in points)) / 2 for axis in range(3)]
    radius = max(math.dist(p[:3], centre) for p in points)
    out = np.zeros(cloud.shape)
    for i in range(len(cloud)):
        if mask[i]:
            out[i, :3] = [(cloud[i, axis] - centre[axis]) / radius for axis in range(3)]
            out[i, 3:] = cloud[i, 3:]
    return out, centre, radius


def full(points: Tensor) -> Tensor:
    return torch.ones(points.shape[:2], dtype=torch.bool)


def ball(points: Tensor) -> Tensor:
    return unit_ball(points, full(points))[0]


@pytest.mark.parametrize("features", [0, 2])
def test_clouds_are_moved_and_scaled_as_a_slow_reference_does(features: int):
    points = torch.randn(3, 6, 3 + features, dtype=torch.float64) * 5 + 7
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 1, 1, 0, 1, 0], [1, 0, 0, 0, 0, 1]]).bool()
    found, centre, radius = unit_ball(points, mask)
    for index in range(3):
        expected = slow_unit_ball(points[index].numpy(), mask[index].numpy())
        for one, other in zip((found[index], centre[index], radius[index]), expected, strict=True):
            np.testing.assert_allclose(one.numpy(), other, rtol=0, atol=1e-12)


@lasting
@given(st.integers(0, 10**6), st.integers(2, 9), st.floats(-20, 20), st.floats(-1e3, 1e3))
def test_the_result_depends_on_neither_place_nor_size(seed: int, count: int, octaves: float, shift: float):
    generator = torch.Generator().manual_seed(seed)
    points = torch.randn(2, count, 3, generator=generator, dtype=torch.float64)
    found = ball(points)
    torch.testing.assert_close(torch.linalg.vector_norm(found, dim=-1).amax(dim=1), torch.ones(2).double(), **EXACT)
    torch.testing.assert_close(found.amax(dim=1), -found.amin(dim=1), **EXACT)
    torch.testing.assert_close(ball(points * 2**octaves), found, **EXACT)
    torch.testing.assert_close(ball(points + shift), found, rtol=0, atol=1e-9)
    again = ball(found)
    torch.testing.assert_close(again, found, **EXACT)


def test_it_can_be_undone():
    points = torch.randn(2, 5, 3, dtype=torch.float64) * 3 + 2
    found, centre, radius = unit_ball(points, full(points))
    torch.testing.assert_close(found * radius[:, None, None] + centre[:, None], points, **EXACT)


def test_order_has_no_say():
    points, order = torch.randn(2, 7, 5, dtype=torch.float64), torch.randperm(7)
    assert torch.equal(ball(points[:, order]), ball(points)[:, order])


@pytest.mark.parametrize("padding", [0.0, 1e30, torch.inf, torch.nan])
def test_padding_has_no_say_forward_and_backward(padding: float):
    mask = torch.tensor([[1, 1, 0, 1], [0, 1, 1, 0]]).bool()
    points = torch.randn(2, 4, 5, dtype=torch.float64)
    padded = points.masked_fill(~mask[..., None], padding).requires_grad_(True)
    found, centre, radius = unit_ball(padded, mask)
    for index in range(2):
        alone = unit_ball(points[index : index + 1][:, mask[index]], mask[index : index + 1][:, mask[index]])
        torch.testing.assert_close(found[index][mask[index]], alone[0][0], **EXACT)
        torch.testing.assert_close((centre[index], radius[index]), (alone[1][0], alone[2][0]), **EXACT)
    assert not found[~mask].any()
    found.square().sum().backward()
    assert padded.grad.isfinite().all() and not padded.grad[~mask].any()


def test_a_cloud_without_extent_is_moved_and_not_scaled():
    points = torch.tensor([[[3.0, -1.0, 2.0, 9.0]] * 3])
    found, centre, radius = unit_ball(points, full(points))
    assert torch.equal(found, torch.tensor([[[0.0, 0.0, 0.0, 9.0]] * 3]))
    assert centre.tolist() == [[3.0, -1.0, 2.0]] and radius.tolist() == [0.0]


def test_a_cloud_without_points_has_its_centre_at_zero_and_finite_gradients():
    points = torch.randn(2, 3, 4, requires_grad=True)
    mask = torch.tensor([[False] * 3, [True] * 3])
    found, centre, radius = unit_ball(points, mask)
    assert not found[0].any() and not centre[0].any() and radius[0] == 0
    (found.square().sum() + centre.sum() + radius.sum()).backward()
    assert points.grad.isfinite().all() and not points.grad[0].any()


@pytest.mark.parametrize("size", [1e-38, 1e-25, 1e-10, 1.0, 1e10, 1e25, 1e38])
def test_every_size_that_fp32_can_hold_is_brought_into_the_ball(size: float):
    shape = torch.tensor([[[1.0, 0.5, -0.25], [-1.0, 1.0, 0.0], [0.0, -1.0, 0.25]]])
    expected = ball(shape)
    torch.testing.assert_close(ball(shape * size), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("dtype", "size"), [(torch.float16, 3e4), (torch.float16, 1e-3), (torch.bfloat16, 1e30)])
def test_half_precision_is_computed_in_fp32(dtype: torch.dtype, size: float):
    points = ((torch.rand(2, 9, 4) + 1) * size).to(dtype)
    found, centre, radius = unit_ball(points, full(points))
    expected = unit_ball(points.float(), full(points))
    assert found.dtype == centre.dtype == radius.dtype == dtype
    for one, other in zip((found, centre, radius), expected, strict=True):
        assert torch.equal(one, other.to(dtype))


def test_flat_clouds_and_lines_are_scaled_by_what_they_have():
    line = torch.tensor([[[0.0, 5.0, 5.0], [4.0, 5.0, 5.0]]])
    assert ball(line).tolist() == [[[-1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]]
