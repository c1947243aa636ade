"""What a pipeline calls its model with for a caption, and the same call at any noise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mmpreproj.training.calls.process import Process


@dataclass(frozen=True)
class Place:
    """Where the noisy sample is in a tensor that may hold more: pictures to edit, masks.

    Attributes:
        dimension: along which others stand beside it; None where it is all there is.
        start: where it begins.
        length: how long it is.
    """

    dimension: int | None = None
    start: int = 0
    length: int = 0

    def cut(self, whole: Tensor) -> Tensor:
        """Return the sample's part of a tensor."""
        return whole if self.dimension is None else whole.narrow(self.dimension, self.start, self.length)

    def fill(self, whole: Tensor, part: Tensor) -> Tensor:
        """Return a tensor with another part in the sample's place."""
        if self.dimension is None:
            return part
        before = whole.narrow(self.dimension, 0, self.start)
        end = self.start + self.length
        after = whole.narrow(self.dimension, end, whole.shape[self.dimension] - end)
        return torch.cat([before, part, after], dim=self.dimension)


@dataclass(frozen=True)
class Inputs:
    """What a model is called with, at any noise.

    Attributes:
        arguments: of the model's `forward`, by name, those for latents and time as they were.
        latents: the argument that brings the noisy sample.
        place: where in it the sample is.
        time: the argument that brings the timestep.
        scale: what the scheduler's timestep is multiplied by there.
        offset: what is added then.
    """

    arguments: Mapping[str, Any]
    latents: str
    place: Place
    time: str
    scale: float
    offset: float

    def at(self, noisy: Tensor, time: Tensor) -> dict[str, Any]:
        """Return the arguments for a noisy sample `[1, …]` at the scheduler's timestep `[]`, on its device."""
        arguments = changed(self.arguments, lambda tensor: tensor.to(noisy.device))
        whole, told = arguments[self.latents], arguments[self.time]
        # As the pipeline's own arithmetic has it, which rounds to what its argument takes.
        there = (self.scale * time.double() + self.offset).to(told).expand(told.shape)
        return {**arguments, self.latents: self.place.fill(whole, noisy.to(whole.dtype)), self.time: there}


@dataclass(frozen=True)
class Behind:
    """A model behind the one that trains, which reads what that one gives: the transformer behind a ControlNet.

    Attributes:
        model: it; its weights are frozen when training begins.
        inputs: what it is called with besides.
        feeds: which of its arguments are given what: the place in the first model's output, None for all of it.
    """

    model: nn.Module
    inputs: Inputs
    feeds: Mapping[str, int | None]


@dataclass(frozen=True)
class RecordedCall:
    """A call of a model by its pipeline, for one caption.

    Attributes:
        inputs: what the model is called with.
        sign: -1 where the pipeline negates what the model gives.
        output: where in the model's output the prediction for the sample is.
        process: how noise is mixed in.
        shape: of the sample, a batch of one, as the pipeline's `latents=` takes it.
        behind: the model that makes the prediction, where the recorded one only feeds it.
        still: which values of the sample no step changes, in `shape`, such as those of a picture to edit; None for
            none. Neither are they noised, nor does their prediction count.
        picture: the sample as it was recorded, where some of it stays still.
    """

    inputs: Inputs
    sign: float
    output: Place
    process: Process
    shape: tuple[int, ...]
    behind: Behind | None = None
    still: Tensor | None = None
    picture: Tensor | None = None

    @property
    def moving(self) -> Tensor:
        """Which values of a sample count, truth values in `shape`."""
        return torch.ones(self.shape, dtype=torch.bool) if self.still is None else ~self.still

    def predict(self, model: nn.Module, noisy: Tensor, time: Tensor) -> Tensor:
        """Call the model as its pipeline does, at other noise.

        Args:
            model: as it was recorded, patched or not.
            noisy: a sample of `shape`.
            time: the scheduler's timestep, `[]`.

        Returns:
            What the scheduler is given, in `shape`.

        Raises:
            ValueError: if the model gives another shape while it trains.
        """
        if self.still is not None and self.picture is not None:
            noisy = torch.where(self.still.to(noisy.device), self.picture.to(noisy), noisy)
        output = model(**self.inputs.at(noisy, time))
        if self.behind is not None:
            fed = {name: output if place is None else output[place] for name, place in self.behind.feeds.items()}
            output = self.behind.model(**(self.behind.inputs.at(noisy, time) | fed))
        found = self.output.cut(first_tensor(output))
        if found.shape != noisy.shape:
            raise ValueError(
                f"{type(model).__name__} gives {list(found.shape)} for a sample of {list(noisy.shape)}, another shape "
                "than for its pipeline. HiDream does so while it trains, unless it was loaded with "
                "force_inference_output=True"
            )
        return self.sign * found


def changed(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Change all tensors of a nested value."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {name: changed(part, change) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(changed(part, change) for part in value)
    return value


def first_tensor(output: Any) -> Tensor:
    """Return the first tensor of what a model gives: itself, or of a tuple, list or Diffusers output."""
    while not isinstance(output, Tensor):
        output = output[0]
    return output
