"""Noise levels against the distribution of each scheme, weights against formulas, and shifts for larger pictures."""

import math
from functools import cache

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from mmpreproj.core.draws import generator_of
from mmpreproj.training.config import FlowConfig
from mmpreproj.training.noise import draw_sigmas, loss_weights, shift_for

LEVELS = 20_000
BOUND = 1.95 / LEVELS**0.5  # the statistic of Kolmogorov and Smirnov is above it once in a thousand times


@cache  # several tests look at the same levels
def draw(flow, *, shift=1.0, count=LEVELS):
    return draw_sigmas([torch.Generator().manual_seed(7)] * count, flow, shift=shift)


def logit_normal(mean, std):
    return lambda sigmas: torch.special.ndtr((torch.logit(sigmas) - mean) / std)


def mode_map(u, scale):
    """Section 3.1 of arXiv 2403.03206: the level that a uniform number becomes, falling from 1 to 0."""
    return 1 - u - scale * (torch.cos(math.pi * u / 2) ** 2 - 1 + u)


def mode(scale):
    """A level is below σ where the uniform number is above that which becomes σ; found between 100,000 of them."""
    u = torch.linspace(1, 0, 100_001, dtype=torch.float64)
    levels = mode_map(u, scale)  # rising

    def distribution(sigmas):
        above = torch.searchsorted(levels, sigmas).clamp(1, len(u) - 1)
        low, high = levels[above - 1], levels[above]
        part = (sigmas - low) / (high - low)
        return 1 - (u[above - 1] + part * (u[above] - u[above - 1]))

    return distribution


def uniform(sigmas):
    return sigmas


def shifted(distribution, shift):
    """The distribution of `s·σ / (1 + (s - 1)·σ)`."""
    return lambda sigmas: distribution(sigmas / (shift - (shift - 1) * sigmas))


def distance(sigmas, distribution):
    """The statistic of Kolmogorov and Smirnov: the widest gap between drawn levels `[n]` and a distribution."""
    expected = distribution(sigmas.double().sort().values)
    steps = torch.arange(len(sigmas) + 1, dtype=torch.float64) / len(sigmas)
    return float(torch.maximum(steps[1:] - expected, expected - steps[:-1]).max())


SCHEMES = [
    ({"scheme": "logit_normal"}, logit_normal(0, 1)),
    ({"scheme": "logit_normal", "logit_mean": -0.5, "logit_std": 0.6}, logit_normal(-0.5, 0.6)),
    ({"scheme": "mode"}, mode(1.29)),
    ({"scheme": "mode", "mode_scale": -0.8}, mode(-0.8)),
    ({"scheme": "cosmap"}, uniform),
    ({"scheme": "sigma_sqrt"}, uniform),
    ({"scheme": "uniform"}, uniform),
]


# draw_sigmas


@pytest.mark.parametrize(("settings", "distribution"), SCHEMES)
def test_levels_have_the_distribution_of_their_scheme(settings, distribution):
    sigmas = draw(FlowConfig(**settings))
    assert (sigmas.dtype, sigmas.shape) == (torch.float32, (LEVELS,))
    assert 0 <= float(sigmas.min()) < float(sigmas.max()) <= 1
    assert distance(sigmas, distribution) < BOUND


@pytest.mark.parametrize(("settings", "distribution"), [SCHEMES[0], SCHEMES[2], SCHEMES[4]])
def test_levels_are_moved_by_the_shift(settings, distribution):
    sigmas = draw(FlowConfig(**settings), shift=3.0)
    assert distance(sigmas, shifted(distribution, 3.0)) < BOUND
    assert distance(sigmas, shifted(distribution, 2.8)) > BOUND


@pytest.mark.parametrize(
    ("settings", "wrong"),
    [
        ({"scheme": "logit_normal"}, logit_normal(0.05, 1)),
        ({"scheme": "logit_normal"}, logit_normal(-0.05, 1)),
        ({"scheme": "logit_normal"}, logit_normal(0, 1.08)),
        ({"scheme": "mode"}, mode(1.15)),
        ({"scheme": "mode"}, uniform),
        ({"scheme": "uniform"}, shifted(uniform, 1.08)),
    ],
)
def test_a_distribution_that_is_a_little_off_is_told_from_the_right_one(settings, wrong):
    """Else the tests above could not fail."""
    assert distance(draw(FlowConfig(**settings)), wrong) > BOUND


def test_the_levels_of_successive_draws_of_a_run_have_the_distribution_too():
    sigmas = draw_sigmas([generator_of(3, number) for number in range(LEVELS)], FlowConfig(), shift=1.0)
    assert distance(sigmas, logit_normal(0, 1)) < BOUND


@pytest.mark.parametrize("settings", [settings for settings, _ in SCHEMES])
def test_a_level_depends_on_its_own_generator_alone(settings):
    flow = FlowConfig(**settings)

    def levels(*numbers):
        return draw_sigmas([generator_of(3, number) for number in numbers], flow, shift=3.0)

    assert torch.equal(levels(0, 1, 2, 3), torch.cat([levels(0), levels(1, 2), levels(3)]))
    assert torch.equal(levels(3, 1), levels(1, 3).flip(0))
    assert len(set(levels(0, 1, 2, 3).tolist())) == 4


