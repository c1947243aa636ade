"""Encoder outputs as training samples: picture latents and text embeddings, in memory or read when asked for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import Dataset

from mmpreproj.core.draws import Draw, generator_of
from mmpreproj.data.sources.pictures import SkippedPicture
from mmpreproj.data.store import TensorStore

POSTERIOR = 1  # what the random numbers of a sample's latents are drawn for; those of its noise are others


class Encoder(Protocol):
    """What encoding needs of a pipeline."""

    def encode_posterior(self, pixels: Tensor) -> tuple[Tensor, Tensor | None]:
        """Map pixels `[B, 3, H, W]` in [-1, 1] to means `[B, C, h, w]` of latents, and their standard deviations."""

    def encode_prompt(self, prompt: list[str], **settings: Any) -> Sequence[Any]:
        """Map B prompts to embeddings `[B, L, D]`, …, pooled embeddings `[B, P]`, …, as SD3's pipeline does."""

    def encode_prompt_mask(self, prompt: list[str], *, max_sequence_length: int) -> Tensor:
        """Tell text from padding in those embeddings: truth values `[B, L]`, true at text."""


class Latents(Protocol):
    """Latents by index."""

    def __len__(self) -> int:
        """Return how many there are."""

    def read(self, index: int, *, mirrored: bool = False) -> tuple[Tensor, Tensor | None]:
        """Return the mean `[C, h, w]` of a picture's latents and their standard deviation, None where it is 0."""

    def subset(self, indices: Sequence[int]) -> Latents:
        """Keep those at these indices, in this order."""

    def identity(self) -> Sequence[str]:
        """Return what tells each of them from others."""


class Texts(Protocol):
    """Embeddings of distinct captions, by row."""

    def read(self, row: int) -> dict[str, Tensor]:
        """Return `tokens` `[L, D]`, `pooled` `[P]` and `mask` `[L]`, false at padding."""


@dataclass(frozen=True)
class LatentsInMemory(Latents):
    """Latents without spread, `[N, C, h, w]`."""

    values: Tensor

    def __len__(self) -> int:
        return len(self.values)

    def read(self, index: int, *, mirrored: bool = False) -> tuple[Tensor, Tensor | None]:
        """Return one picture's latents; see `Latents`."""
        if mirrored:
            raise ValueError("these latents were not computed of mirrored pictures; set flip to 0")
        return self.values[index], None

    def subset(self, indices: Sequence[int]) -> LatentsInMemory:
        """Keep those at these indices, in this order."""
        return LatentsInMemory(self.values[torch.as_tensor(list(indices), dtype=torch.long)])

    def identity(self) -> Sequence[str]:
        """Return what tells each of them from others: the sum of its values."""
        return [f"{float(value.double().sum()):.17g}" for value in self.values]


@dataclass(frozen=True)
class TextEmbeddings(Texts):
    """Embeddings of distinct prompts, in memory.

    Attributes:
        tokens: `[U, L, D]`.
        pooled: `[U, P]`.
        mask: truth values `[U, L]`, false at padding.
    """

    tokens: Tensor
    pooled: Tensor
    mask: Tensor

    def read(self, row: int) -> dict[str, Tensor]:
        """Return one prompt's; see `Texts`."""
        return {"tokens": self.tokens[row], "pooled": self.pooled[row], "mask": self.mask[row]}


@dataclass(frozen=True)
class StoredLatents(Latents):
    """Latents in a store, by their keys: those of upright pictures and, where there are any, of mirrored ones."""

    store: TensorStore
    keys: tuple[tuple[str, ...], ...]  # for each side, one a sample

    def __len__(self) -> int:
        return len(self.keys[0])

    def read(self, index: int, *, mirrored: bool = False) -> tuple[Tensor, Tensor | None]:
        """Read one picture's latents; see `Latents`."""
        found = self.store[self.keys[int(mirrored)][index]]
        return found["mean"], found.get("deviation")

    def subset(self, indices: Sequence[int]) -> StoredLatents:
        """Keep those at these indices, in this order."""
        return StoredLatents(self.store, tuple(tuple(side[index] for index in indices) for side in self.keys))

    def identity(self) -> Sequence[str]:
        """Return what tells each of them from others: its key."""
        return self.keys[0]


@dataclass(frozen=True)
class StoredTexts(Texts):
    """Embeddings in a store, by their keys."""

    store: TensorStore
    keys: tuple[str, ...]

    def read(self, row: int) -> dict[str, Tensor]:
        """Read one caption's; see `Texts`."""
        return self.store[self.keys[row]]


