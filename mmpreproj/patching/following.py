"""Keep what adapters have at the model itself in step with their parts at the attentions."""

from __future__ import annotations

from torch import nn

from mmpreproj.patching.lookup import block_of, model_parts, named_adapters


def follow_attentions(model: nn.Module, name: str) -> None:
    """Give an adapter's parts at the model the switch of the others, and the mean of its blocks' scales."""
    members = {block_of(path): adapter for path, adapter in named_adapters(model, name)}
    for part in model_parts(model, name) if members else ():
        part.scale.set(sum(adapter.scale.factor for adapter in members.values()) / len(members))
        part.has_strength = any(adapter.scale.factor != 0 for adapter in members.values())
        part.enabled = any(adapter.enabled for adapter in members.values())
        part.suspended = min(adapter.suspended for adapter in members.values())
