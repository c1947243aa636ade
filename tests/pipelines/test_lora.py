"""LoRA files in pipelines whose transformer carries an adapter."""

import copy

import numpy as np
import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from peft import LoraConfig, get_peft_model_state_dict

import mmpreproj
from mmpreproj.pipelines import PreProjSD3Pipeline


def make_lora(transformer, *, seed: int = 4) -> dict[str, torch.Tensor]:
    """Make a LoRA's weights for a transformer, which is left alone."""
    twin = copy.deepcopy(transformer)
    twin.add_adapter(LoraConfig(r=4, lora_alpha=4, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
    generator = torch.Generator().manual_seed(seed)
    state = get_peft_model_state_dict(twin)
    return {key: torch.randn(value.shape, generator=generator) * 0.3 for key, value in state.items()}


@pytest.fixture
def lora_folder(stock_components, tmp_path):
    """A LoRA file as diffusers writes it."""
    weights = make_lora(stock_components["transformer"])
    StableDiffusion3Pipeline.save_lora_weights(tmp_path / "lora", transformer_lora_layers=weights)
    return tmp_path / "lora"


@pytest.fixture(params=[StableDiffusion3Pipeline, PreProjSD3Pipeline])
def make_pipe(request, stock_components):
    """Build a pipeline around a copy of the same transformer."""
    return lambda: request.param(**stock_components | {"transformer": copy.deepcopy(stock_components["transformer"])})


@pytest.fixture(params=["lora first", "ours first"])
def make_both(request, make_pipe, lora_folder, shake):
    """Build a pipeline with the LoRA and an adapter of ours, put on in either order."""

    def make():
        pipe = make_pipe()
        steps = [lambda: pipe.load_lora_weights(lora_folder), lambda: mmpreproj.patch(pipe.transformer)]
        for step in steps if request.param == "lora first" else reversed(steps):
            step()
        shake(pipe.transformer)
        return pipe

    return make


@pytest.fixture
def pictures(make_pipe, lora_folder, shake, draw):
    """Pictures of the base, of ours alone and of the LoRA alone."""
    ours, lora = make_pipe(), make_pipe()
    mmpreproj.patch(ours.transformer)
    shake(ours.transformer)
    lora.load_lora_weights(lora_folder)
    return {"base": draw(make_pipe()), "ours": draw(ours), "lora": draw(lora)}


def apart(*pictures):
    return all(
        np.abs(one - other).max() > 1e-3 for index, one in enumerate(pictures) for other in pictures[index + 1 :]
    )


def test_either_goes_and_the_other_is_what_it_was_alone(make_both, pictures, draw):
    pipe = make_both()
    both = draw(pipe)
    assert apart(both, *pictures.values())
    twin = copy.deepcopy(pipe)
    mmpreproj.unpatch(pipe.transformer)
    assert np.array_equal(draw(pipe), pictures["lora"])
    pipe.unload_lora_weights()
    assert np.array_equal(draw(pipe), pictures["base"])
    twin.unload_lora_weights()
    assert np.array_equal(draw(twin), pictures["ours"])
    mmpreproj.unpatch(twin.transformer)
    assert np.array_equal(draw(twin), pictures["base"])


def test_scales_do_not_reach_each_other(make_both, pictures, make_pipe, lora_folder, draw):
    pipe, alone = make_both(), make_pipe()
    alone.load_lora_weights(lora_folder)
    both = draw(pipe)
    np.testing.assert_allclose(draw(pipe, joint_attention_kwargs={"scale": 0.0}), pictures["ours"], atol=1e-5)
    assert np.array_equal(draw(pipe), both)
    mmpreproj.set_scale(pipe.transformer, 0)
    for scale in (0.25, 1.0):
        settings = {"joint_attention_kwargs": {"scale": scale}}
        assert np.array_equal(draw(pipe, **settings), draw(alone, **settings))
    mmpreproj.set_scale(pipe.transformer, 1)
    pipe.disable_lora()
    assert np.array_equal(draw(pipe), pictures["ours"])
    pipe.enable_lora()
    assert np.array_equal(draw(pipe), both)


def test_fusing_and_unfusing_leaves_ours(make_both, pictures, make_pipe, lora_folder, draw):
    pipe, alone = make_both(), make_pipe()
    alone.load_lora_weights(lora_folder)
    both, weights = draw(pipe), [value.clone() for value in mmpreproj.parameters(pipe.transformer)]
    for one in (pipe, alone):
        one.fuse_lora(lora_scale=0.5)
    fused = draw(pipe)
    assert apart(fused, both, pictures["ours"])
    with mmpreproj.disabled(pipe.transformer):
        assert np.array_equal(draw(pipe), draw(alone))
    assert all(map(torch.equal, mmpreproj.parameters(pipe.transformer), weights))
    for one in (pipe, alone):
        one.unfuse_lora()
        one.unload_lora_weights()
    np.testing.assert_allclose(draw(pipe), pictures["ours"], atol=1e-4)  # unfusing itself rounds
    mmpreproj.unpatch(pipe.transformer)
    assert np.array_equal(draw(pipe), draw(alone))


def test_two_loras_and_two_of_ours_mix_by_name(make_both, stock_components, draw, tmp_path):
    pipe = make_both()
    weights = make_lora(stock_components["transformer"], seed=8)
    StableDiffusion3Pipeline.save_lora_weights(tmp_path / "second", transformer_lora_layers=weights)
    (first,) = pipe.get_active_adapters()
    one = draw(pipe)
    pipe.load_lora_weights(tmp_path / "second", adapter_name="second")
    mmpreproj.patch(pipe.transformer, name="second")
    for parameter in mmpreproj.parameters(pipe.transformer, "second"):
        torch.nn.init.normal_(parameter, std=0.2)
    mmpreproj.set_scale(pipe.transformer, {"second": 0.0})
    pipe.set_adapters([first, "second"], [1.0, 0.0])
    assert np.array_equal(draw(pipe), one)
    pipe.set_adapters([first, "second"], [0.3, 0.6])
    mmpreproj.set_scale(pipe.transformer, {"second": 0.5})
    mixed = draw(pipe)
    pipe.delete_adapters("second")
    pipe.set_adapters([first], [1.0])
    mmpreproj.unpatch(pipe.transformer, "second")
    assert apart(mixed, one)
    assert np.array_equal(draw(pipe), one)


@pytest.mark.parametrize("lora_first", [True, False])
def test_saved_apart_and_loaded_in_either_order_they_draw_the_same(make_both, make_pipe, draw, tmp_path, lora_first):
    pipe = make_both()
    mmpreproj.save(pipe.transformer, tmp_path / "ours", card=False)
    weights = get_peft_model_state_dict(pipe.transformer, adapter_name=pipe.get_active_adapters()[0])
    assert not [key for key in weights if "preproj" in key]
    pipe.save_lora_weights(tmp_path / "again", transformer_lora_layers=weights)
    fresh = make_pipe()
    steps = [
        lambda: fresh.load_lora_weights(tmp_path / "again"),
        lambda: mmpreproj.load(fresh.transformer, tmp_path / "ours"),
    ]
    for step in steps if lora_first else reversed(steps):
        step()
    assert np.array_equal(draw(fresh), draw(pipe))
