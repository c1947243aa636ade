"""A tiny random model and a call for each row of the table of multimodal transformers.

Image and text have different numbers of tokens, so that a stream's output in the place of another's is an error.
"""

from collections.abc import Callable
from typing import Any

import diffusers
import torch
from torch import Tensor, nn

import mmpreproj
from mmpreproj import PreProjConfig
from mmpreproj.patching.families import FAMILIES, Family
from mmpreproj.patching.families.multimodal import MULTIMODAL

WIDTH, HEADS, HEAD_WIDTH = 32, 2, 16
TEXT, TEXT_WIDTH = 5, 24
SIDE = 4  # of a square of image tokens
BATCH = 2
ROWS = tuple(family.model_class for family in MULTIMODAL)
"""The model class of each row. A case is one of these, or one of `VARIANTS`: a class and what is set otherwise."""
TIME = (0.1, 0.7)
APART = ("MochiTransformer3DModel",)
"""Rows whose streams have different widths, and so weights of their own."""

_SIZES: dict[str, Any] = {"attention_head_dim": HEAD_WIDTH, "num_attention_heads": HEADS, "num_layers": 2}
_SINGLE = {"num_single_layers": 1}
_FLUX = _SIZES | _SINGLE | {"in_channels": 4, "joint_attention_dim": TEXT_WIDTH, "axes_dims_rope": (4, 4, 8)}
_SD3 = _SIZES | {
    "sample_size": 8,
    "patch_size": 2,
    "in_channels": 4,
    "out_channels": 4,
    "joint_attention_dim": TEXT_WIDTH,
    "caption_projection_dim": WIDTH,
    "pooled_projection_dim": 20,
    "pos_embed_max_size": 8,
}
_QWEN = _SIZES | {
    "patch_size": 2,
    "in_channels": 16,
    "out_channels": 4,
    "joint_attention_dim": TEXT_WIDTH,
    "axes_dims_rope": (4, 4, 8),
}
_COG = _SIZES | {
    "patch_size": 2,
    "in_channels": 4,
    "out_channels": 4,
    "text_embed_dim": TEXT_WIDTH,
    "time_embed_dim": 12,
    "condition_dim": 8,
}
_COG_VIDEO = _SIZES | {
    "in_channels": 4,
    "out_channels": 4,
    "time_embed_dim": 12,
    "text_embed_dim": TEXT_WIDTH,
    "sample_width": 8,
    "sample_height": 8,
    "sample_frames": 5,
    "patch_size": 2,
    "max_text_seq_length": TEXT,
}
_HUNYUAN = _SIZES | {
    "in_channels": 4,
    "out_channels": 4,
    "num_refiner_layers": 1,
    "text_embed_dim": TEXT_WIDTH,
    "patch_size": 1,
    "patch_size_t": 1,
    "rope_axes_dim": (4, 4, 8),
}
_JOY = {
    "in_channels": 4,
    "hidden_size": WIDTH,
    "num_attention_heads": HEADS,
    "text_dim": TEXT_WIDTH,
    "num_layers": 2,
    "rope_dim_list": [4, 4, 8],
}
_HUNYUAN_1 = _HUNYUAN | _SINGLE | {"pooled_projection_dim": 20}

