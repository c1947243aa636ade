"""Point clouds as arrays `[P, 3 + features]`: read, checked, brought into the unit ball, written."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from mmpreproj.files import write_atomically
from mmpreproj.points.checks import check_cloud, check_colours, check_whole
from mmpreproj.points.errors import UnreadableCloudError
from mmpreproj.points.reading import CLOUD_SUFFIXES, Surface, read_shape

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
      with decimal points, parted by blanks or commas; `#` starts a comment; a first line with nothing but the number
      of points is passed over): the columns as they lie in the file.
    - `.ply`, `.obj`, `.glb`, `.gltf` without faces: x, y, z, then red, green and blue in 0..1 if the points have
      colours, then nx, ny and nz if they have normals (`.ply` only). So `features=3` gives colours, or normals where
      there are no colours, and `features=6` colours and normals.
    - meshes (these, `.stl` and `.off`): points drawn uniformly by area, in the same order of columns; colours are
      those of vertices or faces, textures are not read; normals are those of the faces. All meshes of a scene are
      merged where its transforms put them, and its loose points are left out.

    Units and axes stay those of the file. What is unpacked (`.npz`, `.glb`, `.gltf`) may have 2**26 values.

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
        UnreadableCloudError: for whatever is wrong with the file: missing, empty, damaged and foreign ones, suffixes
            without a reader, too many values, too few columns, clouds that `check_cloud` refuses, be it for their
            distance from the origin, points drawn that lie in one place, and meshes whose faces have no area.
        ImportError: if trimesh, which reads all but arrays and text, is not installed.
    """
    features, seed = check_whole(features, "features", 0), check_whole(seed, "seed", 0)
    count = None if count is None else check_whole(count, "count", 1)
    name = str(path) if name is None else name
    shape = read_shape(Path(path), name)
    if isinstance(shape, Surface):
        cloud = _take_columns(shape.sample(count or DEFAULT_COUNT, seed), features, name, sampled=True)
    else:
        cloud = _take_columns(shape, features, name)
        if count is not None:
            cloud = cloud[_draw(len(cloud), count, np.random.default_rng(seed))]
    if len(cloud) > 1 and (cloud[:, :3] == cloud[0, :3]).all():
        raise UnreadableCloudError(name, f"all of the points drawn from it ({len(cloud)}) lie in one place")
    return cloud


def normalise(points: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """Move and scale a cloud into the unit ball.

    Args:
        points: x, y, z and any features `[P, 3 + features]`.

    Returns:
        The points, at most 1 from the origin, with their features untouched; the centre of the bounding box `[3]`; and
        the radius, the largest distance to it, in the units of the points. Floats keep their dtype, whole numbers
        become float32.

    Raises:
        ValueError: if `check_cloud` refuses the points: degenerate ones, and, but in float64, those too far from the
            origin.
    """
    check_cloud(points, features=None, distant=getattr(points, "dtype", None) != np.float64)
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
    check_cloud(points, features=None, degenerate=False, distant=False)
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
    content = "\n".join(header).encode("ascii") + vertices.tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda target: Path(target).write_bytes(content))


def _take_columns(table: np.ndarray, features: int, name: str, *, sampled: bool = False) -> np.ndarray:
    """Take the first 3 + features columns as float32, and refuse what is no cloud; samples may be few and close."""
    width = 3 + features
    if table.ndim == 2 and table.shape[1] < width:
        raise UnreadableCloudError(
            name, f"it has {table.shape[1]} columns; expected at least {width}: x, y, z and {features} features"
        )
    try:
        table = table[:, :width] if table.ndim == 2 else table
        # First as it lies in the file: float32 would blur it before its distance is seen.
        check_cloud(table, features=features, name="the cloud", degenerate=not sampled, distant=not sampled)
        with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite, and is refused as that
            table = np.array(table, dtype=np.float32, order="C")  # in memory, if it was mapped
        check_cloud(table, features=features, name="the cloud", degenerate=not sampled, distant=False)
    except ValueError as error:
        raise UnreadableCloudError(name, str(error)) from None
    except MemoryError as error:  # a mapped file takes memory only here
        raise UnreadableCloudError(name, "there is not enough memory for it") from error
    return table


def _draw(available: int, count: int, generator: np.random.Generator) -> np.ndarray:
    """Draw `count` indices, none of them twice before all of them once."""
    if count <= available:
        return generator.choice(available, count, replace=False)
    return np.concatenate([np.arange(available), generator.integers(available, size=count - available)])
