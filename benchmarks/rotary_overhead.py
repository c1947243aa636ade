"""What rotary positions cost: forward time of a patched model with them, over that of the same one without.

    OMP_WAIT_POLICY=PASSIVE python benchmarks/rotary_overhead.py --threads 1

Rounds are interleaved in one process, so that what else the machine does meets every arm alike, and ratios are taken
within a round. One thread on a CPU is timed by what it computes, anything else by the clock. Also the time to make the
tables of a size that has not been seen, which happens once a size.
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
from mmpreproj.patching.tables import Grid, rotary_tables

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
    """Milliseconds of a call to its end."""

    def __init__(self, device: torch.device, *, threads: int) -> None:
        self.device = device
        self.now = time.process_time if device.type == "cpu" and threads == 1 else time.perf_counter

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> float:
        """Time one call."""
        began = self.now()
        function(*args, **kwargs)
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
        return 1000 * (self.now() - began)


def measure(
    models: dict[str, nn.Module], inputs: dict[str, Any], stopwatch: Stopwatch, *, rounds: int
) -> dict[str, list[float]]:
    """Run every model once a round, each round from another one on, after two rounds of warm-up."""
    times: dict[str, list[float]] = {arm: [] for arm in models}
    names = list(models)
    with torch.inference_mode():
        for index in range(-2, rounds):
            start = index % len(names)
            for arm in names[start:] + names[:start]:
                taken = stopwatch(models[arm], **inputs)
                if index >= 0:
                    times[arm].append(taken)
    return times


def summary(values: list[float], form: str) -> str:
    """Write median, quartiles and range."""
    low, _, high = statistics.quantiles(values, n=4)
    numbers = (statistics.median(values), low, high, min(values), max(values))
    return "{} [{}, {}] ({} to {})".format(*(form.format(value) for value in numbers))


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
    place, side, console = torch.device(device), math.isqrt(image_tokens), Console(width=140)
    if side * side != image_tokens or width % HEAD:
        raise typer.BadParameter(f"--image-tokens must be a square number and --width a multiple of {HEAD}")
    sizes = {"num_attention_heads": width // HEAD, "attention_head_dim": HEAD, "caption_projection_dim": width}
    logging.set_verbosity_error()  # it is told of every cast
    base = SD3Transformer2DModel(sample_size=2 * side, num_layers=blocks, pos_embed_max_size=side, **sizes).eval()
    stopwatch = Stopwatch(place, threads=threads)
    for dtype in (getattr(torch, name) for name in dtypes):
        models = {arm: build(base.to(place, dtype), positions) for arm, positions in ARMS.items()}
        inputs = {
            "hidden_states": torch.randn(1, 16, 2 * side, 2 * side, device=place, dtype=dtype),
            "encoder_hidden_states": torch.randn(1, text_tokens, 4096, device=place, dtype=dtype),
            "pooled_projections": torch.randn(1, 2048, device=place, dtype=dtype),
            "timestep": torch.full((1,), 500.0, device=place),
        }
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
