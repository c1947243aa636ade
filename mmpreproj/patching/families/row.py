"""What a row of the table says: a family is data, not code."""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, cast

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
        taken_by: an attribute of the attention module that is None where it does not take this stream at all.
        width: attribute of the attention module that gives this stream's width D where it is not the family's; dotted
            for one of an attribute's own.
    """

    name: str
    argument: str
    position: int
    output: int
    discarded_by: str | None = None
    taken_by: str | None = None
    width: str | None = None

    def is_discarded(self, attention: nn.Module) -> bool:
        """Tell whether the block throws this stream's attention output away."""
        return self.discarded_by is not None and bool(getattr(attention, self.discarded_by))

    def is_taken(self, attention: nn.Module) -> bool:
        """Tell whether an attention module takes this stream."""
        return self.taken_by is None or getattr(attention, self.taken_by, None) is not None


@dataclass(frozen=True)
class AttentionSite:
    """An attention module inside a block: the child's name, its streams, and whether it is a second attention.

    The name is dotted where the attention is a child's child.
    """

    child: str
    streams: tuple[Stream, ...]
    dual: bool = False

    def find(self, block: nn.Module) -> nn.Module | None:
        """Return the attention module of a block, None for a block without one."""
        try:
            return cast("nn.Module | None", attrgetter(self.child)(block))
        except AttributeError:
            return None

    def as_in(self, attention: nn.Module) -> AttentionSite:
        """Return this site with only those streams that an attention module takes."""
        taken = tuple(stream for stream in self.streams if stream.is_taken(attention))
        return self if taken == self.streams else replace(self, streams=taken)


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
        blocks: path in the model of the module list that holds the blocks with these attentions.
        sites: the attention modules of a block.
        width: attribute of an attention module that gives the token width D; dotted for one of an attribute's own.
        heads: attribute of an attention module that gives the number of heads, dotted likewise.
        norm: what stands before the attention.
        gate: what multiplies the attention output, and so the skip, before the residual sum.
        positions: how the stock model encodes position.
        unread: names of the streams whose output of the last block nobody reads; there they are pre-projected (they
            feed keys and values) but get no skip.
        followed_by: path of the module list that does read them, unless it is empty; None where there is none.
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
    unread: tuple[str, ...] = ()
    followed_by: str | None = None
    settings: tuple[str, ...] = ()
    seam: PositionSeam | None = None
    points: PointSeam | None = None

    def width_of(self, attention: nn.Module, stream: Stream | None = None) -> int:
        """Read the token width D off an attention module: the family's, or that of one of its streams."""
        own = None if stream is None else stream.width
        return int(attrgetter(own or self.width)(attention))

    def heads_of(self, attention: nn.Module) -> int:
        """Read the number of heads off an attention module."""
        return int(attrgetter(self.heads)(attention))

    def skipped(self, model: nn.Module, site: AttentionSite, attention: nn.Module, *, last: bool) -> tuple[str, ...]:
        """Name the streams of an attention whose output is read, and so may carry a skip.

        Args:
            model: the whole model.
            site: where the attention is.
            attention: the attention module.
            last: whether its block is the last one.
        """
        followed = self.followed_by is not None and len(cast(Sized, attrgetter(self.followed_by)(model))) > 0
        unread = self.unread if last and not followed else ()
        return tuple(
            stream.name for stream in site.streams if stream.name not in unread and not stream.is_discarded(attention)
        )
