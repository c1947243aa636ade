"""What files promise, checked before memory is taken for it."""

from __future__ import annotations

import itertools
import json
import math
import posixpath
import zipfile
from pathlib import Path, PureWindowsPath
from typing import IO, Any
from urllib.parse import unquote

import numpy as np

from mmpreproj.points.errors import UnreadableCloudError

MOST_VALUES = 2**26  # 22 million points; 0.5 GB in float64
GLTF_VALUES = {"SCALAR": 1, "VEC2": 2, "VEC3": 3, "VEC4": 4, "MAT2": 4, "MAT3": 9, "MAT4": 16}
# The third version differs in the encoding of field names alone, which arrays of numbers have none of.
NPY_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def check_values(count: int, name: str, way_out: str) -> None:
    """Refuse more than 2**26 values.

    Raises:
        UnreadableCloudError: for more.
    """
    if count > MOST_VALUES:
        raise UnreadableCloudError(name, f"it promises {count} values; at most {MOST_VALUES} are read: {way_out}")


def check_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo, name: str) -> None:
    """Refuse a member of an archive that is no array, or whose header promises what it does not hold or is too much.

    Raises:
        UnreadableCloudError: if it is.
    """
    with archive.open(member) as file:
        shape, dtype = _npy_header(file, member.filename, name)
    if dtype.hasobject:
        return  # refused by whoever reads it
    count = math.prod(shape)
    check_values(count * max(1, dtype.itemsize // 8), name, "thin it, or store it as .npy")
    if count * dtype.itemsize > member.file_size:
        raise UnreadableCloudError(
            name, f"its member {member.filename!r} promises {count} values and holds {member.file_size} bytes"
        )


def _npy_header(file: IO[bytes], member: str, name: str) -> tuple[tuple[int, ...], np.dtype]:
    try:
        shape, _, dtype = NPY_HEADERS[np.lib.format.read_magic(file)](file)
    except (KeyError, ValueError):
        raise UnreadableCloudError(name, f"its member {member!r} is no NumPy array of numbers") from None
    return shape, dtype


def check_gltf(path: Path, name: str) -> None:
    """Refuse a .gltf or .glb file that reads outside its folder, or promises more than 2**26 values.

    Raises:
        UnreadableCloudError: if it does.
        ValueError: if it has no JSON.
    """
    tree = _gltf_tree(path)
    for buffer in tree.get("buffers", []):
        uri = buffer.get("uri", "")
        if "base64," not in uri and _leaves_folder(uri):
            raise UnreadableCloudError(
                name, f"it names the file {uri!r}, which lies outside its folder; put it inside"
            )
    accessors = tree.get("accessors", [])
    check_values(sum(abs(entry["count"]) * GLTF_VALUES[entry["type"]] for entry in accessors), name, "thin it")


def _gltf_tree(path: Path) -> dict[str, Any]:
    if path.suffix.lower() == ".gltf":
        return json.loads(path.read_bytes())
    with path.open("rb") as file:
        head = file.read(20)  # magic, version, length; length and kind of the first chunk, which is JSON
        length = int.from_bytes(head[12:16], "little")
        return json.loads(file.read(min(length, path.stat().st_size)))


def _leaves_folder(uri: str) -> bool:
    inner = posixpath.normpath(unquote(uri.strip()).replace("\\", "/"))
    return inner.startswith("/") or inner.split("/")[0] == ".." or PureWindowsPath(inner).drive != ""


def check_ply(path: Path, name: str) -> None:
    """Refuse a PLY file in ASCII that has fewer lines than its header promises vertices, faces and the like.

    Raises:
        UnreadableCloudError: if it has fewer.
    """
    with path.open("rb") as file:
        header = [line.split() for line in itertools.takewhile(lambda line: line.strip() != b"end_header", file)]
        if not any(words[:2] == [b"format", b"ascii"] for words in header):
            return  # of binary ones the length is checked when they are read
        promised = [(words[1].decode(), int(words[2])) for words in header if words[:1] == [b"element"]]
        there = sum(1 for line in file if line.strip())
    if sum(count for _, count in promised) > there:
        parts = ", ".join(f"{count} × {element}" for element, count in promised)
        raise UnreadableCloudError(name, f"its header promises {parts}; {there} lines follow")


def check_faces(faces: np.ndarray, vertices: int, name: str) -> None:
    """Refuse faces that name corners which are not there.

    Raises:
        UnreadableCloudError: if one is negative, or not less than the number of vertices.
    """
    faces = np.asarray(faces)
    if faces.size and not 0 <= faces.min() <= faces.max() < vertices:
        raise UnreadableCloudError(
            name, f"its faces name vertices from {faces.min()} to {faces.max()}; there are 0 to {vertices - 1}"
        )
