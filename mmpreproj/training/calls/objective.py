"""What is minimised on recorded calls, and how it is measured on those never trained on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mmpreproj.core.draws import generator_of
from mmpreproj.training.calls.call import RecordedCall
from mmpreproj.training.calls.pictures import CalledPictures
from mmpreproj.training.calls.process import Process
from mmpreproj.training.config import FlowConfig
from mmpreproj.training.held_out import HeldOutLoss
from mmpreproj.training.noise import draw_sigmas, loss_weights, shift_for
from mmpreproj.training.objective import check_sizes


class CallDenoiser(nn.Module):
    """A model behind recorded calls, one call for a whole batch: several processes count calls.

    Args:
        model: the one that the calls were recorded of.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, noisy: Tensor, times: Tensor, calls: Sequence[RecordedCall]) -> Tensor:
        """Return the predictions for samples `[B, …]` at the scheduler's timesteps `[B]`, in their shape."""
        found = [call.predict(self.model, noisy[index : index + 1], times[index]) for index, call in enumerate(calls)]
        return torch.cat(found)


class CallObjective:
    """The loss of a batch of recorded calls; its random numbers are drawn as `FlowObjective`'s are.

    Args:
        pictures: what is trained on.
        flow: how noise levels are drawn.
        shift: scheduler shift, where `flow` names none.
        caption_dropout: share of captions replaced by the empty one, for which `pictures` need an `empty` call.
        seed: of noise levels, noise and dropout.

    Raises:
        ValueError: if captions are to be dropped and there is no empty call, or noise levels shifted by a resolution.
    """

    def __init__(
        self, pictures: CalledPictures, *, flow: FlowConfig, shift: float, caption_dropout: float, seed: int
    ) -> None:
        if caption_dropout > 0 and pictures.empty is None:
            raise ValueError(
                f"caption_dropout is {caption_dropout}, but there is no call of the empty caption; give "
                "CalledPictures(…, empty=record_call(pipeline, prompt='', …)), or set caption_dropout: 0"
            )
        if flow.shift_resolution is not None:
            raise ValueError(
                f"flow.shift_resolution is {flow.shift_resolution}, but a pipeline's latents do not tell how many "
                "pixels they stand for; leave it out, and set flow.shift"
            )
        for behind in (call.behind for call in pictures.calls):
            if behind is not None:  # gradients go through it, none of its own are wanted
                behind.model.requires_grad_(False)
        self.pictures, self.flow = pictures, flow
        self.shift = shift_for(flow, scheduler_shift=shift, pixels=0)
        self.caption_dropout, self.seed = caption_dropout, seed

    def denoiser(self, model: nn.Module) -> nn.Module:
        """Return what the loss is computed with, and so what is prepared for several processes."""
        return CallDenoiser(model)

    def losses(self, denoiser: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Compute the loss of a batch: latents `[B, …]`, the places sample `[B]` and the draws' numbers draw `[B]`.

        Raises:
            ValueError: if they are not of the same number of samples.
        """
        check_sizes(batch)
        generators = [generator_of(self.seed, number) for number in batch["draw"].tolist()]
        clean, process = batch["latents"], self.pictures.process
        noise = torch.stack([torch.randn(clean.shape[1:], generator=one) for one in generators]).to(clean.device)
        levels = draw_sigmas(generators, self.flow, shift=self.shift).to(clean.device)  # [B]
        calls = self._calls(batch["sample"].tolist(), generators)
        errors = squared_errors(denoiser, process, clean, noise, levels, calls)  # [B]
        return {"pictures": (errors * loss_weights(levels, self.flow)).mean()}

    def total(self, losses: dict[str, Tensor]) -> Tensor:
        """Return what is minimised."""
        return losses["pictures"]

    def _calls(self, samples: Sequence[int], generators: Sequence[torch.Generator]) -> list[RecordedCall]:
        """Return the calls of samples, a share of them replaced by that of the empty caption."""
        chances = [float(torch.rand(1, generator=generator)) for generator in generators]
        empty = self.pictures.empty
        return [
            self.pictures.calls[sample] if empty is None or chance >= self.caption_dropout else empty
            for sample, chance in zip(samples, chances, strict=True)
        ]


def squared_errors(
    denoiser: nn.Module, process: Process, clean: Tensor, noise: Tensor, levels: Tensor, calls: Sequence[RecordedCall]
) -> Tensor:
    """Return each sample's mean squared error `[B]`, in float32, over the values that steps change.

    Args:
        denoiser: a `CallDenoiser`, or what several processes wrapped it in.
        process: how noise is mixed in.
        clean: samples `[B, …]`.
        noise: in their shape.
        levels: noise levels `[B]`.
        calls: B of them.
    """
    predicted = denoiser(process.mix(clean, noise, levels), process.times(levels), calls)
    target = process.target(clean, noise, levels)
    moving = torch.cat([call.moving for call in calls]).to(predicted.device).flatten(1)  # [B, …]
    errors = (predicted.float() - target).square().flatten(1)
    return (errors * moving).sum(dim=1) / moving.sum(dim=1)


class CallHeldOutLoss(HeldOutLoss):
    """The held-out loss on recorded calls; see `HeldOutLoss`."""

    pictures: CalledPictures

    def _batch_error(
        self, transformer: nn.Module, pairs: list[tuple[int, int]], device: torch.device
    ) -> tuple[Tensor, int]:
        clean = torch.stack([self.pictures[picture]["latents"] for picture, _ in pairs]).to(device)  # [B, …]
        noise = torch.stack([self._noise(*pair, shape=clean.shape[1:]) for pair in pairs]).to(device)
        levels = torch.stack([self.sigmas[pair] for pair in pairs]).to(device)  # [B]
        calls = [self.pictures.calls[picture] for picture, _ in pairs]
        errors = squared_errors(CallDenoiser(transformer), self.pictures.process, clean, noise, levels, calls)  # [B]
        errors = errors.cpu().double()
        counts = torch.stack([call.moving.sum() for call in calls])
        return (errors * counts).sum(), int(counts.sum())