@dataclass(frozen=True)
class EncodedPictures(Dataset[dict[str, Tensor]]):
    """Encoded pictures with their captions: one entry for each size that a picture is trained at.

    Attributes:
        latents: N of them.
        captions: N captions.
        text: the embeddings of the distinct captions.
        text_index: `[N]`, the row of `text` for each entry.
        empty: the embeddings of the empty prompt, which dropped captions take: `[1, L, D]`, `[1, P]` and `[1, L]`.
        groups: what entries must have in common to be in one batch: their size; none where all have the same.
        times: how often each is drawn in an epoch; none for once.
        flip: share of draws that are mirrored.
        seed: of what is random about a draw.
        skipped: pictures that could not be used.
        clouds: `[N, K, 3 + F]`, zeros for a picture without one; None where there are none at all.
        has_cloud: truth values `[N]`, with `clouds`.
        skipped_clouds: clouds that could not be read, whose pictures have none.
        places: the pictures' places in the source they came from.
        origin: digest of the model that encoded them, and that is trained on them.
    """

    latents: Latents
    captions: tuple[str, ...]
    text: Texts
    text_index: Tensor
    empty: TextEmbeddings
    groups: tuple[Hashable, ...] = ()
    times: tuple[float, ...] = ()
    flip: float = 0.0
    seed: int = 0
    skipped: tuple[SkippedPicture, ...] = ()
    clouds: Tensor | None = None
    has_cloud: Tensor | None = None
    skipped_clouds: tuple[SkippedPicture, ...] = ()
    places: tuple[int, ...] = ()
    origin: str = ""

    def __len__(self) -> int:
        return len(self.captions)

    def __getitem__(self, item: int | Draw) -> dict[str, Tensor]:
        """Return `latents` `[C, h, w]`, `tokens` `[L, D]`, `pooled` `[P]` and `mask` `[L]` of one picture.

        Where there are clouds, also `cloud` `[K, 3 + F]` and `has_cloud` `[]`. For a draw, `latents` is a sample of
        the VAE's posterior, perhaps of the mirrored picture, and there is `draw` `[]`, its number; for an index it is
        the posterior's mean.
        """
        index = item.index if isinstance(item, Draw) else item
        found = {"latents": self._latents(item), **self.text.read(int(self.text_index[index]))}
        if self.clouds is not None and self.has_cloud is not None:
            found |= {"cloud": self.clouds[index], "has_cloud": self.has_cloud[index]}
        return found | ({"draw": torch.tensor(item.number)} if isinstance(item, Draw) else {})

    def _latents(self, item: int | Draw) -> Tensor:
        if not isinstance(item, Draw):
            return self.latents.read(item)[0].float()
        generator = generator_of(self.seed, item.number, POSTERIOR)
        mirrored = self.flip > 0 and float(torch.rand((), generator=generator)) < self.flip
        mean, deviation = self.latents.read(item.index, mirrored=mirrored)  # [C, h, w]
        if deviation is None:
            return mean.float()
        return mean.float() + deviation.float() * torch.randn(mean.shape, generator=generator)

    def subset(self, indices: Sequence[int]) -> EncodedPictures:
        """Keep the pictures at these indices, in this order."""
        chosen = torch.as_tensor(list(indices), dtype=torch.long)
        return replace(
            self,
            latents=self.latents.subset(indices),
            captions=tuple(self.captions[index] for index in indices),
            text_index=self.text_index[chosen],
            groups=tuple(self.groups[index] for index in indices) if self.groups else (),
            times=tuple(self.times[index] for index in indices) if self.times else (),
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

    def digest(self) -> str:
        """Return a digest of what is trained on and in which order: captions, sizes, and the pictures themselves."""
        digest = hashlib.sha256()
        for parts in (self.captions, self.groups, self.times, self.latents.identity(), [self.origin]):
            digest.update(json.dumps([str(part) for part in parts]).encode())
        if self.clouds is not None:
            digest.update(self.clouds.numpy().tobytes())
        return digest.hexdigest()


def encode_captions(
    encoder: Encoder, captions: list[str], *, max_sequence_length: int = 256, device: torch.device | str = "cpu"
) -> TextEmbeddings:
    """Encode captions as the pipeline would for generation, without guidance; the result is on the CPU.

    Raises:
        ValueError: if embeddings are not finite.
    """
    with torch.no_grad():
        tokens, _, pooled, _ = encoder.encode_prompt(
            prompt=captions,
            prompt_2=None,
            prompt_3=None,
            device=torch.device(device),
            do_classifier_free_guidance=False,
            max_sequence_length=max_sequence_length,
        )
    bad = ~(finite_rows(tokens) & finite_rows(pooled))  # [B]
    if bad.any():
        raise ValueError(
            f"the text encoders gave NaN or infinite embeddings for {int(bad.sum())} of {len(captions)} captions, "
            f"such as {captions[int(bad.int().argmax())]!r}; fp16 that overflows is the usual cause: load the model "
            "in fp32 or bf16"
        )
    mask = encoder.encode_prompt_mask(captions, max_sequence_length=max_sequence_length)
    return TextEmbeddings(tokens.cpu(), pooled.cpu(), mask.cpu())


def finite_rows(values: Tensor) -> Tensor:
    """Tell, for each of B rows `[B, …]`, whether all of it is finite: `[B]`."""
    return torch.isfinite(values).flatten(1).all(dim=1)
