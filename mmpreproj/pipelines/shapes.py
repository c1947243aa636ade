"""Point clouds from prompts: each point flows from noise by itself, through an SD3 transformer's patched blocks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from diffusers.utils.outputs import BaseOutput
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor

from mmpreproj.patching.lookup import unwrap
from mmpreproj.pipelines.sd3 import PreProjSD3Pipeline
from mmpreproj.points.path import generating_path, point_velocity

OUTPUT_TYPES = ("np", "pt")
POINTS_AT_ONCE = 65_536


@dataclass
class ShapePipelineOutput(BaseOutput):
    """What `PreProjShapePipeline` gives.

    Attributes:
        clouds: `[B, P, 3 + F]`, float32: coordinates in the unit ball that clouds were trained in, then features.
    """

    clouds: np.ndarray | Tensor


class PreProjShapePipeline(PreProjSD3Pipeline):
    """Generate point clouds from prompts with a transformer that has a point path.

    It has the components and folders of `PreProjSD3Pipeline`, so that one model makes pictures with that and clouds
    with this; `PreProjShapePipeline.from_pipe(pipe)` shares them. The points of a cloud are independent draws from a
    shape given the prompt, so one model makes clouds of any size, at a cost that grows with their points alone.
    """

    @torch.no_grad()
    def __call__(  # type: ignore[override]
        self,
        prompt: str | list[str] | None = None,
        *,
        negative_prompt: str | list[str] | None = None,
        num_points: int = 2048,
        num_inference_steps: int = 50,
        guidance_scale: float = 2.0,
        num_shapes_per_prompt: int = 1,
        generator: torch.Generator | list[torch.Generator] | None = None,
        noise: Tensor | None = None,
        pooled_prompt_embeds: Tensor | None = None,
        negative_pooled_prompt_embeds: Tensor | None = None,
        max_sequence_length: int | None = None,
        output_type: str = "np",
        return_dict: bool = True,
    ) -> ShapePipelineOutput | tuple[np.ndarray | Tensor]:
        """Generate point clouds.

        Args:
            prompt: one or several.
            negative_prompt: what to steer away from; the empty prompt by default.
            num_points: points of each cloud.
            num_inference_steps: Euler steps from noise to cloud, evenly spaced in σ.
            guidance_scale: classifier-free guidance; 1 for none, at half the cost.
            num_shapes_per_prompt: clouds per prompt.
            generator: draws the noise; a list has one for each cloud.
            noise: `[B, P, 3 + F]` to start from, instead of a generator.
            pooled_prompt_embeds: pooled text embeddings `[B, D_pooled]`, instead of prompts.
            negative_pooled_prompt_embeds: the same of the negative prompts; needed with guidance.
            max_sequence_length: longest text, in tokens, of T5; None as in `PreProjSD3Pipeline`.
            output_type: `"np"`, an array, or `"pt"`, a tensor on the device.
            return_dict: whether to return a `ShapePipelineOutput` rather than a tuple.

        Raises:
            ValueError: if the transformer has no point path that generates, an argument is not valid, or the clouds
                are not finite; or if the adapter was lost, as in `PreProjSD3Pipeline`.
        """
        self._check_adapter()
        path = generating_path(self.transformer)
        for name, value in (
            ("num_points", num_points),
            ("num_inference_steps", num_inference_steps),
            ("num_shapes_per_prompt", num_shapes_per_prompt),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a whole number of at least 1; got {value!r}")
        if not math.isfinite(guidance_scale):
            raise ValueError(f"guidance_scale must be a finite number; got {guidance_scale!r}")
        if output_type not in OUTPUT_TYPES:
            raise ValueError(f"output_type must be one of {', '.join(map(repr, OUTPUT_TYPES))}; got {output_type!r}")
        _check_texts(prompt, negative_prompt, pooled_prompt_embeds, negative_pooled_prompt_embeds)
        device = self._execution_device
        text, negative = self._pooled_text(
            prompt,
            negative_prompt,
            pooled_prompt_embeds,
            negative_pooled_prompt_embeds,
            guided=guidance_scale > 1,
            copies=num_shapes_per_prompt,
            max_sequence_length=max_sequence_length,
        )
        shape = (len(text), num_points, path.channels)
        if isinstance(generator, list) and len(generator) != len(text):
            raise ValueError(
                f"there are {len(generator)} generators for {len(text)} clouds; give one, or one for each"
            )
        if noise is None:
            noise = randn_tensor(shape, generator=generator, device=device, dtype=torch.float32)
        elif not isinstance(noise, Tensor) or tuple(noise.shape) != shape:
            found = list(noise.shape) if isinstance(noise, Tensor) else type(noise).__name__
            raise ValueError(f"noise must be a tensor of the shape {list(shape)}; got {found}")
        points = self._denoise(
            noise.to(device, torch.float32), text, negative, steps=num_inference_steps, guidance=guidance_scale
        )
        clouds = path.narrow(points)
        self.maybe_free_model_hooks()
        if not torch.isfinite(clouds).all():
            raise ValueError(
                "the generated points are NaN or infinite; load the model in bfloat16 or float32, or lower "
                "guidance_scale"
            )
        made = clouds if output_type == "pt" else clouds.cpu().numpy()
        return ShapePipelineOutput(clouds=made) if return_dict else (made,)

    def _pooled_text(
        self,
        prompt: str | list[str] | None,
        negative_prompt: str | list[str] | None,
        pooled: Tensor | None,
        negative_pooled: Tensor | None,
        *,
        guided: bool,
        copies: int,
        max_sequence_length: int | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return pooled embeddings `[B, D_pooled]` of prompts, and with guidance of negative ones, a row a cloud."""
        if pooled is None:
            _, _, pooled, negative_pooled = self.encode_prompt(
                prompt=prompt,
                prompt_2=None,
                prompt_3=None,
                negative_prompt=negative_prompt,
                do_classifier_free_guidance=guided,
                device=self._execution_device,
                max_sequence_length=max_sequence_length,
            )
        if guided and negative_pooled is None:
            raise ValueError("guidance needs negative_pooled_prompt_embeds beside pooled_prompt_embeds")
        texts = [pooled, negative_pooled] if guided else [pooled]
        for text in cast(list[Tensor], texts):
            _check_pooled(text, rows=len(pooled), width=self.transformer.config.pooled_projection_dim)
        place: dict[str, Any] = {"device": self._execution_device, "dtype": unwrap(self.transformer).dtype}
        rows = [text.to(**place).repeat_interleave(copies, dim=0) for text in cast(list[Tensor], texts)]
        return rows[0], rows[1] if guided else None

    def _denoise(
        self, points: Tensor, text: Tensor, negative: Tensor | None, *, steps: int, guidance: float
    ) -> Tensor:
        """Take points `[B, P, 3 + F]` from noise to clouds by Euler steps."""
        # The pipeline's own scheduler may be shifted for pictures of some size, which says nothing of points.
        scheduler: Any = FlowMatchEulerDiscreteScheduler(self.scheduler.config.num_train_timesteps)
        scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps).tolist(), device=points.device)
        for timestep in self.progress_bar(scheduler.timesteps):
            velocity = self._velocity(points, timestep, text)
            if negative is not None:
                away = self._velocity(points, timestep, negative)
                velocity = away + guidance * (velocity - away)
            points = scheduler.step(velocity, timestep, points, return_dict=False)[0]
        return points

    def _velocity(self, points: Tensor, timestep: Tensor, text: Tensor) -> Tensor:
        """Compute velocities `[B, P, 3 + F]` a bounded number of points at once."""
        parts = points.split(max(1, POINTS_AT_ONCE // len(points)), dim=1)
        timesteps = timestep.expand(len(points))
        velocities = [
            point_velocity(self.transformer, part, timestep=timesteps, pooled_projections=text) for part in parts
        ]
        return torch.cat(velocities, dim=1)


def _check_texts(prompt: Any, negative_prompt: Any, pooled: Any, negative_pooled: Any) -> None:
    """Refuse no texts, and texts beside embeddings."""
    if (prompt is None) == (pooled is None):
        raise ValueError("give either prompt or pooled_prompt_embeds")
    if pooled is None and (not isinstance(prompt, (str, list)) or prompt == []):
        raise TypeError(f"prompt must be a string or a list of strings; got {prompt!r} ({type(prompt).__name__})")
    if pooled is None and negative_pooled is not None:
        raise ValueError(
            "negative_pooled_prompt_embeds go with pooled_prompt_embeds; beside prompt, negative_prompt does"
        )
    if pooled is not None and negative_prompt is not None:
        raise ValueError(
            "negative_prompt goes with prompt; beside pooled_prompt_embeds, negative_pooled_prompt_embeds do"
        )


def _check_pooled(pooled: Any, *, rows: int, width: int) -> None:
    """Refuse what are no pooled embeddings of so many texts."""
    if not isinstance(pooled, Tensor) or tuple(pooled.shape) != (rows, width):
        found = list(pooled.shape) if isinstance(pooled, Tensor) else type(pooled).__name__
        raise ValueError(f"pooled embeddings must be a tensor [{rows}, {width}], negative ones too; got {found}")
