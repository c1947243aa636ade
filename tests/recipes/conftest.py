"""A tiny pipeline on disk, a folder of pictures, and configurations that train the one on the other."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel
from PIL import Image
from rich.console import Console
from transformers import BertConfig, BertModel, BertTokenizerFast

import mmpreproj
from mmpreproj.pipelines import PreProjSD3Pipeline
from mmpreproj.recipes.train import TrainingRun, run_training
from mmpreproj.training.config import TrainConfig

WORDS = ("red", "green", "blue", "square", "apple", "tree")


def build_pipeline(*, with_vae: bool) -> PreProjSD3Pipeline:
    """Build 8×8 pixels or latents, a BERT that knows a few words, and a transformer of width 32."""
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    tokenizer = BertTokenizerFast(vocab={word: i for i, word in enumerate(vocabulary)}, model_max_length=6)
    bert = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=48,
        max_position_embeddings=16,
    )
    vae = AutoencoderKL(
        block_out_channels=(8, 16),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=3,
        norm_num_groups=4,
        scaling_factor=1.5,
        shift_factor=0.1,
    )
    transformer = SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=3,
        out_channels=3,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=24,
        caption_projection_dim=32,
        pooled_projection_dim=24,
        pos_embed_max_size=8,
    )
    return PreProjSD3Pipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=2.0),
        text_encoder=BertModel(bert).eval(),
        tokenizer=tokenizer,
        vae=vae.eval() if with_vae else None,
    )


@pytest.fixture(scope="session")
def saved_pipelines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two stock pipeline folders, `pixels` and `latents`; tests must leave them as they are."""
    folders = {}
    for kind in ("pixels", "latents"):
        folders[kind] = tmp_path_factory.mktemp("pipelines") / kind
        with torch.random.fork_rng():
            torch.manual_seed(6)
            build_pipeline(with_vae=kind == "latents").save_pretrained(folders[kind])
    return folders


@pytest.fixture
def base(saved_pipelines: dict[str, Path]) -> Path:
    """The folder of a pipeline without a VAE."""
    return saved_pipelines["pixels"]


@pytest.fixture
def make_several(base: Path, tmp_path: Path) -> Callable[..., Path]:
    """Save the tiny pipeline with named adapters of different strength."""

    def make(names: tuple[str, ...] = ("style", "b"), *, switched_off: tuple[str, ...] = ()) -> Path:
        pipe = PreProjSD3Pipeline.from_pretrained(base)
        for name in names:
            mmpreproj.patch(pipe.transformer, name=name)
        mmpreproj.set_scale(pipe.transformer, {name: 0.5 + place for place, name in enumerate(names)})
        for name in switched_off:
            mmpreproj.disable(pipe.transformer, name)
        folder = tmp_path / "-".join(names)
        pipe.save_pretrained(folder)
        return folder

    return make


def write_pictures(folder: Path) -> Path:
    """Write twelve plain pictures of three colours, and their captions."""
    folder.mkdir()
    lines = []
    for index in range(12):
        name, colour = f"{index:02}.png", ("red", "green", "blue")[index % 3]
        Image.new("RGB", (20, 16 + index), colour).save(folder / name)
        lines.append(json.dumps({"file_name": name, "text": f"{colour} square"}))
    (folder / "metadata.jsonl").write_text("\n".join(lines))
    return folder


def build_config(*, model: Path, output: Path, pictures: Path, **changes: Any) -> TrainConfig:
    """Build a configuration of three steps of four pictures."""
    values: dict[str, Any] = {
        "model": str(model),
        "output": output,
        "steps": 3,
        "batch_size": 4,
        "checkpoint_every": 2,
        "max_sequence_length": 6,
        "optimizer": {"learning_rate": 1e-2, "warmup_steps": 0},
    }
    data = {"folder": pictures, "resolution": 8, "held_out": 2} | changes.pop("data", {})
    return TrainConfig(**(values | changes), data=data)


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """A folder of twelve pictures with captions."""
    return write_pictures(tmp_path / "pictures")


@pytest.fixture
def make_config(tmp_path: Path, base: Path, pictures: Path) -> Callable[..., TrainConfig]:
    """Build a configuration that trains the tiny pipeline on the twelve pictures."""

    def make(**changes: Any) -> TrainConfig:
        return build_config(**({"model": base, "output": tmp_path / "run", "pictures": pictures} | changes))

    return make


@pytest.fixture
def run() -> Callable[..., tuple[TrainingRun, str]]:
    """Train quietly; returns the run and what a person would have seen."""
    return train_quietly


def train_quietly(config: TrainConfig, **settings: Any) -> tuple[TrainingRun, str]:
    """Train and return the run with its messages."""
    screen = io.StringIO()
    return run_training(config, console=Console(file=screen, width=200), **settings), screen.getvalue()


@pytest.fixture(scope="session")
def trained(
    saved_pipelines: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[TrainingRun, str]]:
    """A run and its messages in each mode; tests must leave runs and folders as they are."""
    folder = tmp_path_factory.mktemp("trained")
    common = {"model": saved_pipelines["pixels"], "pictures": write_pictures(folder / "pictures")}
    runs = {}
    for mode in ("probe", "full"):
        AcceleratorState._reset_state(reset_partial_state=True)
        runs[mode] = train_quietly(build_config(**common, output=folder / mode, mode=mode))
    return runs


@pytest.fixture(scope="session")
def trained_together(saved_pipelines: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> TrainingRun:
    """A run of an adapter beside a LoRA, with prompts and an empty picture; tests must leave it as it is."""
    folder = tmp_path_factory.mktemp("together")
    pictures = write_pictures(folder / "pictures")
    (pictures / "03.png").write_bytes(b"")
    AcceleratorState._reset_state(reset_partial_state=True)
    config = build_config(
        model=saved_pipelines["pixels"],
        output=folder / "run",
        pictures=pictures,
        lora={"rank": 2},
        evaluate_every=2,
        validation={"prompts": ("red square", "a <b>blue</b> tree"), "count": 2, "steps": 2},
    )
    return train_quietly(config)[0]
