"""Aspect buckets: the sizes that oblong pictures are trained at, so that none is squashed and little is cropped."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional


class Size(NamedTuple):
    """Height and width, in pixels."""

    height: int
    width: int


def bucket_sizes(
    resolution: int, *, multiple: int, max_ratio: float = 2.0, largest: float = math.inf
) -> tuple[Size, ...]:
    """List the sizes around a resolution that pictures are trained at, from the widest to the tallest.

    For every shorter side there is one longer side, that which brings the area nearest to resolution². Where `largest`
    cuts the longer side off, the area is what is left.

    Args:
        resolution: side of the square bucket, which is always among them, in pixels.
        multiple: what both sides are multiples of, in pixels: patch size × factor of the VAE.
        max_ratio: most that the longer side may be of the shorter; 1 gives the square alone.
        largest: longest side that the model has positions for, in pixels.

    Returns:
        Sizes with sides in ratios of at most `max_ratio`, with areas that pass resolution² by less than one step
        (`multiple` × the shorter side), and that lack less than one step unless `largest` cut them.

    Raises:
        ValueError: if a value is out of range, or the resolution is not a multiple or is above `largest`.
    """
    _check_square(resolution, multiple, max_ratio, largest)
    # diffusers' generate_aspect_ratio_buckets rounds both sides by themselves: at 32 px in steps of 4 areas are up to
    # 9 % off and 28 px stands twice, ratios pass 2 (1456 × 720), and it knows no longest side.
    squared = (resolution // multiple) ** 2  # area in units of multiple²
    found = {Size(resolution, resolution)}
    for short in range(1, resolution // multiple):
        below = squared // short
        limit = min(largest / multiple, max_ratio * short)
        # Where the ratio cuts off more than a step, the areas would go on falling from there; positions may do that.
        longs = [below, below + 1] if largest >= below * multiple else [math.floor(largest / multiple)]
        allowed = [long for long in longs if long <= limit]
        if allowed:
            long = min(allowed, key=lambda side: abs(side * short - squared))
            found |= {Size(short * multiple, long * multiple), Size(long * multiple, short * multiple)}
    return tuple(sorted(found, key=lambda size: size.height / size.width))


def _check_square(resolution: int, multiple: int, max_ratio: float, largest: float) -> None:
    for name, value in (("resolution", resolution), ("multiple", multiple)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} is {value!r}; expected a positive whole number of pixels")
    if not 1 <= max_ratio < math.inf:
        raise ValueError(f"max_ratio is {max_ratio!r}; expected a number of at least 1, such as 2.0")
    if resolution % multiple:
        below = resolution // multiple * multiple
        nearest = f"{below} and {below + multiple}" if below else f"{multiple}"
        raise ValueError(f"resolution is {resolution}; expected a multiple of {multiple}: the nearest are {nearest}")
    if not largest >= resolution:
        raise ValueError(
            f"resolution is {resolution}, but the longest side that the model takes is {largest} pixels; "
            "choose a smaller resolution"
        )


def kept_share(size: Size, bucket: Size) -> float:
    """Return the share of a picture's area that covering a bucket and cropping to it keeps, in (0, 1]."""
    # Integers up to the one division, which rounds correctly: equal shares are equal floats.
    products = size.height * bucket.width, size.width * bucket.height
    return min(products) / max(products)


def enlargement(size: Size, bucket: Size) -> float:
    """Return the factor that a picture's sides are resized by to cover a bucket; above 1 it is enlarged."""
    return max(bucket.height / size.height, bucket.width / size.width)


def nearest_bucket(size: Size, buckets: Sequence[Size]) -> Size:
    """Choose the bucket that keeps the largest share of a picture.

    Of equal shares the larger bucket wins, and of equal areas the one of less height.

    Raises:
        ValueError: if there are no buckets.
    """
    if not buckets:
        raise ValueError("there are no buckets; expected at least one size")
    # diffusers' find_nearest_bucket compares |h·W - w·H|, which grows with the bucket: among several resolutions it
    # takes a small bucket of the wrong shape before a large one that fits better.
    return min(buckets, key=lambda bucket: (-kept_share(size, bucket), -bucket.height * bucket.width, bucket))


def fit(image: Image.Image, bucket: Size, *, mirrored: bool = False) -> Tensor:
    """Make the training tensor of a picture in its bucket: covered at one scale, the centre kept.

    The centred region of the bucket's shape is resized, with antialiasing. That is the picture resized to cover the
    bucket and its centre cropped, but it never holds the resized long side. The region is whole pixels, so its shape
    is the bucket's up to half a pixel of the picture.

    Args:
        image: an RGB picture.
        bucket: size of the result.
        mirrored: whether left and right are swapped.

    Returns:
        `[3, height, width]`, float32 in [-1, 1].

    Raises:
        ValueError: if the picture is not RGB.
    """
    if image.mode != "RGB":
        raise ValueError(f"the picture's mode is {image.mode}; expected RGB, which to_rgb makes of any")
    region = functional.center_crop(image, list(_largest_region(Size(image.height, image.width), bucket)))
    pixels = functional.resize(
        functional.pil_to_tensor(region),  # [3, H', W']
        list(bucket),
        interpolation=v2.InterpolationMode.BICUBIC,
        antialias=True,
    )  # [3, h, w]
    if mirrored:
        pixels = functional.horizontal_flip(pixels)
    pixels = functional.to_dtype(pixels, torch.float32, scale=True)
    return functional.normalize(pixels, mean=[0.5, 0.5, 0.5], std=[0.5, 0.5, 0.5])


def _largest_region(size: Size, bucket: Size) -> Size:
    """Return the largest region of a picture that has a bucket's shape, to whole pixels and one at least."""
    if size.height * bucket.width > size.width * bucket.height:  # the picture is the taller
        return Size(max(1, round(size.width * bucket.height / bucket.width)), size.width)
    return Size(size.height, max(1, round(size.height * bucket.width / bucket.height)))


@dataclass(frozen=True)
class BucketReport:
    """What training at a bucket's size costs the pictures in it; as text, a line for people.

    Attributes:
        bucket: the size.
        pictures: how many there are in it.
        mean_cropped: mean share of their areas that is cut off.
        largest_cropped: largest such share.
    """

    bucket: Size
    pictures: int
    mean_cropped: float
    largest_cropped: float

    def __str__(self) -> str:
        """Say it in a line, width first, as picture viewers do."""
        noun = "picture" if self.pictures == 1 else "pictures"
        return (
            f"{self.bucket.width} × {self.bucket.height}: {self.pictures} {noun}, "
            f"cropped {self.mean_cropped:.0%} on average, {self.largest_cropped:.0%} at most"
        ).replace("%", " %")


def report_buckets(assignments: Iterable[tuple[Size, Size]]) -> list[BucketReport]:
    """Count the pictures of every bucket and what is cropped off them.

    Args:
        assignments: for every picture, its size and its bucket.

    Returns:
        One report a bucket that is used, from the largest area to the smallest and then from wide to tall.
    """
    cropped: dict[Size, list[float]] = {}
    for size, bucket in assignments:
        cropped.setdefault(bucket, []).append(1 - kept_share(size, bucket))
    order = sorted(cropped, key=lambda bucket: (-bucket.height * bucket.width, bucket))
    return [
        BucketReport(bucket, len(shares), math.fsum(shares) / len(shares), max(shares))
        for bucket, shares in ((bucket, cropped[bucket]) for bucket in order)
    ]
