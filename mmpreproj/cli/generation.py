"""`mmpreproj generate` and `mmpreproj shapes`."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from mmpreproj.cli.app import reports_errors
from mmpreproj.cli.paths import check_png
from mmpreproj.recipes.quiet import hide_loading_bars

_ModelOption = Annotated[str, typer.Option(help="A pipeline's folder or hub id, or the folder of a trained adapter.")]
_PromptOption = Annotated[list[str], typer.Option(help="What to show; may be given several times.")]
_AdapterOption = Annotated[str | None, typer.Option(help="An adapter's folder or hub id, to put onto --model.")]
_LoraOption = Annotated[str | None, typer.Option(help="A LoRA's folder, file or hub id, to put onto --model.")]


class Precision(str, Enum):
    """Dtype of the weights when generating."""

    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


@reports_errors
def generate(
    model: _ModelOption,
    prompt: _PromptOption,
    adapter: _AdapterOption = None,
    lora: _LoraOption = None,
    point_cloud: Annotated[
        Path | None, typer.Option(help="A point cloud or mesh to show, for a model with a point path.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Folder for single pictures.  [default: pictures, unless --grid is given]")
    ] = None,
    grid: Annotated[Path | None, typer.Option(help="A PNG file for all pictures together, labelled.")] = None,
    negative_prompt: Annotated[str, typer.Option(help="What to steer away from.")] = "",
    count: Annotated[int, typer.Option(min=1, help="Pictures per prompt.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the first picture; the next ones count up.")] = 0,
    steps: Annotated[int, typer.Option(min=1, help="Denoising steps.")] = 28,
    guidance: Annotated[float, typer.Option(help="Classifier-free guidance scale; 1 for none.")] = 5.0,
    size: Annotated[
        str | None, typer.Option(help="Side in pixels, or width and height as 48x32.  [default: the model's own]")
    ] = None,
    precision: Annotated[Precision, typer.Option(help="Dtype of the weights.")] = Precision.fp32,
) -> None:
    """Generate pictures with a trained model."""
    from mmpreproj.recipes.figures import draw_grid
    from mmpreproj.recipes.generate import Sampling, parse_size, write_pictures
    from mmpreproj.recipes.generate import generate as make_pictures
    from mmpreproj.recipes.shapes import read_cloud_for

    check_png(grid, "--grid")
    sides = None if size is None else parse_size(size)
    sampling = Sampling(
        steps=steps, guidance=guidance, negative_prompt=negative_prompt, count=count, seed=seed, size=sides
    )
    pipeline = _load(model, precision, adapter=adapter, lora=lora)
    shown = None if point_cloud is None else read_cloud_for(pipeline, point_cloud)
    rows = make_pictures(pipeline, prompt, sampling, point_cloud=shown)
    if grid is not None:
        draw_grid(rows, grid)
        typer.echo(str(grid))
    if output is not None or grid is None:
        for path in write_pictures(rows, output or Path("pictures"), seed=seed):
            typer.echo(str(path))


@reports_errors
def shapes(
    model: _ModelOption,
    prompt: _PromptOption,
    adapter: _AdapterOption = None,
    lora: _LoraOption = None,
    output: Annotated[
        Path | None, typer.Option(help="Folder for single clouds.  [default: shapes, unless --grid is given]")
    ] = None,
    grid: Annotated[Path | None, typer.Option(help="A PNG file for pictures of all clouds, labelled.")] = None,
    points: Annotated[int, typer.Option(min=2, help="Points of each cloud.")] = 2048,
    count: Annotated[int, typer.Option(min=1, help="Clouds per prompt.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the first cloud; the next ones count up.")] = 0,
    steps: Annotated[int, typer.Option(min=1, help="Euler steps.")] = 50,
    guidance: Annotated[float, typer.Option(help="Classifier-free guidance scale; 1 for none.")] = 2.0,
    precision: Annotated[Precision, typer.Option(help="Dtype of the weights.")] = Precision.fp32,
) -> None:
    """Generate point clouds with a model that has a point path: `.ply` files, and a picture of each."""
    from mmpreproj.pipelines.shapes import PreProjShapePipeline
    from mmpreproj.points.drawing import draw_clouds_grid
    from mmpreproj.recipes.shapes import ShapeSampling, generate_shapes, write_shapes

    check_png(grid, "--grid")
    sampling = ShapeSampling(points=points, steps=steps, guidance=guidance, count=count, seed=seed)
    pipeline = PreProjShapePipeline.from_pipe(_load(model, precision, adapter=adapter, lora=lora))
    rows = generate_shapes(cast(PreProjShapePipeline, pipeline), prompt, sampling)
    if grid is not None:
        draw_clouds_grid(rows, grid)
        typer.echo(str(grid))
    if output is not None or grid is None:
        for path in write_shapes(rows, output or Path("shapes"), seed=seed):
            typer.echo(str(path))


def _load(model: str, precision: Precision, *, adapter: str | None, lora: str | None) -> Any:
    """Load a pipeline onto the best device, and say what it is."""
    import torch

    from mmpreproj.recipes.generate import best_device, describe
    from mmpreproj.recipes.loading import load_pipeline

    hide_loading_bars()
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision.value]
    pipeline = load_pipeline(model, adapter=adapter, lora=lora, dtype=dtype).to(best_device())
    typer.echo(describe(pipeline), err=True)
    return pipeline
