"""Text, picture and shape from a Debian package: the furniture that Sweet Home 3D offers."""

from __future__ import annotations

import re
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np

from mmpreproj.data.sources.pictures import UnreadablePictureError
from mmpreproj.data.sources.triplets import TripletSource
from mmpreproj.points.clouds import UnreadableCloudError, read_cloud

CATALOGUE = "PluginFurnitureCatalog.properties"
SUBFOLDER = "usr/share/sweethome3d/furniture"  # within the package
COMMANDS = "apt-get download sweethome3d-furniture && dpkg-deb -x sweethome3d-furniture_*.deb furniture"
VERTEX = re.compile(rb"^([ \t]*vn?[ \t]+)((?:[-+.\deE]+[ \t]+){2}[-+.\deE]+)", re.MULTILINE)
# What zipfile raises for a damaged archive or member, an encrypted member, or an unknown compression.
ZIP_ERRORS = (zipfile.BadZipFile, zlib.error, EOFError, OSError, KeyError, RuntimeError)


class FurnitureSource(TripletSource):
    """Named pieces of furniture, each with an icon and a mesh, from the Debian package `sweethome3d-furniture`.

    Fetch the 120 MB and unpack them, without installing anything, by

        apt-get download sweethome3d-furniture && dpkg-deb -x sweethome3d-furniture_*.deb furniture

    and pass `furniture/usr/share/sweethome3d/furniture`. Version 1.8 holds 820 pieces with 612 names in 12 categories;
    most icons have 128 pixels a side. The order is by file name, then by number in the file's catalogue. Nothing is
    unpacked but what is asked for.

    Licence: CC BY 3.0, but for `BlendSwap-CC-0.sh3f`, which is CC0. Whoever publishes the icons or the meshes, or
    pictures made from them, names their authors: `creators` has those of the catalogues, and each file's LICENSE.TXT
    says how its authors want to be named.

    Args:
        folder: the folder with the `.sh3f` files.

    Attributes:
        folder: as given, with `~` expanded.
        captions: the English names, in lower case, such as "coffee table"; a few occur often.
        names: file and number in its catalogue, such as "Scopia.sh3f#12".
        categories: where in a house the catalogue puts each piece, such as "Living room".
        creators: each piece's author, as the catalogue writes it; empty where it names none.
        has_cloud: all true.
        clouds: as names; no two pieces share a mesh.

    Raises:
        FileNotFoundError: if the folder does not exist or holds no `.sh3f` file.
        ValueError: if the folder is a file, a `.sh3f` file is damaged, or an entry of its catalogue incomplete.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser()
        self._pieces = [piece for file in _find_files(self.folder) for piece in _read_catalogue(file)]
        self.names = [f"{piece.file}#{piece.number}" for piece in self._pieces]
        self.captions = [piece.name.lower() for piece in self._pieces]
        self.categories = [piece.category for piece in self._pieces]
        self.creators = [piece.creator for piece in self._pieces]
        self.has_cloud = [True] * len(self._pieces)
        self.clouds = list(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.folder)!r})  # {len(self)} pieces of furniture"

    def read(self, index: int) -> bytes:
        """Return one icon's file, a PNG; see `PictureSource.read`."""
        piece = self._pieces[index]
        try:
            return self._member(piece, piece.icon)
        except ZIP_ERRORS as error:
            raise UnreadablePictureError(self.names[index], f"{piece.icon} in {piece.file}: {error}") from error

    def cloud(self, index: int, count: int, *, features: int = 0, seed: int = 0) -> np.ndarray:
        """Sample one mesh uniformly by area, not normalised; see `TripletSource.cloud`.

        It stands as in a house: y is upwards, z to the front; meshes made otherwise are turned by the catalogue's
        `modelRotation`. The unit is the mesh's own and differs from piece to piece: normalise each.
        """
        piece, name = self._pieces[index], self.names[index]
        try:
            mesh = self._member(piece, piece.model)
        except ZIP_ERRORS as error:
            raise UnreadableCloudError(name, f"{piece.model} in {piece.file}: {error}") from error
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch) / "model.obj"
            path.write_bytes(mesh if piece.rotation is None else _turned(mesh, piece.rotation, name))
            return read_cloud(path, count=count, features=features, seed=seed, name=name)

    def _member(self, piece: _Piece, path: str) -> bytes:
        with zipfile.ZipFile(self.folder / piece.file) as archive:
            return archive.read(path)


@dataclass(frozen=True)
class _Piece:
    file: str  # the .sh3f file's name
    number: int  # in its catalogue
    name: str
    category: str
    creator: str
    icon: str  # path in the file
    model: str  # path in the file
    rotation: np.ndarray | None  # [3, 3], from the mesh's axes to the house's


def _find_files(folder: Path) -> list[Path]:
    way_out = f"run: {COMMANDS}; then pass furniture/{SUBFOLDER}"
    if not folder.exists():
        raise FileNotFoundError(f"the furniture folder {folder} does not exist; {way_out}")
    if not folder.is_dir():
        raise ValueError(f"{folder} is a file; expected the folder that holds the .sh3f files")
    files = sorted(folder.glob("*.sh3f"), key=lambda file: file.name)
    if not files:
        inner = folder / SUBFOLDER
        way_out = f"{inner} does: pass that folder" if any(inner.glob("*.sh3f")) else way_out
        raise FileNotFoundError(f"{folder} holds no .sh3f file; {way_out}")
    return files


