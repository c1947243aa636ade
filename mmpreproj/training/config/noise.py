"""Noise levels, and how clouds are trained on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field

from mmpreproj.training.config.section import Section


class FlowConfig(Section):
    """How noise levels are drawn and errors weighted.

    A level is drawn with density `scheme`, then shifted by `s·σ / (1 + (s - 1)·σ)`.

    Attributes:
        scheme: `logit_normal` and `mode` are densities of the level, errors weigh alike; `uniform` is neither;
            `cosmap` and `sigma_sqrt` draw uniformly and weigh errors by `2 / (π·(1 - 2σ + 2σ²))` and `1 / σ²`.
        logit_mean: mean of the logit, for `logit_normal`.
        logit_std: standard deviation of the logit, for `logit_normal`.
        mode_scale: strength of `mode`; 0 is uniform.
        shift: `s`, as `shift` of the scheduler; None takes the scheduler's own.
        shift_resolution: side in pixels of the square pictures that `shift` is meant for; those with n times as many
            pixels take `shift · √n`. None shifts all alike.

    Source: arXiv 2403.03206, sections 3.1 and 5.3.2.
    """

    also_called: ClassVar[Mapping[str, str]] = {"weighting_scheme": "scheme", "timestep_sampling": "scheme"}

    scheme: Literal["logit_normal", "mode", "cosmap", "sigma_sqrt", "uniform"] = "logit_normal"
    logit_mean: float = 0.0
    logit_std: float = Field(default=1.0, gt=0)
    mode_scale: float = Field(default=1.29, ge=-1, le=1.75)
    shift: float | None = Field(default=None, gt=0)
    shift_resolution: int | None = Field(default=None, ge=1)


class PointTraining(Section):
    """How clouds are trained on, where the adapter has `points`.

    Attributes:
        stored: points that each cloud is read as, once.
        per_step: points drawn from each cloud at a step, to be made from noise.
        dropout: share of pictures that are shown no cloud.
        weight: of the loss of points, that of pictures being 1.
        flow: noise levels of points; no shift by default, whatever the scheduler's.
        previews: captions of which shapes are generated and drawn, two each, at each evaluation; the second half are
            held-out ones.
    """

    stored: int = Field(default=4096, ge=2)
    per_step: int = Field(default=512, ge=1)
    dropout: float = Field(default=0.5, ge=0, le=1)
    weight: float = Field(default=1.0, ge=0)
    flow: FlowConfig = Field(default_factory=lambda: FlowConfig(shift=1.0))
    previews: int = Field(default=8, ge=0)
