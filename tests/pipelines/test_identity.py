"""Fingerprints: the same for the same encoders wherever they are, another for whatever changes what they give."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from accelerate import cpu_offload, cpu_offload_with_hook
from diffusers.hooks import apply_group_offloading
from torch import nn
from transformers import BertTokenizerFast

from mmpreproj.pipelines import PreProjSD3Pipeline, identity
from mmpreproj.pipelines.identity import SAMPLED, TEXT, VAE, fingerprint

CPU = torch.device("cpu")


@pytest.fixture
def pipe(stock_components):
    return PreProjSD3Pipeline(**stock_components)


@pytest.fixture
def bert(make_bert):
    """A generic text encoder with its tokenizer."""
    text_encoder, tokenizer = make_bert()
    return SimpleNamespace(text_encoder=text_encoder, tokenizer=tokenizer)


def both(pipe):
    return fingerprint(pipe, VAE), fingerprint(pipe, TEXT)


def of(module):
    return fingerprint(SimpleNamespace(vae=module), VAE)


def linear(width=8, dtype=torch.float32):
    with torch.random.fork_rng():
        torch.manual_seed(6)
        return nn.Linear(width, width, bias=False, dtype=dtype)


# --- what leaves it as it is -----------------------------------------------------------------------------------------


def test_saving_and_loading_change_no_fingerprint(pipe, tmp_path):
    before = both(pipe)
    pipe.save_pretrained(tmp_path)
    assert both(pipe) == before
    loaded = PreProjSD3Pipeline.from_pretrained(tmp_path)
    assert both(loaded) == before
    loaded.save_pretrained(tmp_path / "again")
    assert both(PreProjSD3Pipeline.from_pretrained(tmp_path / "again")) == before


def test_a_generic_text_encoder_is_the_same_after_saving_and_loading(make_pixel_pipeline, tmp_path):
    pipe = make_pixel_pipeline()
    before = both(pipe)
    pipe.save_pretrained(tmp_path)
    assert both(PreProjSD3Pipeline.from_pretrained(tmp_path)) == before


def test_loading_in_another_dtype_is_as_casting(pipe, tmp_path):
    pipe.save_pretrained(tmp_path)
    loaded = PreProjSD3Pipeline.from_pretrained(tmp_path, torch_dtype=torch.bfloat16)
    assert both(loaded) != both(pipe)
    assert both(loaded) == both(pipe.to(torch.bfloat16))


def test_use_changes_no_fingerprint(pipe):
    before, fresh = both(pipe), pipe.tokenizer_3.backend_tokenizer.to_str()
    with torch.no_grad():
        for length in (16, 12):
            pipe.encode_prompt(["red", "a"], None, None, max_sequence_length=length)
            pipe.encode_prompt_mask(["red"], max_sequence_length=length)
            assert both(pipe) == before
        pipe.encode_latents(torch.zeros(1, 3, 16, 16))
    assert pipe.tokenizer_3.backend_tokenizer.to_str() != fresh  # it keeps padding and truncation of the last call
    assert both(pipe) == before


def test_training_and_gradients_make_no_difference(pipe):
    before = both(pipe)
    pipe.vae.train().requires_grad_(False)
    pipe.text_encoder.eval().requires_grad_(False)
    assert both(pipe) == before


@pytest.mark.slow
def test_another_process_finds_the_same(pipe, tmp_path):
    pipe.save_pretrained(tmp_path)
    code = """
import json, sys
from mmpreproj.pipelines import PreProjSD3Pipeline, identity
from mmpreproj.pipelines.identity import TEXT, VAE, fingerprint
pipe = PreProjSD3Pipeline.from_pretrained(sys.argv[1])
print(json.dumps([fingerprint(pipe, VAE), fingerprint(pipe, TEXT)]))
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": "12"}
    ended = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, env=environment)
    assert ended.returncode == 0, ended.stderr
    assert tuple(json.loads(ended.stdout.splitlines()[-1])) == both(pipe)


# --- what makes it another -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["vae", "text_encoder", "text_encoder_2", "text_encoder_3"])
def test_every_weight_of_every_encoder_matters_to_its_own_fingerprint(pipe, name):
    before, module = both(pipe), getattr(pipe, name)
    for key, value in module.state_dict().items():
        kept = value.flatten()[-1].clone()
        with torch.no_grad():
            value.view(-1)[-1] = torch.nextafter(kept, kept + 1)
        vae, text = both(pipe)
        assert (vae != before[0], text != before[1]) == (name == "vae", name != "vae"), key
        with torch.no_grad():
            value.view(-1)[-1] = kept
    assert both(pipe) == before