CONFIGS: dict[str, dict[str, Any]] = {
    "SD3Transformer2DModel": _SD3 | {"dual_attention_layers": (0,), "qk_norm": "rms_norm"},
    "SD3ControlNetModel": _SD3 | {"dual_attention_layers": (0,), "qk_norm": "rms_norm"},
    "AuraFlowTransformer2DModel": {
        "sample_size": 8,
        "patch_size": 2,
        "in_channels": 4,
        "num_mmdit_layers": 2,
        "num_single_dit_layers": 1,
        "attention_head_dim": HEAD_WIDTH,
        "num_attention_heads": HEADS,
        "joint_attention_dim": TEXT_WIDTH,
        "caption_projection_dim": WIDTH,
        "pos_embed_max_size": 16,
    },
    "FluxTransformer2DModel": _FLUX | {"pooled_projection_dim": 20},
    "FluxControlNetModel": _FLUX | {"pooled_projection_dim": 20},
    "ChromaTransformer2DModel": _FLUX
    | {"approximator_num_channels": 8, "approximator_hidden_dim": 16, "approximator_layers": 1},
    "BriaTransformer2DModel": _FLUX,
    "BriaFiboTransformer2DModel": _FLUX | {"text_encoder_dim": 12},
    "LongCatImageTransformer2DModel": _FLUX | {"pooled_projection_dim": 20},
    "OvisImageTransformer2DModel": _FLUX | {"out_channels": 4},
    "Flux2Transformer2DModel": _FLUX | {"timestep_guidance_channels": 16, "axes_dims_rope": (4, 4, 4, 4)},
    "QwenImageTransformer2DModel": _QWEN,
    "QwenImageControlNetModel": _QWEN,
    "HiDreamImageTransformer2DModel": _SIZES
    | _SINGLE
    | {
        "patch_size": 2,
        "in_channels": 4,
        "out_channels": 4,
        "caption_channels": [TEXT_WIDTH, 12],
        "text_emb_dim": 20,
        "num_routed_experts": 2,
        "num_activated_experts": 1,
        "axes_dims_rope": (4, 4, 8),
        "max_resolution": (8, 8),
        "llama_layers": [0, 1, 2],
    },
    "HunyuanImageTransformer2DModel": _SIZES
    | _SINGLE
    | {
        "in_channels": 4,
        "out_channels": 4,
        "num_refiner_layers": 1,
        "text_embed_dim": TEXT_WIDTH,
        "rope_axes_dim": (8, 8),
    },
    "CogView3PlusTransformer2DModel": _COG | {"pos_embed_max_size": 8, "sample_size": 8},
    "CogView4Transformer2DModel": _COG | {"pos_embed_max_size": 8, "sample_size": 8, "rope_axes_dim": (8, 8)},
    "GlmImageTransformer2DModel": _COG | {"prior_vq_quantizer_codebook_size": 8},
    "HunyuanVideoTransformer3DModel": _HUNYUAN_1,
    "HunyuanVideoFramepackTransformer3DModel": _HUNYUAN_1
    | {"has_image_proj": True, "image_proj_dim": 12, "has_clean_x_embedder": True, "patch_size": 2},
    "HunyuanVideo15Transformer3DModel": _HUNYUAN | {"text_embed_2_dim": 12, "image_embed_dim": 12, "target_size": 16},
    "MochiTransformer3DModel": _SIZES
    | {
        "num_attention_heads": HEADS,
        "pooled_projection_dim": TEXT_WIDTH,
        "in_channels": 4,
        "text_embed_dim": TEXT_WIDTH,
        "time_embed_dim": 8,
        "patch_size": 2,
    },
    "MotifVideoTransformer3DModel": _SIZES
    | _SINGLE
    | {
        "in_channels": 4,
        "out_channels": 4,
        "patch_size": 1,
        "text_embed_dim": TEXT_WIDTH,
        "image_embed_dim": 12,
        "rope_axes_dim": (4, 4, 8),
    },
    "CogVideoXTransformer3DModel": _COG_VIDEO | {"use_rotary_positional_embeddings": True},
    "ConsisIDTransformer3DModel": _COG_VIDEO | {"use_rotary_positional_embeddings": False},
    "JoyImageEditTransformer3DModel": _JOY,
    "JoyImageEditPlusTransformer3DModel": _JOY,
    "EasyAnimateTransformer3DModel": _SIZES
    | {
        "in_channels": 4,
        "out_channels": 4,
        "patch_size": 2,
        "mmdit_layers": 1,
        "time_embed_dim": 12,
        "text_embed_dim": TEXT_WIDTH,
    },
}
_NO_TEXT = {"encoder_hidden_states": None}
VARIANTS: dict[str, tuple[dict[str, Any], Callable[["_Draw"], dict[str, Any]]]] = {
    "SD3ControlNetModel of images alone": (
        {"joint_attention_dim": None, "use_pos_embed": False},
        lambda draw: _NO_TEXT | {"hidden_states": draw(SIDE * SIDE, WIDTH)},
    ),
    "AuraFlowTransformer2DModel of double blocks": ({"num_single_dit_layers": 0}, lambda draw: {}),
    "FluxTransformer2DModel with guidance": (
        {"guidance_embeds": True},
        lambda draw: {"guidance": torch.tensor([3.5] * BATCH)},
    ),
    "FluxControlNetModel of double blocks": ({"num_single_layers": 0}, lambda draw: {}),
    "FluxControlNetModel of several kinds": (
        {"num_mode": 2},
        lambda draw: {"controlnet_mode": torch.tensor([[0]] * BATCH)},
    ),
    "QwenImageTransformer2DModel of pairs": (
        {"zero_cond_t": True},
        lambda draw: {
            "hidden_states": draw(2 * SIDE * SIDE, 16),
            "img_shapes": [[(1, SIDE, SIDE), (1, SIDE, SIDE)]] * BATCH,
        },
    ),
    "HiDreamImageTransformer2DModel off square": ({}, lambda draw: {"hidden_states": draw(4, 8, 4)}),
    "HunyuanImageTransformer2DModel with two texts": (
        {"text_embed_2_dim": 12},
        lambda draw: {"encoder_hidden_states_2": draw(3, 12), "encoder_attention_mask_2": torch.ones(BATCH, 3)},
    ),
    "HunyuanVideoTransformer3DModel of a first frame": (
        {"image_condition_type": "token_replace"},
        lambda draw: {},
    ),
    "MotifVideoTransformer3DModel with cross-attention": (
        {"enable_text_cross_attention_dual": True, "num_single_layers": 2, "num_decoder_layers": 1},
        lambda draw: {"image_embeds": draw(3, 12)},
    ),
    "CogVideoXTransformer3DModel of absolute positions": (
        {"use_rotary_positional_embeddings": False},
        lambda draw: {"image_rotary_emb": None},
    ),
    "EasyAnimateTransformer3DModel with two texts": (
        {"text_embed_dim_t5": 12},
        lambda draw: {"encoder_hidden_states_t5": draw(3, 12)},
    ),
    "JoyImageEditTransformer3DModel of two images": ({}, lambda draw: {"hidden_states": draw(2, 4, 1, 8, 8)}),
}
CASES = (*ROWS, *VARIANTS)


