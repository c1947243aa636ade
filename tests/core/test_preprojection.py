import math

import numpy as np
import pytest
import torch

from mmpreproj.core.preprojection import PreProjection


def slow_increment(x: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
    """`W_down · SiLU(W_up · x_hat)`, one token and one feature at a time."""
    out = np.zeros(x.shape)
    for batch, token in np.ndindex(x.shape[:2]):
        features = [sum(up[i, j] * x[batch, token, j] for j in range(up.shape[1])) for i in range(up.shape[0])]
        features = [value / (1 + math.exp(-value)) for value in features]
        for i in range(down.shape[0]):
            out[batch, token, i] = sum(down[i, j] * features[j] for j in range(down.shape[1]))
    return out


def test_increment_follows_the_equation():
    module = PreProjection(6, expansion=1.5, init_std=0.5, dtype=torch.float64)
    x = torch.randn(2, 3, 6, dtype=torch.float64) * 3
    expected = slow_increment(x.numpy(), module.up.weight.detach().numpy(), module.down.weight.detach().numpy())
    np.testing.assert_allclose(module(x).detach().numpy(), expected, rtol=0, atol=1e-12)


def test_tokens_are_treated_alike_wherever_they_stand():
    module = PreProjection(8, init_std=0.5, dtype=torch.float64)
    x = torch.randn(2, 7, 8, dtype=torch.float64)
    order = torch.randperm(7)
    torch.testing.assert_close(module(x[:, order]), module(x)[:, order], rtol=0, atol=1e-12)


def test_a_token_does_not_see_the_others():
    module = PreProjection(8, init_std=0.5, dtype=torch.float64)
    x = torch.randn(1, 7, 8, dtype=torch.float64)
    changed = x.clone()
    changed[:, 3] += 1
    difference = (module(changed) - module(x)).abs().amax(dim=(0, 2))
    assert difference[3] > 1e-2
    assert difference[torch.arange(7) != 3].max() < 1e-12


@pytest.mark.parametrize(
    ("expansion", "hidden"), [(1.25, 40), (2, 64), (0.5, 16), (0.3, 10), (0.047, 2), (1e-3, 1), (1.02, 33)]
)
def test_hidden_width_is_rounded_and_at_least_one(expansion: float, hidden: int):
    module = PreProjection(32, expansion=expansion)
    assert module.up.weight.shape == (hidden, 32)
    assert module.down.weight.shape == (32, hidden)
    assert sum(parameter.numel() for parameter in module.parameters()) == 2 * hidden * 32


def test_down_starts_from_a_small_normal_and_up_as_linear_does():
    torch.manual_seed(0)
    module = PreProjection(256, init_std=1e-2)
    assert module.down.weight.std().item() == pytest.approx(1e-2, rel=0.02)
    assert module.down.weight.mean().abs() < 2e-4
    bound = 1 / math.sqrt(256)  # nn.Linear: uniform in ±1/sqrt(fan_in)
    assert module.up.weight.abs().max() <= bound
    assert module.up.weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.02)


def test_zero_std_makes_the_increment_exactly_zero():
    module = PreProjection(16, init_std=0.0)
    assert torch.equal(module(torch.randn(2, 3, 16)), torch.zeros(2, 3, 16))
    assert module.up.weight.abs().max() > 0, "W_up must not be zero too, or nothing would ever train"


def test_reset_parameters_draws_afresh():
    module = PreProjection(16)
    before = [parameter.clone() for parameter in module.parameters()]
    module.reset_parameters()
    assert not any(torch.equal(old, new) for old, new in zip(before, module.parameters(), strict=True))


def test_dtype_and_device_are_those_asked_for():
    module = PreProjection(16, dtype=torch.bfloat16, device=torch.device("meta"))
    assert all(parameter.dtype == torch.bfloat16 and parameter.is_meta for parameter in module.parameters())


def test_fp32_weights_serve_a_half_precision_base():
    module = PreProjection(16, init_std=0.5)
    x = torch.randn(2, 3, 16).bfloat16()
    assert module(x).dtype == torch.bfloat16
    assert torch.equal(module(x), module(x.float()).bfloat16()), "computed in the dtype of the weights"
