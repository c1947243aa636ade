"""What is minimised: the rectified-flow loss of a batch."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from diffusers.training_utils import compute_density_for_timestep_sampling
from torch import Tensor, nn

from mmpreproj.core.flow import interpolate, shift_sigmas, velocity
from mmpreproj.data.encoding import TextEmbeddings
from mmpreproj.patching.positions.life import masks_padding
from mmpreproj.patching.positions.root import MASK
from mmpreproj.training.config import FlowConfig


class FlowObjective:
    """The rectified-flow loss of a batch, with its own seeded randomness.

    Args:
        empty: embeddings of the empty prompt, for dropped captions.
        flow: how noise levels are drawn.
        shift: scheduler shift, where `flow` names none.
        timesteps: the scheduler's number of training timesteps; the model is told `σ · timesteps`.
        caption_dropout: share of captions replaced by the empty prompt.
        seed: of noise levels, noise and dropout.
    """

    def __init__(
        self,
        empty: TextEmbeddings,
        *,
        flow: FlowConfig,
        shift: float,
        timesteps: int,
        caption_dropout: float,
        seed: int,
    ) -> None:
        self.empty = empty
        self.flow = flow
        self.shift = flow.shift if flow.shift is not None else shift
        self.timesteps = timesteps
        self.caption_dropout = caption_dropout
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, transformer: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """Compute the loss of a batch.

        It has latents `[B, C, h, w]`, and of the captions tokens `[B, L, D]`, pooled `[B, P]` and mask `[B, L]`.
        """
        inputs, target = self.noisy_pictures(transformer, batch)
        return F.mse_loss(transformer(**inputs)[0].float(), target)

    def denoiser(self, transformer: nn.Module) -> nn.Module:
        """Return what the loss is computed with, and so what is prepared for several processes: the transformer."""
        return transformer

    def losses(self, denoiser: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Compute the loss of a batch for each modality; see `__call__`."""
        return {"pictures": self(denoiser, batch)}

    def total(self, losses: dict[str, Tensor]) -> Tensor:
        """Return what is minimised."""
        return losses["pictures"]

    def noisy_pictures(self, transformer: nn.Module, batch: dict[str, Tensor]) -> tuple[dict[str, Any], Tensor]:
        """Draw noise for a batch; return what the transformer is called with, and the velocity it should give."""
        clean = batch["latents"]
        noise = torch.randn(clean.shape, generator=self.generator).to(clean.device)
        sigmas = self.draw_sigmas(len(clean)).to(clean.device)  # [B]
        tokens, pooled, mask = self.drop_captions(batch["tokens"], batch["pooled"], batch["mask"])
        inputs = {
            "hidden_states": interpolate(clean, noise, sigmas),
            "encoder_hidden_states": tokens,
            "pooled_projections": pooled,
            "timestep": sigmas * self.timesteps,
            "joint_attention_kwargs": attention_kwargs(transformer, mask),
            "return_dict": False,
        }
        return inputs, velocity(clean, noise)

    def draw_sigmas(self, count: int) -> Tensor:
        """Draw noise levels `[count]` in (0, 1)."""
        return draw_sigmas(count, self.flow, shift=self.shift, generator=self.generator)

    def drop_captions(self, tokens: Tensor, pooled: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Replace a random share of captions `[B, L, D]`, `[B, P]`, `[B, L]` by the empty prompt."""
        dropped = (torch.rand(len(tokens), generator=self.generator) < self.caption_dropout).to(tokens.device)  # [B]
        tokens = torch.where(dropped[:, None, None], self.empty.tokens.to(tokens), tokens)  # [B, L, D]
        pooled = torch.where(dropped[:, None], self.empty.pooled.to(pooled), pooled)  # [B, P]
        mask = torch.where(dropped[:, None], self.empty.mask.to(mask), mask)  # [B, L]
        return tokens, pooled, mask


def draw_sigmas(count: int, flow: FlowConfig, *, shift: float, generator: torch.Generator) -> Tensor:
    """Draw noise levels `[count]` in (0, 1) as a configuration says, shifted."""
    uniform = compute_density_for_timestep_sampling(
        "logit_normal", count, flow.logit_mean, flow.logit_std, generator=generator
    )
    return shift_sigmas(uniform, shift)


def attention_kwargs(transformer: nn.Module, mask: Tensor) -> dict[str, Tensor] | None:
    """Give joint attention the mask of a text `[B, L]` if the transformer's adapter masks padding."""
    return {MASK: mask} if masks_padding(transformer) else None
