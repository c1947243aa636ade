"""What a row of the table says: a family is data, not code."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sized
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, cast

from accelerate.utils import is_compiled_module
from torch import nn

from mmpreproj.patching.families.checks import (
    check_apart,
    check_kind,
    check_name,
    check_place,
    check_text,
    check_truth,
    entries,
    read_attribute,
    read_number,
)
from mmpreproj.patching.families.seams import PointSeam, PositionSeam


@dataclass(frozen=True)
class Stream:
    """One modality's tokens on their way through an attention module.

    Attributes:
        name: `"image"` or `"text"`, or what a further stream is called.
        argument: the keyword of the attention's `forward` that brings the normed tokens `[B, N, D]`.
        position: the place of that argument in a positional call.
        output: the index of the stream's result in the attention's output tuple (0 for a lone tensor).
        discarded_by: an attribute of the attention module that is true where the block throws this output away; such
            a stream is pre-projected (it feeds keys and values) but gets no skip.
        taken_by: an attribute of the attention module that is None where it does not take this stream at all.
        width: attribute of the attention module that gives this stream's width D where it is not the family's; dotted
            for one of an attribute's own.

    Raises:
        TypeError: if a field has the wrong type.
        ValueError: if one has no valid value.
    """

    name: str
    argument: str
    position: int
    output: int
    discarded_by: str | None = None
    taken_by: str | None = None
    width: str | None = None

    def __post_init__(self) -> None:
        check_name("Stream.name", self.name)
        check_text("Stream.argument", self.argument, "hidden_states")
        check_place("Stream.position", self.position)
        check_place("Stream.output", self.output)
        for field in ("discarded_by", "taken_by", "width"):
            if getattr(self, field) is not None:
                check_text(f"Stream.{field}", getattr(self, field), "context_pre_only")

    def is_discarded(self, attention: nn.Module) -> bool:
        """Tell whether the block throws this stream's attention output away."""
        if self.discarded_by is None:
            return False
        return bool(read_attribute(f"discarded_by of the {self.name} stream", attention, self.discarded_by))

    def is_taken(self, attention: nn.Module) -> bool:
        """Tell whether an attention module takes this stream."""
        if self.taken_by is None:
            return True
        return read_attribute(f"taken_by of the {self.name} stream", attention, self.taken_by) is not None


