"""What a run trains on: its pictures given sizes, encoded and split, and its clouds."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from accelerate import Accelerator

from mmpreproj.data.buckets import BucketReport, Size, bucket_sizes, report_buckets
from mmpreproj.data.caching import Encoding, Share, encode_pictures
from mmpreproj.data.clouds import read_clouds
from mmpreproj.data.encoding import EncodedPictures
from mmpreproj.data.samples import Sample, look_at_pictures, plan_samples
from mmpreproj.data.sources.faults import count_of
from mmpreproj.data.sources.mix import MixedSource
from mmpreproj.data.sources.pictures import PictureSource, SkippedPicture
from mmpreproj.data.sources.triplets import TripletSource
from mmpreproj.data.store import TensorStore
from mmpreproj.patching.points.settings import PointPathConfig
from mmpreproj.pipelines.identity import TEXT, VAE, fingerprint
from mmpreproj.pipelines.latents import largest_side
from mmpreproj.pipelines.sd3 import PreProjSD3Pipeline
from mmpreproj.recipes.progress import Reporter
from mmpreproj.recipes.train.encoders import count_cut_prompts
from mmpreproj.recipes.train.sources import split
from mmpreproj.recipes.train.validation import check_prompts
from mmpreproj.training.batches import times_of
from mmpreproj.training.config import ConfigError, DataConfig, TrainConfig


@dataclass(frozen=True)
class Inputs:
    """What a run trains on, and what became of the rest.

    Attributes:
        pictures: all of them, encoded.
        trained: those that are trained on.
        held_out: those that are not.
        places: which of `pictures` were trained on, and which held out.
        prompts: embeddings of the prompts of validation, `tokens` `[L, D]`, `pooled` `[P]` and `mask` `[L]` each.
        skipped: pictures and captions that could not be used.
        buckets: the sizes that pictures are trained at, and what is cut off them.
    """

    pictures: EncodedPictures
    trained: EncodedPictures
    held_out: EncodedPictures
    places: tuple[tuple[int, ...], tuple[int, ...]]
    prompts: dict[str, dict]
    skipped: tuple[SkippedPicture, ...]
    buckets: tuple[BucketReport, ...] = ()


def choose_buckets(pipeline: PreProjSD3Pipeline, data: DataConfig) -> tuple[tuple[Size, ...], ...]:
    """List the sizes that pictures are trained at, for each resolution."""
    if data.aspect == "square":
        return tuple((Size(side, side),) for side in data.resolutions)
    multiple = pipeline.vae_scale_factor * pipeline.transformer.config.patch_size
    largest = largest_side(pipeline.transformer, vae_scale_factor=pipeline.vae_scale_factor)
    return tuple(
        bucket_sizes(side, multiple=multiple, max_ratio=data.max_aspect, largest=largest) for side in data.resolutions
    )


def make_inputs(
    pipeline: PreProjSD3Pipeline,
    source: PictureSource,
    config: TrainConfig,
    *,
    accelerator: Accelerator,
    reporter: Reporter,
) -> Inputs:
    """Encode a source's pictures and captions, or find them in the cache, read its clouds, and split them.

    Raises:
        UnreadablePictureError: for the first picture or caption that cannot be used, with `on_error: raise`.
        ConfigError: if pictures of validation cannot be made at their size, if none of the pictures that are trained
            on has a cloud, where points are trained, or if repeats leave nothing to draw.
        ValueError: if the data cannot be used.
        OSError: if the cache cannot be written.
    """
    check_prompts(pipeline, config)
    for run in source.runs:
        reporter.say(f"{run} was written by a run, so its pictures are left out of the data")
    data, settings = config.data, config.validation
    skipped: list[SkippedPicture] = list(source.faults)
    may_skip = skipped if data.on_error == "skip" else None
    samples, buckets = _plan(pipeline, source, data, skipped=may_skip, reporter=reporter)
    encoding = _encoding(pipeline, config)
    store = _open_store(cache_folder(config), reporter)
    prompts = (settings.negative_prompt, *settings.prompts) if settings.prompts else ()
    with count_cut_prompts() as cut:
        pictures = encode_pictures(
            pipeline,
            source,
            samples,
            encoding=encoding,
            store=store,
            share=Share(accelerator.process_index, accelerator.num_processes, accelerator.wait_for_everyone),
            more_captions=prompts,
            device=accelerator.device,
            seed=config.seed,
            skipped=may_skip,
            on_progress=_Told(reporter),
        )
    if cut.count:
        reporter.say(f"{count_of(cut.count, 'caption')} too long for the text encoder; the last: {cut.last}")
    if config.point_path is not None:
        pictures = _add_clouds(pictures, source, config, config.point_path, reporter=reporter)
    pictures = replace(pictures, origin=_origin(pipeline, encoding))
    buckets = _without(samples, pictures, buckets, reporter)
    digests = {sample.look.place: sample.look.digest for sample in samples}
    places = _split_samples(source, pictures, config, digests)
    trained = _with_times(pictures.subset(places[0]), source, data, reporter)
    if config.trains_points:
        _check_clouds(trained)
    counts = [len({pictures.places[index] for index in side}) for side in places]
    reporter.say(f"{count_of(counts[0], 'picture')} to train on, {counts[1]} held out")
    return Inputs(
        pictures=pictures,
        trained=trained,
        held_out=pictures.subset(places[1]),
        places=places,
        prompts={prompt: store[encoding.text_key(prompt)] for prompt in dict.fromkeys(prompts)},
        skipped=tuple(skipped),
        buckets=buckets,
    )


class _Told:
    """Shows how far encoding is, and says once a stage how much the cache had already."""

    def __init__(self, reporter: Reporter) -> None:
        self.reporter = reporter
        self._begun: set[str] = set()

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage not in self._begun:
            self._begun.add(stage)
            self.reporter.say(f"{stage}: {done} of {total} are in the cache")
        self.reporter.stage(stage, done, total)


def cache_folder(config: TrainConfig) -> Path:
    """Say where encoder outputs are kept: where the configuration says, else beside the run's folder."""
    return (config.data.cache or config.output.parent / "cache").expanduser()


