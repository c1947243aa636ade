import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mmpreproj.core.point_pooling import PointPooling


def slow_pooled(tokens: np.ndarray, mask: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """`W · [mean, max]` of the normed tokens of each cloud, one token at a time."""
    width = tokens.shape[-1]
    out = np.zeros((tokens.shape[0], weight.shape[0]))
    for batch in range(tokens.shape[0]):
        normed = []
        for token in tokens[batch][mask[batch]]:
            mean = sum(token) / width
            spread = math.sqrt(sum((x - mean) ** 2 for x in token) / width + 1e-5)
            normed.append([(x - mean) / spread for x in token])
        if normed:
            both = [sum(column) / len(normed) for column in zip(*normed, strict=True)]
            both += [max(column) for column in zip(*normed, strict=True)]
            out[batch] = [sum(w * x for w, x in zip(row, both, strict=True)) for row in weight]
    return out


def trained(width: int = 8, dtype: torch.dtype = torch.float64) -> PointPooling:
    module = PointPooling(width, dtype=dtype)
    nn.init.normal_(module.map.weight, std=0.5)
    return module


def clouds(dtype: torch.dtype = torch.float64, width: int = 8) -> tuple[Tensor, Tensor]:
    """Five points, three with padding between and behind them, one, and none."""
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 0, 1, 1, 0], [0, 0, 0, 1, 0], [0, 0, 0, 0, 0]]).bool()
    return (torch.randn(4, 5, width, dtype=torch.float64) * 3 + 1).to(dtype), mask


def test_pooling_follows_the_equation():
    module, (tokens, mask) = trained(), clouds()
    expected = slow_pooled(tokens.numpy(), mask.numpy(), module.map.weight.detach().numpy())
    np.testing.assert_allclose(module(tokens, mask).detach().numpy(), expected, rtol=0, atol=1e-12)


def test_order_has_no_say():
    module, (tokens, mask) = trained(), clouds()
    order = torch.randperm(5)
    torch.testing.assert_close(module(tokens[:, order], mask[:, order]), module(tokens, mask), rtol=0, atol=1e-13)


def test_points_given_twice_have_no_say():
    module, (tokens, mask) = trained(), clouds()
    twice, both = torch.cat([tokens, tokens], dim=1), torch.cat([mask, mask], dim=1)
    torch.testing.assert_close(module(twice, both), module(tokens, mask), rtol=0, atol=1e-13)


@pytest.mark.parametrize("padding", [0.0, 1e30, torch.inf, torch.nan])
def test_padding_has_no_say_forward_and_backward(padding: float):
    module, (tokens, mask) = trained(), clouds()
    expected = module(tokens, mask)
    expected.square().sum().backward()
    gradient, module.map.weight.grad = module.map.weight.grad, None
    padded = torch.cat([tokens.masked_fill(~mask[..., None], padding), torch.full((4, 3, 8), padding)], dim=1)
    padded.requires_grad_(True)
    found = module(padded, torch.cat([mask, torch.zeros(4, 3, dtype=torch.bool)], dim=1))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)
    found.square().sum().backward()
    torch.testing.assert_close(module.map.weight.grad, gradient, rtol=0, atol=1e-12)
    if math.isfinite(padding):
        assert not padded.grad[:, :5][~mask].any()


def test_a_cloud_without_points_gives_zeros_and_finite_gradients():
    module = trained()
    tokens = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
    pooled = module(tokens, torch.zeros(2, 3, dtype=torch.bool))
    assert torch.equal(pooled, torch.zeros(2, 8, dtype=torch.float64))
    pooled.sum().backward()
    assert not tokens.grad.any() and not module.map.weight.grad.any()


def test_a_cloud_pools_the_same_beside_others():
    module, (tokens, mask) = trained(), clouds()
    whole = module(tokens, mask)
    for index in range(3):
        alone = module(tokens[index : index + 1][:, mask[index]], mask[index : index + 1][:, mask[index]])
        torch.testing.assert_close(alone[0], whole[index], rtol=0, atol=1e-13)


def test_every_cloud_gives_zero_at_first_and_the_weight_gets_a_gradient():
    module, (tokens, mask) = PointPooling(8, dtype=torch.float64), clouds()
    pooled = module(tokens, mask)
    assert torch.equal(pooled, torch.zeros_like(pooled))
    pooled.sum().backward()
    assert module.map.weight.grad.abs().min() > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_each_dtype_is_near_the_exact_one_however_many_points(dtype: torch.dtype):
    module = trained(16, dtype)
    exact = trained(16)
    exact.load_state_dict({key: value.double() for key, value in module.state_dict().items()})
    tokens, mask = (torch.randn(2, 5000, 16) + 2).to(dtype), torch.ones(2, 5000, dtype=torch.bool)
    found, expected = module(tokens, mask), exact(tokens.double(), mask)
    assert found.dtype == dtype
    assert (found.double() - expected).norm() / expected.norm() < 4 * torch.finfo(dtype).eps


def test_reset_parameters_goes_back_to_zero_and_device_is_the_one_asked_for():
    module = trained()
    module.reset_parameters()
    assert not module.map.weight.any()
    assert PointPooling(8, device=torch.device("meta")).map.weight.is_meta