def _read_catalogue(file: Path) -> list[_Piece]:
    """Return the pieces that a file's catalogue lists, by number."""
    try:
        with zipfile.ZipFile(file) as archive:
            members = frozenset(archive.namelist())
            if CATALOGUE not in members:
                raise ValueError(f"{file} holds no {CATALOGUE}; expected a furniture library of Sweet Home 3D")
            text = archive.read(CATALOGUE).decode("latin-1")
    except ZIP_ERRORS as error:
        raise ValueError(f"{file} is damaged ({error}); unpack the package again: {COMMANDS}") from error
    fields_by_number: dict[int, dict[str, str]] = {}
    for key, value in _properties(text, f"{file}: {CATALOGUE}"):
        field, _, number = key.partition("#")
        if number.isdecimal():
            fields_by_number.setdefault(int(number), {})[field] = value.strip()
    if not fields_by_number:
        raise ValueError(f"{file}: {CATALOGUE} lists nothing; expected entries such as name#1=Armchair")
    return [_piece(file, number, fields, members) for number, fields in sorted(fields_by_number.items())]


def _piece(file: Path, number: int, fields: Mapping[str, str], members: frozenset[str]) -> _Piece:
    where = f"{file}: entry {number} of {CATALOGUE}"
    for field in ("name", "category", "icon", "model"):
        if not fields.get(field):
            raise ValueError(f"{where} has no {field!r}; add {field}#{number}=… or remove the entry")
    icon, model = fields["icon"].lstrip("/"), fields["model"].lstrip("/")
    for field, member in (("icon", icon), ("model", model)):
        if member not in members:
            raise ValueError(f"{where} names the {field} {member!r}, which the file does not hold; add it to the file")
    if PurePosixPath(model).suffix.lower() != ".obj":
        raise ValueError(f"{where} has the model {model!r}; expected an .obj file: convert it or remove the entry")
    rotation = _rotation(fields["modelRotation"], where) if "modelRotation" in fields else None
    creator = fields.get("creator", "")
    return _Piece(file.name, number, fields["name"], fields["category"], creator, icon, model, rotation)


def _rotation(text: str, where: str) -> np.ndarray:
    """Parse the nine numbers of a matrix, row by row."""
    try:
        matrix = np.array([float(number) for number in text.split()]).reshape(3, 3)
    except ValueError:
        raise ValueError(
            f"{where} has the modelRotation {text!r}; expected nine numbers with blanks between"
        ) from None
    if not np.allclose(matrix @ matrix.T, np.eye(3), atol=1e-3):
        raise ValueError(f"{where} has the modelRotation {text!r}, which is no rotation; correct or remove it")
    return matrix


def _turned(mesh: bytes, rotation: np.ndarray, name: str) -> bytes:
    """Rotate the vertices and normals of an OBJ file; so whatever is sampled from it is upright."""

    def turn(match: re.Match[bytes]) -> bytes:
        try:
            moved = rotation @ [float(number) for number in match[2].split()]
        except ValueError as error:
            raise UnreadableCloudError(name, f"{error} in the line {match[0].decode()!r} of its mesh") from error
        return match[1] + " ".join(map(repr, moved.tolist())).encode()

    return VERTEX.sub(turn, mesh)


# --- Java's .properties, as java.util.Properties.load documents them ---

LINE_END = re.compile(r"\r\n|\r|\n")  # str.splitlines also breaks at \x85, a letter's byte in other encodings
CONTINUED = re.compile(r"(?<!\\)(?:\\\\)*\\\Z")  # an odd number of backslashes at the end
PAIR = re.compile(r"((?:\\.|[^\\=: \t\f])*)[ \t\f]*[=:]?[ \t\f]*(.*)", re.DOTALL)
ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|(.))")
CONTROL = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}


def _properties(text: str, where: str) -> Iterator[tuple[str, str]]:
    """Yield keys and values in order, unescaped."""
    for pair in filter(None, map(PAIR.match, _logical_lines(text))):
        yield _unescape(pair[1], where), _unescape(pair[2], where)


def _logical_lines(text: str) -> Iterator[str]:
    """Join continued lines; leave out blank ones and comments."""
    parts: list[str] = []
    for natural in LINE_END.split(text):
        line = natural.lstrip(" \t\f")
        if not parts and (not line or line[0] in "#!"):
            continue
        continued = CONTINUED.search(line) is not None
        parts.append(line[:-1] if continued else line)
        if not continued:
            yield "".join(parts)
            parts = []
    if parts:
        yield "".join(parts)


def _unescape(text: str, where: str) -> str:
    def replace(match: re.Match[str]) -> str:
        code, letter = match.groups()
        if code is None and letter == "u":
            raise ValueError(rf"{where}: broken escape in {text!r}; expected \u and four hexadecimal digits")
        return chr(int(code, 16)) if code else CONTROL.get(letter, letter)

    return ESCAPE.sub(replace, text)
