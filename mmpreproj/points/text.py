"""Shapes in text: one point a line, numbers parted by blanks or commas; and OBJ files as trimesh understands them."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from mmpreproj.points.errors import UnreadableCloudError

SEPARATOR = re.compile(r"\s*,\s*|\s+")
INDENT = re.compile(rb"^[ \t]+", re.MULTILINE)
RELATIVE_FACE = re.compile(rb"^f[ \t].*-", re.MULTILINE)
VERTEX = re.compile(rb"^v[ \t]", re.MULTILINE)


def read_text(path: Path, name: str) -> np.ndarray:
    """Read the columns of a text file.

    Args:
        path: the file; `#` starts a comment, and a first line with nothing but the number of points is passed over.
        name: what errors call it.

    Returns:
        All columns of all points.

    Raises:
        UnreadableCloudError: if there are no points, fewer than the first line announces, or a line whose commas may
            be decimal ones.
        ValueError: for what is no number, and lines of different lengths.
    """
    stripped = (line.split("#", 1)[0].strip() for line in path.read_text(encoding="utf-8-sig").splitlines())
    rows = [(number, line) for number, line in enumerate(stripped, 1) if line]
    announced = int(rows.pop(0)[1]) if rows and rows[0][1].isdecimal() else 0  # as .pts files have it
    if not rows:
        raise UnreadableCloudError(name, "there are no points in it")
    if announced > len(rows):
        raise UnreadableCloudError(name, f"it announces {announced} points and holds {len(rows)}")
    return np.loadtxt([_without_commas(line, number, name) for number, line in rows], ndmin=2)


def _without_commas(line: str, number: int, name: str) -> str:
    if "," not in line:
        return line
    fields = SEPARATOR.split(line.removesuffix(",").rstrip())
    if "" in fields:
        raise UnreadableCloudError(name, f"line {number}, {line!r}, leaves out a number")
    separators = {("," in separator, separator == ",") for separator in SEPARATOR.findall(line)}
    # Where each number has a decimal point, columns that are filled to different widths do no harm.
    if len(separators) > 1 and not all("." in field for field in fields):
        raise UnreadableCloudError(
            name,
            f"line {number}, {line!r}, has both commas and blanks, and it is not clear which of them part numbers; "
            "write decimal points, and between numbers either blanks or commas",
        )
    return " ".join(fields)


def read_obj(path: Path, name: str) -> bytes:
    """Read an OBJ file so that trimesh makes of it what it says: trimesh passes over lines that are indented.

    Args:
        path: the file.
        name: what errors call it.

    Returns:
        Its content, without indents.

    Raises:
        UnreadableCloudError: if faces count vertices backwards and vertices follow them: trimesh counts from the end
            of the file, and would take the wrong ones.
    """
    content = INDENT.sub(b"", path.read_bytes())
    face = RELATIVE_FACE.search(content)
    if face and VERTEX.search(content, face.end()):
        raise UnreadableCloudError(
            name, "its faces count vertices backwards, from between the vertices; export it with absolute numbers"
        )
    return content
