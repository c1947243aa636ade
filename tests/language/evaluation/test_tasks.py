"""Task files: what is read from them, what is refused, and what the scores of their items mean."""

import json

import numpy as np
import pytest
import torch
from scoring_kit import tiny_llama, tiny_tokenizer

from mmpreproj.language.evaluation.scoring import Continuation
from mmpreproj.language.evaluation.tasks import encode_pair, read_task, score_task, spread

LAST_WORD = [
    {"context": "the cat sat on the", "continuation": "mat"},
    {"context": "the dog sat on the", "continuation": "log"},
    {"context": "a bird sang in the ", "continuation": "tree"},
]
WORDS = ["cat", "the dog", "Zx qK!", "été", "#$%7", "mat", "日本", "éüßñ", "ü", "WPQ"]


def questions(number=40):
    draw = np.random.default_rng(1)
    return [
        {
            "query": f"Question: which {draw.choice(WORDS)} is it?",
            "choices": draw.choice(WORDS, 3, replace=False).tolist(),
            "gold": int(draw.integers(3)),
        }
        for _ in range(number)
    ]


def write(path, rows):
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def slow_log_likelihood(model, request):
    ids = [*request.context_ids, *request.continuation_ids]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(-1)
    first = len(request.context_ids)
    return sum(logits[place - 1, ids[place]].item() for place in range(first, len(ids)))


def test_the_kind_is_told_from_the_rows(tmp_path):
    words = read_task(write(tmp_path / "words.jsonl", LAST_WORD))
    assert (words.name, words.kind, len(words.items)) == ("words", "last_word", 3)
    assert (words.items[0].context, words.items[0].choices) == ("the cat sat on the", ("mat",))
    choices = read_task(write(tmp_path / "choices.jsonl", questions()), name="mine")
    assert (choices.name, choices.kind) == ("mine", "multiple_choice")
    assert choices.items[0].context == questions()[0]["query"] + "\nAnswer:"


def test_a_row_s_prompt_suffix_goes_before_the_caller_s_and_that_before_the_kind_s(tmp_path):
    rows = questions(2)
    rows[1]["prompt_suffix"] = " A:"
    path = write(tmp_path / "choices.jsonl", rows)
    assert [item.context[-3:] for item in read_task(path).items] == ["er:", " A:"]
    assert [item.context[-3:] for item in read_task(path, prompt_suffix=" So").items] == [" So", " A:"]
    words = read_task(write(tmp_path / "words.jsonl", LAST_WORD), prompt_suffix=" …")
    assert words.items[0].context == "the cat sat on the …"


