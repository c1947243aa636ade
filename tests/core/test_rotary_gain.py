import pytest
import torch
from torch import Tensor

from mmpreproj.core.rotary import rotate, text_angles
from mmpreproj.core.rotary_gain import RotaryGain

HEADS, WIDTH = 3, 8


@pytest.fixture
def angles() -> Tensor:
    return text_angles(5, width=WIDTH, theta=100.0)


def loss_of(gain: RotaryGain, tokens: Tensor, angles: Tensor, weights: Tensor) -> Tensor:
    turned = gain(angles)
    return (rotate(tokens, turned.cos(), turned.sin()) * weights).sum()


def test_no_head_knows_a_position_at_the_start(angles: Tensor):
    gain = RotaryGain(HEADS)
    assert torch.equal(gain(angles), torch.zeros(5, HEADS, WIDTH // 2))
    assert [name for name, _ in gain.named_parameters()] == ["gain"]


def test_each_head_has_its_own_gain(angles: Tensor):
    gain = RotaryGain(HEADS)
    with torch.no_grad():
        gain.gain.copy_(torch.tensor([0.5, 0.0, -2.0]))
    turned = gain(angles)
    assert turned.shape == (5, HEADS, WIDTH // 2)
    for head, factor in enumerate((0.5, 0.0, -2.0)):
        assert torch.equal(turned[:, head], angles * factor)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_angles_are_float32_whatever_the_dtype_of_the_gains(angles: Tensor, dtype: torch.dtype):
    gain = RotaryGain(HEADS, dtype=dtype)
    with torch.no_grad():
        gain.gain.copy_(torch.tensor([0.1, 0.7, -1.3]))
    turned = gain(angles)
    assert gain.gain.dtype == dtype
    assert turned.dtype == torch.float32
    exact = angles.double()[:, None] * gain.gain.detach().double()[:, None]
    torch.testing.assert_close(turned.double(), exact, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-8)])
def test_gains_learn_from_zero(angles: Tensor, dtype: torch.dtype, tolerance: float):
    """At gain g of a head, turning by `g θ` changes the result at g = 0 by `θ` times the token turned by 90°."""
    gain = RotaryGain(HEADS, dtype=dtype)
    tokens, weights = torch.randn(2, 5, HEADS, WIDTH), torch.randn(2, 5, HEADS, WIDTH)
    loss_of(gain, tokens, angles, weights).backward()
    even, odd = tokens.double().unflatten(-1, (-1, 2)).unbind(-1)
    sideways = torch.stack([-odd, even], dim=-1)  # [B, N, H, D/2, 2]
    slopes = sideways * angles.double()[:, None, :, None] * weights.double().unflatten(-1, (-1, 2))
    expected = slopes.sum(dim=(0, 1, 3, 4))  # [H]
    assert (gain.gain.grad.abs() > 0.1).all()
    torch.testing.assert_close(gain.gain.grad.double(), expected, rtol=tolerance, atol=1e-5)


def test_one_step_turns_every_head(angles: Tensor):
    gain = RotaryGain(HEADS)
    tokens, weights = torch.randn(2, 5, HEADS, WIDTH), torch.randn(2, 5, HEADS, WIDTH)
    before = loss_of(gain, tokens, angles, weights)
    before.backward()
    torch.optim.SGD(gain.parameters(), lr=1e-3).step()
    assert gain(angles)[1:].ne(0).all()
    assert loss_of(gain, tokens, angles, weights) < before


def test_reset_parameters_forgets_positions(angles: Tensor):
    gain = RotaryGain(HEADS)
    torch.nn.init.ones_(gain.gain)
    gain.reset_parameters()
    assert torch.equal(gain(angles), torch.zeros(5, HEADS, WIDTH // 2))
    assert gain.gain.requires_grad


def test_gains_are_made_on_the_device_that_is_asked_for():
    assert RotaryGain(HEADS, device=torch.device("meta")).gain.is_meta


def test_repr_names_the_number_of_heads():
    assert repr(RotaryGain(HEADS)) == "RotaryGain(3 heads)"
