"""The third seam: points through the patched blocks, as joint blocks with their attention removed.

A point's token goes `p ← p + gate ⊙ W_skip·x_tilde(adaLN(p; temb))` and through the feed-forward behind it, by each
block's own shared modules. No point sees another, so a cloud has no order, and costs what its points cost.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from mmpreproj.core.point_embedding import PointEmbedding
from mmpreproj.core.point_head import PointHead
from mmpreproj.core.point_pooling import PointPooling
from mmpreproj.core.sharding import is_sharded
from mmpreproj.core.unit_ball import unit_ball
from mmpreproj.patching.families import Family, PointSeam, joint_blocks
from mmpreproj.patching.hooks import CHILD
from mmpreproj.patching.layer import PreProjLayer
from mmpreproj.patching.model_part import ModelPart
from mmpreproj.patching.onloading import onloaded
from mmpreproj.patching.points.settings import PointPathConfig

POINT_CHILD = "preproj_points"
POINTS_AT_ONCE = 65_536
POINTS_AT_ONCE_ON_CPU = 2048  # what stays in its caches: a fifth faster than all of 32,768 (benchmarks/point_cost.py)


class PointAdapter(ModelPart):
    """One adapter's weights around the blocks: points to tokens, tokens to conditioning and to velocities.

    Args:
        config: of the path.
        width: token width D.
        device: where the weights are made.
        dtype: dtype of the weights.
    """

    def __init__(
        self,
        config: PointPathConfig,
        *,
        width: int,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(device=device)
        self.normalise, self.spread, self.channels = config.normalise, config.spread, 3 + config.features
        self.shown = config.shown
        placed: dict[str, Any] = {"device": device, "dtype": dtype}
        self.embedding = PointEmbedding(width, features=config.features, frequencies=config.frequencies, **placed)
        self.pooling = PointPooling(width, **placed) if config.condition else None
        self.head = PointHead(width, features=config.features, **placed) if config.generate else None

    @property
    def acts(self) -> bool:
        """Whether the adapter takes part, at scales of its blocks whose mean, the path's own, is not 0."""
        return super().acts and self.scale.factor != 0

    def embed_cloud(self, points: Tensor, mask: Tensor) -> Tensor:
        """Turn clouds `[B, P, 3 + F]` as they come, with padding where the mask is false, into tokens `[B, P, D]`."""
        wide = points.to(torch.promote_types(points.dtype, torch.float32))
        kept = wide.masked_fill(~mask.unsqueeze(-1), 0.0)
        if self.normalise == "unit_ball":
            kept, _, _ = unit_ball(kept, mask)
        return self.embed(self.widen(kept))

    def widen(self, points: Tensor) -> Tensor:
        """Make points `[..., 3 + F]` as wide as the noise: coordinates, not features, times the spread."""
        return torch.cat([points[..., :3] * self.spread, points[..., 3:]], dim=-1)

    def narrow(self, points: Tensor) -> Tensor:
        """Bring points `[..., 3 + F]` as wide as the noise back to their own size; the inverse of `widen`."""
        return torch.cat([points[..., :3] / self.spread, points[..., 3:]], dim=-1)

    def embed(self, points: Tensor) -> Tensor:
        """Turn points `[B, P, 3 + F]` as wide as the noise into tokens `[B, P, D]`."""
        return self.embedding(points)

    def condition(self, tokens: Tensor, mask: Tensor, temb: Tensor) -> Tensor:
        """Add what a cloud's tokens `[B, P, D]` say to the conditioning `[B, D]`."""
        return temb + self.scale(cast(PointPooling, self.pooling)(tokens, mask).to(temb.dtype))

    def velocity(self, tokens: Tensor, temb: Tensor) -> Tensor:
        """Turn tokens `[B, P, D]` into velocities `[B, P, 3 + F]`."""
        return cast(PointHead, self.head)(tokens, temb)


