"""Noise levels: how they are drawn, shifted for larger pictures, and what an error at one weighs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from diffusers.training_utils import compute_density_for_timestep_sampling, compute_loss_weighting_for_sd3
from torch import Tensor

from mmpreproj.core.flow import shift_sigmas
from mmpreproj.training.config import FlowConfig

SMALLEST = 1e-3  # `1 / σ²` has no bound at 0 and no mean; this is the lowest of diffusers' 1000 discrete levels


def draw_sigmas(generators: Sequence[torch.Generator], flow: FlowConfig, *, shift: float) -> Tensor:
    """Draw a noise level `[B]` in [0, 1] with each of B generators, and shift it.

    Source: arXiv 2403.03206, section 3.1; densities by diffusers' `compute_density_for_timestep_sampling`.
    """
    drawn = [
        compute_density_for_timestep_sampling(
            flow.scheme, 1, flow.logit_mean, flow.logit_std, flow.mode_scale, generator=generator
        )
        for generator in generators
    ]
    return shift_sigmas(torch.cat(drawn), shift)  # [B]


def loss_weights(sigmas: Tensor, flow: FlowConfig) -> Tensor:
    """Weigh the squared errors at noise levels `[B]`: `[B]`, float32.

    Levels are what the model sees, after the shift, as in diffusers' training scripts: without a shift `cosmap` comes
    to drawing from the paper's density, with one it weighs shifted levels by it. Levels below 0.001 weigh as 0.001.

    Source: arXiv 2403.03206, section 3.1; weights by diffusers' `compute_loss_weighting_for_sd3`.
    """
    return compute_loss_weighting_for_sd3(flow.scheme, sigmas=sigmas.float().clamp(min=SMALLEST))


def shift_for(flow: FlowConfig, *, scheduler_shift: float, pixels: int) -> float:
    """Return the shift of noise levels for a picture of so many pixels.

    Source: arXiv 2403.03206, section 5.3.2, equation 23: `√(m / n)` for m pixels, of levels meant for n.
    """
    shift = scheduler_shift if flow.shift is None else flow.shift
    return shift if flow.shift_resolution is None else shift * math.sqrt(pixels) / flow.shift_resolution
