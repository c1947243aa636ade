"""Pictures of fixed prompts at each evaluation: made by the live model, the same every time, and at no cost to it."""

import copy

import numpy as np
import pytest
import torch
from diffusers import SD3Transformer2DModel
from PIL import Image

from mmpreproj import PreProjConfig, patch
from mmpreproj.pipelines import PreProjSD3Pipeline
from mmpreproj.recipes.figures import draw_grid
from mmpreproj.recipes.train.validation import check_prompts, draw_prompts
from mmpreproj.recipes.train.watching import Watch
from mmpreproj.training.config import ConfigError
from mmpreproj.training.stepper import Stepper

PROMPTS = ("red apple", "blue tree")
DRAWN = {"prompts": PROMPTS, "count": 2, "steps": 2}


@pytest.fixture
def stage(saved_pipelines, make_config, shake):
    """A pipeline as it is in training, its adapter strong; embeddings of prompts; and a configuration that draws."""

    def make(*, kind="pixels", adapter=None, dtype=torch.float32, **validation):
        pipeline = PreProjSD3Pipeline.from_pretrained(saved_pipelines[kind], dtype=dtype)
        patch(pipeline.transformer, adapter)
        shake(pipeline.transformer)
        config = make_config(validation={**DRAWN, **validation})
        prompts = embed(pipeline, ("", *config.validation.prompts))
        pipeline.text_encoder = None
        pipeline.transformer.train()
        return pipeline, prompts, config

    return make


def embed(pipeline, prompts):
    """Encode prompts as the cache holds them."""
    found = {}
    for prompt in prompts:
        tokens, _, pooled, _ = pipeline.encode_prompt(
            prompt, prompt_2=None, prompt_3=None, do_classifier_free_guidance=False, max_sequence_length=6
        )
        mask = pipeline.encode_prompt_mask(prompt, max_sequence_length=6)
        found[prompt] = {"tokens": tokens[0], "pooled": pooled[0], "mask": mask[0]}
    return found


@pytest.fixture
def rows(monkeypatch):
    """The rows of every grid that is drawn."""
    drawn = []

    def keep(grid, path, **settings):
        drawn.append([(label, [np.asarray(picture) for picture in pictures]) for label, pictures in grid])
        draw_grid(grid, path, **settings)

    monkeypatch.setattr("mmpreproj.recipes.train.validation.draw_grid", keep)
    return drawn


def as_generated(saved, transformer, prompt, *, guidance, count=2, seed=0, size=8):
    """Make the pictures of a prompt as a person would, from the prompt's text."""
    pipe = PreProjSD3Pipeline.from_pretrained(saved, transformer=transformer)
    pipe.set_progress_bar_config(disable=True)
    return [
        np.asarray(
            pipe(
                prompt,
                height=size,
                width=size,
                num_inference_steps=2,
                guidance_scale=guidance,
                max_sequence_length=6,
                generator=torch.Generator().manual_seed(seed + place),
            ).images[0]
        )
        for place in range(count)
    ]


# --- what is drawn ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("guidance", [1.0, 5.0])
@pytest.mark.parametrize("adapter", [None, PreProjConfig(mask_padding=True)], ids=["plain", "masked"])
def test_the_grid_shows_what_the_model_generates_from_the_prompts_text(
    stage, saved_pipelines, rows, tmp_path, guidance, adapter
):
    pipeline, prompts, config = stage(adapter=adapter, guidance=guidance, seed=3)
    assert draw_prompts(pipeline, prompts, config, tmp_path / "grid.png") is None
    pipeline.transformer.eval()
    for prompt, pictures in rows[0]:
        expected = as_generated(saved_pipelines["pixels"], pipeline.transformer, prompt, guidance=guidance, seed=3)
        for made, wanted in zip(pictures, expected, strict=True):
            assert np.abs(made.astype(int) - wanted.astype(int)).max() <= 1  # in batches of two and of one
    assert [label for label, _ in rows[0]] == list(PROMPTS)


