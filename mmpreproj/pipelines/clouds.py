"""Clouds of a pipeline's call: one for each picture, and no more points than the model was trained to be shown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mmpreproj.patching.hooks import POINT_CLOUD, POINT_MASK
from mmpreproj.points.path import batch_clouds, point_path


def clouds_of_call(pipe: Any, point_cloud: Any, given: Mapping[str, Any]) -> tuple[Tensor, Tensor] | None:
    """Make a batch of the clouds of a call, one for each picture of each prompt.

    Args:
        pipe: a `PreProjSD3Pipeline`.
        point_cloud: as given to it.
        given: its other arguments by name.

    Returns:
        Clouds `[B, P, 3 + F]`, and truth values `[B, P]`, true at points; None where there is no prompt either, which
        the parent refuses.

    Raises:
        ValueError: if clouds are given otherwise too, cannot be used, or are not one or one for each prompt; or if the
            transformer has no point path.
    """
    if (given["joint_attention_kwargs"] or {}).keys() & {POINT_CLOUD, POINT_MASK}:
        raise ValueError(f"clouds were given twice: as point_cloud=… and in joint_attention_kwargs[{POINT_CLOUD!r}]")
    path = point_path(pipe.transformer)
    clouds, mask = thin_clouds(*batch_clouds(point_cloud, features=path.channels - 3), most=path.shown)
    prompt = given["prompt_embeds"] if given["prompt"] is None else given["prompt"]
    if not isinstance(prompt, (str, list, Tensor)):
        return None
    count = 1 if isinstance(prompt, str) else len(prompt)
    if len(clouds) not in (1, count):
        raise ValueError(f"point_cloud has {len(clouds)} clouds for {count} prompts; give one, or one for each")
    copies = given["num_images_per_prompt"] * (count // len(clouds))
    device = pipe._execution_device
    return clouds.repeat_interleave(copies, dim=0).to(device), mask.repeat_interleave(copies, dim=0).to(device)


def thin_clouds(clouds: Tensor, mask: Tensor, *, most: int) -> tuple[Tensor, Tensor]:
    """Keep so many points of each cloud `[B, P, C]` at most, drawn at random but the same ones every time.

    Args:
        clouds: with padding.
        mask: truth values `[B, P]`, true at points.
        most: number of points Q.

    Returns:
        Clouds `[B, Q, C]` and mask `[B, Q]`; what was given, where no cloud has more.
    """
    if int(mask.sum(dim=1).max()) <= most:
        return clouds, mask
    generator = torch.Generator().manual_seed(0)
    places = torch.rand(mask.shape, generator=generator).masked_fill(~mask, 2.0)  # padding last
    order = places.argsort(dim=1)[:, :most]
    return clouds.gather(1, order[..., None].expand(-1, -1, clouds.shape[-1])), mask.gather(1, order)
