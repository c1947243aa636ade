"""Training of what an arm adds: what it changes, how it goes on, and that it is the same on two processes."""

import json
import math
import sys
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from language_models import VOCABULARY, logits, make_model
from processes_kit import WORLD, meeting, run_in_processes
from training_kit import told_of_others

from mmpreproj.language.arms import Arm, LoraShape, on_model
from mmpreproj.language.config import StudyConfig
from mmpreproj.language.fitting import UNFINISHED, DivergedError, fit, forget_unfinished, make_accelerator
from mmpreproj.patching.config import PreProjConfig
from mmpreproj.training.config import ConfigError

pytest.importorskip("peft")

IDENTITY = {"text": "abc", "training": {"steps": 6}}
BOTH = Arm("pre_projection+skip+lora", PreProjConfig(), LoraShape(2, 2.0, 0.0, ("q_proj", "v_proj")))
SKIP = Arm("skip", PreProjConfig(pre_projection=False))


class Blocks:
    """Rows of tokens, read as those of a data set in torch's format."""

    def __init__(self, number=10, length=12, *, seed=1):
        generator = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(3, VOCABULARY, (number, length), generator=generator)
        self.read = []

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, rows):
        self.read += rows
        return {"input_ids": self.ids[rows]}


class KilledError(Exception):
    """In the middle."""


def make_study(**training):
    values = {"steps": 6, "length": 12, "batch_size": 4, "checkpoint_every": 2} | training
    return StudyConfig(
        model="tiny",
        output="runs/study",
        texts={"docs": {"files": ["docs/*.txt"]}},
        training=values,
        optimizer={"warmup_steps": 2},
    )


def train(
    folder,
    *,
    arm=BOTH,
    row="LlamaForCausalLM",
    model=None,
    blocks=None,
    seed=0,
    start=0,
    rate=1e-2,
    identity=IDENTITY,
    stop_after=None,
    overrides=None,
    **training,
):
    """Train an arm on a tiny model; returns how it went, and the weights."""
    study = make_study(**training)
    model = make_model(row, **(overrides or {})) if model is None else model
    base = {name: parameter.clone() for name, parameter in model.named_parameters()}

    def on_step(step, loss):
        if step == stop_after:
            raise KilledError

    torch.manual_seed(start)
    with on_model(model, arm) as wrapped:
        result = fit(
            wrapped,
            Blocks() if blocks is None else blocks,
            study,
            learning_rate=rate,
            seed=seed,
            accelerator=make_accelerator(study),
            folder=folder,
            identity=identity,
            on_step=on_step,
        )
        assert not any(module.training for module in wrapped.modules())
        weights = {name: p.detach().clone() for name, p in wrapped.named_parameters() if p.requires_grad}
    assert all(torch.equal(parameter, base[name]) for name, parameter in model.named_parameters())
    return result, weights


def assert_same(found, expected, **tolerance):
    (result, weights), (other, others) = found, expected
    close = torch.equal if not tolerance else lambda a, b: torch.allclose(a, b, **tolerance)
    assert close(torch.tensor(result.losses), torch.tensor(other.losses))
    assert weights.keys() == others.keys()
    assert all(close(value, others[name]) for name, value in weights.items())


def test_the_loss_falls_on_a_text_that_can_be_learned_by_heart(tmp_path):
    result, weights = train(tmp_path, blocks=Blocks(4), steps=60)
    assert len(result.losses) == 60
    assert result.losses[-1] < result.losses[0] - 1
    assert math.isfinite(result.step_seconds) and result.step_seconds > 0
    assert any("lora" in name for name in weights) and any("lora" not in name for name in weights)


def test_the_first_loss_is_that_of_the_model(tmp_path):
    """Mean over tokens, in nats, of the blocks that the seed draws first."""
    blocks = Blocks()
    result, _ = train(tmp_path, arm=Arm("lora", lora=BOTH.lora), blocks=blocks, steps=1)  # LoRA starts as nothing
    ids = blocks.ids[blocks.read]
    wanted = logits(make_model("LlamaForCausalLM"), ids)[:, :-1].log_softmax(-1)
    expected = -wanted.gather(-1, ids[:, 1:, None]).mean()
    assert result.losses[0] == pytest.approx(expected.item(), abs=1e-5)


def test_the_same_seed_gives_the_same_bits_and_another_does_not(tmp_path):
    expected = train(tmp_path / "a")
    assert_same(train(tmp_path / "b"), expected)
    assert train(tmp_path / "c", seed=1)[0].losses != expected[0].losses


@pytest.fixture(autouse=True)
def folders(tmp_path):
    for name in "abc":
        (tmp_path / name).mkdir()


