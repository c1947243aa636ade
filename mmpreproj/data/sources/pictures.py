"""What a source of pictures is, and how a picture's file of any format and mode becomes upright RGB."""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from mmpreproj.files import UnreadableFileError

WHITE = (255, 255, 255)
QUARTER_TURNS = frozenset({5, 6, 7, 8})  # the EXIF orientations in which width and height are exchanged
NAMED_IN_ERRORS = 3


class UnreadablePictureError(UnreadableFileError):
    """A picture that cannot be decoded."""

    kind = "picture"


@dataclass(frozen=True)
class SkippedPicture:
    """A picture, or an entry that should have given one, that was left out, and why."""

    name: str
    reason: str


class PictureSource(Protocol):
    """Captioned pictures by index, read only when asked for.

    A source knows where its pictures are and gives the bytes of their files; what is done with these is the same for
    all sources: `picture_size`, `decode`.

    Attributes:
        captions: one caption a picture.
        names: what reports call each picture: a path or the name of an emoji's file.
        faults: entries that were left out at construction, each with its name and the reason.
        runs: folders among the pictures that training runs have written and that were left out, by their paths.
    """

    captions: Sequence[str]
    names: Sequence[str]
    faults: Sequence[SkippedPicture] = ()
    runs: Sequence[str] = ()

    def __len__(self) -> int:
        """Return the number of pictures."""
        ...

    def read(self, index: int) -> bytes:
        """Return one picture's file as it is, not yet decoded.

        Raises:
            UnreadablePictureError: if it cannot be read.
        """
        ...

    def open(self, index: int) -> Image.Image:
        """Decode one picture to RGB on white.

        Raises:
            UnreadablePictureError: if it cannot be read or decoded.
        """
        return decode(self.read(index), self.names[index])


def read_file(path: str | Path, name: str) -> bytes:
    """Return a file's bytes.

    Raises:
        UnreadablePictureError: if it is gone, or may not be read.
    """
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise UnreadablePictureError(name, f"{type(error).__name__}: {error.strerror}") from error


def decode(data: bytes, name: str, *, background: tuple[int, int, int] = WHITE) -> Image.Image:
    """Decode a picture's file to upright, opaque 8-bit RGB; see `to_rgb`.

    Args:
        data: the whole file.
        name: what an error calls the picture.
        background: red, green and blue from 0 to 255, seen through transparent pixels.

    Raises:
        UnreadablePictureError: for anything Pillow cannot decode safely: empty, truncated or foreign files,
            decompression bombs, modes without a defined range.
    """
    with _opened(data, name) as image:
        return to_rgb(image, background)


def picture_size(data: bytes, name: str) -> tuple[int, int]:
    """Return the height and width, in pixels, that a picture's file has once decoded, without decoding it.

    Only the header is read, so a file that is cut off or damaged further on gives its size all the same.

    Args:
        data: the whole file.
        name: what an error calls the picture.

    Raises:
        UnreadablePictureError: as `decode`, as far as the header tells.
    """
    with _opened(data, name) as image:
        _check_range(image)
        width, height = image.size
        if image.format == "TIFF":  # of which Pillow gives the size turned already, or not yet, by its version
            width, height = (image.getexif()[tag] for tag in (ExifTags.Base.ImageWidth, ExifTags.Base.ImageLength))
        return (width, height) if _orientation(image, data) in QUARTER_TURNS else (height, width)


@contextmanager
def _opened(data: bytes, name: str) -> Iterator[Image.Image]:
    """Open a picture's file; whatever fails until the picture is closed makes it unreadable."""
    try:
        with Image.open(io.BytesIO(data)) as image:
            yield image
    except UnidentifiedImageError:
        foreign = f"the file is in no picture format that Pillow knows; it begins with {data[:16]!r}"
        raise UnreadablePictureError(name, foreign if data else "the file is empty") from None
    except MemoryError:
        raise
    # Pillow's decoders share no error: damaged files give OSError, SyntaxError, struct.error, IndexError and more.
    except Exception as error:
        raise UnreadablePictureError(name, f"{type(error).__name__}: {error}") from error


def _orientation(image: Image.Image, data: bytes) -> int:
    """Return the EXIF orientation, 1 to 8, without decoding the pixels."""
    if image.format == "PNG" and "exif" not in image.info:
        # Pillow decodes the whole PNG to see whether EXIF data follows the pixels; a look at the chunks is enough.
        exif = _png_exif(data)
        if exif is not None:
            image.info["exif"] = exif
        return int(Image.Image.getexif(image).get(ExifTags.Base.Orientation, 1))
    return int(image.getexif().get(ExifTags.Base.Orientation, 1))


def _png_exif(data: bytes) -> bytes | None:
    place = 8  # after the signature
    while place + 8 <= len(data):
        length, kind = struct.unpack_from(">I4s", data, place)
        if kind == b"eXIf":
            return b"Exif\0\0" + data[place + 8 : place + 8 + length]
        place += 12 + length  # length, kind and checksum have four bytes each
    return None


def to_rgb(image: Image.Image, background: tuple[int, int, int] = WHITE) -> Image.Image:
    """Turn a picture of any Pillow mode into upright, opaque 8-bit RGB.

    EXIF rotation is applied, transparency is composited on the background, and an animation gives its first frame.
    Single-channel integer pictures (`I;16`, `I`) span 0 to 65535, as in 16-bit PNG, and are scaled to 0 to 255.

    Args:
        image: the picture; an animated one is rewound.
        background: red, green and blue from 0 to 255, seen through transparent pixels.

    Raises:
        ValueError: for modes without a known range: float pictures, and integers outside 0 to 65535.
    """
    _check_range(image)
    image.seek(0)
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):
        image = _sixteen_bit_to_grey(image)
    if not image.has_transparency_data:
        return image.convert("RGB")
    canvas = Image.new("RGBA", image.size, (*background, 255))
    canvas.alpha_composite(image.convert("RGBA"))
    return canvas.convert("RGB")


def _check_range(image: Image.Image) -> None:
    if image.mode == "F":
        raise ValueError("a floating-point picture has no defined white; save it with 8 or 16 bits a channel")


def _sixteen_bit_to_grey(image: Image.Image) -> Image.Image:
    """Scale 0..65535 to 0..255; `convert` would clip everything above 255 to white."""
    levels = np.asarray(image).astype(np.int64)  # [H, W]
    if levels.min() < 0 or levels.max() > 65535:
        raise ValueError(f"grey levels from {levels.min()} to {levels.max()}; expected 0 to 65535 (16 bits)")
    grey = Image.fromarray(np.round(levels / 257).astype(np.uint8))
    transparent = image.info.get("transparency")
    if transparent is not None:
        grey.putalpha(Image.fromarray(np.where(levels == transparent, 0, 255).astype(np.uint8)))
    return grey
