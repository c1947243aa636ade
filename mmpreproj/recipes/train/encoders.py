"""A pipeline's encoders while a run needs them, and out of memory while it does not."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from diffusers.training_utils import free_memory

from mmpreproj.pipelines import text
from mmpreproj.pipelines.sd3 import PreProjSD3Pipeline
from mmpreproj.recipes.scratch import load_minilm
from mmpreproj.training.config import ScratchModel

TEXT_ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3")


class CutPrompts(logging.Filter):
    """Keeps warnings of prompts that were cut off from the screen, and counts them.

    Attributes:
        count: of prompts.
        last: what is said of the last.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count, self.last = 0, ""

    def filter(self, record: logging.LogRecord) -> bool:
        """Take a warning."""
        self.count, self.last = self.count + 1, record.getMessage()
        return False


@contextmanager
def count_cut_prompts() -> Iterator[CutPrompts]:
    """Count the prompts that encoders cut off, of which there may be as many as pictures, instead of listing them."""
    cut = CutPrompts()
    text.logger.addFilter(cut)
    try:
        yield cut
    finally:
        text.logger.removeFilter(cut)


class Encoders:
    """The VAE and the text encoders of a pipeline.

    Between `release` and `restore`, while a run trains, no text encoder is in memory, neither the device's nor the
    host's; the VAE is in the host's.

    Args:
        pipeline: with its encoders.
        model: where they were loaded from, a hub id or folder, or the sizes of a new model.
    """

    def __init__(self, pipeline: PreProjSD3Pipeline, model: str | ScratchModel) -> None:
        self.pipeline, self.model = pipeline, model
        self._classes: dict[str, tuple[type, torch.dtype]] = {}

    def place(self, device: torch.device) -> None:
        """Move them to where they encode, in eval mode and without gradients."""
        for name in ("vae", *TEXT_ENCODERS):
            module = getattr(self.pipeline, name)
            if module is not None:
                module.requires_grad_(False).eval().to(device)

    def release(self) -> None:
        """Free what the text encoders take, and move the VAE, which draws pictures now and then, to the CPU."""
        for name in TEXT_ENCODERS:
            module = getattr(self.pipeline, name)
            if module is not None:
                self._classes[name] = (type(module), module.dtype)
                self.pipeline.register_modules(**{name: None})
        if self.pipeline.vae is not None:
            self.pipeline.vae.to("cpu")
        free_memory()

    def restore(self) -> None:
        """Load the text encoders again, from where they came."""
        for name, (kind, dtype) in self._classes.items():
            self.pipeline.register_modules(**{name: self._load(name, kind, dtype)})
        self._classes.clear()

    def _load(self, name: str, kind: Any, dtype: torch.dtype) -> Any:
        if isinstance(self.model, ScratchModel):
            return load_minilm(self.model.text_tokens)[1]
        return kind.from_pretrained(self.model, subfolder=name, dtype=dtype).eval()
