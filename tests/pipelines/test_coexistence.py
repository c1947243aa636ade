"""Stock pipelines with a patched transformer: text, img2img, inpaint, ControlNet, PAG, IP-Adapter, layer skipping."""

import copy

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
from diffusers.models.attention_processor import (
    JointAttnProcessor2_0,
    PAGCFGJointAttnProcessor2_0,
    PAGJointAttnProcessor2_0,
    SD3IPAdapterJointAttnProcessor2_0,
)
from diffusers.models.embeddings import IPAdapterTimeImageProjection
from transformers import SiglipImageProcessor, SiglipVisionConfig, SiglipVisionModel

import mmpreproj
from mmpreproj import PreProjConfig
from mmpreproj.pipelines import PreProjSD3Pipeline

KINDS = ("text", "ours", "img2img", "inpaint", "controlnet", "pag", "pag without guidance", "layer skipping")
CLASSES = {
    "text": StableDiffusion3Pipeline,
    "ours": PreProjSD3Pipeline,
    "img2img": StableDiffusion3Img2ImgPipeline,
    "inpaint": StableDiffusion3InpaintPipeline,
    "controlnet": StableDiffusion3ControlNetPipeline,
    "pag": StableDiffusion3PAGPipeline,
    "pag without guidance": StableDiffusion3PAGPipeline,
    "layer skipping": StableDiffusion3Pipeline,
}


def picture(seed: int = 3) -> torch.Tensor:
    return torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(seed))


def settings_for(kind: str) -> dict:
    """What a call needs besides the prompt."""
    return {
        "img2img": {"image": picture(), "strength": 0.5},
        "inpaint": {"image": picture(), "mask_image": (picture(4)[:, :1] > 0.5).float(), "strength": 0.7},
        "controlnet": {"control_image": picture(), "controlnet_conditioning_scale": 0.8},
        "pag": {"pag_scale": 1.5},
        "pag without guidance": {"pag_scale": 1.5, "guidance_scale": 1.0},
        "layer skipping": {
            "skip_guidance_layers": [0],
            "skip_layer_guidance_start": 0.0,
            "skip_layer_guidance_stop": 1.0,
        },
    }.get(kind, {})


@pytest.fixture
def components(make_transformer, make_vae, clip_and_t5, style):
    """Everything that the stock pipelines need; inpainting takes 16 channels alone."""
    transformer = make_transformer(style, in_channels=16, out_channels=16)
    return {
        "transformer": transformer,
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=3.0),
        "vae": make_vae(latent_channels=16),
        **clip_and_t5,
    }


def make_controlnet(transformer: torch.nn.Module) -> SD3ControlNetModel:
    """Build a ControlNet of one block whose residuals matter; the transformer is left alone."""
    controlnet = SD3ControlNetModel.from_transformer(
        copy.deepcopy(transformer), num_layers=1, num_extra_conditioning_channels=0
    )
    generator = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for part in (controlnet.controlnet_blocks, controlnet.pos_embed_input):
            for parameter in part.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return controlnet.eval()


@pytest.fixture
def draw(draw):
    """Draw from a fixed global seed too: the ControlNet pipeline samples its picture's latents from there."""

    def run(pipe, **settings):
        torch.manual_seed(0)
        return draw(pipe, **settings)

    return run


@pytest.fixture
def make_pipe(components):
    def make(kind: str):
        extra = {"controlnet": make_controlnet(components["transformer"])} if kind == "controlnet" else {}
        return CLASSES[kind](**components, **extra)

    return make


@pytest.mark.parametrize("kind", KINDS)
def test_a_pipeline_shows_the_adapter_and_gives_the_base_back_bit_for_bit(make_pipe, draw, shake, snapshot, kind):
    pipe, settings = make_pipe(kind), settings_for(kind)
    transformer = pipe.transformer
    base, before = draw(pipe, **settings), snapshot(transformer)
    mmpreproj.patch(transformer, PreProjConfig(init="zero"))
    assert np.array_equal(draw(pipe, **settings), base)
    shake(transformer)
    trained = draw(pipe, **settings)
    assert np.abs(trained - base).max() > 1e-3
    mmpreproj.set_scale(transformer, 0)
    assert np.array_equal(draw(pipe, **settings), base)
    mmpreproj.set_scale(transformer, 1)
    with mmpreproj.disabled(transformer):
        assert np.array_equal(draw(pipe, **settings), base)
    assert np.array_equal(draw(pipe, **settings), trained)
    mmpreproj.check_intact(transformer)
    mmpreproj.unpatch(transformer)
    before.check(transformer)
    assert np.array_equal(draw(pipe, **settings), base)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if settings_for(kind)])
