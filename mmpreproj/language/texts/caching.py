"""The cache of `datasets`: what was computed from text is kept there, and found by a digest of what it came from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datasets import Dataset

PACKING = "1"  # raise when text is packed in another way, so that nothing stale comes out of the cache
SHOWN_FROM = 20_000_000  # characters, from which work has a progress bar: tokenising takes half a minute
BATCH_CHARACTERS = 2_000_000  # worked on at once: some 200 MB where text is tokenised


def mapped(
    dataset: Dataset,
    function: Callable[..., Any],
    *,
    key: str,
    features: Mapping[str, Any],
    characters: int,
    **options: Any,
) -> Dataset:
    """Map batches of rows to other ones, which are kept on disk.

    Args:
        dataset: the rows, with `characters` of text in all, by which batches are sized.
        function: given a batch and the options' `fn_kwargs`; returns any number of rows.
        key: hexadecimal digits for all that the result depends on. What is kept under it is given back.
        features: columns of the result.
        characters: see `dataset`.
        options: for `datasets.Dataset.map`.
    """
    import datasets

    mean = max(characters // max(len(dataset), 1), 1)
    # One folder for all: what was loaded from a folder of its own would be kept in that one, which may be read-only.
    folder = Path(datasets.config.HF_DATASETS_CACHE) / "mmpreproj_text"
    with bars_from(characters):
        return dataset.map(
            function,
            batched=True,
            batch_size=min(max(BATCH_CHARACTERS // mean, 1), 1000),
            remove_columns=dataset.column_names,
            features=datasets.Features(features),
            new_fingerprint=key,
            cache_file_name=str(folder / f"{key}.arrow"),
            **options,
        )


def digest_of(*parts: Any) -> str:
    """Return 32 hexadecimal digits of values."""
    return hashlib.sha256(json.dumps([PACKING, *parts]).encode()).hexdigest()[:32]


@contextmanager
def bars_from(characters: int) -> Iterator[None]:
    """Hide the progress bars of `datasets` for work of seconds."""
    from datasets import utils

    if characters >= SHOWN_FROM or utils.are_progress_bars_disabled():
        yield
        return
    utils.disable_progress_bars()
    try:
        yield
    finally:
        utils.enable_progress_bars()
