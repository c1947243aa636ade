"""The stock pipeline of each row of the table of multimodal transformers, of tiny random components.

The transformer is the one of `family_models`, with the channels that its VAE has; the VAE is of the class that the
pipeline wants, and the scheduler one that counts time and noise as the family does. Texts are embeddings given to the
call, wherever the pipeline takes them; else a tiny text encoder of the family's class makes them. One prompt and two
steps; without guidance unless asked for, so that the transformer is called twice.
"""

import importlib
import inspect
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import diffusers
import torch
import transformers
from diffusers.guiders import ClassifierFreeGuidance
from family_models import TEXT, TEXT_WIDTH, flat, make_model
from PIL import Image
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from torch import Tensor, nn

STEPS = 2
GUIDANCE = 3.0
LATENT = 4  # channels of most VAEs here
SIZE = {"height": 16, "width": 16}

# VAEs


def _blocks(kind: str = "", widths: tuple[int, ...] = (8, 16), groups: int = 4) -> dict[str, Any]:
    down, up = (f"{kind}DownBlock3D", f"{kind}UpBlock3D") if kind else ("DownEncoderBlock2D", "UpDecoderBlock2D")
    return {
        "down_block_types": (down,) * len(widths),
        "up_block_types": (up,) * len(widths),
        "block_out_channels": widths,
        "norm_num_groups": groups,
        "latent_channels": LATENT,
        "layers_per_block": 1,
    }


_NORMED = {"latents_mean": [0.1, -0.2, 0.3, 0.0], "latents_std": [1.5, 0.7, 1.1, 0.9]}
_QWEN = _NORMED | {"base_dim": 4, "z_dim": LATENT, "dim_mult": [1, 1], "num_res_blocks": 1}


def _wan(patch: int | None = None) -> dict[str, Any]:
    channels = 3 * (patch or 1) ** 2
    return _QWEN | {
        "temperal_downsample": [True],
        "patch_size": patch,
        "in_channels": channels,
        "out_channels": channels,
        "scale_factor_temporal": 2,
        "scale_factor_spatial": 2 * (patch or 1),
    }


_KL = _blocks() | {"scaling_factor": 1.5, "shift_factor": 0.06}
_HUNYUAN = {
    "in_channels": 3,
    "out_channels": 3,
    "latent_channels": LATENT,
    "block_out_channels": (32, 32),
    "layers_per_block": 1,
    "spatial_compression_ratio": 2,
    "scaling_factor": 0.75,
}
VAES: dict[str, tuple[str, dict[str, Any]]] = {
    "kl": ("AutoencoderKL", _KL),
    "kl of 16 channels": ("AutoencoderKL", _KL | {"latent_channels": 16}),
    "kl, normed": ("AutoencoderKL", _blocks() | _NORMED),
    "flux2": ("AutoencoderKLFlux2", _blocks()),
    "qwen": ("AutoencoderKLQwenImage", _QWEN | {"temperal_downsample": [False]}),
    "wan": ("AutoencoderKLWan", _wan()),
    "wan of 16 pixels a cell": ("AutoencoderKLWan", _wan(patch=8)),  # as BriaFibo's pipeline takes for granted
    # JoyImage's pipelines bring pictures to 1024 pixels a side; so they are few cells all the same
    "wan of 64 pixels a cell": ("AutoencoderKLWan", _wan(patch=32)),
    "hunyuan image": ("AutoencoderKLHunyuanImage", _HUNYUAN | {"sample_size": 16}),
    "hunyuan video": (
        "AutoencoderKLHunyuanVideo",
        _blocks("HunyuanVideo", (8, 8, 8)) | {"spatial_compression_ratio": 4, "temporal_compression_ratio": 4},
    ),
    "hunyuan video 1.5": ("AutoencoderKLHunyuanVideo15", _HUNYUAN | {"temporal_compression_ratio": 2}),
    "cogvideo": ("AutoencoderKLCogVideoX", _blocks("CogVideoX", (8, 8), 2) | {"temporal_compression_ratio": 2}),
    "magvit": (
        "AutoencoderKLMagvit",
        _blocks("Spatial", (8, 8), 2)
        | {
            "down_block_types": ("SpatialDownBlock3D", "SpatialTemporalDownBlock3D"),
            "up_block_types": ("SpatialUpBlock3D", "SpatialTemporalUpBlock3D"),
        },
    ),
    "mochi": (
        "AutoencoderKLMochi",
        {
            "encoder_block_out_channels": (32,) * 4,
            "decoder_block_out_channels": (32,) * 4,
            "layers_per_block": (1,) * 5,
        },
    ),
}

