"""`mmpreproj generate` and `mmpreproj shapes`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from mmpreproj.cli.app import reports_errors
from mmpreproj.cli.paths import check_png
from mmpreproj.recipes.quiet import hide_loading_bars, quieten_libraries

_ModelOption = Annotated[str, typer.Option(help="A pipeline's folder or hub id, or the folder of a trained adapter.")]
_PromptOption = Annotated[list[str], typer.Option(help="What to show; may be given several times.")]
_AdapterOption = Annotated[str | None, typer.Option(help="An adapter's folder or hub id, to put onto --model.")]
_LoraOption = Annotated[str | None, typer.Option(help="A LoRA's folder, file or hub id, to put onto --model.")]


class Precision(str, Enum):
    """Dtype of the weights when generating."""

    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


_PrecisionOption = Annotated[Precision, typer.Option(help="Dtype of the weights.")]


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
    precision: _PrecisionOption = Precision.fp32,
) -> None:
    """Generate pictures with a trained model."""
    _prepare(grid)
    from mmpreproj.recipes.figures import draw_grid
    from mmpreproj.recipes.generate import Sampling, parse_size, write_pictures
    from mmpreproj.recipes.generate import generate as make_pictures
    from mmpreproj.recipes.shapes import read_cloud_for

    sides = None if size is None else parse_size(size)
    sampling = Sampling(
        steps=steps, guidance=guidance, negative_prompt=negative_prompt, count=count, seed=seed, size=sides
    )
    pipeline = _load(model, precision, adapter=adapter, lora=lora)
    shown = None if point_cloud is None else read_cloud_for(pipeline, point_cloud)
    rows = make_pictures(pipeline, prompt, sampling, point_cloud=shown)
    _write(rows, grid=grid, draw=draw_grid, folder=output, name="pictures", seed=seed, write=write_pictures)


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
    precision: _PrecisionOption = Precision.fp32,
) -> None:
    """Generate point clouds with a model that has a point path: `.ply` files, and a picture of each."""
    _prepare(grid)
    from mmpreproj.pipelines.shapes import PreProjShapePipeline
    from mmpreproj.points.drawing import draw_clouds_grid
    from mmpreproj.recipes.shapes import ShapeSampling, generate_shapes, write_shapes

    sampling = ShapeSampling(points=points, steps=steps, guidance=guidance, count=count, seed=seed)
    pipeline = PreProjShapePipeline.from_pipe(_load(model, precision, adapter=adapter, lora=lora))
    rows = generate_shapes(cast(PreProjShapePipeline, pipeline), prompt, sampling)
    _write(rows, grid=grid, draw=draw_clouds_grid, folder=output, name="shapes", seed=seed, write=write_shapes)


def _prepare(grid: Path | None) -> None:
    """Refuse what can be refused at once, and keep the libraries quiet."""
    check_png(grid, "--grid")
    hide_loading_bars()
    quieten_libraries()  # again: diffusers sets its own level when it is imported


def _write(
    rows: Any,
    *,
    grid: Path | None,
    draw: Callable[[Any, Path], object],
    folder: Path | None,
    name: str,
    seed: int,
    write: Callable[..., Sequence[Path]],
) -> None:
    """Draw what was made as a grid, or write it file by file, or both; the folder is called `name` by default."""
    if grid is not None:
        draw(rows, grid)
        typer.echo(str(grid))
    if folder is not None or grid is None:
        for path in write(rows, folder or Path(name), seed=seed):
            typer.echo(str(path))


def _load(model: str, precision: Precision, *, adapter: str | None, lora: str | None) -> Any:
    """Load a pipeline onto the best device, and say what it is."""
    import torch

    from mmpreproj.recipes.generate import best_device, describe
    from mmpreproj.recipes.loading import load_pipeline

    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision.value]
    pipeline = load_pipeline(model, adapter=adapter, lora=lora, dtype=dtype).to(best_device())
    typer.echo(describe(pipeline), err=True)
    return pipeline