def _plan(
    pipeline: PreProjSD3Pipeline,
    source: PictureSource,
    data: DataConfig,
    *,
    skipped: list[SkippedPicture] | None,
    reporter: Reporter,
) -> tuple[list[Sample], tuple[BucketReport, ...]]:
    """Look at every picture, give it its sizes, and say what they cost it."""
    known = len(skipped or ())
    looks = look_at_pictures(
        source, skipped=skipped, on_look=lambda done: reporter.stage("looking", done, len(source))
    )
    samples = plan_samples(
        looks,
        choose_buckets(pipeline, data),
        names=source.names,
        max_enlargement=data.max_enlargement,
        skipped=skipped,
    )
    if not samples:
        first = "; ".join(f"{failure.name}: {failure.reason}" for failure in (skipped or [])[known : known + 3])
        raise ValueError(f"none of the {len(source)} pictures can be used; the first: {first}")
    buckets = tuple(report_buckets((sample.look.size, sample.bucket) for sample in samples))
    for bucket in buckets:
        reporter.say(str(bucket))
    return samples, buckets


def _without(
    samples: Sequence[Sample], pictures: EncodedPictures, before: tuple[BucketReport, ...], reporter: Reporter
) -> tuple[BucketReport, ...]:
    """Count the sizes anew where pictures could be looked at but not decoded, and say what is left."""
    if not pictures.skipped:
        return before
    there = set(pictures.places)
    kept = [sample for sample in samples if sample.look.place in there]
    buckets = tuple(report_buckets((sample.look.size, sample.bucket) for sample in kept))
    reporter.say(f"without {count_of(len(pictures.skipped), 'picture')} that could not be decoded:")
    for bucket in buckets:
        reporter.say(str(bucket))
    return buckets


def _origin(pipeline: PreProjSD3Pipeline, encoding: Encoding) -> str:
    """Tell one base from another: transformer, text encoders and scheduler."""
    scheduler = json.dumps(dict(pipeline.scheduler.config), sort_keys=True, default=str)
    return fingerprint(pipeline, ("transformer",)) + encoding.text + scheduler