@dataclass(frozen=True)
class AttentionSite:
    """An attention module inside a block: the child's name, its streams, and whether it is a second attention.

    The name is dotted where the attention is a child's child. A second attention may be absent from every block; of
    any other site there must be at least one.

    Raises:
        TypeError: if a field has the wrong type.
        ValueError: if one has no valid value, or two streams share a name, an argument or an output.
    """

    child: str
    streams: tuple[Stream, ...]
    dual: bool = False

    def __post_init__(self) -> None:
        check_text("AttentionSite.child", self.child, "attn")
        if any(part.isdigit() for part in self.child.split(".")):
            raise ValueError(
                f"AttentionSite.child must have no numbered part, as the last number of an attention's path is its "
                f"block's; got {self.child!r}. Give the block this attention as a child with a name"
            )
        check_truth("AttentionSite.dual", self.dual)
        streams = entries("AttentionSite.streams", self.streams, Stream, example='(Stream("image", …),)')
        object.__setattr__(self, "streams", streams)
        for field in ("name", "argument", "position", "output"):
            check_apart(f"Stream.{field} of {self.child!r}", (getattr(stream, field) for stream in streams))

    def find(self, block: nn.Module) -> nn.Module | None:
        """Return the attention module of a block, None for a block without one; of a compiled one what it wraps."""
        try:
            found = attrgetter(self.child)(block)
        except AttributeError:
            return None
        return cast("nn.Module | None", found._orig_mod if is_compiled_module(found) else found)

    def as_in(self, attention: nn.Module) -> AttentionSite:
        """Return this site with only those streams that an attention module takes."""
        taken = tuple(stream for stream in self.streams if stream.is_taken(attention))
        return self if taken == self.streams else replace(self, streams=taken)


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

    Raises:
        TypeError: if a field has the wrong type.
        ValueError: if one has no valid value, two sites have one child, or `unread` names no stream.
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

    def __post_init__(self) -> None:
        check_text("Family.model_class", self.model_class, "MMDiT")
        check_text("Family.blocks", self.blocks, "joint_blocks")
        sites = entries("Family.sites", self.sites, AttentionSite, example='(AttentionSite("attn", …),)')
        object.__setattr__(self, "sites", sites)
        check_apart("AttentionSite.child", (site.child for site in sites))
        check_text("Family.width", self.width, "qkv.in_features")
        check_text("Family.heads", self.heads, "num_heads")
        for field, example in (("norm", "AdaLN-Zero"), ("gate", "a gate per stream"), ("positions", "none")):
            check_text(f"Family.{field}", getattr(self, field), example, empty=True)
        check_kind("Family.seam", self.seam, PositionSeam)
        check_kind("Family.points", self.points, PointSeam)
        if self.followed_by is not None:
            check_text("Family.followed_by", self.followed_by, "single_blocks")
        for field, example in (("unread", '("text",)'), ("settings", '("patch_size",)')):
            values = entries(f"Family.{field}", getattr(self, field), str, example=example, empty=True)
            object.__setattr__(self, field, values)
        names = dict.fromkeys(stream.name for site in sites for stream in site.streams)
        for name in self.unread:
            if name not in names:
                raise ValueError(f"Family.unread names {name!r}, which is no stream of its sites: {', '.join(names)}")

    def width_of(self, attention: nn.Module, stream: Stream | None = None) -> int:
        """Read the token width D off an attention module: the family's, or that of one of its streams.

        Raises:
            ValueError: if it is not there, or no whole number above 0.
        """
        if stream is None or stream.width is None:
            return read_number("Family.width", attention, self.width)
        return read_number(f"width of the {stream.name} stream", attention, stream.width)

    def heads_of(self, attention: nn.Module) -> int:
        """Read the number of heads off an attention module.

        Raises:
            ValueError: if it is not there, or no whole number above 0.
        """
        return read_number("Family.heads", attention, self.heads)

    def settings_of(self, model: nn.Module) -> dict[str, Any]:
        """Read the settings that set one base apart from another, as JSON has them; None for one that is not there.

        The model's config may be an object, a mapping, or absent.

        Raises:
            ValueError: if a value cannot be written as JSON.
        """
        config = getattr(model, "config", None)
        found = {}
        for key in self.settings:
            value = config.get(key) if isinstance(config, Mapping) else getattr(config, key, None)
            try:
                found[key] = json.loads(json.dumps(value))
            except (TypeError, ValueError) as error:
                raise ValueError(
                    f"Family.settings names {key!r}, whose value {value!r} cannot be written to a file ({error}). "
                    "Name settings that are numbers, texts, or lists of them"
                ) from error
        return found

    def skipped(self, model: nn.Module, site: AttentionSite, attention: nn.Module, *, last: bool) -> tuple[str, ...]:
        """Name the streams of an attention whose output is read, and so may carry a skip.

        Args:
            model: the whole model.
            site: where the attention is.
            attention: the attention module.
            last: whether its block is the last one.

        Raises:
            ValueError: if `followed_by` or a stream's `discarded_by` is not there.
        """
        unread = self.unread if last and not self._is_followed(model) else ()
        return tuple(
            stream.name for stream in site.streams if stream.name not in unread and not stream.is_discarded(attention)
        )

    def _is_followed(self, model: nn.Module) -> bool:
        if self.followed_by is None:
            return False
        found = read_attribute("Family.followed_by", model, self.followed_by)
        if not isinstance(found, Sized):
            raise ValueError(
                f"Family.followed_by={self.followed_by!r} is {type(found).__name__}, no list of modules; name the "
                "blocks that read what the last of these gives, or leave followed_by out"
            )
        return len(found) > 0
