"""A training run from its configuration to what it leaves on disk, and what it refuses before anything is lost."""

import copy
import io
import json
import math
import shutil

import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from PIL import Image
from rich.console import Console

import mmpreproj
from mmpreproj.patching.config import PreProjConfig
from mmpreproj.patching.files.storage import adapter_config
from mmpreproj.pipelines import PreProjSD3Pipeline
from mmpreproj.recipes.train import run_training
from mmpreproj.training.checkpoints import checkpoints
from mmpreproj.training.config import ConfigError, read_config
from mmpreproj.training.loop import TrainingDivergedError


def predict(transformer):
    draws = torch.Generator().manual_seed(1)
    with torch.no_grad():
        return transformer(
            hidden_states=torch.randn(2, 3, 8, 8, generator=draws),
            encoder_hidden_states=torch.randn(2, 6, 24, generator=draws),
            pooled_projections=torch.randn(2, 24, generator=draws),
            timestep=torch.tensor([100.0, 700.0]),
            return_dict=False,
        )[0]


def same_weights(first, second):
    expected = second.state_dict()
    return all(torch.equal(value, expected[key]) for key, value in first.state_dict().items())


def tree(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# --- what a run leaves -----------------------------------------------------------------------------------------------


def test_probe_writes_an_adapter_that_gives_the_trained_model_on_its_base(trained, base):
    done, _ = trained["probe"]
    output = done.config.output
    assert {path.name for path in output.iterdir()} == {
        "adapter",
        "checkpoints",
        "config.yaml",
        "loss.png",
        "metrics.jsonl",
        "profile.png",
        "tensorboard",
    }
    assert done.saved == output / "adapter"
    fresh = PreProjSD3Pipeline.from_pretrained(base)
    unpatched = predict(fresh.transformer)
    mmpreproj.load(fresh.transformer, done.saved)
    assert torch.equal(predict(fresh.transformer), predict(done.pipeline.transformer))
    assert not torch.allclose(predict(fresh.transformer), unpatched)


def test_probe_leaves_the_base_as_it_is(trained, base):
    bare = copy.deepcopy(trained["probe"][0].pipeline.transformer)
    mmpreproj.unpatch(bare)
    assert same_weights(bare, PreProjSD3Pipeline.from_pretrained(base).transformer)


def test_nothing_is_written_to_the_base_or_the_pictures(run, make_config, base, pictures):
    before = tree(base), tree(pictures)
    run(make_config())
    assert (tree(base), tree(pictures)) == before


def test_full_writes_a_pipeline_that_gives_the_trained_model(trained, base):
    done, _ = trained["full"]
    assert done.saved == done.config.output / "model"
    fresh = PreProjSD3Pipeline.from_pretrained(done.saved)
    assert same_weights(fresh.transformer, done.pipeline.transformer)
    assert torch.equal(predict(fresh.transformer), predict(done.pipeline.transformer))
    assert fresh.tokenizer.model_max_length == 6
    mmpreproj.unpatch(fresh.transformer)
    original = PreProjSD3Pipeline.from_pretrained(base).transformer
    assert not torch.equal(fresh.transformer.proj_out.weight, original.proj_out.weight)


def test_full_without_adapter_writes_a_stock_pipeline(run, make_config):
    done, _ = run(make_config(mode="full", adapter=None))
    assert not mmpreproj.is_patched(done.pipeline.transformer)
    assert not (done.saved / "preproj").exists()
    assert not (done.config.output / "profile.png").exists()
    assert PreProjSD3Pipeline.from_pretrained(done.saved).transformer.config.in_channels == 3


@pytest.mark.parametrize("mode", ["probe", "full"])
def test_a_model_with_a_vae_is_trained_on_latents_and_saved_with_it(run, make_config, saved_pipelines, mode):
    config = make_config(model=str(saved_pipelines["latents"]), mode=mode, data={"resolution": 16})
    done, _ = run(config)
    assert done.held_out_loss is not None
    if mode == "full":
        fresh = PreProjSD3Pipeline.from_pretrained(done.saved)
        assert same_weights(fresh.vae, done.pipeline.vae)
        assert same_weights(fresh.transformer, done.pipeline.transformer)
        assert "vae" in StableDiffusion3Pipeline.load_config(done.saved)


def test_bf16_trains_an_fp32_adapter_on_a_bf16_base(run, make_config):
    done, _ = run(make_config(precision="bf16"))
    transformer = done.pipeline.transformer
    assert transformer.proj_out.weight.dtype == torch.bfloat16
    assert {parameter.dtype for parameter in mmpreproj.parameters(transformer)} == {torch.float32}
    assert all(torch.isfinite(parameter).all() for parameter in mmpreproj.parameters(transformer))


def test_the_written_configuration_and_metrics_are_those_of_the_run(trained):
    done, _ = trained["probe"]
    assert read_config(done.config.output / "config.yaml") == done.config
    lines = [json.loads(line) for line in (done.config.output / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert [line["held_out"] for line in lines] == [record.held_out for record in done.history]
    assert done.held_out_loss == lines[-1]["held_out"] > 0
    for name in ("loss.png", "profile.png"):
        Image.open(done.config.output / name).verify()


def test_checkpoints_are_those_of_the_mode(trained, base):
    for mode in ("probe", "full"):
        (kept,) = checkpoints(trained[mode][0].config.output / "checkpoints")
        assert kept.name == "step-000002"
        adapter = kept if mode == "probe" else kept / "preproj"
        assert (kept / "transformer").exists() == (mode == "full")
        mmpreproj.load(PreProjSD3Pipeline.from_pretrained(base).transformer, adapter)


def test_the_adapter_says_where_its_base_is(trained, base):
    config = json.loads((trained["probe"][0].saved / "adapter_config.json").read_text())
    assert config["base"]["name_or_path"] == str(base)


def test_held_out_pictures_are_counted_and_not_trained_on(run, make_config, tmp_path):
    done, _ = run(make_config(data={"held_out": 5}))
    assert done.counts == (7, 5)
    none, _ = run(make_config(data={"held_out": 0}, output=tmp_path / "none"))
    assert none.counts == (12, 0)
    assert none.held_out_loss is None


def test_the_same_configuration_gives_the_same_weights(run, make_config, tmp_path):
    first, _ = run(make_config())
    torch.manual_seed(99)
    second, _ = run(make_config(output=tmp_path / "again"))
    other, _ = run(make_config(output=tmp_path / "other", seed=1))
    assert same_weights(first.pipeline.transformer, second.pipeline.transformer)
    assert not same_weights(first.pipeline.transformer, other.pipeline.transformer)


def test_the_run_is_told_step_by_step(trained):
    _, screen = trained["probe"]
    assert "pictures: 12 of 12" in screen
    assert "captions: 4 of 4" in screen
    assert "step 3 of 3" in screen
    assert "held-out" in screen
    assert "adapter 'default' on SD3Transformer2DModel: 2 blocks" in screen


def test_unreadable_pictures_are_skipped_counted_and_listed_at_the_end(run, make_config, pictures):
    (pictures / "03.png").write_text("no picture")
    (pictures / "07.png").write_bytes(b"")
    done, screen = run(make_config())
    assert done.counts == (8, 2)
    assert [picture.name for picture in done.skipped] == ["03.png", "07.png"]
    last = screen.strip().splitlines()[-3:]
    assert "2 pictures could not be used" in last[0]
    assert "03.png: " in last[1]
    assert "07.png: " in last[2]


# --- going on --------------------------------------------------------------------------------------------------------


def test_a_model_with_an_adapter_of_the_same_settings_is_trained_on(run, trained, make_config, tmp_path):
    first, _ = trained["full"]
    start = {name: value.clone() for name, value in mmpreproj.named_parameters(first.pipeline.transformer)}
    tiny = {"learning_rate": 1e-6, "warmup_steps": 0}
    second, _ = run(make_config(model=str(first.saved), output=tmp_path / "on", optimizer=tiny))
    for name, value in mmpreproj.named_parameters(second.pipeline.transformer):
        assert not torch.equal(value, start[name])
        torch.testing.assert_close(value, start[name], rtol=0, atol=1e-5)


def test_a_model_with_an_adapter_of_other_settings_is_refused(run, trained, make_config, tmp_path):
    first, _ = trained["full"]
    differences = r"model carries an adapter already.*: expansion 1\.25, asked for 2\.0\. "
    with pytest.raises(ConfigError, match=differences):
        run(make_config(model=str(first.saved), output=tmp_path / "on", adapter={"expansion": 2}))
    assert not (tmp_path / "on").exists()


def test_null_for_the_adapter_of_a_model_that_carries_one_is_refused(run, trained, make_config, tmp_path):
    first, _ = trained["full"]
    with pytest.raises(ConfigError, match=r"adapter: null trains a stock model, but .* carries an adapter"):
        run(make_config(model=str(first.saved), output=tmp_path / "on", mode="full", adapter=None))


# --- refusals --------------------------------------------------------------------------------------------------------


def test_results_are_not_overwritten_unless_asked_for(run, make_config):
    config = make_config(steps=2)
    run(config)
    before = tree(config.output)
    with pytest.raises(ConfigError, match=r"output: .*run holds the results of an earlier run, .*--overwrite"):
        run(config)
    assert tree(config.output) == before
    run(make_config(steps=1), overwrite=True)
    after = tree(config.output)
    assert after["adapter/adapter_model.safetensors"] != before["adapter/adapter_model.safetensors"]
    assert len(after["metrics.jsonl"].splitlines()) == 2
    assert not any(name.startswith("checkpoints/") for name in after)


def test_a_file_in_place_of_the_output_folder_is_refused(run, make_config, tmp_path):
    (tmp_path / "run").write_text("mine")
    with pytest.raises(ConfigError, match=r"output: .*run is a file; name a folder"):
        run(make_config(), overwrite=True)
    assert (tmp_path / "run").read_text() == "mine"


def break_nothing(pictures):
    return {}


def no_pictures(pictures):
    shutil.rmtree(pictures)
    pictures.mkdir()
    return {}


def missing_file(pictures):
    (pictures / "04.png").unlink()
    return {}


FAULTS = {
    "no pictures": (no_pictures, {}, FileNotFoundError, "no pictures in"),
    "a missing file": (missing_file, {"data": {"on_error": "raise"}}, ValueError, r"04\.png"),
    "a caption column": (break_nothing, {"data": {"caption_column": "txet"}}, ValueError, "txet"),
    "too many held out": (break_nothing, {"data": {"held_out": 12}}, ValueError, "held_out asks for 12 of 12"),
    "an unknown caption": (break_nothing, {"data": {"always_train": ["plum"]}}, ValueError, "'plum'"),
    "an unknown optimiser": (break_nothing, {"optimizer": {"name": "adamww"}}, ConfigError, "adamww"),
    "a precision": (break_nothing, {"precision": "fp16"}, ConfigError, "precision: fp16 needs a GPU"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found_before_the_model_is_loaded_and_leave_nothing(run, make_config, pictures, tmp_path, fault):
    break_it, changes, kind, match = FAULTS[fault]
    break_it(pictures)
    with pytest.raises(kind, match=match):  # loading would fail with another error
        run(make_config(model=str(tmp_path / "no-such-model"), **changes))
    assert not (tmp_path / "run").exists()


def test_a_resolution_that_does_not_fit_the_patches_is_refused(run, make_config, saved_pipelines, tmp_path):
    with pytest.raises(ConfigError, match=r"data\.resolution: 9 pixels .* multiples of 2"):
        run(make_config(data={"resolution": 9}))
    with pytest.raises(ConfigError, match=r"data\.resolution: 18 pixels .* multiples of 4"):
        run(make_config(model=str(saved_pipelines["latents"]), data={"resolution": 18}))
    assert not (tmp_path / "run").exists()


def test_a_model_that_is_nowhere_is_named(run, make_config, tmp_path):
    with pytest.raises((OSError, ValueError), match="no-such-model"):
        run(make_config(model=str(tmp_path / "no-such-model")))
    assert not (tmp_path / "run").exists()


def test_blocks_that_the_model_does_not_have_are_refused(run, make_config, tmp_path):
    with pytest.raises(ValueError, match=r"blocks: \[7\] do not exist; the model has 2 blocks"):
        run(make_config(adapter=PreProjConfig(blocks=[7])))
    assert not (tmp_path / "run").exists()


def test_a_refusal_does_not_cost_the_results_that_were_to_be_overwritten(run, make_config, pictures):
    config = make_config()
    run(config)
    before = tree(config.output)
    for changes in ({"data": {"folder": pictures / "nowhere"}}, {"data": {"resolution": 9}}, {"model": "no/such"}):
        with pytest.raises((OSError, ValueError)):
            run(make_config(**changes), overwrite=True)
    assert tree(config.output) == before


def test_a_run_that_diverges_keeps_checkpoints_and_metrics(run, make_config, base):
    wild = {"name": "sgd", "learning_rate": 1e30, "max_grad_norm": 1e9, "warmup_steps": 1}
    config = make_config(steps=9, checkpoint_every=1, optimizer=wild)
    with pytest.raises(TrainingDivergedError, match=r"at step 2 .*the last good checkpoint is .*step-000001"):
        run(config)
    (kept,) = checkpoints(config.output / "checkpoints")  # step 1 took the warm-up's first rate, which is 0
    mmpreproj.load(PreProjSD3Pipeline.from_pretrained(base).transformer, kept)
    steps = [json.loads(line)["step"] for line in (config.output / "metrics.jsonl").read_text().splitlines()]
    assert steps == [0, 1, 2]
    assert not (config.output / "adapter").exists()


def test_unreadable_pictures_are_listed_when_a_run_fails_too(make_config, pictures):
    (pictures / "03.png").write_text("no picture")
    wild = {"name": "sgd", "learning_rate": 1e30, "max_grad_norm": 1e9, "warmup_steps": 1}
    screen = io.StringIO()
    with pytest.raises(TrainingDivergedError):
        run_training(make_config(steps=9, optimizer=wild), console=Console(file=screen, width=200))
    assert "1 picture could not be used" in screen.getvalue()
    assert "03.png: " in screen.getvalue()


def test_the_held_out_loss_of_the_base_does_not_depend_on_the_adapter(run, make_config, saved_pipelines, tmp_path):
    """The VAE's posterior is sampled: its noise must not follow how much of the random state `patch` has used."""
    losses = []
    for place, adapter in enumerate(({"init": "zero"}, {"init": "zero", "expansion": 3.0})):
        changes = {"model": str(saved_pipelines["latents"]), "adapter": PreProjConfig(**adapter), "steps": 1}
        done, _ = run(make_config(output=tmp_path / f"run{place}", data={"resolution": 16}, **changes))
        losses.append(done.history[0].held_out)
    assert losses[0] == losses[1]


def test_a_run_never_replaces_the_model_it_trains_from(run, make_config, trained, tmp_path):
    output = tmp_path / "first"
    shutil.copytree(trained["full"][0].config.output, output)
    before = tree(output)
    with pytest.raises(ConfigError, match=r"model: .*model would be replaced by this run.*choose another output"):
        run(make_config(output=output, model=str(output / "model")), overwrite=True)
    assert tree(output) == before


def test_more_pixels_than_the_model_has_positions_for_are_refused_before_encoding(run, make_config):
    with pytest.raises(ConfigError, match=r"data\.resolution: 64 pixels are more than .* it takes 16 at most"):
        run(make_config(data={"resolution": 64}))


# --- positions -------------------------------------------------------------------------------------------------------

ROPE = {"positions": {"absolute": "remove", "start": "full", "scaling": "linear"}}


def test_a_model_without_absolute_positions_is_trained_on_larger_pictures_saved_and_trained_on(
    run, make_config, tmp_path
):
    first, _ = run(make_config(mode="full", adapter=ROPE, data={"resolution": 32}))
    config = adapter_config(first.pipeline.transformer, "default")
    assert config.positions.base_size == 16, "that of the pictures, not the model's 4"
    settings = {"model": str(first.saved), "output": tmp_path / "on", "mode": "full", "data": {"resolution": 32}}
    second, messages = run(make_config(adapter=ROPE, **settings))
    assert "training on the adapter that the model" in messages
    assert second.history[0].held_out is None or math.isfinite(second.history[0].held_out)


def test_a_frozen_base_keeps_its_positions(run, make_config):
    with pytest.raises(ConfigError, match=r"adapter\.positions\.absolute: 'remove' takes from the base .* mode: full"):
        run(make_config(adapter=ROPE))


def test_learned_positions_are_trained_alone_on_a_frozen_base(run, make_config, base):
    adapter = {"pre_projection": False, "skip": False, "positions": {}}
    done, _ = run(make_config(adapter=adapter))
    gains = dict(mmpreproj.named_parameters(done.pipeline.transformer))
    assert gains and all(name.endswith(".gain") and bool((gain != 0).all()) for name, gain in gains.items())


def test_an_adapter_without_weights_cannot_be_trained_alone(run, make_config):
    adapter = {"pre_projection": False, "skip": False, "positions": {"start": "full"}}
    with pytest.raises(ConfigError, match=r"adapter: has no weights.*positions\.start: identity, or mode: full"):
        run(make_config(adapter=adapter))


def test_a_wrong_position_is_named(make_config):
    with pytest.raises(ValueError, match=r"positions\.text must be one of '1d', 'none', 'diagonal'; got '2d'"):
        make_config(adapter={"positions": {"text": "2d"}})
    with pytest.raises(ValueError, match=r"positions has no field 'txt'; did you mean 'text'\?"):
        make_config(adapter={"positions": {"txt": "1d"}})


# --- several adapters ------------------------------------------------------------------------------------------------


def test_a_model_with_several_adapters_is_refused_with_their_names(run, make_config, make_several, tmp_path):
    folder = make_several()
    with pytest.raises(ConfigError, match=r"carries several, style, b, and a run trains one; .*mmpreproj\.unpatch"):
        run(make_config(model=str(folder)))
    assert not (tmp_path / "run").exists()


def test_an_adapter_that_is_switched_off_is_refused(run, make_config, make_several):
    folder = make_several(("style",), switched_off=("style",))
    with pytest.raises(ConfigError, match=r"of the model in .* 'style' is switched off .*mmpreproj\.enable"):
        run(make_config(model=str(folder)))


def test_a_named_adapter_is_trained_on_and_keeps_name_and_scale(run, make_config, make_several):
    done, _ = run(make_config(model=str(make_several(("style",))), mode="full"))
    fresh = PreProjSD3Pipeline.from_pretrained(done.saved).transformer
    assert mmpreproj.scales(fresh) == {"style": {0: 0.5, 1: 0.5}}
    assert torch.equal(predict(fresh), predict(done.pipeline.transformer))


@pytest.mark.parametrize("name", ["adahessian", "no_such"])
def test_an_optimiser_that_cannot_work_costs_nothing_of_an_earlier_run(run, make_config, name):
    config = make_config(steps=1)
    run(config)
    before = sorted(path.name for path in config.output.iterdir())
    with pytest.raises(
        ConfigError, match=r"optimizer\.name: .*adahessian.* cannot be used here|timm has no optimiser"
    ):
        run(make_config(steps=1, optimizer={"name": name}), overwrite=True)
    assert sorted(path.name for path in config.output.iterdir()) == before


@pytest.mark.parametrize("name", ["config.yaml", "report.md", "metrics.jsonl"])
def test_files_of_ones_own_are_not_replaced_unless_asked_for(run, make_config, name):
    config = make_config(steps=1)
    config.output.mkdir(parents=True)
    (config.output / name).write_text("mine")
    with pytest.raises(ConfigError, match=rf"output: .*what looks like it \({name}\); .*--overwrite"):
        run(config)
    assert (config.output / name).read_text() == "mine"


def test_a_folder_called_model_that_no_run_wrote_is_never_removed(run, make_config):
    config = make_config(steps=1)
    (config.output / "model").mkdir(parents=True)
    (config.output / "model" / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"output: .*model was not written by a run"):
        run(config, overwrite=True)
    assert (config.output / "model" / "thesis.txt").read_text() == "mine"
