"""A run without running: data, model, shapes, parameters and memory are looked at in seconds, and nothing is written.

No weights are loaded. The model is built on the `meta` device and prepared by the same code that prepares a run; then
the loss of a batch is computed on fake tensors, which have shapes, dtypes and a device, and no values.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
from accelerate import Accelerator, PartialState
from rich.console import Console
from torch import nn

from mmpreproj.recipes.dry_run.hollow import prepare_hollow
from mmpreproj.recipes.dry_run.looking import look_at_data
from mmpreproj.recipes.dry_run.memory import make_fake, memory_there, step_memory, weights_bytes
from mmpreproj.recipes.dry_run.report import DryRun, Parameters, warnings_of
from mmpreproj.recipes.dry_run.trial import activation_bytes, find_widths
from mmpreproj.recipes.progress import Reporter
from mmpreproj.recipes.train.output import check_inputs_survive, check_output
from mmpreproj.recipes.train.sources import check_apart, check_readers, open_source
from mmpreproj.recipes.train.tracking import check_trackers
from mmpreproj.recipes.train.upload import check_login
from mmpreproj.recipes.train.validation import check_prompts
from mmpreproj.training.checkpoints import find_checkpoint
from mmpreproj.training.config import TrainConfig
from mmpreproj.training.loop import make_accelerator
from mmpreproj.training.optimisation import check_optimizer, make_optimizer, make_schedule
from mmpreproj.training.progress import check_progress, step_of
from mmpreproj.training.trainable import PARTS, named_parts, select_trainable

__all__ = ["DryRun", "Parameters", "dry_run", "show_dry_run"]


def dry_run(
    config: TrainConfig, *, console: Console | None = None, overwrite: bool = False, resume: str | None = None
) -> DryRun:
    """Check what can be checked of a run in seconds; nothing is trained, and nothing is written.

    Whatever a run refuses early is refused. Of a model on the hub only small files are fetched.

    Args:
        config: the run's settings.
        console: where progress is shown; None for standard error.
        overwrite: as for the run.
        resume: as for the run.

    Raises:
        ConfigError: if the configuration does not fit this machine, model or output folder, or parts of the model do
            not fit together.
        FileNotFoundError: if data or model are not where the configuration says.
        ValueError: if the data cannot be used.
        RuntimeError: if the model computes what cannot be followed without values.
    """
    began = time.perf_counter()
    accelerator = make_accelerator(config)
    device = accelerator.device
    checkpoint = _check_surroundings(config, accelerator, overwrite=overwrite, resume=resume)
    with Reporter(console or Console(stderr=True), show=accelerator.is_main_process) as reporter:
        check_apart(config)
        source = open_source(config.data)
        if config.trains_points:
            check_readers(source)
        pipeline = prepare_hollow(config)
        check_prompts(pipeline, config)
        widths = find_widths(pipeline, max_sequence_length=config.max_sequence_length)
        data = look_at_data(source, pipeline, config, reporter)
    encoders = weights_bytes(pipeline.vae, pipeline.text_encoder, pipeline.text_encoder_2, pipeline.text_encoder_3)
    encoding = encoders + (weights_bytes(pipeline.transformer) if device.type == "cpu" else 0)
    select_trainable(pipeline.transformer, config)
    parameters = _count_parameters(pipeline.transformer)
    shown = device if device.type in ("cpu", "cuda") else torch.device("cpu")
    mode = make_fake(pipeline.transformer, shown)
    activations = activation_bytes(pipeline, config, data.sizes, widths=widths, mode=mode, device=shown)
    memory = step_memory(pipeline.transformer, config, activations=activations, device=device)
    there = memory_there(device)
    return DryRun(
        config=config,
        device=device,
        data=data,
        widths=widths,
        parameters=parameters,
        memory=memory,
        encoders=encoders,
        encoding=encoding,
        there=there,
        resumed=None if checkpoint is None else step_of(checkpoint),
        warnings=tuple(warnings_of(config, memory, encoding=encoding, there=there, device=device)),
        seconds=time.perf_counter() - began,
    )


def show_dry_run(config: TrainConfig, *, overwrite: bool = False, resume: str | None = None) -> None:
    """Make a dry run and print what it found out, and `ready`, to standard output; see `dry_run`."""
    found = dry_run(config, overwrite=overwrite, resume=resume)
    if PartialState().is_main_process:
        console = Console()
        console.print(found.table(), highlight=False)
        console.print("ready", style="green", highlight=False)


def _check_surroundings(
    config: TrainConfig, accelerator: Accelerator, *, overwrite: bool, resume: str | None
) -> Path | None:
    """Refuse what a run refuses before it opens its data; return the checkpoint to go on from."""
    check_optimizer(config.optimizer, device=accelerator.device)
    make_schedule(make_optimizer(nn.LayerNorm(1), config.optimizer), config.optimizer, steps=config.steps)
    check_trackers(config)
    check_login(config, accelerator=accelerator)
    if resume is not None:
        checkpoint = find_checkpoint(config.output / "checkpoints", resume)
        check_progress(checkpoint, config, processes=accelerator.num_processes)
        return checkpoint
    check_output(config.output, overwrite=overwrite)
    check_inputs_survive(config)
    return None


def _count_parameters(transformer: nn.Module) -> tuple[Parameters, ...]:
    """Count the parameters of a model by part."""
    counts = {part: [0, 0] for part in PARTS}
    for _, part, parameter in named_parts(transformer):
        counts[part][0] += parameter.numel()
        counts[part][1] += parameter.numel() * parameter.requires_grad
    return tuple(Parameters(part, count, trained) for part, (count, trained) in counts.items() if count)
