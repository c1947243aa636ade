"""`mmpreproj probe`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mmpreproj.cli.app import reports_errors
from mmpreproj.recipes.quiet import hide_loading_bars


@reports_errors
def probe(
    config: Annotated[
        Path,
        typer.Argument(
            help="A YAML file, or the name of a shipped one: probe_smollm2, probe_pythia160m, probe_pythia410m."
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Changes, e.g. arms=[base,skip] training.steps=100."),
    ] = None,
) -> None:
    """Compare the adapter with LoRA on a frozen causal language model, as a configuration says.

    Each arm is trained on the same text with the same steps and seeds, at a learning rate chosen on validation text,
    and measured by perplexity and by tasks. The output folder gets `report.md` with the table, `results.json`,
    `profile.png` (norm of the skip by layer), `learning_rates.png`, and `trials/` with what each training has left. A
    study that was broken off goes on when the command is given again, and one that is done is measured no more. For
    several processes: `accelerate launch -m mmpreproj probe CONFIG.yaml`.
    """
    from mmpreproj.language.config import StudyConfig
    from mmpreproj.training.config import read_config

    settings = read_config(config, overrides or [], kind=StudyConfig)  # mistakes are answered before heavy imports
    from accelerate import PartialState

    from mmpreproj.recipes.probe import run_study, write_report

    hide_loading_bars()
    study = run_study(settings)
    if PartialState().is_main_process:
        report = write_report(study)
        typer.echo(f"report: {report}")
