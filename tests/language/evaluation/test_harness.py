"""lm-eval's scorer and ours agree, item by item; and it leaves everything as it was."""

import json
import random
import sys

import numpy as np
import pytest
import torch
from scoring_kit import tiny_llama, tiny_tokenizer

from mmpreproj.language.evaluation.harness import score_file_with_lm_eval, score_with_lm_eval
from mmpreproj.language.evaluation.tasks import read_task, score_task

pytest.importorskip("lm_eval")
datasets = pytest.importorskip("datasets")

WORDS = ["cat", "the dog", "tree über", "a bird sang in the tree", "mat", "日本", "naïve log", "table", "log sat"]


def task_file(folder, kind, number=9):
    draw = np.random.default_rng(2)
    rows = []
    for _ in range(number):
        prompt = " ".join(draw.choice(WORDS, 4))
        if kind == "last_word":
            rows.append({"context": prompt + draw.choice(["", " ", "\n"]), "continuation": str(draw.choice(WORDS))})
        else:
            choices = draw.choice(WORDS, int(draw.integers(2, 5)), replace=False).tolist()
            rows.append({"query": prompt, "choices": choices, "gold": int(draw.integers(len(choices)))})
    path = folder / f"{kind}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def yaml_task(folder, path, **changes):
    """Describe a task file to lm-eval by a YAML file, as its users do."""
    config = {
        "task": "tiny_words",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(path)}, "cache_dir": str(folder / "cache")},
        "test_split": "test",
        "output_type": "loglikelihood",
        "doc_to_text": "context",
        "doc_to_target": "{{' ' + continuation}}",
        "metric_list": [
            {"metric": "acc", "aggregation": "mean", "higher_is_better": True},
            {"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False},
        ],
    } | changes
    (folder / "tiny.yaml").write_text(json.dumps(config))
    return str(folder / "tiny.yaml")


def assert_same_scores(found, expected):
    assert found.task == expected.task
    assert found.items.tolist() == expected.items.tolist()
    assert found.values.keys() == expected.values.keys()
    for metric in expected.values:
        np.testing.assert_allclose(found.values[metric], expected.values[metric], atol=1e-4)
    for one, other in zip(found.log_likelihoods, expected.log_likelihoods, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)
    assert found.metrics == pytest.approx(expected.metrics, rel=1e-4)


@pytest.mark.slow  # lm-eval reads the index of all its tasks first
@pytest.mark.parametrize("limit", [None, 4])
@pytest.mark.parametrize("longest", [64, 12])  # 12: contexts are cut
@pytest.mark.parametrize("kind", ["last_word", "multiple_choice"])
def test_both_scorers_agree_on_every_item(tmp_path, kind, longest, limit):
    model, tokenizer = tiny_llama(longest=longest), tiny_tokenizer(adds_bos=limit is None)
    task = read_task(task_file(tmp_path, kind))
    if longest == 12:
        task = read_task(task_file(tmp_path, kind), prompt_suffix=" the cat sat on the mat and the dog sat on")
    expected = score_file_with_lm_eval(model, tokenizer, task, limit=limit, batch_size=3)
    assert_same_scores(score_task(model, tokenizer, task, limit=limit, batch_size=4), expected)
    assert len({tuple(likelihoods) for likelihoods in expected.log_likelihoods}) > 1


def test_both_scorers_agree_on_a_model_with_peft_and_tied_embeddings(tmp_path):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    lora = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model, tokenizer = peft.get_peft_model(tiny_llama(tie_word_embeddings=True), lora), tiny_tokenizer()
    task = read_task(task_file(tmp_path, "last_word", 4))
    expected = score_file_with_lm_eval(model, tokenizer, task, batch_size=2)
    assert_same_scores(score_task(model, tokenizer, task, batch_size=3), expected)
    with model.disable_adapter():
        plain = score_task(model, tokenizer, task, batch_size=3)
    assert not np.allclose(plain.values["nll"], expected.values["nll"])


@pytest.mark.parametrize("limit", [None, 4])
def test_lm_eval_s_own_task_is_scored_on_the_same_spread_of_items(tmp_path, limit):
    model, tokenizer = tiny_llama(), tiny_tokenizer()
    path = task_file(tmp_path, "last_word")
    [found] = score_with_lm_eval(model, tokenizer, [yaml_task(tmp_path, path)], limit=limit, batch_size=2)
    assert_same_scores(
        score_task(model, tokenizer, read_task(path, name="tiny_words"), limit=limit, batch_size=2), found
    )


def test_random_states_modes_and_the_tokenizer_stay_as_they_were(tmp_path):
    model, tokenizer = tiny_llama().train(), tiny_tokenizer()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    score_file_with_lm_eval(model, tokenizer, read_task(task_file(tmp_path, "last_word", 2)), batch_size=2)
    assert random.getstate() == states[0]
    assert np.random.get_state()[1].tolist() == states[1]
    assert torch.equal(torch.get_rng_state(), states[2])
    assert tokenizer.pad_token is None
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def test_a_task_without_values_an_item_is_refused(tmp_path):
    rolling = {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "context",
        "metric_list": [
            {"metric": "word_perplexity", "aggregation": "weighted_perplexity", "higher_is_better": False}
        ],
    }
    name = yaml_task(tmp_path, task_file(tmp_path, "last_word", 2), **rolling)
    with pytest.raises(ValueError, match="'tiny_words' has no metric with one value an item"):
        score_with_lm_eval(tiny_llama(), tiny_tokenizer(), [name], batch_size=1)


def test_a_task_whose_data_is_not_here_is_named_with_the_way_out(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)  # nothing downloaded before helps
    name = yaml_task(tmp_path, "", dataset_path="nobody/nothing-of-that-name", dataset_kwargs={})
    with pytest.raises(RuntimeError, match=r"task .*tiny.yaml' cannot be had: .* local \.jsonl file"):
        score_with_lm_eval(tiny_llama(), tiny_tokenizer(), [name], batch_size=1)


def test_an_unknown_task_is_refused():
    with pytest.raises(ValueError, match="lm-eval has no task 'arc_esay'"):
        score_with_lm_eval(tiny_llama(), tiny_tokenizer(), ["arc_esay"], batch_size=1)


def test_without_lm_eval_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    for module in [name for name in sys.modules if name.startswith("lm_eval.")]:
        monkeypatch.delitem(sys.modules, module)
    with pytest.raises(ImportError, match=r"pip install 'mmpreproj\[lm\]'"):
        score_with_lm_eval(tiny_llama(), tiny_tokenizer(), ["arc_easy"], batch_size=1)
    with pytest.raises(ImportError, match=r"pip install 'mmpreproj\[lm\]'"):
        score_file_with_lm_eval(
            tiny_llama(), tiny_tokenizer(), read_task(task_file(tmp_path, "last_word")), batch_size=1
        )
