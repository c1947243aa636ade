"""Every family through the trainer: a pipeline's own call is recorded, a probe trains on it, the pipeline draws."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from family_models import ROWS, make_config
from family_pipelines import FamilyPipeline, draw, make_pipeline
from torch import Tensor

import mmpreproj
from mmpreproj.training.calls import CalledPictures, RecordedCall, record_call
from mmpreproj.training.config import TrainConfig
from mmpreproj.training.loop import StepRecord, train

MODELS = {
    # its own switch, without which it gives patches while it trains
    "HiDreamImageTransformer2DModel": {"force_inference_output": True},
    # the last block of SD3 reads no residual, so that of its ControlNet would train in vain
    "SD3ControlNetModel": {"num_layers": 3},
}


def recorded(row: str, **model: Any) -> tuple[FamilyPipeline, RecordedCall]:
    made = make_pipeline(row, model=MODELS.get(row, {}) | model)
    settings = {name: value for name, value in made.call.items() if name not in ("num_inference_steps", "output_type")}
    return made, record_call(made.pipeline, model=made.model, **settings)


def clean(call: RecordedCall, seed: int) -> Tensor:
    return torch.randn(call.shape, generator=torch.Generator().manual_seed(seed))


def config(row: str, folder: Path) -> TrainConfig:
    return TrainConfig(
        model=row,
        output=folder,
        data={"folder": "latents"},
        adapter=make_config(row),
        optimizer={"learning_rate": 1e-2, "warmup_steps": 0},
        steps=1,
        batch_size=2,
        caption_dropout=0,
        checkpoint_every=0,
    )


@pytest.mark.parametrize("row", ROWS)
def test_a_probe_step_moves_the_adapter_alone_and_the_stock_pipeline_draws_with_it(row: str, tmp_path: Path):
    made, call = recorded(row)
    base = draw(made)
    stock = {name: value.clone() for name, value in made.model.state_dict().items()}
    mmpreproj.patch(made.model, make_config(row))
    before = {name: value.detach().clone() for name, value in mmpreproj.named_parameters(made.model)}
    records: list[StepRecord] = []
    samples = CalledPictures((clean(call, 0), clean(call, 1)), (call, call))
    train(made.model, samples, config(row, tmp_path), held_out=samples, on_step=records.append)
    assert records[-1].loss is not None and records[-1].held_out is not None
    assert math.isfinite(records[-1].held_out) and records[-1].held_out > 0
    after = dict(mmpreproj.named_parameters(made.model))
    assert after.keys() == before.keys()
    unread = "transformer_blocks.2." if row == "SD3ControlNetModel" else None
    still = [name for name, value in before.items() if torch.equal(after[name], value)]
    assert not [name for name in still if unread is None or not name.startswith(unread)]
    found = made.model.state_dict()
    assert not [name for name, value in stock.items() if not torch.equal(found[name], value)]
    trained = draw(made)
    assert torch.isfinite(trained).all() and not torch.equal(trained, base)


def test_hidream_without_its_switch_is_told_of_it(tmp_path):
    row = "HiDreamImageTransformer2DModel"
    made, call = recorded(row, force_inference_output=False)
    mmpreproj.patch(made.model)
    with pytest.raises(ValueError, match=r"gives \[1, 4, 16, 4\] for .* \[1, 4, 8, 8\].*force_inference_output=True"):
        train(made.model, CalledPictures((clean(call, 0),), (call,)), config(row, tmp_path))


@pytest.mark.parametrize("row", ["HunyuanVideoTransformer3DModel", "Flux2Transformer2DModel", "SD3Transformer2DModel"])
def test_half_precision_is_recorded_as_single_is(row: str):
    """Rounded times are told apart, and values that rounding left alone are not taken for still ones."""
    made, single = recorded(row)
    made.pipeline.to(torch.bfloat16)
    settings = {
        name: value.bfloat16() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in made.call.items()
        if name not in ("num_inference_steps", "output_type")
    }
    half = record_call(made.pipeline, num_inference_steps=28, **settings)
    assert half.still is None
    assert (half.inputs.time, half.inputs.scale, half.sign) == (single.inputs.time, single.inputs.scale, single.sign)
    assert half.inputs.arguments[half.inputs.latents].dtype == torch.bfloat16


@pytest.mark.parametrize("row", ROWS)
def test_a_recorded_call_is_the_call_that_the_pipeline_makes(row: str):
    """What the pipeline calls its model with at a later step, seen by a hook of the test's own."""
    made, call = recorded(row)
    scheduler, seen = made.pipeline.scheduler, []
    stock = scheduler.step

    def step(*args, **kwargs):
        named = dict(zip(("model_output", "timestep", "sample"), args, strict=False)) | kwargs
        if len(args) > 3:  # CogVideoX's DPM gives more between them
            named |= {"timestep": args[2], "sample": args[4]}
        seen.append({name: named[name] for name in ("model_output", "timestep", "sample")})
        return stock(*args, **kwargs)

    scheduler.step = step
    draw(made, num_inference_steps=5)
    del scheduler.step
    last = seen[-2]
    with torch.no_grad():
        found = call.predict(made.model, last["sample"], torch.as_tensor(last["timestep"]))
    moving = call.moving
    torch.testing.assert_close(found[moving], last["model_output"][moving], rtol=1e-5, atol=1e-5)
