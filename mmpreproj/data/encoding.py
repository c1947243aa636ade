"""Encoder outputs, computed once: picture latents and text embeddings ready for training."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import Dataset

from mmpreproj.data.pictures import PictureSource, SkippedPicture, read_pictures

Progress = Callable[[str, int, int], None]


def _no_progress(stage: str, done: int, total: int) -> None:
    """Report to nobody."""


class Encoder(Protocol):
    """What encoding needs of a pipeline."""

    def encode_latents(self, pixels: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Map pixels `[B, 3, H, W]` in [-1, 1] to latents `[B, C, h, w]`."""

    def encode_prompt(self, prompt: list[str], **settings: Any) -> Sequence[Any]:
        """Map B prompts to embeddings `[B, L, D]`, …, pooled embeddings `[B, P]`, …, as SD3's pipeline does."""

    def encode_prompt_mask(self, prompt: list[str], *, max_sequence_length: int) -> Tensor:
        """Tell text from padding in those embeddings: truth values `[B, L]`, true at text."""


@dataclass(frozen=True)
class TextEmbeddings:
    """Embeddings of distinct prompts.

    Attributes:
        tokens: `[U, L, D]`.
        pooled: `[U, P]`.
        mask: truth values `[U, L]`, false at padding.
    """

    tokens: Tensor
    pooled: Tensor
    mask: Tensor


