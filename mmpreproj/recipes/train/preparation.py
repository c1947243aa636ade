"""The pipeline that a run trains: loaded or made new, checked against the configuration, and patched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from mmpreproj.patching.config import PreProjConfig
from mmpreproj.patching.files.storage import adapter_config
from mmpreproj.patching.lifecycle import patch
from mmpreproj.patching.lookup import adapters, family_of, is_patched, parameters
from mmpreproj.patching.positions.life import settle_positions
from mmpreproj.patching.report import report
from mmpreproj.patching.text_length import set_text_length
from mmpreproj.pipelines.latents import largest_side
from mmpreproj.pipelines.length import LENGTH_KEY
from mmpreproj.pipelines.sd3 import PreProjSD3Pipeline
from mmpreproj.recipes.loading import open_pipeline
from mmpreproj.recipes.scratch import build_pipeline
from mmpreproj.training.config import ConfigError, ScratchModel, TrainConfig
from mmpreproj.training.lora import inject_lora, lora_parameters
from mmpreproj.training.trainable import check_strength
from mmpreproj.training.weights import trains_base

DTYPES = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def open_base(config: TrainConfig) -> PreProjSD3Pipeline:
    """Load or build the pipeline that a run trains, with the adapter it may carry."""
    if isinstance(config.model, ScratchModel):
        return build_pipeline(config.model, resolution=config.data.resolution)
    return open_pipeline(config.model, dtype=base_dtype(config))


def base_dtype(config: TrainConfig) -> torch.dtype:
    """Say which dtype the base is loaded in: that of the autocast where it is frozen, else fp32."""
    return DTYPES[config.precision] if config.mode == "probe" else torch.float32


def prepare_pipeline(
    pipeline: PreProjSD3Pipeline, config: TrainConfig, *, say: Callable[[str], None] = lambda line: None
) -> None:
    """Check a pipeline against a configuration, and put on its transformer what the run trains.

    Args:
        pipeline: as `open_base` gives it; it may be without weights.
        config: the run's settings.
        say: told what was put on.

    Raises:
        ConfigError: if the picture size does not fit, or the model carries an adapter of another configuration.
    """
    multiple = pipeline.vae_scale_factor * pipeline.transformer.config.patch_size
    _check_sides(config, multiple)
    if config.adapter is None and is_patched(pipeline.transformer):
        raise ConfigError(
            f"adapter: null trains a stock model, but the model in {config.model} carries an adapter; give the "
            "adapter's settings to train it on, or name the base without it"
        )
    if config.adapter is not None:
        _check_strength(pipeline, config)
        adapter = _with_base_size(config.adapter, patches=config.data.resolution // multiple)
        if _patch_or_continue(pipeline, config, adapter):
            say(f"training on the adapter that the model in {config.model} carries")
        first, *others = str(report(pipeline.transformer)).splitlines()
        for line in (first, *(other for other in others if other.startswith(("  positions", "  padding")))):
            say(line)
    if config.lora is not None:
        inject_lora(pipeline.transformer, config.lora)
        count = sum(parameter.numel() for parameter in lora_parameters(pipeline.transformer))
        say(f"LoRA of rank {config.lora.rank}: {count:,} parameters")
    _check_positions(pipeline, config)
    _note_length(pipeline, config)


def _check_sides(config: TrainConfig, multiple: int) -> None:
    for side in config.data.resolutions:
        if side % multiple:
            field = "resolution" if side == config.data.resolution else "more_resolutions"
            raise ConfigError(
                f"data.{field}: {side} pixels cannot be cut into patches; this model takes multiples of {multiple}"
            )


def _note_length(pipeline: PreProjSD3Pipeline, config: TrainConfig) -> None:
    """Keep the length of texts with what the run saves; of a LoRA alone, `config.yaml` is all that keeps it."""
    if is_patched(pipeline.transformer):
        set_text_length(pipeline.transformer, config.max_sequence_length)
    if trains_base(config):
        pipeline.register_to_config(**{LENGTH_KEY: config.max_sequence_length})


def _check_positions(pipeline: PreProjSD3Pipeline, config: TrainConfig) -> None:
    largest = largest_side(pipeline.transformer, vae_scale_factor=pipeline.vae_scale_factor)
    if max(config.data.resolutions) > largest:
        raise ConfigError(
            f"data.resolution: {max(config.data.resolutions)} pixels are more than this model has positions for; "
            f"it takes {largest} at most"
        )


def _check_strength(pipeline: PreProjSD3Pipeline, config: TrainConfig) -> None:
    if len(adapters(pipeline.transformer)) == 1:
        try:
            check_strength(pipeline.transformer, config.mode)
        except ValueError as error:
            raise ConfigError(f"adapter: of the model in {config.model}: {error}, and save the model") from error


def _patch_or_continue(pipeline: PreProjSD3Pipeline, config: TrainConfig, adapter: PreProjConfig) -> bool:
    """Patch the transformer, or keep the adapter it carries; tell whether it carried one."""
    if not is_patched(pipeline.transformer):
        _check_absolute(config, adapter)
        patch(pipeline.transformer, adapter)
        _check_weights(pipeline, config)
        return False
    names = adapters(pipeline.transformer)
    if len(names) > 1:
        raise ConfigError(
            f"adapter: the model in {config.model} carries several, {', '.join(names)}, and a run trains one; load it "
            "with PreProjSD3Pipeline, take the others off with mmpreproj.unpatch(pipe.transformer, name), save it to "
            "another folder and name that, or name the base"
        )
    (name,) = names
    found = adapter_config(pipeline.transformer, name)
    wanted = settle_positions(pipeline.transformer, adapter, family_of(pipeline.transformer))
    if found != wanted:
        raise ConfigError(
            f"adapter: the model in {config.model} carries an adapter already, made with other settings: "
            f"{_differences(found, wanted)}. To train it on, give the same settings; to start anew, name the base "
            "without it; a point path is added to a trained adapter by mmpreproj.points.add_point_path and saved "
            "with the model"
        )
    return True


def _differences(found: PreProjConfig, wanted: PreProjConfig) -> str:
    there, asked = found.to_dict(), wanted.to_dict()
    return "; ".join(f"{key} {there[key]!r}, asked for {asked[key]!r}" for key in there if there[key] != asked[key])


def _with_base_size(adapter: PreProjConfig, *, patches: int) -> PreProjConfig:
    """Let a scaling of positions begin beyond the pictures that are trained on, unless its base is given."""
    positions = adapter.positions
    if positions is None or positions.scaling == "none" or positions.base_size is not None:
        return adapter
    return replace(adapter, positions=replace(positions, base_size=patches))


def _check_absolute(config: TrainConfig, adapter: PreProjConfig) -> None:
    """Refuse to take from a frozen base the positions that it was trained with."""
    removed = adapter.positions is not None and adapter.positions.absolute == "remove"
    if config.mode == "probe" and removed:
        raise ConfigError(
            "adapter.positions.absolute: 'remove' takes from the base the positions that it was trained with, and "
            "mode 'probe' leaves the base as it is; set absolute: keep, or mode: full"
        )


def _check_weights(pipeline: PreProjSD3Pipeline, config: TrainConfig) -> None:
    """Refuse an adapter with nothing to train before anything is encoded."""
    alone = config.mode == "probe" and config.lora is None and not config.thaw
    if alone and not any(True for _ in parameters(pipeline.transformer)):
        raise ConfigError(
            "adapter: has no weights, and mode 'probe' trains them alone: pre_projection and skip are off and its "
            "positions are whole from the start; set positions.start: identity, or mode: full"
        )
