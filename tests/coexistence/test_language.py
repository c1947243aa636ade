"""Language models as transformers runs them: padding, packing, dtypes, offloading, compiling, its Trainer."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from language_models import (
    BLOCKS,
    BRIEF,
    ROWS,
    generated,
    logits,
    make_ids,
    make_model,
    make_patched,
    shake,
)
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import mmpreproj
from mmpreproj import PreProjConfig

CPU = torch.device("cpu")
UNEQUAL = (5, 17, 1)


@pytest.fixture(params=ROWS)
def row(request: pytest.FixtureRequest) -> str:
    """A row of the table, by its model class."""
    return request.param


@pytest.fixture(params=BRIEF)
def brief_row(request: pytest.FixtureRequest) -> str:
    """One row of each make."""
    return request.param


def close(found: Tensor, expected: Tensor, *, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def left_padded(texts: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Put texts `[1, N]` of unequal lengths into one batch, and make its mask."""
    length = max(text.shape[1] for text in texts)
    ids, mask = torch.zeros(len(texts), length, dtype=torch.long), torch.zeros(len(texts), length, dtype=torch.long)
    for place, text in enumerate(texts):
        ids[place, length - text.shape[1] :], mask[place, length - text.shape[1] :] = text[0], 1
    return ids, mask


def test_left_padding_gives_each_text_what_it_gets_alone(row):
    model = make_patched(row)
    texts = [make_ids(1, length, seed=length) for length in UNEQUAL]
    ids, mask = left_padded(texts)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    batch = logits(model, ids, attention_mask=mask, position_ids=positions)
    answers = generated(model, ids, attention_mask=mask)
    for place, text in enumerate(texts):
        close(batch[place, -text.shape[1] :], logits(model, text)[0])
        assert torch.equal(answers[place, ids.shape[1] :], generated(model, text)[0, text.shape[1] :])


def test_right_padding_changes_nothing_before_it(row):
    model, ids = make_patched(row), make_ids()
    padded = torch.cat([ids, ids.new_zeros(2, 4)], dim=1)
    mask = (torch.arange(21) < 17).long().expand(2, -1)
    close(logits(model, padded, attention_mask=mask)[:, :17], logits(model, ids))


def test_packed_texts_get_what_they_get_alone(row):
    """Positions that begin again keep texts apart, without a mask."""
    model = make_patched(row)
    texts = [make_ids(1, length, seed=length) for length in UNEQUAL]
    packed = torch.cat(texts, dim=1)
    positions = torch.cat([torch.arange(length) for length in UNEQUAL])[None]
    apart = torch.cat([logits(model, text, use_cache=False) for text in texts], dim=1)
    close(logits(model, packed, position_ids=positions, use_cache=False), apart)
    assert (logits(model, packed, use_cache=False) - apart).abs().max() > 1e-2


def test_embeddings_stand_in_for_tokens(row):
    model, ids = make_patched(row), make_ids()
    embeddings = model.get_input_embeddings()(ids).detach()
    close(logits(model, inputs_embeds=embeddings), logits(model, ids))


@pytest.mark.parametrize("shape", [(1, 1), (1, 17), (5, 1)])
def test_small_batches_and_lone_tokens(row, shape):
    model, ids = make_patched(row), make_ids(5)[: shape[0], : shape[1]]
    close(logits(model, ids), logits(model, make_ids(5))[: shape[0], : shape[1]])


def test_hidden_states_and_attentions_are_those_of_the_patched_model(row):
    model = make_patched(row)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        found = model(make_ids(), output_hidden_states=True, output_attentions=True)
        base = make_model(row, attn_implementation="eager")(make_ids(), output_hidden_states=True)
    assert len(found.hidden_states) == len(base.hidden_states) == 3
    assert len(found.attentions) == 2
    assert torch.equal(found.hidden_states[0], base.hidden_states[0])
    assert (found.hidden_states[1] - base.hidden_states[1]).abs().max() > 1e-2
    torch.testing.assert_close(found.attentions[0].sum(-1), torch.ones(2, 4, 17))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_gradients_are_equal(row, reentrant):
    def gradients(model: nn.Module, **inputs: Any) -> dict[str, Tensor]:
        model.requires_grad_(False)
        mmpreproj.thaw(model)
        model.train()
        ids = make_ids()
        model(ids, labels=ids, use_cache=False).loss.backward()
        return {key: parameter.grad for key, parameter in mmpreproj.named_parameters(model)}

    expected = gradients(make_patched(row))
    model = make_patched(row)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    found = gradients(model)
    for key, gradient in expected.items():
        close(found[key], gradient, tolerance=1e-5)


