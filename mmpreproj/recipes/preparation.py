"""The pipeline that a run trains: loaded or made new, checked against the configuration, and patched."""

from __future__ import annotations

from dataclasses import replace

import torch

from mmpreproj.patching.config import PreProjConfig
from mmpreproj.patching.files.storage import adapter_config
from mmpreproj.patching.lifecycle import patch
from mmpreproj.patching.lookup import adapters, family_of, is_patched, parameters
from mmpreproj.patching.positions.life import settle_positions
from mmpreproj.patching.report import report
from mmpreproj.pipelines.latents import largest_side
from mmpreproj.pipelines.sd3 import PreProjSD3Pipeline
from mmpreproj.recipes.loading import open_pipeline
from mmpreproj.recipes.progress import Reporter
from mmpreproj.recipes.scratch import build_pipeline
from mmpreproj.training.config import ConfigError, ScratchModel, TrainConfig
from mmpreproj.training.optimisation import check_strength

DTYPES = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def prepare_pipeline(config: TrainConfig, reporter: Reporter) -> PreProjSD3Pipeline:
    """Load or build the pipeline and patch its transformer.

    Raises:
        ConfigError: if the picture size does not fit, or the model carries an adapter of another configuration.
    """
    if isinstance(config.model, ScratchModel):
        pipeline = build_pipeline(config.model, resolution=config.data.resolution)
    else:
        dtype = DTYPES[config.precision] if config.mode == "probe" else torch.float32
        pipeline = open_pipeline(config.model, dtype=dtype)
    multiple = pipeline.vae_scale_factor * pipeline.transformer.config.patch_size
    if config.data.resolution % multiple:
        raise ConfigError(
            f"data.resolution: {config.data.resolution} pixels cannot be cut into patches; this model takes multiples "
            f"of {multiple}"
        )
    if config.adapter is None and is_patched(pipeline.transformer):
        raise ConfigError(
            f"adapter: null trains a stock model, but the model in {config.model} carries an adapter; give the "
            "adapter's settings to train it on, or name the base without it"
        )
    if config.adapter is not None:
        _check_strength(pipeline, config)
        adapter = _with_base_size(config.adapter, patches=config.data.resolution // multiple)
        continued = _patch_or_continue(pipeline, config, adapter)
        if continued:
            reporter.say(f"training on the adapter that the model in {config.model} carries")
        first, *others = str(report(pipeline.transformer)).splitlines()
        for line in (first, *(other for other in others if other.startswith(("  positions", "  padding")))):
            reporter.say(line)
    _check_positions(pipeline, config)
    return pipeline


def _check_positions(pipeline: PreProjSD3Pipeline, config: TrainConfig) -> None:
    largest = largest_side(pipeline.transformer, vae_scale_factor=pipeline.vae_scale_factor)
    if config.data.resolution > largest:
        raise ConfigError(
            f"data.resolution: {config.data.resolution} pixels are more than this model has positions for; it takes "
            f"{largest} at most"
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
    if config.mode == "probe" and not any(True for _ in parameters(pipeline.transformer)):
        raise ConfigError(
            "adapter: has no weights, and mode 'probe' trains them alone: pre_projection and skip are off and its "
            "positions are whole from the start; set positions.start: identity, or mode: full"
        )
