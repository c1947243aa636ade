"""Pictures of point clouds: orthographic, near points over far ones, far ones pale."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from PIL import Image

from mmpreproj.points.checks import check_cloud, check_colours, check_whole
from mmpreproj.points.clouds import normalise

Up = Literal["x", "y", "z"]

MOST_DRAWN = 20_000
DPI = 100
LABEL_SIZE = 9  # in points, 1/72 inch
NEAR, FAR = (0.07, 0.19, 0.37), (0.70, 0.80, 0.90)
# Rows give right, up and towards the viewer; right-handed, so that nothing is mirrored. With z up the front looks
# along -y, as in Blender.
UPRIGHT = {
    "x": np.array([[0, 0, 1], [1, 0, 0], [0, 1, 0]]),
    "y": np.eye(3),
    "z": np.array([[1, 0, 0], [0, 0, 1], [0, -1, 0]]),
}


@dataclass(frozen=True)
class View:
    """A side to look from.

    Attributes:
        label: what is written under the picture.
        azimuth: how far the viewer has walked around the cloud, to the right, from its front, in degrees.
        elevation: how far above the horizon the viewer is, in degrees from -90 to 90.
    """

    label: str
    azimuth: float
    elevation: float


THREE_QUARTER = View("three-quarter", 35, 20)
VIEWS = (THREE_QUARTER, View("front", 0, 0), View("side", 90, 0), View("top", 0, 90))


def draw_cloud(
    points: np.ndarray,
    path: str | os.PathLike[str] | None = None,
    *,
    up: Up = "y",
    views: Sequence[View] = VIEWS,
    size: int = 320,
    colours: np.ndarray | None = None,
    title: str | None = None,
) -> Figure:
    """Draw one cloud from several sides, all at one scale.

    The front is seen from +z with y up, from -y with z up, and from +y with x up. Of more than 20000 points, that many
    are drawn, picked at random but the same ones every time.

    Args:
        points: x, y, z `[P, 3 + features]` in any unit; features are not drawn.
        path: a PNG file, or None to write none; folders on the way are made.
        up: the axis that points up.
        views: the sides, from left to right.
        size: side of each picture, in pixels.
        colours: red, green and blue in 0..1 `[P, 3]`; None for blue, dark in front and pale behind.
        title: a line above the pictures, or None.

    Returns:
        The figure.

    Raises:
        ValueError: if `check_cloud` refuses the points, degenerate ones included, the colours do not fit them, there
            is no view, or another argument is out of its range.
        OSError: if the file cannot be written.
    """
    if not views:
        raise ValueError("there are no views; expected at least one")
    size = check_whole(size, "size", 16, unit="pixels")
    side, head, foot = size / DPI, 0.35 if title else 0.0, 0.25
    height = side + head + foot
    figure = Figure(figsize=(len(views) * side, height), dpi=DPI, facecolor="white")
    for column, view in enumerate(views):
        axes = figure.add_axes((column / len(views), foot / height, 1 / len(views), side / height))
        _scatter(axes, points, view, up, size, colours)
        axes.text(
            0.5,
            -0.02,
            _printable(view.label),
            transform=axes.transAxes,
            ha="center",
            va="top",
            fontsize=9,
            parse_math=False,
        )
    if title:
        figure.text(0.5, 1 - 0.12 / height, _printable(title), ha="center", va="top", fontsize=11, parse_math=False)
    if path is not None:
        _write(figure, path)
    return figure


def render_cloud(
    points: np.ndarray,
    *,
    size: int = 128,
    azimuth: float = THREE_QUARTER.azimuth,
    elevation: float = THREE_QUARTER.elevation,
    up: Up = "y",
    colours: np.ndarray | None = None,
) -> Image.Image:
    """Draw one cloud from one side into a small square picture.

    Args:
        points: x, y, z `[P, 3 + features]` in any unit.
        size: side of the picture, in pixels.
        azimuth: of the viewer, in degrees to the right of the front.
        elevation: of the viewer above the horizon, in degrees from -90 to 90.
        up: the axis that points up.
        colours: red, green and blue in 0..1 `[P, 3]`, or None, as in `draw_cloud`.

    Returns:
        An RGB picture on white.

    Raises:
        ValueError: as `draw_cloud`.
    """
    size = check_whole(size, "size", 16, unit="pixels")
    figure = Figure(figsize=(size / DPI, size / DPI), dpi=DPI, facecolor="white")
    canvas = FigureCanvasAgg(figure)
    _scatter(figure.add_axes((0, 0, 1, 1)), points, View("", azimuth, elevation), up, size, colours)
    canvas.draw()
    return Image.fromarray(np.asarray(canvas.buffer_rgba())[..., :3].copy())


def draw_clouds_grid(
    rows: Sequence[tuple[str, Sequence[np.ndarray]]],
    path: str | os.PathLike[str],
    *,
    up: Up = "y",
    cell: int = 160,
    view: View = THREE_QUARTER,
) -> None:
    """Draw clouds in rows, each row labelled.

    Args:
        rows: label and clouds `[P, 3 + features]` of each row; each cloud fills its cell, whatever its unit. Labels
            are wrapped, and cut where their cell ends.
        path: a PNG file; folders on the way are made.
        up: the axis that points up.
        cell: side of a picture in the grid, in pixels.
        view: the side that all of them are seen from.

    Raises:
        ValueError: if there is nothing to draw, or as `draw_cloud`.
        OSError: if the file cannot be written.
    """
    if not rows or not all(clouds for _, clouds in rows):
        raise ValueError("a grid needs at least one row, and a cloud in each")
    cell = check_whole(cell, "cell", 16, unit="pixels")
    inch, margin, gap = cell / DPI, 1.6, 0.1
    width = margin + inch * max(len(clouds) for _, clouds in rows)
    figure = Figure(figsize=(width, len(rows) * inch), dpi=DPI, facecolor="white")
    renderer, font = FigureCanvasAgg(figure).get_renderer(), FontProperties(size=LABEL_SIZE)

    def fits(text: str) -> bool:
        return renderer.get_text_width_height_descent(text, font, ismath=False)[0] <= (margin - 2 * gap) * DPI

    lines = max(1, int(cell / (1.4 * LABEL_SIZE * DPI / 72)))
    for line, (label, clouds) in enumerate(rows):
        bottom = 1 - (line + 1) / len(rows)
        for column, cloud in enumerate(clouds):
            place = ((margin + column * inch) / width, bottom, inch / width, 1 / len(rows))
            _scatter(figure.add_axes(place), cloud, view, up, cell, None)
        middle = bottom + 0.5 / len(rows)
        text = _wrap(_printable(label), fits, lines)
        figure.text((margin - gap) / width, middle, text, font=font, ha="right", va="center", parse_math=False)
    _write(figure, path)


def _scatter(axes: Axes, points: np.ndarray, view: View, up: Up, size: int, colours: np.ndarray | None) -> None:
    """Fill square axes of `size` pixels with one cloud from one side."""
    check_cloud(points, features=None, distant=False)  # `normalise` refuses those whose shape is blurred
    if colours is not None:
        check_colours(colours, len(points))
    centred, _, _ = normalise(points[:, :3])
    kept = _thin(len(points))
    seen = centred[kept] @ _camera(view, up).T  # [P, 3]: right, up, nearer
    order = np.argsort(seen[:, 2], kind="stable")  # far ones first, to be painted over
    seen = seen[order]
    # Over the depth there is, but a flat cloud does not turn its noise into shades.
    nearness = (seen[:, 2:] - seen[0, 2]) / max(seen[-1, 2] - seen[0, 2], 0.1)  # [P, 1], from 0 to at most 1
    base = np.array(NEAR) if colours is None else np.asarray(colours)[kept][order]
    haze = np.array(FAR) if colours is None else 0.4 + 0.6 * base
    shades = nearness * base + (1 - nearness) * haze
    points_across = 72 / DPI * np.clip(1.3 * size / np.sqrt(len(kept)), 1.5, size / 24)
    shades = shades.clip(0, 1)
    # A rim a shade darker parts a point from those behind it.
    axes.scatter(seen[:, 0], seen[:, 1], s=points_across**2, c=shades, edgecolors=0.8 * shades, linewidths=0.4)
    axes.set(xlim=(-1.04, 1.04), ylim=(-1.04, 1.04), aspect="equal")
    axes.axis("off")


def _thin(count: int) -> np.ndarray:
    """Choose which of `count` points are drawn: the same ones every time, but in no step that a scan could share."""
    if count <= MOST_DRAWN:
        return np.arange(count)
    return np.random.default_rng(0).choice(count, MOST_DRAWN, replace=False)


def _camera(view: View, up: str) -> np.ndarray:
    """Return the rotation `[3, 3]` from the cloud's axes to right, up and towards the viewer."""
    if up not in UPRIGHT:
        raise ValueError(f"up is {up!r}; expected 'x', 'y' or 'z'")
    if not (np.isfinite(view.azimuth) and -90 <= view.elevation <= 90):
        raise ValueError(
            f"the view is from azimuth {view.azimuth} and elevation {view.elevation}; expected degrees, the elevation "
            f"from -90 to 90"
        )
    turn, lift = np.radians([view.azimuth, view.elevation])
    right = [np.cos(turn), 0, -np.sin(turn)]
    towards = [np.sin(turn) * np.cos(lift), np.sin(lift), np.cos(turn) * np.cos(lift)]
    return np.stack([right, np.cross(towards, right), towards]) @ UPRIGHT[up]


def _printable(text: str) -> str:
    """Replace what no font can draw: the bytes of a file's name that are not UTF-8."""
    return re.sub("[\ud800-\udfff]", "\ufffd", text)


def _wrap(text: str, fits: Callable[[str], bool], lines: int) -> str:
    """Break a text into at most so many lines that fit, between words where it can be."""
    done = [""]
    for word in text.split():
        longer = f"{done[-1]} {word}".lstrip()
        if fits(longer):
            done[-1] = longer
            continue
        done += [""] if done[-1] else []
        for letter in word:
            if done[-1] and not fits(done[-1] + letter):
                done.append("")
            done[-1] += letter
    if len(done) > lines:
        last = done[lines - 1]
        while last and not fits(last + "…"):
            last = last[:-1]
        done = [*done[: lines - 1], last.rstrip() + "…"]
    return "\n".join(done)


def _write(figure: Figure, path: str | os.PathLike[str]) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DPI, format="png")
