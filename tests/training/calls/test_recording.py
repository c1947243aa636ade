"""What is learned from three steps of a pipeline: the calls it would make at any noise, or why it cannot be told."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from calls_kit import CHANNELS, TOKENS, Model, Pipeline, a_text
from diffusers import (
    AutoencoderKL,
    CogVideoXDDIMScheduler,
    CogVideoXDPMScheduler,
    DDIMScheduler,
    DDPMWuerstchenScheduler,
    DPMSolverMultistepScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    UniPCMultistepScheduler,
)
from family_models import make_model
from torch import Tensor, nn

from mmpreproj.training.calls import DiffusionProcess, FlowProcess, record_call

NOISY = torch.randn(1, TOKENS, CHANNELS, generator=torch.Generator().manual_seed(3))


def expected(pipeline: Pipeline, noisy: Tensor, time: float, text: Tensor) -> Tensor:
    """Give the scheduler's prediction as the pipeline would."""
    told = pipeline.told(torch.tensor(time)).to(pipeline.dtype).expand(1)
    (output,) = pipeline.transformer(pipeline.given(noisy), told, text=text)
    return pipeline.taken(output)


def beside(sample: Tensor) -> Tensor:
    return torch.cat([sample, torch.ones(1, 2, CHANNELS)], dim=1)


def behind(sample: Tensor) -> Tensor:
    return torch.cat([torch.ones(1, 2, CHANNELS), sample], dim=1)


