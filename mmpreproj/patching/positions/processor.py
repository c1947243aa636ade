"""The seam of positions: an attention processor that turns queries and keys, each stream by its own table.

Attention goes through diffusers' dispatch, so `set_attention_backend` and context parallelism act, as they do not on
stock SD3; and the padding of a text can be masked.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers.hooks.context_parallel import EquipartitionSharder, PartitionAnythingSharder
from diffusers.models.attention_dispatch import dispatch_attention_fn
from einops import rearrange
from torch import Tensor, nn

from mmpreproj.core.rotary import rotate
from mmpreproj.patching.layer import PreProjLayer
from mmpreproj.patching.positions.tables import RotaryTables

Tables = dict[str, RotaryTables]


class RotaryJointAttnProcessor:
    """Joint attention of SD3, image tokens first, as its stock processor computes it but for positions and mask.

    Without an adapter on the attention, tables or a mask it gives the stock processor's result, bit for bit.

    Args:
        original: the processor that this one stands in for, to be put back.
    """

    # diffusers' `set_attention_backend` and `enable_parallelism` look for these two.
    _attention_backend: Any = None
    _parallel_config: Any = None

    def __init__(self, original: Any) -> None:
        self.original = original

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_tables: Tables | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend over image `[B, N, D]` and text `[B, L, D]`, or over the image alone.

        Args:
            attn: the attention module.
            hidden_states: features of the image.
            encoder_hidden_states: features of the text; None in the second attention of SD3.5's blocks.
            attention_mask: `[B, N + L]`, true where a token may be attended to.
            rotary_tables: by adapter, packed, as the model's own pre-hook makes them.

        Returns:
            The image's result `[B, N, D]`, and the text's `[B, L, D]` where there is a text.
        """
        count = hidden_states.shape[1]
        projections = (attn.to_q, attn.to_k, attn.to_v)
        query, key, value = self._project(hidden_states, attn, projections, (attn.norm_q, attn.norm_k))
        query, key = self._rotate(query, key, attn, "image", rotary_tables)
        if encoder_hidden_states is None:
            attention_mask = None  # it is the text's
        else:
            projections = (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
            norms = (attn.norm_added_q, attn.norm_added_k)
            text_query, text_key, text_value = self._project(encoder_hidden_states, attn, projections, norms)
            text_query, text_key = self._rotate(text_query, text_key, attn, "text", rotary_tables)
            attention_mask = self._in_shares(attention_mask, text_query.shape[1])
            query = torch.cat([query, text_query], dim=1)  # [B, N + L, H, D/H]
            key = torch.cat([key, text_key], dim=1)
            value = torch.cat([value, text_value], dim=1)
        attended = dispatch_attention_fn(
            query,
            key,
            value,
            attn_mask=None if attention_mask is None else attention_mask[:, None, None],  # [B, 1, 1, N + L]
            backend=self._attention_backend,
            parallel_config=self._parallel_config,
        )
        attended = rearrange(attended, "b n h d -> b n (h d)").to(query.dtype)
        image = attn.to_out[1](attn.to_out[0](attended[:, :count]))  # [B, N, D]
        if encoder_hidden_states is None:
            return image
        text = attended[:, count:]
        return image, text if attn.context_pre_only else attn.to_add_out(text)  # [B, L, D]

    @staticmethod
    def _project(
        tokens: Tensor, attn: Any, projections: tuple[nn.Module, ...], norms: tuple[nn.Module | None, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Make queries, keys and values `[B, N, H, D/H]`, the first two normed where the model norms them."""
        query, key, value = (rearrange(to(tokens), "b n (h d) -> b n h d", h=attn.heads) for to in projections)
        norm_query, norm_key = norms
        query = query if norm_query is None else norm_query(query)
        key = key if norm_key is None else norm_key(key)
        return query, key, value

    def _rotate(
        self, query: Tensor, key: Tensor, attn: nn.Module, stream: str, tables: Tables | None
    ) -> tuple[Tensor, Tensor]:
        layer = attn._modules.get("preproj")
        if not isinstance(layer, PreProjLayer) or stream not in layer.rotated():
            return query, key
        if tables is None:
            raise RuntimeError(
                "this block was called without rotary tables, which the transformer makes when it is called as a "
                "whole: call model(…), not model.forward(…) or a block by itself"
            )
        turning = layer.rotation(stream, {name: table.unpacked() for name, table in tables.items()})
        if turning is None:
            return query, key
        cos, sin = (self._own_share(table, query.shape[1]) for table in turning)  # [N, H or 1, D/(2H)]
        return rotate(query, cos, sin), rotate(key, cos, sin)

    def _own_share(self, table: Tensor, count: int) -> Tensor:
        """Take this process's rows of a table `[N, …]` where context parallelism gives it a part of the tokens."""
        if self._parallel_config is None and table.shape[0] != count:
            raise RuntimeError(
                f"there are positions for {table.shape[0]} tokens, but {count} came: another hook changed the sizes "
                "after the model's rotary tables were made; register it with prepend=True"
            )
        if self._parallel_config is None or table.shape[0] == count:
            return table
        context = self._parallel_config.context_parallel_config
        anything = context.ulysses_anything or context.ring_anything
        shard = PartitionAnythingSharder.shard_anything if anything else EquipartitionSharder.shard
        return shard(table, 0, context._flattened_mesh)

    def _in_shares(self, mask: Tensor | None, text_length: int) -> Tensor | None:
        """Put a mask `[B, N + L]` in the order of keys, which under context parallelism come process by process."""
        if mask is None or self._parallel_config is None:
            return mask
        context = self._parallel_config.context_parallel_config
        if context.ring_degree > 1 or context.ulysses_anything:
            raise ValueError(
                "attention_mask works with plain Ulysses context parallelism only (ulysses_degree alone): diffusers' "
                "ring, and its splits of any length, give a process no mask of the others' keys"
            )
        shares = context.ulysses_degree
        text = mask[:, mask.shape[1] - shares * text_length :]
        image = mask[:, : mask.shape[1] - text.shape[1]]
        pairs = zip(image.chunk(shares, dim=1), text.chunk(shares, dim=1), strict=True)
        return torch.cat([part for pair in pairs for part in pair], dim=1)


def is_ours(attention: nn.Module) -> bool:
    """Tell whether an attention module is computed by our processor."""
    return isinstance(getattr(attention, "processor", None), RotaryJointAttnProcessor)


def put_processor(attention: Any) -> None:
    """Let our processor compute an attention module; nothing happens if it does."""
    if not is_ours(attention):
        attention.set_processor(RotaryJointAttnProcessor(attention.processor))


def restore_processor(attention: Any) -> None:
    """Put the processor back that ours stands in for, unless another one has been put in its place since."""
    if is_ours(attention):
        attention.set_processor(attention.processor.original)
