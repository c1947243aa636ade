"""Training and measuring on recorded calls: the loss by hand, the trainer around it, and what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from calls_kit import CHANNELS, TOKENS, Pipeline, a_text
from diffusers import AutoencoderKL, DDIMScheduler, FlowMatchEulerDiscreteScheduler, FluxPipeline
from family_models import make_model
from torch import Tensor

import mmpreproj
from mmpreproj import PointPathConfig, PreProjConfig
from mmpreproj.core.draws import Draw, generator_of
from mmpreproj.training.calls import CalledPictures, RecordedCall, record_call
from mmpreproj.training.calls.objective import CallDenoiser, CallHeldOutLoss, CallObjective
from mmpreproj.training.config import ConfigError, TrainConfig
from mmpreproj.training.loop import StepRecord, train


def recorded(seed: int = 0, pipeline: Pipeline | None = None) -> RecordedCall:
    return record_call(pipeline or Pipeline(), text=a_text(seed))


def latents(seed: int) -> Tensor:
    return torch.randn(1, TOKENS, CHANNELS, generator=torch.Generator().manual_seed(100 + seed))


def pictures(count: int = 4, **further: Any) -> CalledPictures:
    return CalledPictures(
        tuple(latents(index) for index in range(count)), tuple(recorded(index) for index in range(count)), **further
    )


def batch_of(samples: CalledPictures, draws: list[Draw]) -> dict[str, Tensor]:
    items = [samples[draw] for draw in draws]
    return {name: torch.stack([item[name] for item in items]) for name in items[0]}


SETTINGS: dict[str, Any] = {"shift": 1.0, "caption_dropout": 0.0, "seed": 5}
FLOW = TrainConfig(model="m", output="o", data={"folder": "f"}).flow


def test_the_loss_is_that_of_each_sample_alone_by_hand():
    samples, model = pictures(), Pipeline().transformer
    draws = [Draw(2, 0), Draw(0, 1), Draw(2, 2)]
    objective = CallObjective(samples, flow=FLOW, **SETTINGS)
    found = objective.losses(objective.denoiser(model), batch_of(samples, draws))
    errors = []
    for draw in draws:
        generator = generator_of(5, draw.number)
        noise = torch.randn(TOKENS, CHANNELS, generator=generator)
        level = torch.sigmoid(torch.randn(1, generator=generator))
        noisy = (1 - level) * latents(draw.index) + level * noise
        (output,) = model(noisy, level * 1000, text=a_text(draw.index))
        errors.append((output - (noise - latents(draw.index))).square().mean())
    torch.testing.assert_close(found["pictures"], torch.stack(errors).mean())
    assert objective.total(found) == found["pictures"]


def test_the_loss_does_not_depend_on_how_draws_are_cut_into_batches():
    samples, model = pictures(), Pipeline().transformer
    draws = [Draw(index, index) for index in range(4)]
    objective = CallObjective(samples, flow=FLOW, **SETTINGS)
    denoiser = objective.denoiser(model)
    whole = objective.losses(denoiser, batch_of(samples, draws))["pictures"]
    halves = [objective.losses(denoiser, batch_of(samples, part))["pictures"] for part in (draws[:2], draws[2:])]
    torch.testing.assert_close(torch.stack(halves).mean(), whole)


def test_values_that_stay_still_count_in_neither_loss():
    still = torch.zeros(1, TOKENS, CHANNELS, dtype=torch.bool)
    still[:, :2] = True
    plain, model = pictures(), Pipeline().transformer
    calls = tuple(replace(call, still=still, picture=latents(50) * still) for call in plain.calls)
    samples = replace(plain, calls=calls)
    draws = [Draw(1, 0), Draw(3, 1)]
    objective = CallObjective(samples, flow=FLOW, **SETTINGS)
    loss = objective.losses(objective.denoiser(model), batch_of(samples, draws))["pictures"]
    held_out = CallHeldOutLoss(samples)(model)
    moved = replace(samples, latents=tuple(torch.where(still, value + 9, value) for value in samples.latents))
    objective = CallObjective(moved, flow=FLOW, **SETTINGS)
    again = objective.losses(objective.denoiser(model), batch_of(moved, draws))["pictures"]
    assert torch.equal(loss, again) and CallHeldOutLoss(moved)(model) == held_out
    whole = CallObjective(plain, flow=FLOW, **SETTINGS).losses(CallDenoiser(model), batch_of(plain, draws))["pictures"]
    assert not torch.isclose(loss, whole)


def test_dropped_captions_take_the_empty_call():
    empty = recorded(9)
    samples = pictures(empty=empty)
    seen: list[RecordedCall] = []

    class Seeing(CallDenoiser):
        def forward(self, noisy, times, calls):
            seen.extend(calls)
            return super().forward(noisy, times, calls)

    objective = CallObjective(samples, flow=FLOW, **(SETTINGS | {"caption_dropout": 0.5}))
    objective.losses(Seeing(Pipeline().transformer), batch_of(samples, [Draw(1, number) for number in range(40)]))
    dropped = sum(call is empty for call in seen)
    assert 10 < dropped < 30 and all(call is empty or call is samples.calls[1] for call in seen)


def test_the_held_out_loss_is_the_same_every_time_and_falls_with_a_better_model():
    samples, model = pictures(), Pipeline().transformer
    measure = CallHeldOutLoss(samples, levels=3)
    first = measure(model)
    assert measure(model) == first and model.training
    with torch.no_grad():
        model.map.weight.mul_(50)
    assert measure(model) > first


@pytest.mark.parametrize(
    ("settings", "flow", "told"),
    [
        ({"caption_dropout": 0.1}, {}, r"caption_dropout is 0.1.*empty=record_call.*set caption_dropout: 0"),
        ({}, {"shift_resolution": 512}, r"flow.shift_resolution is 512.*set flow.shift"),
    ],
)
def test_settings_that_calls_do_not_have_are_refused(settings: dict[str, Any], flow: dict[str, Any], told: str):
    with pytest.raises(ValueError, match=told):
        CallObjective(pictures(), flow=FLOW.model_copy(update=flow), **(SETTINGS | settings))


def test_samples_that_do_not_fit_are_refused():
    call = recorded()
    with pytest.raises(ValueError, match="0 latents and 0 calls"):
        CalledPictures((), ())
    with pytest.raises(ValueError, match="2 latents and 1 calls; expected as many"):
        CalledPictures((latents(0), latents(1)), (call,))
    with pytest.raises(ValueError, match=r"latents 1 are \[1, 5, 4\], but their call is for \[1, 6, 4\]"):
        CalledPictures((latents(0), latents(1)[:, 1:]), (call, call))
    with pytest.raises(ValueError, match="latents 0 have values that are NaN"):
        CalledPictures((latents(0) * float("nan"),), (call,))
    other = record_call(Pipeline(DDIMScheduler()), text=a_text())
    with pytest.raises(ValueError, match=r"call 1 mixes noise in by DiffusionProcess.*call 0 by FlowProcess"):
        CalledPictures((latents(0), latents(1)), (call, other))
    with pytest.raises(ValueError, match=r"empty caption is for \[1, 3, 4\].*several sizes leave empty out"):
        CalledPictures((latents(0),), (call,), empty=replace(call, shape=(1, 3, 4)))


def test_an_empty_call_that_brings_another_picture_along_is_refused():
    call = recorded()
    edited = replace(
        call.inputs, arguments={**call.inputs.arguments, "hidden_states": torch.ones(1, TOKENS, CHANNELS)}
    )
    with pytest.raises(ValueError, match=r"call 0 has a picture of its own.*leave empty out.*caption_dropout: 0"):
        CalledPictures((latents(0),), (call,), empty=replace(call, inputs=edited))
    still = torch.arange(TOKENS)[None, :, None].expand(1, TOKENS, CHANNELS) < 2
    one, other = (replace(call, still=still, picture=latents(seed) * still) for seed in (1, 2))
    CalledPictures((latents(0),), (one,), empty=one)
    with pytest.raises(ValueError, match="call 0 has a picture of its own"):
        CalledPictures((latents(0),), (one,), empty=other)


def test_a_model_behind_gets_no_gradients_and_latents_none_either():
    pipeline = Pipeline(controlled=lambda output: {"residuals": output[0]})
    call = record_call(pipeline, model=pipeline.controlnet, text=a_text())
    clean = latents(0).requires_grad_()
    samples = CalledPictures((clean * 2,), (call,))
    objective = CallObjective(samples, flow=FLOW, **SETTINGS)
    denoiser = objective.denoiser(pipeline.controlnet)
    for number in range(2):
        objective.losses(denoiser, batch_of(samples, [Draw(0, number)]))["pictures"].backward()
    assert pipeline.controlnet.map.weight.grad is not None
    assert pipeline.transformer.map.weight.grad is None and clean.grad is None
    with pytest.raises(ValueError, match="call 0 has a picture of its own"):
        CalledPictures((latents(0),), (call,), empty=call)


def test_the_digest_tells_latents_captions_and_times_apart():
    plain = pictures()
    others = [
        replace(plain, latents=(*plain.latents[:3], latents(9))),
        replace(plain, calls=(*plain.calls[:3], recorded(9))),
        replace(plain, times=(1.0, 1.0, 1.0, 2.0)),
        replace(plain, empty=recorded(9)),
        replace(plain, calls=(*plain.calls[:3], replace(plain.calls[3], sign=-1.0))),
    ]
    assert plain.digest() == pictures().digest()
    assert len({samples.digest() for samples in (plain, *others)}) == 6


def flux() -> FluxPipeline:
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    vae = AutoencoderKL(latent_channels=1, block_out_channels=(8,), norm_num_groups=4)
    return FluxPipeline(scheduler, vae, None, None, None, None, make_model("FluxTransformer2DModel"))


def config(folder: Path, **further: Any) -> TrainConfig:
    values: dict[str, Any] = {
        "model": "flux",
        "output": folder,
        "data": {"folder": "latents"},
        "optimizer": {"learning_rate": 1e-2, "warmup_steps": 0},
        "steps": 4,
        "batch_size": 2,
        "caption_dropout": 0,
        "checkpoint_every": 2,
        "evaluate_every": 2,
    }
    return TrainConfig(**(values | further))


def called(pipeline: FluxPipeline, count: int = 3) -> CalledPictures:
    """Record captions of different lengths, which need no padding."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    calls = tuple(
        record_call(
            pipeline, prompt_embeds=draw(1, 3 + index, 24), pooled_prompt_embeds=draw(1, 20), height=8, width=8
        )
        for index in range(count)
    )
    return CalledPictures(tuple(draw(*call.shape) for call in calls), calls)


