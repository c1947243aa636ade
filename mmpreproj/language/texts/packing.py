"""Tokenise documents and pack them for causal language models: blocks to train on, running tokens to evaluate on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mmpreproj.language.config import TextSource
from mmpreproj.language.texts.caching import digest_of, mapped
from mmpreproj.language.texts.documents import read_documents
from mmpreproj.language.texts.splits import ROLES, Split, split_documents
from mmpreproj.training.config.section import ConfigError

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class TextCounts:
    """How much text a split has.

    Attributes:
        documents: those that are not empty.
        tokens: with the tokens that begin and end documents; of train, with the incomplete block that is dropped.
        characters: of the documents alone.
        bytes: of the documents alone, in UTF-8.
    """

    documents: int
    tokens: int
    characters: int
    bytes: int


@dataclass(frozen=True)
class PackedText:
    """Text as a causal language model is trained and evaluated on it.

    Attributes:
        train: rows of `input_ids`, each `[length]`, int64 as read; on disk, mapped into memory.
        validation: the tokens of all documents, one after the other: `[T]`, int64.
        test: the same of the documents that results are reported on: `[T]`, int64.
        beginning: the token at the beginning of each document, or of the whole text with `separator: none`; None for
            tokenizers that add none. Its models need it at the start of a window, too.
        digest: of all that went in: documents and their order, tokenizer, length, separator; 32 hexadecimal digits.
        counts: of each split.
    """

    train: Dataset
    validation: Tensor
    test: Tensor
    beginning: int | None
    digest: str
    counts: Mapping[str, TextCounts]


def pack_text(source: TextSource, tokenizer: PreTrainedTokenizerBase, *, length: int, origin: str) -> PackedText:
    """Read text, tokenise it and pack it.

    Documents are joined in an order shuffled by `split_seed` (or, with `separator: none`, in their own) and cut into
    blocks; the last, incomplete one is dropped. Tokenizers that begin a text with a token by themselves, as those of
    Llama and Gemma do, have it at the beginning of each document: their models were trained so. Each stage is kept in
    the cache of `datasets` and found there by what went in. Of several processes, let the first go ahead.

    Args:
        source: where the text is and how it is split.
        tokenizer: that of the model.
        length: tokens of a block.
        origin: what errors call the configuration.

    Returns:
        The blocks, the tokens and what they come from.

    Raises:
        ConfigError: if the text cannot be read, split or fill a block; the field and the way out are named.
        ImportError: if `datasets` is not installed.
    """
    if length < 2:
        raise ConfigError(f"{origin}: length: a block needs 2 tokens or more, to predict one; got {length}")
    beginning = beginning_token(tokenizer)
    end = _end_token(tokenizer, source.separator, origin)
    each = source.separator == "eos"
    marks = ([beginning] if each and beginning is not None else [], [] if end is None else [end])
    first = [] if each or beginning is None else [beginning]
    vocabulary = tokenizer_digest(tokenizer)
    splits = split_documents(read_documents(source, origin=origin), source, origin)
    keys, tokens, counts = {}, {}, {}
    for role, split in splits.items():
        keys[role] = digest_of(vocabulary, marks, hashlib.sha256(split.content.tobytes()).hexdigest())
        tokens[role] = _tokenised(split, tokenizer, marks, keys[role])
        number = len(first) + sum(len(part) for part in _parts(tokens[role]))
        counts[role] = TextCounts(len(split), number, int(split.characters.sum()), int(split.bytes.sum()))
        if number < 2:
            raise ConfigError(
                f"{origin}: {role} has {number} tokens, of which none can be predicted; give it more text"
            )
    if counts["train"].tokens < length:
        raise ConfigError(
            f"{origin}: train has {counts['train'].tokens} tokens, too few for one block of length {length}; give "
            "more text or a smaller length"
        )
    return PackedText(
        train=_blocks(tokens["train"], length, first, keys["train"], counts["train"].characters),
        validation=_running(tokens["validation"], first),
        test=_running(tokens["test"], first),
        beginning=beginning,
        digest=digest_of(length, source.separator, first, [keys[role] for role in ROLES]),
        counts=counts,
    )


# --- tokens at the beginning and the end ---


def beginning_token(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the token that a tokenizer puts before a text by itself, None if it puts none.

    Decided by tokenising with and without special tokens. Only the beginning-of-text token counts.
    """
    bare, full = (list(tokenizer("a", add_special_tokens=special)["input_ids"]) for special in (False, True))
    token = tokenizer.bos_token_id
    return int(token) if token is not None and full[:1] == [token] and bare[:1] != [token] else None


