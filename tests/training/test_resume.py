"""Going on from a checkpoint: the same bits as never stopping, or a refusal that says what is different."""

import copy
import dataclasses
import json
import os
import signal
from itertools import islice

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from safetensors.torch import load_file

import mmpreproj
from mmpreproj.data.encoding import Latents
from mmpreproj.training.batches import BucketBatches
from mmpreproj.training.checkpoints import checkpoints, find_checkpoint
from mmpreproj.training.config import ConfigError
from mmpreproj.training.loop import TrainingDivergedError, TrainingStoppedError, make_accelerator, train
from mmpreproj.training.lora import inject_lora

STEPS, STOP = 6, 3
LORA = {"rank": 2, "dropout": 0.1}
EMA = {"decay": 0.9}


class TwoSizes(Latents):
    """Latents of 8 × 8 and of 4 × 8 cells by turns, with a spread, which can be mirrored."""

    def __init__(self, values):
        self.values = values  # [N, C, h, w]

    def __len__(self):
        return len(self.values)

    def read(self, index, *, mirrored=False):
        mean = self.values[index] if index % 2 else self.values[index, :, :4]
        return mean.flip(-1) if mirrored else mean, mean.abs()

    def subset(self, indices):
        raise NotImplementedError

    def identity(self):
        return [str(float(value.sum())) for value in self.values]


@pytest.fixture
def make_model(make_transformer):
    """Build what a configuration trains, always from the same bits."""

    def make(config, dtype=torch.float32):
        transformer = make_transformer("sd35", seed=3)
        with torch.random.fork_rng():
            torch.manual_seed(4)
            if config.adapter is not None:
                mmpreproj.patch(transformer)
            if config.lora is not None:
                inject_lora(transformer, config.lora)
        return transformer.to(dtype)

    return make


@pytest.fixture
def bucketed(make_pictures):
    """Pictures of two sizes, half of whose draws are mirrored."""
    pictures = make_pictures(9)
    sizes = tuple("wide" if index % 2 else "tall" for index in range(9))
    return dataclasses.replace(pictures, latents=TwoSizes(pictures.latents.values), groups=sizes, flip=0.5)


def stop_after(step, number=signal.SIGINT):
    """Ask the process to stop so that this is the last step: a signal is heard during the next one."""

    def on_step(record):
        if record.step == step - 1:
            os.kill(os.getpid(), number)

    return on_step


class Run:
    """One process's share of a run: a new model, new objects of accelerate, another random state."""

    def __init__(self, model, pictures, config, **settings):
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        torch.manual_seed(torch.seed())
        self.model, self.config, self.records, self.stopped = model, config, [], None
        on_step = settings.pop("on_step", lambda record: None)
        try:
            train(model, pictures, config, on_step=lambda one: (self.records.append(one), on_step(one)), **settings)
        except TrainingStoppedError as error:
            self.stopped = error

    @property
    def weights(self):
        return self.model.state_dict()

    @property
    def state(self):
        """Everything in the last checkpoint's state: weights, optimiser, schedule, average, random numbers."""
        folder = checkpoints(self.config.output / "checkpoints")[-1] / "state"
        return {
            path.name: load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=False)
            for path in folder.iterdir()
        }


def same(first, second):
    """Tell whether two nests of containers hold the same bits."""
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(same, first, second))
    if isinstance(first, torch.Tensor):
        return first.dtype == second.dtype and torch.equal(first, second)
    return bool((first == second).all()) if hasattr(first, "all") else first == second


def told(records):
    """What records say of the run, but for its speed, which no two runs share, and what is measured by choice."""
    return [(one.step, one.loss, one.grad_norm, one.learning_rate, one.losses) for one in records if one.step]


CASES = {
    "adapter and LoRA with dropout, average, accumulated": {"lora": LORA, "ema": EMA, "gradient_accumulation": 2},
    "adapter and norms in bf16, average": {"thaw": ("norms", "biases"), "ema": EMA, "precision": "bf16"},
    "full": {"mode": "full", "gradient_accumulation": 2},
}
MORE = {
    "adapter": {},
    "adapter, average": {"ema": EMA},
    "LoRA with dropout": {"adapter": None, "lora": LORA},
    "norms": {"adapter": None, "thaw": ("norms",)},
    "full, checkpointing, average": {"mode": "full", "ema": EMA, "gradient_checkpointing": True},
    "prodigy": {"optimizer": {"name": "prodigy", "learning_rate": 1.0}},
    "muon": {"optimizer": {"name": "muon", "schedule": "constant"}},
}
HEAVY = {
    f"{mode}, {workers} workers, {'average' if ema else 'no average'}, {batches} batches a step": {
        **settings,
        "data": {"folder": ".", "workers": workers},
        "ema": ema,
        "gradient_accumulation": batches,
    }
    for mode, settings in {
        "adapter": {},
        "adapter and LoRA": {"lora": LORA},
        "norms": {"thaw": ("norms",)},
        "full": {"mode": "full"},
    }.items()
    for workers in (0, 2)
    for ema in (None, EMA)
    for batches in (1, 2)
}


