"""Learn from a few steps of a pipeline how it calls its model.

A pipeline knows what its family's model wants: which texts, masks, sizes and tables, how latents are laid out, what
time is called, and what becomes of the output. Here it is watched for three steps, and what is found is checked
against each of them, so that nothing has to be known of the family.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from mmpreproj.training.calls.call import Place, RecordedCall, changed, first_tensor
from mmpreproj.training.calls.process import FlowProcess, Process, process_of

STEPS = 3  # at the first, all is noise, and there times that differ elsewhere may agree
GUIDED = (
    "with classifier-free guidance; record without: guidance_scale=1.0 for most pipelines, true_cfg_scale=1.0 or "
    "guidance_scale=0.0 for some"
)


class _EnoughError(Exception):
    """Ends a pipeline that has shown enough."""


@dataclass
class _Step:
    """What was seen of one step: the calls of the model, and that of the scheduler."""

    calls: list[tuple[dict[str, Any], Tensor]]
    output: Tensor
    time: Tensor
    sample: Tensor
    level: float | None


class _Watch:
    """Sees what a pipeline calls its model and its scheduler with."""

    def __init__(self, pipeline: Any, model: nn.Module) -> None:
        self.pipeline, self.model = pipeline, model
        self.signature = inspect.signature(model.forward)
        self.calls: list[tuple[dict[str, Any], Tensor]] = []
        self.steps: list[_Step] = []

    def see_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        bound = self.signature.bind(*args, **kwargs).arguments
        for name, parameter in self.signature.parameters.items():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                bound |= bound.pop(name, {})
        self.calls.append((bound, first_tensor(output)))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch until enough was seen; the pipeline is left as it was."""
        scheduler = self.pipeline.scheduler
        stock = scheduler.step

        def step(output: Tensor, time: Any, sample: Tensor, *args: Any, **kwargs: Any) -> Any:
            result = stock(output, time, sample, *args, **kwargs)
            level = _level(scheduler)
            self.steps.append(_Step(self.calls, output, torch.as_tensor(time), sample, level))
            self.calls = []
            if len(self.steps) == STEPS:
                raise _EnoughError
            return result

        own = vars(scheduler).get("step")
        bar = getattr(self.pipeline, "_progress_bar_config", None)
        if hasattr(self.pipeline, "set_progress_bar_config"):
            self.pipeline.set_progress_bar_config(disable=True)  # it would stop half-way
        hook = self.model.register_forward_hook(self.see_call, with_kwargs=True)
        scheduler.step = step
        try:
            yield
        except _EnoughError:
            pass
        finally:
            hook.remove()
            del scheduler.step
            if own is not None:
                scheduler.step = own
            if bar is not None:
                self.pipeline._progress_bar_config = bar
            elif hasattr(self.pipeline, "_progress_bar_config"):
                del self.pipeline._progress_bar_config


def record_call(pipeline: Any, *, model: nn.Module | None = None, **inputs: Any) -> RecordedCall:
    """Run a pipeline for three steps and keep how it calls its model.

    Args:
        pipeline: a Diffusers pipeline with a `scheduler`.
        model: what is trained, `pipeline.transformer` by default.
        inputs: what the pipeline is called with for one caption, or one caption's embeddings, without guidance; its
            size, number of frames and pictures to edit are part of the call. Give no `latents`.

    Returns:
        The call, its tensors on the CPU.

    Raises:
        ValueError: if the pipeline calls the model several times a step, as with guidance, or for several captions,
            or what it does with latents, time or output is none of what is known; the message says which.
    """
    model = pipeline.transformer if model is None else model
    accepted = inspect.signature(type(pipeline).__call__).parameters
    settings: dict[str, Any] = {"num_inference_steps": STEPS + 1}
    if "output_type" in accepted:
        settings["output_type"] = "latent"
    process = process_of(pipeline.scheduler)
    watch = _Watch(pipeline, model)
    with torch.no_grad(), watch.watching():
        pipeline(**(settings | inputs))
    _check_steps(watch)
    first = watch.steps[0]
    latents, place = _find_sample(watch)
    time, scale, offset = _find_time(watch, latents, timesteps=int(pipeline.scheduler.config.num_train_timesteps))
    sign, output = _find_output(watch)
    arguments = first.calls[0][0]
    noise = place.cut(arguments[latents])  # not part of the call: with it, no two records would be alike
    arguments = {**arguments, latents: place.fill(arguments[latents], torch.zeros_like(noise))}
    return RecordedCall(
        arguments=changed(arguments, lambda one: one.detach().cpu().clone(memory_format=torch.contiguous_format)),
        latents=latents,
        place=place,
        time=time,
        scale=scale,
        offset=offset,
        sign=sign,
        output=output,
        process=_as_told(process, watch),
        shape=tuple(first.sample.shape),
    )


def _level(scheduler: Any) -> float | None:
    """Read off a flow-matching scheduler the noise level of the step that it has just taken."""
    index = getattr(scheduler, "step_index", None)
    if index is None or not hasattr(scheduler, "scale_noise"):
        return None
    return float(scheduler.sigmas[index - 1])


def _named(watch: _Watch) -> str:
    return f"{type(watch.pipeline).__name__} with {type(watch.model).__name__}"


