"""What a row says of positions and points: where they can be set, and where points can go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


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
