"""How long texts are where a call does not say: as long as they were in training, where that is stored.

An adapter keeps the length in its own file. A model without one keeps it in `model_index.json`, as a private setting,
which stock diffusers passes over without a word.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmpreproj.patching.text_length import check_text_length, text_length
from mmpreproj.pipelines.adapter_folder import snapshot_of

LENGTH_KEY = "_max_sequence_length"
STOCK_LENGTH = 256
INDEX_NAME = "model_index.json"


def default_length(pipe: Any) -> int:
    """Return the length, in tokens, that a pipeline's texts have where a call names none.

    Args:
        pipe: a `PreProjSD3Pipeline`.
    """
    of_adapters = pipe._adapter_length if pipe.transformer is None else text_length(pipe.transformer)
    found = of_adapters if of_adapters is not None else pipe.config.get(LENGTH_KEY)
    return STOCK_LENGTH if found is None else int(found)


def stored_length(source: str, components: Mapping[str, Any]) -> int | None:
    """Read the length that a pipeline's `model_index.json` holds; None where it holds none.

    Args:
        source: the folder or the hub id that it was loaded from.
        components: its components by name; they tell which snapshot of a hub id was loaded.

    Raises:
        ValueError: if it is no length.
    """
    folder = Path(source) if Path(source).is_dir() else snapshot_of(source, components)
    if folder is None or not (folder / INDEX_NAME).is_file():
        return None
    length = json.loads((folder / INDEX_NAME).read_text(encoding="utf-8")).get(LENGTH_KEY)
    if length is None:
        return None
    try:
        check_text_length(length)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{folder / INDEX_NAME}: {LENGTH_KEY}: {error}") from error
    return int(length)
