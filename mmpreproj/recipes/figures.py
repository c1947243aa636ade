"""Pictures of a run: loss curves and labelled grids."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

from matplotlib.figure import Figure
from matplotlib.ticker import FormatStrFormatter, NullFormatter
from PIL import Image

from mmpreproj.training.loop import StepRecord

PICTURES = "pictures"
COLOURS = (("#9ab6d3", "#2b5d8c"), ("#a9d3b0", "#2e7d43"))  # of each step and of the mean, by modality
HELD_OUT = ("#b3282d", "#e07b39", "#7a4a9e", "#d6a419")


def draw_loss_curves(history: Sequence[StepRecord], path: Path, *, window: int = 25) -> None:
    """Draw training loss (each step, and the mean over a window) and held-out loss against steps, by modality.

    Args:
        history: the run's records.
        path: a PNG file.
        window: length of the running mean, in steps.
    """
    trained = [record for record in history if record.loss is not None]
    names = list(dict.fromkeys(name for record in trained for name in record.losses)) or [PICTURES]
    several = len(names) > 1
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    steps, drawn = [record.step for record in trained], []
    for name, (pale, dark) in zip(names, COLOURS, strict=False):
        losses = [record.losses[name] if several else cast(float, record.loss) for record in trained]
        drawn += losses
        axes.plot(steps, losses, color=pale, linewidth=0.6, label=None if several else "training, each step")
        smooth = [sum(losses[max(0, end - window) : end]) / min(end, window) for end in range(1, len(losses) + 1)]
        what = f"{name}, training" if several else "training"
        axes.plot(steps, smooth, color=dark, linewidth=1.6, label=f"{what}, mean of {window} steps")
    for (name, points), colour in zip(_held_out_curves(history).items(), HELD_OUT, strict=False):
        what = f"{name}, held out" if several else "held out"
        label = f"{what}, {points[-1][1]:.4f} at the end"
        axes.plot(*zip(*points, strict=True), color=colour, marker="o", markersize=4, label=label)
    axes.set(xlabel="optimiser steps", ylabel="flow loss (mean squared error of ε − x)", yscale="log")
    axes.set_ylim(bottom=0.9 * min(drawn), top=min(max(drawn), 2.0) * 1.1)
    axes.set_yticks([0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.7, 1, 1.5, 2], minor=False)
    axes.yaxis.set_major_formatter(FormatStrFormatter("%g"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(alpha=0.3, which="both")
    if several:  # too many to find room among the curves
        figure.legend(loc="outside upper center", ncols=2, frameon=False, fontsize="small")
    else:
        axes.legend(frameon=False)
    _write(figure, path)


def _held_out_curves(history: Sequence[StepRecord]) -> dict[str, list[tuple[int, float]]]:
    """Collect (step, held-out loss) by what was measured."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for record in history:
        measured = record.held_out_losses or ({} if record.held_out is None else {PICTURES: record.held_out})
        for name, loss in measured.items():
            curves.setdefault(name, []).append((record.step, loss))
    return curves


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
