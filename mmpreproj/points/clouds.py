"""Point clouds as arrays `[P, 3 + features]`: read, checked, brought into the unit ball, written."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from mmpreproj.points.reading import CLOUD_SUFFIXES, Surface, UnreadableCloudError, read_shape

__all__ = [
    "CLOUD_SUFFIXES",
    "UnreadableCloudError",
    "check_cloud",
    "denormalise",
    "normalise",
    "read_cloud",
    "write_ply",
]

DEFAULT_COUNT = 4096


def read_cloud(
    path: str | os.PathLike[str],
    *,
    count: int | None = None,
    features: int = 0,
    seed: int = 0,
    name: str | None = None,
) -> np.ndarray:
    """Read a point cloud, or sample a mesh.

    What a file offers is a table, of which the first 3 + features columns are taken; what is wider is cut.

    - `.npy`, `.npz` (the only array, or the one called `points`, `xyz` or `arr_0`) and `.xyz`, `.txt`, `.pts` (numbers
      parted by blanks or commas; `#` starts a comment; a first line with nothing but the number of points is passed
      over): the columns as they lie in the file.
    - `.ply`, `.obj`, `.glb`, `.gltf` without faces: x, y, z, then red, green and blue in 0..1 if the points have
      colours, then nx, ny and nz if they have normals (`.ply` only). So `features=3` gives colours, or normals where
      there are no colours, and `features=6` colours and normals.
    - meshes (these, `.stl` and `.off`): points drawn uniformly by area, in the same order of columns; colours are
      those of vertices or faces, textures are not read; normals are those of the faces. All meshes of a scene are
      merged where its transforms put them, and its loose points are left out.

    Units and axes stay those of the file.

    Args:
        path: the file; its suffix says what it is.
        count: number of points P. From a file of points, that many of its points at random, each at most once; if it
            holds fewer, all of them in order, and then some again, drawn at random. None takes all points of a file of
            points, and samples 4096 points of a mesh.
        features: number of columns after x, y, z.
        seed: of the drawing; the same seed gives the same points.
        name: what errors call the cloud; the path if None.

    Returns:
        The points `[P, 3 + features]`, float32.

    Raises:
        ValueError: if count is not positive, or features or seed is negative.
        UnreadableCloudError: for missing, empty, damaged and foreign files, suffixes without a reader, too few
            columns, clouds that `check_cloud` refuses, and meshes whose faces have no area.
        ImportError: if trimesh, which reads all but arrays and text, is not installed.
    """
    _check_whole(features, "features", 0)
    _check_whole(seed, "seed", 0)
    if count is not None:
        _check_whole(count, "count", 1)
    name = str(path) if name is None else name
    shape = read_shape(Path(path), name)
    if isinstance(shape, Surface):
        return _take_columns(shape.sample(count or DEFAULT_COUNT, seed), features, name, degenerate=False)
    cloud = _take_columns(shape, features, name)
    return cloud if count is None else cloud[_draw(len(cloud), count, np.random.default_rng(seed))]


def check_cloud(
    points: np.ndarray, *, features: int | None = 0, name: str = "the point cloud", degenerate: bool = True
) -> None:
    """Refuse what is no point cloud.

    Args:
        points: x, y, z and then the features `[P, 3 + features]`.
        features: number of columns after x, y, z; None for any.
        name: what errors call the cloud.
        degenerate: whether to refuse degenerate clouds too: all points in one place.

    Raises:
        ValueError: if the points are no array of real numbers in two dimensions, of another width, none, not all
            finite, or degenerate.
    """
    width = "3 or more" if features is None else str(3 + features)
    if not isinstance(points, np.ndarray) or points.dtype.kind not in "fiu":
        kind = f"an array of {points.dtype}" if isinstance(points, np.ndarray) else f"a {type(points).__name__}"
        raise ValueError(f"{name} is {kind}; expected a NumPy array of real numbers [P, {width}]")
    if points.ndim != 2 or points.shape[1] < 3 or (features is not None and points.shape[1] != 3 + features):
        raise ValueError(f"{name} is of shape {list(points.shape)}; expected [P, {width}]")
    if len(points) == 0:
        raise ValueError(f"{name} is empty; expected at least one point")
    wrong = np.flatnonzero(~np.isfinite(points).all(axis=1))
    if len(wrong):
        raise ValueError(
            f"{name} has NaN or infinite values in {len(wrong)} of {len(points)} points; the first is at {wrong[0]}"
        )
    if degenerate and (points[:, :3] == points[0, :3]).all():
        raise ValueError(f"{name} is degenerate: all of its points ({len(points)}) lie in one place")


def normalise(points: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """Move and scale a cloud into the unit ball.

    Args:
        points: x, y, z and any features `[P, 3 + features]`.

    Returns:
        The points, at most 1 from the origin, with their features untouched; the centre of the bounding box `[3]`; and
        the radius, the largest distance to it, in the units of the points. Floats keep their dtype, whole numbers
        become float32.

    Raises:
        ValueError: if `check_cloud` refuses the points, degenerate ones included.
    """
    check_cloud(points, features=None)
    moved = points.astype(points.dtype if points.dtype.kind == "f" else np.float32)  # a copy
    xyz = moved[:, :3].astype(np.float64)
    # Rounded before it is used, so that `denormalise` adds just what was taken away.
    centre = (xyz.min(axis=0) / 2 + xyz.max(axis=0) / 2).astype(moved.dtype)
    xyz -= centre
    radius = float(np.linalg.norm(xyz, axis=1).max())
    moved[:, :3] = xyz / radius
    return moved, centre, radius


def denormalise(points: np.ndarray, centre: np.ndarray, radius: float) -> np.ndarray:
    """Put a cloud from the unit ball back where it came from; the inverse of `normalise`.

    Args:
        points: x, y, z and any features `[P, 3 + features]`; they may all lie in one place.
        centre: where the origin goes `[3]`.
        radius: what a length of 1 becomes.

    Returns:
        The points `[P, 3 + features]`, with their features untouched; floats keep their dtype.

    Raises:
        ValueError: if `check_cloud` refuses the points, or the centre or the radius is not one.
    """
    check_cloud(points, features=None, degenerate=False)
    centre = np.asarray(centre, dtype=np.float64)
    if centre.shape != (3,) or not np.isfinite(centre).all():
        raise ValueError(f"centre is {centre.tolist()}; expected three finite numbers")
    if not np.isfinite(radius) or radius <= 0:
        raise ValueError(f"radius is {radius!r}; expected a finite number above 0")
    moved = points.astype(points.dtype if points.dtype.kind == "f" else np.float32)
    moved[:, :3] = points[:, :3].astype(np.float64) * radius + centre
    return moved


def write_ply(path: str | os.PathLike[str], points: np.ndarray, *, colours: np.ndarray | None = None) -> None:
    """Write a cloud as binary little-endian PLY, in one step: the file is whole or as it was before.

    Args:
        path: a file with the suffix `.ply`; folders on the way are made.
        points: x, y, z `[P, 3]`, written as float32.
        colours: red, green and blue in 0..1 `[P, 3]`, written with 8 bits each, or None.

    Raises:
        ValueError: for another suffix, points that `check_cloud` refuses, and colours of another shape or range.
        OSError: if the file cannot be written.
    """
    path = Path(path)
    if path.suffix.lower() != ".ply":
        raise ValueError(f"the file {path.name!r} does not end in .ply")
    check_cloud(points)
    with np.errstate(over="ignore"):  # what float32 cannot hold is refused
        points = points.astype(np.float32)
    check_cloud(points, name="the point cloud in float32")
    fields = [(axis, "<f4") for axis in ("x", "y", "z")]
    if colours is not None:
        check_colours(colours, len(points))
        fields += [(channel, "u1") for channel in ("red", "green", "blue")]
    vertices = np.empty(len(points), dtype=fields)  # packed: no padding between fields
    for column, axis in enumerate("xyz"):
        vertices[axis] = points[:, column]
    if colours is not None:
        for column, channel in enumerate(("red", "green", "blue")):
            vertices[channel] = np.round(255 * np.asarray(colours)[:, column])
    properties = [f"property {'float' if kind == '<f4' else 'uchar'} {field}" for field, kind in fields]
    header = ["ply", "format binary_little_endian 1.0", f"element vertex {len(points)}", *properties, "end_header", ""]
    _replace(path, "\n".join(header).encode("ascii") + vertices.tobytes())


def check_colours(colours: np.ndarray, count: int) -> None:
    """Refuse colours that are not `[count, 3]` in 0..1.

    Raises:
        ValueError: for another shape or range, and NaN.
    """
    if np.shape(colours) != (count, 3):
        raise ValueError(f"the colours are of shape {list(np.shape(colours))}; expected [{count}, 3], one a point")
    if not ((np.asarray(colours) >= 0) & (np.asarray(colours) <= 1)).all():  # nor NaN
        raise ValueError(f"the colours span {np.min(colours):g} to {np.max(colours):g}; expected 0 to 1")


def _replace(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _check_whole(value: int, name: str, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} is {value!r}; expected a whole number of at least {least}")


def _take_columns(table: np.ndarray, features: int, name: str, *, degenerate: bool = True) -> np.ndarray:
    """Take the first 3 + features columns as float32, and refuse what is no cloud."""
    width = 3 + features
    if table.ndim == 2 and table.shape[1] < width:
        raise UnreadableCloudError(
            name, f"it has {table.shape[1]} columns; expected at least {width}: x, y, z and {features} features"
        )
    try:
        if table.ndim == 2 and table.dtype.kind in "fiu":
            with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite, and is refused as that
                table = np.array(table[:, :width], dtype=np.float32, order="C")  # in memory, if it was mapped
        check_cloud(table, features=features, name="the cloud", degenerate=degenerate)
    except ValueError as error:
        raise UnreadableCloudError(name, str(error)) from None
    return table


def _draw(available: int, count: int, generator: np.random.Generator) -> np.ndarray:
    """Draw `count` indices, none of them twice before all of them once."""
    if count <= available:
        return generator.choice(available, count, replace=False)
    return np.concatenate([np.arange(available), generator.integers(available, size=count - available)])