def bf16_apart(model: nn.Module, exact: Tensor) -> float:
    return float((logits(model).float() - exact).norm() / exact.norm())


def test_bf16_is_close_and_stays(row):
    model = make_model(row).to(torch.bfloat16)
    mmpreproj.patch(model)
    assert {parameter.dtype for parameter in mmpreproj.parameters(model)} == {torch.bfloat16}
    shake(model, std=0.05)
    found = logits(model)
    assert found.dtype == torch.bfloat16
    apart = bf16_apart(model, logits(make_patched(row, std=0.05)))
    assert 0 < apart < max(0.05, 3 * bf16_apart(make_model(row).to(torch.bfloat16), logits(make_model(row))))


def test_autocast_is_close(brief_row):
    model = make_patched(brief_row, std=0.05)
    with torch.autocast("cpu", torch.bfloat16):
        apart = bf16_apart(model, logits(make_patched(brief_row, std=0.05)))
    assert apart < 0.05


@pytest.mark.parametrize("row", [name for name in ROWS if name != "Gemma2ForCausalLM"])  # whose soft cap is eager's
def test_every_attention_implementation_gives_the_same(row):
    eager = make_patched(row, attn_implementation="eager")
    model = make_patched(row, attn_implementation="sdpa")
    assert (eager.config._attn_implementation, model.config._attn_implementation) == ("eager", "sdpa")
    close(logits(model), logits(eager))
    model.set_attn_implementation("eager")
    assert torch.equal(logits(model), logits(eager))


@pytest.mark.slow
@pytest.mark.parametrize("row", [name for name in BRIEF if name != "GPT2LMHeadModel"])  # which has none
def test_flex_attention_gives_the_same(row):
    model = make_patched(row, attn_implementation="eager")
    expected = logits(model)
    model.set_attn_implementation("flex_attention")
    close(logits(model), expected, tolerance=1e-3)


def to_cpu(model: nn.Module, row: str, folder: Path) -> None:
    cpu_offload(model, execution_device=CPU)


def to_disk(model: nn.Module, row: str, folder: Path) -> None:
    disk_offload(model, str(folder), execution_device=CPU)


def mapped(model: nn.Module, row: str, folder: Path) -> None:
    places = {name: "cpu" for name, _ in model.named_children()}
    root = BLOCKS[row].split(".")[0]
    del places[root]
    places |= {f"{root}.{name}": "cpu" for name, _ in model.get_submodule(root).named_children()}
    del places[BLOCKS[row]]
    places |= {f"{BLOCKS[row]}.0": "cpu", f"{BLOCKS[row]}.1": "disk"}
    dispatch_model(model, places, main_device="cpu", offload_dir=str(folder), force_hooks=True)


