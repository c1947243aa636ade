"""Which pictures are trained at which sizes: each is looked at once, by its header, before any is decoded."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mmpreproj.data.buckets import Size, enlargement, nearest_bucket
from mmpreproj.data.sources.pictures import PictureSource, SkippedPicture, UnreadablePictureError, picture_size


@dataclass(frozen=True)
class Look:
    """What is known of a picture before it is decoded.

    Attributes:
        place: in its source.
        digest: SHA-256 of its file.
        size: upright.
    """

    place: int
    digest: str
    size: Size


@dataclass(frozen=True)
class Sample:
    """A picture at a size that it is trained at."""

    look: Look
    bucket: Size


def digest_of(data: bytes) -> str:
    """Return what tells a picture's file from others: SHA-256, in hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def look_at_pictures(
    source: PictureSource,
    *,
    skipped: list[SkippedPicture] | None = None,
    on_look: Callable[[int], None] = lambda done: None,
) -> list[Look]:
    """Read every picture's file once, for its digest and its size.

    Args:
        source: where they come from.
        skipped: where those that cannot be read are listed; without, the first raises.
        on_look: called with how many are done.

    Raises:
        UnreadablePictureError: if `skipped` is None.
    """
    looks: list[Look] = []
    for place in range(len(source)):
        try:
            data = source.read(place)
            size = Size(*picture_size(data, source.names[place]))
            looks.append(Look(place, digest_of(data), size))
        except UnreadablePictureError as error:
            if skipped is None:
                raise
            skipped.append(SkippedPicture(error.name, error.reason))
        on_look(place + 1)
    return looks


def plan_samples(
    looks: Sequence[Look],
    buckets: Sequence[Sequence[Size]],
    *,
    names: Sequence[str],
    max_enlargement: float = float("inf"),
    skipped: list[SkippedPicture] | None = None,
) -> list[Sample]:
    """Give each picture the bucket that loses least of it, at each resolution that it is large enough for.

    Args:
        looks: the pictures.
        buckets: those of each resolution.
        names: what the source calls its pictures.
        max_enlargement: most that a picture may be enlarged.
        skipped: where pictures that are too small for all of them are listed; without, the first raises.

    Raises:
        UnreadablePictureError: if `skipped` is None, for a picture that is too small.
    """
    samples: list[Sample] = []
    for look in looks:
        nearest = [nearest_bucket(look.size, choice) for choice in buckets]
        large_enough = [bucket for bucket in nearest if enlargement(look.size, bucket) <= max_enlargement]
        samples += [Sample(look, bucket) for bucket in large_enough]
        if large_enough:
            continue
        bucket = min(nearest, key=lambda size: enlargement(look.size, size))
        reason = (
            f"it is too small: {look.size.width} × {look.size.height} pixels would be enlarged "
            f"{enlargement(look.size, bucket):.3g} times to fill {bucket.width} × {bucket.height}, and "
            f"data.max_enlargement is {max_enlargement:g}"
        )
        if skipped is None:
            raise UnreadablePictureError(names[look.place], reason)
        skipped.append(SkippedPicture(names[look.place], reason))
    return samples