def test_a_mask_of_padding_reaches_the_model(stage, rows, tmp_path):
    pipeline, prompts, config = stage(adapter=PreProjConfig(mask_padding=True))
    draw_prompts(pipeline, prompts, config, tmp_path / "a.png")
    whole = {text: {**one, "mask": torch.ones_like(one["mask"])} for text, one in prompts.items()}
    assert not all(one["mask"].all() for one in prompts.values())
    draw_prompts(pipeline, whole, config, tmp_path / "b.png")
    assert any(not np.array_equal(a, b) for a, b in zip(rows[0][0][1], rows[1][0][1], strict=True))


def test_guidance_leads_away_from_the_negative_prompt(stage, rows, tmp_path):
    pipeline, prompts, config = stage(guidance=5.0)
    draw_prompts(pipeline, prompts, config, tmp_path / "a.png")
    draw_prompts(pipeline, prompts | {"": prompts["blue tree"]}, config, tmp_path / "b.png")
    assert not np.array_equal(rows[0][0][1][0], rows[1][0][1][0])


def test_pictures_have_the_size_that_is_asked_for(stage, rows, tmp_path):
    pipeline, prompts, config = stage(height=12, width=8, count=3)
    assert draw_prompts(pipeline, prompts, config, tmp_path / "grid.png") is None
    assert [[picture.shape for picture in pictures] for _, pictures in rows[0]] == [[(12, 8, 3)] * 3] * 2