@pytest.fixture
def check_resuming(make_config, make_model, tmp_path):
    """Fail unless a run that is stopped and taken up gives the bits of one that is not."""

    def check(pictures, held_out, **changes):
        def run(name, *, dtype=torch.float32, resume=None, on_step=lambda record: None, **cadence):
            config = make_config(output=tmp_path / name, steps=STEPS, **cadence, **changes)
            dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
            model = make_model(config, dtype)
            return Run(model, pictures, config, held_out=held_out, resume=resume, on_step=on_step)

        at_once = run("at once", checkpoint_every=2, keep_checkpoints=1, evaluate_every=2)
        stopped = run("stopped", checkpoint_every=STEPS, evaluate_every=5, on_step=stop_after(STOP))
        assert stopped.stopped.step == STOP
        latest = find_checkpoint(tmp_path / "stopped" / "checkpoints", "latest")
        resumed = run("stopped", checkpoint_every=STEPS, evaluate_every=5, resume=latest)
        assert told(stopped.records) + told(resumed.records) == told(at_once.records)
        assert resumed.records[-1].held_out == at_once.records[-1].held_out
        assert same(resumed.weights, at_once.weights)
        assert same(resumed.state, at_once.state)
        assert not same(stopped.weights, resumed.weights)

    return check


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in MORE)])
def test_a_run_that_is_stopped_and_taken_up_gives_the_bits_of_one_that_is_not(check_resuming, make_pictures, case):
    """Neither where it stops, nor how often it measures and saves in between, may matter."""
    check_resuming(make_pictures(7), make_pictures(2, seed=5), **(CASES | MORE)[case])


@pytest.mark.slow
@pytest.mark.parametrize("case", HEAVY)
def test_so_does_every_combination_with_buckets_and_flips(check_resuming, bucketed, make_pictures, case):
    check_resuming(bucketed, make_pictures(2, seed=5), **HEAVY[case])


def test_buckets_flips_and_loader_processes_go_on_too(check_resuming, bucketed, make_pictures):
    check_resuming(bucketed, make_pictures(2, seed=5), data={"folder": ".", "workers": 2}, lora=LORA)


# --- what moves ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, {"lora": LORA}, {"thaw": ("norms",)}], ids=["adapter", "LoRA", "norms"])
def test_what_trains_is_fp32_on_a_bf16_base_and_moves_after_going_on(make_config, make_model, make_pictures, changes):
    config = make_config(steps=STEPS, checkpoint_every=STOP, precision="bf16", **changes)
    Run(make_model(config, torch.bfloat16), make_pictures(), config)
    before = load_file(config.output / "checkpoints" / "step-000003" / "state" / "trained.safetensors")
    dtypes = {}

    def on_step(record):
        dtypes.update({name: value.dtype for name, value in model.named_parameters() if value.requires_grad})

    model = make_model(config, torch.bfloat16)
    latest = find_checkpoint(config.output / "checkpoints", "3")
    Run(model, make_pictures(), config, resume=latest, on_step=on_step)
    assert {value.dtype for value in before.values()} == set(dtypes.values()) == {torch.float32}
    assert dtypes.keys() == before.keys()
    after = load_file(config.output / "checkpoints" / "step-000006" / "state" / "trained.safetensors")
    still = {name for name, value in before.items() if torch.equal(value, after[name])}
    last = "transformer_blocks.1.attn"  # makes queries of text that nobody reads
    assert all(name.startswith((f"{last}.add_q_proj.", f"{last}.norm_added_q.")) for name in still)


