import pytest
import torch
from torch import nn

from mmpreproj.core.linear_map import LinearMap


def test_is_a_linear_layer_without_bias():
    ours, stock = LinearMap(6, 4, dtype=torch.float64), nn.Linear(6, 4, bias=False, dtype=torch.float64)
    ours.reset_parameters(0.5)
    stock.load_state_dict(ours.state_dict())
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    assert torch.equal(ours(x), stock(x))


def test_starts_as_linear_does_unless_told_otherwise():
    ours, stock = LinearMap(6, 4), nn.Linear(6, 4, bias=False)
    torch.manual_seed(3)
    ours.reset_parameters()
    torch.manual_seed(3)
    stock.reset_parameters()
    assert torch.equal(ours.weight, stock.weight)


def test_is_not_found_by_what_looks_for_linear_layers():
    """Quantisers, layerwise casting and LoRA's `all-linear` go by this very check."""
    assert not isinstance(LinearMap(4, 4), nn.Linear)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_computes_in_the_dtype_of_its_weight(dtype: torch.dtype):
    ours = LinearMap(4, 4)
    ours.reset_parameters(0.5)
    x = torch.randn(2, 4, dtype=dtype)
    assert torch.equal(ours(x), ours(x.float()))
    assert ours(x).dtype == torch.float32


def test_autocast_decides_the_dtype_where_it_is_on():
    ours = LinearMap(4, 4)
    ours.reset_parameters(0.5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert ours(torch.randn(2, 4)).dtype == torch.bfloat16