WAYS: dict[str, dict[str, Any]] = {
    "as SD3": {},
    "a time below one": {"told": lambda time: time / 1000},
    "a time from noise to picture": {"told": lambda time: 1000 - time},
    "a time from 0 to 1": {"told": lambda time: 1 - time / 1000},
    "a time in half precision": {"dtype": torch.bfloat16},
    "a negated output": {"taken": lambda output: -output},
    "a picture beside": {"given": beside, "taken": lambda output: output[:, :TOKENS]},
    "a picture before": {"given": behind, "taken": lambda output: output[:, -TOKENS:]},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_recorded_call_is_the_pipelines_own_at_any_noise_and_time(way: str):
    pipeline = Pipeline(**WAYS[way])
    call = record_call(pipeline, text=a_text())
    assert call.shape == (1, TOKENS, CHANNELS)
    for time in (3.0, 402.0, 1000.0):
        found = call.predict(pipeline.transformer, NOISY, torch.tensor(time))
        assert torch.equal(found, expected(pipeline, NOISY, time, a_text()))


def test_another_captions_call_differs():
    pipeline = Pipeline()
    one, other = (record_call(pipeline, text=a_text(seed)) for seed in (0, 1))
    time = torch.tensor(500.0)
    found = one.predict(pipeline.transformer, NOISY, time)
    assert not torch.equal(found, other.predict(pipeline.transformer, NOISY, time))


def test_the_pipeline_is_left_as_it_was():
    pipeline = Pipeline()
    with pytest.raises(ValueError):
        record_call(pipeline, text=a_text(), batch=2)
    record_call(pipeline, text=a_text())
    assert "step" not in vars(pipeline.scheduler)
    assert not pipeline.transformer._forward_hooks
    stock = pipeline(a_text(), num_inference_steps=4)
    assert torch.equal(stock, Pipeline()(a_text(), num_inference_steps=4))


def test_a_step_that_someone_replaced_stays_theirs():
    pipeline = Pipeline()
    stock = pipeline.scheduler.step

    def own(*args: Any, **kwargs: Any) -> Any:
        return stock(*args, **kwargs)

    pipeline.scheduler.step = own
    record_call(pipeline, text=a_text())
    assert pipeline.scheduler.step is own


def test_an_error_of_the_pipeline_comes_through_and_leaves_no_hook():
    pipeline = Pipeline()
    with pytest.raises(TypeError, match="prompt"):
        record_call(pipeline, prompt="a fox")
    assert not pipeline.transformer._forward_hooks and "step" not in vars(pipeline.scheduler)


@pytest.mark.parametrize(
    ("scheduler", "process"),
    [
        (FlowMatchEulerDiscreteScheduler(shift=3.0), FlowProcess()),
        (FlowMatchEulerDiscreteScheduler(num_train_timesteps=500), FlowProcess(500)),
        (FlowMatchEulerDiscreteScheduler(invert_sigmas=True), FlowProcess(inverted=True)),
        (UniPCMultistepScheduler(use_flow_sigmas=True, prediction_type="flow_prediction"), FlowProcess()),
    ],
)
def test_flows_are_recognised(scheduler: Any, process: FlowProcess):
    assert record_call(Pipeline(scheduler), text=a_text()).process == process


@pytest.mark.parametrize(
    ("scheduler", "prediction"),
    [
        (DDIMScheduler(), "epsilon"),
        (DDIMScheduler(prediction_type="v_prediction"), "v_prediction"),
        (CogVideoXDDIMScheduler(prediction_type="v_prediction", rescale_betas_zero_snr=True), "v_prediction"),
        (CogVideoXDPMScheduler(prediction_type="v_prediction"), "v_prediction"),
        (DPMSolverMultistepScheduler(prediction_type="sample"), "sample"),
    ],
)
def test_diffusion_is_recognised(scheduler: Any, prediction: str):
    process = record_call(Pipeline(scheduler), text=a_text()).process
    assert isinstance(process, DiffusionProcess) and process.prediction == prediction
    torch.testing.assert_close(torch.tensor(process.kept), scheduler.alphas_cumprod.float())


class ToldOtherTimes(FlowMatchEulerDiscreteScheduler):
    """Noise levels are shifted, the times that go with them are not, as CogView4's pipeline sets them."""

    def set_timesteps(self, steps: int, **settings: Any) -> None:
        times = torch.linspace(1000, 1, steps)
        super().set_timesteps(sigmas=(times / 1000).tolist(), timesteps=times.tolist(), mu=0.7)


def test_times_that_noise_levels_do_not_say_are_followed():
    scheduler = ToldOtherTimes(use_dynamic_shifting=True)
    process = record_call(Pipeline(scheduler), text=a_text()).process
    assert isinstance(process, FlowProcess) and process.shift == pytest.approx(
        torch.tensor(0.7).exp().item(), rel=1e-3
    )
    scheduler.set_timesteps(5)
    torch.testing.assert_close(process.times(scheduler.sigmas[:-1]), scheduler.timesteps, rtol=1e-3, atol=0.05)


def silent() -> Pipeline:
    pipeline = Pipeline()
    pipeline.transformer.forward = lambda hidden_states, timestep, text=None: (hidden_states * 0,)  # type: ignore
    return pipeline


REFUSED: dict[str, tuple[Callable[[], Pipeline], dict[str, Any], str]] = {
    "guided by two calls": (lambda: Pipeline(calls=2), {}, "calls the model 2 times a step, with classifier-free"),
    "guided by a batch of two": (
        lambda: Pipeline(given=lambda sample: torch.cat([sample] * 2), taken=lambda output: output[:1]),
        {},
        r"two of each sample \(hidden_states\), with classifier-free guidance; record without: guidance_scale=1.0",
    ),
    "two captions": (lambda: Pipeline(), {"batch": 2}, "2 samples at once; record one caption at a time"),
    "too few steps": (lambda: Pipeline(), {"num_inference_steps": 2}, "took 2 steps.*give at least 3"),
    "a sample that is changed": (
        lambda: Pipeline(given=lambda sample: sample * 2),
        {},
        r"none of the model's arguments holds the scheduler's sample \[1, 6, 4\] as it is: hidden_states \[1, 6, 4\]",
    ),
    "an output that is changed": (
        lambda: Pipeline(taken=lambda output: output * 2),
        {},
        r"is given \[1, 6, 4\], which is neither the model's output \[1, 6, 4\] nor a part.*guidance",
    ),
    "no time": (
        lambda: Pipeline(told=lambda time: torch.tensor(5.0)),
        {},
        "nothing changes from step to step besides hidden_states; expected one tensor",
    ),
    "two times": (
        lambda: Pipeline(further=lambda time: {"later": time - 1}),
        {},
        "timestep, later changes from step to step besides hidden_states",
    ),
    "a time of another kind": (
        lambda: Pipeline(told=lambda time: time.sqrt()),
        {},
        "cannot tell how timestep follows from the scheduler's timestep: 31.6.* at 1000",
    ),
    "zeros": (silent, {}, "the model gives zeros, .* record with trained weights"),
    "several times at once": (
        lambda: Pipeline(told=lambda time: torch.stack([time, time * 0])),
        {},
        "timestep tells several times at once",
    ),
    "a scheduler of another kind": (
        lambda: Pipeline(DDPMWuerstchenScheduler()),
        {},
        r"cannot tell how DDPMWuerstchenScheduler \(prediction_type None\) mixes noise in.*pipeline.scheduler",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_told_is_refused_with_the_reason(case: str):
    make, inputs, told = REFUSED[case]
    pipeline = make()
    with pytest.raises(ValueError, match=told):
        record_call(pipeline, text=a_text(), **inputs)
    assert not pipeline.transformer._forward_hooks


def test_a_scheduler_that_scales_samples_is_refused():
    """Euler's sample is not what the model sees."""
    with pytest.raises(ValueError, match="none of the model's arguments holds the scheduler's sample"):
        scheduler = EulerDiscreteScheduler()
        record_call(
            Pipeline(scheduler, given=lambda sample: scheduler.scale_model_input(sample, scheduler.timesteps[0])),
            text=a_text(),
        )


def test_a_model_that_the_pipeline_does_not_run_is_refused():
    with pytest.raises(ValueError, match=r"Pipeline with Model calls the model 0 times.*model=…"):
        record_call(Pipeline(), model=Model(), text=a_text())


class Editing(Pipeline):
    """Sets the first two tokens, of a picture to edit, before each step."""

    def __call__(self, text: Tensor, **settings: Any) -> Tensor:
        def given(sample: Tensor) -> Tensor:
            sample[:, :2] = 0.25
            return sample

        self.given = given
        return super().__call__(text, **settings)


def test_what_no_step_changes_is_neither_noised_nor_counted():
    pipeline = Editing()
    call = record_call(pipeline, text=a_text())
    assert call.still is not None and call.still[:, :2].all() and not call.still[:, 2:].any()
    assert torch.equal(call.moving, ~call.still)
    edited = NOISY.clone()
    edited[:, :2] = 0.25
    time = torch.tensor(402.0)
    assert torch.equal(call.predict(pipeline.transformer, NOISY, time), expected(Pipeline(), edited, 402.0, a_text()))


def test_values_that_a_small_prediction_leaves_as_they_were_are_not_still():
    pipeline = Pipeline()
    stock = pipeline.transformer.forward

    def half(hidden_states: Tensor, timestep: Tensor, text: Tensor | None = None) -> tuple[Tensor]:
        return (stock(hidden_states, timestep, text)[0] * torch.tensor([1.0, 0.0, 0.0, 1.0]),)

    pipeline.transformer.forward = half  # type: ignore
    assert record_call(pipeline, text=a_text()).still is None


def test_a_pipeline_that_begins_in_another_dtype_is_recorded_in_its_models():
    seen: list[Tensor] = []

    def told(time: Tensor) -> Tensor:
        seen.append(time)
        return time if len(seen) == 1 else time.bfloat16()

    pipeline = Pipeline(told=told)
    pipeline.dtype = None  # type: ignore
    assert record_call(pipeline, text=a_text()).inputs.scale == 1.0


def residuals(output: tuple[list[Tensor], Tensor]) -> dict[str, Any]:
    return {"residuals": output[0]}


def test_a_model_that_feeds_the_one_behind_it_is_recorded_with_it():
    pipeline = Pipeline(controlled=residuals, told=lambda time: time / 1000)
    assert pipeline.controlnet is not None
    call = record_call(pipeline, model=pipeline.controlnet, text=a_text())
    assert call.behind is not None and call.behind.feeds == {"residuals": 0}
    found = call.predict(pipeline.controlnet, NOISY, torch.tensor(402.0))
    time = torch.tensor([0.402])
    (expected,) = pipeline.transformer(NOISY, time, a_text(), pipeline.controlnet(NOISY, time)[0])
    assert torch.equal(found, expected)
    found.sum().backward()
    assert pipeline.controlnet.map.weight.grad is not None


def test_what_changes_a_feeding_models_output_is_refused():
    pipeline = Pipeline(controlled=lambda output: {"residuals": [part * 2 for part in output[0]]})
    with pytest.raises(ValueError, match="Pipeline with ControlNet: Model is given nothing of what the model gives"):
        record_call(pipeline, model=pipeline.controlnet, text=a_text())


def test_a_model_that_is_fed_says_what_changes():
    with pytest.raises(ValueError, match="timestep, residuals changes from step to step"):
        record_call(Pipeline(controlled=residuals), text=a_text())


def test_flux_is_recorded_through_its_own_pipeline():
    vae = AutoencoderKL(latent_channels=4, block_out_channels=(8,), norm_num_groups=4)
    pipeline = FluxPipeline(
        FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae,
        None,
        None,
        None,
        None,
        make_model("FluxTransformer2DModel", in_channels=16),
    )
    text = {"prompt_embeds": torch.randn(1, 5, 24), "pooled_prompt_embeds": torch.randn(1, 20)}
    call = record_call(pipeline, **text, height=16, width=24)
    assert call.shape == (1, 8 * 12, 16)
    assert (call.inputs.latents, call.inputs.time, call.inputs.scale) == ("hidden_states", "timestep", 1 / 1000)
    assert call.inputs.arguments["img_ids"].shape == (8 * 12, 3)
    assert isinstance(pipeline.transformer, nn.Module) and not hasattr(pipeline, "_progress_bar_config")