@pytest.mark.parametrize(("side", "cell"), [(8, 96), (96, 96), (200, 200), (1024, 256)])
def test_pictures_are_shown_at_their_own_size_within_limits(stage, monkeypatch, tmp_path, side, cell):
    pipeline, prompts, config = stage(guidance=1.0)
    picture = Image.new("RGB", (side // 2, side))
    monkeypatch.setattr("mmpreproj.recipes.train.validation._generate", lambda *_: [picture] * 2)
    draw_prompts(pipeline, prompts, config, tmp_path / "grid.png")
    with Image.open(tmp_path / "grid.png") as grid:
        assert grid.size == (180 + 2 * cell, 2 * cell)


def test_an_adapter_with_a_point_path_draws_without_clouds(stage, rows, tmp_path):
    pipeline, prompts, config = stage(adapter=PreProjConfig.from_dict({"points": {"frequencies": 2, "shown": 8}}))
    assert draw_prompts(pipeline, prompts, config, tmp_path / "grid.png") is None
    assert len(rows[0]) == 2


def test_a_vae_is_brought_where_it_decodes_and_taken_back(stage, saved_pipelines, rows, tmp_path):
    pipeline, prompts, config = stage(kind="latents", height=16, width=16, guidance=1.0)
    moved, to = [], pipeline.vae.to
    pipeline.vae.to = lambda device: moved.append(torch.device(device).type) or to(device)
    assert draw_prompts(pipeline, prompts, config, tmp_path / "grid.png") is None
    del pipeline.vae.to
    assert moved[0] == next(pipeline.transformer.parameters()).device.type and moved[-1] == "cpu"
    pipeline.transformer.eval()
    expected = as_generated(saved_pipelines["latents"], pipeline.transformer, PROMPTS[0], guidance=1.0, size=16)
    for made, wanted in zip(rows[0][0][1], expected, strict=True):
        assert np.abs(made.astype(int) - wanted.astype(int)).max() <= 1


# --- what it costs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
def test_drawing_changes_no_weight_no_random_state_no_flag_and_is_the_same_every_time(stage, rows, tmp_path, training):
    pipeline, prompts, config = stage()
    pipeline.transformer.train(training)
    flags = {path: module.training for path, module in pipeline.transformer.named_modules()}
    before = copy.deepcopy(pipeline.transformer.state_dict())
    grads = {name: value.requires_grad for name, value in pipeline.transformer.named_parameters()}
    bar = dict(getattr(pipeline, "_progress_bar_config", {}))
    torch.manual_seed(41)
    states = torch.get_rng_state()
    for number in range(2):
        assert draw_prompts(pipeline, prompts, config, tmp_path / f"{number}.png") is None
    assert torch.equal(torch.get_rng_state(), states)
    assert all(torch.equal(value, before[name]) for name, value in pipeline.transformer.state_dict().items())
    assert {path: module.training for path, module in pipeline.transformer.named_modules()} == flags
    assert {name: value.requires_grad for name, value in pipeline.transformer.named_parameters()} == grads
    assert getattr(pipeline, "_progress_bar_config", {}) == bar
    assert (tmp_path / "0.png").read_bytes() == (tmp_path / "1.png").read_bytes()
    for (_, first), (_, second) in zip(*rows, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


def test_without_a_path_the_model_is_called_all_the_same(stage, rows, tmp_path):
    pipeline, prompts, config = stage(guidance=5.0)
    calls = []
    pipeline.transformer.register_forward_hook(lambda *_: calls.append(1))
    assert draw_prompts(pipeline, prompts, config, None) is None
    assert len(calls) == len(PROMPTS) * DRAWN["steps"] and not rows


@pytest.mark.parametrize("fault", ["not finite", "no memory", "no place"])
def test_a_drawing_that_fails_says_why_and_leaves_all_as_it_was(stage, tmp_path, fault):
    pipeline, prompts, config = stage(kind="latents", height=16, width=16)
    path = tmp_path / "grid.png"
    if fault == "not finite":
        with torch.no_grad():
            pipeline.transformer.proj_out.bias.fill_(torch.nan)
    elif fault == "no memory":

        def full(*_):
            raise torch.OutOfMemoryError("out of memory: tried to allocate 99 GiB")

        pipeline.transformer.register_forward_pre_hook(full)
    else:
        path.mkdir()
    reason = draw_prompts(pipeline, prompts, config, path)
    expected = {"not finite": "NaN or infinite", "no memory": "tried to allocate", "no place": "directory"}
    assert expected[fault] in reason
    assert pipeline.transformer.training and pipeline.vae.device.type == "cpu"


# --- in a run --------------------------------------------------------------------------------------------------------


def test_a_run_draws_a_grid_at_each_evaluation(run, make_config):
    done, screen = run(make_config(steps=4, evaluate_every=2, validation=DRAWN))
    folder = done.config.output / "previews"
    names = [f"pictures-{step:06}.png" for step in (0, 2, 4)]
    assert sorted(path.name for path in folder.iterdir()) == names
    sizes = []
    for path in sorted(folder.iterdir()):
        with Image.open(path) as image:
            image.load()
            sizes.append(image.size)
    assert sizes[0] == sizes[1] == sizes[2] == (180 + 2 * 96, 2 * 96), "a cell of 96 pixels each, beside the prompts"
    assert (folder / "pictures-000002.png").read_bytes() != (folder / "pictures-000004.png").read_bytes()
    assert "no preview" not in screen
    plain, _ = run(make_config(steps=4, evaluate_every=2, output=done.config.output.parent / "plain"))
    for record, other in zip(done.history, plain.history, strict=True):
        assert (record.loss, record.held_out) == (other.loss, other.held_out), "drawing costs the training nothing"


@pytest.mark.parametrize("held_out", [0, 2])
def test_the_first_grid_is_of_the_base_and_costs_the_training_nothing(run, make_config, rows, tmp_path, held_out):
    settings = {"steps": 4, "evaluate_every": 2, "data": {"held_out": held_out}, "checkpoint_every": 2}
    done, _ = run(make_config(**settings, validation=DRAWN))
    first = rows[0]
    pipeline = PreProjSD3Pipeline.from_pretrained(done.config.model)
    prompts = embed(pipeline, ("", *PROMPTS))
    assert draw_prompts(pipeline, prompts, done.config, tmp_path / "base.png") is None
    for (label, made), (prompt, wanted) in zip(first, rows[-1], strict=True):
        assert label == prompt
        for one, other in zip(made, wanted, strict=True):
            assert np.abs(one.astype(int) - other.astype(int)).max() <= 1
    rows.clear()
    without, _ = run(make_config(**settings, validation={**DRAWN, "at_start": False}, output=tmp_path / "without"))
    assert len(rows) == 2 and not (without.config.output / "previews" / "pictures-000000.png").exists()
    assert [(one.loss, one.held_out) for one in done.history] == [(one.loss, one.held_out) for one in without.history]


def test_a_run_that_is_taken_up_draws_no_second_start(run, make_config, rows):
    settings = {"steps": 4, "evaluate_every": 2, "checkpoint_every": 2, "validation": DRAWN}
    done, _ = run(make_config(**settings))
    path = done.config.output / "previews" / "pictures-000000.png"
    path.write_bytes(b"the first")
    rows.clear()
    run(make_config(**settings), resume="2")
    assert len(rows) == 1 and path.read_bytes() == b"the first"


def test_the_averaged_weights_are_drawn(run, make_config, monkeypatch):
    drawn, trained = [], []
    average, evaluate = Stepper.averaged, Watch.evaluate

    def look(self, step):
        drawn.append(copy.deepcopy(self.pipeline.transformer.state_dict()))
        evaluate(self, step)

    def keep(self):
        trained.append((copy.deepcopy(self.transformer.state_dict()), self.average.state_dict()["averages"]))
        return average(self)

    monkeypatch.setattr(Watch, "evaluate", look)
    monkeypatch.setattr(Stepper, "averaged", keep)
    ema = {"decay": 0.9, "warmup": False}
    run(make_config(steps=2, evaluate_every=0, ema=ema, validation=DRAWN))
    weights, averages = trained[-1]
    changed = [name for name, value in drawn[-1].items() if not torch.equal(value, weights[name])]
    assert len(changed) == len(averages) > 0
    assert all(any(torch.equal(drawn[-1][name], average) for average in averages) for name in changed)


def test_a_failing_drawing_is_told_and_does_not_end_a_run(run, make_config, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr("mmpreproj.recipes.train.validation.draw_grid", fail)
    done, screen = run(make_config(steps=2, evaluate_every=1, validation=DRAWN))
    assert [record.step for record in done.history] == [0, 1, 2]
    for step in (1, 2):
        assert f"no preview of pictures at step {step}: CUDA out of memory" in screen


def test_thawed_norms_and_biases_draw_on_a_base_of_half_precision(run, make_config, base, tmp_path):
    pipeline = PreProjSD3Pipeline.from_pretrained(base)
    pipeline.register_modules(
        transformer=SD3Transformer2DModel.from_config({**pipeline.transformer.config, "qk_norm": "rms_norm"})
    )
    pipeline.save_pretrained(tmp_path / "normed")
    settings = {"model": str(tmp_path / "normed"), "thaw": ["norms", "biases"], "precision": "bf16"}
    done, screen = run(make_config(steps=2, validation=DRAWN, **settings))
    assert "no preview" not in screen
    assert (done.config.output / "previews" / "pictures-000002.png").is_file()


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["height", "width"])
def test_pictures_that_the_model_cannot_make_are_refused_before_encoding(run, make_config, tmp_path, side):
    with pytest.raises(ConfigError, match=rf"validation\.{side}: 9 pixels cannot be cut .* takes multiples of 2"):
        run(make_config(validation={**DRAWN, side: 9}))
    with pytest.raises(ConfigError, match=rf"validation\.{side}: 18 pixels are more than .* it takes 16 at most"):
        run(make_config(validation={**DRAWN, side: 18}))
    assert not (tmp_path / "run").exists() and not (tmp_path / "cache").exists()


def test_sizes_without_prompts_are_not_looked_at(stage, make_config):
    pipeline, _, _ = stage()
    check_prompts(pipeline, make_config(validation={"height": 9}))