DROPOUTS = {
    "lora": {"arm": Arm("lora", lora=LoraShape(2, 2.0, 0.3, ("q_proj",)))},
    "gpt2": {"arm": SKIP, "row": "GPT2LMHeadModel", "overrides": {"resid_pdrop": 0.2, "attn_pdrop": 0.2}},
}


@pytest.mark.parametrize("case", DROPOUTS)
def test_a_training_that_was_killed_goes_on_to_the_same_bits(case, tmp_path):
    whole = train(tmp_path / "a", **DROPOUTS[case])
    with pytest.raises(KilledError):
        train(tmp_path / "b", stop_after=5, **DROPOUTS[case])
    blocks = Blocks()
    again = train(tmp_path / "b", blocks=blocks, start=9, **DROPOUTS[case])
    assert len(blocks.read) == 2 * 4  # two steps of six
    assert_same(again, whole)
    assert again[0].step_seconds > 0


def test_a_training_that_was_killed_after_its_last_step_has_its_figures(tmp_path):
    whole = train(tmp_path / "a")
    with pytest.raises(KilledError):
        train(tmp_path / "b", stop_after=6)
    again = train(tmp_path / "b", start=9)
    assert_same(again, whole)
    assert math.isfinite(again[0].step_seconds)


def test_a_killed_training_leaves_the_model_as_it_was(tmp_path, snapshot):
    model = make_model("LlamaForCausalLM").requires_grad_(False)
    before, attributes = snapshot(model), set(vars(model))
    with pytest.raises(KilledError):
        train(tmp_path, model=model, arm=SKIP, stop_after=3, precision="bf16", gradient_checkpointing=True)
    before.check(model)
    assert set(vars(model)) == attributes
    assert not model.is_gradient_checkpointing


def test_what_was_kept_is_forgotten(tmp_path):
    train(tmp_path)
    (tmp_path / f".{UNFINISHED}.abcdefgh").write_text("left by a killed process")
    forget_unfinished(tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.is_file()]
    forget_unfinished(tmp_path)


def test_nothing_is_kept_before_it_is_time(tmp_path):
    train(tmp_path, checkpoint_every=7)
    assert not (tmp_path / UNFINISHED).exists()


@pytest.mark.parametrize(
    "changes", [{"micro_batch_size": 1}, {"micro_batch_size": 2}, {"gradient_checkpointing": True}], ids=str
)
def test_ways_to_save_memory_change_nothing(changes, tmp_path):
    settings = {"rate": 1e-3}
    assert_same(train(tmp_path / "a", **settings, **changes), train(tmp_path / "b", **settings), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("arm", [SKIP, BOTH], ids=["skip", "both"])
def test_gradient_checkpointing_is_on_in_training_alone(arm, tmp_path):
    model, seen = make_model("LlamaForCausalLM"), []
    model.model.layers[0].register_forward_pre_hook(lambda layer, _: seen.append(layer.gradient_checkpointing))
    train(tmp_path, arm=arm, model=model, gradient_checkpointing=True, steps=1)
    assert seen and all(seen)
    assert not model.is_gradient_checkpointing


def test_every_block_is_read_once_before_one_comes_again(tmp_path):
    blocks = Blocks(10)
    train(tmp_path, blocks=blocks, steps=6, batch_size=4)
    assert sorted(blocks.read[:10]) == sorted(blocks.read[10:20]) == list(range(10))
    assert len(blocks.read) == 24


def test_a_step_may_have_more_blocks_than_there_are(tmp_path):
    blocks = Blocks(3)
    result, _ = train(tmp_path, blocks=blocks, steps=2, batch_size=8)
    assert len(result.losses) == 2 and len(blocks.read) == 16


@pytest.mark.parametrize("arm", [SKIP, BOTH], ids=["skip", "both"])
def test_bf16_is_for_the_steps_alone(arm, tmp_path):
    """One training after the other is cast alike, and afterwards the model computes in its own dtype."""
    model, dtypes = make_model("LlamaForCausalLM"), []
    hook = model.model.layers[0].mlp.register_forward_hook(lambda _, inputs, output: dtypes.append(output.dtype))
    first = train(tmp_path / "a", arm=arm, model=model, precision="bf16")
    again = train(tmp_path / "b", arm=arm, model=model, precision="bf16")
    assert set(dtypes) == {torch.bfloat16}
    hook.remove()
    assert_same(again, first)
    AcceleratorState._reset_state(reset_partial_state=True)
    plain = train(tmp_path / "c", arm=arm)
    assert first[0].losses == pytest.approx(plain[0].losses, abs=0.05)
    assert first[0].losses != plain[0].losses
    assert torch.equal(logits(model), logits(make_model("LlamaForCausalLM")))


def test_a_base_in_bf16_trains_in_fp32(tmp_path):
    _, weights = train(tmp_path, model=make_model("LlamaForCausalLM").to(torch.bfloat16))
    assert {value.dtype for value in weights.values()} == {torch.float32}


@pytest.mark.parametrize("damage", ["cut", "text", "weights", "empty"])
def test_what_was_kept_and_is_damaged_is_refused(damage, tmp_path):
    train(tmp_path)
    path = tmp_path / UNFINISHED
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-300])
    elif damage == "text":
        path.write_text("no such thing")
    else:
        state = torch.load(path)
        state["weights"].popitem()
        torch.save(state if damage == "weights" else {}, path)
    with pytest.raises(ConfigError, match=rf"{UNFINISHED} is damaged \(.*\); remove it, and the trial is made again"):
        train(tmp_path)


