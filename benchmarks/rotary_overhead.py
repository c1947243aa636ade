"""What rotary positions cost: forward time of a patched model with them, over that of the same one without.

    OMP_WAIT_POLICY=PASSIVE python benchmarks/rotary_overhead.py --threads 1

Rounds are interleaved in one process, so that what else the machine does meets every arm alike, and ratios are taken
within a round. One thread on a CPU is timed by what it computes, anything else by the clock.
"""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Callable
from typing import Annotated, Any

import torch
import typer
from diffusers import SD3Transformer2DModel
from diffusers.utils import logging
from rich.console import Console
from rich.table import Table
from torch import nn

import mmpreproj
from mmpreproj import Positions, PreProjConfig
from mmpreproj.patching.positions.tables import Grid, rotary_tables

Times = dict[str, list[float]]  # milliseconds of every round, by arm
HEAD = 64
ARMS: dict[str, Positions | None] = {
    "without": None,
    "again": None,  # the noise of the measurement
    "identity": Positions(),
    "full": Positions(start="full", absolute="remove"),
}


def build(base: nn.Module, positions: Positions | None) -> nn.Module:
    """Patch a copy of the base, with weights at a size at which every term is computed."""
    model = copy.deepcopy(base)
    torch.manual_seed(0)
    mmpreproj.patch(model, PreProjConfig(positions=positions))
    with torch.no_grad():
        for parameter in mmpreproj.parameters(model):
            parameter.normal_(std=0.02)
    return model


class Stopwatch:
    """Milliseconds of a call, to its end."""

    def __init__(self, device: torch.device, *, threads: int) -> None:
        self.device = device
        self.now = time.process_time if device.type == "cpu" and threads == 1 else time.perf_counter

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> float:
        began = self.now()
        function(*args, **kwargs)
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
        return 1000 * (self.now() - began)


@torch.inference_mode()
def measure(models: dict[str, nn.Module], inputs: dict[str, Any], stopwatch: Stopwatch, *, rounds: int) -> Times:
    """Run every model once a round, each round from another one on, after two rounds of warm-up."""
    times: Times = {arm: [] for arm in models}
    for index in range(-2, rounds):
        start = index % len(models)
        for arm in [*models][start:] + [*models][:start]:
            times[arm].append(stopwatch(models[arm], **inputs))
    return {arm: taken[2:] for arm, taken in times.items()}


def summary(values: list[float], form: str) -> str:
    """Write median, quartiles and range."""
    low, middle, high = statistics.quantiles(values, n=4)
    return "{} [{}, {}] ({} to {})".format(*map(form.format, (middle, low, high, min(values), max(values))))


def main(
    width: int = 1536,
    blocks: int = 2,
    image_tokens: int = 1024,
    text_tokens: int = 154,
    threads: int = 1,
    rounds: int = 15,
    device: str = "cpu",
    dtypes: Annotated[list[str], typer.Option("--dtype")] = ["float32", "bfloat16"],  # noqa: B006 - typer's way
) -> None:
    """Measure positions, and print a table for each dtype."""
    torch.set_num_threads(threads)
    logging.set_verbosity_error()  # diffusers tells of every cast
    place, side, console = torch.device(device), math.isqrt(image_tokens), Console(width=140)
    if side * side != image_tokens or width % HEAD:
        raise typer.BadParameter(f"image tokens must be a square number, and the width a multiple of {HEAD}")
    sizes = {"num_attention_heads": width // HEAD, "attention_head_dim": HEAD, "caption_projection_dim": width}
    base = SD3Transformer2DModel(sample_size=2 * side, num_layers=blocks, pos_embed_max_size=side, **sizes).eval()
    stopwatch = Stopwatch(place, threads=threads)
    for dtype in (getattr(torch, name) for name in dtypes):
        models = {arm: build(base.to(place, dtype), positions) for arm, positions in ARMS.items()}
        shapes = {"hidden_states": (1, 16, 2 * side, 2 * side), "timestep": (1,)}
        shapes |= {"encoder_hidden_states": (1, text_tokens, 4096), "pooled_projections": (1, 2048)}
        inputs = {name: torch.randn(shape, device=place, dtype=dtype) for name, shape in shapes.items()}
        times = measure(models, inputs, stopwatch, rounds=rounds)
        table = Table("positions", "ms", "ratio to the same without", title=f"{dtype}, {threads} threads, {device}")
        for arm, taken in times.items():
            ratios = [one / other for one, other in zip(taken, times["without"], strict=True)]
            table.add_row(arm, summary(taken, "{:.1f}"), summary(ratios, "{:.3f}"))
        console.print(table)
    grids = [Grid(side, side, text_tokens + index) for index in range(rounds)]  # each a size of its own
    cold = [stopwatch(rotary_tables, Positions(), grid, head_width=HEAD, device=place) for grid in grids]
    console.print(f"tables of a new size: {summary(cold, '{:.3f}')} ms")


if __name__ == "__main__":
    typer.run(main)
