"""What one process encodes of pictures and captions, into a store that it shares with others."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mmpreproj.data.buckets import Size, fit
from mmpreproj.data.encoding import Encoder, encode_captions, finite_rows
from mmpreproj.data.samples import Sample, digest_of
from mmpreproj.data.sources.pictures import PictureSource, UnreadablePictureError, decode
from mmpreproj.data.store import TensorStore

if TYPE_CHECKING:
    from mmpreproj.data.caching import Encoding, Progress, Share

THREADS = 4
BATCHES_AHEAD = 2  # that are decoded while one is encoded
PIXELS_AT_ONCE_ON_CPU = 2**17  # beyond, a VAE's activations leave the caches, and a picture takes twice as long

Loaded = tuple[Tensor, ...] | UnreadablePictureError


@dataclass(frozen=True)
class EncodingWork:
    """What one process encodes."""

    encoder: Encoder
    source: PictureSource
    copies: dict[str, tuple[int, ...]]
    encoding: Encoding
    store: TensorStore
    share: Share
    batch_size: int
    device: torch.device
    on_progress: Progress

    def encode_latents(self, samples: Sequence[Sample], *, may_fail: bool) -> dict[str, str]:
        """Encode this process's share of the latents that are missing.

        Returns:
            Why pictures cannot be decoded, by their digests; the same in every process.
        """
        failed: dict[str, str] = {}
        distinct = self._distinct(samples)
        missing = set(self._missing(distinct))
        done = len(samples) - len(missing)
        # A share of all, not of what is missing: that may have changed since another process looked.
        mine = [sample for sample in distinct[self.share.rank :: self.share.count] if sample in missing]
        self.on_progress("pictures", done, len(samples))
        with self.store.writer() as writer:
            for batch, loaded in self._load(self._in_batches(mine)):
                for key, latents in self._encode(*_usable(batch, loaded, failed, may_fail=may_fail)):
                    writer.add(key, latents)
                done += len(batch)
                self.on_progress("pictures", done, len(samples))
        self._meet()
        # What others could not decode is found out again, which costs less than telling it.
        others = [sample for sample in self._missing(distinct) if sample.look.digest not in failed]
        for batch, loaded in self._load(self._in_batches(others)):
            if _usable(batch, loaded, failed, may_fail=may_fail)[0]:
                raise _left_undone("pictures")
        self.on_progress("pictures", len(samples), len(samples))
        return failed

    def encode_texts(self, captions: Sequence[str]) -> None:
        """Encode this process's share of the captions that are missing."""
        wanted = {self.encoding.text_key(caption): caption for caption in captions}
        keys = list(wanted)
        done = len(keys) - len(self.store.missing(keys))
        mine = self.store.missing(keys[self.share.rank :: self.share.count])
        self.on_progress("captions", done, len(keys))
        with self.store.writer() as writer:
            for start in range(0, len(mine), self.batch_size):
                batch = mine[start : start + self.batch_size]
                found = encode_captions(
                    self.encoder,
                    [wanted[key] for key in batch],
                    max_sequence_length=self.encoding.max_sequence_length,
                    device=self.device,
                )
                for place, key in enumerate(batch):
                    writer.add(key, found.read(place))
                done += len(batch)
                self.on_progress("captions", done, len(keys))
        self._meet()
        if self.store.missing(keys):
            raise _left_undone("captions")
        self.on_progress("captions", len(keys), len(keys))

    def _distinct(self, samples: Sequence[Sample]) -> list[Sample]:
        """List one sample of those that are alike, by size, so that every share has its part of each size."""
        found: dict[tuple[str, Size], Sample] = {}
        for sample in samples:
            found.setdefault((sample.look.digest, sample.bucket), sample)
        return sorted(found.values(), key=lambda sample: sample.bucket)

    def _missing(self, samples: Sequence[Sample]) -> list[Sample]:
        """List the samples of which a side is missing."""
        sides = self.encoding.sides
        keys = [{self.encoding.latents_key(sample, mirrored=side) for side in sides} for sample in samples]
        absent = set(self.store.missing(key for both in keys for key in both))
        return [sample for sample, both in zip(samples, keys, strict=True) if both & absent]

    def _in_batches(self, samples: Sequence[Sample]) -> Iterator[list[Sample]]:
        """Cut samples, which come by size, into batches of one size each."""
        for bucket, alike in groupby(samples, key=lambda sample: sample.bucket):
            rest, size = list(alike), self.batch_size
            if self.device.type == "cpu":
                size = max(1, min(size, PIXELS_AT_ONCE_ON_CPU // (bucket.height * bucket.width)))
            for start in range(0, len(rest), size):
                yield rest[start : start + size]

    def _load(self, batches: Iterable[list[Sample]]) -> Iterator[tuple[list[Sample], list[Loaded]]]:
        """Decode the pictures of batches, some of them while earlier ones are used."""
        waiting: deque[tuple[list[Sample], list[Future[Loaded]]]] = deque()
        with ThreadPoolExecutor(THREADS) as pool:
            for batch in batches:
                waiting.append((batch, [pool.submit(self._load_one, sample) for sample in batch]))
                if len(waiting) > BATCHES_AHEAD:
                    first, futures = waiting.popleft()
                    yield first, [future.result() for future in futures]
            for first, futures in waiting:
                yield first, [future.result() for future in futures]

    def _load_one(self, sample: Sample) -> Loaded:
        """Decode a picture: its pixels `[3, H, W]` for each side, or why it cannot be."""
        errors = []
        for place in self.copies[sample.look.digest]:
            name = self.source.names[place]
            try:
                data = self.source.read(place)
                if digest_of(data) != sample.look.digest:
                    raise UnreadablePictureError(name, "its file has changed since it was looked at; start again")
                picture = decode(data, name, background=self.encoding.background)
            except UnreadablePictureError as error:
                errors.append(error)
            else:
                return tuple(fit(picture, sample.bucket, mirrored=side) for side in self.encoding.sides)
        return errors[0]

    def _encode(self, samples: Sequence[Sample], pixels: Sequence[Tensor]) -> list[tuple[str, dict[str, Tensor]]]:
        """Encode the sides that are missing of a batch; none is returned unless all are finite."""
        rows: list[tuple[str, dict[str, Tensor]]] = []
        for mirrored, side in zip(self.encoding.sides, pixels, strict=False):
            keys = [self.encoding.latents_key(sample, mirrored=mirrored) for sample in samples]
            places = [place for place, key in enumerate(keys) if key not in self.store]
            if places:
                with torch.no_grad():
                    posterior = self.encoder.encode_posterior(side[places].to(self.device))
                rows += zip([keys[place] for place in places], _rows(posterior), strict=True)
        return rows

    def _meet(self) -> None:
        self.share.wait()
        self.store.refresh()


def _usable(
    batch: Sequence[Sample], loaded: Sequence[Loaded], failed: dict[str, str], *, may_fail: bool
) -> tuple[list[Sample], list[Tensor]]:
    """Return the samples that could be decoded, and their pixels `[b, 3, H, W]` for each side; note the others."""
    ready: list[Sample] = []
    pixels: list[tuple[Tensor, ...]] = []
    for sample, result in zip(batch, loaded, strict=True):
        if isinstance(result, UnreadablePictureError):
            if not may_fail:
                raise result
            failed[sample.look.digest] = result.reason
        else:
            ready.append(sample)
            pixels.append(result)
    return ready, [torch.stack(side) for side in zip(*pixels, strict=True)]


def _rows(posterior: tuple[Tensor, Tensor | None]) -> Iterator[dict[str, Tensor]]:
    """Part a batch of posteriors into one of each picture."""
    mean, deviation = posterior
    parts = {"mean": mean.cpu()} | ({} if deviation is None else {"deviation": deviation.cpu()})
    finite = torch.stack([finite_rows(value) for value in parts.values()]).all(dim=0)  # [b]
    if not finite.all():
        raise ValueError(
            f"the VAE gave NaN or infinite latents for {int((~finite).sum())} of {len(finite)} pictures; an fp16 VAE "
            "that overflows is the usual cause: load the model in fp32 or bf16"
        )
    for place in range(len(finite)):
        yield {name: value[place] for name, value in parts.items()}


def _left_undone(what: str) -> RuntimeError:
    return RuntimeError(f"another process has not encoded its share of the {what}; see its messages, and start again")
