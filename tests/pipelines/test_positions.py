"""Stock pipelines with rotary positions in their transformer, on pictures that are not square.

Each is compared with the same pipeline on a transformer whose attention turns queries and keys by hand: in float64, by
rotation matrices, for the one grid that the test knows; absolute positions are set to zero where they are removed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    SD3ControlNetModel,
    StableDiffusion3ControlNetPipeline,
    StableDiffusion3Img2ImgPipeline,
    StableDiffusion3InpaintPipeline,
    StableDiffusion3PAGPipeline,
    StableDiffusion3Pipeline,
)
from diffusers.models.attention_processor import SD3IPAdapterJointAttnProcessor2_0
from diffusers.models.embeddings import IPAdapterTimeImageProjection
from torch import Tensor, nn
from transformers import SiglipImageProcessor, SiglipVisionConfig, SiglipVisionModel

import mmpreproj
from mmpreproj import Positions, PreProjConfig
from mmpreproj.pipelines import PreProjSD3Pipeline

POSITIONS = {"identity": Positions(), "full": Positions(start="full", absolute="remove")}
HEIGHT, WIDTH = 16, 24  # pixels; the VAE halves them, a patch is two latent cells
ROWS, COLUMNS = HEIGHT // 4, WIDTH // 4
SHOWN = torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(5))  # what an IP-Adapter is given
CLASSES = {
    "text": StableDiffusion3Pipeline,
    "ours": PreProjSD3Pipeline,
    "img2img": StableDiffusion3Img2ImgPipeline,
    "inpaint": StableDiffusion3InpaintPipeline,
    "controlnet": StableDiffusion3ControlNetPipeline,
    "layer skipping": StableDiffusion3Pipeline,
}
REFUSED = r"was put in the place of the attention processor that turns queries and keys by their positions"


def picture(seed: int = 3) -> Tensor:
    return torch.rand(1, 3, HEIGHT, WIDTH, generator=torch.Generator().manual_seed(seed))


def settings_for(kind: str) -> dict[str, Any]:
    """What a call needs besides the prompt."""
    size = {"height": HEIGHT, "width": WIDTH}
    return size | {
        "img2img": {"image": picture(), "strength": 0.7},
        "inpaint": {"image": picture(), "mask_image": (picture(4)[:, :1] > 0.5).float(), "strength": 0.7},
        "controlnet": {"control_image": picture(), "controlnet_conditioning_scale": 0.8},
        "layer skipping": {
            "skip_guidance_layers": [0],
            "skip_layer_guidance_start": 0.0,
            "skip_layer_guidance_stop": 1.0,
        },
    }.get(kind, {})


@pytest.fixture
def components(make_transformer, make_vae, clip_and_t5, style) -> dict[str, Any]:
    """Everything that the stock pipelines need; inpainting takes 16 channels alone."""
    transformer = make_transformer(style, in_channels=16, out_channels=16)
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    return {"transformer": transformer, "scheduler": scheduler, "vae": make_vae(latent_channels=16), **clip_and_t5}


@pytest.fixture
def make_pipe(components) -> Callable[..., Any]:
    def make(kind: str, transformer: nn.Module | None = None) -> Any:
        extra = {} if transformer is None else {"transformer": transformer}
        if kind == "controlnet":
            base = copy.deepcopy(components["transformer"])
            mmpreproj.unpatch(base) if mmpreproj.is_patched(base) else None
            extra["controlnet"] = make_controlnet(base)
        return CLASSES[kind](**(components | extra))

    return make


def make_controlnet(base: nn.Module) -> SD3ControlNetModel:
    """Build a ControlNet of one block whose residuals matter."""
    controlnet = SD3ControlNetModel.from_transformer(base, num_layers=1, num_extra_conditioning_channels=0)
    generator = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for part in (controlnet.controlnet_blocks, controlnet.pos_embed_input):
            for parameter in part.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return controlnet.eval()


@pytest.fixture
def draw(draw) -> Callable[..., np.ndarray]:
    """Draw from a fixed global seed too: the ControlNet pipeline samples its picture's latents from there."""

    def run(pipe: Any, **settings: Any) -> np.ndarray:
        torch.manual_seed(0)
        return draw(pipe, **settings)

    return run


