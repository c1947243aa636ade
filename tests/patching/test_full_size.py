"""The published sizes: exact parameter counts on the meta device, the cost of patching, and one real forward pass."""

import time
from typing import Any

import pytest
import torch
from diffusers import SD3Transformer2DModel
from torch import nn

import mmpreproj
from mmpreproj import PreProjConfig

COMMON = {
    "sample_size": 128,
    "patch_size": 2,
    "in_channels": 16,
    "out_channels": 16,
    "attention_head_dim": 64,
    "joint_attention_dim": 4096,
    "pooled_projection_dim": 2048,
}
# Source: transformer/config.json of the models of these names on the hub.
MEDIUM = {"num_layers": 24, "num_attention_heads": 24, "caption_projection_dim": 1536, "pos_embed_max_size": 192}
MEDIUM_35 = MEDIUM | {
    "pos_embed_max_size": 384,
    "dual_attention_layers": tuple(range(13)),
    "qk_norm": "rms_norm",
}
LARGE_35 = {
    "num_layers": 38,
    "num_attention_heads": 38,
    "caption_projection_dim": 2432,
    "pos_embed_max_size": 192,
    "qk_norm": "rms_norm",
}
# Model, width D, attentions that are patched, base parameters in thousands of millions.
SIZES = {
    "SD3-medium": (MEDIUM, 1536, 24, 2.03),
    "SD3.5-medium": (MEDIUM_35, 1536, 24 + 13, 2.24),
    "SD3.5-large": (LARGE_35, 2432, 38, 8.06),
}


def build_empty(values: dict[str, Any]) -> SD3Transformer2DModel:
    with torch.device("meta"):
        return SD3Transformer2DModel(**COMMON, **values).to(torch.bfloat16)


def per_attention(width: int, expansion: float = 1.25) -> int:
    """`W_up` and `W_down` of `round(e·D) · D` each, and `W_skip` of `D²`."""
    return 2 * round(expansion * width) * width + width**2


@pytest.mark.parametrize("model", SIZES)
def test_parameters_are_reported_exactly(model: str):
    values, width, attentions, billions = SIZES[model]
    transformer = build_empty(values)
    base = sum(parameter.numel() for parameter in transformer.parameters())
    assert base / 1e9 == pytest.approx(billions, rel=0.01)
    start = time.perf_counter()
    report = mmpreproj.patch(transformer)
    assert time.perf_counter() - start < 2
    assert len(report.sites) == attentions
    assert {site.parameters for site in report.sites} == {per_attention(width)}
    assert report.parameters == attentions * per_attention(width)
    assert report.parameters == sum(parameter.numel() for parameter in mmpreproj.parameters(transformer))
    assert report.base_parameters == base
    assert report.blocks == tuple(range(values["num_layers"]))
    assert all(parameter.is_meta for parameter in mmpreproj.parameters(transformer))
    assert {parameter.dtype for parameter in mmpreproj.parameters(transformer)} == {torch.bfloat16}


def test_sd3_medium_takes_198_million():
    report = mmpreproj.patch(build_empty(MEDIUM))
    assert report.parameters == 198_180_864
    assert f"{report.parameters:,} parameters (9.8% of the base)" in str(report)


def test_weights_of_their_own_for_each_stream_spare_the_text_skip_of_the_last_block():
    report = mmpreproj.patch(build_empty(MEDIUM), PreProjConfig(share="stream"))
    assert report.parameters == 24 * 2 * per_attention(1536) - 1536**2


def test_unpatching_a_full_size_model_leaves_its_keys():
    transformer = build_empty(MEDIUM_35)
    keys = list(transformer.state_dict())
    mmpreproj.patch(transformer)
    mmpreproj.unpatch(transformer)
    assert list(transformer.state_dict()) == keys


def held_bytes(model: nn.Module) -> int:
    """Bytes of all the distinct storages that a model holds."""
    tensors = [*model.parameters(), *model.buffers()]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def test_patching_copies_nothing_of_the_base():
    values = MEDIUM_35 | {"num_layers": 3, "dual_attention_layers": (0,), "pos_embed_max_size": 64}
    values |= {"num_attention_heads": 8, "caption_projection_dim": 512}
    transformer = SD3Transformer2DModel(**COMMON, **values)
    before = {name: tensor.data_ptr() for name, tensor in transformer.state_dict().items()}
    held = held_bytes(transformer)
    report = mmpreproj.patch(transformer)
    now = {name: tensor.data_ptr() for name, tensor in transformer.state_dict().items()}
    assert {name: now[name] for name in before} == before
    own = 4 * report.parameters
    assert own == 4 * (3 + 1) * per_attention(512)
    assert held_bytes(transformer) - held == pytest.approx(own, rel=0.05)
    mmpreproj.unpatch(transformer)
    assert held_bytes(transformer) == held


def resident_bytes() -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmRSS"))


@pytest.mark.slow
def test_a_real_forward_pass_of_sd3_medium_is_finite_and_starts_as_the_base():
    """Needs about 6 GB of memory."""
    transformer = build_empty(MEDIUM).to_empty(device="cpu").eval()
    generator = torch.Generator().manual_seed(0)
    for tensor in (*transformer.parameters(), *transformer.buffers()):
        if tensor.is_floating_point():
            tensor.data.uniform_(-0.02, 0.02, generator=generator)
    inputs = {
        "hidden_states": torch.randn(1, 16, 32, 32, generator=generator).bfloat16(),
        "encoder_hidden_states": torch.randn(1, 154, 4096, generator=generator).bfloat16(),
        "pooled_projections": torch.randn(1, 2048, generator=generator).bfloat16(),
        "timestep": torch.tensor([500.0]).bfloat16(),
    }
    with torch.no_grad():
        base = transformer(**inputs, return_dict=False)[0]
        before = resident_bytes()
        report = mmpreproj.patch(transformer, PreProjConfig(init="zero"))
        assert resident_bytes() - before < 1.05 * 2 * report.parameters + 50e6
        patched = transformer(**inputs, return_dict=False)[0]
    assert patched.shape == (1, 16, 32, 32)
    assert patched.isfinite().all()
    assert torch.equal(patched, base)
    with torch.no_grad():
        for parameter in mmpreproj.parameters(transformer):
            parameter.uniform_(-0.02, 0.02, generator=generator)
        changed = transformer(**inputs, return_dict=False)[0]
    assert changed.isfinite().all()
    assert not torch.equal(changed, base)
