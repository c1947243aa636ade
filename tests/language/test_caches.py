"""The size of a model's K/V cache, which the adapter leaves as it is."""

import pytest
import torch
from language_models import BRIEF, ROWS, make_model, make_patched

from mmpreproj.language.caches import cache_bytes


def test_the_cache_has_keys_and_values_of_each_layer():
    model = make_model("LlamaForCausalLM")  # 2 layers, 2 heads of 8 for keys and values
    assert cache_bytes(model, tokens=20) == 2 * 2 * (2 * 8) * 20 * 4
    assert cache_bytes(model.to(torch.bfloat16), tokens=20) == 2 * 2 * (2 * 8) * 20 * 2


@pytest.mark.parametrize("row", ROWS)
def test_the_adapter_adds_nothing_to_it(row):
    assert cache_bytes(make_patched(row)) == cache_bytes(make_model(row)) > 0


def test_a_window_keeps_less():
    wide, narrow = (make_model("MistralForCausalLM", sliding_window=size) for size in (64, 8))
    assert cache_bytes(narrow) < cache_bytes(wide)


@pytest.mark.parametrize("row", BRIEF)
def test_a_model_that_reads_less_is_measured_with_as_much(row):
    model = make_model(row, max_position_embeddings=8)
    assert cache_bytes(model) == cache_bytes(model, tokens=8)


def test_the_mode_stays():
    model = make_model("LlamaForCausalLM").train()
    cache_bytes(model)
    assert all(module.training for module in model.modules())
