"""Several sources as one."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate

import numpy as np

from mmpreproj.data.sources.pictures import PictureSource, SkippedPicture, UnreadablePictureError
from mmpreproj.data.sources.triplets import TripletSource
from mmpreproj.points.clouds import UnreadableCloudError


class MixedSource(TripletSource):
    """The pictures of several sources, one source after the other; how often each is drawn is decided elsewhere.

    Where two sources have a picture or a cloud of the same name, all names begin with their source: "2: a.png".

    Args:
        sources: at least one; those that are no `TripletSource` have no clouds.
        labels: what names begin with where they must; the sources' numbers, from 1, if None.

    Attributes:
        sources: as given.
        parts: for each source, the indices of its pictures.
        captions: one caption a picture.
        names: the sources' own, with a label where they would be the same.
        faults: what the sources left out, with a label where names have one.
        runs: folders that training runs have written among the sources' pictures.
        has_cloud: for each picture, whether its source has a cloud for it.
        clouds: the sources' own, with a label where names have one; None where there is no cloud.

    Raises:
        ValueError: if there are no sources, or not one different label for each.
    """

    def __init__(self, sources: Sequence[PictureSource], *, labels: Sequence[str] | None = None) -> None:
        if not sources:
            raise ValueError("sources is empty; expected at least one")
        labels = [str(number) for number in range(1, len(sources) + 1)] if labels is None else list(labels)
        if len(set(labels)) != len(sources) or len(labels) != len(sources):
            raise ValueError(f"labels is {labels!r}; expected {len(sources)} different ones, as there are sources")
        self.sources = list(sources)
        ends = list(accumulate(map(len, sources)))
        self.parts = [range(end - len(source), end) for source, end in zip(sources, ends, strict=True)]
        self._ends = ends
        self.captions = [caption for source in sources for caption in source.captions]
        clouds = [_clouds_of(source) for source in sources]
        overlap = _overlap(source.names for source in sources) or _overlap(clouds)
        prefixes = [f"{label}: " if overlap else "" for label in labels]
        self.names = [prefix + name for prefix, source in zip(prefixes, sources, strict=True) for name in source.names]
        self.clouds = [
            None if cloud is None else prefix + cloud
            for prefix, part in zip(prefixes, clouds, strict=True)
            for cloud in part
        ]
        self.has_cloud = [cloud is not None for cloud in self.clouds]
        self.faults = tuple(
            SkippedPicture(prefix + fault.name, fault.reason)
            for prefix, source in zip(prefixes, sources, strict=True)
            for fault in source.faults
        )
        self.runs = tuple(run for source in sources for run in source.runs)

    def __len__(self) -> int:
        return len(self.names)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.sources!r})  # {len(self)} pictures"

    def read(self, index: int) -> bytes:
        """Return one picture's file from its source; see `PictureSource.read`."""
        source, place = self._find(index)
        try:
            return source.read(place)
        except UnreadablePictureError as error:
            raise UnreadablePictureError(self.names[index], error.reason) from error

    def cloud(self, index: int, count: int, *, features: int = 0, seed: int = 0) -> np.ndarray:
        """Read one picture's cloud from its source; see `TripletSource.cloud`."""
        source, place = self._find(index)
        name = self.clouds[index]
        if name is None or not isinstance(source, TripletSource):
            raise ValueError(f"{self.names[index]} has no cloud; ask only where has_cloud is true")
        try:
            return source.cloud(place, count, features=features, seed=seed)
        except UnreadableCloudError as error:
            raise UnreadableCloudError(name, error.reason) from error

    def _find(self, index: int) -> tuple[PictureSource, int]:
        """Return the source of a picture, and its index there."""
        if not 0 <= index < len(self):
            raise IndexError(f"index is {index}; the sources have {len(self)} pictures")
        number = bisect_right(self._ends, index)
        return self.sources[number], index - self.parts[number].start


def _clouds_of(source: PictureSource) -> Sequence[str | None]:
    return source.clouds if isinstance(source, TripletSource) else [None] * len(source)


def _overlap(names_by_source: Iterable[Iterable[str | None]]) -> bool:
    """Whether a name occurs in more than one source."""
    count = Counter(name for names in names_by_source for name in set(names) if name is not None)
    return any(number > 1 for number in count.values())
