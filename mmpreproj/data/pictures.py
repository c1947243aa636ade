"""Pictures of any mode and size to square RGB tensors, one batch in memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Literal, Protocol

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional

from mmpreproj.files import UnreadableFileError

WHITE = (255, 255, 255)
NAMED_IN_ERRORS = 3


class UnreadablePictureError(UnreadableFileError):
    """A picture that cannot be decoded."""

    kind = "picture"


@dataclass(frozen=True)
class SkippedPicture:
    """A picture that `read_pictures` left out, and why."""

    name: str
    reason: str


class PictureSource(Protocol):
    """Captioned pictures by index, decoded only when asked for.

    Attributes:
        captions: one caption a picture.
        names: what reports call each picture: a path or the name of an emoji's file.
    """

    captions: Sequence[str]
    names: Sequence[str]

    def __len__(self) -> int:
        """Return the number of pictures."""
        ...

    def open(self, index: int) -> Image.Image:
        """Decode one picture to RGB.

        Raises:
            UnreadablePictureError: if it cannot be decoded.
        """
        ...


def open_picture(file: str | IO[bytes], name: str) -> Image.Image:
    """Decode a path or a binary stream to an RGB picture that no longer needs the file.

    Args:
        file: what to decode.
        name: what an error calls the picture.

    Raises:
        UnreadablePictureError: for anything Pillow cannot decode safely: empty, truncated or foreign files,
            missing files, decompression bombs, modes without a defined range.
    """
    try:
        with Image.open(file) as image:
            return to_rgb(image)
    except UnidentifiedImageError:
        raise UnreadablePictureError(name, "the file is empty or in no picture format that Pillow knows") from None
    except MemoryError:
        raise
    # Pillow's decoders share no error: damaged files give OSError, SyntaxError, struct.error, IndexError and more.
    except Exception as error:
        raise UnreadablePictureError(name, f"{type(error).__name__}: {error}") from error


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
    image.seek(0)
    image = ImageOps.exif_transpose(image)
    if image.mode == "F":
        raise ValueError("a floating-point picture has no defined white; save it with 8 or 16 bits a channel")
    if image.mode.startswith("I"):
        image = _sixteen_bit_to_grey(image)
    if not image.has_transparency_data:
        return image.convert("RGB")
    canvas = Image.new("RGBA", image.size, (*background, 255))
    canvas.alpha_composite(image.convert("RGBA"))
    return canvas.convert("RGB")


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


def picture_transform(resolution: int, *, crop: Literal["center"] = "center") -> Callable[[Image.Image], Tensor]:
    """Build the map from an RGB picture to a square training tensor.

    The largest centred square is resized, with antialiasing, to the resolution. That is the shorter side resized and
    the centre cropped, but it never holds the resized long side, which a 1 x 50000 strip would make enormous.

    Args:
        resolution: side of the square, in pixels.
        crop: which part of an oblong picture is kept.

    Returns:
        A callable from a PIL picture to a float32 tensor `[3, R, R]` in [-1, 1].

    Raises:
        ValueError: if the resolution is not a positive integer or the crop is unknown.
    """
    _check_positive(resolution, "resolution", "pixels")
    if crop != "center":
        raise ValueError(f"crop is {crop!r}; the only choice is 'center'")
    return v2.Compose(
        [
            _centre_square,
            v2.PILToTensor(),
            v2.Resize((resolution, resolution), interpolation=v2.InterpolationMode.BICUBIC, antialias=True),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(mean=[0.5, 0.5, 0.5], std=[0.5, 0.5, 0.5]),
        ]
    )


def _centre_square(image: Image.Image) -> Image.Image:
    side = min(image.size)
    return functional.center_crop(image, [side, side])


def read_pictures(
    source: PictureSource, resolution: int, *, batch_size: int = 32, skipped: list[SkippedPicture] | None = None
) -> Iterator[tuple[list[int], Tensor]]:
    """Read a source once, in order, in batches.

    A damaged picture should not end an hour of caching, nor vanish without a word: hand in a list as `skipped`, and
    each one is noted there while the reading goes on. Without a list the first unreadable picture raises.

        skipped: list[SkippedPicture] = []
        for indices, pixels in read_pictures(source, 256, skipped=skipped):
            ...

    Args:
        source: where the pictures come from.
        resolution: side of the square pictures, in pixels.
        batch_size: most pictures held at once; the batches are full but for the last.
        skipped: the list to append unreadable pictures to, or None to raise.

    Yields:
        The pictures' indices in the source, and their pixels `[b, 3, R, R]`, float32 in [-1, 1].

    Raises:
        ValueError: at once for an empty source or a bad size; at the end if not one picture could be read.
        UnreadablePictureError: for an unreadable picture, if `skipped` is None.
    """
    _check_positive(batch_size, "batch_size", "pictures")
    transform = picture_transform(resolution)
    if len(source) == 0:
        raise ValueError("the source holds no pictures; expected at least one")
    return _read_batches(source, transform, batch_size, skipped)


def _read_batches(
    source: PictureSource,
    transform: Callable[[Image.Image], Tensor],
    batch_size: int,
    skipped: list[SkippedPicture] | None,
) -> Iterator[tuple[list[int], Tensor]]:
    indices: list[int] = []
    pixels: list[Tensor] = []
    failures: list[SkippedPicture] = []
    for index in range(len(source)):
        try:
            pixels.append(transform(source.open(index)))  # [3, R, R]
        except UnreadablePictureError as error:
            if skipped is None:
                raise
            failures.append(SkippedPicture(error.name, error.reason))
            skipped.append(failures[-1])
            continue
        indices.append(index)
        if len(indices) == batch_size:
            yield _take_batch(indices, pixels)
    if indices:
        yield _take_batch(indices, pixels)
    if len(failures) == len(source):
        first = "; ".join(f"{failure.name}: {failure.reason}" for failure in failures[:NAMED_IN_ERRORS])
        raise ValueError(f"none of the {len(source)} pictures could be read; the first: {first}")


def _take_batch(indices: list[int], pixels: list[Tensor]) -> tuple[list[int], Tensor]:
    """Stack what was collected and empty both lists, so that the pictures are not held twice while one is yielded."""
    batch = list(indices), torch.stack(pixels)  # [b, 3, R, R]
    indices.clear()
    pixels.clear()
    return batch


def _check_positive(value: int, name: str, unit: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} is {value!r}; expected a positive whole number of {unit}")