def test_lines_are_counted_with_the_empty_ones_and_end_at_newlines_alone(tmp_path):
    path = tmp_path / "words.jsonl"
    rows = [json.dumps({"context": f"a\u2028b {i}", "continuation": "c"}, ensure_ascii=False) for i in range(2)]
    path.write_text(f"\ufeff{rows[0]}\r\n\n{rows[1]}", encoding="utf-8")
    assert [item.line for item in read_task(path).items] == [1, 3]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"query": "q", "choices": ["a", "b"]}', r"t\.jsonl, line 2 has no 'gold'; .* query, choices, gold"),
        ('{"query": "q", "choices": ["a", "b"], "gold": 2}', r"line 2: 'gold' is 2; .* 0 to 1"),
        ('{"query": "q", "choices": ["a", "b"], "gold": true}', "line 2: 'gold' is True"),
        ('{"query": "q", "choices": ["a", "b"], "gold": "0"}', "line 2: 'gold' is '0'"),
        ('{"query": "q", "choices": ["a"], "gold": 0}', r"line 2: 'choices' is \['a'\]; give a list of at least 2"),
        ('{"query": "q", "choices": "ab", "gold": 0}', "line 2: 'choices' is 'ab'"),
        ('{"query": "q", "choices": ["a", ""], "gold": 0}', r"line 2: 'choices\[1\]' is ''; give a text that is not"),
        ('{"query": 5, "choices": ["a", "b"], "gold": 0}', "line 2: 'query' is 5; give a text"),
        ('{"query": "q", "choices": ["a", "b"], "gold": 0, "prompt_suffix": 1}', "line 2: 'prompt_suffix' is 1"),
        ('["q"]', "line 2 is list, not an object"),
        ('{"query": ', "line 2 is not JSON"),
    ],
)
def test_a_row_that_cannot_be_used_is_named_with_file_line_and_field(tmp_path, line, message):
    path = tmp_path / "t.jsonl"
    path.write_text('{"query": "q", "choices": ["a", "b"], "gold": 1}\n' + line, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        read_task(path)


def test_files_that_are_no_task_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no task file .*none\.jsonl"):
        read_task(tmp_path / "none.jsonl")
    path = tmp_path / "t.jsonl"
    path.write_text("\n\n")
    with pytest.raises(ValueError, match=r"t\.jsonl has no rows"):
        read_task(path)
    path.write_text('{"text": "a"}')
    with pytest.raises(ValueError, match="line 1 has the fields 'text'; a task's rows have context, continuation"):
        read_task(path)
    with pytest.raises(ValueError, match="kind is 'cloze'; give one of last_word, multiple_choice"):
        read_task(path, kind="cloze")
    with pytest.raises(ValueError, match="line 1 has no 'context'"):
        read_task(path, kind="last_word")
    path.write_bytes(b'{"context": "\xff", "continuation": "a"}')
    with pytest.raises(ValueError, match=r"t\.jsonl is not UTF-8"):
        read_task(path)


def test_a_limit_spreads_over_all_items():
    assert spread(10, None) == list(range(10)) == spread(10, 10) == spread(10, 50)
    assert spread(10, 4) == [0, 2, 5, 7]
    assert spread(5000, 100) == list(range(0, 5000, 50))
    with pytest.raises(ValueError, match="limit is 0"):
        spread(10, 0)


def test_spaces_at_the_end_of_a_context_go_to_the_continuation():
    tokenizer = tiny_tokenizer()
    assert encode_pair(tokenizer, "the cat ", "sat") == encode_pair(tokenizer, "the cat", " sat")
    request = encode_pair(tokenizer, "the cat", " sat")
    assert tokenizer.decode(request.continuation_ids) == " sat"
    assert encode_pair(tokenizer, "", "sat") == Continuation([], tokenizer.encode("sat", add_special_tokens=False))


@pytest.mark.parametrize("adds_bos", [False, True])
def test_pairs_are_encoded_as_lm_eval_does(adds_bos):
    huggingface = pytest.importorskip("lm_eval.models.huggingface")
    tokenizer = tiny_tokenizer(adds_bos)
    reference = huggingface.HFLM(pretrained=tiny_llama(), backend="causal", tokenizer=tokenizer)
    contexts = ["the cat", "the cat  ", "<s>the cat", "on the m", "line\n", "日本"]
    for context in contexts:
        for continuation in (" sat", "at", "\nAnswer", "本"):
            found = encode_pair(tokenizer, context, continuation)
            assert (found.context_ids, found.continuation_ids) == reference._encode_pair(context, continuation)


def test_a_last_word_is_right_when_all_its_tokens_are_greedy(tmp_path):
    model, tokenizer = tiny_llama(), tiny_tokenizer()
    context = tokenizer.encode("the cat sat on the", add_special_tokens=False)
    options = {"max_new_tokens": 2, "do_sample": False, "eos_token_id": None}
    for seed in range(50):  # until a random model says a word that decodes to the same tokens again
        model = tiny_llama(seed)
        greedy = model.generate(torch.tensor([context]), **options)[0, len(context) :].tolist()
        word = tokenizer.decode(greedy)
        if (
            word.startswith(" ")
            and list(encode_pair(tokenizer, "the cat sat on the", word).continuation_ids) == greedy
        ):
            break
    else:
        pytest.fail("no model says a word")
    rows = [{"context": "the cat sat on the", "continuation": text} for text in (word[1:], "Zz")]
    score = score_task(model, tokenizer, read_task(write(tmp_path / "t.jsonl", rows)), batch_size=2)
    assert score.values["accuracy"].tolist() == [1, 0]
    expected = slow_log_likelihood(model, Continuation(context, greedy))
    assert score.values["nll"][0] == pytest.approx(-expected, abs=1e-4)
    assert score.metrics == {
        "accuracy": 0.5,
        "perplexity": pytest.approx(np.exp(score.values["nll"].mean())),
    }


def test_choices_are_compared_by_likelihood_and_by_likelihood_a_character(tmp_path):
    model, tokenizer = tiny_llama(), tiny_tokenizer()
    task = read_task(write(tmp_path / "t.jsonl", questions()))
    score = score_task(model, tokenizer, task, batch_size=7)
    best, per_character, per_byte = [], [], []
    for item in task.items:
        found = np.array(
            [slow_log_likelihood(model, encode_pair(tokenizer, item.context, " " + c)) for c in item.choices]
        )
        best.append(float(found.argmax() == item.gold))
        per_character.append(float((found / [len(c) for c in item.choices]).argmax() == item.gold))
        per_byte.append(float((found / [len(c.encode()) for c in item.choices]).argmax() == item.gold))
    assert score.values["accuracy"].tolist() == best
    assert score.values["normalised_accuracy"].tolist() == per_character
    assert per_character != best and per_character != per_byte  # or this shows nothing
    assert score.metrics == {"accuracy": np.mean(best), "normalised_accuracy": np.mean(per_character)}


def test_a_limit_scores_the_same_items_as_the_whole_does(tmp_path):
    model, tokenizer = tiny_llama(), tiny_tokenizer()
    task = read_task(write(tmp_path / "t.jsonl", questions(10)))
    whole, some = (score_task(model, tokenizer, task, limit=limit, batch_size=4) for limit in (None, 4))
    assert some.items.tolist() == [0, 2, 5, 7]
    np.testing.assert_array_equal(some.values["accuracy"], whole.values["accuracy"][some.items])
    for index, likelihoods in zip(some.items, some.log_likelihoods, strict=True):
        np.testing.assert_allclose(likelihoods, whole.log_likelihoods[index], atol=1e-4)


def test_an_empty_context_is_scored_after_the_tokenizer_s_bos(tmp_path):
    model, tokenizer = tiny_llama(), tiny_tokenizer()
    model.config.bos_token_id = 9
    task = read_task(write(tmp_path / "t.jsonl", [{"context": "", "continuation": "mat"}]))
    expected = slow_log_likelihood(model, Continuation([0], encode_pair(tokenizer, "", " mat").continuation_ids))
    assert score_task(model, tokenizer, task, batch_size=1).values["nll"][0] == pytest.approx(-expected, abs=1e-4)


def test_a_choice_too_long_for_the_model_is_named_with_its_line(tmp_path):
    rows = [LAST_WORD[0], {"context": "the", "continuation": "zq" * 60}]
    task = read_task(write(tmp_path / "t.jsonl", rows))
    with pytest.raises(ValueError, match=r"t\.jsonl, line 2: 'zqzq.*' has \d+ tokens .* scores 1 to 64"):
        score_task(tiny_llama(), tiny_tokenizer(), task, batch_size=1)
