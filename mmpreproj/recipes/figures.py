"""Pictures of a run: loss curves and labelled grids."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FormatStrFormatter, MaxNLocator, NullLocator
from PIL import Image

from mmpreproj.training.loop import StepRecord

PICTURES = "pictures"
COLOURS = (("#9ab6d3", "#2b5d8c"), ("#a9d3b0", "#2e7d43"))  # of each step and of the mean, by modality
HELD_OUT = (("#b3282d", "o"), ("#e07b39", "s"), ("#7a4a9e", "^"), ("#c08a00", "D"))
PLAINER = {"these without": "the same without clouds"}
FAR, ALIKE = 3.0, 0.05  # how far from the middle half a loss is astray, in ranges of that half, and at least in log
HELD_OUT_ABOVE, LARGEST_RANGE = 3.0, 1e4
TICKS: dict[float, tuple[float, ...]] = {  # digits of the ticks, by the largest value of a range over the smallest
    1.6: tuple(digit / 10 for digit in range(10, 100)),
    5: (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9),
    30: (1, 1.5, 2, 3, 4, 5, 7),
    math.inf: (1, 2, 5),
}


def draw_loss_curves(history: Sequence[StepRecord], path: Path, *, window: int = 25) -> None:
    """Draw training loss (each step, and the mean over a window) and held-out loss against steps, by modality.

    The range of losses is that of most steps, so that a few at the start or astray do not flatten the rest; how many
    are above is written into the picture.

    Args:
        history: the run's records.
        path: a PNG file.
        window: length of the running mean, in steps.
    """
    trained = [record for record in history if record.loss is not None]
    names = list(dict.fromkeys(name for record in trained for name in record.losses)) or [PICTURES]
    several = len(names) > 1
    figure = Figure(figsize=(7, 4.6 if several else 4), layout="constrained")
    axes = figure.subplots()
    steps = [record.step for record in trained]
    by_name = {
        name: [record.losses[name] if several else cast(float, record.loss) for record in trained] for name in names
    }
    held_out = _held_out_curves(history)
    for (name, losses), (pale, dark) in zip(by_name.items(), COLOURS, strict=False):
        of = f"{name}: " if several else ""
        axes.plot(steps, losses, color=pale, linewidth=0.6, label=f"{of}training, each step")
        label = f"{of}training, mean of the last {_steps(min(window, len(losses)))}"
        axes.plot(steps, _running_mean(losses, window), color=dark, linewidth=1.6, label=label)
    for (name, points), (colour, marker) in zip(held_out.items(), HELD_OUT, strict=False):
        of = f"{PLAINER.get(name, name)}: " if several or len(held_out) > 1 else ""
        label = f"{of}held out, {points[-1][1]:.4f} at the end"
        axes.plot(*zip(*points, strict=True), color=colour, marker=marker, markersize=4, label=label)
    measured = [loss for points in held_out.values() for _, loss in points]
    low, high = loss_range(list(by_name.values()), measured)
    axes.set(xlabel="optimiser steps", ylabel="flow loss (mean squared error of ε − x)", yscale="log")
    axes.set_ylim(low, high)
    axes.yaxis.set_major_locator(FixedLocator(_ticks(low, high)))
    axes.yaxis.set_major_formatter(FormatStrFormatter("%g"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    _tell_above(axes, [*(loss for losses in by_name.values() for loss in losses), *measured], high)
    if several:  # too many to find room among the curves
        figure.legend(loc="outside upper center", ncols=2, frameon=False, fontsize="small")
    else:
        axes.legend(frameon=False)
    _write(figure, path)


def loss_range(trained: Sequence[Sequence[float]], held_out: Sequence[float]) -> tuple[float, float]:
    """Choose the losses that are shown, from the least to the largest.

    Args:
        trained: loss of each step, for each modality; of these all are shown but those that are astray.
        held_out: every held-out loss; one at the start may be up to `HELD_OUT_ABOVE` times the largest step shown.
    """
    usual = [loss for losses in trained for loss in _usual(losses)]
    if not usual:
        return 0.1, 1.0
    high = max(usual)
    high = max([high, *(loss for loss in held_out if loss <= HELD_OUT_ABOVE * high)])
    low = min([*usual, *(loss for loss in held_out if loss > 0)])
    return 0.9 * max(low, high / LARGEST_RANGE), 1.1 * high


def _usual(losses: Sequence[float]) -> list[float]:
    """Leave out values that are far from the others: on a logarithmic scale, three ranges of the middle half."""
    positive = [loss for loss in losses if loss > 0 and math.isfinite(loss)]
    if not positive:
        return []
    first, third = np.quantile(np.log(positive), [0.25, 0.75])
    margin = max(FAR * (third - first), ALIKE)
    return [loss for loss in positive if first - margin <= math.log(loss) <= third + margin]


def _running_mean(losses: Sequence[float], window: int) -> list[float]:
    """Average each loss with those before it, as many as there are up to the window."""
    return [sum(losses[max(0, end - window) : end]) / min(end, window) for end in range(1, len(losses) + 1)]


def _ticks(low: float, high: float) -> list[float]:
    """List round numbers of a range, some six of them."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    digits = next(digits for largest, digits in TICKS.items() if high / low <= largest)
    return [
        value for decade in decades for value in (digit * 10.0**decade for digit in digits) if low <= value <= high
    ]


def _tell_above(axes: Axes, losses: Sequence[float], high: float) -> None:
    """Write above a plot how many values are beyond it."""
    above = [loss for loss in losses if loss > high]
    if above:
        told = f"{len(above)} {'value' if len(above) == 1 else 'values'} beyond the top, up to {max(above):.3g}"
        axes.set_title(told, loc="left", fontsize="small", color="#555555")


def _steps(number: int) -> str:
    return "1 step" if number == 1 else f"{number} steps"


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
