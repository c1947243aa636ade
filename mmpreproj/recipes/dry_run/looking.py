"""A look at the data of a run before it begins: all of what lists tell, and pictures spread evenly over the rest."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, cast

from mmpreproj.data.buckets import BucketReport, Size, report_buckets
from mmpreproj.data.clouds import read_clouds
from mmpreproj.data.samples import Look, Sample, look_at_pictures, plan_samples
from mmpreproj.data.sources.mix import MixedSource
from mmpreproj.data.sources.pictures import PictureSource, SkippedPicture, UnreadablePictureError, decode
from mmpreproj.data.sources.triplets import TripletSource
from mmpreproj.pipelines.sd3 import PreProjSD3Pipeline
from mmpreproj.recipes.progress import Reporter
from mmpreproj.recipes.train.inputs import choose_buckets
from mmpreproj.recipes.train.sources import split
from mmpreproj.training.config import ConfigError, TrainConfig

LOOKED_AT, DECODED, CLOUDS_READ = 2000, 512, 8
DECODED_PIXELS = 2**29  # in all, some seconds' work: 512 pictures of 1024 × 1024, or 20 of a large camera
THREADS = 8
T5_PLACE = "tokenizer_3"


@dataclass(frozen=True)
class SourceCount:
    """What one source has.

    Attributes:
        name: its kind, and where it is.
        pictures: how many.
        captions: how many different ones.
        faults: entries that cannot be used.
    """

    name: str
    pictures: int
    captions: int
    faults: int


@dataclass(frozen=True)
class CaptionLengths:
    """How long captions are for a tokenizer.

    Attributes:
        tokenizer: its name in the pipeline.
        captions: how many different ones were looked at.
        longest: in tokens, with those that every text has.
        room: in tokens.
        cut: how many captions are longer than that.
    """

    tokenizer: str
    captions: int
    longest: int
    room: int
    cut: int


@dataclass(frozen=True)
class DataLook:
    """What was seen of a run's data.

    Attributes:
        sources: one entry a source.
        trained: number of pictures that are trained on, at most; `is_whole` tells whether exactly.
        held_out: number of those that are not.
        faults: entries of the sources that cannot be used, all of them.
        looked: number of pictures whose files were read, as far as their headers.
        decodable: number of those that are large enough, copies of a file counting once.
        decoded: number of these that were decoded.
        unreadable: those that were looked at and cannot be used.
        too_small: those that are too small for every size.
        buckets: sizes of pictures, of those that were looked at and that nothing was found to be wrong with.
        captions: lengths of captions; none where no tokenizer is here.
        clouds: number of pictures with a cloud; None where none are trained on.
        clouds_read: how many of these were read.
        unreadable_clouds: those of them that cannot be used.
        runs: folders among the pictures that runs have written, and that are left out.
    """

    sources: tuple[SourceCount, ...]
    trained: int
    held_out: int
    faults: tuple[SkippedPicture, ...]
    looked: int
    decodable: int
    decoded: int
    unreadable: tuple[SkippedPicture, ...]
    too_small: tuple[SkippedPicture, ...]
    buckets: tuple[BucketReport, ...]
    captions: tuple[CaptionLengths, ...]
    clouds: int | None = None
    clouds_read: int = 0
    unreadable_clouds: tuple[SkippedPicture, ...] = ()
    runs: tuple[str, ...] = ()

    @property
    def is_whole(self) -> bool:
        """Whether every picture was looked at and decoded, so that all counts are those of the run."""
        return self.looked == self.pictures and self.decoded == self.decodable

    @property
    def pictures(self) -> int:
        """Number of pictures in all sources."""
        return sum(source.pictures for source in self.sources)

    @property
    def sizes(self) -> tuple[Size, ...]:
        """Sizes of training pictures, from the largest area to the smallest."""
        return tuple(report.bucket for report in self.buckets)


class _Some(PictureSource):
    """Some of a source's pictures."""

    def __init__(self, source: PictureSource, places: Sequence[int]) -> None:
        self.source, self.places = source, places
        self.names = [source.names[place] for place in places]
        self.captions = [source.captions[place] for place in places]

    def __len__(self) -> int:
        return len(self.places)

    def read(self, index: int) -> bytes:
        return self.source.read(self.places[index])


def look_at_data(
    source: PictureSource, pipeline: PreProjSD3Pipeline, config: TrainConfig, reporter: Reporter
) -> DataLook:
    """Look at a source's pictures, captions and clouds as a run would, at `LOOKED_AT` pictures at most.

    Args:
        source: opened.
        pipeline: with its transformer, for its sizes, and tokenizers where they are here.
        config: the run's settings.
        reporter: told how many pictures were looked at.

    Raises:
        UnreadablePictureError: for the first picture that cannot be used, with `on_error: raise`.
        ConfigError: if clouds are trained on, and no picture has one.
        ValueError: if none of the pictures looked at can be used, or so many cannot be held out.
    """
    split(source, range(len(source)), config)  # refused now, as a run does
    some = _Some(source, spread(len(source), LOOKED_AT))
    unreadable: list[SkippedPicture] = []
    too_small: list[SkippedPicture] = []
    skips = config.data.on_error == "skip"
    looks = look_at_pictures(
        some, skipped=unreadable if skips else None, on_look=lambda done: reporter.stage("looking", done, len(some))
    )
    samples = plan_samples(
        looks,
        choose_buckets(pipeline, config.data),
        names=some.names,
        max_enlargement=config.data.max_enlargement,
        skipped=too_small if skips else None,
    )
    distinct = list({sample.look.digest: sample.look for sample in reversed(samples)}.values())[::-1]
    chosen = [distinct[place] for place in spread(len(distinct), _most(distinct))]
    reasons = _decode(some, chosen, config, reporter, may_fail=skips)
    usable = [sample for sample in samples if sample.look.digest not in reasons]
    failed = [
        SkippedPicture(some.names[look.place], reasons[look.digest])
        for look in dict.fromkeys(sample.look for sample in samples)
        if look.digest in reasons
    ]
    if not samples or len(reasons) == len(chosen):
        first = "; ".join(f"{one.name}: {one.reason}" for one in [*unreadable, *too_small, *failed][:3])
        raise ValueError(f"none of the {len(some)} pictures that were looked at can be used; the first: {first}")
    trained, held_out = _split(source, some, usable, config)
    clouds, read, unreadable_clouds = _look_at_clouds(source, config)
    return DataLook(
        sources=_count(source, config),
        trained=trained,
        held_out=held_out,
        faults=tuple(source.faults),
        looked=len(some),
        decodable=len(distinct),
        decoded=len(chosen),
        unreadable=(*unreadable, *failed),
        too_small=tuple(too_small),
        buckets=tuple(report_buckets((sample.look.size, sample.bucket) for sample in usable)),
        captions=caption_lengths(pipeline, some.captions, max_sequence_length=config.max_sequence_length),
        clouds=clouds,
        clouds_read=read,
        unreadable_clouds=unreadable_clouds,
        runs=tuple(source.runs),
    )