def _encoding(pipeline: PreProjSD3Pipeline, config: TrainConfig) -> Encoding:
    return Encoding(
        vae=fingerprint(pipeline, VAE),
        text=fingerprint(pipeline, TEXT),
        max_sequence_length=config.max_sequence_length,
        background=config.data.background,
        flip=config.data.flip,
    )


def _open_store(folder: Path, reporter: Reporter) -> TensorStore:
    store = TensorStore(folder)
    if store.damaged:
        reporter.say(f"{count_of(len(store.damaged), 'file')} of the cache {folder} cannot be read; encoding anew:")
    for file in store.damaged:
        reporter.say(f"  {file.name}: {file.reason}")
    return store


def _split_samples(
    source: PictureSource, pictures: EncodedPictures, config: TrainConfig, digests: Mapping[int, str]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Split samples, so that all sizes of a picture, and all copies of its file, are on one side."""
    there = list(dict.fromkeys(pictures.places))
    _, held = split(source, there, config, digests=[digests[place] for place in there])
    held_places = {there[index] for index in held}
    sides = [place in held_places for place in pictures.places]
    trained = tuple(index for index, is_held in enumerate(sides) if not is_held)
    return trained, tuple(index for index, is_held in enumerate(sides) if is_held)


def _with_times(
    trained: EncodedPictures, source: PictureSource, data: DataConfig, reporter: Reporter
) -> EncodedPictures:
    """Say how often each sample is drawn, where sources are mixed or repeated."""
    parts = source.parts if isinstance(source, MixedSource) else [range(len(source))]
    counts = [sum(place in part for place in trained.places) for part in parts]
    for number, count in enumerate(counts):
        if not count:
            reporter.say(f"data.mix.{number}: none of its {count_of(len(parts[number]), 'picture')} is trained on")
    present = [(count, one) for count, one in zip(counts, data.sources, strict=True) if count]
    if all(one.repeats == 1 and one.weight is None for _, one in present):
        return trained
    ends = [sum(count for count, _ in present[: number + 1]) for number in range(len(present))]
    ranges = [range(end - count, end) for end, (count, _) in zip(ends, present, strict=True)]
    times = times_of(ranges, [one.repeats for _, one in present], [one.weight for _, one in present])
    if math.fsum(times) < 1:  # refused now rather than when an earlier run's results are gone
        raise ConfigError(
            f"data.repeats: {math.fsum(times):.3g} draws an epoch of {count_of(len(times), 'picture')} in all; "
            "expected at least 1, so raise repeats"
        )
    return replace(trained, times=tuple(times))


def _add_clouds(
    pictures: EncodedPictures,
    source: PictureSource,
    config: TrainConfig,
    points: PointPathConfig,
    *,
    reporter: Reporter,
) -> EncodedPictures:
    """Read the cloud of each picture once, for all sizes that it is trained at."""
    places: Sequence[int] = list(dict.fromkeys(pictures.places))
    skipped: list[SkippedPicture] = []
    clouds, has_cloud = read_clouds(
        cast(TripletSource, source),
        places,
        count=config.points.stored,
        features=points.features,
        to_unit_ball=points.normalise == "unit_ball",
        seed=config.seed,
        skipped=skipped,
        on_read=lambda done: reporter.stage("clouds", done, len(places)),
    )
    reporter.say(f"{int(has_cloud.sum())} of {len(places)} pictures have a cloud")
    row = {place: number for number, place in enumerate(places)}
    rows = [row[place] for place in pictures.places]
    return pictures.with_clouds(clouds[rows], has_cloud[rows], skipped=skipped)


def _check_clouds(trained: EncodedPictures) -> None:
    if trained.has_cloud is None or not trained.has_cloud.any():
        raise ConfigError(
            "data: none of the pictures that are trained on has a cloud that can be read, so adapter.points would "
            "learn nothing; see what was left out, hold out fewer, or give more rows a cloud"
        )
