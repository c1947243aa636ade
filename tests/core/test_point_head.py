import math

import numpy as np
import pytest
import torch
from torch import nn

from mmpreproj.core.point_head import PointHead


def slow_velocity(tokens: np.ndarray, temb: np.ndarray, modulation: np.ndarray, out: np.ndarray) -> np.ndarray:
    """`W · ((1 + scale) ⊙ LN(token) + shift)`, one token at a time."""
    width = tokens.shape[-1]
    result = np.zeros((*tokens.shape[:2], out.shape[0]))
    for batch, place in np.ndindex(tokens.shape[:2]):
        condition = [value / (1 + math.exp(-value)) for value in temb[batch]]
        both = [sum(w * x for w, x in zip(row, condition, strict=True)) for row in modulation]
        scale, shift = both[:width], both[width:]
        token = tokens[batch, place]
        mean = sum(token) / width
        spread = math.sqrt(sum((x - mean) ** 2 for x in token) / width + 1e-6)
        hidden = [(1 + scale[i]) * (token[i] - mean) / spread + shift[i] for i in range(width)]
        result[batch, place] = [sum(w * x for w, x in zip(row, hidden, strict=True)) for row in out]
    return result


def trained(width: int = 8, **options) -> PointHead:
    module = PointHead(width, **options)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module


@pytest.mark.parametrize("features", [0, 3])
def test_velocity_follows_the_equation(features: int):
    module = trained(features=features, dtype=torch.float64)
    tokens, temb = torch.randn(2, 3, 8, dtype=torch.float64) * 3, torch.randn(2, 8, dtype=torch.float64)
    modulation, out = (part.weight.detach().numpy() for part in (module.modulation, module.out))
    expected = slow_velocity(tokens.numpy(), temb.numpy(), modulation, out)
    assert expected.shape == (2, 3, 3 + features)
    np.testing.assert_allclose(module(tokens, temb).detach().numpy(), expected, rtol=0, atol=1e-12)


def test_tokens_are_treated_alike_and_do_not_see_each_other():
    module = trained(dtype=torch.float64)
    tokens, temb = torch.randn(2, 7, 8, dtype=torch.float64), torch.randn(2, 8, dtype=torch.float64)
    order = torch.randperm(7)
    whole = module(tokens, temb)
    torch.testing.assert_close(module(tokens[:, order], temb), whole[:, order], rtol=0, atol=1e-13)
    torch.testing.assert_close(module(tokens[:, 2:3], temb), whole[:, 2:3], rtol=0, atol=1e-13)


def test_each_cloud_has_its_own_conditioning():
    module = trained()
    tokens, temb = torch.randn(1, 4, 8).expand(2, -1, -1), torch.randn(2, 8)
    first, second = module(tokens, temb)
    assert (first - second).abs().max() > 1e-2
    torch.testing.assert_close(module(tokens[:1], temb[1:])[0], second)


def test_the_velocity_starts_at_zero_and_the_first_step_moves_it():
    module = PointHead(8, features=2)
    tokens, temb = torch.randn(2, 3, 8), torch.randn(2, 8)
    velocity = module(tokens, temb)
    assert torch.equal(velocity, torch.zeros(2, 3, 5))
    (velocity - torch.randn(2, 3, 5)).square().mean().backward()
    assert module.out.weight.grad.abs().max() > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_each_dtype_is_near_the_exact_one(dtype: torch.dtype):
    module = trained(16, dtype=dtype)
    exact = PointHead(16, dtype=torch.float64)
    exact.load_state_dict({key: value.double() for key, value in module.state_dict().items()})
    tokens, temb = torch.randn(2, 5, 16).to(dtype), torch.randn(2, 16).to(dtype)
    found, expected = module(tokens, temb), exact(tokens.double(), temb.double())
    assert found.dtype == dtype
    assert (found.double() - expected).norm() / expected.norm() < 8 * torch.finfo(dtype).eps


def test_fp32_weights_serve_a_half_precision_base():
    module = trained(16)
    assert module(torch.randn(1, 3, 16).bfloat16(), torch.randn(1, 16).bfloat16()).isfinite().all()


def test_reset_parameters_goes_back_to_zero_and_device_is_the_one_asked_for():
    module = trained()
    module.reset_parameters()
    assert not any(parameter.any() for parameter in module.parameters())
    assert all(parameter.is_meta for parameter in PointHead(8, device=torch.device("meta")).parameters())
