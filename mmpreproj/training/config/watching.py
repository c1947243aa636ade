"""What is looked at while a run goes on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field

from mmpreproj.training.config.section import Names, Section

Tracker = Literal["tensorboard", "wandb"]


class ValidationConfig(Section):
    """Pictures that the model in training makes of fixed prompts, from fixed noise, at each evaluation.

    Attributes:
        prompts: one row of the grid each; none draws no grid.
        negative_prompt: what to steer away from.
        count: pictures per prompt, from seeds `seed`, `seed + 1`, …
        steps: denoising steps.
        guidance: classifier-free guidance scale; 1 for none.
        seed: of the first picture.
        height: of the pictures, in pixels; None takes the training resolution.
        width: of the pictures, in pixels; None takes the training resolution.
        at_start: draw them before the first step too, to see what the model makes of the prompts without training.
    """

    also_called: ClassVar[Mapping[str, str]] = {
        "prompt": "prompts",
        "validation_prompt": "prompts",
        "num_validation_images": "count",
        "guidance_scale": "guidance",
        "num_inference_steps": "steps",
    }

    prompts: Names = ()
    negative_prompt: str = ""
    count: int = Field(default=4, ge=1)
    steps: int = Field(default=28, ge=1)
    guidance: float = Field(default=5.0, ge=0)
    seed: int = Field(default=0, ge=0)
    height: int | None = Field(default=None, ge=8)
    width: int | None = Field(default=None, ge=8)
    at_start: bool = True
