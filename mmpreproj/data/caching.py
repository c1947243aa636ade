"""Encoder outputs on disk: computed once, and found again by what went into them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from mmpreproj.data.encoding import EncodedPictures, Encoder, StoredLatents, StoredTexts, TextEmbeddings
from mmpreproj.data.encoding_work import EncodingWork
from mmpreproj.data.samples import Sample
from mmpreproj.data.sources.pictures import WHITE, PictureSource, SkippedPicture
from mmpreproj.data.store import TensorStore, key_of

VERSION = 1  # of how pictures become latents; a change of that makes old entries unfindable
NAMED_IN_ERRORS = 3
Progress = Callable[[str, int, int], None]


def no_progress(stage: str, done: int, total: int) -> None:
    """Report to nobody."""


@dataclass(frozen=True)
class Encoding:
    """How pictures and captions are encoded, and so what their keys are made of.

    Attributes:
        vae: fingerprint of the VAE, with its dtype.
        text: fingerprint of the text encoders and tokenizers, with their dtypes.
        max_sequence_length: longest text, in tokens, for encoders that take a length.
        background: red, green and blue from 0 to 255, seen through transparent pixels.
        flip: share of draws that are mirrored; if it is not 0, mirrored pictures are encoded too.
    """

    vae: str
    text: str
    max_sequence_length: int = 256
    background: tuple[int, int, int] = WHITE
    flip: float = 0.0

    def __post_init__(self) -> None:
        """Refuse a share that is none."""
        if not 0 <= self.flip <= 1:
            raise ValueError(f"flip is {self.flip!r}; expected the share of draws that are mirrored, from 0 to 1")

    @property
    def sides(self) -> tuple[bool, ...]:
        """Whether mirrored, for each way that a picture is encoded."""
        return (False, True) if self.flip > 0 else (False,)

    def latents_key(self, sample: Sample, *, mirrored: bool) -> str:
        """Return the key of a sample's latents."""
        return key_of(
            kind="latents",
            version=VERSION,
            vae=self.vae,
            picture=sample.look.digest,
            height=sample.bucket.height,
            width=sample.bucket.width,
            mirrored=mirrored,
            background=list(self.background),
        )

    def text_key(self, caption: str) -> str:
        """Return the key of a caption's embeddings."""
        return key_of(kind="text", version=VERSION, text=self.text, length=self.max_sequence_length, caption=caption)


@dataclass(frozen=True)
class Share:
    """Which share of the work this process does.

    Attributes:
        rank: of this process.
        count: of processes.
        wait: returns when all processes have called it.
    """

    rank: int = 0
    count: int = 1
    wait: Callable[[], None] = lambda: None


def encode_pictures(
    encoder: Encoder,
    source: PictureSource,
    samples: Sequence[Sample],
    *,
    encoding: Encoding,
    store: TensorStore,
    share: Share | None = None,
    more_captions: Sequence[str] = (),
    batch_size: int = 16,
    device: torch.device | str = "cpu",
    seed: int = 0,
    skipped: list[SkippedPicture] | None = None,
    on_progress: Progress = no_progress,
) -> EncodedPictures:
    """Encode what the store does not have yet, and return the samples as they are read from it.

    Args:
        encoder: a pipeline with its encoders.
        source: captioned pictures.
        samples: which of them, at which sizes.
        encoding: how.
        store: where the results are kept.
        share: of this process; each encodes its own, and waits for the others.
        more_captions: that are encoded too, such as prompts of validation.
        batch_size: pictures or captions per call of an encoder.
        device: where the encoders are.
        seed: of what is random about a draw.
        skipped: where pictures that cannot be decoded are listed; without, the first raises.
        on_progress: called with the stage (`"pictures"` or `"captions"`), how many are done, and how many there are.

    Raises:
        UnreadablePictureError: for a picture that cannot be decoded, if `skipped` is None.
        ValueError: if not one can be, or latents are not finite; no other of their batch is kept then.
        OSError: if the store cannot be written.
        RuntimeError: if another process has left out its share.
    """
    share = share or Share()
    if not samples:
        raise ValueError("there are no pictures to encode; expected at least one")
    work = EncodingWork(
        encoder, source, _copies(samples), encoding, store, share, batch_size, torch.device(device), on_progress
    )
    failed = work.encode_latents(samples, may_fail=skipped is not None)
    kept = [sample for sample in samples if sample.look.digest not in failed]
    failures = {
        sample.look.place: SkippedPicture(source.names[sample.look.place], failed[sample.look.digest])
        for sample in samples
        if sample.look.digest in failed
    }
    if not kept:
        first = "; ".join(f"{one.name}: {one.reason}" for one in list(failures.values())[:NAMED_IN_ERRORS])
        raise ValueError(f"none of the {len(failures)} pictures could be read; the first: {first}")
    if skipped is not None:
        skipped += failures.values()
    captions = tuple(source.captions[sample.look.place] for sample in kept)
    distinct = list(dict.fromkeys(captions))
    work.encode_texts(["", *distinct, *more_captions])
    row = {caption: index for index, caption in enumerate(distinct)}
    sides = tuple(tuple(encoding.latents_key(sample, mirrored=side) for sample in kept) for side in encoding.sides)
    return EncodedPictures(
        latents=StoredLatents(store, sides),
        captions=captions,
        text=StoredTexts(store, tuple(encoding.text_key(caption) for caption in distinct)),
        text_index=torch.tensor([row[caption] for caption in captions]),
        empty=TextEmbeddings(**{name: value[None] for name, value in store[encoding.text_key("")].items()}),
        groups=tuple(sample.bucket for sample in kept),
        flip=encoding.flip,
        seed=seed,
        skipped=tuple(failures.values()),
        places=tuple(sample.look.place for sample in kept),
    )


def _copies(samples: Sequence[Sample]) -> dict[str, tuple[int, ...]]:
    """List where in the source each picture's file is, and is again under other names, by its digest."""
    found: dict[str, dict[int, None]] = {}
    for sample in samples:
        found.setdefault(sample.look.digest, {})[sample.look.place] = None
    return {digest: tuple(places) for digest, places in found.items()}
