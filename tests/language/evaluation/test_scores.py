"""Scores of an arm: measured with all that the text and tasks ask for, and read as they were written."""

import json
import math

import numpy as np
import pytest
import torch
from language_models import make_model
from scoring_kit import CORPUS, tiny_llama, tiny_tokenizer

from mmpreproj.language.config import EvaluationConfig
from mmpreproj.language.evaluation.scores import (
    SCORES,
    Scores,
    read_scores,
    score_model,
    validation_perplexity,
    write_scores,
)
from mmpreproj.language.evaluation.scoring import TextScore, score_text
from mmpreproj.language.evaluation.tasks import read_task, score_task
from mmpreproj.language.texts.packing import PackedText
from mmpreproj.training.config import ConfigError

SETTINGS = {"model": "abc", "evaluation": {"length": 16, "limit": None}}


def make_scores():
    draw = np.random.default_rng(0)
    tasks = {
        "words": {"accuracy": draw.integers(2, size=5).astype(float), "nll": draw.random(5)},
        "folder/task.yaml": {"normalised_accuracy": draw.random(3)},  # lm-eval takes paths
    }
    return Scores(TextScore(draw.random(7) * 9, np.arange(1, 8)), tasks)


def test_scores_are_read_as_they_were_written(tmp_path):
    scores = make_scores()
    write_scores(scores, tmp_path, SETTINGS)
    found = read_scores(tmp_path, SETTINGS)
    assert found.text.perplexity == scores.text.perplexity
    assert found.text.counts.dtype == np.int64
    assert {task: list(metrics) for task, metrics in found.tasks.items()} == {
        task: list(metrics) for task, metrics in scores.tasks.items()
    }
    for task, metrics in scores.tasks.items():
        for metric, values in metrics.items():
            np.testing.assert_array_equal(found.tasks[task][metric], values)
    assert [path.name for path in tmp_path.iterdir()] == [SCORES]


def test_there_are_none_of_an_arm_that_was_not_scored(tmp_path):
    assert read_scores(tmp_path, SETTINGS) is None


def cut(share):
    return lambda content: content[: int(share * len(content))]


def flipped(content):
    middle = len(content) // 3
    return content[:middle] + bytes(255 - byte for byte in content[middle : middle + 40]) + content[middle + 40 :]


@pytest.mark.parametrize(
    "damage",
    [cut(0), cut(0.1), cut(0.5), cut(0.99), flipped, lambda content: b"no such thing"],
    ids=["empty", "cut early", "halved", "cut late", "flipped", "text"],
)
def test_damaged_scores_are_refused(damage, tmp_path):
    write_scores(make_scores(), tmp_path, SETTINGS)
    path = tmp_path / SCORES
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ConfigError, match=rf"{SCORES} is damaged \(.+\); remove it, and the arm is scored again"):
        read_scores(tmp_path, SETTINGS)


def test_arrays_of_something_else_are_refused(tmp_path):
    with open(tmp_path / SCORES, "wb") as file:
        np.save(file, np.arange(3))
    with pytest.raises(ConfigError, match="is damaged"):
        read_scores(tmp_path, SETTINGS)
    np.savez(tmp_path / SCORES, other=np.arange(3))
    with pytest.raises(ConfigError, match="is damaged"):
        read_scores(tmp_path, SETTINGS)


def test_scores_with_other_settings_are_refused_and_training_need_not_be_lost(tmp_path):
    write_scores(make_scores(), tmp_path, SETTINGS)
    told = r"evaluation.limit was null, is 5\. Choose another output, or remove that file, and the arm is scored again"
    with pytest.raises(ConfigError, match=told):
        read_scores(tmp_path, SETTINGS | {"evaluation": {"length": 16, "limit": 5}})


def packed(beginning=None):
    draw = torch.Generator().manual_seed(0)
    first = [] if beginning is None else [torch.tensor([beginning])]
    tokens = [torch.cat([*first, torch.randint(3, 97, (60,), generator=draw)]) for _ in range(2)]
    return PackedText(None, *tokens, beginning=beginning, digest="", counts={})


@pytest.mark.parametrize("beginning", [None, 1])
def test_text_is_scored_as_the_settings_say(beginning, tmp_path):
    """Validation and test apart, so many tokens of each, and with the token that the tokenizer begins with."""
    model, text = make_model("LlamaForCausalLM"), packed(beginning)
    config = EvaluationConfig(length=12, stride=4, batch_size=3, validation_tokens=40, test_tokens=50)
    told = []
    found = score_model(model, None, text, (), config, on_progress=lambda *progress: told.append(progress))
    ways = {"length": 12, "stride": 4, "batch_size": 3, "beginning": beginning}
    expected = score_text(model, text.test[:50], **ways)
    np.testing.assert_array_equal(found.text.nll, expected.nll)
    assert found.tasks == {}
    assert {name for name, _, _ in told} == {"test text"} and told[-1][1] == told[-1][2] == len(expected.nll)
    perplexity = validation_perplexity(model, text, config)
    assert perplexity == score_text(model, text.validation[:40], **ways).perplexity
    if beginning is not None:
        assert perplexity != score_text(model, text.validation[:40], **ways | {"beginning": None}).perplexity


def test_tasks_are_scored_item_by_item(tmp_path):
    model, tokenizer = tiny_llama(), tiny_tokenizer()
    words = CORPUS[0].split()
    lines = [{"context": " ".join(words[n : n + 3]), "continuation": words[n + 3]} for n in range(6)]
    (tmp_path / "words.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    task = read_task(tmp_path / "words.jsonl")
    config = EvaluationConfig(length=12, stride=4, limit=4)
    told = []
    found = score_model(model, tokenizer, packed(), (task,), config, on_progress=lambda *p: told.append(p[0]))
    expected = score_task(model, tokenizer, task, limit=4, batch_size=8)
    assert found.tasks.keys() == {"words"} and "words" in told
    np.testing.assert_allclose(found.tasks["words"]["nll"], expected.values["nll"], atol=1e-5)
    write_scores(found, tmp_path, SETTINGS)
    assert len(read_scores(tmp_path, SETTINGS).tasks["words"]["accuracy"]) == 4


def test_a_perplexity_beyond_all_numbers_is_infinite():
    model = make_model("LlamaForCausalLM")
    with torch.no_grad():
        model.lm_head.weight *= 1e5
    assert validation_perplexity(model, packed(), EvaluationConfig(length=12, stride=12)) == math.inf
