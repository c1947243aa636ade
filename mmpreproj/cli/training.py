"""`mmpreproj quickstart` and `mmpreproj train`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from mmpreproj.cli.app import reports_errors
from mmpreproj.recipes.quiet import hide_loading_bars


@reports_errors
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


@reports_errors
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
    resume: Annotated[
        str | None, typer.Option(help="Go on from a checkpoint: latest, a step, or a checkpoint's path.")
    ] = None,
    dry: Annotated[
        bool, typer.Option("--dry-run", help="Check data, model, shapes and memory in seconds, and write nothing.")
    ] = False,
) -> None:
    """Train on captioned pictures, with or without point clouds, as a configuration says.

    The data is a folder of pictures with `metadata.jsonl` or `metadata.csv` (columns `file_name` and `text`, and one
    for clouds with `data.points_column`). Mode `probe` trains the adapter alone, `full` the whole transformer. The
    output folder gets the model or adapter, `config.yaml`, `metrics.jsonl` (a line a step), `loss.png`, `profile.png`
    (norms of the skips), `checkpoints/`, and with clouds `previews/`. For several processes: `accelerate launch -m
    mmpreproj train CONFIG.yaml`. A run that is stopped by Ctrl-C or SIGTERM saves a checkpoint first.
    """
    from mmpreproj.training.config import TrainConfig, read_config

    # A mistake in it is answered before the heavy imports.
    settings: TrainConfig = read_config(config, overrides or [])
    from accelerate import PartialState

    from mmpreproj.recipes.train import run_training
    from mmpreproj.recipes.train.output import check_config_survives

    hide_loading_bars()
    if resume is None:
        check_config_survives(config, settings)
    if dry:
        from mmpreproj.recipes.dry_run import show_dry_run

        return show_dry_run(settings, overwrite=overwrite, resume=resume)
    run = run_training(settings, overwrite=overwrite, resume=resume)
    if not PartialState().is_main_process:
        return
    measured = run.history[-1].held_out_losses
    parts = ", ".join(f"{loss:.4f} {name}" if len(measured) > 1 else f"{loss:.4f}" for name, loss in measured.items())
    saved = " and ".join(map(str, run.results))
    typer.echo(f"held-out loss: {parts}\nsaved: {saved}" if parts else f"saved: {saved}")