# Schedulers

_FLOW = "FlowMatchEulerDiscreteScheduler"
_DDIM = {
    "prediction_type": "v_prediction",
    "rescale_betas_zero_snr": True,
    "timestep_spacing": "trailing",
    "clip_sample": False,
}
SCHEDULERS: dict[str, tuple[str, dict[str, Any]]] = {
    "flow": (_FLOW, {"shift": 3.0}),
    "flow, shifted by size": (_FLOW, {"use_dynamic_shifting": True}),
    "flow, shifted by size, linear": (
        _FLOW,
        {"use_dynamic_shifting": True, "base_shift": 0.25, "max_shift": 0.75, "time_shift_type": "linear"},
    ),
    "flow, inverted": (_FLOW, {"invert_sigmas": True}),
    "v, ddim": ("CogVideoXDDIMScheduler", _DDIM),
    "v, dpm": ("CogVideoXDPMScheduler", _DDIM),
}

# What pipelines insist on


def _make_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Build a tokenizer that knows small letters and makes a token of each character."""
    words = ["[PAD]", "[UNK]", *string.ascii_lowercase]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")


class TextProcessor:
    """Stands in for Qwen3-VL's processor, whose vocabulary is in no package: it leaves the pictures out.

    The encoder reads the text with its placeholders; the transformer sees the pictures all the same, by the VAE.
    """

    def __init__(self) -> None:
        self.tokenizer = _make_tokenizer()

    def __call__(self, text: list[str], images: Any = None, **settings: Any) -> transformers.BatchEncoding:
        return self.tokenizer(text, **settings)


_ENCODER = {
    "vocab_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
_ROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 2, 2], "rope_theta": 1e4}}
_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "num_heads": 2,
    "intermediate_size": 16,
    "out_hidden_size": TEXT_WIDTH,
    "patch_size": 2,
}


def _smollm3() -> dict[str, Any]:
    config = transformers.SmolLM3Config(hidden_size=TEXT_WIDTH // 2, **_ENCODER)
    return {"text_encoder": transformers.SmolLM3ForCausalLM(config).eval(), "tokenizer": _make_tokenizer()}


def _qwen2_vl() -> dict[str, Any]:
    config = transformers.Qwen2_5_VLConfig(
        text_config=_ENCODER | _ROPE | {"hidden_size": TEXT_WIDTH}, vision_config=_VISION
    )
    encoder = transformers.Qwen2_5_VLForConditionalGeneration(config).eval()
    return {"text_encoder": encoder, "tokenizer": _make_tokenizer()}


def _qwen3_vl() -> dict[str, Any]:
    config = transformers.Qwen3VLConfig(
        text_config=_ENCODER | _ROPE | {"hidden_size": TEXT_WIDTH, "head_dim": 12},
        vision_config=_VISION | {"deepstack_visual_indexes": []},
    )
    encoder = transformers.Qwen3VLForConditionalGeneration(config).eval()
    return {"text_encoder": encoder, "processor": TextProcessor()}


def _siglip() -> dict[str, Any]:
    config = transformers.SiglipVisionConfig(
        hidden_size=12, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=8
    )
    return {
        "image_encoder": transformers.SiglipVisionModel(config).eval(),
        "feature_extractor": transformers.SiglipImageProcessor(size={"height": 16, "width": 16}),
    }


def _guider(scale: float = 1.0) -> dict[str, Any]:
    return {"guider": ClassifierFreeGuidance(guidance_scale=scale)}


# Rows


class _Draw:
    """Random tensors for one prompt, the same for the same order of calls."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(1, *shape, generator=self.generator)

    def picture(self) -> Tensor:
        return torch.rand(1, 3, 16, 16, generator=self.generator)