def _check_steps(watch: _Watch) -> None:
    if len(watch.steps) < STEPS:
        raise ValueError(
            f"{_named(watch)} took {len(watch.steps)} steps of its scheduler, and {STEPS} are looked at; leave "
            f"num_inference_steps out or give at least {STEPS}"
        )
    for step in watch.steps:
        if len(step.calls) != 1:
            told = GUIDED if step.calls else "so it is not what the pipeline runs; give its model as model=…"
            raise ValueError(f"{_named(watch)} calls the model {len(step.calls)} times a step, {told}")
    if len(watch.steps[0].sample) != 1:
        raise ValueError(
            f"{_named(watch)} makes {len(watch.steps[0].sample)} samples at once; record one caption at a time, with "
            "one picture or video for it"
        )


def _find_sample(watch: _Watch) -> tuple[str, Place]:
    """Find which argument holds the noisy sample, and where."""
    candidates: list[tuple[str, Place]] = []
    for name, value in watch.steps[0].calls[0][0].items():
        if isinstance(value, Tensor):
            candidates.extend((name, place) for place in _places(watch.steps[0].sample, value))
    for name, place in candidates:
        if all(_alike(place.cut(step.calls[0][0][name]), step.sample) for step in watch.steps):
            return name, place
    sample, given = watch.steps[0].sample, watch.steps[0].calls[0][0]
    doubled = [
        name
        for name, value in given.items()
        if isinstance(value, Tensor) and value.shape == (2 * len(sample), *sample.shape[1:])
    ]
    if doubled:
        raise ValueError(f"{_named(watch)} gives the model two of each sample ({doubled[0]}), {GUIDED}")
    shapes = ", ".join(f"{name} {list(value.shape)}" for name, value in given.items() if isinstance(value, Tensor))
    raise ValueError(
        f"{_named(watch)}: none of the model's arguments holds the scheduler's sample {list(sample.shape)} as it is: "
        f"{shapes}; train this model with calls of your own"
    )


def _places(sample: Tensor, whole: Tensor) -> Iterator[Place]:
    """List where a sample may be in a tensor: all of it, or the beginning or end along one dimension."""
    if whole.shape == sample.shape:
        yield Place()
    if whole.ndim != sample.ndim:
        return
    longer = [one for one in range(whole.ndim) if whole.shape[one] != sample.shape[one]]
    if len(longer) == 1 and longer[0] > 0 and whole.shape[longer[0]] > sample.shape[longer[0]]:
        length = sample.shape[longer[0]]
        yield Place(longer[0], 0, length)
        yield Place(longer[0], whole.shape[longer[0]] - length, length)


def _find_time(watch: _Watch, latents: str, *, timesteps: int) -> tuple[str, float, float]:
    """Find which argument is told the time, and as what."""
    calls = [step.calls[0][0] for step in watch.steps]
    changing = [
        name for name in calls[0] if name != latents and not all(_same(calls[1][name], call[name]) for call in calls)
    ]
    if len(changing) != 1 or not isinstance(calls[0][changing[0]], Tensor):
        raise ValueError(
            f"{_named(watch)}: {', '.join(changing) or 'nothing'} changes from step to step besides {latents}; "
            "expected one tensor, the time. Train this model with calls of your own"
        )
    name = changing[0]
    for scale, offset in ((1.0, 0.0), (1 / timesteps, 0.0), (-1.0, timesteps), (-1 / timesteps, 1.0)):
        told = [(call[name].double(), step.time.double()) for call, step in zip(calls, watch.steps, strict=True)]
        # half precision has told times rounded
        close = (2**-7 * abs(scale) * timesteps, 2**-7)
        if all(
            torch.allclose(value, scale * time + offset, atol=1e-2 * close[0] + 1e-6, rtol=close[1])
            for value, time in told
        ):
            return name, scale, float(offset)
    found = ", ".join(
        f"{float(call[name].flatten()[0]):g} at {float(step.time):g}"
        for call, step in zip(calls, watch.steps, strict=True)
    )
    raise ValueError(f"{_named(watch)}: cannot tell how {name} follows from the scheduler's timestep: {found}")


def _find_output(watch: _Watch) -> tuple[float, Place]:
    """Find what of the model's output the scheduler is given."""
    for place in _places(watch.steps[0].output, watch.steps[0].calls[0][1]):
        for sign in (1.0, -1.0):
            if all(_alike(sign * place.cut(step.calls[0][1]), step.output) for step in watch.steps):
                return sign, place
    given, made = watch.steps[0].output, watch.steps[0].calls[0][1]
    raise ValueError(
        f"{_named(watch)}: the scheduler is given {list(given.shape)}, which is neither the model's output "
        f"{list(made.shape)} nor a part of it, nor its negative. It may be guided: record without guidance"
    )


def _as_told(process: Process, watch: _Watch) -> Process:
    """Return a process with the shift by which the model is told other times than the noise levels say."""
    last = watch.steps[-1]
    if not isinstance(process, FlowProcess) or last.level is None or process.inverted:
        return process
    told = float(last.time) / process.timesteps
    shift = last.level * (1 - told) / (told * (1 - last.level))
    if abs(shift - 1) < 1e-3:
        return process
    shifted = replace(process, shift=shift)
    for step in watch.steps:
        if step.level is None or abs(float(shifted.times(torch.tensor(step.level))) - float(step.time)) > 1.0:
            raise ValueError(
                f"{_named(watch)}: the timestep {float(step.time):g} does not follow from the noise level "
                f"{step.level}; train this model with calls of your own"
            )
    return shifted


def _alike(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one.double(), other.double(), rtol=2**-7, atol=1e-5)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_same(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return type(one) is type(other) and bool(one == other)