def test_what_the_pipeline_adds_acts_on_the_patched_transformer_too(make_pipe, draw, shake, kind):
    off = {
        "img2img": {"image": picture(9)},
        "inpaint": {"mask_image": torch.ones(1, 1, 16, 16)},
        "controlnet": {"controlnet_conditioning_scale": 0.0},
        "layer skipping": {"skip_guidance_layers": None},
    }.get(kind, {"pag_scale": 0.0})
    pipe, settings = make_pipe(kind), settings_for(kind)
    mmpreproj.patch(pipe.transformer)
    shake(pipe.transformer)
    assert np.abs(draw(pipe, **settings) - draw(pipe, **(settings | off))).max() > 1e-4


@pytest.mark.parametrize("kind", ["img2img", "inpaint", "controlnet", "pag"])
def test_pipelines_hand_the_patched_transformer_on(components, make_pipe, draw, shake, kind):
    ours = PreProjSD3Pipeline(**components)
    mmpreproj.patch(ours.transformer)
    shake(ours.transformer)
    expected, other = draw(ours), make_pipe(kind)
    extra = {"controlnet": other.controlnet} if kind == "controlnet" else {}
    made = CLASSES[kind].from_pipe(ours, **extra)
    assert made.transformer is ours.transformer
    assert np.array_equal(draw(made, **settings_for(kind)), draw(other, **settings_for(kind)))
    assert np.array_equal(draw(PreProjSD3Pipeline.from_pipe(made)), expected)
    assert np.array_equal(draw(StableDiffusion3Pipeline.from_pipe(made)), expected)


def test_layer_skipping_skips_the_adapter_of_the_layer_and_no_other(components, draw, shake):
    """The skipped pass of a patched model is that of one patched on the other block alone."""
    pipe = StableDiffusion3Pipeline(**components)
    base = copy.deepcopy(pipe.transformer)
    inputs = inputs_for(base)
    mmpreproj.patch(pipe.transformer)
    shake(pipe.transformer)
    without = copy.deepcopy(pipe.transformer)
    mmpreproj.set_scale(without, {0: 0.0})
    with torch.no_grad():
        found = pipe.transformer(**inputs, skip_layers=[0])[0]
        assert torch.equal(found, without(**inputs, skip_layers=[0])[0])
        assert not torch.equal(found, base(**inputs, skip_layers=[0])[0])
        assert torch.equal(pipe.transformer(**inputs, skip_layers=[0, 1])[0], base(**inputs, skip_layers=[0, 1])[0])


def inputs_for(transformer) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "hidden_states": torch.randn(2, transformer.config.in_channels, 8, 8, generator=generator),
        "encoder_hidden_states": torch.randn(2, 5, 24, generator=generator),
        "pooled_projections": torch.randn(2, 20, generator=generator),
        "timestep": torch.tensor([100.0, 700.0]),
    }


# --- PAG -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("processor", [PAGCFGJointAttnProcessor2_0(), PAGJointAttnProcessor2_0()])
@pytest.mark.parametrize("block", [0, 1])
def test_the_perturbed_branch_reads_the_features_and_keeps_the_skip(make_transformer, shake, processor, block):
    """PAG perturbs the attention map alone; what goes around attention is the same in every branch.

    Reference: the stock processor on an unpatched attention that is given `x_tilde`, plus `W_skip · x_tilde`.
    """
    model = make_transformer()
    stock = copy.deepcopy(model).transformer_blocks[block].attn
    mmpreproj.patch(model)
    shake(model)
    attention = model.transformer_blocks[block].attn
    attention.processor = stock.processor = processor
    parts = 3 if isinstance(processor, PAGCFGJointAttnProcessor2_0) else 2
    image, text = torch.randn(parts, 6, 32), torch.randn(parts, 4, 32)
    adapter = attention.preproj.adapters["default"]
    with torch.no_grad():
        tilde = [tokens + adapter.pre_projection["shared"](tokens) for tokens in (image, text)]
        skip = [adapter.content_skip["shared"](tokens) for tokens in tilde]
        expected, found = stock(*tilde), attention(image, encoder_hidden_states=text)
    assert torch.equal(found[0], expected[0] + skip[0])
    assert torch.equal(found[1], expected[1] + (skip[1] if block == 0 else 0))


def test_pag_leaves_processors_and_adapter_as_they_were(make_pipe, draw, shake):
    pipe = make_pipe("pag")
    mmpreproj.patch(pipe.transformer)
    shake(pipe.transformer)
    processors, before = dict(pipe.transformer.attn_processors), draw(pipe, pag_scale=0.0)
    draw(pipe, pag_scale=2.0)
    assert pipe.transformer.attn_processors == processors
    mmpreproj.check_intact(pipe.transformer)
    assert np.array_equal(draw(pipe, pag_scale=0.0), before)


