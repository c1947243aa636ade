"""Which documents are trained on, which are held out, and in which order."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from mmpreproj.language.config import TextSource
from mmpreproj.language.texts.caching import digest_of, mapped
from mmpreproj.training.config.section import ConfigError

if TYPE_CHECKING:
    from datasets import Dataset

MEASURES = ("content", "alike", "characters", "bytes")
ROLES = ("train", "validation", "test")


@dataclass(frozen=True)
class Split:
    """Documents of one split: rows of a data set, in order, and what was measured of each; all `[D]`."""

    documents: Dataset
    rows: NDArray[np.int64]
    content: NDArray[np.int64]
    alike: NDArray[np.int64]
    characters: NDArray[np.int64]
    bytes: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, places: NDArray[np.int64]) -> Split:
        """Return some of the documents, in an order of their own."""
        values = {name: getattr(self, name)[places] for name in ("rows", *MEASURES)}
        return Split(self.documents, **values)


def split_documents(parts: Mapping[str, Dataset], source: TextSource, origin: str) -> dict[str, Split]:
    """Leave out empty documents, hold out what the source has no split of, and put documents in order."""
    running = source.separator == "none"
    splits = {}
    for role, part in parts.items():
        splits[role] = _measured(part, source.split_seed, keep_blank=running)
        if len(splits[role]) == 0:
            where = f"dataset {source.dataset!r}" if source.dataset else f"files {', '.join(source.files)}"
            raise ConfigError(
                f"{origin}: {role}: no document of {where} has text, of {len(part)} read; name other text or another "
                "column"
            )
    missing = [role for role in ("test", "validation") if role not in splits]  # in a running text, test is the end
    if missing:
        train = splits["train"]
        groups = np.arange(len(train))[::-1] if running else train.alike
        try:
            rows = hold_out(groups, train.characters, missing, share=source.held_out)
        except ValueError as error:
            raise ConfigError(f"{origin}: {error}; {_way_out(source)}") from error
        splits |= {role: train.take(chosen) for role, chosen in rows.items()}
    if running:
        return {role: splits[role] for role in ROLES}
    return {role: splits[role].take(_order(len(splits[role]), source.split_seed)) for role in ROLES}


def _order(count: int, seed: int) -> NDArray[np.int64]:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed)).numpy()


def _way_out(source: TextSource) -> str:
    if source.dataset:
        return "name splits that the data set has, or other data"
    if source.document_separator is None:
        return "name more files, or set document_separator to a string that stands between the documents of a file"
    return f"name more files, or another document_separator; {source.document_separator!r} is too rare in these"


def _measured(documents: Dataset, seed: int, *, keep_blank: bool) -> Split:
    """Measure documents, and leave out those that are empty or, unless they are kept, blank."""
    import datasets

    measured = mapped(
        documents,
        _measure,
        key=digest_of("measure", documents._fingerprint, seed),
        features={name: datasets.Value("int64") for name in (*MEASURES, "blank")},
        fn_kwargs={"seed": seed},
        characters=_size(documents),
    )
    values = measured.with_format("numpy")[:]
    everything = Split(documents, np.arange(len(documents)), *(values[name] for name in MEASURES))
    return everything.take(np.flatnonzero(values["bytes"] if keep_blank else values["blank"] == 0))


def _size(documents: Dataset) -> int:
    """Return the bytes that rows take on disk, about as many as characters."""
    return int(documents.data.nbytes)


def _measure(batch: Mapping[str, Sequence[str | None]], *, seed: int) -> dict[str, list[int]]:
    """Hash each document, as it is and without blanks around it, and count what it has."""
    found: dict[str, list[int]] = {name: [] for name in (*MEASURES, "blank")}
    for text in (text or "" for text in batch["text"]):
        data, bare = text.encode(errors="surrogatepass"), text.strip()
        found["content"].append(_number(data, 0))
        found["alike"].append(_number(bare.encode(errors="surrogatepass"), seed))
        found["characters"].append(len(text))
        found["bytes"].append(len(data))
        found["blank"].append(int(not bare))
    return found


def _number(data: bytes, seed: int) -> int:
    digest = hashlib.blake2b(data, digest_size=8, key=seed.to_bytes(8, "little")).digest()
    return int.from_bytes(digest, "little", signed=True)


def hold_out(
    groups: NDArray[np.int64], characters: NDArray[np.int64], roles: Sequence[str], *, share: float
) -> dict[str, NDArray[np.int64]]:
    """Share documents out by whole groups.

    Groups are taken in the order of their numbers until they have the share of all characters. One with more than
    twice that is passed over, so that a book among leaflets does not become the whole of what is held out.

    Args:
        groups: what must stay together, a number per document: `[D]`.
        characters: length of each document: `[D]`.
        roles: what is held out, in this order, each with the share.
        share: of all characters.

    Returns:
        Indices of documents for `train` and each of the roles, in ascending order.

    Raises:
        ValueError: if there are not as many groups as it takes.
    """
    numbers, place = np.unique(groups, return_inverse=True)
    if len(numbers) <= len(roles):
        raise ValueError(
            f"{', '.join(['train', *roles])} need a document each; different documents there are: {len(numbers)}"
        )
    sizes = np.bincount(place, weights=characters)
    target = share * sizes.sum()
    taken = np.zeros(len(numbers), dtype=np.int64)  # 0 for train, else 1 + index of the role
    for role in range(1, len(roles) + 1):
        fitting = np.flatnonzero((taken == 0) & (sizes <= 2 * target))
        if len(fitting) == 0:
            left = np.flatnonzero(taken == 0)
            fitting = left[[np.argmin(sizes[left])]]
        before = np.cumsum(sizes[fitting]) - sizes[fitting]
        chosen = fitting[before < target]
        left_over = int((taken == 0).sum()) - len(roles) + role - 1  # each further role and train need one
        taken[chosen[:left_over]] = role
    return {
        role: np.flatnonzero(taken[place] == number).astype(np.int64) for number, role in enumerate(["train", *roles])
    }