@dataclass(frozen=True)
class Recipe:
    """How to build and call a row's pipeline.

    Attributes:
        pipeline: name of the class, with its module where diffusers does not export it.
        vae: of `VAES`.
        call: makes the arguments that only this pipeline takes.
        scheduler: of `SCHEDULERS`.
        model: overrides of the tiny transformer's config, and of the ControlNet's.
        transformer: the row of the transformer where the row's own model is a ControlNet.
        further: makes components that the pipeline insists on.
        attributes: set on the built pipeline.
        guidance: the argument that sets classifier-free guidance, `"guider"` for a component, None for none.
        passes: how many prompts a step with guidance shows the model, one after the other or in a batch.
        guided: further arguments of a call with guidance.
    """

    pipeline: str
    vae: str
    call: Callable[[_Draw], dict[str, Any]]
    scheduler: str = "flow"
    model: dict[str, Any] = field(default_factory=dict)
    transformer: str | None = None
    further: Callable[[], dict[str, Any]] = dict
    attributes: dict[str, Any] = field(default_factory=dict)
    guidance: str | None = "guidance_scale"
    passes: int = 2
    guided: dict[str, Any] = field(default_factory=dict)


def _embeds(draw: _Draw, *, mask: str | None = None, pooled: bool = False, dtype: torch.dtype = torch.long) -> dict:
    """A text's embeddings, of which a mask leaves out the last."""
    call = {"prompt_embeds": draw(TEXT, TEXT_WIDTH)}
    if pooled:
        call["pooled_prompt_embeds"] = draw(20)
    if mask is not None:
        call[mask] = (torch.arange(TEXT) < TEXT - 1).to(dtype)[None]
    return call


def _two_embeds(draw: _Draw) -> dict[str, Any]:
    mask = torch.ones(1, 3, dtype=torch.long)
    second = {"prompt_embeds_2": draw(3, 12), "prompt_embeds_mask_2": mask}
    return _embeds(draw, mask="prompt_embeds_mask") | second


_TEXT_ARGUMENTS = ("prompt_embeds", "pooled_prompt_embeds", "prompt_attention_mask")
_PACKED = {"in_channels": 4 * LATENT}
_CONDITIONED = {"in_channels": 2 * LATENT + 1}
_SIGLIP_PICTURE = Image.new("RGB", (16, 16), (200, 100, 50))
_PICTURE = Image.new("RGB", (64, 64), (200, 100, 50))