@pytest.mark.parametrize("values", [SAMPLED // 16, 16 * SAMPLED])
def test_values_are_sampled_evenly_from_the_first_to_the_last(values):
    module = nn.Linear(values, 1, bias=False)
    before, seen = of(module), []
    for place in [*range(0, values, max(values // 500, 1)), values - 1]:
        kept = module.weight[0, place].item()
        with torch.no_grad():
            module.weight[0, place] = kept + 1
        seen.append(of(module) != before)
        with torch.no_grad():
            module.weight[0, place] = kept
    assert seen[0] and seen[-1]
    assert all(seen) if values <= SAMPLED else any(seen[1:-1])
    with torch.no_grad():
        module.weight[0, values // 3 : values // 3 + 2 * values // SAMPLED + 2] += 1
    assert of(module) != before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn])
def test_a_dtype_matters_also_where_values_are_the_same(dtype):
    ones = [nn.Linear(4, 4, bias=False) for _ in range(2)]
    for one in ones:
        nn.init.ones_(one.weight)
    assert of(ones[0]) == of(ones[1])
    assert of(ones[0]) != of(ones[1].to(dtype))
    first, second = linear().to(dtype), linear().to(dtype)
    assert of(first) == of(second)
    second.weight.data.view(torch.uint8)[-1, -1] ^= 1
    assert of(first) != of(second)


def test_a_shape_matters_and_so_do_whole_numbers_too_large_for_floats():
    first, second = nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False)
    second.load_state_dict({"weight": first.weight.detach().reshape(4, 2)})
    assert of(first) != of(second)
    for module, number in ((first, 2**53), (second, 2**53 + 1)):
        module.weight = None
        module.register_buffer("number", torch.tensor(number))
    assert of(first) != of(second)


@pytest.mark.parametrize(
    "setting", [{"scaling_factor": 1.6}, {"shift_factor": 0.07}, {"shift_factor": None}, {"act_fn": "relu"}]
)
def test_a_setting_of_the_vae_matters(make_vae, setting):
    assert of(make_vae()) == of(make_vae()) != of(make_vae(**setting))


def test_a_setting_of_a_text_encoder_matters(bert):
    before = fingerprint(bert, TEXT)
    bert.text_encoder.config.hidden_act = "relu"
    assert fingerprint(bert, TEXT) != before


@pytest.mark.parametrize("name", ["text_encoder_3", "tokenizer_3", "tokenizer"])
def test_a_missing_component_matters(pipe, name):
    before = both(pipe)
    pipe.register_modules(**{name: None})
    vae, text = both(pipe)
    assert (vae, text) == (before[0], text) and text != before[1]


def test_no_vae_has_a_fingerprint_of_its_own(make_pixel_pipeline, make_vae):
    assert fingerprint(make_pixel_pipeline(), VAE) == fingerprint(make_pixel_pipeline(), VAE) != of(make_vae("tiny"))


def test_two_encoders_exchanged_are_not_the_same(pipe):
    before = fingerprint(pipe, TEXT)
    first, second = pipe.text_encoder, pipe.text_encoder_2
    pipe.register_modules(text_encoder=second, text_encoder_2=first)
    assert fingerprint(pipe, TEXT) != before


TOKENIZERS = {
    "one more word": lambda tokenizer: tokenizer.add_tokens(["tulip"]),
    "length": lambda tokenizer: setattr(tokenizer, "model_max_length", 7),
    "side of padding": lambda tokenizer: setattr(tokenizer, "padding_side", "left"),
    "side of truncation": lambda tokenizer: setattr(tokenizer, "truncation_side", "left"),
    "special token": lambda tokenizer: setattr(tokenizer, "pad_token", "[MASK]"),
}


@pytest.mark.parametrize("change", TOKENIZERS)
def test_what_changes_a_tokenizers_output_matters(bert, change):
    before = fingerprint(bert, TEXT)
    TOKENIZERS[change](bert.tokenizer)
    assert fingerprint(bert, TEXT) != before


def test_how_a_tokenizer_cuts_words_matters_and_not_only_its_vocabulary():
    words = {word: index for index, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "red", "Red"])}
    lower, cased = (BertTokenizerFast(vocab=words, do_lower_case=lower) for lower in (True, False))
    assert lower.get_vocab() == cased.get_vocab()
    found = [fingerprint(SimpleNamespace(tokenizer=tokenizer), TEXT) for tokenizer in (lower, cased)]
    assert found[0] != found[1]


# --- quantised, offloaded, large -------------------------------------------------------------------------------------


def quanto(module):
    from optimum.quanto import freeze, qint8, quantize

    quantize(module, weights=qint8)
    freeze(module)


def torchao(module):
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(module, Int8WeightOnlyConfig())


@pytest.mark.parametrize(("library", "quantise"), [("optimum.quanto", quanto), ("torchao", torchao)])
def test_quantised_weights_have_a_fingerprint_by_their_values(library, quantise):
    pytest.importorskip(library)
    first, again, other = (nn.Sequential(linear(64)) for _ in range(3))
    plain = of(first)
    with torch.no_grad():
        other[0].weight[0, 0] += 1
    for module in (first, again, other):
        quantise(module)
    assert of(first) == of(again)
    assert len({plain, of(first), of(other)}) == 3


def test_offloading_of_whole_models_and_by_group_changes_no_fingerprint(pipe):
    before = both(pipe)
    cpu_offload_with_hook(pipe.vae, execution_device=CPU)
    apply_group_offloading(pipe.text_encoder_3, CPU, CPU, offload_type="leaf_level")
    assert both(pipe) == before


def test_weights_that_cannot_be_read_where_they_are_are_refused(pipe, make_vae, tmp_path):
    cpu_offload(pipe.text_encoder_2, execution_device=CPU)
    with pytest.raises(
        ValueError, match=r"the weights of text_encoder_2 \(CLIPTextModelWithProjection\) are offloaded"
    ):
        fingerprint(pipe, TEXT)
    vae = make_vae()
    apply_group_offloading(
        vae, CPU, CPU, offload_type="block_level", num_blocks_per_group=1, offload_to_disk_path=str(tmp_path)
    )
    with pytest.raises(ValueError, match=r"of vae \(AutoencoderKL\) are offloaded .* before offloading is enabled"):
        of(vae)


def test_of_a_large_weight_a_bounded_number_of_values_is_read(monkeypatch):
    read, stock = [], identity._sample

    def counting(value):
        found = stock(value)
        read.append(len(found) // value.element_size())
        return found

    monkeypatch.setattr(identity, "_sample", counting)
    of(nn.Linear(3000, 1000, bias=False))
    assert read == [SAMPLED]
