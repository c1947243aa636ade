"""Flux and what is built like it: double blocks over [text, image], then single blocks, which are left alone.

A single block reads both streams through one map and computes attention and feed-forward side by side from the same
normed tokens: there is no attention output of a stream to add a skip to.
"""

from __future__ import annotations

from mmpreproj.patching.families.row import AttentionSite, Family, Stream

_IMAGE = Stream("image", argument="hidden_states", position=0, output=0)
_TEXT = Stream("text", argument="encoder_hidden_states", position=1, output=1)
_SITES = (AttentionSite("attn", (_IMAGE, _TEXT)),)


def _like_flux(
    model_class: str, *, norm: str = "AdaLN-Zero", gate: str = "gate_msa per stream", axes: int = 3
) -> Family:
    return Family(
        model_class=model_class,
        blocks="transformer_blocks",
        sites=_SITES,
        width="query_dim",
        heads="heads",
        norm=norm,
        gate=gate,
        positions=f"rotary at queries and keys, over {axes} axes of text and image",
        unread=("text",),
        followed_by="single_transformer_blocks",
        settings=("num_single_layers", "joint_attention_dim"),
    )


FLUX: tuple[Family, ...] = (
    _like_flux("FluxTransformer2DModel"),
    _like_flux("FluxControlNetModel"),
    _like_flux("ChromaTransformer2DModel", norm="AdaLN whose shifts, scales and gates one small network gives"),
    _like_flux("BriaTransformer2DModel"),
    _like_flux(
        "BriaFiboTransformer2DModel",
        gate="gate_msa per stream; before each block, half the text's channels are replaced by a layer of the text "
        "encoder, and with them what a skip added there",
    ),
    _like_flux("LongCatImageTransformer2DModel"),
    _like_flux("OvisImageTransformer2DModel"),
    _like_flux(
        "Flux2Transformer2DModel",
        norm="LayerNorm, and one modulation per stream that all blocks share",
        gate="gate_msa per stream, the same in all blocks",
        axes=4,
    ),
)
