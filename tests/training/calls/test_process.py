"""Noise, targets and times: against the scheduler's own, and a perfect model gives the picture back."""

from typing import Any

import pytest
import torch
from diffusers import CogVideoXDDIMScheduler, DDIMScheduler, FlowMatchEulerDiscreteScheduler
from torch import Tensor

from mmpreproj.training.calls import DiffusionProcess, FlowProcess
from mmpreproj.training.calls.process import process_of

LEVELS = torch.tensor([0.1, 0.503, 0.97])


def draw(seed: int) -> Tensor:
    return torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(seed))


CLEAN, NOISE = draw(0), draw(1)
DIFFUSION = [DDIMScheduler(prediction_type=kind) for kind in ("epsilon", "v_prediction")] + [
    CogVideoXDDIMScheduler(prediction_type="v_prediction")
]


@pytest.mark.parametrize("scheduler", DIFFUSION, ids=["epsilon", "v", "cogvideox"])
def test_diffusion_mixes_and_aims_as_its_scheduler_does(scheduler: Any):
    process = process_of(scheduler)
    times = process.times(LEVELS)
    assert times.tolist() == [100, 503, 970]
    torch.testing.assert_close(process.mix(CLEAN, NOISE, LEVELS), scheduler.add_noise(CLEAN, NOISE, times))
    expected = NOISE if scheduler.config.prediction_type == "epsilon" else scheduler.get_velocity(CLEAN, NOISE, times)
    torch.testing.assert_close(process.target(CLEAN, NOISE, LEVELS), expected)


def test_a_predicted_sample_is_the_picture():
    process = DiffusionProcess((0.9, 0.5, 0.1), "sample")
    assert torch.equal(process.target(CLEAN, NOISE, LEVELS), CLEAN)
    assert process.times(torch.tensor([0.0, 0.5, 1.0])).tolist() == [0, 1, 2]


def denoised(scheduler: Any, process: Any, steps: int = 8) -> Tensor:
    """Run a scheduler on a model that knows the answer."""
    scheduler.set_timesteps(steps)
    sample = NOISE.clone()
    target = process.target(CLEAN, NOISE, torch.ones(3))
    for time in scheduler.timesteps:
        sample = scheduler.step(target, time, sample, return_dict=False)[0]
    return sample


@pytest.mark.parametrize(
    "settings", [{}, {"invert_sigmas": True}, {"shift": 3.0}], ids=["plain", "inverted", "shifted"]
)
def test_the_target_of_a_flow_leads_from_noise_to_picture(settings: dict[str, Any]):
    scheduler = FlowMatchEulerDiscreteScheduler(**settings)
    torch.testing.assert_close(denoised(scheduler, process_of(scheduler)), CLEAN, atol=5e-3, rtol=0)


@pytest.mark.parametrize("settings", [{}, {"invert_sigmas": True}], ids=["plain", "inverted"])
def test_times_of_a_flow_are_the_schedulers(settings: dict[str, Any]):
    scheduler = FlowMatchEulerDiscreteScheduler(**settings)
    scheduler.set_timesteps(6)
    inverted = bool(settings)
    levels = 1 - scheduler.sigmas[:-1] if inverted else scheduler.sigmas[:-1]
    torch.testing.assert_close(process_of(scheduler).times(levels), scheduler.timesteps)
    torch.testing.assert_close(
        FlowProcess(inverted=inverted).mix(CLEAN, NOISE, LEVELS),
        (1 - LEVELS[:, None, None]) * CLEAN + LEVELS[:, None, None] * NOISE,
    )
