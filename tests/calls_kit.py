"""A pipeline of a few lines around a model of one layer, whose ways with it can be changed one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from diffusers import CogVideoXDPMScheduler, FlowMatchEulerDiscreteScheduler
from torch import Tensor, nn

CHANNELS, TOKENS, TEXT = 4, 6, 3


class Model(nn.Module):
    """Maps tokens `[B, N, 4]`, a time `[B]` and a text `[B, L, 4]` to tokens."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.map = nn.Linear(CHANNELS, CHANNELS)

    def forward(
        self,
        hidden_states: Tensor,
        timestep: Tensor,
        text: Tensor | None = None,
        residuals: Sequence[Tensor] = (),
        **further: Any,
    ) -> tuple[Tensor]:
        mean = 0 if text is None else text.mean(dim=1, keepdim=True)
        return (
            self.map(hidden_states) + sum(residuals) + mean + timestep[:1, None, None].to(hidden_states.dtype) / 1000,
        )


class ControlNet(nn.Module):
    """Maps tokens and a time to residuals of the model, and to something else."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(CHANNELS, CHANNELS)

    def forward(self, hidden_states: Tensor, time: Tensor) -> tuple[list[Tensor], Tensor]:
        return [self.map(hidden_states), hidden_states * time / 1000], time


class Pipeline:
    """Denoises tokens `[1, 6, 4]`.

    Args:
        scheduler: rectified flow by default.
        told: what the model is told of the scheduler's time.
        given: the model's tokens, from the sample.
        taken: the scheduler's prediction, from what the model gives.
        further: more arguments of the model, from the time.
        controlled: what the model is given of what another one, `controlnet`, gives, if there is one.
        calls: of the model in a step.
        dtype: of the model's time.
    """

    def __init__(
        self,
        scheduler: Any = None,
        *,
        told: Callable[[Tensor], Tensor] = lambda time: time,
        given: Callable[[Tensor], Tensor] = lambda sample: sample,
        taken: Callable[[Tensor], Tensor] = lambda output: output,
        further: Callable[[Tensor], dict[str, Any]] = lambda time: {},
        controlled: Callable[[tuple[list[Tensor], Tensor]], dict[str, Any]] | None = None,
        calls: int = 1,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.scheduler = FlowMatchEulerDiscreteScheduler() if scheduler is None else scheduler
        self.transformer = Model()
        self.told, self.given, self.taken, self.further = told, given, taken, further
        self.calls, self.dtype = calls, dtype
        self.controlled = controlled
        self.controlnet = None if controlled is None else ControlNet()

    def __call__(self, text: Tensor, *, num_inference_steps: int, batch: int = 1, output_type: str = "np") -> Tensor:
        self.scheduler.set_timesteps(num_inference_steps)
        sample = torch.randn(batch, TOKENS, CHANNELS, generator=torch.Generator().manual_seed(1))
        for time in self.scheduler.timesteps:
            told = self.told(time)
            told = told if told.ndim else told.to(self.dtype or told.dtype).expand(batch)
            for _ in range(self.calls):
                further = self.further(time)
                if self.controlnet is not None:
                    further |= self.controlled(self.controlnet(sample, told))
                (output,) = self.transformer(self.given(sample), told, text=text, **further)
            named = {"model_output": self.taken(output), "timestep": time, "sample": sample}
            if isinstance(self.scheduler, CogVideoXDPMScheduler):
                named |= {"old_pred_original_sample": None, "timestep_back": None}
            sample = self.scheduler.step(**named, return_dict=False)[0]
        return sample


def a_text(seed: int = 0) -> Tensor:
    """Draw a text `[1, L, 4]`."""
    return torch.randn(1, TEXT, CHANNELS, generator=torch.Generator().manual_seed(seed))
