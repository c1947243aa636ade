"""What points cost: time and memory of their velocities, from 1,024 to 32,768 points.

    OMP_WAIT_POLICY=PASSIVE python benchmarks/point_cost.py --threads 1

Rounds are interleaved in one process, so that what else the machine does meets every size alike; ratios of
neighbouring sizes are taken within a round. One thread is timed by what it computes. Memory is the peak of resident
memory while one cloud is computed, beyond what was there before, in a process of its own for each size, as Linux tells
it.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import typer
from diffusers import SD3Transformer2DModel
from rich.console import Console
from rich.table import Table
from torch import nn

import mmpreproj
from mmpreproj import PointPathConfig, PreProjConfig
from mmpreproj.points import point_velocity

HEAD = 64
SIZES = tuple(2**power for power in range(10, 16))


def build(width: int, blocks: int) -> nn.Module:
    """Build an SD3 transformer with a point path, with weights at a size at which every term is computed."""
    torch.manual_seed(0)
    sizes = {"num_attention_heads": width // HEAD, "attention_head_dim": HEAD, "caption_projection_dim": width}
    model = SD3Transformer2DModel(sample_size=32, num_layers=blocks, pos_embed_max_size=16, **sizes).eval()
    mmpreproj.patch(model, PreProjConfig(points=PointPathConfig()))
    with torch.no_grad():
        for parameter in mmpreproj.parameters(model):
            parameter.normal_(std=0.02)
    return model


@torch.inference_mode()
def run(model: nn.Module, points: int) -> None:
    """Compute the velocities of one cloud."""
    point_velocity(
        model,
        torch.randn(1, points, 3),
        timestep=torch.tensor([500.0]),
        pooled_projections=torch.zeros(1, 2048),
    )


def time_of(model: nn.Module, points: int, *, threads: int) -> float:
    """Time one cloud, in milliseconds."""
    now = time.process_time if threads == 1 else time.perf_counter
    began = now()
    run(model, points)
    return 1000 * (now() - began)


def resident(entry: str) -> float:
    """Read this process's resident memory in MiB: `VmRSS`, now, or `VmHWM`, at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(entry)) / 1024


def measure_peak(model: nn.Module, points: int) -> float:
    """Measure how far resident memory rises, in MiB, while one cloud is computed."""
    run(model, 16)  # what is made once
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = resident("VmRSS")
    run(model, points)
    return resident("VmHWM") - before


def peak(points: int, width: int, blocks: int) -> float:
    """Measure the peak memory, in MiB, of one cloud in a process of its own."""
    command = [sys.executable, __file__, "--width", str(width), "--blocks", str(blocks), "--only", str(points)]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return float(json.loads(found.splitlines()[-1]))


def main(width: int = 512, blocks: int = 4, threads: int = 1, rounds: int = 9, only: int = 0) -> None:
    """Measure, and print a table."""
    torch.set_num_threads(threads)
    model = build(width, blocks)
    if only:
        print(json.dumps(measure_peak(model, only)))
        return
    times: dict[int, list[float]] = {size: [] for size in SIZES}
    for index in range(-1, rounds):
        order = SIZES if index % 2 else SIZES[::-1]
        for size in order:
            taken = time_of(model, size, threads=threads)
            if index >= 0:
                times[size].append(taken)
    memory = {size: peak(size, width, blocks) for size in SIZES}
    table = Table("points", "ms", "ratio to half of them", "MiB", "ratio", title=f"width {width}, {blocks} blocks")
    for size in SIZES:
        pairs = zip(times[size], times.get(size // 2, []), strict=False)
        ratios = [one / other for one, other in pairs]
        low, middle, high = statistics.quantiles(ratios, n=4) if ratios else (0.0, 0.0, 0.0)
        table.add_row(
            f"{size:,}",
            f"{statistics.median(times[size]):.1f}",
            f"{middle:.2f} [{low:.2f}, {high:.2f}]" if ratios else "",
            f"{memory[size]:.1f}",
            f"{memory[size] / memory[size // 2]:.2f}" if ratios else "",
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    typer.run(main)
