"""Tiny random causal language models, one maker for each row of the table, and what tests do with them."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import mmpreproj
from mmpreproj import PreProjConfig
from mmpreproj.patching.families import FAMILIES
from mmpreproj.patching.families.language import LANGUAGE

WIDTH, VOCABULARY, WINDOW = 32, 97, 8
PAD, BEGIN, END = 0, 1, 2
ROWS = tuple(family.model_class for family in LANGUAGE)
WINDOWED = ("MistralForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM")
BRIEF = ("GPTNeoXForCausalLM", "GPT2LMHeadModel", "LlamaForCausalLM", "Gemma3ForCausalLM")
"""One of each make, for what takes seconds: what stands beside attention, learned positions, and two norms around."""
BLOCKS = {family.model_class: family.blocks for family in FAMILIES}
ATTENTION = {family.model_class: family.sites[0].child for family in FAMILIES}
QUERIES = {"GPTNeoXForCausalLM": "query_key_value", "GPT2LMHeadModel": "c_attn"}
"""What LoRA goes on; `q_proj` elsewhere."""

_SIZES: dict[str, Any] = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 128,
}
_GPT2_NAMES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
}
_TOKENS = {"pad_token_id": PAD, "bos_token_id": BEGIN, "eos_token_id": END}
_GROUPED = {"num_key_value_heads": 2}
_HYBRID = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"],
    "tie_word_embeddings": False,  # or the last token comes again and again
}
_CLASSES: dict[str, tuple[type, type, dict[str, Any]]] = {
    "GPTNeoXForCausalLM": (GPTNeoXForCausalLM, GPTNeoXConfig, {}),
    "GPT2LMHeadModel": (GPT2LMHeadModel, GPT2Config, {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
    "LlamaForCausalLM": (LlamaForCausalLM, LlamaConfig, _GROUPED),
    "MistralForCausalLM": (MistralForCausalLM, MistralConfig, _GROUPED | {"head_dim": 8, "sliding_window": WINDOW}),
    "Qwen2ForCausalLM": (Qwen2ForCausalLM, Qwen2Config, _GROUPED),
    "Qwen3ForCausalLM": (Qwen3ForCausalLM, Qwen3Config, _GROUPED | {"head_dim": 16}),
    "GemmaForCausalLM": (GemmaForCausalLM, GemmaConfig, _GROUPED | {"head_dim": 16}),
    "Gemma2ForCausalLM": (Gemma2ForCausalLM, Gemma2Config, _GROUPED | {"head_dim": 16} | _HYBRID),
    "Gemma3ForCausalLM": (Gemma3ForCausalLM, Gemma3TextConfig, _GROUPED | {"head_dim": 16} | _HYBRID),
}


def make_model(row: str, *, seed: int = 0, **overrides: Any) -> nn.Module:
    """Build a row's tiny model in eval mode: two blocks of width 32, 97 tokens, the same weights for the same seed.

    Its weights are large enough for greedy texts to vary, and its norms are no identities. Settings go by Llama's
    names.

    Raises:
        KeyError: if the row has no tiny model yet; write one above.
    """
    model_class, config_class, further = _CLASSES[row]
    values = _SIZES | further | overrides
    if row == "GPT2LMHeadModel":
        values = {_GPT2_NAMES.get(key, key): value for key, value in values.items()}
    model = model_class(config_class(**values, **_TOKENS)).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in dict.fromkeys(model.parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * 0.2 if parameter.dim() > 1 else parameter + noise * 0.1)
    return model


def make_patched(row: str, *, std: float = 0.2, config: PreProjConfig | None = None, **overrides: Any) -> nn.Module:
    """Build a row's tiny model with an adapter at a size at which each of its terms matters."""
    model = make_model(row, **overrides)
    mmpreproj.patch(model, config)
    shake(model, std=std)
    return model


def shake(model: nn.Module, *, std: float = 0.2, seed: int = 2) -> None:
    """Draw an adapter's weights anew."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in mmpreproj.parameters(model):
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)


def make_ids(rows: int = 2, length: int = 17, *, seed: int = 1) -> Tensor:
    """Draw tokens `[rows, length]`, none of them special; longer than the sliding window."""
    return torch.randint(3, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def logits(model: nn.Module, ids: Tensor | None = None, **inputs: Any) -> Tensor:
    """Run a model without gradients and return its logits `[B, N, V]`."""
    with torch.no_grad():
        if ids is None and "inputs_embeds" not in inputs:
            ids = make_ids()
        return model(input_ids=ids, **inputs).logits


def generated(model: Any, ids: Tensor | None = None, *, tokens: int = 10, **settings: Any) -> Tensor:
    """Generate so many tokens after a prompt, greedily unless told otherwise."""
    ids = make_ids() if ids is None else ids
    settings = {"do_sample": False, "attention_mask": torch.ones_like(ids)} | settings
    return model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, **settings)


def blocks_of(model: nn.Module, row: str) -> nn.ModuleList:
    """Return a model's blocks."""
    return model.get_submodule(BLOCKS[row])


def attention_of(block: nn.Module, row: str) -> nn.Module:
    """Return a block's attention."""
    return getattr(block, ATTENTION[row])


def lora_target(row: str) -> str:
    """Name the map to queries."""
    return QUERIES.get(row, "q_proj")
