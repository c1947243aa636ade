"""Models from where people keep them: a pipeline's folder, an adapter's folder, or a hub id."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from mmpreproj.patching.files.format import CONFIG_NAME, read_config
from mmpreproj.patching.files.storage import load
from mmpreproj.patching.lifecycle import unpatch
from mmpreproj.patching.lookup import is_patched
from mmpreproj.pipelines.adapter_folder import load_adapters
from mmpreproj.pipelines.adapter_list import LIST_NAME, read_list
from mmpreproj.pipelines.sd3 import PreProjSD3Pipeline
from mmpreproj.training.lora import lora_parameters


def open_pipeline(model: str, *, dtype: torch.dtype) -> PreProjSD3Pipeline:
    """Load a pipeline, with the adapter it may carry.

    Args:
        model: a pipeline's folder or hub id.
        dtype: of the weights.

    Raises:
        FileNotFoundError: if there is no pipeline at `model`.
    """
    folder = Path(model)
    if folder.exists() and not (folder / "model_index.json").is_file():
        raise FileNotFoundError(
            f"{model} holds neither a pipeline (model_index.json) nor an adapter ({CONFIG_NAME}); a run's folder has "
            "its model in model/ and its adapter in adapter/"
        )
    try:
        return PreProjSD3Pipeline.from_pretrained(model, dtype=dtype)
    except (OSError, ValueError) as error:
        if folder.exists():
            raise
        reason = str(error).splitlines()[0]
        raise FileNotFoundError(f"no model at {model!r}: no such folder here, and on the hub: {reason}") from error


def load_pipeline(
    model: str, *, adapter: str | None = None, lora: str | None = None, dtype: torch.dtype = torch.float32
) -> PreProjSD3Pipeline:
    """Load a pipeline, and an adapter and a LoRA onto it.

    Args:
        model: a pipeline's folder or hub id; or an adapter's folder, whose base is then loaded from where its
            `adapter_config.json` says.
        adapter: an adapter's folder or hub id, or the `preproj/` of a pipeline with several; it takes the place of
            those that `model` may carry.
        lora: a LoRA's folder, file or hub id, in the form that diffusers reads.
        dtype: of the weights.

    Raises:
        FileNotFoundError: if there is neither a pipeline nor an adapter at `model`.
        ValueError: if the adapter does not say where its base is, or was made for another base; or if the LoRA is not
            one, or not for this transformer.
    """
    folder = Path(model)
    several = (folder / LIST_NAME).is_file()
    if several or (folder / CONFIG_NAME).is_file():
        if adapter is not None:
            raise ValueError(f"{model} is an adapter itself; give its base as --model, or leave --adapter out")
        model, adapter = _base_of(folder / next(iter(read_list(folder))) if several else folder), model
        if not Path(model).is_dir() and (Path(model).is_absolute() or model.count("/") != 1):
            raise FileNotFoundError(
                f"the adapter in {folder} was trained on {model!r}, which is not found from here; name its base as "
                f"--model and {folder} as --adapter"
            )
    pipeline = open_pipeline(model, dtype=dtype)
    if adapter is not None:
        if is_patched(pipeline.transformer):
            unpatch(pipeline.transformer)
        if (Path(adapter) / LIST_NAME).is_file():
            load_adapters(pipeline.transformer, Path(adapter))
        else:
            load(pipeline.transformer, adapter)
    if lora is not None:
        _load_lora(pipeline, lora)
    return pipeline


def _load_lora(pipeline: PreProjSD3Pipeline, lora: str) -> None:
    if not Path(lora).exists() and (Path(lora).is_absolute() or lora.count("/") != 1):
        raise FileNotFoundError(f"no LoRA at {lora!r}: no such folder or file, and no hub id such as owner/name")
    try:
        with _without_warnings():
            found = pipeline.lora_state_dict(lora)
            pipeline.load_lora_weights(lora)
    except OSError as error:
        raise FileNotFoundError(f"no LoRA at {lora!r}: {_first_line(error)}") from error
    except (ValueError, RuntimeError) as error:
        reason = _first_line(error, passing_over="Error(s) in loading")
        raise ValueError(f"the LoRA in {lora} does not fit this transformer: {reason}") from error
    # By number, since several libraries write LoRAs, each with names of its own. Scales and biases are no matrices.
    matrices = sum(value.ndim > 1 for name, value in found.items() if name.startswith("transformer."))
    placed = sum(parameter.ndim > 1 for parameter in lora_parameters(pipeline.transformer))
    if not placed:
        raise ValueError(f"the LoRA in {lora} has nothing for this transformer; it was made for another model")
    if placed < matrices:
        raise ValueError(
            f"the LoRA in {lora} has layers that this transformer does not: {matrices - placed} of its {matrices} "
            "matrices have no place; it was made for another model"
        )


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Keep diffusers from warning of text encoders that a LoRA leaves alone, and of faults that are raised as well."""
    logger = logging.getLogger("diffusers")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _first_line(error: Exception, *, passing_over: str | None = None) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[1] if passing_over is not None and lines[0].startswith(passing_over) and len(lines) > 1 else lines[0]


def _base_of(folder: Path) -> str:
    base = read_config(folder).base.name_or_path
    if not base:
        raise ValueError(
            f"{folder / CONFIG_NAME} does not say where its base is; name the base as --model, {folder} as --adapter"
        )
    return base
