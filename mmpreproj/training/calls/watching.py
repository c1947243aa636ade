"""Watch some steps of a pipeline: the calls of its models, and those of its scheduler."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mmpreproj.training.calls.call import first_tensor

STEPS = 3  # at the first, all is noise, and there times that differ elsewhere may agree


class _EnoughError(Exception):
    """Ends a pipeline that has shown enough."""


@dataclass
class Call:
    """A call of a model: its arguments by name, and what it gave."""

    arguments: dict[str, Any]
    output: Any


@dataclass
class Step:
    """What was seen of one step.

    Attributes:
        calls: of each model that was watched.
        output: that the scheduler was given.
        time: its timestep, `[]`.
        sample: its noisy sample.
        level: its noise level, where it mixes noise in by rectified flow.
        result: the sample that it gave, as it was then: pipelines may write into it.
    """

    calls: tuple[list[Call], ...]
    output: Tensor
    time: Tensor
    sample: Tensor
    level: float | None
    result: Tensor


class Watch:
    """Sees what a pipeline calls its models and its scheduler with.

    Attributes:
        steps: the first three that it took.
    """

    def __init__(self, pipeline: Any, models: Sequence[nn.Module]) -> None:
        self.pipeline, self.models = pipeline, models
        self.steps: list[Step] = []
        self._calls = self._none_yet()

    def __str__(self) -> str:
        return f"{type(self.pipeline).__name__} with {type(self.models[0]).__name__}"

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch until enough was seen; the pipeline is left as it was."""
        scheduler, pipeline = self.pipeline.scheduler, self.pipeline
        own_step, own_bar = vars(scheduler).get("step"), vars(pipeline).get("_progress_bar_config")
        if hasattr(pipeline, "set_progress_bar_config"):
            pipeline.set_progress_bar_config(disable=True)  # it would stop half-way
        hooks = [self._hook(place, model) for place, model in enumerate(self.models)]
        scheduler.step = self._watched_step(scheduler)
        try:
            yield
        except _EnoughError:
            pass
        finally:
            for hook in hooks:
                hook.remove()
            _put_back(scheduler, "step", own_step)
            _put_back(pipeline, "_progress_bar_config", own_bar)

    def _none_yet(self) -> tuple[list[Call], ...]:
        return tuple([] for _ in self.models)

    def _hook(self, place: int, model: nn.Module) -> Any:
        signature = inspect.signature(model.forward)
        spread = [one.name for one in signature.parameters.values() if one.kind is inspect.Parameter.VAR_KEYWORD]

        def see(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            arguments = signature.bind(*args, **kwargs).arguments
            for name in spread:
                arguments |= arguments.pop(name, {})
            self._calls[place].append(Call(arguments, output))

        return model.register_forward_hook(see, with_kwargs=True)

    def _watched_step(self, scheduler: Any) -> Any:
        stock = scheduler.step
        signature = inspect.signature(type(scheduler).step)

        def step(*args: Any, **kwargs: Any) -> Any:
            result = stock(*args, **kwargs)
            given = signature.bind(scheduler, *args, **kwargs).arguments
            time = torch.as_tensor(given["timestep"])
            after = first_tensor(result).clone()
            step = Step(self._calls, given["model_output"], time, given["sample"], _level(scheduler), after)
            self.steps.append(step)
            self._calls = self._none_yet()
            if len(self.steps) == STEPS:
                raise _EnoughError
            return result

        return step


def _put_back(owner: Any, name: str, value: Any) -> None:
    """Give an object its own attribute again, or that of its class."""
    vars(owner).pop(name, None)
    if value is not None:
        setattr(owner, name, value)


def _level(scheduler: Any) -> float | None:
    """Read off a flow-matching scheduler the noise level of the step that it has just taken."""
    index = getattr(scheduler, "step_index", None)
    if index is None or not hasattr(scheduler, "scale_noise"):
        return None
    return float(scheduler.sigmas[index - 1])