def _end_token(tokenizer: PreTrainedTokenizerBase, separator: str, origin: str) -> int | None:
    if separator == "none":
        return None
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            f"{origin}: separator: 'eos' needs an end-of-text token, and the tokenizer {tokenizer.name_or_path!r} has "
            "none; set its eos_token, or separator: none"
        )
    return int(tokenizer.eos_token_id)


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return hexadecimal digits of all that decides how a tokenizer cuts text."""
    if tokenizer.is_fast:
        state = json.loads(tokenizer.backend_tokenizer.to_str())
        state |= {"truncation": None, "padding": None}
    else:
        state = sorted((token, int(number)) for token, number in tokenizer.get_vocab().items())
    special = [tokenizer.bos_token_id, tokenizer.eos_token_id]
    return digest_of(type(tokenizer).__name__, state, special)


# --- tokens ---


def _tokenised(split: Split, tokenizer: PreTrainedTokenizerBase, marks: Any, key: str) -> Dataset:
    import datasets

    return mapped(
        split.documents.select(split.rows),
        _tokenise,
        key=key,
        features={"input_ids": datasets.Sequence(datasets.Value("int32"))},
        fn_kwargs={"tokenizer": tokenizer, "marks": marks},
        characters=int(split.characters.sum()),
    )


def _tokenise(
    batch: Mapping[str, Sequence[str]], *, tokenizer: PreTrainedTokenizerBase, marks: tuple[list[int], list[int]]
) -> dict[str, list[list[int]]]:
    """Tokenise documents and mark where they begin and end."""
    encoded = tokenizer(
        list(batch["text"]),
        add_special_tokens=False,
        padding=False,
        truncation=False,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,  # documents are longer than the model's context: they are cut into blocks
    )
    begin, end = marks
    return {"input_ids": [[*begin, *tokens, *end] for tokens in encoded["input_ids"]]}


def _parts(tokens: Dataset) -> Iterator[NDArray[np.int32]]:
    """Give tokens as they lie on disk, some documents at a time: `[T]` each."""
    for chunk in tokens.data.column("input_ids").chunks:
        yield chunk.flatten().to_numpy()


def _running(tokens: Dataset, first: Sequence[int]) -> Tensor:
    """Join tokens: `[T]`."""
    return torch.from_numpy(np.concatenate([np.array(first, np.int32), *_parts(tokens)]).astype(np.int64))


def _blocks(tokens: Dataset, length: int, first: Sequence[int], key: str, characters: int) -> Dataset:
    """Join tokens and cut them into rows of `length`, those of a batch that are left over going to the next."""
    import datasets
    import pyarrow

    left = np.array(first, np.int32)

    def cut(table: Any) -> Any:
        nonlocal left
        flat = np.concatenate([left, *(chunk.flatten().to_numpy() for chunk in table["input_ids"].chunks)])
        whole = len(flat) // length * length
        left = flat[whole:].copy()
        rows = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(flat[:whole]), length)
        return pyarrow.table({"input_ids": rows})

    blocks = mapped(
        tokens.with_format("arrow"),
        cut,
        key=digest_of("blocks", key, length, list(first)),
        features={"input_ids": datasets.Sequence(datasets.Value("int32"), length=length)},
        characters=characters,
    )
    return blocks.with_format("torch")