def _most(looks: Sequence[Look]) -> int:
    """Say how many pictures may be decoded, so that it takes seconds."""
    mean = sum(look.size.height * look.size.width for look in looks) / max(1, len(looks))
    return max(2, min(DECODED, int(DECODED_PIXELS / max(mean, 1))))


def _split(source: PictureSource, some: _Some, usable: Sequence[Sample], config: TrainConfig) -> tuple[int, int]:
    """Count the pictures that are trained on and held out: those found usable, and those not looked at."""
    digests = {some.places[sample.look.place]: sample.look.digest for sample in usable}
    unusable = set(some.places) - digests.keys()
    there = [place for place in range(len(source)) if place not in unusable]
    trained, held_out = split(source, there, config, digests=[digests.get(place) for place in there])
    return len(trained), len(held_out)


def spread(total: int, most: int) -> list[int]:
    """Choose at most so many places of a list, spread evenly, its first and last among them."""
    if total <= most:
        return list(range(total))
    return [round(number * (total - 1) / (most - 1)) for number in range(most)]


def caption_lengths(
    pipeline: PreProjSD3Pipeline, captions: Sequence[str], *, max_sequence_length: int
) -> tuple[CaptionLengths, ...]:
    """Compare captions, in tokens, with the length that each tokenizer of a pipeline cuts them to."""
    distinct = list(dict.fromkeys(captions))
    found = []
    for name in ("tokenizer", "tokenizer_2", T5_PLACE):
        tokenizer: Any = getattr(pipeline, name)
        if tokenizer is None:
            continue
        room = min(max_sequence_length, int(tokenizer.model_max_length))
        if not pipeline.uses_generic_text_encoder:  # as the pipeline does
            room = max_sequence_length if name == T5_PLACE else pipeline.tokenizer_max_length
        lengths = [len(ids) for ids in tokenizer(distinct, truncation=False, verbose=False).input_ids]
        cut = sum(length > room for length in lengths)
        found.append(CaptionLengths(name, len(distinct), max(lengths), room, cut))
    return tuple(found)


def _decode(
    source: PictureSource, looks: Sequence[Look], config: TrainConfig, reporter: Reporter, *, may_fail: bool
) -> dict[str, str]:
    """Decode pictures; return, for those that cannot be, the digests of their files and the reasons."""

    def fault(look: Look) -> UnreadablePictureError | None:
        try:
            decode(source.read(look.place), source.names[look.place], background=config.data.background)
        except UnreadablePictureError as error:
            return error
        return None

    reasons: dict[str, str] = {}
    with ThreadPoolExecutor(THREADS) as pool:
        for number, (look, error) in enumerate(zip(looks, pool.map(fault, looks), strict=True), start=1):
            if error is not None:
                if not may_fail:
                    pool.shutdown(wait=False, cancel_futures=True)
                    raise error
                reasons[look.digest] = error.reason
            reporter.stage("decoding", number, len(looks))
    return reasons


def _count(source: PictureSource, config: TrainConfig) -> tuple[SourceCount, ...]:
    opened = source.sources if isinstance(source, MixedSource) else [source]
    return tuple(
        SourceCount(
            " ".join(map(str, filter(None, (part.source, part.folder or part.dataset or ", ".join(part.shards))))),
            len(one),
            len(set(one.captions)),
            len(one.faults),
        )
        for one, part in zip(opened, config.data.sources, strict=True)
    )


def _look_at_clouds(source: PictureSource, config: TrainConfig) -> tuple[int | None, int, tuple[SkippedPicture, ...]]:
    """Count the pictures with a cloud, and read a few; return those that cannot be."""
    points = config.point_path
    if points is None:
        return None, 0, ()
    triplets = cast(TripletSource, source)
    there = [place for place, has_cloud in enumerate(triplets.has_cloud) if has_cloud]
    if not there:
        raise ConfigError(
            "data: none of the pictures has a cloud, so adapter.points would learn nothing; give rows a cloud, or "
            "leave adapter.points out"
        )
    chosen = [there[place] for place in spread(len(there), CLOUDS_READ)]
    failed: list[SkippedPicture] = []
    read_clouds(
        triplets,
        chosen,
        count=config.points.stored,
        features=points.features,
        to_unit_ball=points.normalise == "unit_ball",
        seed=config.seed,
        skipped=failed,
    )
    return len(there), len(chosen), tuple(failed)
