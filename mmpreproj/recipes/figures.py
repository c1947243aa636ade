"""Pictures of a run: loss curves and labelled grids."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import FormatStrFormatter, NullFormatter
from PIL import Image

from mmpreproj.training.loop import StepRecord

TRAIN, HELD_OUT = "#9ab6d3", "#b3282d"


def draw_loss_curves(history: Sequence[StepRecord], path: Path, *, window: int = 25) -> None:
    """Draw training loss (each step, and the mean over a window) and held-out loss against steps.

    Args:
        history: the run's records.
        path: a PNG file.
        window: length of the running mean, in steps.
    """
    train = [(record.step, record.loss) for record in history if record.loss is not None]
    held_out = [(record.step, record.held_out) for record in history if record.held_out is not None]
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    steps, losses = [step for step, _ in train], [loss for _, loss in train]
    axes.plot(steps, losses, color=TRAIN, linewidth=0.6, label="training, each step")
    smooth = [sum(losses[max(0, end - window) : end]) / min(end, window) for end in range(1, len(losses) + 1)]
    axes.plot(steps, smooth, color="#2b5d8c", linewidth=1.6, label=f"training, mean of {window} steps")
    if held_out:
        label = f"held out, {held_out[-1][1]:.4f} at the end"
        axes.plot(*zip(*held_out, strict=True), color=HELD_OUT, marker="o", markersize=4, label=label)
    axes.set(xlabel="optimiser steps", ylabel="flow loss (mean squared error of ε − x)", yscale="log")
    axes.set_ylim(bottom=0.9 * min(losses), top=min(max(losses), 2.0) * 1.1)
    axes.set_yticks([0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.7, 1, 1.5, 2], minor=False)
    axes.yaxis.set_major_formatter(FormatStrFormatter("%g"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(alpha=0.3, which="both")
    axes.legend(frameon=False)
    _write(figure, path)


def draw_grid(rows: Sequence[tuple[str, Sequence[Image.Image]]], path: Path, *, cell: int = 96) -> None:
    """Draw pictures in rows, each row labelled with its prompt.

    Args:
        rows: prompt and pictures of each row.
        path: a PNG file.
        cell: side of a picture in the grid, in pixels; small pictures are enlarged without smoothing.

    Raises:
        ValueError: if there is nothing to draw.
    """
    if not rows or not all(pictures for _, pictures in rows):
        raise ValueError("a grid needs at least one row, and a picture in each")
    columns = max(len(pictures) for _, pictures in rows)
    inch = cell / 100
    figure = Figure(figsize=(columns * inch + 1.8, len(rows) * inch), dpi=100)
    axes = figure.subplots(len(rows), columns, squeeze=False)
    figure.subplots_adjust(left=1.7 / (columns * inch + 1.8), right=0.995, top=0.995, bottom=0.005, wspace=0.06)
    for line, (prompt, pictures) in zip(axes, rows, strict=True):
        for column, panel in enumerate(line):
            panel.axis("off")
            if column < len(pictures):
                small = max(pictures[column].size) < cell
                panel.imshow(pictures[column], interpolation="nearest" if small else "antialiased")
        place = {"transform": line[0].transAxes, "ha": "right", "va": "center"}
        line[0].text(-0.12, 0.5, _wrap(prompt), fontsize=9, parse_math=False, **place)
    _write(figure, path)


def _wrap(text: str, width: int = 20, lines: int = 5) -> str:
    import textwrap

    return "\n".join(textwrap.wrap(text, width, max_lines=lines, placeholder=" …")) or "(empty prompt)"


def _write(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
