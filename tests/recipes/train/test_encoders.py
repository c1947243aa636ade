"""Encoders are there while pictures and captions are encoded, gone while a model trains, and back at the end."""

import gc
import weakref

import pytest
import torch
from transformers import CLIPTextConfig, CLIPTextModelWithProjection

from mmpreproj.pipelines import PreProjSD3Pipeline
from mmpreproj.recipes.scratch import build_pipeline
from mmpreproj.recipes.train.encoders import TEXT_ENCODERS, Encoders
from mmpreproj.recipes.train.inputs import make_inputs
from mmpreproj.recipes.train.watching import Watch
from mmpreproj.training.config import ScratchModel


def weights(module):
    return {name: value.clone() for name, value in module.state_dict().items()}


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(value, second[name]) for name, value in first.items())


def encode(pipeline, prompt="red apple"):
    tokens, _, pooled, _ = pipeline.encode_prompt(
        prompt, prompt_2=None, prompt_3=None, do_classifier_free_guidance=False, max_sequence_length=6
    )
    return tokens, pooled


def test_text_encoders_are_out_of_memory_while_a_run_trains_and_back_at_its_end(
    run, make_config, saved_pipelines, monkeypatch
):
    born, seen = [], []
    original = {"make": make_inputs, "step": Watch.step, "evaluate": Watch.evaluate}

    def remember(pipeline, *args, **kwargs):
        born.append(weakref.ref(pipeline.text_encoder))
        return original["make"](pipeline, *args, **kwargs)

    def looking(name):
        def wrapped(self, argument):
            gc.collect()
            seen.append((name, self.pipeline.text_encoder, born[0](), self.pipeline.tokenizer is not None))
            return original[name](self, argument)

        return wrapped

    monkeypatch.setattr("mmpreproj.recipes.train.run.make_inputs", remember)
    monkeypatch.setattr(Watch, "step", looking("step"))
    monkeypatch.setattr(Watch, "evaluate", looking("evaluate"))
    settings = {"data": {"resolution": 16}, "validation": {"prompts": ["red"], "steps": 1, "count": 1}}
    source = saved_pipelines["latents"]
    done, _ = run(make_config(model=str(source), mode="full", steps=2, **settings))
    assert [(name, encoder, alive) for name, encoder, alive, _ in seen] == [
        ("evaluate", None, None),
        ("step", None, None),
        ("step", None, None),
        ("evaluate", None, None),
        ("step", None, None),
    ]
    assert all(has_tokenizer for *_, has_tokenizer in seen)

    stock = PreProjSD3Pipeline.from_pretrained(source)
    for pipeline in (done.pipeline, PreProjSD3Pipeline.from_pretrained(done.saved)):
        assert type(pipeline.text_encoder) is type(stock.text_encoder) and not pipeline.text_encoder.training
        assert same(weights(pipeline.text_encoder), weights(stock.text_encoder))
        for made, expected in zip(encode(pipeline), encode(stock), strict=True):
            assert torch.equal(made, expected)
    assert same(weights(done.pipeline.vae), weights(stock.vae))


@pytest.fixture
def three(tmp_path, base):
    """A pipeline's folder with two CLIP encoders in bfloat16, of which one differs from the other."""
    pipeline = PreProjSD3Pipeline.from_pretrained(base)
    settings = {"vocab_size": 40, "hidden_size": 24, "intermediate_size": 24, "num_hidden_layers": 1}
    for name, width in (("text_encoder", 12), ("text_encoder_2", 20)):
        config = CLIPTextConfig(**settings, num_attention_heads=2, projection_dim=width, eos_token_id=2)
        pipeline.register_modules(**{name: CLIPTextModelWithProjection(config).to(torch.bfloat16)})
    pipeline.save_pretrained(tmp_path / "three")
    return tmp_path / "three"


def test_each_encoder_comes_back_of_its_class_in_its_dtype(three):
    pipeline = PreProjSD3Pipeline.from_pretrained(three, dtype=torch.bfloat16)
    before = {name: weights(getattr(pipeline, name)) for name in TEXT_ENCODERS[:2]}
    encoders = Encoders(pipeline, str(three))
    encoders.release()
    assert [getattr(pipeline, name) for name in TEXT_ENCODERS] == [None] * 3
    encoders.restore()
    for name in TEXT_ENCODERS[:2]:
        module = getattr(pipeline, name)
        assert isinstance(module, CLIPTextModelWithProjection) and module.dtype == torch.bfloat16
        assert same(weights(module), before[name])
    assert pipeline.text_encoder_3 is None
    encoders.restore()  # nothing is left to be loaded
    assert pipeline.text_encoder_3 is None


def test_what_a_released_pipeline_saves_has_its_encoders_again_once_they_are_restored(three, tmp_path):
    pipeline = PreProjSD3Pipeline.from_pretrained(three)
    encoders = Encoders(pipeline, str(three))
    encoders.release()
    encoders.restore()
    pipeline.save_pretrained(tmp_path / "again")
    for name in TEXT_ENCODERS:
        expected, found = (PreProjSD3Pipeline.load_config(folder)[name] for folder in (three, tmp_path / "again"))
        assert found == expected


def test_the_encoder_of_a_new_model_comes_from_where_it_came(monkeypatch):
    sizes = ScratchModel(width=32, depth=1, heads=2, patch_size=2, text_tokens=8)
    try:
        pipeline = build_pipeline(sizes, resolution=8)
    except OSError:
        pytest.skip("MiniLM is neither installed nor in the cache of the hub")
    before = weights(pipeline.text_encoder)
    encoders = Encoders(pipeline, sizes)
    encoders.release()
    assert pipeline.text_encoder is None
    encoders.restore()
    assert same(weights(pipeline.text_encoder), before) and not pipeline.text_encoder.training


def test_encoders_are_placed_to_encode_and_the_vae_leaves_the_device_for_training(saved_pipelines):
    pipeline = PreProjSD3Pipeline.from_pretrained(saved_pipelines["latents"])
    pipeline.vae.train()
    encoders = Encoders(pipeline, str(saved_pipelines["latents"]))
    encoders.place(torch.device("meta"))
    for module in (pipeline.vae, pipeline.text_encoder):
        assert module.device.type == "meta" and not module.training
        assert not any(parameter.requires_grad for parameter in module.parameters())
    assert pipeline.transformer.device.type == "cpu"
    pipeline.vae.to_empty(device="cpu")
    encoders.release()
    assert pipeline.vae.device.type == "cpu"
