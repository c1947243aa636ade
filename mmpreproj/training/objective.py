"""What is minimised: the rectified-flow loss of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mmpreproj.core.draws import generator_of
from mmpreproj.core.flow import interpolate, velocity
from mmpreproj.data.encoding import TextEmbeddings
from mmpreproj.patching.positions.life import masks_padding
from mmpreproj.patching.positions.root import MASK
from mmpreproj.training.config import FlowConfig
from mmpreproj.training.noise import draw_sigmas, loss_weights, shift_for


class FlowObjective:
    """The rectified-flow loss of a batch.

    All that is random about a sample follows from the seed and the number of its draw, so the loss does not depend on
    how draws are cut into batches or shared among processes.

    Args:
        empty: embeddings of the empty prompt, for dropped captions.
        flow: how noise levels are drawn.
        shift: scheduler shift, where `flow` names none.
        timesteps: the scheduler's number of training timesteps; the model is told `σ · timesteps`.
        caption_dropout: share of captions replaced by the empty prompt.
        seed: of noise levels, noise and dropout.
        cell: side of a latent cell in pixels, the VAE's scale factor.
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
        cell: int = 1,
    ) -> None:
        self.empty = empty
        self.flow = flow
        self.shift = shift
        self.timesteps = timesteps
        self.caption_dropout = caption_dropout
        self.seed = seed
        self.cell = cell

    def __call__(self, transformer: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """Compute the loss of a batch.

        It has latents `[B, C, h, w]`, of the captions tokens `[B, L, D]`, pooled `[B, P]` and mask `[B, L]`, and the
        numbers of the draws, draw `[B]`.

        Raises:
            ValueError: if they are not of the same number of samples.
        """
        inputs, target, weights = self.noisy_pictures(transformer, batch, self.generators(batch))
        return picture_loss(transformer(**inputs)[0], target, weights)

    def generators(self, batch: dict[str, Tensor]) -> list[torch.Generator]:
        """Make the generator of each sample of a batch; what is drawn of it is drawn in the same order every time.

        Raises:
            ValueError: if the tensors of the batch are not of the same number of samples.
        """
        check_sizes(batch)
        return [generator_of(self.seed, number) for number in batch["draw"].tolist()]

    def denoiser(self, transformer: nn.Module) -> nn.Module:
        """Return what the loss is computed with, and so what is prepared for several processes: the transformer."""
        return transformer

    def losses(self, denoiser: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Compute the loss of a batch for each modality; see `__call__`."""
        return {"pictures": self(denoiser, batch)}

    def total(self, losses: dict[str, Tensor]) -> Tensor:
        """Return what is minimised."""
        return losses["pictures"]

    def noisy_pictures(
        self, transformer: nn.Module, batch: dict[str, Tensor], generators: Sequence[torch.Generator]
    ) -> tuple[dict[str, Any], Tensor, Tensor]:
        """Draw noise for a batch.

        Returns:
            What the transformer is called with, the velocity it should give `[B, C, h, w]`, and what the squared error
            of each picture weighs `[B]`.
        """
        clean = batch["latents"]
        noise = torch.stack([torch.randn(clean.shape[1:], generator=generator) for generator in generators])
        noise = noise.to(clean.device)  # [B, C, h, w]
        sigmas = self.draw_sigmas(generators, pixels=clean[0, 0].numel() * self.cell**2).to(clean.device)  # [B]
        tokens, pooled, mask = self.drop_captions(batch, generators)
        inputs = {
            "hidden_states": interpolate(clean, noise, sigmas),
            "encoder_hidden_states": tokens,
            "pooled_projections": pooled,
            "timestep": sigmas * self.timesteps,
            "joint_attention_kwargs": attention_kwargs(transformer, mask),
            "return_dict": False,
        }
        return inputs, velocity(clean, noise), loss_weights(sigmas, self.flow)

    def draw_sigmas(self, generators: Sequence[torch.Generator], *, pixels: int) -> Tensor:
        """Draw noise levels `[B]` in (0, 1) for pictures of so many pixels, one with each of B generators."""
        shift = shift_for(self.flow, scheduler_shift=self.shift, pixels=pixels)
        return draw_sigmas(generators, self.flow, shift=shift)

    def drop_captions(
        self, batch: dict[str, Tensor], generators: Sequence[torch.Generator]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Replace a share of captions, `[B, L, D]`, `[B, P]` and `[B, L]`, by the empty prompt."""
        tokens, pooled, mask = batch["tokens"], batch["pooled"], batch["mask"]
        chances = torch.cat([torch.rand(1, generator=generator) for generator in generators])
        dropped = (chances < self.caption_dropout).to(tokens.device)  # [B]
        tokens = torch.where(dropped[:, None, None], self.empty.tokens.to(tokens), tokens)  # [B, L, D]
        pooled = torch.where(dropped[:, None], self.empty.pooled.to(pooled), pooled)  # [B, P]
        mask = torch.where(dropped[:, None], self.empty.mask.to(mask), mask)  # [B, L]
        return tokens, pooled, mask


def check_sizes(batch: dict[str, Tensor]) -> None:
    """Refuse a batch of which one tensor has more samples than another; one of a single sample would be stretched.

    Raises:
        ValueError: naming the tensors and how many samples each has.
    """
    sizes = {name: tuple(tensor.shape[:1]) for name, tensor in batch.items()}
    if len(set(sizes.values())) > 1:
        found = ", ".join(f"{name} {size[0] if size else 'no dimension'}" for name, size in sizes.items())
        raise ValueError(
            f"the tensors of a batch are not of the same number of samples: {found}; give one of each for every draw, "
            "repeating the embeddings of a caption that several pictures have"
        )


def picture_loss(predicted: Tensor, target: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted mean squared error of velocities `[B, C, h, w]`, in float32."""
    errors = (predicted.float() - target).square().mean(dim=(1, 2, 3))  # [B]
    return (errors * weights).mean()


def attention_kwargs(transformer: nn.Module, mask: Tensor) -> dict[str, Tensor] | None:
    """Give joint attention the mask of a text `[B, L]` if the transformer's adapter masks padding."""
    return {MASK: mask} if masks_padding(transformer) else None
