"""The table of model families: where the joint attention sits, and which argument is which stream.

A family is data. To patch a model that is not listed, write a row of your own and pass it to `patch(family=…)`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Stream:
    """One modality's tokens on their way through an attention module.

    Attributes:
        name: `"image"` or `"text"`.
        argument: the keyword of the attention's `forward` that brings the normed tokens `[B, N, D]`.
        position: the place of that argument in a positional call.
        output: the index of the stream's result in the attention's output tuple (0 for a lone tensor).
        discarded_by: an attribute of the attention module that is true where the block throws this output away; such
            a stream is pre-projected (it feeds keys and values) but gets no skip.
    """

    name: str
    argument: str
    position: int
    output: int
    discarded_by: str | None = None

    def is_discarded(self, attention: nn.Module) -> bool:
        """Tell whether the block throws this stream's attention output away."""
        return self.discarded_by is not None and bool(getattr(attention, self.discarded_by))


@dataclass(frozen=True)
class AttentionSite:
    """An attention module inside a block: the child's name, its streams, and whether it is a second attention."""

    child: str
    streams: tuple[Stream, ...]
    dual: bool = False


@dataclass(frozen=True)
class Argument:
    """An argument of a model's `forward`: its keyword, and its place in a positional call."""

    name: str
    place: int

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the argument's value in a call, None where it is not given."""
        return args[self.place] if self.place < len(args) else kwargs.get(self.name)

    def replace(
        self, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return a call's arguments with another value for this one."""
        if self.place < len(args):
            return (*args[: self.place], value, *args[self.place + 1 :]), kwargs
        return args, {**kwargs, self.name: value}


@dataclass(frozen=True)
class PositionSeam:
    """Where the positions of a model can be set: what its `forward` is given, and what adds absolute ones.

    Attributes:
        latents: the argument that brings `[B, C, H, W]`.
        text: the argument that brings the text `[B, L, D]`.
        attention_kwargs: the argument whose entries every joint attention is called with.
        patch_embedding: child that cuts latents into patches and adds the sin-cos table, a diffusers `PatchEmbed`.
        patch_size: name in the model's config of the side of a patch, in latent cells.
        sample_size: name in the model's config of the side of the pictures it was made for, in latent cells.
        processor: class name of the attention processor that ours stands in for.
    """

    latents: Argument
    text: Argument
    attention_kwargs: Argument
    patch_embedding: str
    patch_size: str
    sample_size: str
    processor: str


@dataclass(frozen=True)
class PointSeam:
    """Where points can go through a model: what makes the conditioning, and a block's parts around its attention.

    Attributes:
        latents: the argument that brings `[B, …]`, and so the batch size.
        pooled: the argument whose value reaches `conditioning` unchanged.
        attention_kwargs: the argument whose entries every joint attention is called with.
        conditioning: child that makes the conditioning `temb` `[B, D]` from the timestep and `pooled`.
        norm: a block's adaLN of the stream whose way points go: it takes tokens and `emb`, and gives normed tokens,
            gate, and shift, scale and gate of the feed-forward; for a second attention normed tokens and gate more.
        feed_forward_norm: a block's norm before its feed-forward.
        feed_forward: a block's feed-forward.
        stream: the stream whose adapter weights points take where each has its own.
    """

    latents: Argument
    pooled: Argument
    attention_kwargs: Argument
    conditioning: str
    norm: str
    feed_forward_norm: str
    feed_forward: str
    stream: str = "image"


@dataclass(frozen=True)
class Family:
    """One row of the table.

    Attributes:
        model_class: name of the model class; subclasses are covered too.
        blocks: name of the module list that holds the joint blocks.
        sites: the attention modules of a block.
        width: attribute of an attention module that gives the token width D.
        heads: attribute of an attention module that gives the number of heads.
        norm: what stands before the attention.
        gate: what multiplies the attention output, and so the skip, before the residual sum.
        positions: how the stock model encodes position.
        settings: names in the model's config that, besides width, depth and heads, set one base apart from another.
        seam: where positions can be set; None where they cannot be.
        points: where points can go; None where they cannot.
    """

    model_class: str
    blocks: str
    sites: tuple[AttentionSite, ...]
    width: str
    heads: str
    norm: str
    gate: str
    positions: str
    settings: tuple[str, ...] = ()
    seam: PositionSeam | None = None
    points: PointSeam | None = None


_IMAGE = Stream("image", argument="hidden_states", position=0, output=0)
_TEXT = Stream("text", argument="encoder_hidden_states", position=1, output=1, discarded_by="context_pre_only")

FAMILIES: tuple[Family, ...] = (
    Family(
        model_class="SD3Transformer2DModel",
        blocks="transformer_blocks",
        sites=(
            AttentionSite("attn", (_IMAGE, _TEXT)),
            AttentionSite("attn2", (_IMAGE,), dual=True),
        ),
        width="query_dim",
        heads="heads",
        norm="AdaLN-Zero (AdaLN-Continuous for the text of the last block)",
        gate="gate_msa per stream, gate_msa2 for attn2",
        positions="absolute sin-cos in the patch embedding",
        settings=("qk_norm", "dual_attention_layers"),
        seam=PositionSeam(
            latents=Argument("hidden_states", 0),
            text=Argument("encoder_hidden_states", 1),
            attention_kwargs=Argument("joint_attention_kwargs", 5),
            patch_embedding="pos_embed",
            patch_size="patch_size",
            sample_size="sample_size",
            processor="JointAttnProcessor2_0",
        ),
        points=PointSeam(
            latents=Argument("hidden_states", 0),
            pooled=Argument("pooled_projections", 2),
            attention_kwargs=Argument("joint_attention_kwargs", 5),
            conditioning="time_text_embed",
            norm="norm1",
            feed_forward_norm="norm2",
            feed_forward="ff",
        ),
    ),
)


def find_family(model: nn.Module) -> Family:
    """Find the row for a model by its class or a base class of it.

    Raises:
        TypeError: if the model has no joint attention that the table knows.
    """
    rows = {family.model_class: family for family in FAMILIES}
    for base in type(model).__mro__:
        if base.__name__ in rows:
            return rows[base.__name__]
    raise TypeError(
        f"{type(model).__name__} has no joint-attention blocks that mmpreproj knows. Known model classes: "
        f"{', '.join(rows)}. For another one, describe it with mmpreproj.patching.families.Family(…) and pass that "
        "row as patch(model, config, family=…)"
    )


def joint_blocks(model: nn.Module, family: Family) -> nn.ModuleList:
    """Return the model's joint blocks.

    Raises:
        TypeError: if the model has no such module list, or an empty one.
    """
    blocks = getattr(model, family.blocks, None)
    if not isinstance(blocks, nn.ModuleList) or len(blocks) == 0:
        raise TypeError(
            f"{type(model).__name__} has no joint-attention blocks: {family.blocks!r} should be a non-empty "
            f"torch.nn.ModuleList, found {type(blocks).__name__}"
        )
    return blocks