def test_weights_that_are_not_contiguous_are_taken_up(make_config, make_model, make_pictures):
    config = make_config(mode="full", adapter=None, steps=STEPS, checkpoint_every=STOP)

    def make():
        return make_model(config).to(memory_format=torch.channels_last)

    at_once = Run(make(), make_pictures(), config)
    resumed = Run(make(), make_pictures(), config, resume=find_checkpoint(config.output / "checkpoints", "3"))
    assert not resumed.model.pos_embed.proj.weight.is_contiguous()
    assert same(resumed.weights, at_once.weights)


def test_an_accelerator_that_has_trained_before_saves_the_run_it_is_in(
    make_config, make_model, make_pictures, tmp_path
):
    config = make_config(steps=STEPS, checkpoint_every=STOP)
    accelerator = make_accelerator(config)
    train(make_model(config), make_pictures(), make_config(output=tmp_path / "other"), accelerator=accelerator)
    at_once = train(make_model(config), make_pictures(), config, accelerator=accelerator)
    folder = config.output / "checkpoints"
    assert not (folder / "step-000003" / "state" / "optimizer_1.bin").exists()
    resumed = Run(make_model(config), make_pictures(), config, resume=find_checkpoint(folder, "3"))
    assert same(resumed.weights, at_once.state_dict())


def test_a_loss_that_is_not_finite_leaves_the_last_good_checkpoint_to_go_on_from(
    make_config, make_model, make_pictures
):
    config = make_config(steps=STEPS, checkpoint_every=2)
    pictures = make_pictures()
    fifth = next(islice(BucketBatches([None] * len(pictures), batch_size=2, seed=config.seed), 4, None))
    kept = pictures.latents.values[fifth[0].index].clone()

    def spoil(record):
        if record.step == 4:
            pictures.latents.values[fifth[0].index] = float("nan")

    with pytest.raises(
        TrainingDivergedError, match=r"the loss is nan at step 5 .*last good checkpoint is .*step-000004"
    ):
        Run(make_model(config), pictures, config, on_step=spoil)
    pictures.latents.values[fifth[0].index] = kept
    resumed = Run(
        make_model(config), pictures, config, resume=find_checkpoint(config.output / "checkpoints", "latest")
    )
    assert [record.step for record in resumed.records] == [5, 6]
    assert same(resumed.weights, Run(make_model(config), pictures, config).weights)


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.fixture
def begun(make_config, make_model, make_pictures):
    """A run with a checkpoint of its third step; returns what takes it up, with changes."""
    config = make_config(steps=STEPS, checkpoint_every=STOP)
    Run(make_model(config), make_pictures(), config)
    checkpoint = find_checkpoint(config.output / "checkpoints", "3")

    def take_up(*, pictures=None, model=None, **changes):
        changed = make_config(**({"steps": STEPS, "checkpoint_every": STOP} | changes))
        model = make_model(changed) if model is None else model
        return Run(model, pictures or make_pictures(), changed, resume=checkpoint)

    take_up.checkpoint = checkpoint
    return take_up


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"seed": 1}, r"seed was 0, is 1"),
        ({"steps": 7}, r"steps was 6, is 7"),
        ({"optimizer": {"learning_rate": 1e-3}}, r"optimizer\.learning_rate was 0\.01, is 0\.001"),
        ({"ema": EMA}, r"ema\.decay was None, is 0\.9; ema\.warmup was None, is True"),
        ({"lora": LORA}, r"lora\.rank was None, is 2"),
        ({"adapter": {"expansion": 2}}, r"adapter\.expansion was 1\.25, is 2"),
        ({"batch_size": 1, "gradient_accumulation": 2}, r"batch_size was 2, is 1; gradient_accumulation was 1, is 2"),
    ],
)
def test_other_settings_are_refused_by_name(begun, changes, match):
    with pytest.raises(
        ConfigError, match=rf"--resume: .*step-000003 is of a run with other settings, .*{match}.*anew"
    ):
        begun(**changes)


def test_settings_that_no_weight_depends_on_may_change(begun, make_config, make_model, make_pictures, tmp_path):
    at_once = Run(make_model(make_config()), make_pictures(), make_config(steps=STEPS, output=tmp_path / "at once"))
    resumed = begun(
        output=tmp_path / "elsewhere",
        evaluate_every=1,
        checkpoint_every=1,
        keep_checkpoints=1,
        held_out_levels=1,
        trackers=(),
        validation={"prompts": ["a square"]},
        data={"folder": tmp_path, "workers": 2, "cache": tmp_path / "cache", "on_error": "skip"},
        push_to_hub="me/it",
    )
    assert same(resumed.weights, at_once.weights)
    assert [path.name for path in checkpoints(tmp_path / "elsewhere" / "checkpoints")] == ["step-000006"]


