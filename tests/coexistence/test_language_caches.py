"""K/V caches of language models: an adapter adds nothing to them, and a text is the same with and without."""

from typing import Any

import pytest
import torch
from language_models import (
    BRIEF,
    ROWS,
    VOCABULARY,
    WINDOWED,
    generated,
    logits,
    make_ids,
    make_model,
    make_patched,
)
from torch import Tensor, nn
from transformers import Cache, DynamicCache, QuantizedCache, StaticCache
from transformers.generation.configuration_utils import ALL_CACHE_IMPLEMENTATIONS
from transformers.utils import is_optimum_quanto_available

import mmpreproj
from mmpreproj import PreProjConfig

EXACT = tuple(name for name in ALL_CACHE_IMPLEMENTATIONS if name != "quantized")
NEEDS_ACCELERATOR = tuple(name for name in EXACT if "offloaded" in name)
QUANTO = pytest.param(
    "quanto",
    {"q_group_size": 8, "residual_length": 4},
    marks=[
        pytest.mark.slow,  # it compiles itself first
        pytest.mark.skipif(not is_optimum_quanto_available(), reason="quanto is not installed"),
    ],
)


@pytest.fixture(params=ROWS)
def row(request: pytest.FixtureRequest) -> str:
    """A row of the table, by its model class."""
    return request.param


@pytest.fixture(params=BRIEF)
def brief_row(request: pytest.FixtureRequest) -> str:
    """One row of each make."""
    return request.param


def layout(cache: Cache) -> list[Any]:
    """Describe a cache: classes of its layers, what each holds, and shape, dtype and bytes of every tensor."""
    return [
        (
            type(layer).__name__,
            sorted(vars(layer)),
            [
                (key, tuple(value.shape), value.dtype, value.numel() * value.element_size())
                for key, value in sorted(vars(layer).items())
                if isinstance(value, Tensor)
            ],
        )
        for layer in cache.layers
    ]


def contents(cache: Cache) -> list[Tensor]:
    return [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]


def with_cache(model: nn.Module, **settings: Any) -> tuple[Tensor, Cache]:
    """Generate after two prompts and return the text and the cache that was used."""
    answer = generated(model, return_dict_in_generate=True, **settings)
    return answer.sequences, answer.cache


@pytest.mark.parametrize("implementation", EXACT)
def test_every_cache_of_generate_holds_what_the_bases_holds(row, implementation):
    if implementation in NEEDS_ACCELERATOR and not torch.accelerator.is_available():
        pytest.skip("offloaded caches need an accelerator")
    settings = {"cache_implementation": implementation}
    base_text, base_cache = with_cache(make_model(row), **settings)
    text, cache = with_cache(make_patched(row), **settings)
    assert type(cache) is type(base_cache)
    assert layout(cache) == layout(base_cache)
    assert torch.equal(text, generated(make_patched(row), use_cache=False))
    assert not torch.equal(text, base_text)


def test_a_zero_start_fills_the_cache_bit_for_bit(row):
    base_text, base_cache = with_cache(make_model(row))
    model = make_model(row)
    mmpreproj.patch(model, PreProjConfig(init="zero"))
    text, cache = with_cache(model)
    assert torch.equal(text, base_text)
    for found, expected in zip(contents(cache), contents(base_cache), strict=True):
        assert torch.equal(found, expected)


def test_windows_are_kept_to(row):
    _, cache = with_cache(make_patched(row))
    lengths = {type(layer).__name__: layer.keys.shape[-2] for layer in cache.layers}
    assert ("DynamicSlidingWindowLayer" in lengths) == (row in WINDOWED)
    assert lengths.get("DynamicSlidingWindowLayer", 7) == 7  # a window of 8 with the token that comes
    assert lengths.get("DynamicLayer", 26) == 26


@pytest.mark.parametrize("make_cache", [DynamicCache, StaticCache])
@pytest.mark.parametrize("steps", [(1,) * 17, (17,), (5, 1, 11), (9, 4, 4)], ids=str)
def test_a_text_in_pieces_gives_the_logits_of_the_whole(row, make_cache, steps):
    model, ids = make_patched(row), make_ids()
    cache = DynamicCache(config=model.config) if make_cache is DynamicCache else StaticCache(model.config, 24)
    pieces = [logits(model, piece, cache=cache, use_cache=True) for piece in ids.split(steps, dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), logits(model, use_cache=False), rtol=1e-4, atol=1e-4)
    assert cache.get_seq_length() == 17


