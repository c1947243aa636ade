"""The held-out loss: the flow loss on a fixed grid of pictures, noise levels and noise."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mmpreproj.core.flow import interpolate, spread_sigmas, velocity
from mmpreproj.data.encoding import EncodedPictures
from mmpreproj.training.objective import attention_kwargs


class HeldOutLoss:
    """Mean squared error of the velocity, with σ uniform over (0, 1), the mean over all latent values.

    Every call evaluates the same (picture, σ, noise) triples, so that two calls differ only by the model. The noise of
    a picture depends on the seed and its place alone, not on batches or devices.

    Args:
        pictures: encoded pictures that are never trained on.
        levels: noise levels per picture.
        seed: of the noise.
        batch_size: triples per forward pass.
        timesteps: the scheduler's number of training timesteps; the model is told `σ · timesteps`.
    """

    def __init__(
        self, pictures: EncodedPictures, *, levels: int = 4, seed: int = 0, batch_size: int = 32, timesteps: int = 1000
    ) -> None:
        self.pictures = pictures
        self.sigmas = spread_sigmas(len(pictures), levels)  # [P, K]
        self.seed = seed
        self.batch_size = batch_size
        self.timesteps = timesteps

    @torch.no_grad()
    def __call__(self, transformer: nn.Module) -> float:
        """Evaluate a transformer; its train/eval flag is left as it was."""
        device = next(transformer.parameters()).device
        was_training = transformer.training
        transformer.eval()
        total = torch.zeros((), dtype=torch.float64)
        pairs = [(picture, level) for picture in range(len(self.pictures)) for level in range(self.sigmas.shape[1])]
        for start in range(0, len(pairs), self.batch_size):
            total += self._batch_error(transformer, pairs[start : start + self.batch_size], device)
        transformer.train(was_training)
        return float(total / (len(pairs) * self.pictures.latents[0].numel()))

    def _batch_error(self, transformer: nn.Module, pairs: list[tuple[int, int]], device: torch.device) -> Tensor:
        batch = [self.pictures[picture] for picture, _ in pairs]
        clean = torch.stack([item["latents"] for item in batch]).to(device)  # [B, C, h, w]
        noise = torch.stack([self._noise(*pair) for pair in pairs]).to(device)  # [B, C, h, w]
        sigmas = torch.stack([self.sigmas[pair] for pair in pairs]).to(device)  # [B]
        predicted = transformer(
            hidden_states=interpolate(clean, noise, sigmas),
            encoder_hidden_states=torch.stack([item["tokens"] for item in batch]).to(device),
            pooled_projections=torch.stack([item["pooled"] for item in batch]).to(device),
            timestep=sigmas * self.timesteps,
            joint_attention_kwargs=self._attention_kwargs(transformer, batch, device),
            return_dict=False,
        )[0]
        return (predicted.float() - velocity(clean, noise)).square().cpu().double().sum()

    def _attention_kwargs(
        self, transformer: nn.Module, batch: list[dict[str, Tensor]], device: torch.device
    ) -> dict[str, Tensor] | None:
        return attention_kwargs(transformer, torch.stack([item["mask"] for item in batch]).to(device))

    def _noise(self, picture: int, level: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + picture * self.sigmas.shape[1] + level)
        return torch.randn(self.pictures.latents.shape[1:], generator=generator)
