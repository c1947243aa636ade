"""How a pipeline's scheduler takes noise to be mixed in, and what it takes its model to give."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

from torch import Tensor

from mmpreproj.core.flow import interpolate, velocity

Prediction = Literal["epsilon", "sample", "v_prediction"]
PREDICTIONS: tuple[Prediction, ...] = get_args(Prediction)


class Process(Protocol):
    """What training asks of a process; clean samples and noise are `[B, …]`, levels `[B]` in (0, 1), 1 for noise."""

    def mix(self, clean: Tensor, noise: Tensor, levels: Tensor) -> Tensor:
        """Return noisy samples, `[B, …]`."""

    def target(self, clean: Tensor, noise: Tensor, levels: Tensor) -> Tensor:
        """Return what the scheduler takes the model to give, `[B, …]`."""

    def times(self, levels: Tensor) -> Tensor:
        """Return the scheduler's timesteps, `[B]`."""


@dataclass(frozen=True)
class FlowProcess:
    """Rectified flow.

    Attributes:
        timesteps: the scheduler's number of training timesteps.
        inverted: whether its time runs from noise to picture, as Mochi's does.
        shift: by which noise levels differ from the timesteps that go with them: `t = timesteps · u` for the noise
            level `shift · u / (1 + (shift - 1) · u)`. CogView4 is told times so, by the size of the picture.

    Source: arXiv 2403.03206, section 2.
    """

    timesteps: int = 1000
    inverted: bool = False
    shift: float = 1.0

    def mix(self, clean: Tensor, noise: Tensor, levels: Tensor) -> Tensor:
        """Return noisy samples; see `Process`."""
        return interpolate(clean, noise, levels)

    def target(self, clean: Tensor, noise: Tensor, levels: Tensor) -> Tensor:
        """Return the velocity towards later timesteps; see `Process`."""
        return -velocity(clean, noise) if self.inverted else velocity(clean, noise)

    def times(self, levels: Tensor) -> Tensor:
        """Return timesteps; see `Process`."""
        told = levels / (self.shift - (self.shift - 1) * levels)
        return self.timesteps * (1 - told if self.inverted else told)


@dataclass(frozen=True)
class DiffusionProcess:
    """A variance-preserving process in discrete timesteps.

    Attributes:
        kept: the share of variance that is left of the picture at each timestep, `ᾱ`.
        prediction: what the model gives.

    Source: arXiv 2006.11239, equation 4, and for `v_prediction` arXiv 2202.00512, appendix D.
    """

    kept: tuple[float, ...]
    prediction: Prediction

    def mix(self, clean: Tensor, noise: Tensor, levels: Tensor) -> Tensor:
        """Return noisy samples; see `Process`."""
        picture, noisy = self._shares(clean, levels)
        return picture * clean + noisy * noise

    def target(self, clean: Tensor, noise: Tensor, levels: Tensor) -> Tensor:
        """Return what the model should give; see `Process`."""
        if self.prediction == "epsilon":
            return noise
        if self.prediction == "sample":
            return clean
        picture, noisy = self._shares(clean, levels)
        return picture * noise - noisy * clean

    def times(self, levels: Tensor) -> Tensor:
        """Return whole timesteps; see `Process`."""
        return (levels * len(self.kept)).long().clamp(max=len(self.kept) - 1)

    def _shares(self, clean: Tensor, levels: Tensor) -> tuple[Tensor, Tensor]:
        """Return what picture and noise are multiplied by, `[B, 1, …]` each."""
        kept = clean.new_tensor(self.kept)[self.times(levels).to(clean.device)]  # [B]
        kept = kept.view(-1, *[1] * (clean.ndim - 1))
        return kept.sqrt(), (1 - kept).sqrt()


def process_of(scheduler: Any) -> FlowProcess | DiffusionProcess:
    """Read off a Diffusers scheduler how it takes noise to be mixed in.

    Raises:
        ValueError: for a scheduler that is not known to be either.
    """
    settings = scheduler.config
    prediction = settings.get("prediction_type")
    is_flow = hasattr(scheduler, "scale_noise") or settings.get("use_flow_sigmas") or prediction == "flow_prediction"
    if is_flow:
        return FlowProcess(int(settings.num_train_timesteps), inverted=bool(settings.get("invert_sigmas", False)))
    if prediction in PREDICTIONS and hasattr(scheduler, "alphas_cumprod"):
        return DiffusionProcess(tuple(scheduler.alphas_cumprod.tolist()), prediction)
    raise ValueError(
        f"cannot tell how {type(scheduler).__name__} (prediction_type {prediction!r}) mixes noise in; expected a "
        f"flow-matching scheduler, or one with alphas_cumprod and a prediction_type of {', '.join(PREDICTIONS)}; set "
        "another on pipeline.scheduler before recording"
    )
