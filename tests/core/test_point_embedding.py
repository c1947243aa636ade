import math

import numpy as np
import pytest
import torch

from mmpreproj.core.point_embedding import PointEmbedding


def slow_tokens(points: np.ndarray, up: np.ndarray, down: np.ndarray, frequencies: int) -> np.ndarray:
    """`W₂ · SiLU(W₁ · [1, x, f, sin 2ᵏπx/4, cos 2ᵏπx/4])`, one point at a time."""
    out = np.zeros((*points.shape[:2], down.shape[0]))
    for batch, place in np.ndindex(points.shape[:2]):
        point = points[batch, place]
        inputs = [1.0, *point]
        for octave in range(frequencies):
            inputs += [math.sin(2**octave * math.pi * x / 4) for x in point[:3]]
            inputs += [math.cos(2**octave * math.pi * x / 4) for x in point[:3]]
        hidden = [sum(w * x for w, x in zip(row, inputs, strict=True)) for row in up]
        hidden = [value / (1 + math.exp(-value)) for value in hidden]
        out[batch, place] = [sum(w * x for w, x in zip(row, hidden, strict=True)) for row in down]
    return out


@pytest.mark.parametrize(("features", "frequencies"), [(0, 6), (3, 2), (1, 0), (0, 0)])
def test_tokens_follow_the_equation(features: int, frequencies: int):
    module = PointEmbedding(8, features=features, frequencies=frequencies, dtype=torch.float64)
    points = torch.randn(2, 3, 3 + features, dtype=torch.float64) * 2
    up, down = (part.weight.detach().numpy() for part in (module.up, module.down))
    expected = slow_tokens(points.numpy(), up, down, frequencies)
    np.testing.assert_allclose(module(points).detach().numpy(), expected, rtol=0, atol=1e-12)


def test_points_are_treated_alike_wherever_they_stand():
    module = PointEmbedding(8, features=2, dtype=torch.float64)
    points, order = torch.randn(2, 7, 5, dtype=torch.float64), torch.randperm(7)
    torch.testing.assert_close(module(points[:, order]), module(points)[:, order], rtol=0, atol=1e-14)


def test_a_point_does_not_see_the_others():
    module = PointEmbedding(8, dtype=torch.float64)
    points = torch.randn(1, 7, 3, dtype=torch.float64)
    changed = points.clone()
    changed[:, 3] += 1
    difference = (module(changed) - module(points)).abs().amax(dim=(0, 2))
    assert difference[3] > 1e-2
    assert difference[torch.arange(7) != 3].max() < 1e-14


def test_a_point_that_is_not_finite_stays_alone():
    module = PointEmbedding(8)
    points = torch.randn(1, 4, 3)
    points[0, 1] = torch.nan
    finite = module(points).isfinite().all(dim=-1)[0]
    assert finite.tolist() == [True, False, True, True]


def test_waves_are_octaves_and_the_longest_is_eight_units():
    module = PointEmbedding(4, frequencies=3, dtype=torch.float64)
    with torch.no_grad():
        module.up.weight[:, 1:4] = 0  # without the coordinates themselves
        points = torch.tensor([[[0.3, -0.7, 0.1]]], dtype=torch.float64)
        torch.testing.assert_close(module(points + 8), module(points), rtol=0, atol=1e-12)
        assert (module(points + 4) - module(points)).abs().max() > 1e-3
        module.up.weight[:, [*range(4, 10)]] = 0  # without the longest
        torch.testing.assert_close(module(points + 4), module(points), rtol=0, atol=1e-12)


def test_features_have_no_waves():
    assert PointEmbedding(8, features=5, frequencies=4).up.weight.shape == (8, 1 + 3 + 5 + 6 * 4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_each_dtype_is_near_the_exact_one_and_half_precision_keeps_the_waves(dtype: torch.dtype):
    module = PointEmbedding(16, frequencies=8, dtype=dtype)
    points = (torch.rand(2, 5, 3) * 2 - 1).to(torch.promote_types(dtype, torch.float32))
    exact = PointEmbedding(16, frequencies=8, dtype=torch.float64)
    exact.load_state_dict({key: value.double() for key, value in module.state_dict().items()})
    tokens = module(points)
    assert tokens.dtype == dtype
    expected = exact(points.double())
    error = (tokens.double() - expected).norm() / expected.norm()
    assert error < (8 if dtype.itemsize == 2 else 64) * torch.finfo(dtype).eps  # angles of 100 radians


def test_half_precision_points_are_embedded_as_the_numbers_they_are():
    module = PointEmbedding(16, frequencies=8)
    points = torch.randn(2, 5, 3).bfloat16()
    assert torch.equal(module(points), module(points.float()))


def test_float64_points_do_not_lose_digits_before_fp64_weights():
    module = PointEmbedding(8, frequencies=16, dtype=torch.float64)
    points = torch.full((1, 1, 3), 1.0, dtype=torch.float64)
    assert not torch.equal(module(points), module(points + 1e-12))


def test_every_weight_gets_a_gradient_and_starts_as_linear_does():
    torch.manual_seed(0)
    module = PointEmbedding(256, frequencies=4)
    for part in (module.up, module.down):
        bound = 1 / math.sqrt(part.weight.shape[1])
        assert part.weight.abs().max() <= bound
        assert part.weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)
    module(torch.randn(2, 5, 3)).square().mean().backward()
    assert all(parameter.grad.abs().max() > 0 for parameter in module.parameters())


def test_reset_parameters_draws_afresh_and_device_is_the_one_asked_for():
    module = PointEmbedding(8)
    before = [parameter.clone() for parameter in module.parameters()]
    module.reset_parameters()
    assert not any(torch.equal(old, new) for old, new in zip(before, module.parameters(), strict=True))
    assert all(parameter.is_meta for parameter in PointEmbedding(8, device=torch.device("meta")).parameters())
