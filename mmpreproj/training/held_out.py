"""The held-out loss: the flow loss on a fixed grid of pictures, noise levels and noise."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

import torch
from torch import Tensor, nn

from mmpreproj.core.draws import check_whole
from mmpreproj.core.flow import interpolate, spread_sigmas, velocity
from mmpreproj.data.encoding import EncodedPictures
from mmpreproj.training.calls.pictures import CalledPictures
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

    Raises:
        ValueError: without pictures, and for levels or a batch size below 1.
    """

    pictures: EncodedPictures | CalledPictures

    def __init__(
        self,
        pictures: EncodedPictures | CalledPictures,
        *,
        levels: int = 4,
        seed: int = 0,
        batch_size: int = 32,
        timesteps: int = 1000,
    ) -> None:
        if not len(pictures):
            raise ValueError("there are no held-out pictures to measure on; expected at least one")
        for name, value in (("levels", levels), ("batch_size", batch_size)):
            check_whole(name, value, least=1)
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
        total, values = torch.zeros((), dtype=torch.float64), 0
        for batch in self._batches():
            error, count = self._batch_error(transformer, batch, device)
            total, values = total + error, values + count
        transformer.train(was_training)
        return float(total / values)

    def _batches(self) -> Iterator[list[tuple[int, int]]]:
        """Yield batches of (picture, level), each of pictures of one size."""
        alike: dict[Hashable, list[tuple[int, int]]] = {}
        for picture in range(len(self.pictures)):
            group = self.pictures.groups[picture] if self.pictures.groups else None
            alike.setdefault(group, []).extend((picture, level) for level in range(self.sigmas.shape[1]))
        for pairs in alike.values():
            for start in range(0, len(pairs), self.batch_size):
                yield pairs[start : start + self.batch_size]

    def _batch_error(
        self, transformer: nn.Module, pairs: list[tuple[int, int]], device: torch.device
    ) -> tuple[Tensor, int]:
        """Return the sum of squared errors, and of how many values."""
        items = {picture: self.pictures[picture] for picture in dict.fromkeys(picture for picture, _ in pairs)}
        batch = [items[picture] for picture, _ in pairs]  # each is read once, not once a level
        clean = torch.stack([item["latents"] for item in batch]).to(device)  # [B, C, h, w]
        noise = torch.stack([self._noise(*pair, shape=clean.shape[1:]) for pair in pairs]).to(device)  # [B, C, h, w]
        sigmas = torch.stack([self.sigmas[pair] for pair in pairs]).to(device)  # [B]
        predicted = transformer(
            hidden_states=interpolate(clean, noise, sigmas),
            encoder_hidden_states=torch.stack([item["tokens"] for item in batch]).to(device),
            pooled_projections=torch.stack([item["pooled"] for item in batch]).to(device),
            timestep=sigmas * self.timesteps,
            joint_attention_kwargs=self._attention_kwargs(transformer, batch, device),
            return_dict=False,
        )[0]
        return (predicted.float() - velocity(clean, noise)).square().cpu().double().sum(), clean.numel()

    def _attention_kwargs(
        self, transformer: nn.Module, batch: list[dict[str, Tensor]], device: torch.device
    ) -> dict[str, Tensor] | None:
        return attention_kwargs(transformer, torch.stack([item["mask"] for item in batch]).to(device))

    def _noise(self, picture: int, level: int, *, shape: torch.Size) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + picture * self.sigmas.shape[1] + level)
        return torch.randn(shape, generator=generator)
