"""What a model in training makes of some prompts: a grid of shapes at each evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mmpreproj.data.encoding import EncodedPictures
from mmpreproj.pipelines.sd3 import PreProjSD3Pipeline
from mmpreproj.pipelines.shapes import PreProjShapePipeline
from mmpreproj.points.drawing import draw_clouds_grid

POINTS, STEPS, COUNT = 1024, 25, 2


@dataclass(frozen=True)
class Preview:
    """A prompt that shapes are made of.

    Attributes:
        label: the prompt, and whether it was trained on.
        pooled: its embedding `[P]`, so that no text encoder is needed in training.
    """

    label: str
    pooled: Tensor


def choose_previews(trained: EncodedPictures, held_out: EncodedPictures, *, count: int) -> list[Preview]:
    """Choose captions that have clouds, evenly over both sets, held-out ones second."""
    chosen: list[Preview] = []
    for pictures, kind, wanted in (trained, "trained", count - count // 2), (held_out, "held out", count // 2):
        flags = [] if pictures.has_cloud is None else pictures.has_cloud.tolist()
        places = {caption: place for place, caption in enumerate(pictures.captions) if flags and flags[place]}
        captions, some = sorted(places), min(wanted, len(places))
        for caption in (captions[number * len(captions) // some] for number in range(some)):
            pooled = pictures.text.read(int(pictures.text_index[places[caption]]))["pooled"]
            chosen.append(Preview(f"{caption} ({kind})", pooled))
    return chosen


def draw_previews(pipeline: PreProjSD3Pipeline, previews: Sequence[Preview], path: Path) -> str | None:
    """Generate shapes and draw them as a grid; say why where there is nothing to draw, which must end no training."""
    shapes = PreProjShapePipeline.from_pipe(pipeline)
    shapes.set_progress_bar_config(disable=True)
    transformer = shapes.transformer
    was_training, device = transformer.training, next(transformer.parameters()).device
    transformer.eval()
    try:
        (clouds,) = shapes(
            pooled_prompt_embeds=torch.stack([preview.pooled for preview in previews]).to(device),
            num_points=POINTS,
            num_inference_steps=STEPS,
            num_shapes_per_prompt=COUNT,
            guidance_scale=1.0,
            generator=[torch.Generator().manual_seed(place) for place in range(COUNT)] * len(previews),
            return_dict=False,
        )
        labels = [preview.label for preview in previews]
        groups = [list(clouds[place : place + COUNT]) for place in range(0, len(clouds), COUNT)]
        draw_clouds_grid(list(zip(labels, groups, strict=True)), path)
    # A model that has learned nothing yet may make what cannot be drawn, and a disk may be full.
    except (ValueError, RuntimeError, OSError) as error:
        return str(error)
    finally:
        transformer.train(was_training)
    return None