class ByHand:
    """Joint attention of SD3 for one grid of patches; every pair of channels is turned by a matrix of its own."""

    def __init__(self, adapter: nn.Module) -> None:
        self.gains = {stream: module.gain for stream, module in adapter.rotary_gain.items()}

    def turn(self, tokens: Tensor, stream: str) -> Tensor:
        """Turn `[B, H, N, D]`: by the place in the text, or by row and column from the centre."""
        heads, count, width = tokens.shape[1:]
        pairs = width // 2
        angles = torch.zeros(count, pairs, dtype=torch.float64)
        for token in range(count):
            for pair in range(pairs):
                if stream == "text":
                    angles[token, pair] = token * 10_000.0 ** (-2 * pair / width)
                    continue
                half = pairs // 2
                row, column = token // COLUMNS - (ROWS + 1) // 2, token % COLUMNS - (COLUMNS + 1) // 2
                place = row if pair < half else column
                angles[token, pair] = place * 10_000.0 ** (-2 * (pair % half) / (width / 2))
        gains = self.gains[stream].double() if self.gains else torch.ones(heads, dtype=torch.float64)
        angles = angles[None] * gains[:, None, None]  # [H, N, D/2]
        matrices = torch.stack([angles.cos(), -angles.sin(), angles.sin(), angles.cos()], dim=-1).unflatten(-1, (2, 2))
        turned = torch.einsum("hnpij,bhnpj->bhnpi", matrices, tokens.double().unflatten(-1, (-1, 2)))
        return turned.flatten(-2).to(tokens.dtype)

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: None = None,
    ) -> Any:
        assert attention_mask is None

        def heads(tokens: Tensor, projection: nn.Module, norm: nn.Module | None, stream: str | None) -> Tensor:
            made = projection(tokens).unflatten(-1, (attn.heads, -1)).transpose(1, 2)
            made = made if norm is None else norm(made)
            return made if stream is None else self.turn(made, stream)

        query = heads(hidden_states, attn.to_q, attn.norm_q, "image")
        key = heads(hidden_states, attn.to_k, attn.norm_k, "image")
        value = heads(hidden_states, attn.to_v, None, None)
        if encoder_hidden_states is not None:
            text = encoder_hidden_states
            query = torch.cat([query, heads(text, attn.add_q_proj, attn.norm_added_q, "text")], dim=2)
            key = torch.cat([key, heads(text, attn.add_k_proj, attn.norm_added_k, "text")], dim=2)
            value = torch.cat([value, heads(text, attn.add_v_proj, None, None)], dim=2)
        weights = (query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5).softmax(dim=-1)
        attended = (weights @ value).transpose(1, 2).flatten(2)
        count = hidden_states.shape[1]
        image = attn.to_out[0](attended[:, :count])
        if encoder_hidden_states is None:
            return image
        text = attended[:, count:]
        return image, text if attn.context_pre_only else attn.to_add_out(text)


def by_hand(patched: nn.Module, base: nn.Module, kind: str) -> nn.Module:
    """Build a transformer with the same content, whose positions are those of one grid and done by hand."""
    model = copy.deepcopy(base)
    mmpreproj.patch(model)
    missing = model.load_state_dict(patched.state_dict(), strict=False).missing_keys
    assert not missing
    if POSITIONS[kind].absolute == "remove":
        model.pos_embed.pos_embed.zero_()
    for block, ours in zip(model.transformer_blocks, patched.transformer_blocks, strict=True):
        for name in ("attn", "attn2"):
            attention = getattr(block, name, None)
            if attention is not None:
                attention.set_processor(ByHand(getattr(ours, name).preproj.adapters["default"]))
    return model


@pytest.fixture(params=POSITIONS)
def kind(request) -> str:
    """A pretrained base with learned gains, or a model from nothing with rotary positions alone."""
    return request.param


@pytest.fixture
def patch(kind, shake) -> Callable[[nn.Module], None]:
    def put(model: nn.Module) -> None:
        torch.manual_seed(0)
        mmpreproj.patch(model, PreProjConfig(positions=POSITIONS[kind]))
        shake(model, std=0.5)

    return put


@pytest.mark.parametrize("way", CLASSES)
def test_a_pipeline_draws_what_positions_by_hand_draw(components, make_pipe, draw, patch, kind, way):
    settings = settings_for(way)
    pipe, base = make_pipe(way), copy.deepcopy(components["transformer"])
    stock = draw(pipe, **settings)
    assert stock.shape[1:3] == (HEIGHT, WIDTH)
    patch(pipe.transformer)
    found = draw(pipe, **settings)
    reference = make_pipe(way, by_hand(pipe.transformer, base, kind))
    np.testing.assert_allclose(found, draw(reference, **settings), rtol=0, atol=1e-5)
    without = copy.deepcopy(base)
    mmpreproj.patch(without)
    without.load_state_dict(pipe.transformer.state_dict(), strict=False)
    assert np.abs(found - draw(make_pipe(way, without), **settings)).max() > 1e-3

    mmpreproj.set_scale(pipe.transformer, 0)
    assert np.array_equal(draw(pipe, **settings), stock)
    mmpreproj.set_scale(pipe.transformer, 1)
    with mmpreproj.disabled(pipe.transformer):
        assert np.array_equal(draw(pipe, **settings), stock)
    assert np.array_equal(draw(pipe, **settings), found)
    mmpreproj.check_intact(pipe.transformer)
    mmpreproj.unpatch(pipe.transformer)
    assert np.array_equal(draw(pipe, **settings), stock)


