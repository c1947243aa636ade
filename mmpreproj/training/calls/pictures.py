"""What is trained on by a pipeline's own calls: latents in its layout, each with the call of its caption."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from mmpreproj.core.draws import Draw
from mmpreproj.training.calls.call import RecordedCall
from mmpreproj.training.calls.process import Process


@dataclass(frozen=True)
class CalledPictures(Dataset[dict[str, Tensor]]):
    """Pictures or videos as clean latents, and the calls of their captions.

    Captions of any length need no padding, as each sample is a call of its own; so the samples of a batch run one
    after another, and a larger batch costs time as accumulation does.

    Attributes:
        latents: N tensors, each of its call's `shape`, scaled as the pipeline scales them: what it takes as
            `latents=`, but clean.
        calls: N of them; samples of one caption and size may share one.
        empty: the call of the empty caption, which dropped captions take; None where none are dropped.
        times: how often each is drawn in an epoch; none for once.

    Raises:
        ValueError: without samples, or if numbers, shapes or processes do not agree.
    """

    latents: tuple[Tensor, ...]
    calls: tuple[RecordedCall, ...]
    empty: RecordedCall | None = None
    times: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not self.latents or len(self.latents) != len(self.calls):
            raise ValueError(
                f"{len(self.latents)} latents and {len(self.calls)} calls; expected as many of each, and at least one"
            )
        for index, (latents, call) in enumerate(zip(self.latents, self.calls, strict=True)):
            _check_sample(index, latents, call, self.calls[0].process, self.empty)

    @property
    def process(self) -> Process:
        """How noise is mixed in."""
        return self.calls[0].process

    @property
    def groups(self) -> tuple[Hashable, ...]:
        """What samples must have in common to be in one batch: their shape."""
        return tuple(call.shape for call in self.calls)

    def __len__(self) -> int:
        return len(self.latents)

    def __getitem__(self, item: int | Draw) -> dict[str, Tensor]:
        """Return `latents`, without the batch's dimension, and `sample` `[]`, its place; for a draw its number too."""
        index = item.index if isinstance(item, Draw) else item
        found = {"latents": self.latents[index][0].detach().float(), "sample": torch.tensor(index)}
        return found | ({"draw": torch.tensor(item.number)} if isinstance(item, Draw) else {})

    def digest(self) -> str:
        """Return a digest of what is trained on and in which order."""
        digest = hashlib.sha256()
        for part in _parts((self.latents, self.times, self.empty, self.calls)):
            digest.update(part)
        return digest.hexdigest()


def _check_sample(
    index: int, latents: Tensor, call: RecordedCall, process: Process, empty: RecordedCall | None
) -> None:
    if tuple(latents.shape) != call.shape:
        raise ValueError(f"latents {index} are {list(latents.shape)}, but their call is for {list(call.shape)}")
    if not torch.isfinite(latents).all():
        raise ValueError(f"latents {index} have values that are NaN or infinite; a VAE in fp16 is the usual cause")
    if call.process != process:
        raise ValueError(
            f"call {index} mixes noise in by {call.process}, call 0 by {process}; train on sizes that the pipeline's "
            "scheduler treats alike, or in runs of their own"
        )
    if empty is not None and (empty.shape, empty.process) != (call.shape, call.process):
        raise ValueError(
            f"the call of the empty caption is for {list(empty.shape)}, latents {index} are {list(call.shape)}; with "
            "several sizes leave empty out and set caption_dropout: 0"
        )
    if empty is not None:
        _check_empty(index, call, empty)


def _check_empty(index: int, call: RecordedCall, empty: RecordedCall) -> None:
    """Refuse to drop a caption where the empty one's call would bring another picture along."""
    pairs = [(call.inputs.arguments[call.inputs.latents], empty.inputs.arguments[empty.inputs.latents])]
    if call.picture is not None and empty.picture is not None:
        pairs.append((call.picture, empty.picture))
    alike = all(one.shape == other.shape and torch.equal(one, other) for one, other in pairs)
    if call.behind is None and alike and (call.still is None) == (empty.still is None):
        return
    raise ValueError(
        f"call {index} has a picture of its own, to edit or to control by, which a dropped caption would exchange for "
        "that of the empty call; leave empty out and set caption_dropout: 0"
    )


def _parts(value: Any) -> Iterator[bytes]:
    """Iterate over what tells a nested value from others."""
    if isinstance(value, Tensor):
        yield str((value.dtype, tuple(value.shape))).encode()
        yield value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    elif isinstance(value, nn.Module):
        yield type(value).__name__.encode()
    elif is_dataclass(value):
        for field in fields(value):
            yield from _parts(getattr(value, field.name))
    elif isinstance(value, Mapping):
        for name, part in value.items():
            yield str(name).encode()
            yield from _parts(part)
    elif isinstance(value, list | tuple):
        yield str(len(value)).encode()
        for part in value:
            yield from _parts(part)
    else:
        yield repr(value).encode()
