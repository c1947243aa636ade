"""The loss of a batch on tensors without values: whether the parts of a model fit together, and what is kept of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)

from mmpreproj.data.buckets import Size
from mmpreproj.data.encoding import EncodedPictures, LatentsInMemory, TextEmbeddings
from mmpreproj.patching.families import joint_blocks
from mmpreproj.patching.lifecycle import family_for
from mmpreproj.pipelines.prompts import check_clip_encoders
from mmpreproj.pipelines.sd3 import PreProjSD3Pipeline
from mmpreproj.pipelines.text import sequence_length
from mmpreproj.recipes.dry_run.memory import counting_saved
from mmpreproj.recipes.train.preparation import DTYPES
from mmpreproj.training.config import ConfigError, TrainConfig
from mmpreproj.training.objective import FlowObjective
from mmpreproj.training.stepper import Scheduler, make_objective

RGB = 3


@dataclass(frozen=True)
class Widths:
    """What the encoders of a pipeline give.

    Attributes:
        channels: of latents.
        cell: side of a latent cell, in pixels.
        length: of a text, in tokens.
        text: width of a token.
        pooled: width of the pooled text.
    """

    channels: int
    cell: int
    length: int
    text: int
    pooled: int


def find_widths(pipeline: PreProjSD3Pipeline, *, max_sequence_length: int) -> Widths:
    """Say what a pipeline's encoders give, and make sure that its transformer takes that.

    Raises:
        ConfigError: naming the two parts that do not fit, and their widths.
        ValueError: if an encoder is missing, or a text would be longer than one takes.
    """
    settings, vae = pipeline.transformer.config, pipeline.vae
    channels = RGB if vae is None else int(vae.config.latent_channels)
    giver = "pictures, without a VAE," if vae is None else f"the VAE ({type(vae).__name__}, latent_channels)"
    for name in ("in_channels", "out_channels"):
        _check(giver, "channels", channels, name, int(getattr(settings, name) or settings.in_channels))
    if pipeline.uses_generic_text_encoder:
        length = max_sequence_length
        if pipeline.tokenizer is not None:
            length = sequence_length(
                pipeline.text_encoder, pipeline.tokenizer, max_sequence_length=max_sequence_length
            )
        text = pooled = int(pipeline.text_encoder.config.hidden_size)
        giver = giver_of_pooled = f"the text encoder ({type(pipeline.text_encoder).__name__}, hidden_size)"
    else:
        _check_clip(pipeline)
        clips = (pipeline.text_encoder.config, pipeline.text_encoder_2.config)
        length = pipeline.tokenizer_max_length + max_sequence_length
        pooled = sum(int(clip.projection_dim) for clip in clips)
        giver_of_pooled = "text_encoder and text_encoder_2 (projection_dim, together)"
        t5 = pipeline.text_encoder_3
        text = int(settings.joint_attention_dim if t5 is None else t5.config.d_model)
        giver = "text_encoder_3 (d_model)"
        narrow = sum(int(clip.hidden_size) for clip in clips)
        if narrow > text:
            raise ConfigError(
                f"model: text_encoder and text_encoder_2 give tokens {narrow} wide (hidden_size, together), more "
                f"than the {text} of text_encoder_3 or the transformer, to which they are padded"
            )
    _check(giver, "wide tokens", text, "joint_attention_dim", int(settings.joint_attention_dim))
    _check(giver_of_pooled, "wide pooled texts", pooled, "pooled_projection_dim", int(settings.pooled_projection_dim))
    return Widths(channels, pipeline.vae_scale_factor, length, text, pooled)


def activation_bytes(
    pipeline: PreProjSD3Pipeline,
    config: TrainConfig,
    sizes: tuple[Size, ...],
    *,
    widths: Widths,
    mode: FakeTensorMode,
    device: torch.device,
) -> int:
    """Compute the loss of a batch at the smallest and at the largest size, and measure what the largest keeps.

    Args:
        pipeline: whose transformer is of fake tensors, prepared and chosen for training.
        config: the run's settings.
        sizes: of training pictures, the largest first.
        widths: of what the encoders give.
        mode: of the fake tensors.
        device: of the fake tensors.

    Returns:
        Bytes that autograd keeps; with gradient checkpointing, with what the largest block keeps.

    Raises:
        ConfigError: if the transformer cannot take such a batch.
        RuntimeError: if what it computes depends on values.
    """
    trial = _Trial(pipeline, config, widths, mode, device)
    if config.gradient_checkpointing:
        one_block = max(trial.keep(sizes[0])[1])
        pipeline.transformer.enable_gradient_checkpointing()
    else:
        one_block = 0
    for size in dict.fromkeys((sizes[-1], sizes[0])):
        total, _ = trial.keep(size)
    return total + one_block


class _Trial:
    """The objective of a run, and batches for it."""

    def __init__(
        self,
        pipeline: PreProjSD3Pipeline,
        config: TrainConfig,
        widths: Widths,
        mode: FakeTensorMode,
        device: torch.device,
    ) -> None:
        self.transformer: nn.Module = pipeline.transformer.train()
        self.config, self.widths, self.mode, self.device = config, widths, mode, device
        self.text: torch.dtype = pipeline.text_encoder.dtype
        self.blocks = list(joint_blocks(self.transformer, family_for(self.transformer, None)))
        settings = pipeline.scheduler.config
        scheduler = Scheduler(settings.get("shift", 1.0), settings.num_train_timesteps, widths.cell)
        self.objective: FlowObjective = make_objective(self._one_picture(), config, scheduler)

    def keep(self, size: Size) -> tuple[int, tuple[int, ...]]:
        """Compute a loss; return the bytes that are kept, and how many of them each block keeps."""
        denoiser = self.objective.denoiser(self.transformer)
        dtype = DTYPES[self.config.precision]
        try:
            with (
                counting_saved(self.transformer, self.blocks) as count,
                torch.autocast(self.device.type, dtype, enabled=self.config.precision != "no"),
            ):
                self.objective.total(self.objective.losses(denoiser, self._batch(size)))
                saved = count()
        except (DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException) as error:
            raise RuntimeError(
                f"a dry run cannot follow {type(self.transformer).__name__}: {error} needs values, and it has none; "
                "start the run without --dry-run"
            ) from error
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            raise ConfigError(
                f"model: its transformer cannot be trained on {self.config.batch_size} pictures of {size.width} × "
                f"{size.height} pixels with texts of {self.widths.length} tokens: {error}"
            ) from error
        return saved.total, saved.blocks

    def _batch(self, size: Size) -> dict[str, Tensor]:
        count, widths = self.config.batch_size, self.widths
        shapes: dict[str, tuple[Any, ...]] = {
            "latents": (count, widths.channels, size.height // widths.cell, size.width // widths.cell),
            "tokens": (count, widths.length, widths.text),
            "pooled": (count, widths.pooled),
            "mask": (count, widths.length),
        }
        kinds = {"tokens": self.text, "pooled": self.text, "mask": torch.bool}
        with self.mode:
            batch = {
                name: torch.empty(shape, device=self.device, dtype=kinds.get(name, torch.float32))
                for name, shape in shapes.items()
            }
        return {**batch, **self._clouds(count), "draw": torch.arange(count)}

    def _clouds(self, count: int) -> dict[str, Tensor]:
        """Make clouds with values, which the path of points looks at."""
        points = self.config.point_path
        if points is None:
            return {}
        values = torch.linspace(-1, 1, count * self.config.points.stored * (3 + points.features))
        clouds = values.reshape(count, self.config.points.stored, -1).to(self.device)  # [B, K, 3 + F]
        return {"cloud": clouds, "has_cloud": torch.ones(count, dtype=torch.bool, device=self.device)}

    def _one_picture(self) -> EncodedPictures:
        """Make a picture of nothing, which tells the objective what the empty prompt looks like."""
        widths, points = self.widths, self.config.point_path
        empty = TextEmbeddings(
            torch.zeros(1, widths.length, widths.text),
            torch.zeros(1, widths.pooled),
            torch.ones(1, widths.length, dtype=torch.bool),
        )
        picture = EncodedPictures(
            latents=LatentsInMemory(torch.zeros(1, widths.channels, 1, 1)),
            captions=("",),
            text=empty,
            text_index=torch.zeros(1, dtype=torch.long),
            empty=empty,
        )
        if points is None:
            return picture
        clouds = torch.zeros(1, self.config.points.stored, 3 + points.features)
        return picture.with_clouds(clouds, torch.ones(1, dtype=torch.bool))


def _check_clip(pipeline: PreProjSD3Pipeline) -> None:
    """Refuse a pipeline that lacks an encoder; a tokenizer that was not fetched is none that it lacks."""
    if None in (pipeline.text_encoder, pipeline.text_encoder_2):
        check_clip_encoders(pipeline)


def _check(giver: str, what: str, given: int, setting: str, taken: int) -> None:
    if given != taken:
        raise ConfigError(
            f"model: {giver} gives {given} {what}, but the transformer takes {taken} ({setting}); the parts of this "
            "pipeline do not belong together"
        )
