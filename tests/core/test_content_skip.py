import numpy as np
import pytest
import torch

from mmpreproj.core.content_skip import ContentSkip


def test_skip_is_one_linear_map_without_bias():
    module = ContentSkip(5, init_std=0.5, dtype=torch.float64)
    x = torch.randn(2, 3, 5, dtype=torch.float64)
    weight, values = module.map.weight.detach().numpy(), x.numpy()
    expected = np.zeros((2, 3, 5))
    for batch, token, i in np.ndindex(2, 3, 5):
        expected[batch, token, i] = sum(weight[i, j] * values[batch, token, j] for j in range(5))
    np.testing.assert_allclose(module(x).detach().numpy(), expected, rtol=0, atol=1e-13)
    assert [name for name, _ in module.named_parameters()] == ["map.weight"]


def test_tokens_are_treated_alike_wherever_they_stand():
    module = ContentSkip(8, init_std=0.5, dtype=torch.float64)
    x = torch.randn(2, 7, 8, dtype=torch.float64)
    order = torch.randperm(7)
    torch.testing.assert_close(module(x[:, order]), module(x)[:, order], rtol=0, atol=1e-12)


def test_init_std_is_a_standard_deviation():
    """The paper's norms at the start only fit this reading: 1e-4 · 768 = 0.077."""
    torch.manual_seed(0)
    norm = torch.linalg.vector_norm(ContentSkip(768).map.weight).item()
    assert norm == pytest.approx(1e-4 * 768, rel=0.01)


def test_zero_std_makes_the_skip_exactly_zero():
    assert torch.equal(ContentSkip(16, init_std=0.0)(torch.randn(2, 3, 16)), torch.zeros(2, 3, 16))


def test_reset_parameters_draws_afresh():
    module = ContentSkip(16)
    before = module.map.weight.clone()
    module.reset_parameters()
    assert not torch.equal(before, module.map.weight)


def test_fp32_weights_serve_a_half_precision_base():
    module = ContentSkip(16, init_std=0.5)
    x = torch.randn(2, 3, 16).bfloat16()
    assert module(x).dtype == torch.bfloat16
    assert torch.equal(module(x), module(x.float()).bfloat16())
