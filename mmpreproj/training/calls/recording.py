"""Learn from a few steps of a pipeline how it calls its model.

A pipeline knows what its family's model wants: which texts, masks, sizes and tables, how latents are laid out, what
time is called, and what becomes of the output. Here it is watched for three steps, and what is found is checked
against each of them, so that nothing has to be known of the family.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from diffusers.utils import BaseOutput
from torch import Tensor, nn

from mmpreproj.training.calls.call import Behind, Inputs, Place, RecordedCall, changed, first_tensor
from mmpreproj.training.calls.process import FlowProcess, Process, process_of
from mmpreproj.training.calls.watching import STEPS, Watch

GUIDED = (
    "with classifier-free guidance; record without: guidance_scale=1.0 for most pipelines, true_cfg_scale=1.0 or "
    "guidance_scale=0.0 for some"
)
BY_HAND = "train this model with calls of your own"
ROUNDED = 2**-7  # bfloat16's, in which a pipeline may tell its model


def record_call(pipeline: Any, *, model: nn.Module | None = None, **inputs: Any) -> RecordedCall:
    """Run a pipeline for three steps and keep how it calls its model.

    Args:
        pipeline: a Diffusers pipeline with a `transformer` and a `scheduler`.
        model: what is trained, `pipeline.transformer` by default; or what feeds that one, such as
            `pipeline.controlnet`.
        inputs: what the pipeline is called with for one caption, or one caption's embeddings, without guidance; its
            size, number of frames and pictures to edit are part of the call. Give no `latents`.

    Returns:
        The call, its tensors on the CPU.

    Raises:
        ValueError: if the pipeline calls the model several times a step, as with guidance, or for several captions,
            or what it does with latents, time or output is none of what is known; the message says which.
    """
    models = [pipeline.transformer]
    if model is not None and model is not pipeline.transformer:
        models.insert(0, model)
    process = process_of(pipeline.scheduler)
    settings: dict[str, Any] = {"num_inference_steps": STEPS + 1}
    if "output_type" in inspect.signature(type(pipeline).__call__).parameters:
        settings["output_type"] = "latent"
    watch = Watch(pipeline, models)
    with torch.no_grad(), watch.watching():
        pipeline(**(settings | inputs))
    _check_steps(watch)
    first, behind = _find_inputs(watch, 0), None
    if len(models) == 2:
        feeds = _find_feeds(watch)
        behind = Behind(models[1], _find_inputs(watch, 1, fed=feeds), feeds)
    sign, output = _find_output(watch)
    still = _find_still(watch)
    return RecordedCall(
        inputs=first,
        sign=sign,
        output=output,
        process=_as_told(process, watch),
        shape=tuple(watch.steps[0].sample.shape),
        behind=behind,
        still=still,
        picture=None if still is None else watch.steps[0].sample.detach().cpu() * still,
    )


def _check_steps(watch: Watch) -> None:
    if len(watch.steps) < STEPS:
        raise ValueError(
            f"{watch} took {len(watch.steps)} steps of its scheduler, and {STEPS} are looked at; leave "
            f"num_inference_steps out or give at least {STEPS}"
        )
    for calls in (calls for step in watch.steps for calls in step.calls):
        if len(calls) != 1:
            told = GUIDED if calls else "so it is not what the pipeline runs; give its model as model=…"
            raise ValueError(f"{watch} calls the model {len(calls)} times a step, {told}")
    if len(watch.steps[0].sample) != 1:
        raise ValueError(
            f"{watch} makes {len(watch.steps[0].sample)} samples at once; record one caption at a time, with one "
            "picture or video for it"
        )


def _find_inputs(watch: Watch, model: int, *, fed: Mapping[str, Any] | None = None) -> Inputs:
    """Find what a model is called with at any noise; what it is `fed` by another is left out."""
    calls = [
        {name: value for name, value in step.calls[model][0].arguments.items() if name not in (fed or {})}
        for step in watch.steps
    ]
    latents, place = _find_sample(watch, calls)
    time, scale, offset = _find_time(watch, calls, latents)
    # The noise is not part of the call: with it, no two records would be alike.
    # The last call's: a pipeline that begins in another dtype goes on in its model's.
    whole = calls[-1][latents]
    arguments = calls[-1] | {latents: place.fill(whole, torch.zeros_like(place.cut(whole)))}
    return Inputs(
        arguments=changed(arguments, lambda one: one.detach().cpu().clone(memory_format=torch.contiguous_format)),
        latents=latents,
        place=place,
        time=time,
        scale=scale,
        offset=offset,
    )


def _find_sample(watch: Watch, calls: Sequence[Mapping[str, Any]]) -> tuple[str, Place]:
    """Find which argument holds the noisy sample, and where."""
    sample = watch.steps[0].sample
    given = {name: value for name, value in calls[0].items() if isinstance(value, Tensor)}
    for name, place in ((name, place) for name, value in given.items() for place in _places(sample, value)):
        if all(_alike(place.cut(call[name]), step.sample) for call, step in zip(calls, watch.steps, strict=True)):
            return name, place
    doubled = [name for name, value in given.items() if value.shape == (2 * len(sample), *sample.shape[1:])]
    if doubled:
        raise ValueError(f"{watch} gives the model two of each sample ({doubled[0]}), {GUIDED}")
    shapes = ", ".join(f"{name} {list(value.shape)}" for name, value in given.items())
    raise ValueError(
        f"{watch}: none of the model's arguments holds the scheduler's sample {list(sample.shape)} as it is: "
        f"{shapes}; {BY_HAND}"
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


def _find_time(watch: Watch, calls: Sequence[Mapping[str, Any]], latents: str) -> tuple[str, float, float]:
    """Find which argument is told the time, and as what: `scale · t + offset`."""
    changing = [
        name for name in calls[0] if name != latents and not all(_same(calls[1][name], c[name]) for c in calls)
    ]
    if len(changing) != 1 or not isinstance(calls[0][changing[0]], Tensor):
        raise ValueError(
            f"{watch}: {', '.join(changing) or 'nothing'} changes from step to step besides {latents}; expected one "
            f"tensor, the time; {BY_HAND}"
        )
    name = changing[0]
    told = torch.stack([call[name].double().flatten()[0] for call in calls]).cpu()  # [steps]
    times = torch.stack([step.time.double() for step in watch.steps]).cpu()
    most = float(watch.pipeline.scheduler.config.num_train_timesteps)
    if any(bool((call[name] != call[name].flatten()[0]).any()) for call in calls):
        raise ValueError(f"{watch}: {name} tells several times at once; {BY_HAND}")
    is_rounded = any(call[name].dtype in (torch.float16, torch.bfloat16) for call in calls)
    for scale, offset in ((1.0, 0.0), (1 / most, 0.0), (-1.0, most), (-1 / most, 1.0)):
        apart = (told - scale * times - offset) / abs(scale)  # in the scheduler's timesteps
        if is_rounded and torch.allclose(told, scale * times + offset, rtol=ROUNDED, atol=1e-4 * abs(scale) * most):
            return name, scale, offset
        if not is_rounded and apart.max() - apart.min() < 1e-6 * most and apart.abs().max() < most / 100:
            return name, scale, offset + abs(scale) * round(float(apart.median()), 2)  # GLM-Image is told one less
    found = ", ".join(f"{value:g} at {time:g}" for value, time in zip(told.tolist(), times.tolist(), strict=True))
    raise ValueError(f"{watch}: cannot tell how {name} follows from the scheduler's timestep: {found}; {BY_HAND}")


def _find_output(watch: Watch) -> tuple[float, Place]:
    """Find what of the last model's output the scheduler is given."""
    made = [first_tensor(step.calls[-1][0].output) for step in watch.steps]
    if all(_alike(one, torch.zeros_like(one)) for one in made):
        raise ValueError(
            f"{watch}: the model gives zeros, as a new one may, which do not tell what becomes of its output; record "
            "with trained weights"
        )
    for place in _places(watch.steps[0].output, made[0]):
        for sign in (1.0, -1.0):
            if all(_alike(sign * place.cut(one), step.output) for one, step in zip(made, watch.steps, strict=True)):
                return sign, place
    raise ValueError(
        f"{watch}: the scheduler is given {list(watch.steps[0].output.shape)}, which is neither the model's output "
        f"{list(made[0].shape)} nor a part of it, nor its negative. It may be guided: record without guidance"
    )