def row_of(case: str) -> str:
    """Return the model class of a case."""
    return case.split(" ")[0]


def family_of(case: str) -> Family:
    """Return the row of a case."""
    return next(family for family in FAMILIES if family.model_class == row_of(case))


def make_model(case: str, *, seed: int = 0, std: float = 0.2, **overrides: Any) -> nn.Module:
    """Build a case's tiny model in eval mode: two double blocks of width 32, the same weights for the same seed.

    What models start at zero, as a ControlNet's maps to its outputs, is drawn too, all weights with `std`.

    Raises:
        KeyError: if the row has no tiny model yet; write one above.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        further = VARIANTS[case][0] if case in VARIANTS else {}
        model = getattr(diffusers, row_of(case))(**(CONFIGS[row_of(case)] | further | overrides)).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * std if parameter.dim() > 1 else parameter + noise * 0.1)
    return model


def make_config(case: str, **values: Any) -> PreProjConfig:
    """Build a config, with weights for each stream where a case's model can have no others."""
    return PreProjConfig(**(({"share": "stream"} if row_of(case) in APART else {}) | values))


def make_patched(case: str, config: PreProjConfig | None = None, **overrides: Any) -> nn.Module:
    """Build a case's tiny model with an adapter at a size at which each of its terms matters."""
    model = make_model(case, **overrides)
    mmpreproj.patch(model, config or make_config(case))
    shake(model)
    return model


def shake(model: nn.Module, *, std: float = 0.2, seed: int = 2) -> None:
    """Draw an adapter's weights anew."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in mmpreproj.parameters(model):
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)


class _Draw:
    """Random tensors, the same for the same order of calls."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(1)

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(BATCH, *shape, generator=self.generator)


def _ids(axes: int) -> dict[str, Tensor]:
    image = torch.zeros(SIDE, SIDE, axes)
    image[..., 1] += torch.arange(SIDE)[:, None]
    image[..., 2] += torch.arange(SIDE)
    return {"img_ids": image.flatten(0, 1), "txt_ids": torch.zeros(TEXT, axes)}


def _flux_call(draw: _Draw, *, axes: int = 3, pooled: bool = False) -> dict[str, Any]:
    call = {
        "hidden_states": draw(SIDE * SIDE, 4),
        "encoder_hidden_states": draw(TEXT, TEXT_WIDTH),
        "timestep": torch.tensor(TIME),
        **_ids(axes),
    }
    return call | ({"pooled_projections": draw(20)} if pooled else {})


def _sd3_call(draw: _Draw) -> dict[str, Any]:
    return {
        "hidden_states": draw(4, 8, 8),
        "encoder_hidden_states": draw(TEXT, TEXT_WIDTH),
        "pooled_projections": draw(20),
        "timestep": torch.tensor([100.0, 700.0]),
    }


