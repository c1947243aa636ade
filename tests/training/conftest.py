"""Small training problems: random latents and embeddings for the tiny transformers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mmpreproj.data.encoding import EncodedPictures, LatentsInMemory, TextEmbeddings
from mmpreproj.training.config import TrainConfig


@pytest.fixture
def make_pictures() -> Callable[..., EncodedPictures]:
    """Build N encoded pictures that fit the tiny transformers, each with a caption of its own."""

    def make(count: int = 8, *, seed: int = 11) -> EncodedPictures:
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        return EncodedPictures(
            latents=LatentsInMemory(draw(count, 4, 8, 8)),
            captions=tuple(f"caption {index}" for index in range(count)),
            text=TextEmbeddings(
                draw(count, 5, 24), draw(count, 20), torch.arange(5) < 1 + torch.arange(count)[:, None]
            ),
            text_index=torch.arange(count),
            empty=TextEmbeddings(draw(1, 5, 24), draw(1, 20), torch.arange(5)[None] < 2),
        )

    return make


@pytest.fixture
def make_config(tmp_path: Path) -> Callable[..., TrainConfig]:
    """Build a configuration of three steps of two pictures, without warm-up, evaluation in between or checkpoints."""

    def make(**changes: Any) -> TrainConfig:
        values: dict[str, Any] = {
            "model": "base",
            "output": tmp_path / "run",
            "data": {"folder": tmp_path},
            "steps": 3,
            "batch_size": 2,
            "evaluate_every": 0,
            "checkpoint_every": 0,
        }
        optimizer = {"learning_rate": 1e-2, "warmup_steps": 0} | changes.pop("optimizer", {})
        return TrainConfig(**(values | changes), optimizer=optimizer)

    return make


class Spy(nn.Module):
    """Stands where a transformer stands, keeps what it was given, and answers with `answer(**inputs)`."""

    def __init__(self, answer: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(1))
        self.answer = answer
        self.calls: list[dict[str, torch.Tensor]] = []

    def forward(self, *, return_dict: bool, **inputs: torch.Tensor) -> tuple[torch.Tensor]:
        self.calls.append(inputs)
        return (self.answer(**inputs),)


@pytest.fixture
def spy() -> type[Spy]:
    """Build a module that records its inputs with `spy(answer)`."""
    return Spy
