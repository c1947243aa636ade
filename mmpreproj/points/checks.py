"""What is a point cloud and what is none."""

from __future__ import annotations

import operator

import numpy as np

__all__ = ["check_cloud", "check_colours", "check_whole"]

LEAST_EXTENT = 1e-4  # of the distance from the origin: float32 then parts about 1000 places along it


def check_cloud(
    points: np.ndarray,
    *,
    features: int | None = 0,
    name: str = "the point cloud",
    degenerate: bool = True,
    distant: bool = True,
) -> None:
    """Refuse what is no point cloud.

    Args:
        points: x, y, z and then the features `[P, 3 + features]`.
        features: number of columns after x, y, z; None for any.
        name: what errors call the cloud.
        degenerate: whether to refuse degenerate clouds too: all points in one place.
        distant: whether to refuse clouds too that lie so far from the origin that float32 blurs their shape: whose
            longest side is less than 1e-4 of the distance. Degenerate clouds are not called that.

    Raises:
        ValueError: if the points are no array of real numbers in two dimensions, some of them are masked, they are of
            another width, none, not all finite, degenerate, or distant.
    """
    width = "3 or more" if features is None else str(3 + features)
    if not isinstance(points, np.ndarray) or points.dtype.kind not in "fiu":
        kind = f"an array of {points.dtype}" if isinstance(points, np.ndarray) else f"a {type(points).__name__}"
        raise ValueError(f"{name} is {kind}; expected a NumPy array of real numbers [P, {width}]")
    if np.ma.is_masked(points):
        raise ValueError(
            f"{name} has {np.ma.count_masked(points)} masked values; expected none: drop their points, or fill them"
        )
    if points.ndim != 2 or points.shape[1] < 3 or (features is not None and points.shape[1] != 3 + features):
        raise ValueError(f"{name} is of shape {list(points.shape)}; expected [P, {width}]")
    if len(points) == 0:
        raise ValueError(f"{name} is empty; expected at least one point")
    wrong = np.flatnonzero(~np.isfinite(points).all(axis=1))
    if len(wrong):
        raise ValueError(
            f"{name} has NaN or infinite values in {len(wrong)} of {len(points)} points; the first is at {wrong[0]}"
        )
    all_in_one = bool((points[:, :3] == points[0, :3]).all())
    if degenerate and all_in_one:
        raise ValueError(f"{name} is degenerate: all of its points ({len(points)}) lie in one place")
    if distant and not all_in_one:
        check_distance(points[:, :3], name)


def check_distance(xyz: np.ndarray, name: str) -> None:
    """Refuse points `[P, 3]` whose longest side is less than 1e-4 of their distance from the origin.

    Raises:
        ValueError: if they are.
    """
    low, high = xyz.min(axis=0).astype(np.float64), xyz.max(axis=0).astype(np.float64)
    side, distance = (high / 2 - low / 2).max() * 2, np.abs(high / 2 + low / 2).max()
    if side < LEAST_EXTENT * distance:
        raise ValueError(
            f"{name} is {side:g} long at a distance of {distance:g} from the origin, where float32 blurs its shape; "
            "subtract its centre first, in float64"
        )


def check_colours(colours: np.ndarray, count: int) -> None:
    """Refuse colours that are not `[count, 3]` in 0..1.

    Raises:
        ValueError: for another shape or range, and NaN.
    """
    if np.shape(colours) != (count, 3):
        raise ValueError(f"the colours are of shape {list(np.shape(colours))}; expected [{count}, 3], one a point")
    if not ((np.asarray(colours) >= 0) & (np.asarray(colours) <= 1)).all():  # nor NaN
        raise ValueError(f"the colours span {np.min(colours):g} to {np.max(colours):g}; expected 0 to 1")


def check_whole(value: int, name: str, least: int, *, unit: str = "") -> int:
    """Return a whole number, NumPy's included, as Python's; refuse what is none, truth values, and what is too small.

    Args:
        value: the number.
        name: what errors call it.
        least: the smallest that passes.
        unit: what errors count it in, such as "pixels"; "" for nothing.

    Raises:
        ValueError: for anything else.
    """
    try:
        whole = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        whole = None
    if whole is None or whole < least:
        wanted = f"of {unit}, at least {least}" if unit else f"of at least {least}"
        raise ValueError(f"{name} is {value!r}; expected a whole number {wanted}")
    return whole