RECIPES: dict[str, Recipe] = {
    "SD3Transformer2DModel": Recipe(
        "StableDiffusion3Pipeline",
        "kl",
        lambda draw: _embeds(draw, pooled=True) | SIZE,
    ),
    "SD3ControlNetModel": Recipe(
        "StableDiffusion3ControlNetPipeline",
        "kl",
        lambda draw: _embeds(draw, pooled=True) | SIZE | {"control_image": draw.picture()},
        transformer="SD3Transformer2DModel",
    ),
    "AuraFlowTransformer2DModel": Recipe(
        "AuraFlowPipeline",
        "kl",
        lambda draw: _embeds(draw, mask="prompt_attention_mask") | SIZE,
    ),
    "FluxTransformer2DModel": Recipe(
        "FluxPipeline",
        "kl",
        lambda draw: _embeds(draw, pooled=True) | SIZE,
        scheduler="flow, shifted by size",
        model=_PACKED,
        guidance="true_cfg_scale",
    ),
    "FluxControlNetModel": Recipe(
        "FluxControlNetPipeline",
        "kl",
        lambda draw: _embeds(draw, pooled=True) | SIZE | {"control_image": draw.picture()},
        scheduler="flow, shifted by size",
        model=_PACKED,
        transformer="FluxTransformer2DModel",
        guidance="true_cfg_scale",
        passes=1,  # the ControlNet is not asked again for the negative prompt
    ),
    "ChromaTransformer2DModel": Recipe(
        "ChromaPipeline",
        "kl",
        lambda draw: _embeds(draw, mask="prompt_attention_mask", dtype=torch.bool) | SIZE,
        model=_PACKED,
    ),
    "BriaTransformer2DModel": Recipe(
        "BriaPipeline",
        "kl",
        lambda draw: _embeds(draw) | SIZE,
        model=_PACKED,
    ),
    "BriaFiboTransformer2DModel": Recipe(
        "BriaFiboPipeline",
        "wan of 16 pixels a cell",
        lambda draw: {"prompt": "a red apple", "height": 64, "width": 64},
        scheduler="flow, shifted by size",
        further=_smollm3,
        guided={"negative_prompt": "a bus"},
    ),
    "LongCatImageTransformer2DModel": Recipe(
        "LongCatImagePipeline",
        "kl of 16 channels",  # the pipeline's own number
        lambda draw: {"prompt": "a red apple", "enable_prompt_rewrite": False} | SIZE,
        scheduler="flow, shifted by size",
        model={"in_channels": 64},
        further=_qwen2_vl,
        guided={"negative_prompt": "a bus"},
    ),
    "OvisImageTransformer2DModel": Recipe(
        "OvisImagePipeline",
        "kl",
        lambda draw: _embeds(draw) | SIZE,
        scheduler="flow, shifted by size",
        model=_PACKED | {"out_channels": 4 * LATENT},
        guided={"negative_prompt": None},
    ),
    "Flux2Transformer2DModel": Recipe(
        "Flux2Pipeline",
        "flux2",
        lambda draw: _embeds(draw) | SIZE,
        scheduler="flow, shifted by size",
        model=_PACKED,
        guidance=None,
    ),
    "QwenImageTransformer2DModel": Recipe(
        "QwenImagePipeline",
        "qwen",
        lambda draw: _embeds(draw, mask="prompt_embeds_mask") | SIZE,
        scheduler="flow, shifted by size",
        guidance="true_cfg_scale",
    ),
    "QwenImageControlNetModel": Recipe(
        "QwenImageControlNetPipeline",
        "qwen",
        lambda draw: _embeds(draw, mask="prompt_embeds_mask") | SIZE | {"control_image": draw.picture()},
        scheduler="flow, shifted by size",
        transformer="QwenImageTransformer2DModel",
        guidance="true_cfg_scale",
        passes=1,  # the ControlNet is not asked again for the negative prompt
    ),
    "HiDreamImageTransformer2DModel": Recipe(
        "HiDreamImagePipeline",
        "kl",
        lambda draw: (
            {
                "prompt_embeds_t5": draw(TEXT, TEXT_WIDTH),
                "prompt_embeds_llama3": torch.stack([draw(TEXT, 12) for _ in range(3)]),
                "pooled_prompt_embeds": draw(20),
            }
            | SIZE
        ),
        attributes={"default_sample_size": 8},  # to this area every size is brought
    ),
    "HunyuanImageTransformer2DModel": Recipe(
        "HunyuanImagePipeline",
        "hunyuan image",
        lambda draw: _two_embeds(draw) | SIZE,
        model={"text_embed_2_dim": 12},
        guidance="guider",
    ),
    "CogView3PlusTransformer2DModel": Recipe(
        "CogView3PlusPipeline",
        "kl",
        lambda draw: _embeds(draw) | SIZE,
        scheduler="v, ddim",
    ),
    "CogView4Transformer2DModel": Recipe(
        "CogView4Pipeline",
        "kl",
        lambda draw: _embeds(draw) | SIZE,
        scheduler="flow, shifted by size, linear",
    ),
    "GlmImageTransformer2DModel": Recipe(
        "GlmImagePipeline",
        "kl, normed",
        lambda draw: _embeds(draw) | {"prior_token_ids": torch.randint(8, (1, 16), generator=draw.generator)} | SIZE,
        scheduler="flow, shifted by size, linear",
    ),
    "HunyuanVideoTransformer3DModel": Recipe(
        "HunyuanVideoPipeline",
        "hunyuan video",
        lambda draw: _embeds(draw, mask="prompt_attention_mask", pooled=True) | SIZE | {"num_frames": 5},
        guidance="true_cfg_scale",
    ),
    "HunyuanVideoFramepackTransformer3DModel": Recipe(
        "HunyuanVideoFramepackPipeline",
        "hunyuan video",
        lambda draw: (
            _embeds(draw, mask="prompt_attention_mask", pooled=True)
            | SIZE
            | {"image": _SIGLIP_PICTURE, "num_frames": 5, "latent_window_size": 2}
        ),
        scheduler="flow, shifted by size",
        further=_siglip,
        guidance="true_cfg_scale",
    ),
    "HunyuanVideo15Transformer3DModel": Recipe(
        "HunyuanVideo15Pipeline",
        "hunyuan video 1.5",
        lambda draw: _two_embeds(draw) | SIZE | {"num_frames": 3},
        model=_CONDITIONED,
        further=_guider,
        guidance="guider",
    ),
    "MochiTransformer3DModel": Recipe(
        "MochiPipeline",
        "mochi",
        lambda draw: (
            _embeds(draw, mask="prompt_attention_mask", dtype=torch.bool)
            | {"height": 32, "width": 32, "num_frames": 7}
        ),
        scheduler="flow, inverted",
        model={"in_channels": 12},
    ),
    "MotifVideoTransformer3DModel": Recipe(
        "MotifVideoPipeline",
        "wan",
        lambda draw: _embeds(draw, mask="prompt_attention_mask") | SIZE | {"num_frames": 3},
        scheduler="flow, shifted by size",
        model=_CONDITIONED,
        further=_guider,
        guidance="guider",
    ),
    "CogVideoXTransformer3DModel": Recipe(
        "CogVideoXPipeline",
        "cogvideo",
        lambda draw: _embeds(draw) | SIZE | {"num_frames": 5},
        scheduler="v, ddim",
    ),
    "ConsisIDTransformer3DModel": Recipe(
        # OpenCV, without which diffusers does not export it, is for key points of faces alone
        "diffusers.pipelines.consisid.pipeline_consisid.ConsisIDPipeline",
        "cogvideo",
        lambda draw: _embeds(draw) | SIZE | {"image": draw.picture(), "num_frames": 5},
        scheduler="v, dpm",
        model={"in_channels": 2 * LATENT},
    ),
    "JoyImageEditTransformer3DModel": Recipe(
        "JoyImageEditPipeline",
        "wan of 64 pixels a cell",
        lambda draw: _embeds(draw, mask="prompt_embeds_mask") | {"image": _PICTURE},
    ),
    "JoyImageEditPlusTransformer3DModel": Recipe(
        "JoyImageEditPlusPipeline",
        "wan of 64 pixels a cell",
        lambda draw: {"images": [[_PICTURE]], "prompt": "a red apple", "height": 256, "width": 256},
        further=_qwen3_vl,
        guided={"negative_prompt": "a bus"},
    ),
    "EasyAnimateTransformer3DModel": Recipe(
        "EasyAnimatePipeline",
        "magvit",
        lambda draw: _embeds(draw, mask="prompt_attention_mask") | SIZE | {"num_frames": 2},
    ),
}
NO_PIPELINE: dict[str, str] = {}
"""Rows without a pipeline here, and why."""