@pytest.mark.parametrize(("backend", "further"), [("fp8", {}), QUANTO])
@pytest.mark.parametrize("row", [name for name in ROWS if name not in WINDOWED])
def test_a_quantised_cache_changes_no_more_than_it_does_in_the_base(row, backend, further):
    ids = make_ids()

    def change(model: nn.Module) -> tuple[float, list[Any]]:
        cache = QuantizedCache(backend, config=model.config, **further)
        pieces = [logits(model, piece, cache=cache, use_cache=True) for piece in ids.split((9, *(1,) * 8), dim=1)]
        whole = logits(model, use_cache=False)
        return float((torch.cat(pieces, dim=1) - whole).norm() / whole.norm()), layout(cache)

    base, base_layout = change(make_model(row))
    found, found_layout = change(make_patched(row))
    assert found_layout == base_layout
    assert 0 < found < max(3 * base, 0.1)
    settings = {"cache_implementation": "quantized", "cache_config": {"backend": backend, **further}}
    zero = make_model(row)
    mmpreproj.patch(zero, PreProjConfig(init="zero"))
    assert torch.equal(generated(zero, **settings), generated(make_model(row), **settings))
    generated(make_patched(row), **settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"num_beams": 3},
        {"num_beams": 4, "num_return_sequences": 2, "length_penalty": 0.5},
        {"do_sample": True, "temperature": 1.3, "top_k": 20},
        {"do_sample": True, "num_beams": 2},
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    ],
    ids=["beams", "several beams", "sampling", "sampled beams", "penalties"],
)
def test_every_way_to_search_gives_the_same_with_and_without_a_cache(row, settings):
    model = make_patched(row)
    texts = []
    for use_cache in (True, False):
        torch.manual_seed(3)
        texts.append(generated(model, use_cache=use_cache, **settings))
    assert torch.equal(*texts)


def test_prompt_lookup_gives_the_greedy_text(row):
    """Drafts are rejected, so the cache is cut back."""
    model = make_patched(row)
    ids = make_ids(1, 6).repeat(1, 4)  # repeats, for drafts to be found
    expected = generated(model, ids, tokens=16)
    assert torch.equal(
        generated(model, ids, tokens=16, prompt_lookup_num_tokens=3, max_matching_ngram_size=1), expected
    )


@pytest.mark.parametrize("drafter", ["the base", "itself"])
def test_assisted_generation_gives_the_greedy_text(brief_row, drafter):
    model = make_patched(brief_row)
    assistant = make_model(brief_row) if drafter == "the base" else make_patched(brief_row)
    ids = make_ids(1)
    assert torch.equal(generated(model, ids, assistant_model=assistant), generated(model, ids))


@pytest.mark.parametrize("chunk", [1, 5, 32])
@pytest.mark.parametrize("implementation", ["dynamic", "static"])
def test_a_prompt_in_chunks_gives_the_same_text(brief_row, chunk, implementation):
    model = make_patched(brief_row)
    settings = {"cache_implementation": implementation}
    found = generated(model, prefill_chunk_size=chunk, disable_compile=True, **settings)
    assert torch.equal(found, generated(model, **settings))


def test_a_cache_goes_on_after_the_text_it_was_made_for(row):
    """A second turn of a chat, which reuses the first one's cache."""
    model = make_patched(row)
    text, cache = with_cache(model)
    further = torch.cat([text, make_ids(2, 4, seed=9)], dim=1)
    mask = torch.ones_like(further)
    assert torch.equal(
        generated(model, further, cache=cache, attention_mask=mask), generated(model, further, use_cache=False)
    )


def test_a_scale_changed_between_two_steps_acts_from_the_next_on(brief_row):
    model, ids = make_patched(brief_row), make_ids()
    cache = DynamicCache(config=model.config)
    first = logits(model, ids[:, :9], cache=cache, use_cache=True)
    mmpreproj.set_scale(model, 0)
    rest = logits(model, ids[:, 9:], cache=cache, use_cache=True)
    base = logits(make_model(brief_row))
    assert not torch.allclose(first, base[:, :9], atol=1e-2)
    assert not torch.allclose(rest, base[:, 9:], atol=1e-2)  # it reads keys and values of the patched model
    assert torch.equal(logits(model), base)


def test_streamed_tokens_are_the_text(brief_row):
    class Streamer:
        def __init__(self):
            self.tokens: list[int] = []

        def put(self, value):
            self.tokens += value.flatten().tolist()

        def end(self):
            self.ended = True

    streamer, model, ids = Streamer(), make_patched(brief_row), make_ids(1)
    text = generated(model, ids, streamer=streamer)
    assert streamer.tokens == text[0].tolist() and streamer.ended
    assert max(streamer.tokens) < VOCABULARY