@dataclass(frozen=True)
class EncodedPictures(Dataset[dict[str, Tensor]]):
    """Encoded pictures and captions, in memory.

    Attributes:
        latents: `[N, C, h, w]`.
        captions: N captions.
        text: the embeddings of the distinct captions.
        text_index: `[N]`, the row of `text` for each picture.
        empty: the embeddings of the empty prompt, which dropped captions take: `[1, L, D]`, `[1, P]` and `[1, L]`.
        skipped: pictures that could not be read.
        clouds: `[N, K, 3 + F]`, zeros for a picture without one; None where there are none at all.
        has_cloud: truth values `[N]`, with `clouds`.
        skipped_clouds: clouds that could not be read, whose pictures have none.
        places: the pictures' places in the source they came from.
    """

    latents: Tensor
    captions: tuple[str, ...]
    text: TextEmbeddings
    text_index: Tensor
    empty: TextEmbeddings
    skipped: tuple[SkippedPicture, ...] = ()
    clouds: Tensor | None = None
    has_cloud: Tensor | None = None
    skipped_clouds: tuple[SkippedPicture, ...] = ()
    places: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.captions)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return `latents` `[C, h, w]`, `tokens` `[L, D]`, `pooled` `[P]` and `mask` `[L]` of one picture.

        Where there are clouds, also `cloud` `[K, 3 + F]` and `has_cloud` `[]`.
        """
        row, text = self.text_index[index], self.text
        item = {
            "latents": self.latents[index],
            "tokens": text.tokens[row],
            "pooled": text.pooled[row],
            "mask": text.mask[row],
        }
        if self.clouds is not None and self.has_cloud is not None:
            item |= {"cloud": self.clouds[index], "has_cloud": self.has_cloud[index]}
        return item

    def subset(self, indices: Sequence[int]) -> EncodedPictures:
        """Keep the pictures at these indices, in this order."""
        chosen = torch.as_tensor(list(indices), dtype=torch.long)
        captions = tuple(self.captions[index] for index in indices)
        return replace(
            self,
            latents=self.latents[chosen],
            captions=captions,
            text_index=self.text_index[chosen],
            clouds=None if self.clouds is None else self.clouds[chosen],
            has_cloud=None if self.has_cloud is None else self.has_cloud[chosen],
            places=tuple(self.places[index] for index in indices) if self.places else (),
        )

    def with_clouds(
        self, clouds: Tensor, has_cloud: Tensor, *, skipped: Sequence[SkippedPicture] = ()
    ) -> EncodedPictures:
        """Give each picture a cloud, `[N, K, 3 + F]`, where `has_cloud` `[N]` is true; `skipped` could not be read.

        Raises:
            ValueError: if there are not as many as pictures.
        """
        if len(clouds) != len(self) or has_cloud.shape != (len(self),):
            raise ValueError(f"{len(clouds)} clouds and {list(has_cloud.shape)} flags for {len(self)} pictures")
        return replace(self, clouds=clouds, has_cloud=has_cloud, skipped_clouds=tuple(skipped))


def encode_pictures(
    encoder: Encoder,
    source: PictureSource,
    *,
    resolution: int,
    max_sequence_length: int = 256,
    batch_size: int = 16,
    device: torch.device | str = "cpu",
    seed: int = 0,
    on_progress: Progress = _no_progress,
) -> EncodedPictures:
    """Encode every picture and every distinct caption of a source once.

    Unreadable pictures are left out and listed in the result. The result is in memory, on the CPU.

    Args:
        encoder: a pipeline with its encoders.
        source: captioned pictures.
        resolution: side of the square pictures, in pixels.
        max_sequence_length: longest text, in tokens, for encoders that take a length.
        batch_size: pictures or captions per call of an encoder.
        device: where the encoders are.
        seed: of the VAE's posterior; latents depend on nothing else that is random.
        on_progress: called with the stage (`"pictures"` or `"captions"`), how many are done, and how many there are.

    Raises:
        ValueError: if no picture could be read, or latents are not finite.
    """
    skipped: list[SkippedPicture] = []
    kept: list[int] = []
    latents = []
    generator = torch.Generator().manual_seed(seed)
    for indices, pixels in read_pictures(source, resolution, batch_size=batch_size, skipped=skipped):
        with torch.no_grad():
            latents.append(encoder.encode_latents(pixels.to(device), generator=generator).float().cpu())
        kept += indices
        on_progress("pictures", len(kept) + len(skipped), len(source))
    captions = tuple(source.captions[index] for index in kept)
    distinct = list(dict.fromkeys(captions))
    row = {caption: index for index, caption in enumerate(distinct)}
    settings: dict[str, Any] = {"max_sequence_length": max_sequence_length, "device": device}
    return EncodedPictures(
        latents=_check_finite(torch.cat(latents)),
        captions=captions,
        text=_encode_all(encoder, distinct, batch_size, settings, on_progress),
        text_index=torch.tensor([row[caption] for caption in captions]),
        empty=encode_captions(encoder, [""], **settings),
        skipped=tuple(skipped),
        places=tuple(kept),
    )


def encode_captions(
    encoder: Encoder, captions: list[str], *, max_sequence_length: int = 256, device: torch.device | str = "cpu"
) -> TextEmbeddings:
    """Encode captions as the pipeline would for generation, without guidance; the result is on the CPU."""
    with torch.no_grad():
        tokens, _, pooled, _ = encoder.encode_prompt(
            prompt=captions,
            prompt_2=None,
            prompt_3=None,
            device=torch.device(device),
            do_classifier_free_guidance=False,
            max_sequence_length=max_sequence_length,
        )
    mask = encoder.encode_prompt_mask(captions, max_sequence_length=max_sequence_length)
    return TextEmbeddings(tokens.cpu(), pooled.cpu(), mask.cpu())


def split_held_out(
    captions: Sequence[str],
    count: int,
    *,
    seed: int = 0,
    always_train: Sequence[str] = (),
    together: Sequence[Sequence[Hashable | None]] = (),
) -> tuple[list[int], list[int]]:
    """Split pictures into those to train on and those never to be trained on.

    Args:
        captions: one per picture.
        count: number of pictures to hold out.
        seed: of the random choice.
        always_train: captions that must stay among the training pictures.
        together: what must not be on both sides, a value for each picture, several times over: pictures that are alike
            in one of them are held out together, until there are `count` at least. None is like nothing else.

    Returns:
        Indices to train on and indices held out, each in ascending order.

    Raises:
        ValueError: if that leaves no picture to train on, or names a caption that is not there.
    """
    unknown = sorted(set(always_train) - set(captions))
    if unknown:
        raise ValueError(f"always_train names captions that the data does not have: {', '.join(map(repr, unknown))}")
    free = [index for index, caption in enumerate(captions) if caption not in set(always_train)]
    if count > len(free) or count >= len(captions):
        raise ValueError(
            f"held_out asks for {count} of {len(captions)} pictures, which leaves none to train on; hold out fewer"
        )
    order = torch.randperm(len(free), generator=torch.Generator().manual_seed(seed)).tolist()
    held_out = sorted(free[place] for place in order[:count])
    if together:
        held_out = _whole_groups(
            together, [free[place] for place in order], count, kept=set(always_train), captions=captions
        )
    return [index for index in range(len(captions)) if index not in set(held_out)], held_out


def _whole_groups(
    together: Sequence[Sequence[Hashable | None]],
    order: Sequence[int],
    count: int,
    *,
    captions: Sequence[str],
    kept: set[str],
) -> list[int]:
    """Take pictures in an order, each with all that are alike, until there are `count` at least."""
    group = _groups(together, len(captions))
    fixed = {group[place] for place, caption in enumerate(captions) if caption in kept}
    held_out: set[int] = set()
    for index in order:
        if len(held_out) >= count:
            break
        if group[index] not in fixed:
            held_out |= {place for place, other in enumerate(group) if other == group[index]}
    if len(held_out) < count or len(held_out) == len(captions):
        raise ValueError(
            f"held_out asks for {count} of {len(captions)} pictures, but those that belong together (by caption, or "
            f"by a cloud that they share) leave {len(held_out)} to hold out and {len(captions) - len(held_out)} to "
            "train on; hold out fewer"
        )
    return sorted(held_out)


def _groups(together: Sequence[Sequence[Hashable | None]], count: int) -> list[int]:
    """Number the groups of pictures that are connected by being alike in something: `[count]`."""
    group = list(range(count))

    def root(place: int) -> int:
        while group[place] != place:
            place = group[place]
        return place

    for values in together:
        first: dict[Hashable, int] = {}
        for place, value in enumerate(values):
            if value is not None:
                group[root(place)] = root(first.setdefault(value, place))
    return [root(place) for place in range(count)]


def _encode_all(
    encoder: Encoder, captions: list[str], batch_size: int, settings: dict[str, Any], on_progress: Progress
) -> TextEmbeddings:
    parts = []
    for start in range(0, len(captions), batch_size):
        parts.append(encode_captions(encoder, captions[start : start + batch_size], **settings))
        on_progress("captions", min(start + batch_size, len(captions)), len(captions))
    return TextEmbeddings(
        tokens=torch.cat([part.tokens for part in parts]),
        pooled=torch.cat([part.pooled for part in parts]),
        mask=torch.cat([part.mask for part in parts]),
    )


def _check_finite(latents: Tensor) -> Tensor:
    bad = int((~torch.isfinite(latents)).flatten(1).any(dim=1).sum())
    if bad:
        raise ValueError(
            f"the VAE gave NaN or infinite latents for {bad} of {len(latents)} pictures; an fp16 VAE that "
            "overflows is the usual cause: load the model in fp32 or bf16"
        )
    return latents
