"""What a model in training makes of some prompts: a grid of shapes at each evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mmpreproj.data.encoding import EncodedPictures
from mmpreproj.pipelines.sd3 import PreProjSD3Pipeline
from mmpreproj.pipelines.shapes import PreProjShapePipeline
from mmpreproj.points.drawing import draw_clouds_grid
from mmpreproj.recipes.shapes import ShapeSampling, generate_shapes

SAMPLING = ShapeSampling(points=1024, steps=25, guidance=1.0, count=2)


def preview_prompts(trained: EncodedPictures, held_out: EncodedPictures, *, count: int) -> list[tuple[str, str]]:
    """Choose captions that have clouds, evenly over both sets, held-out ones second: (caption, label) pairs."""
    halves = (trained, "trained", count - count // 2), (held_out, "held out", count // 2)
    chosen: list[tuple[str, str]] = []
    for pictures, label, wanted in halves:
        flags = [] if pictures.has_cloud is None else pictures.has_cloud.tolist()
        captions = sorted({caption for caption, there in zip(pictures.captions, flags, strict=True) if there})
        some = min(wanted, len(captions))
        chosen += [(captions[place * len(captions) // some], label) for place in range(some)]
    return chosen


def draw_previews(pipeline: PreProjSD3Pipeline, prompts: Sequence[tuple[str, str]], path: Path) -> str | None:
    """Generate shapes for (caption, label) pairs and draw them as a grid; say why where there is nothing to draw."""
    shapes = PreProjShapePipeline.from_pipe(pipeline)
    shapes.set_progress_bar_config(disable=True)
    was_training = shapes.transformer.training
    shapes.transformer.eval()
    try:
        rows = generate_shapes(shapes, [caption for caption, _ in prompts], SAMPLING)
        labels = [f"{caption} ({label})" for caption, label in prompts]
        draw_clouds_grid([(label, clouds) for label, (_, clouds) in zip(labels, rows, strict=True)], path)
    except ValueError as error:  # a model that has learned nothing yet may make clouds that cannot be drawn
        return str(error)
    finally:
        shapes.transformer.train(was_training)
    return None