@pytest.mark.parametrize("scale", [-1.0, 0.0, 1.29, 1.75])
def test_a_mode_scale_that_can_be_set_gives_one_level_for_each_number(scale):
    levels = mode_map(torch.linspace(0, 1, 10_001, dtype=torch.float64), scale)
    assert (float(levels[0]), float(levels[-1])) == pytest.approx((1, 0), abs=1e-12)
    assert float(levels.diff().max()) < 0
    drawn = draw(FlowConfig(scheme="mode", mode_scale=scale), count=5000)
    assert 0 <= float(drawn.min()) < float(drawn.max()) <= 1


@pytest.mark.parametrize("scale", [-1.01, 1.76])
def test_a_mode_scale_that_gives_two_levels_alike_is_refused(scale):
    levels = mode_map(torch.linspace(0, 1, 10_001, dtype=torch.float64), scale)
    assert float(levels.diff().max()) > 0
    with pytest.raises(ValueError, match="mode_scale"):
        FlowConfig(mode_scale=scale)


# loss_weights

FORMULAS = {
    "logit_normal": torch.ones_like,
    "mode": torch.ones_like,
    "uniform": torch.ones_like,
    "cosmap": lambda sigmas: 2 / (math.pi * (1 - 2 * sigmas + 2 * sigmas**2)),
    "sigma_sqrt": lambda sigmas: sigmas**-2,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scheme", FORMULAS)
def test_weights_are_those_of_the_formulas(scheme, dtype):
    sigmas = torch.linspace(1e-3, 1, 500, dtype=torch.float64)
    found = loss_weights(sigmas.to(dtype), FlowConfig(scheme=scheme))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), FORMULAS[scheme](sigmas), rtol=1e-5, atol=0)


def middles(count=200_000):
    return (torch.arange(count, dtype=torch.float64) + 0.5) / count


def test_uniform_levels_weighted_by_cosmap_count_as_levels_of_its_density():
    """Section 3.1 of the paper: `σ = 1 - 1 / (tan(πu/2) + 1)` for uniform u, so as many are below σ as below its u."""
    levels = middles()
    found = loss_weights(levels, FlowConfig(scheme="cosmap")).double().cumsum(0) / len(levels)
    u = torch.linspace(0.01, 0.99, 99, dtype=torch.float64)
    sigmas = 1 - 1 / (torch.tan(math.pi * u / 2) + 1)
    below = found[(sigmas * len(levels)).long() - 1]
    torch.testing.assert_close(below, u, rtol=0, atol=1e-5)
    assert float(found[-1]) == pytest.approx(1, abs=1e-6)


def test_no_level_weighs_more_than_the_lowest_that_diffusers_trains_at():
    lowest = FlowMatchEulerDiscreteScheduler().sigmas.min()
    flow = FlowConfig(scheme="sigma_sqrt")
    most = float(loss_weights(lowest[None], flow))
    found = loss_weights(torch.tensor([0.0, 1e-30, 1e-4, 0.999e-3]), flow)
    assert found.tolist() == pytest.approx([most] * 4, rel=1e-5)
    assert float(loss_weights(torch.tensor([2e-3]), flow)) == pytest.approx(most / 4, rel=1e-5)


def test_the_bound_gives_sigma_sqrt_a_mean_near_that_over_diffusers_levels():
    """`∫ 1/σ²` from 0 has none. Half of it is from the thousandth of the levels at the bound: the scheme is steep."""
    flow = FlowConfig(scheme="sigma_sqrt")
    found = loss_weights(middles(), flow).double()
    assert float(found.mean()) == pytest.approx(1000 + 999, rel=1e-3)
    diffusers = float((FlowMatchEulerDiscreteScheduler().sigmas.double() ** -2).mean())
    assert 1 < float(found.mean()) / diffusers < 1.25


# shift_for


def test_pictures_of_n_times_the_pixels_are_shifted_by_root_n():
    flow = FlowConfig(shift=3.0, shift_resolution=512)
    assert shift_for(flow, scheduler_shift=1.0, pixels=512 * 512) == pytest.approx(3)
    assert shift_for(flow, scheduler_shift=1.0, pixels=4 * 512 * 512) == pytest.approx(6)
    assert shift_for(flow, scheduler_shift=1.0, pixels=256 * 256) == pytest.approx(1.5)


def test_buckets_of_equal_area_share_a_shift():
    flow = FlowConfig(shift_resolution=512)
    wide, square = (shift_for(flow, scheduler_shift=3.0, pixels=pixels) for pixels in (1024 * 256, 512 * 512))
    assert wide == square == pytest.approx(3)


def test_without_a_resolution_all_are_shifted_alike_by_the_setting_or_else_the_schedulers():
    for pixels in (64, 1024 * 1024):
        assert shift_for(FlowConfig(), scheduler_shift=3.0, pixels=pixels) == 3.0
        assert shift_for(FlowConfig(shift=1.5), scheduler_shift=3.0, pixels=pixels) == 1.5


def test_a_larger_pictures_levels_are_as_noisy_for_what_they_show():
    """Equation 23: at equal uncertainty of the mean, `(1 - σ) / σ` of m pixels is `√(n / m)` times that of n."""
    flow = FlowConfig(shift=1.0, shift_resolution=64)
    small, large = (
        draw(flow, shift=shift_for(flow, scheduler_shift=1.0, pixels=pixels), count=100).double()
        for pixels in (64 * 64, 128 * 128)
    )
    torch.testing.assert_close((1 - large) / large, (1 - small) / small / 2, rtol=1e-4, atol=0)