@pytest.mark.parametrize("what", ["a picture", "a caption", "their order", "how often they are drawn", "their sizes"])
def test_other_data_are_refused(begun, make_pictures, what):
    pictures = make_pictures()
    if what == "a picture":
        pictures.latents.values[3, 0, 0, 0] += 1e-3
    changed = {
        "a picture": pictures,
        "a caption": dataclasses.replace(pictures, captions=("another", *pictures.captions[1:])),
        "their order": pictures.subset([1, 0, *range(2, 8)]),
        "how often they are drawn": dataclasses.replace(pictures, times=(2.0,) * 8),
        "their sizes": dataclasses.replace(pictures, groups=("a", "b") * 4),
    }[what]
    with pytest.raises(
        ConfigError,
        match=r"--resume: the pictures or captions are no longer those, .* that .*step-000003",
    ):
        begun(pictures=changed)


def test_another_number_of_processes_is_refused(begun):
    edit(begun.checkpoint / "progress.json", processes=2)
    with pytest.raises(ConfigError, match=r"is of a run on 2 processes, and this one has 1, .*start as many"):
        begun()


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_model_of_other_weights_is_refused_and_left_as_it_is(begun, make_config, make_transformer, snapshot):
    wider = make_transformer("sd35", num_attention_heads=4)
    mmpreproj.patch(wider)
    before = snapshot(wider)
    with pytest.raises(
        ConfigError, match=r"trained\.safetensors is of another model: \d+ weights differ, the first is"
    ):
        begun(model=wider)
    for name, value in wider.state_dict().items():
        assert torch.equal(value, before.values[name]), name


def test_a_model_with_more_blocks_is_refused(begun, make_transformer):
    deeper = make_transformer("sd35", num_layers=3)
    mmpreproj.patch(deeper)
    with pytest.raises(ConfigError, match=r"is of another model: .* the first is transformer_blocks\.2\."):
        begun(model=deeper)


@pytest.mark.parametrize(
    "file", ["optimizer.bin", "random_states_0.pkl", "custom_checkpoint_0.pkl", "trained.safetensors"]
)
def test_a_state_that_is_damaged_at_its_full_length_is_refused_by_name(begun, file):
    path = begun.checkpoint / "state" / file
    path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(ConfigError, match=r"--resume: .*step-000003/state is damaged or of another run \("):
        begun()


def test_random_numbers_that_cannot_be_taken_up_are_refused(begun):
    """Accelerate goes on with other ones, and says so in a log alone."""
    path = begun.checkpoint / "state" / "random_states_0.pkl"
    states = torch.load(path, weights_only=False)
    torch.save(states | {"random_state": None}, path)
    edit(begun.checkpoint / "progress.json", files={})
    with pytest.raises(ConfigError, match=r"the random numbers of random_states_0\.pkl could not be taken up"):
        begun()


# --- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not torch.cuda.is_available(), reason="accelerate scales gradients on a GPU alone")
def test_the_scaler_of_fp16_goes_on(make_config, make_model, make_pictures, tmp_path, monkeypatch):
    """The scale that was found, and the steps since it last changed; gradients of fp32 weights can be unscaled."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "false")
    changes = {"steps": STEPS, "precision": "fp16", "lora": {"rank": 2}}

    def run(config, **settings):
        return Run(make_model(config, torch.float16).cuda(), make_pictures(), config, **settings)

    at_once = run(make_config(output=tmp_path / "at once", checkpoint_every=STEPS, **changes))
    config = make_config(output=tmp_path / "stopped", checkpoint_every=STEPS, **changes)
    run(config, on_step=stop_after(STOP))
    stopped = torch.load(tmp_path / "stopped" / "checkpoints" / "step-000003" / "state" / "scaler.pt")
    resumed = run(config, resume=find_checkpoint(tmp_path / "stopped" / "checkpoints", "latest"))
    assert resumed.state["scaler.pt"] == at_once.state["scaler.pt"] != stopped
    trained = copy.deepcopy(resumed.state["trained.safetensors"])
    assert {value.dtype for value in trained.values()} == {torch.float32}
    for name, value in at_once.state["trained.safetensors"].items():
        torch.testing.assert_close(trained[name], value, rtol=1e-2, atol=1e-3)