@pytest.mark.parametrize("way", ["text", "ours"])
@torch.no_grad()
def test_drawing_is_guided_euler_steps_with_the_patched_transformer(components, make_pipe, draw, patch, way):
    """Reference: the loop by hand, each half of the guidance by itself."""
    pipe = make_pipe(way)
    patch(pipe.transformer)
    found = draw(pipe, output_type="latent", guidance_scale=4.0, negative_prompt="tree", **settings_for(way))
    tokens, negative, pooled, negative_pooled = pipe.encode_prompt(
        "red apple", None, None, negative_prompt="tree", max_sequence_length=16
    )
    latents = torch.randn(1, 16, HEIGHT // 2, WIDTH // 2, generator=torch.Generator().manual_seed(7))
    scheduler = FlowMatchEulerDiscreteScheduler.from_config(pipe.scheduler.config)
    scheduler.set_timesteps(3)
    for time, sigma, after in zip(scheduler.timesteps, scheduler.sigmas[:-1], scheduler.sigmas[1:], strict=True):
        shown, bare = (
            pipe.transformer(
                hidden_states=latents, timestep=time[None], encoder_hidden_states=text, pooled_projections=pool
            )[0]
            for text, pool in ((tokens, pooled), (negative, negative_pooled))
        )
        latents = latents + (after - sigma) * (bare + 4.0 * (shown - bare))
    torch.testing.assert_close(torch.as_tensor(found), latents, rtol=1e-4, atol=1e-4)


# What is refused


def test_pag_is_refused_with_the_reason(components, draw, patch):
    pipe = StableDiffusion3PAGPipeline(**components)
    stock = dict(pipe.transformer.attn_processors)
    patch(pipe.transformer)
    ours, before = dict(pipe.transformer.attn_processors), draw(pipe, pag_scale=0.0)
    with pytest.raises(ValueError, match=rf"^PAGCFGJointAttnProcessor2_0 {REFUSED}"):
        draw(pipe, pag_scale=1.5)
    pipe.transformer.set_attn_processor(dict(ours))  # a call that fails leaves PAG's in place
    assert np.array_equal(draw(pipe, pag_scale=0.0), before)
    mmpreproj.unpatch(pipe.transformer)
    assert pipe.transformer.attn_processors == stock


@pytest.fixture
def image_parts() -> dict[str, Any]:
    """A tiny image encoder and what prepares its pictures."""
    config = SiglipVisionConfig(
        hidden_size=24, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=8
    )
    size = {"height": 16, "width": 16}
    return {"image_encoder": SiglipVisionModel(config).eval(), "feature_extractor": SiglipImageProcessor(size=size)}


def ip_weights(transformer: nn.Module) -> dict[str, dict[str, Tensor]]:
    """The weights of an IP-Adapter for a tiny transformer, as in a file."""
    projection = IPAdapterTimeImageProjection(
        embed_dim=24, output_dim=32, hidden_dim=64, heads=1, num_queries=3, timestep_in_dim=16
    )
    weights = {}
    for index in range(len(transformer.attn_processors)):
        processor = SD3IPAdapterJointAttnProcessor2_0(32, 32, 16, timesteps_emb_dim=64)
        weights |= {f"{index}.{key}": value for key, value in processor.state_dict().items()}
    return {"image_proj": projection.state_dict(), "ip_adapter": weights}


def test_an_ip_adapter_is_refused_with_the_reason(components, image_parts, draw, patch):
    pipe = StableDiffusion3Pipeline(**components, **image_parts)
    shown, weights = {"ip_adapter_image": SHOWN}, ip_weights(components["transformer"])
    patch(pipe.transformer)
    ours, before = dict(pipe.transformer.attn_processors), draw(pipe)
    pipe.load_ip_adapter(weights)
    with pytest.raises(ValueError, match=rf"^SD3IPAdapterJointAttnProcessor2_0 {REFUSED}"):
        draw(pipe, **shown)
    pipe.unload_ip_adapter()  # puts the stock processor back, not ours
    with pytest.raises(ValueError, match=rf"^JointAttnProcessor2_0 {REFUSED}"):
        draw(pipe)
    pipe.transformer.set_attn_processor(dict(ours))
    assert np.array_equal(draw(pipe), before)


def test_positions_are_refused_beside_an_ip_adapter(components, image_parts, draw):
    pipe = StableDiffusion3Pipeline(**components, **image_parts)
    pipe.load_ip_adapter(ip_weights(components["transformer"]))
    before = draw(pipe, ip_adapter_image=SHOWN)
    with pytest.raises(ValueError, match=r"found SD3IPAdapterJointAttnProcessor2_0. Undo what replaced it \(IP-Adap"):
        mmpreproj.patch(pipe.transformer, PreProjConfig(positions=Positions()))
    assert not mmpreproj.is_patched(pipe.transformer)
    assert np.array_equal(draw(pipe, ip_adapter_image=SHOWN), before)