def _qwen_call(draw: _Draw) -> dict[str, Any]:
    mask = torch.ones(BATCH, TEXT, dtype=torch.bool)
    mask[1, 3:] = False
    return {
        "hidden_states": draw(SIDE * SIDE, 16),
        "encoder_hidden_states": draw(TEXT, TEXT_WIDTH),
        "encoder_hidden_states_mask": mask,
        "timestep": torch.tensor(TIME),
        "img_shapes": [[(1, SIDE, SIDE)]] * BATCH,
    }


def _cog_call(draw: _Draw) -> dict[str, Any]:
    return {
        "hidden_states": draw(4, 8, 8),
        "encoder_hidden_states": draw(TEXT, TEXT_WIDTH),
        "timestep": torch.tensor([100, 700]),
        "target_size": torch.tensor([[8.0, 8.0]] * BATCH),
        "crop_coords": torch.zeros(BATCH, 2),
    }


def _video_text(draw: _Draw) -> dict[str, Any]:
    mask = torch.ones(BATCH, TEXT)
    mask[1, 3:] = 0
    return {"encoder_hidden_states": draw(TEXT, TEXT_WIDTH), "encoder_attention_mask": mask}


def _hunyuan_call(draw: _Draw) -> dict[str, Any]:
    guidance = torch.tensor([3000.0] * BATCH)
    further = {"pooled_projections": draw(20), "timestep": torch.tensor([100, 700]), "guidance": guidance}
    return {"hidden_states": draw(4, 2, 4, 4), **_video_text(draw), **further}


def _framepack_call(draw: _Draw) -> dict[str, Any]:
    return _hunyuan_call(draw) | {
        "image_embeds": draw(3, 12),
        "indices_latents": torch.arange(2),
        "latents_clean": draw(4, 2, 4, 4),
        "indices_latents_clean": torch.arange(2),
        "latents_history_2x": draw(4, 2, 4, 4),
        "indices_latents_history_2x": torch.arange(2),
        "latents_history_4x": draw(4, 4, 8, 8)[..., :4, :4],
        "indices_latents_history_4x": torch.arange(4),
    }


def _hunyuan_15_call(draw: _Draw) -> dict[str, Any]:
    mask = torch.ones(BATCH, 3)
    mask[0, 2:] = 0
    return {
        "hidden_states": draw(4, 2, 4, 4),
        **_video_text(draw),
        "timestep": torch.tensor([100.0, 700.0]),
        "encoder_hidden_states_2": draw(3, 12),
        "encoder_attention_mask_2": mask,
        "image_embeds": draw(2, 12),
    }


def _motif_call(draw: _Draw) -> dict[str, Any]:
    return {"hidden_states": draw(4, 2, 4, 4), **_video_text(draw), "timestep": torch.tensor([100.0, 700.0])}


def _hunyuan_image_call(draw: _Draw) -> dict[str, Any]:
    return {"hidden_states": draw(4, 4, 4), **_video_text(draw), "timestep": torch.tensor([100.0, 700.0])}