@pytest.mark.parametrize("order", ["patched first", "offloaded first"])
@pytest.mark.parametrize("offload", [to_cpu, pytest.param(to_disk, marks=pytest.mark.slow), mapped])
def test_offloaded_equals_not_offloaded(row, offload, order, tmp_path):
    expected = make_patched(row, tie_word_embeddings=False)
    adapter = mmpreproj.save(expected, tmp_path / "adapter", card=False)
    model = make_model(row, tie_word_embeddings=False)
    steps: list[Callable[[], Any]] = [
        lambda: mmpreproj.load(model, adapter),
        lambda: offload(model, row, tmp_path / "offloaded"),
    ]
    for step in steps if order == "patched first" else steps[::-1]:
        step()
    assert torch.equal(logits(model), logits(expected))
    assert torch.equal(generated(model, tokens=3), generated(expected, tokens=3))
    if order == "offloaded first":
        again = mmpreproj.save(model, tmp_path / "again", card=False)
        assert (again / "adapter_model.safetensors").read_bytes() == (
            adapter / "adapter_model.safetensors"
        ).read_bytes()
    mmpreproj.unpatch(model)
    assert torch.equal(logits(model), logits(make_model(row, tie_word_embeddings=False)))


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Start from an empty cache, and leave none."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_in_one_graph_equals_eager(row, backend):
    model = make_patched(row)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    close(logits(compiled, use_cache=False), logits(model, use_cache=False), tolerance=1e-5)
    assert not counters["graph_break"]
    with torch._dynamo.config.patch(error_on_recompile=True):
        mmpreproj.set_scale(model, 0.5)
        close(logits(compiled, use_cache=False), logits(model, use_cache=False), tolerance=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_dynamo")
def test_generation_with_a_compiled_forward_equals_eager(brief_row):
    model, eager = make_patched(brief_row), make_patched(brief_row)
    model.forward = torch.compile(model.forward, backend="eager")
    settings = {"cache_implementation": "static", "tokens": 4}
    assert torch.equal(generated(model, **settings), generated(eager, **settings))


def test_save_pretrained_keeps_a_base_that_reads_back_as_itself(row, tmp_path):
    """Our keys are in the file too; transformers names them as unexpected and leaves them out."""
    model = make_patched(row)
    model.save_pretrained(tmp_path)
    again, told = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    again.eval()
    assert type(again) is type(model)
    assert not told["missing_keys"] and not told["mismatched_keys"]
    ours = {key for key in model.state_dict() if ".preproj." in key}
    assert {key for key in told["unexpected_keys"] if ".preproj." in key} == set(told["unexpected_keys"])
    assert {key for key, _ in mmpreproj.named_parameters(model)} <= set(told["unexpected_keys"]) <= ours
    assert torch.equal(logits(again), logits(make_model(row)))
    mmpreproj.patch(again, PreProjConfig(init="zero"))
    again.load_state_dict(model.state_dict())
    assert torch.equal(logits(again), logits(model))


class Texts(Dataset):
    """Eight texts of 17 tokens."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = make_ids(1, seed=index)[0]
        return {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_transformers_trainer_changes_the_adapter_alone(brief_row, tmp_path, checkpointing):
    model = make_patched(brief_row)
    model.requires_grad_(False)
    mmpreproj.thaw(model)
    before = copy.deepcopy(model.state_dict())
    settings = TrainingArguments(
        str(tmp_path),
        max_steps=2,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        save_steps=1,
        report_to=[],
        use_cpu=True,
        gradient_checkpointing=checkpointing,
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=settings, train_dataset=Texts())
    assert trainer.get_num_trainable_parameters() == mmpreproj.report(model).parameters
    trainer.train()
    ours = {key for key, _ in mmpreproj.named_parameters(model)}
    after = model.state_dict()
    assert {key for key, value in after.items() if not torch.equal(value, before[key])} == ours
    mmpreproj.check_intact(model)
    mmpreproj.save(model, tmp_path / "adapter", card=False)
    fresh = make_model(brief_row)
    mmpreproj.load(fresh, tmp_path / "adapter")
    assert torch.equal(logits(fresh), logits(model.eval()))


def test_trainer_resumes_where_it_was(tmp_path):
    def trainer(steps: int) -> Trainer:
        model = make_patched("LlamaForCausalLM")
        model.requires_grad_(False)
        mmpreproj.thaw(model)
        settings = TrainingArguments(
            str(tmp_path / "runs"), max_steps=steps, save_steps=1, per_device_train_batch_size=2, learning_rate=1e-2,
            lr_scheduler_type="constant", report_to=[], use_cpu=True, disable_tqdm=True,
        )  # fmt: skip
        return Trainer(model=model, args=settings, train_dataset=Texts())

    whole = trainer(3)
    whole.train()
    resumed = trainer(3)
    resumed.train(resume_from_checkpoint=str(tmp_path / "runs" / "checkpoint-1"))
    for key, value in mmpreproj.named_parameters(whole.model):
        assert torch.equal(dict(mmpreproj.named_parameters(resumed.model))[key], value)
