"""Noise levels, and how clouds are trained on."""

from __future__ import annotations

from pydantic import Field

from mmpreproj.training.config.section import Section


class FlowConfig(Section):
    """How noise levels are drawn: `σ = shift(sigmoid(N(logit_mean, logit_std²)))`.

    Attributes:
        logit_mean: mean of the logit.
        logit_std: standard deviation of the logit.
        shift: as `shift` of the scheduler; None takes the scheduler's own.
    """

    logit_mean: float = 0.0
    logit_std: float = Field(default=1.0, gt=0)
    shift: float | None = Field(default=None, gt=0)


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