def _cog_video_call(draw: _Draw, *, rotary: bool = False) -> dict[str, Any]:
    angles = torch.rand(2 * SIDE * SIDE, HEAD_WIDTH // 2, generator=draw.generator).repeat_interleave(2, dim=1)
    call = {
        "hidden_states": draw(2, 4, 8, 8),
        "encoder_hidden_states": draw(TEXT, TEXT_WIDTH),
        "timestep": torch.tensor([100, 700]),
    }
    return call | ({"image_rotary_emb": (angles.cos(), angles.sin())} if rotary else {})


def _easy_animate_call(draw: _Draw) -> dict[str, Any]:
    return _cog_video_call(draw) | {"hidden_states": draw(4, 2, 8, 8)}


def _joy_call(draw: _Draw) -> dict[str, Any]:
    call = _cog_video_call(draw) | {"hidden_states": draw(4, 2, 8, 8)}
    return call | {"timestep": torch.tensor([100.0, 700.0])}


def _joy_plus_call(draw: _Draw) -> dict[str, Any]:
    mask = torch.ones(BATCH, TEXT)
    mask[1, 3:] = 0
    return _joy_call(draw) | {
        "hidden_states": draw(12, 4, 1, 2, 2),
        "encoder_hidden_states_mask": mask,
        "shape_list": [[(1, 2, 3), (1, 2, 2)], [(1, 3, 4)]],
    }


def _hidream_call(draw: _Draw) -> dict[str, Any]:
    return {
        "hidden_states": draw(4, 8, 8),
        "timesteps": torch.tensor([100, 700]),
        "encoder_hidden_states_t5": draw(TEXT, TEXT_WIDTH),
        "encoder_hidden_states_llama3": torch.stack([draw(TEXT, 12) for _ in range(3)]),
        "pooled_embeds": draw(20),
    }


CALLS: dict[str, Callable[[_Draw], dict[str, Any]]] = {
    "SD3Transformer2DModel": _sd3_call,
    "SD3ControlNetModel": lambda draw: _sd3_call(draw) | {"controlnet_cond": draw(4, 8, 8)},
    "AuraFlowTransformer2DModel": lambda draw: {
        key: value for key, value in _sd3_call(draw).items() if key != "pooled_projections"
    },
    "FluxTransformer2DModel": lambda draw: _flux_call(draw, pooled=True),
    "FluxControlNetModel": lambda draw: _flux_call(draw, pooled=True) | {"controlnet_cond": draw(SIDE * SIDE, 4)},
    "ChromaTransformer2DModel": lambda draw: (
        _flux_call(draw) | {"attention_mask": (torch.arange(TEXT + SIDE * SIDE) != 3).expand(BATCH, -1)}
    ),
    "BriaTransformer2DModel": _flux_call,
    "BriaFiboTransformer2DModel": lambda draw: (
        _flux_call(draw) | {"text_encoder_layers": [draw(TEXT, 12) for _ in range(3)]}
    ),
    "LongCatImageTransformer2DModel": _flux_call,
    "OvisImageTransformer2DModel": _flux_call,
    "Flux2Transformer2DModel": lambda draw: _flux_call(draw, axes=4) | {"guidance": torch.tensor([1.0] * BATCH)},
    "QwenImageTransformer2DModel": _qwen_call,
    "QwenImageControlNetModel": lambda draw: _qwen_call(draw) | {"controlnet_cond": draw(SIDE * SIDE, 16)},
    "HiDreamImageTransformer2DModel": _hidream_call,
    "HunyuanImageTransformer2DModel": _hunyuan_image_call,
    "CogView3PlusTransformer2DModel": lambda draw: (
        _cog_call(draw) | {"original_size": torch.tensor([[8.0, 8.0]] * BATCH)}
    ),
    "CogView4Transformer2DModel": lambda draw: _cog_call(draw) | {"original_size": torch.tensor([[8.0, 8.0]] * BATCH)},
    "GlmImageTransformer2DModel": lambda draw: (
        _cog_call(draw)
        | {
            "prior_token_id": torch.randint(8, (BATCH, SIDE * SIDE), generator=draw.generator),
            "prior_token_drop": torch.zeros(BATCH, SIDE * SIDE, dtype=torch.bool),
        }
    ),
    "HunyuanVideoTransformer3DModel": _hunyuan_call,
    "HunyuanVideoFramepackTransformer3DModel": _framepack_call,
    "HunyuanVideo15Transformer3DModel": _hunyuan_15_call,
    "MochiTransformer3DModel": lambda draw: _motif_call(draw) | {"hidden_states": draw(4, 2, 8, 8)},
    "MotifVideoTransformer3DModel": _motif_call,
    "CogVideoXTransformer3DModel": lambda draw: _cog_video_call(draw, rotary=True),
    "ConsisIDTransformer3DModel": _cog_video_call,
    "EasyAnimateTransformer3DModel": _easy_animate_call,
    "JoyImageEditTransformer3DModel": _joy_call,
    "JoyImageEditPlusTransformer3DModel": _joy_plus_call,
}


def make_call(case: str) -> dict[str, Any]:
    """Build the arguments of a call of a case's model, a batch of two.

    Raises:
        KeyError: if the row has none yet; write them above.
    """
    draw = _Draw()
    call = CALLS[row_of(case)](draw)
    return call | (VARIANTS[case][1](draw) if case in VARIANTS else {})


def flat(output: Any) -> Tensor:
    """Join all tensors that a model gives, one or a ControlNet's many, `[N]`."""
    if isinstance(output, Tensor):
        return output.flatten()
    return torch.cat([flat(part) for part in output if part is not None])


def predict(model: nn.Module, case: str) -> Tensor:
    """Run a model without gradients and return all it gives, `[N]`."""
    with torch.no_grad():
        return flat(model(**make_call(case), return_dict=False))


def gradients(model: nn.Module, case: str, **changes: Any) -> dict[str, Tensor | None]:
    """Run a model, some arguments changed, and return the gradients of its adapter's parameters."""
    model.zero_grad()
    flat(model(**(make_call(case) | changes), return_dict=False)).square().mean().backward()
    return {name: parameter.grad for name, parameter in mmpreproj.named_parameters(model)}