class FamilyPipeline(NamedTuple):
    """A pipeline, what to call it with, and the name of the component that is patched."""

    pipeline: diffusers.DiffusionPipeline
    call: dict[str, Any]
    component: str

    @property
    def model(self) -> nn.Module:
        """The component that is patched."""
        return getattr(self.pipeline, self.component)


def make_pipeline(
    row: str, seed: int = 0, *, guided: bool = False, model: Mapping[str, Any] = MappingProxyType({})
) -> FamilyPipeline:
    """Build a row's stock pipeline and the arguments of a call, the same for the same seed.

    Args:
        row: model class.
        seed: of weights, embeddings and noise.
        guided: whether with classifier-free guidance.
        model: further overrides of the tiny model's config.

    Raises:
        KeyError: if the row has no recipe.
        ValueError: if it takes no guidance that is asked for.
    """
    recipe = RECIPES[row]
    if guided and recipe.guidance is None:
        raise ValueError(f"{recipe.pipeline} takes no classifier-free guidance; call it with guided=False")
    pipeline = _build(recipe, _components(row, recipe, seed, model))
    if guided and recipe.guidance == "guider":
        pipeline.register_modules(**_guider(GUIDANCE))
    return FamilyPipeline(pipeline, _make_call(recipe, seed, guided=guided), _patched_component(recipe))


