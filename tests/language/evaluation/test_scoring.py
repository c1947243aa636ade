"""Log-likelihoods against one float64 forward pass a token."""

import numpy as np
import pytest
import torch
from scoring_kit import VOCABULARY, tiny_llama
from transformers import GPT2Config, GPT2LMHeadModel, GPTNeoXConfig, GPTNeoXForCausalLM, LlamaForCausalLM

from mmpreproj.language.evaluation import scoring
from mmpreproj.language.evaluation.scoring import Continuation, longest_input, score_continuations, score_text


def text(length=41, seed=3):
    return torch.randint(2, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed))


def slow_log_likelihood(model, context, target):
    """Give one token's log-likelihood and whether it is the greedy one, from a forward pass over its context alone."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([list(context)])).logits[0, -1].double()
    return logits.log_softmax(-1)[target].item(), bool(logits.argmax() == target)


def slow_window_nll(model, tokens, length, stride):
    """Score each token in the first window that predicts it, one by one; group the sums by window."""
    tokens, sums = tokens.tolist(), {}
    for place in range(1, len(tokens)):
        window = next(k for k in range(len(tokens)) if k * stride + length >= place)
        value, _ = slow_log_likelihood(model, tokens[window * stride : place], tokens[place])
        sums[window] = sums.get(window, 0.0) - value
    return [sums[window] for window in sorted(sums)]


def requests():
    """Continuations of many lengths after contexts of many lengths, in no order."""
    draw = np.random.default_rng(5)
    sizes = [(3, 2), (20, 1), (1, 7), (9, 9), (30, 3), (2, 1)]
    return [Continuation(*(draw.integers(2, VOCABULARY, n).tolist() for n in size)) for size in sizes]


def slow_continuation(model, request):
    context, scores = list(request.context_ids), []
    for token in request.continuation_ids:
        scores.append(slow_log_likelihood(model, context, token))
        context.append(token)
    return sum(value for value, _ in scores), all(greedy for _, greedy in scores)


class Whole(LlamaForCausalLM):
    """A model that always computes all its logits."""

    def forward(self, input_ids, attention_mask=None, use_cache=None):
        return super().forward(input_ids=input_ids, attention_mask=attention_mask, use_cache=use_cache)


@pytest.mark.parametrize(("length", "stride"), [(8, 8), (8, 3), (8, 1), (40, 40), (64, 16), (7, 5)])
def test_windows_score_every_token_once_in_the_first_window_that_reads_up_to_it(length, stride):
    model, tokens = tiny_llama(), text()
    score = score_text(model, tokens, length=length, stride=stride, batch_size=3)
    np.testing.assert_allclose(score.nll, slow_window_nll(model, tokens, length, stride), atol=1e-4)
    assert score.counts.sum() == len(tokens) - 1
    assert score.counts[0] == min(length, len(tokens) - 1)
    assert (score.counts[1:-1] == stride).all()
    assert score.perplexity == pytest.approx(np.exp(score.nll.sum() / 40))


@pytest.mark.parametrize("batch_size", [1, 2, 64])
def test_the_batch_size_changes_no_score(batch_size):
    model = tiny_llama()
    windows = score_text(model, text(), length=8, stride=4, batch_size=5)
    others = score_text(model, text(), length=8, stride=4, batch_size=batch_size)
    np.testing.assert_allclose(others.nll, windows.nll, atol=1e-4)
    some, more = (score_continuations(model, requests(), batch_size=size) for size in (4, batch_size))
    for one, other in zip(some, more, strict=True):
        assert other.log_likelihood == pytest.approx(one.log_likelihood, abs=1e-4)


def test_continuations_are_scored_in_the_given_order():
    model = tiny_llama()
    scores = score_continuations(model, requests(), batch_size=4)
    for score, request in zip(scores, requests(), strict=True):
        log_likelihood, _ = slow_continuation(model, request)
        assert score.log_likelihood == pytest.approx(log_likelihood, abs=1e-4)
        assert score.tokens == len(request.continuation_ids)


def test_greedy_means_every_token():
    model = tiny_llama()
    context = text(5).tolist()
    greedy = model.generate(torch.tensor([context]), max_new_tokens=3, do_sample=False, eos_token_id=None)[
        0, 5:
    ].tolist()
    wrong_at_the_end = [*greedy[:2], (greedy[2] + 1) % VOCABULARY]
    wrong_at_the_start = [(greedy[0] + 1) % VOCABULARY, *greedy[1:]]
    scores = score_continuations(
        model, [Continuation(context, ids) for ids in (greedy, wrong_at_the_end, wrong_at_the_start)], batch_size=3
    )
    assert [score.is_greedy for score in scores] == [True, False, False]


def test_long_contexts_are_cut_on_the_left():
    model = tiny_llama(longest=16)
    context, continuation = text(40).tolist(), [5, 6, 7]
    score = score_continuations(model, [Continuation(context, continuation)], batch_size=1)[0]
    kept = Continuation(context[-14:], continuation)  # 16 inputs: 14 and all of the continuation but its last
    assert score.log_likelihood == pytest.approx(
        score_continuations(model, [kept], batch_size=1)[0].log_likelihood, abs=1e-5
    )
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*context[-14:], 5, 6]])).logits[0, -3:].double().log_softmax(-1)
    assert score.log_likelihood == pytest.approx(
        sum(logits[i, t].item() for i, t in enumerate(continuation)), abs=1e-4
    )


def test_an_empty_context_becomes_the_prefix_token():
    model = tiny_llama()
    empty, begun = Continuation([], [5, 6]), Continuation([], [0, 5, 6])
    scores = score_continuations(model, [empty, begun, Continuation([0], [5, 6])], batch_size=3)
    assert scores[0].log_likelihood == pytest.approx(scores[2].log_likelihood, abs=1e-5)
    assert scores[1].log_likelihood == pytest.approx(scores[2].log_likelihood, abs=1e-5)
    assert scores[1].tokens == 2
    other = score_continuations(model, [empty, Continuation([9], [5, 6])], batch_size=2, prefix_token=9)
    assert other[0].log_likelihood == pytest.approx(other[1].log_likelihood, abs=1e-5)
    assert abs(other[0].log_likelihood - scores[0].log_likelihood) > 0.1


def test_only_wanted_logits_are_computed():
    model, shapes = tiny_llama(), []
    model.lm_head.register_forward_hook(lambda module, args, output: shapes.append(tuple(output.shape)))
    score_text(model, text(), length=8, stride=2, batch_size=4)
    assert shapes[0] == (1, 8, VOCABULARY)
    assert {shape[1] for shape in shapes[1:]} == {2}
    shapes.clear()
    score_continuations(model, [Continuation(text(30).tolist(), [5, 6])] * 2, batch_size=2)
    assert shapes == [(2, 2, VOCABULARY)]


def test_a_model_that_computes_all_logits_scores_the_same():
    whole = Whole(tiny_llama().config).eval()
    whole.load_state_dict(tiny_llama().state_dict())
    for model_score, whole_score in zip(
        score_continuations(tiny_llama(), requests(), batch_size=4),
        score_continuations(whole, requests(), batch_size=4),
        strict=True,
    ):
        assert whole_score.log_likelihood == pytest.approx(model_score.log_likelihood, abs=1e-5)
    expected = score_text(tiny_llama(), text(), length=8, stride=3, batch_size=4).nll
    np.testing.assert_allclose(score_text(whole, text(), length=8, stride=3, batch_size=4).nll, expected, atol=1e-5)


def test_chunks_of_positions_add_up(monkeypatch):
    expected = score_text(tiny_llama(), text(), length=16, stride=16, batch_size=2).nll
    monkeypatch.setattr(scoring, "CHUNK_ELEMENTS", 3 * VOCABULARY)
    np.testing.assert_allclose(
        score_text(tiny_llama(), text(), length=16, stride=16, batch_size=2).nll, expected, atol=1e-5
    )


def test_the_loss_of_a_bfloat16_model_is_in_fp32():
    model, tokens = tiny_llama().bfloat16(), text(17)
    with torch.no_grad():
        logits = model(input_ids=tokens[None, :-1]).logits[0].double().log_softmax(-1)
    expected = -logits.gather(-1, tokens[1:, None]).sum().item()
    score = score_text(model, tokens, length=16, stride=16, batch_size=1)
    assert score.nll[0] == pytest.approx(expected, abs=1e-4)


def test_scoring_leaves_modes_and_gradients_as_they_were():
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_positions=32, n_embd=32, n_layer=2, n_head=4))
    model.train()
    model.transformer.h[0].eval()
    before = [module.training for module in model.modules()]
    scores = [score_text(model, text(), length=8, stride=8, batch_size=2).nll for _ in range(2)]
    np.testing.assert_array_equal(scores[0], scores[1])  # dropout of 0.1 is off
    assert [module.training for module in model.modules()] == before
    assert model(input_ids=text(5)[None]).logits.requires_grad
    with pytest.raises(IndexError):
        score_continuations(model, [Continuation([VOCABULARY + 5], [3])], batch_size=1)
    assert [module.training for module in model.modules()] == before


def test_a_model_with_peft_scores_as_itself_and_keeps_its_adapter_apart():
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = GPTNeoXConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        initializer_range=0.3,
    )
    lora = peft.LoraConfig(target_modules=["query_key_value"], init_lora_weights=False)
    model = peft.get_peft_model(GPTNeoXForCausalLM(config), lora).eval()
    shapes = []
    model.get_base_model().get_output_embeddings().register_forward_hook(
        lambda m, args, output: shapes.append(output.shape[1])
    )
    scores = score_continuations(model, requests(), batch_size=1)
    assert sorted(shapes) == sorted(len(request.continuation_ids) for request in requests())
    for score, request in zip(scores, requests(), strict=True):
        assert score.log_likelihood == pytest.approx(slow_continuation(model, request)[0], abs=1e-4)
    assert not any(getattr(module, "merged", False) for module in model.modules())


def test_progress_counts_up_to_all():
    seen = []
    score_text(tiny_llama(), text(), length=8, stride=8, batch_size=2, on_progress=lambda *x: seen.append(x))
    assert seen == [(1, 5), (3, 5), (5, 5)]
    seen.clear()
    score_continuations(tiny_llama(), requests(), batch_size=4, on_progress=lambda *x: seen.append(x))
    assert seen == [(4, 6), (6, 6)]


def test_the_longest_input_is_the_text_parts_own():
    model = tiny_llama(longest=48)
    assert longest_input(model) == 48
    assert longest_input(torch.nn.Linear(1, 1)) == 2048


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": [3]}, r"at least 2, got the shape \[1\]"),
        ({"tokens": torch.zeros(2, 3)}, r"got the shape \[2, 3\]"),
        ({"length": 65}, "length is 65; this model reads 1 to 64"),
        ({"stride": 9}, r"stride is 9; give 1 to length \(8\)"),
        ({"stride": 0}, "stride is 0"),
        ({"batch_size": 0}, "batch_size is 0"),
    ],
)
def test_what_cannot_be_scored_as_text_is_refused(changes, message):
    arguments = {"tokens": text(), "length": 8, "stride": 4, "batch_size": 2} | changes
    with pytest.raises(ValueError, match=message):
        score_text(tiny_llama(), arguments.pop("tokens"), **arguments)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Continuation([3], []), "request 1 has 0 tokens to score"),
        (Continuation([], [0]), "request 1 has 0 tokens to score"),
        (Continuation([3], [4] * 65), "request 1 has 65 tokens to score; this model scores 1 to 64"),
    ],
)
def test_what_cannot_be_scored_as_a_continuation_is_refused(request_, message):
    with pytest.raises(ValueError, match=message):
        score_continuations(tiny_llama(), [Continuation([2], [3]), request_], batch_size=2)


def test_an_empty_context_without_a_prefix_token_is_refused():
    model = tiny_llama()
    model.config.bos_token_id = model.config.eos_token_id = None
    with pytest.raises(ValueError, match=r"request 0 has an empty context .* give prefix_token"):
        score_continuations(model, [Continuation([], [3])], batch_size=1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_scores_as_the_cpu_does():
    expected = score_text(tiny_llama(), text(), length=8, stride=4, batch_size=3).nll
    found = score_text(tiny_llama().to("cuda"), text(), length=8, stride=4, batch_size=3).nll
    np.testing.assert_allclose(found, expected, atol=1e-3)


@pytest.mark.parametrize(("length", "stride"), [(8, 8), (8, 3), (16, 16)])
def test_each_window_begins_with_the_beginning(length, stride):
    """The same tokens are scored, no window is longer, and none reads the token twice."""
    model, seen = tiny_llama(), []
    tokens = [7, *text()]
    model.register_forward_pre_hook(lambda _, args, given: seen.append(given["input_ids"]), with_kwargs=True)
    found = score_text(model, tokens, length=length, stride=stride, batch_size=1, beginning=7)
    windows = list(seen)
    plain = score_text(model, tokens, length=length, stride=stride, batch_size=1)
    assert all(ids[0, 0] == 7 and ids.shape[1] <= length for ids in windows)
    assert windows[0].tolist() == [tokens[:length]]
    assert windows[1][0, 1:].tolist() == tokens[stride + 1 : stride + length]
    assert found.counts.tolist() == plain.counts.tolist()
    assert found.nll[0] == plain.nll[0] and found.nll[1] != plain.nll[1]
