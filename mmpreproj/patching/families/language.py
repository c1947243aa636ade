"""The rows of transformers' causal language models: one stream, and a gate of 1, so the paper's equation itself."""

from __future__ import annotations

from mmpreproj.patching.families.row import AttentionSite, Family, Stream

_TEXT = Stream("text", argument="hidden_states", position=0, output=0)
_BEFORE = "before attention, RMSNorm"
_SANDWICH = "1; but a norm of attention's output takes it and the skip together"


def _like_llama(model_class: str, *, gate: str = "1", settings: tuple[str, ...] = ()) -> Family:
    return Family(
        model_class=model_class,
        blocks="model.layers",
        sites=(AttentionSite("self_attn", (_TEXT,)),),
        width="config.hidden_size",
        heads="config.num_attention_heads",
        norm=_BEFORE,
        gate=gate,
        positions="rotary at queries and keys",
        settings=("num_key_value_heads", "intermediate_size", "vocab_size", *settings),
    )


LANGUAGE: tuple[Family, ...] = (
    Family(
        model_class="GPTNeoXForCausalLM",
        blocks="gpt_neox.layers",
        sites=(AttentionSite("attention", (_TEXT,)),),
        width="config.hidden_size",
        heads="config.num_attention_heads",
        norm="before attention, LayerNorm; the feed-forward is beside attention where use_parallel_residual is set",
        gate="1",
        positions="rotary at queries and keys",
        settings=("use_parallel_residual", "intermediate_size", "vocab_size"),
    ),
    Family(
        model_class="GPT2LMHeadModel",
        blocks="transformer.h",
        sites=(AttentionSite("attn", (_TEXT,)),),
        width="embed_dim",
        heads="num_heads",
        norm="before attention, LayerNorm",
        gate="1",
        positions="absolute, learned, in the embedding",
        settings=("n_inner", "vocab_size"),
    ),
    _like_llama("LlamaForCausalLM"),
    _like_llama("MistralForCausalLM"),
    _like_llama("Qwen2ForCausalLM"),
    _like_llama("Qwen3ForCausalLM"),
    _like_llama("GemmaForCausalLM"),
    _like_llama("Gemma2ForCausalLM", gate=_SANDWICH),
    _like_llama("Gemma3ForCausalLM", gate=_SANDWICH),
)
