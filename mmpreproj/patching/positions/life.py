"""Put an adapter's positions on a model, keep them in step with the rest of it, and take them off."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

from accelerate import cpu_offload
from diffusers.models.embeddings import PatchEmbed
from torch import nn

from mmpreproj.patching.config import PreProjConfig
from mmpreproj.patching.families import Family, PositionSeam
from mmpreproj.patching.following import follow_attentions
from mmpreproj.patching.lookup import attention_sites, root_adapters
from mmpreproj.patching.offloading import offloaded_to, placement
from mmpreproj.patching.positions.processor import is_ours, put_processor, restore_processor
from mmpreproj.patching.positions.root import (
    RootAdapter,
    RootLayer,
    attach_root,
    detach_root,
    has_root,
    is_model,
    root_layer,
)
from mmpreproj.patching.positions.settings import Positions


def settle_positions(model: nn.Module, config: PreProjConfig, family: Family) -> PreProjConfig:
    """Check that a model can have an adapter's positions, and fill in what they leave to the model.

    Raises:
        ValueError: if it cannot, with the reason.
    """
    if not config.needs_processor:
        return config
    if family.seam is None:
        raise ValueError(
            f"positions and mask_padding cannot be set on {type(model).__name__}: its row names no seam for them; "
            f"leave both out: the model keeps its own positions ({family.positions}), and what it lets attention "
            "see is set by the attention_mask it is called with"
        )
    for _, path, _, attention in attention_sites(model, family):
        found = type(getattr(attention, "processor", None)).__name__
        if not is_ours(attention) and found != family.seam.processor:
            raise ValueError(
                f"positions and mask_padding need the attention processor of {path} to be {family.seam.processor}, "
                f"which ours stands in for; found {found}. Undo what replaced it (IP-Adapter, PAG, "
                "fuse_qkv_projections, set_attn_processor) first"
            )
    if not isinstance(getattr(model, family.seam.patch_embedding, None), PatchEmbed):
        raise ValueError(f"positions need {type(model).__name__}.{family.seam.patch_embedding} to be a PatchEmbed")
    if config.positions is None:
        return config
    positions = _with_base_size(config.positions, model, family.seam)
    _check_head_width(positions, head_width(model, family))
    return replace(config, positions=positions)


def add_positions(model: nn.Module, family: Family, config: PreProjConfig, *, name: str) -> None:
    """Put an adapter's part at the model on it, and our processor on every joint attention, where it needs them."""
    if not config.needs_processor:
        return
    seam = cast(PositionSeam, family.seam)
    embedding = getattr(model, seam.patch_embedding)
    if not has_root(model):
        layer = RootLayer(family, head_width=head_width(model, family), patch_size=_setting(model, seam.patch_size))
        attach_root(model, layer.train(model.training))
    adapter = RootAdapter(config, device=placement(embedding)[0])
    device = offloaded_to(embedding)
    if device is not None:
        cpu_offload(adapter, execution_device=device)
    root_layer(model).adapters[name] = adapter.train(model.training)
    for _, _, _, attention in attention_sites(model, family):
        put_processor(attention)
    follow_attentions(model, name)


def remove_positions(model: nn.Module, name: str) -> None:
    """Take an adapter's part at a model off it; after the last one, processors and hooks are the base's."""
    owners = [module for module in model.modules() if has_root(module)]  # PEFT may have copied the patch embedding
    for layer in {root_layer(owner) for owner in owners}:
        if name in layer.adapters:
            del layer.adapters[name]
    for owner in owners:
        layer = root_layer(owner)
        if layer.adapters:
            continue
        if is_model(owner):
            for _, _, _, attention in attention_sites(owner, layer.family):
                restore_processor(attention)
        detach_root(owner)


def masks_padding(model: nn.Module, *, now: bool = True) -> bool:
    """Tell whether an adapter, or one that acts now, wants attention kept from the padding of texts."""
    return any(root.mask_padding and (root.acts or not now) for root in root_adapters(model))


@contextmanager
def without_positions(model: nn.Module) -> Iterator[None]:
    """Leave the absolute positions as the base has them for a `with` block in which the attentions are bare."""
    roots = list(root_adapters(model))
    for root in roots:
        root.suspended += 1
    try:
        yield
    finally:
        for root in roots:
            root.suspended -= 1


def head_width(model: nn.Module, family: Family) -> int:
    """Return the width of an attention head."""
    _, _, _, attention = next(attention_sites(model, family))
    heads: int = family.heads_of(attention)
    return family.width_of(attention) // heads


def _with_base_size(positions: Positions, model: nn.Module, seam: PositionSeam) -> Positions:
    if positions.scaling == "none" or positions.base_size is not None:
        return positions
    size = _setting(model, seam.sample_size) // _setting(model, seam.patch_size)
    if size < 2:
        raise ValueError(
            f"positions.scaling {positions.scaling!r} needs a base of at least 2 patches; this model's sample_size "
            f"gives {size}. Set positions.base_size"
        )
    return replace(positions, base_size=size)


def _check_head_width(positions: Positions, width: int) -> None:
    needed = 4 if positions.image == "2d" else 2
    if width % needed and positions.streams:
        raise ValueError(
            f"these positions need attention heads whose width is a multiple of {needed} channels; this model's are "
            f"{width} wide. Set positions.text and positions.image so that fewer are needed, or leave positions out"
        )
    if positions.scaling == "ntk" and width < 8:
        raise ValueError(f"positions.scaling 'ntk' needs heads of at least 8 channels; this model's have {width}")


def _setting(model: Any, name: str) -> int:
    return int(getattr(model.config, name))