def test_the_trainer_trains_flux_by_its_pipelines_calls_and_goes_on_bit_for_bit(tmp_path):
    base = {name: value.clone() for name, value in flux().transformer.named_parameters()}
    found = []
    for steps, resume in ((4, None), (4, tmp_path / "0" / "checkpoints" / "step-000002")):
        pipeline = flux()
        samples = called(pipeline)
        model = pipeline.transformer
        torch.manual_seed(0)
        mmpreproj.patch(model)
        records: list[StepRecord] = []
        folder = tmp_path / str(len(found))
        train(
            model,
            samples,
            config(folder, steps=steps),
            held_out=called(pipeline, 2),
            resume=resume,
            on_step=records.append,
        )
        found.append(dict(mmpreproj.named_parameters(model)))
        assert records[-1].held_out is not None and records[-1].loss is not None
    own = dict(model.named_parameters())
    assert all(torch.equal(own[name], value) for name, value in base.items())
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_points_and_another_runs_samples_are_refused(tmp_path):
    pipeline = flux()
    samples = called(pipeline)
    mmpreproj.patch(pipeline.transformer)
    with pytest.raises(ConfigError, match=r"adapter.points.*recorded calls"):
        with_points = config(
            tmp_path, adapter=PreProjConfig(points=PointPathConfig()), data={"folder": "f", "points_column": "cloud"}
        )
        train(pipeline.transformer, samples, with_points)
    train(pipeline.transformer, samples, config(tmp_path))
    other = replace(samples, latents=tuple(value + 1 for value in samples.latents))
    with pytest.raises(ConfigError, match="the pictures or captions are no longer those"):
        train(pipeline.transformer, other, config(tmp_path), resume=tmp_path / "checkpoints" / "step-000002")
