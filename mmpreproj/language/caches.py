"""How many bytes a language model keeps of what it has read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mmpreproj.language.evaluation.scoring import evaluation_mode, longest_input

TOKENS = 32


def cache_bytes(model: nn.Module, *, tokens: int = TOKENS) -> int:
    """Measure what a model's own kind of cache holds after a short text, in bytes; its mode is restored.

    Args:
        model: causal language model of transformers, patched or not.
        tokens: length of the text, at most what the model reads.
    """
    tokens = min(tokens, longest_input(model))
    device = next(model.parameters()).device
    with evaluation_mode(model):
        read: Any = model(input_ids=torch.zeros(1, tokens, dtype=torch.long, device=device), use_cache=True)
    cache = read["cache" if "cache" in read else "past_key_values"]  # so called before transformers 5.24
    return sum(value.nbytes for layer in cache.layers for value in vars(layer).values() if isinstance(value, Tensor))