def _find_feeds(watch: Watch) -> dict[str, int | None]:
    """Find which arguments of the second model are what the first one gave."""
    first, second = (calls[0] for calls in watch.steps[0].calls)
    made, read = first.output, second.arguments
    parts = made.to_tuple() if isinstance(made, BaseOutput) else made if isinstance(made, tuple) else ()
    feeds: dict[str, int | None] = {name: None for name, value in read.items() if value is made}
    for place, part in enumerate(parts):
        is_made = part is not None and not any(part is given for given in first.arguments.values())
        feeds |= {name: place for name, value in read.items() if is_made and value is part}
    if not feeds:
        raise ValueError(
            f"{watch}: {type(watch.models[1]).__name__} is given nothing of what the model gives as it is; {BY_HAND}"
        )
    return feeds


def _find_still(watch: Watch) -> Tensor | None:
    """Find which parts of the sample, along its second dimension, the pipeline sets back to the same after each step.

    Values that did not change by themselves do not count: those of a small prediction do not in half precision.
    """
    samples = [step.sample.cpu() for step in watch.steps]
    same = torch.stack([samples[0] == one for one in samples[1:]]).all(dim=0)
    results = [step.result.cpu().to(samples[0].dtype) for step in watch.steps[:-1]]
    set_back = torch.stack([made != now for made, now in zip(results, samples[1:], strict=True)]).any(dim=0)
    if same.ndim < 3:
        return None
    parts = same.flatten(2).all(dim=-1) & set_back.flatten(2).any(dim=-1)  # [1, parts]
    still = parts.view(*parts.shape, *[1] * (same.ndim - 2)).expand_as(same).contiguous()
    return still if still.any() and not still.all() else None


def _as_told(process: Process, watch: Watch) -> Process:
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
                f"{watch}: the timestep {float(step.time):g} does not follow from the noise level {step.level}; "
                f"{BY_HAND}"
            )
    return shifted


def _alike(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one.double(), other.double(), rtol=ROUNDED, atol=1e-5)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_same(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return type(one) is type(other) and bool(one == other)