def _patched_component(recipe: Recipe) -> str:
    return "transformer" if recipe.transformer is None else "controlnet"


def _components(row: str, recipe: Recipe, seed: int, model: Mapping[str, Any]) -> dict[str, Any]:
    vae, config = VAES[recipe.vae]
    scheduler, settings = SCHEDULERS[recipe.scheduler]
    rows = {"transformer": recipe.transformer or row, _patched_component(recipe): row}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return {
            **{
                component: make_model(one, seed=seed, **(recipe.model | dict(model)))
                for component, one in rows.items()
            },
            "vae": getattr(diffusers, vae)(**config).eval(),
            "scheduler": getattr(diffusers, scheduler)(**settings),
            **recipe.further(),
        }


def _build(recipe: Recipe, components: dict[str, Any]) -> diffusers.DiffusionPipeline:
    module, _, name = recipe.pipeline.rpartition(".")
    made = getattr(importlib.import_module(module or "diffusers"), name)
    _, *wanted = inspect.signature(made.__init__).parameters.values()
    absent = {one.name: None for one in wanted if one.default is one.empty}
    pipeline = made(**(absent | components))
    for attribute, value in recipe.attributes.items():
        setattr(pipeline, attribute, value)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _make_call(recipe: Recipe, seed: int, *, guided: bool) -> dict[str, Any]:
    call = {
        "num_inference_steps": STEPS,
        "output_type": "latent",
        "generator": torch.Generator().manual_seed(seed),
        **recipe.call(_Draw(seed)),
    }
    if recipe.guidance not in (None, "guider"):
        call[recipe.guidance] = GUIDANCE if guided else 1.0
    if guided:
        negative = recipe.call(_Draw(seed + 1))
        call |= {f"negative_{key}": value for key, value in negative.items() if key.startswith(_TEXT_ARGUMENTS)}
    return call | (recipe.guided if guided else {})


def draw(made: FamilyPipeline, *, seed: int = 0, **changes: Any) -> Tensor:
    """Run a pipeline from a fixed seed, some arguments changed, and return its latents, pictures or videos.

    Some pipelines draw a VAE's latents from the global state, which is seeded too and left as it was.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        output = made.pipeline(**(made.call | {"generator": generator, "return_dict": False} | changes))[0]
    return flat(output) if isinstance(output, list) else torch.as_tensor(output)
