import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from mmpreproj.core.flow import interpolate, shift_sigmas, spread_sigmas, velocity


@pytest.fixture
def pair() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(3, 2, 4, 5, dtype=torch.float64), torch.randn(3, 2, 4, 5, dtype=torch.float64)


def test_path_runs_from_the_picture_to_the_noise(pair):
    clean, noise = pair
    assert torch.equal(interpolate(clean, noise, torch.zeros(3, dtype=torch.float64)), clean)
    assert torch.equal(interpolate(clean, noise, torch.ones(3, dtype=torch.float64)), noise)


def test_each_sample_has_its_own_noise_level(pair):
    clean, noise = pair
    mixed = interpolate(clean, noise, torch.tensor([0.0, 0.25, 1.0], dtype=torch.float64))
    for sample, sigma in enumerate((0.0, 0.25, 1.0)):
        expected = (1 - sigma) * clean[sample] + sigma * noise[sample]
        torch.testing.assert_close(mixed[sample], expected, rtol=0, atol=1e-15)


def test_velocity_is_the_derivative_of_the_path(pair):
    clean, noise = pair
    for sigma in (0.1, 0.5, 0.9):
        low, high = (torch.full((3,), sigma + step, dtype=torch.float64) for step in (-1e-3, 1e-3))
        slope = (interpolate(clean, noise, high) - interpolate(clean, noise, low)) / 2e-3
        torch.testing.assert_close(velocity(clean, noise), slope, rtol=0, atol=1e-10)


def test_one_euler_step_along_the_velocity_reaches_the_picture(pair):
    clean, noise = pair
    sigmas = torch.tensor([0.2, 0.6, 1.0], dtype=torch.float64)
    reached = interpolate(clean, noise, sigmas) - sigmas.view(-1, 1, 1, 1) * velocity(clean, noise)
    torch.testing.assert_close(reached, clean, rtol=0, atol=1e-14)


@pytest.mark.parametrize("shape", [(4, 3), (2,)])
def test_any_number_of_dimensions(shape: tuple[int, ...]):
    clean, noise = torch.randn(shape), torch.randn(shape)
    half = torch.full(shape[:1], 0.5)
    torch.testing.assert_close(interpolate(clean, noise, half), (clean + noise) / 2)


def test_shapes_that_do_not_agree_are_refused(pair):
    clean, noise = pair
    with pytest.raises(ValueError, match=r"noise must have the shape .* \[3, 2, 4, 5\]; got \[3, 2, 4, 4\]"):
        interpolate(clean, noise[..., :4], torch.zeros(3))
    with pytest.raises(ValueError, match=r"noise must have the shape .* \[3, 2, 4, 5\]; got \[1, 2, 4, 5\]"):
        velocity(clean, noise[:1])
    with pytest.raises(ValueError, match=r"sigmas must hold one value per sample, \[3\]; got \[2\]"):
        interpolate(clean, noise, torch.zeros(2))
    with pytest.raises(ValueError, match=r"\[3\]; got \[3, 1\]"):
        interpolate(clean, noise, torch.zeros(3, 1))
    with pytest.raises(ValueError, match=r"\[3\]; got \[\]"):
        interpolate(clean, noise, torch.tensor(0.5))


def test_shift_keeps_both_ends_and_moves_the_middle_up():
    for shift in (0.5, 1.0, 3.0, 6.0):
        ends = shift_sigmas(torch.tensor([0.0, 1.0]), shift)
        assert torch.equal(ends, torch.tensor([0.0, 1.0]))
    assert shift_sigmas(torch.tensor(0.5), 3.0).item() == pytest.approx(0.75)


def test_shift_of_one_changes_nothing():
    sigmas = torch.rand(100)
    assert torch.equal(shift_sigmas(sigmas, 1.0), sigmas)


def test_shift_is_that_of_the_diffusers_scheduler():
    plain, shifted = FlowMatchEulerDiscreteScheduler(shift=1.0), FlowMatchEulerDiscreteScheduler(shift=3.0)
    torch.testing.assert_close(shift_sigmas(plain.sigmas, 3.0), shifted.sigmas)


@pytest.mark.parametrize(("pictures", "levels"), [(1, 1), (7, 3), (128, 4), (1000, 8)])
def test_spread_puts_one_level_in_each_cell_of_each_picture(pictures: int, levels: int):
    sigmas = spread_sigmas(pictures, levels)
    assert sigmas.shape == (pictures, levels)
    assert sigmas.dtype == torch.float32
    assert sigmas.min() > 0
    assert sigmas.max() < 1
    assert torch.equal((sigmas * levels).floor().long(), torch.arange(levels).expand(pictures, levels))


def test_spread_is_uniform_over_all_pictures_together():
    sigmas = spread_sigmas(128, 4).double()
    assert sigmas.mean().item() == pytest.approx(0.5, abs=2e-3)
    assert sigmas.var().item() == pytest.approx(1 / 12, rel=0.02)
    counts = torch.histc(sigmas.flatten(), bins=32, min=0, max=1)
    assert (counts - 16).abs().max() <= 2, counts
    assert sigmas.flatten().unique().numel() == 512


def test_spread_is_fixed():
    assert torch.equal(spread_sigmas(16, 4), spread_sigmas(16, 4))
    assert torch.equal(spread_sigmas(16, 4), spread_sigmas(32, 4)[:16]), "more pictures do not move the levels"
