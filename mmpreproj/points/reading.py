"""What a file of points or a mesh offers: a table of columns, or a surface to draw points from."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mmpreproj.points.checks import check_distance
from mmpreproj.points.errors import UnreadableCloudError
from mmpreproj.points.promises import check_faces, check_gltf, check_member, check_ply, check_values
from mmpreproj.points.text import read_obj, read_text

if TYPE_CHECKING:
    import trimesh

ARRAY_SUFFIXES = (".npy", ".npz")
TEXT_SUFFIXES = (".xyz", ".txt", ".pts")
MESH_SUFFIXES = (".ply", ".obj", ".glb", ".gltf", ".stl", ".off")
CLOUD_SUFFIXES = (*ARRAY_SUFFIXES, *TEXT_SUFFIXES, *MESH_SUFFIXES)
NPZ_NAMES = ("points", "xyz", "arr_0")
NPY_MAGIC = b"\x93NUMPY"


@dataclass(frozen=True)
class Surface:
    """Triangles to draw points from.

    Attributes:
        corners: where each triangle's corners are `[F, 3, 3]`, float64; the middle axis counts the corners.
        colours: red, green and blue of each corner in 0..1 `[F, 3, 3]`, or None.
    """

    corners: np.ndarray
    colours: np.ndarray | None

    def sample(self, count: int, seed: int) -> np.ndarray:
        """Draw points uniformly by area.

        Args:
            count: number of points P.
            seed: of the drawing.

        Returns:
            x, y, z, the colours if there are any, and the normals of the faces `[P, 6 or 9]`, float64.
        """
        trimesh = import_trimesh()
        faces = np.arange(3 * len(self.corners)).reshape(-1, 3)
        mesh = trimesh.Trimesh(self.corners.reshape(-1, 3), faces, process=False)
        points, chosen = trimesh.sample.sample_surface(mesh, count, seed=seed)  # [P, 3], [P]
        corners = self.corners[chosen]  # [P, 3, 3]
        columns = [points]
        if self.colours is not None:
            shares = trimesh.triangles.points_to_barycentric(corners, points)  # [P, 3]
            columns.append(np.einsum("pk,pkc->pc", shares, self.colours[chosen]).clip(0, 1))
        normals = _doubled_areas(corners)  # [P, 3]
        columns.append(normals / np.linalg.norm(normals, axis=1, keepdims=True))
        return np.concatenate(columns, axis=1)


def read_shape(path: Path, name: str) -> np.ndarray | Surface:
    """Read what a file offers.

    Args:
        path: the file; its suffix says what it is.
        name: what errors call it.

    Returns:
        All columns of all points, not yet checked, or a mesh as a surface of some area.

    Raises:
        UnreadableCloudError: for missing, empty, damaged and foreign files, suffixes without a reader, files with
            neither points nor faces or that promise too much, and meshes without area or too far from the origin.
        ImportError: if trimesh is needed and not installed.
    """
    suffix = path.suffix.lower()
    _check_file(path, name)
    if suffix in MESH_SUFFIXES:
        import_trimesh()  # here, as what its readers lack may be a matter of the file
    try:
        if suffix == ".npy":
            return _read_npy(path, name)
        if suffix == ".npz":
            return _read_npz(path, name)
        return read_text(path, name) if suffix in TEXT_SUFFIXES else _read_mesh(path, name)
    except UnreadableCloudError:
        raise
    except MemoryError as error:
        raise UnreadableCloudError(name, "there is not enough memory for it") from error
    # Readers share no error: damaged files give ValueError, EOFError, BadZipFile, zlib.error, IndexError and more.
    except Exception as error:
        raise UnreadableCloudError(name, f"it could not be decoded: {type(error).__name__}: {error}") from error


def _check_file(path: Path, name: str) -> None:
    if path.suffix.lower() not in CLOUD_SUFFIXES:
        choices = ", ".join(CLOUD_SUFFIXES)
        raise UnreadableCloudError(name, f"no reader for the suffix {path.suffix!r}; expected one of {choices}")
    try:
        if not path.is_file():
            raise UnreadableCloudError(name, "it is not a file" if path.exists() else "there is no such file")
        if path.stat().st_size == 0:
            raise UnreadableCloudError(name, "the file is empty")
    except OSError as error:  # such as a folder on the way that may not be searched
        raise UnreadableCloudError(name, f"it could not be opened: {error}") from error


def _read_npy(path: Path, name: str) -> np.ndarray:
    with path.open("rb") as file:
        if file.read(len(NPY_MAGIC)) != NPY_MAGIC:
            raise UnreadableCloudError(name, "the file is no NumPy array")
    # Mapped, so that a header that promises more than the file holds is refused before memory is taken for it.
    return np.load(path, mmap_mode="r", allow_pickle=False)


def _read_npz(path: Path, name: str) -> np.ndarray:
    if not zipfile.is_zipfile(path):
        raise UnreadableCloudError(name, "the file is no NumPy archive, or one cut short")
    with zipfile.ZipFile(path) as archive:
        members = {member.filename.removesuffix(".npy"): member for member in archive.infolist()}
        known = list(members) if len(members) == 1 else [key for key in NPZ_NAMES if key in members]
        if not known:
            there = ", ".join(map(repr, members)) or "none"
            choices = ", ".join(map(repr, NPZ_NAMES))
            raise UnreadableCloudError(name, f"its arrays are: {there}; expected a single one, or one of {choices}")
        check_member(archive, members[known[0]], name)
        with archive.open(members[known[0]]) as file:
            return np.lib.format.read_array(file, allow_pickle=False)


def _read_mesh(path: Path, name: str) -> np.ndarray | Surface:
    trimesh, suffix = import_trimesh(), path.suffix.lower()
    if suffix in (".ply", ".off"):
        fields = _load_ply(path, name) if suffix == ".ply" else _load_off(path)
        if len(fields.get("faces", ())) == 0:
            return _points_table(fields, name)
        check_faces(fields["faces"], len(fields["vertices"]), name)
        wanted = {key: fields[key] for key in ("vertices", "faces", "vertex_colors", "face_colors") if key in fields}
        parts = [trimesh.Trimesh(**wanted, process=False)]
    else:
        parts = _load_parts(path, name)
    meshes = [part for part in parts if isinstance(part, trimesh.Trimesh) and len(part.faces)]
    if meshes:
        return _merge(meshes, name)
    clouds = [part for part in parts if isinstance(part, trimesh.PointCloud) and len(part.vertices)]
    if not clouds:
        raise UnreadableCloudError(name, "there are neither faces nor points in it")
    colours = [np.asarray(cloud.colors)[:, :3] / 255 for cloud in clouds if len(cloud.colors)]
    points = np.concatenate([cloud.vertices for cloud in clouds])  # [P, 3]
    return np.hstack([points, np.concatenate(colours)]) if len(colours) == len(clouds) else points


def _load_ply(path: Path, name: str) -> dict[str, Any]:
    """Read the fields of a PLY file; a loaded `PointCloud` would no longer have its normals."""
    from trimesh.exchange.ply import load_ply

    check_ply(path, name)
    with path.open("rb") as file:
        # Without textures, for which vertices would be duplicated before the faces could be checked.
        fields = load_ply(file, skip_materials=True, fix_texture=False)
    return {key: value for key, value in fields.items() if value is not None}


def _load_off(path: Path) -> dict[str, Any]:
    """Read the fields of an OFF file; a loaded mesh would no longer have the faces that the file names."""
    from trimesh.exchange.off import load_off

    with path.open("rb") as file:
        return load_off(file)


def _load_parts(path: Path, name: str) -> list[Any]:
    """Read the meshes and loose points of a scene, each where its transforms put it."""
    suffix = path.suffix.lower()
    if suffix in (".glb", ".gltf"):
        check_gltf(path, name)
    # Without materials: a texture that is missing or damaged must not hide a shape that is whole.
    file = io.BytesIO(read_obj(path, name)) if suffix == ".obj" else path
    scene = import_trimesh().load_scene(file, file_type=suffix[1:], process=False, skip_materials=True)
    shapes = [(len(nodes), scene.geometry[key]) for key, nodes in scene.graph.geometry_nodes.items()]
    values = sum(times * 3 * max(len(shape.vertices), len(getattr(shape, "faces", ()))) for times, shape in shapes)
    check_values(values, name, "thin it")  # a small file may place one shape many times
    return scene.dump()


def _points_table(fields: dict[str, Any], name: str) -> np.ndarray:
    if "vertices" not in fields:
        raise UnreadableCloudError(name, "there are neither faces nor points in it")
    columns = [fields["vertices"]]
    if "vertex_colors" in fields:
        colours = fields["vertex_colors"][:, :3]
        if colours.dtype.kind in "iu":
            colours = colours / np.iinfo(colours.dtype).max
        if not ((colours >= 0) & (colours <= 1)).all():
            raise UnreadableCloudError(
                name, f"its colours span {colours.min():g} to {colours.max():g}; expected 0 to 1, or whole numbers"
            )
        columns.append(colours)
    if "vertex_normals" in fields:
        columns.append(fields["vertex_normals"])
    return np.concatenate(columns, axis=1)  # [P, 3, 6 or 9]


def _merge(meshes: Sequence[trimesh.Trimesh], name: str) -> Surface:
    corners = np.concatenate([np.asarray(mesh.vertices, np.float64)[mesh.faces] for mesh in meshes])  # [F, 3, 3]
    if not np.isfinite(corners).all():
        count = (~np.isfinite(corners).all(axis=(1, 2))).sum()
        raise UnreadableCloudError(name, f"{count} of its {len(corners)} faces have NaN or infinite corners")
    areas = np.linalg.norm(_doubled_areas(corners), axis=1)  # [F], doubled
    if not areas.sum() > 0:
        raise UnreadableCloudError(name, f"none of its faces ({len(corners)}) has an area")
    try:
        check_distance(corners[areas > 0].reshape(-1, 3), "the mesh")  # nothing is drawn from the others
    except ValueError as error:
        raise UnreadableCloudError(name, str(error)) from None
    colours = [colour for colour in map(_corner_colours, meshes) if colour is not None]
    return Surface(corners, np.concatenate(colours) if len(colours) == len(meshes) else None)


def _corner_colours(mesh: trimesh.Trimesh) -> np.ndarray | None:
    """Look up the colour of each corner of each face `[F, 3, 3]` in 0..1; None if the mesh has no colours."""
    visual: Any = mesh.visual
    if visual.kind == "vertex":
        return np.asarray(visual.vertex_colors)[mesh.faces, :3] / 255
    if visual.kind == "face":
        return np.repeat(np.asarray(visual.face_colors)[:, None, :3] / 255, 3, axis=1)
    return None


def _doubled_areas(corners: np.ndarray) -> np.ndarray:
    """Return normals as long as twice the areas `[F, 3]` of triangles `[F, 3, 3]`."""
    return np.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0])


def import_trimesh() -> Any:
    try:
        import trimesh
        import trimesh.sample
        import trimesh.triangles
    except ImportError as error:
        raise ImportError(
            f"{', '.join(MESH_SUFFIXES)} files are read with trimesh: pip install 'mmpreproj[points]'"
        ) from error
    return trimesh
