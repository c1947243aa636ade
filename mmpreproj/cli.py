"""The command line: `mmpreproj quickstart | train | generate | shapes | view | inspect`.

Heavy imports happen inside the commands, so that `--help` answers at once.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

import click
import typer

from mmpreproj import __version__
from mmpreproj.recipes.quiet import hide_loading_bars, quieten_libraries

app = typer.Typer(
    name="mmpreproj",
    help="Pre-projection and content skip for multimodal diffusion transformers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
_settings = {"traceback": False}
_ModelOption = Annotated[str, typer.Option(help="A pipeline's folder or hub id, or the folder of a trained adapter.")]
_PromptOption = Annotated[list[str], typer.Option(help="What to show; may be given several times.")]
_AdapterOption = Annotated[str | None, typer.Option(help="An adapter's folder or hub id, to put onto --model.")]
_Command = TypeVar("_Command", bound=Callable[..., Any])


class Precision(str, Enum):
    """Dtype of the weights when generating."""

    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


class Axis(str, Enum):
    """An axis of a point cloud."""

    x = "x"
    y = "y"
    z = "z"


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"mmpreproj {__version__}")
        raise typer.Exit


def _reports_errors(command: _Command) -> _Command:
    """Turn errors that a user can mend into one message and exit status 1."""

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        quieten_libraries()
        try:
            return command(*args, **kwargs)
        except (ValueError, TypeError, OSError, ImportError, RuntimeError) as error:
            if _settings["traceback"]:
                raise
            typer.secho(f"mmpreproj: {error}", err=True, fg="red")
            raise typer.Exit(1) from None
        except (typer.Exit, typer.Abort, click.ClickException):
            raise
        except Exception as error:
            if _settings["traceback"]:
                raise
            ours = type(error).__module__.startswith("mmpreproj.")  # says what is wrong by itself
            told = error if ours else f"{type(error).__name__}: {error} (--traceback shows where)"
            typer.secho(f"mmpreproj: {told}", err=True, fg="red")
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            typer.secho("mmpreproj: stopped", err=True, fg="red")
            raise typer.Exit(130) from None

    return cast(_Command, wrapped)


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
    traceback: Annotated[bool, typer.Option("--traceback", help="Show where an error came from.")] = False,
) -> None:
    """Pre-projection and content skip for multimodal diffusion transformers."""
    _settings["traceback"] = traceback


@app.command()
@_reports_errors
def quickstart(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Changes to configs/quickstart.yaml, e.g. steps=200."),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Folder for the results.  [default: runs/quickstart]")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the results of an earlier run.")] = False,
) -> None:
    """Train a small model on 1,600 captioned drawings and generate a picture grid, in ten minutes on two CPU cores.

    Writes the model, `grid.png`, `loss.png`, `profile.png`, `metrics.jsonl` and `report.md`. Needs the `demo` extra,
    and no network.
    """
    from mmpreproj.recipes.quickstart import quickstart_config, run_quickstart

    changes = [*(overrides or []), *([f"output={json.dumps(str(output))}"] if output else [])]
    settings = quickstart_config(changes)
    hide_loading_bars()
    report = run_quickstart(settings, overwrite=overwrite)
    typer.echo(f"report: {report}\npictures: {report.parent / 'grid.png'}")


@app.command()
@_reports_errors
def train(
    config: Annotated[
        Path,
        typer.Argument(
            help="A YAML file, or the name of a shipped one: sd3_medium_probe, sd35_medium_probe, furniture_points."
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Changes, e.g. optimizer.learning_rate=1e-3 data.folder=pics."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the results of an earlier run.")] = False,
) -> None:
    """Train on captioned pictures, with or without point clouds, as a configuration says.

    The data is a folder of pictures with `metadata.jsonl` or `metadata.csv` (columns `file_name` and `text`, and one
    for clouds with `data.points_column`). Mode `probe` trains the adapter alone, `full` the whole transformer. The
    output folder gets the model or adapter, `config.yaml`, `metrics.jsonl` (a line a step), `loss.png`, `profile.png`
    (norms of the skips), `checkpoints/`, and with clouds `previews/`. For several processes: `accelerate launch -m
    mmpreproj train CONFIG.yaml`.
    """
    from mmpreproj.training.config import read_config

    settings = read_config(config, overrides or [])  # a mistake in it is answered before the heavy imports
    from accelerate import PartialState

    from mmpreproj.recipes.output import check_config_survives
    from mmpreproj.recipes.train import run_training

    hide_loading_bars()
    check_config_survives(config, settings)
    run = run_training(settings, overwrite=overwrite)
    if not PartialState().is_main_process:
        return
    measured = run.history[-1].held_out_losses
    parts = ", ".join(f"{loss:.4f} {name}" if len(measured) > 1 else f"{loss:.4f}" for name, loss in measured.items())
    typer.echo(f"held-out loss: {parts}\nsaved: {run.saved}" if parts else f"saved: {run.saved}")


@app.command()
@_reports_errors
def generate(
    model: _ModelOption,
    prompt: _PromptOption,
    adapter: _AdapterOption = None,
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

    _check_png(grid, "--grid")
    sides = None if size is None else parse_size(size)
    sampling = Sampling(
        steps=steps, guidance=guidance, negative_prompt=negative_prompt, count=count, seed=seed, size=sides
    )
    pipeline = _load(model, adapter, precision)
    shown = None if point_cloud is None else read_cloud_for(pipeline, point_cloud)
    rows = make_pictures(pipeline, prompt, sampling, point_cloud=shown)
    if grid is not None:
        draw_grid(rows, grid)
        typer.echo(str(grid))
    if output is not None or grid is None:
        for path in write_pictures(rows, output or Path("pictures"), seed=seed):
            typer.echo(str(path))


@app.command()
@_reports_errors
def shapes(
    model: _ModelOption,
    prompt: _PromptOption,
    adapter: _AdapterOption = None,
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

    _check_png(grid, "--grid")
    sampling = ShapeSampling(points=points, steps=steps, guidance=guidance, count=count, seed=seed)
    pipeline = PreProjShapePipeline.from_pipe(_load(model, adapter, precision))
    rows = generate_shapes(cast(PreProjShapePipeline, pipeline), prompt, sampling)
    if grid is not None:
        draw_clouds_grid(rows, grid)
        typer.echo(str(grid))
    if output is not None or grid is None:
        for path in write_shapes(rows, output or Path("shapes"), seed=seed):
            typer.echo(str(path))


@app.command()
@_reports_errors
def view(
    cloud: Annotated[Path, typer.Argument(help="A point cloud or mesh: .ply, .obj, .glb, .npy, .xyz …")],
    picture: Annotated[Path, typer.Argument(help="The PNG file to draw into.")],
    up: Annotated[Axis, typer.Option(help="The axis that points up.")] = Axis.y,
    points: Annotated[int | None, typer.Option(min=2, help="Points to draw.  [default: all; 4096 of a mesh]")] = None,
) -> None:
    """Draw a point cloud, or points of a mesh, from several sides."""
    from mmpreproj.recipes.view import view_cloud

    _check_png(picture, "the picture")
    view_cloud(cloud, picture, up=up.value, count=points)
    typer.echo(str(picture))


@app.command()
@_reports_errors
def inspect(
    folder: Annotated[Path, typer.Argument(help="An adapter's folder, or a pipeline's folder that holds one.")],
) -> None:
    """Show what is inside a saved adapter: base, blocks, sizes, and the skip profile."""
    from mmpreproj.recipes.inspect import inspect_adapter
    from mmpreproj.recipes.tables import print_summary

    print_summary(inspect_adapter(folder))


def _load(model: str, adapter: str | None, precision: Precision) -> Any:
    """Load a pipeline onto the best device, and say what it is."""
    import torch

    from mmpreproj.recipes.generate import best_device, describe
    from mmpreproj.recipes.loading import load_pipeline

    hide_loading_bars()
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision.value]
    pipeline = load_pipeline(model, adapter=adapter, dtype=dtype).to(best_device())
    typer.echo(describe(pipeline), err=True)
    return pipeline


def _check_png(path: Path | None, name: str) -> None:
    """Refuse a picture's file of another kind before anything is computed."""
    if path is None:
        return
    if path.suffix.lower() != ".png":
        raise ValueError(f"{name} takes a .png file; got {path}")
    path.parent.mkdir(parents=True, exist_ok=True)


def main() -> None:
    """Run the command line."""
    app()


if __name__ == "__main__":
    main()
