"""Text, picture and shape in one model: what is minimised where a batch has clouds, and how it is measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmpreproj.core.flow import interpolate, spread_sigmas, velocity
from mmpreproj.data.encoding import EncodedPictures
from mmpreproj.patching.hooks import POINT_CLOUD, POINT_MASK
from mmpreproj.patching.points.path import PointAdapter
from mmpreproj.points.path import point_path, point_velocity
from mmpreproj.training.config import PointTraining
from mmpreproj.training.held_out import HeldOutLoss
from mmpreproj.training.noise import draw_sigmas, loss_weights
from mmpreproj.training.objective import FlowObjective, picture_loss


class TripletDenoiser(nn.Module):
    """A transformer with a point path, in one call for pictures and points: several processes count calls.

    Args:
        transformer: patched, with a point path.
    """

    def __init__(self, transformer: nn.Module) -> None:
        super().__init__()
        self.transformer = transformer

    def forward(self, pictures: dict[str, Any], points: dict[str, Any] | None) -> tuple[Tensor, Tensor | None]:
        """Return the velocity of pictures `[B, C, h, w]`, and that of points `[B, P, 3 + F]` where some are given.

        Args:
            pictures: arguments of the transformer.
            points: arguments of `point_velocity`.
        """
        picture = self.transformer(**pictures)[0]
        return picture, None if points is None else point_velocity(self.transformer, **points)


class TripletObjective(FlowObjective):
    """The rectified-flow losses of text→picture, (text, cloud)→picture and text→points, on the same batch.

    Pictures are shown their clouds or, for a share of them, none. Every cloud has noise of one level. Rows without a
    cloud take part with their picture alone.

    Args:
        points: how clouds are trained on.
        cloud_share: share of the training pictures that have a cloud. The loss of points is divided by it, so that it
            is the mean over clouds on average, however few a batch has and however batches are cut.
        settings: those of `FlowObjective`.

    Raises:
        ValueError: if the noise levels of points are to be shifted by a resolution.
    """

    def __init__(self, *settings: Any, points: PointTraining, cloud_share: float = 1.0, **named: Any) -> None:
        super().__init__(*settings, **named)
        if points.flow.shift_resolution is not None:
            raise ValueError(
                f"points.flow.shift_resolution is {points.flow.shift_resolution}, but points have no pixels; "
                "leave it out, and set points.flow.shift"
            )
        self.points = points
        self.cloud_share = cloud_share
        self.points_shift = points.flow.shift or 1.0

    def denoiser(self, transformer: nn.Module) -> nn.Module:
        """Return what the loss is computed with; see `TripletDenoiser`."""
        return TripletDenoiser(transformer)

    def losses(self, denoiser: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Compute the losses of a batch: `pictures`, and `points` where the path generates.

        Beside what pictures need the batch has `cloud` `[B, K, 3 + F]`, and the truth values `has_cloud` `[B]`.
        """
        transformer = inner_transformer(denoiser)
        path = point_path(transformer)
        generators = self.generators(batch)
        pictures, target, weights = self.noisy_pictures(transformer, batch, generators)
        if path.pooling is not None:
            pictures["joint_attention_kwargs"] = {
                **(pictures["joint_attention_kwargs"] or {}),
                **self.show_clouds(batch, generators, most=path.shown),
            }
        points, points_target, points_weights = None, None, None
        if path.head is not None:
            pooled = pictures["pooled_projections"]
            noisy = self.noisy_points(batch, generators, pooled=pooled, path=path)
            points, points_target, points_weights = noisy
        picture, point = denoiser(pictures, points)
        losses = {"pictures": picture_loss(picture, target, weights)}
        if point is not None and points_target is not None and points_weights is not None:
            errors = (point.float() - points_target).square().mean(dim=(1, 2))  # [B]
            there = batch["has_cloud"].to(errors.dtype)
            losses["points"] = (errors * points_weights * there).mean() / self.cloud_share
        return losses

    def total(self, losses: dict[str, Tensor]) -> Tensor:
        """Return what is minimised: the weighted sum."""
        return losses["pictures"] + (self.points.weight * losses["points"] if "points" in losses else 0.0)

    def show_clouds(
        self, batch: dict[str, Tensor], generators: Sequence[torch.Generator], *, most: int
    ) -> dict[str, Tensor]:
        """Draw what pictures are shown of their clouds, and for a random share nothing.

        Between a quarter of the points and all of `most` are shown, so that a model learns from clouds of all sizes.
        """
        shown = draw_points(batch["cloud"], most, generators)  # [B, S, 3 + F]
        kept = torch.cat([torch.rand(1, generator=generator) for generator in generators]) >= self.points.dropout
        counts = [torch.randint((most + 3) // 4, most + 1, (1,), generator=generator) for generator in generators]
        drawn = (torch.arange(most) < torch.stack(counts)).to(shown.device)  # [B, S]
        # Of a cloud with many points alike, those drawn may all be one.
        extended = (shown[..., :3] != shown[:, :1, :3]).any(dim=-1) & drawn
        there = kept.to(shown.device) & batch["has_cloud"] & extended.any(dim=1)  # [B]
        return {POINT_CLOUD: shown, POINT_MASK: drawn & there[:, None]}

    def noisy_points(
        self, batch: dict[str, Tensor], generators: Sequence[torch.Generator], *, pooled: Tensor, path: PointAdapter
    ) -> tuple[dict[str, Any], Tensor, Tensor]:
        """Draw points and noise.

        Returns:
            What the velocity is computed from, what it should be `[B, P, 3 + F]`, and what errors weigh `[B]`.
        """
        clean = path.widen(draw_points(batch["cloud"], self.points.per_step, generators))
        noise = torch.stack([torch.randn(clean.shape[1:], generator=generator) for generator in generators])
        noise = noise.to(clean.device)
        sigmas = draw_sigmas(generators, self.points.flow, shift=self.points_shift).to(clean.device)  # [B]
        inputs = {
            "points": interpolate(clean, noise, sigmas),
            "timestep": sigmas * self.timesteps,
            "pooled_projections": pooled,
        }
        return inputs, velocity(clean, noise), loss_weights(sigmas, self.points.flow)


def draw_points(clouds: Tensor, count: int, generators: Sequence[torch.Generator]) -> Tensor:
    """Draw points from clouds `[B, K, C]` with replacement, each with its generator: `[B, count, C]`."""
    places = [torch.randint(clouds.shape[1], (count,), generator=generator) for generator in generators]
    chosen = torch.stack(places).to(clouds.device)  # [B, count]
    return clouds.gather(1, chosen[..., None].expand(-1, -1, clouds.shape[-1]))


class CloudHeldOutLoss(HeldOutLoss):
    """The held-out loss of pictures that are shown a cloud.

    Args:
        pictures: encoded pictures with clouds.
        clouds: `own`, each its own; `other`, each one of another caption, the same one every time.
        settings: those of `HeldOutLoss`.

    Raises:
        ValueError: if no picture has a cloud, or with `other` not two of different captions have.
    """

    def __init__(self, pictures: EncodedPictures, *, clouds: Literal["own", "other"] = "own", **settings: Any) -> None:
        super().__init__(_with_clouds_of(pictures, others=clouds == "other"), **settings)

    def _attention_kwargs(
        self, transformer: nn.Module, batch: list[dict[str, Tensor]], device: torch.device
    ) -> dict[str, Tensor] | None:
        given = super()._attention_kwargs(transformer, batch, device) or {}
        shown = point_path(transformer).shown
        clouds = torch.stack([item["cloud"][:shown] for item in batch]).to(device)  # [B, S, 3 + F]
        return {**given, POINT_CLOUD: clouds}


class PointHeldOutLoss:
    """Mean squared error of the velocity of points, with σ uniform over (0, 1), on fixed points, levels and noise.

    Args:
        pictures: encoded pictures with clouds that are never trained on.
        per_cloud: points of each cloud.
        levels: noise levels per cloud.
        seed: of the noise.
        timesteps: the scheduler's number of training timesteps.
    """

    def __init__(
        self,
        pictures: EncodedPictures,
        *,
        per_cloud: int = 512,
        levels: int = 4,
        seed: int = 0,
        timesteps: int = 1000,
    ) -> None:
        kept = with_clouds_alone(pictures)
        items = (kept[index] for index in range(len(kept)))
        self.items = [{name: item[name] for name in ("cloud", "pooled")} for item in items]
        self.sigmas = spread_sigmas(len(self.items), levels)  # [N, K]
        self.per_cloud = per_cloud
        self.seed = seed
        self.timesteps = timesteps

    @torch.no_grad()
    def __call__(self, transformer: nn.Module) -> float:
        """Evaluate a transformer; its train/eval flag is left as it was."""
        device, was_training = next(transformer.parameters()).device, transformer.training
        transformer.eval()
        errors = [self._error(transformer, place, device) for place in range(len(self.items))]
        transformer.train(was_training)
        return sum(errors) / len(errors)

    def _error(self, transformer: nn.Module, place: int, device: torch.device) -> float:
        item, sigmas = self.items[place], self.sigmas[place].to(device)  # [K]
        clean = point_path(transformer).widen(item["cloud"][None, : self.per_cloud])
        clean = clean.expand(len(sigmas), -1, -1).to(device)  # [K, P, 3 + F]
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + place)
        noise = torch.randn(clean.shape, generator=generator).to(device)
        predicted = point_velocity(
            transformer,
            interpolate(clean, noise, sigmas),
            timestep=sigmas * self.timesteps,
            pooled_projections=item["pooled"].to(device).expand(len(sigmas), -1),
        )
        return float(F.mse_loss(predicted.float(), velocity(clean, noise)))


def inner_transformer(denoiser: nn.Module) -> nn.Module:
    """Return the transformer inside a denoiser, through whatever several processes wrapped it in."""
    return next(module for module in denoiser.modules() if isinstance(module, TripletDenoiser)).transformer


def cloud_share(pictures: EncodedPictures) -> float:
    """Measure which share of pictures has a cloud.

    Raises:
        ValueError: if none has.
    """
    return len(with_clouds_alone(pictures)) / len(pictures)


def with_clouds_alone(pictures: EncodedPictures) -> EncodedPictures:
    """Keep the pictures that have a cloud.

    Raises:
        ValueError: if none has.
    """
    flags = [] if pictures.has_cloud is None else pictures.has_cloud.tolist()
    there = [index for index, has_cloud in enumerate(flags) if has_cloud]
    if not there:
        raise ValueError("none of these pictures has a cloud")
    return pictures.subset(there)


def _with_clouds_of(pictures: EncodedPictures, *, others: bool) -> EncodedPictures:
    """Keep the pictures that have a cloud, each with its own or with that of the next one of another caption."""
    kept = with_clouds_alone(pictures)
    if not others or kept.clouds is None:
        return kept
    if len(set(kept.captions)) < 2:
        raise ValueError("there is no cloud of another caption: all held-out pictures with clouds have the same one")
    captions, count = kept.captions, len(kept.captions)
    source = []
    for place in range(count):
        ahead = ((place + step) % count for step in range(count // 2, count // 2 + count))
        source.append(next(other for other in ahead if captions[other] != captions[place]))
    return kept.with_clouds(kept.clouds[source], torch.ones(count, dtype=torch.bool))