def test_what_was_kept_with_other_settings_is_refused(tmp_path):
    train(tmp_path)
    told = rf"{UNFINISHED} was made with other settings: training.steps was 6, is 9\. Choose .*, or remove that file"
    with pytest.raises(ConfigError, match=told):
        train(tmp_path, identity=IDENTITY | {"training": {"steps": 9}})


def test_what_was_kept_by_another_number_of_processes_is_refused(tmp_path):
    train(tmp_path)
    state = torch.load(tmp_path / UNFINISHED)
    state["random"] *= 2
    torch.save(state, tmp_path / UNFINISHED)
    with pytest.raises(ConfigError, match=r"made by 2 processes, and there are 1; start 2, or remove it"):
        train(tmp_path)


def test_a_training_that_diverges_ends_with_the_way_out(tmp_path):
    with pytest.raises(DivergedError, match="this training has diverged"):
        train(tmp_path, rate=1e30, steps=20)


@pytest.mark.parametrize(
    ("training", "told"),
    [
        ({"batch_size": 4, "micro_batch_size": 3}, r"training.micro_batch_size: .* 4 blocks a step, which 3 "),
        ({"batch_size": 4, "micro_batch_size": 8}, r"training.micro_batch_size: .* 8 does not divide"),
    ],
)
def test_blocks_that_cannot_be_divided_are_refused(training, told):
    with pytest.raises(ConfigError, match=told):
        make_accelerator(make_study(**training))


# --- two processes -----------------------------------------------------------------------------------------------

CASES = {"both": BOTH, "skip": SKIP}


def train_cases(rank: int, folder: Path) -> None:
    for name, arm in CASES.items():
        place = folder / name
        place.mkdir(exist_ok=True)
        model = make_model("LlamaForCausalLM")
        for number in range(2):  # the second on a model that accelerate has seen
            AcceleratorState._reset_state(reset_partial_state=True)
            found = train(place / str(rank), arm=arm, model=model, micro_batch_size=1, rate=1e-3)
            torch.save((found[0].losses, found[1]), place / f"told-{number}-{rank}.pt")
            forget_unfinished(place / str(rank)) if number == 0 else None
    dropping = Arm("lora", lora=LoraShape(2, 2.0, 0.3, ("q_proj",)))
    for name in ("whole", "broken"):
        (folder / name).mkdir(exist_ok=True)
    AcceleratorState._reset_state(reset_partial_state=True)
    whole = train(folder / "whole", arm=dropping)
    with pytest.raises(KilledError):
        train(folder / "broken", arm=dropping, stop_after=5)
    again = train(folder / "broken", arm=dropping, start=7)
    assert_same(again, whole)
    with pytest.raises(ConfigError, match="3 blocks cannot be divided among 2 processes; give a multiple of 2"):
        make_accelerator(make_study(batch_size=3))


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return run_in_processes(__file__, tmp_path_factory.mktemp("two"))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_two_processes_do_what_one_does(name, two, tmp_path):
    result, weights = train(tmp_path, arm=CASES[name], rate=1e-3)
    for number in range(2):
        for rank in range(WORLD):
            losses, found = torch.load(two / name / f"told-{number}-{rank}.pt")
            assert losses == pytest.approx(result.losses, abs=1e-5)
            assert all(torch.allclose(value, weights[key], atol=1e-5) for key, value in found.items())


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_main_process_alone_writes(name, two):
    assert (two / name / "0" / UNFINISHED).is_file()
    assert not list((two / name / "1").iterdir())
    assert json.loads(torch.load(two / name / "0" / UNFINISHED)["identity"]) == IDENTITY


if __name__ == "__main__":
    with meeting() as (rank, folder), told_of_others(rank):
        for name in CASES:
            (folder / name / str(rank)).mkdir(parents=True, exist_ok=True)
        train_cases(rank, folder)
    sys.exit()