def test_pag_on_dual_attention_fails_as_it_does_unpatched(components, draw, style):
    """Stock PAG cannot run an attention without text; an adapter neither mends nor hides that."""
    pipe = StableDiffusion3PAGPipeline(**components, pag_applied_layers="blocks.0")
    processors = dict(pipe.transformer.attn_processors)
    outcomes = []
    for patched in (False, True):
        if patched:
            mmpreproj.patch(pipe.transformer, PreProjConfig(init="zero"))
        try:
            outcomes.append(draw(pipe, pag_scale=1.5))
        except AttributeError as error:
            outcomes.append(str(error))
            pipe.transformer.set_attn_processor(dict(processors))  # a call that fails leaves PAG's in place
    assert isinstance(outcomes[0], str) == (style == "sd35")
    assert np.array_equal(*outcomes)


# --- IP-Adapter ------------------------------------------------------------------------------------------------------


@pytest.fixture
def image_parts():
    """A tiny image encoder and what prepares its pictures."""
    config = SiglipVisionConfig(
        hidden_size=24, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=8
    )
    size = {"height": 16, "width": 16}
    return {"image_encoder": SiglipVisionModel(config).eval(), "feature_extractor": SiglipImageProcessor(size=size)}


def ip_weights(transformer: torch.nn.Module) -> dict[str, dict[str, torch.Tensor]]:
    """The weights of an IP-Adapter for a tiny transformer, as in a file."""
    projection = IPAdapterTimeImageProjection(
        embed_dim=24, output_dim=32, hidden_dim=64, heads=1, num_queries=3, timestep_in_dim=16
    )
    weights = {}
    for index in range(len(transformer.attn_processors)):
        processor = SD3IPAdapterJointAttnProcessor2_0(32, 32, 16, timesteps_emb_dim=64)
        weights |= {f"{index}.{key}": value for key, value in processor.state_dict().items()}
    return {"image_proj": projection.state_dict(), "ip_adapter": weights}


@pytest.mark.parametrize("cls", [StableDiffusion3Pipeline, PreProjSD3Pipeline])
@pytest.mark.parametrize("ip_first", [True, False])
def test_ip_adapter_and_ours_come_and_go_in_any_order(components, image_parts, draw, shake, cls, ip_first):
    pipe = cls(**components, **image_parts)
    transformer, weights = pipe.transformer, ip_weights(components["transformer"])
    shown = {"ip_adapter_image": picture(5)}

    def draw_with(*, ip: bool, ours: bool):
        pipe.set_ip_adapter_scale(1.0 if ip else 0.0)
        mmpreproj.set_scale(transformer, float(ours))
        return draw(pipe, **(shown if ip else {}))

    base = draw(pipe)
    steps = [lambda: pipe.load_ip_adapter(weights), lambda: mmpreproj.patch(transformer)]
    for step in steps if ip_first else reversed(steps):
        step()
    shake(transformer)
    mmpreproj.check_intact(transformer)
    pictures = [draw_with(ip=ip, ours=ours) for ip in (False, True) for ours in (False, True)]
    assert np.array_equal(pictures[0], base)
    for index, first in enumerate(pictures):
        for second in pictures[index + 1 :]:
            assert np.abs(first - second).max() > 1e-4
    _, ours, ip, both = pictures
    with mmpreproj.disabled(transformer):
        assert np.array_equal(draw(pipe, **shown), ip)
    assert np.array_equal(draw(pipe, **shown), both)

    # Either one goes; the other is what it was alone.
    mmpreproj.unpatch(transformer)
    assert np.array_equal(draw(pipe, **shown), ip)
    mmpreproj.patch(transformer)
    shake(transformer)
    assert np.array_equal(draw(pipe, **shown), both)
    pipe.unload_ip_adapter()
    assert {type(processor) for processor in transformer.attn_processors.values()} == {JointAttnProcessor2_0}
    assert np.array_equal(draw(pipe), ours)
    mmpreproj.unpatch(transformer)
    assert np.array_equal(draw(pipe), base)


def test_our_file_holds_nothing_of_an_ip_adapter(components, image_parts, tmp_path):
    pipe = PreProjSD3Pipeline(**components, **image_parts)
    report = mmpreproj.patch(pipe.transformer)
    alone = [(name, parameter.shape) for name, parameter in mmpreproj.named_parameters(pipe.transformer)]
    pipe.load_ip_adapter(ip_weights(pipe.transformer))
    assert [(name, value.shape) for name, value in mmpreproj.named_parameters(pipe.transformer)] == alone
    mmpreproj.save(pipe.transformer, tmp_path / "adapter", card=False)
    fresh = copy.deepcopy(pipe.transformer)
    mmpreproj.unpatch(fresh)
    assert mmpreproj.load(fresh, tmp_path / "adapter").parameters == report.parameters
