"""Tiny pipelines with real components; tokenizers are made from a handful of letters."""

import json
import string
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL, AutoencoderTiny, FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel
from transformers import (
    BertConfig,
    BertModel,
    BertTokenizerFast,
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5TokenizerFast,
)

import mmpreproj
from mmpreproj import PreProjConfig
from mmpreproj.pipelines import PreProjSD3Pipeline

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    """Run on one thread: these models are so small that handing work to others costs more than it saves."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def custom_pipeline() -> str:
    """The file that diffusers takes as `custom_pipeline`."""
    return str(ROOT / "pipelines" / "sd3.py")


@pytest.fixture
def clip_tokenizer(tmp_path: Path) -> CLIPTokenizer:
    """A CLIP tokenizer of 16 positions that knows single letters."""
    tokens = [*string.ascii_lowercase, *(f"{letter}</w>" for letter in string.ascii_lowercase)]
    vocabulary = {token: index for index, token in enumerate([*tokens, "<|startoftext|>", "<|endoftext|>"])}
    files = tmp_path / "clip-vocabulary.json", tmp_path / "clip-merges.txt"
    files[0].write_text(json.dumps(vocabulary))
    files[1].write_text("#version: 0.2\n")
    return CLIPTokenizer(str(files[0]), str(files[1]), model_max_length=16)


@pytest.fixture
def t5_tokenizer() -> T5TokenizerFast:
    """A T5 tokenizer that knows single letters."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    return T5TokenizerFast(vocab=[*pieces, *((letter, -3.0) for letter in string.ascii_lowercase)], extra_ids=0)


@pytest.fixture
def make_bert() -> Callable[..., tuple[BertModel, BertTokenizerFast]]:
    """Build a BERT of two layers and a tokenizer that knows a few words."""

    def make(width: int = 24, *, length: int = 8, positions: int = 32) -> tuple[BertModel, BertTokenizerFast]:
        words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "red", "green", "apple", "tree", "heart", "smiling"]
        tokenizer = BertTokenizerFast(vocab={word: i for i, word in enumerate(words)}, model_max_length=length)
        config = BertConfig(
            vocab_size=len(words),
            hidden_size=width,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=2 * width,
            max_position_embeddings=positions,
        )
        with torch.random.fork_rng():
            torch.manual_seed(3)
            return BertModel(config).eval(), tokenizer

    return make


@pytest.fixture
def clip_and_t5(clip_tokenizer: CLIPTokenizer, t5_tokenizer: T5TokenizerFast) -> dict[str, Any]:
    """The six text components of stock SD3, for the tiny transformers."""

    def clip(width: int, projection: int) -> CLIPTextModelWithProjection:
        config = CLIPTextConfig(
            vocab_size=len(clip_tokenizer),
            hidden_size=width,
            projection_dim=projection,
            intermediate_size=2 * width,
            num_hidden_layers=3,
            num_attention_heads=2,
            max_position_embeddings=16,
            bos_token_id=52,
            eos_token_id=53,
            pad_token_id=53,
        )
        return CLIPTextModelWithProjection(config).eval()

    t5 = T5Config(vocab_size=len(t5_tokenizer), d_model=24, d_kv=8, d_ff=32, num_layers=1, num_heads=3)
    with torch.random.fork_rng():
        torch.manual_seed(4)
        return {
            "text_encoder": clip(8, 8),
            "tokenizer": clip_tokenizer,
            "text_encoder_2": clip(16, 12),
            "tokenizer_2": clip_tokenizer,
            "text_encoder_3": T5EncoderModel(t5).eval(),
            "tokenizer_3": t5_tokenizer,
        }


@pytest.fixture
def make_vae() -> Callable[..., AutoencoderKL | AutoencoderTiny]:
    """Build a tiny VAE that halves both sides, with four latent channels."""

    def make(kind: str = "kl", **overrides: Any) -> AutoencoderKL | AutoencoderTiny:
        with torch.random.fork_rng():
            torch.manual_seed(5)
            if kind == "tiny":
                sizes = {"encoder_block_out_channels": (8, 8), "decoder_block_out_channels": (8, 8)}
                blocks = {"num_encoder_blocks": (1, 1), "num_decoder_blocks": (1, 1)}
                return AutoencoderTiny(**sizes, **blocks, latent_channels=4, **overrides).eval()
            config: dict[str, Any] = {
                "block_out_channels": (8, 16),
                "down_block_types": ("DownEncoderBlock2D",) * 2,
                "up_block_types": ("UpDecoderBlock2D",) * 2,
                "latent_channels": 4,
                "norm_num_groups": 4,
                "scaling_factor": 1.5,
                "shift_factor": 0.06,
            }
            return AutoencoderKL(**(config | overrides)).eval()

    return make


@pytest.fixture
def stock_components(
    make_transformer: Callable[..., SD3Transformer2DModel],
    make_vae: Callable[..., AutoencoderKL],
    clip_and_t5: dict[str, Any],
) -> dict[str, Any]:
    """Everything that the stock pipeline needs."""
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    return {"transformer": make_transformer(), "scheduler": scheduler, "vae": make_vae(), **clip_and_t5}


@pytest.fixture
def make_pixel_pipeline(
    make_transformer: Callable[..., SD3Transformer2DModel],
    make_bert: Callable[..., tuple[BertModel, BertTokenizerFast]],
    shake: Callable[..., None],
) -> Callable[..., PreProjSD3Pipeline]:
    """Build a pipeline as the quickstart's: BERT for text, no VAE, 8×8 pixels; patched unless told otherwise."""

    def make(*, patched: bool = True, config: PreProjConfig | None = None, **overrides: Any) -> PreProjSD3Pipeline:
        transformer = make_transformer(in_channels=3, out_channels=3, pooled_projection_dim=24)
        if patched:
            mmpreproj.patch(transformer, config)
            shake(transformer)
        text_encoder, tokenizer = make_bert()
        components = {
            "transformer": transformer,
            "scheduler": FlowMatchEulerDiscreteScheduler(),
            "text_encoder": text_encoder,
            "tokenizer": tokenizer,
        }
        pipe = PreProjSD3Pipeline(**(components | overrides))
        pipe.set_progress_bar_config(disable=True)
        return pipe

    return make


@pytest.fixture
def draw() -> Callable[..., np.ndarray]:
    """Generate pictures `[B, H, W, 3]` in [0, 1] with a pipeline in three steps from a fixed seed."""

    def run(pipe: Any, prompt: Any = "red apple", **kwargs: Any) -> np.ndarray:
        pipe.set_progress_bar_config(disable=True)
        settings = {
            "num_inference_steps": 3,
            "generator": torch.Generator().manual_seed(7),
            "output_type": "np",
            "max_sequence_length": 16,
        }
        return pipe(prompt, **(settings | kwargs)).images

    return run