class PointLayer(nn.Module):
    """The child `preproj_points` of a patched model: the point path, by its adapter's name.

    Args:
        family: the row of the table.
    """

    def __init__(self, family: Family) -> None:
        super().__init__()
        self.family = family
        self.adapters = nn.ModuleDict()

    @property
    def seam(self) -> PointSeam:
        """Where points go through the model."""
        return cast(PointSeam, self.family.points)

    @property
    def path(self) -> PointAdapter:
        """The one path that there is."""
        return cast(PointAdapter, next(iter(self.adapters.values())))


@dataclass(frozen=True)
class PointCall:
    """Clouds on their way to a model's conditioning, in the place of the pooled text.

    No tuple on purpose: what moves or casts a call's tensors looks into tuples, and would round the coordinates.

    Attributes:
        pooled: what was there, `[B, D_pooled]`.
        points: `[B, P, 3 + F]`.
        mask: truth values `[B, P]`, false at padding.
        model: whose path and blocks the points go through.
    """

    pooled: Tensor
    points: Tensor
    mask: Tensor
    model: nn.Module


def walk(model: nn.Module, family: Family, tokens: Tensor, temb: Tensor) -> Tensor:
    """Send points' tokens `[B, P, D]` through every patched block of a model, under the conditioning `[B, D]`.

    Source: the joint block of arXiv 2403.03206, figure 2, without its attention; the skip of arXiv 2604.10791.
    """
    seam = cast(PointSeam, family.points)
    checkpointed = torch.is_grad_enabled() and bool(getattr(model, "gradient_checkpointing", False))
    for block in joint_blocks(model, family):
        if not any(layer.carries_skip(seam.stream) for _, layer in _layers(block, family)):
            continue
        _check_whole(block)
        with onloaded(block):
            if checkpointed:
                tokens = cast(Any, model)._gradient_checkpointing_func(_step, block, family, tokens, temb)
            else:
                parts = [_step(block, family, part, temb) for part in _parts(tokens)]
                tokens = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
    return tokens


def _parts(tokens: Tensor) -> tuple[Tensor, ...]:
    """Split tokens `[B, P, D]`, so that what a block makes of them stays small; whole where gradients keep it all."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return (tokens,)
    most = POINTS_AT_ONCE_ON_CPU if tokens.device.type == "cpu" else POINTS_AT_ONCE
    return tokens.split(max(1, most // len(tokens)), dim=1)


def _step(block: nn.Module, family: Family, tokens: Tensor, temb: Tensor) -> Tensor:
    """Take points' tokens `[B, P, D]` through one block."""
    seam = cast(PointSeam, family.points)
    normed, gate, shift, scale, forward_gate, *second = getattr(block, seam.norm)(tokens, emb=temb)
    ways = {False: (normed, gate), True: tuple(second)}  # by whether an attention is the second one
    for dual, layer in _layers(block, family):
        features, its_gate = ways[dual]
        _, skip = layer(features, seam.stream)  # [B, P, D]
        if skip is not None:
            tokens = tokens + its_gate[:, None] * skip
    hidden = getattr(block, seam.feed_forward_norm)(tokens) * (1 + scale[:, None]) + shift[:, None]
    return tokens + forward_gate[:, None] * getattr(block, seam.feed_forward)(hidden)


def _layers(block: nn.Module, family: Family) -> Iterator[tuple[bool, PreProjLayer]]:
    """Iterate over the layers of a block, and whether theirs is the second attention."""
    for site in family.sites:
        attention = getattr(block, site.child, None)
        layer = None if attention is None else attention._modules.get(CHILD)
        if isinstance(layer, PreProjLayer):
            yield site.dual, layer


def _check_whole(block: nn.Module) -> None:
    """Refuse a block whose weights FSDP has spread over processes: it gathers them for the block's own call alone."""
    strategy = getattr(getattr(block, "sharding_strategy", None), "name", "NO_SHARD")  # of FSDP's first version
    if strategy != "NO_SHARD" or any(is_sharded(parameter) for parameter in block.parameters()):
        raise RuntimeError(
            "points cannot go through blocks that FSDP shards over processes, which gathers a block's weights only "
            "when the block itself is called; train points with DistributedDataParallel, or without shards"
        )
