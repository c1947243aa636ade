"""A pipeline without its weights: every module built on the `meta` device, from the small files that describe it."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import transformers
from diffusers import FlowMatchEulerDiscreteScheduler
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from torch import nn
from transformers import AutoConfig, AutoModel, AutoTokenizer

from mmpreproj.patching.control import disable, set_scale
from mmpreproj.patching.files.format import WEIGHTS_NAME, read_config
from mmpreproj.patching.files.storage import describe_base
from mmpreproj.patching.lifecycle import build, install
from mmpreproj.pipelines.adapter_folder import ADAPTER_FOLDER, find_adapter
from mmpreproj.pipelines.adapter_list import LIST_NAME, read_list
from mmpreproj.pipelines.sd3 import PreProjSD3Pipeline
from mmpreproj.recipes.scratch import build_transformer, find_minilm
from mmpreproj.recipes.train.preparation import base_dtype, prepare_pipeline
from mmpreproj.training.config import ConfigError, ScratchModel, TrainConfig

MODULES = ("transformer", "vae", "text_encoder", "text_encoder_2", "text_encoder_3")
TOKENIZERS = ("tokenizer", "tokenizer_2", "tokenizer_3")
LIBRARIES = ("diffusers", "transformers")
SMALL_FILES = ("model_index.json", "*/config.json", "scheduler/scheduler_config.json", f"{ADAPTER_FOLDER}/*.json")
WEIGHT_PATTERNS = ("*.safetensors", "*.bin")


def open_hollow(model: str | ScratchModel, *, dtype: torch.dtype, resolution: int) -> PreProjSD3Pipeline:
    """Build the pipeline that a run would load or make, with everything but weights.

    Of a hub id the small JSON files are fetched, and tokenizers are taken where the hub's cache has them; one that it
    lacks is None. An adapter that the model carries is put on from its settings.

    Args:
        model: a pipeline's folder or hub id, or the sizes of a new one.
        dtype: of the weights.
        resolution: side of the square pictures of a new model, in pixels.

    Raises:
        FileNotFoundError: if there is no pipeline at `model`, or a part of its folder is missing.
        ConfigError: if it has parts of a library that cannot be built here.
        ValueError: if its adapter is damaged or was made for another base.
        OSError: if a new model's text encoder, MiniLM, is neither installed nor to be had from the hub.
    """
    return _new(model, resolution=resolution) if isinstance(model, ScratchModel) else _Folder(model).build(dtype)


def prepare_hollow(config: TrainConfig) -> PreProjSD3Pipeline:
    """Build a run's pipeline without weights and prepare it; see `prepare_pipeline` and `open_hollow` for errors."""
    pipeline = open_hollow(config.model, dtype=base_dtype(config), resolution=config.data.resolution)
    prepare_pipeline(pipeline, config)
    return pipeline


def _new(sizes: ScratchModel, *, resolution: int) -> PreProjSD3Pipeline:
    """Build what `build_pipeline` builds."""
    source = find_minilm()
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.model_max_length = sizes.text_tokens
    settings = AutoConfig.from_pretrained(source)
    with torch.device("meta"):
        return PreProjSD3Pipeline(
            transformer=build_transformer(sizes, resolution=resolution, text_width=settings.hidden_size),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0),
            text_encoder=AutoModel.from_config(settings).eval(),
            tokenizer=tokenizer,
        )


class _Folder:
    """A pipeline's folder, or, of one on the hub, the small files of it.

    Args:
        model: the folder or hub id.
    """

    def __init__(self, model: str) -> None:
        self.model, self.is_whole = model, Path(model).exists()
        self.path = Path(model) if self.is_whole else _fetch(model)
        self.index: dict[str, Any] = json.loads(self._find("model_index.json").read_bytes())

    def build(self, dtype: torch.dtype) -> PreProjSD3Pipeline:
        """Build the pipeline."""
        parts: dict[str, Any] = {name: self._module(name, dtype) for name in MODULES if self._kind(name)}
        parts |= {name: self._tokenizer(name) for name in TOKENIZERS if self._kind(name)}
        settings = json.loads(self._find("scheduler/scheduler_config.json").read_bytes())
        pipeline = PreProjSD3Pipeline(scheduler=FlowMatchEulerDiscreteScheduler.from_config(settings), **parts)
        home = find_adapter(self.path, {})
        if home is not None:
            self._put_adapters(pipeline.transformer, home)
        return pipeline

    def _find(self, name: str) -> Path:
        path = self.path / name
        if not path.is_file():
            raise FileNotFoundError(
                f"{self.model} holds no {name}, so it is no whole pipeline; a run's folder has its model in model/ "
                "and its adapter in adapter/"
            )
        return path

    def _kind(self, name: str) -> Any:
        """Return the class of a part, None where the pipeline has none."""
        library, kind = self.index.get(name) or (None, None)
        if library is None or kind is None:
            return None
        if library not in LIBRARIES:
            raise ConfigError(
                f"model: {name} of {self.model} is a {kind} of {library}, which a dry run cannot build; it can build "
                f"parts of {' and '.join(LIBRARIES)}, so start the run without --dry-run"
            )
        module = import_module(library)
        if not hasattr(module, kind):
            raise ConfigError(
                f"model: {name} of {self.model} is a {kind}, which {library} {module.__version__} does not have"
            )
        return getattr(module, kind)

    def _module(self, name: str, dtype: torch.dtype) -> nn.Module:
        kind, settings = self._kind(name), self._find(f"{name}/config.json")
        if self.is_whole and not any(any(settings.parent.glob(pattern)) for pattern in WEIGHT_PATTERNS):
            raise FileNotFoundError(f"{settings.parent} holds no weights, so the model in {self.model} is not whole")
        with torch.device("meta"):
            if issubclass(kind, transformers.PreTrainedModel):
                module: nn.Module = kind(kind.config_class.from_pretrained(settings.parent))
            else:
                module = kind.from_config(json.loads(settings.read_bytes()))
        return nn.Module.to(module, dtype).eval()  # diffusers' own warns of what loading keeps in fp32

    def _tokenizer(self, name: str) -> Any:
        folder = self.path / name
        if folder.is_dir():
            return self._kind(name).from_pretrained(folder)
        if self.is_whole:
            raise FileNotFoundError(f"{self.model} holds no {name}/, so it is no whole pipeline")
        return None

    def _put_adapters(self, transformer: nn.Module, home: Path) -> None:
        """Put on what the model carries, as `load_adapters` does."""
        if not (home / LIST_NAME).is_file():
            self._put(transformer, home, "default")
            return
        for name, kept in read_list(home).items():
            self._put(transformer, home / name, name)
            set_scale(transformer, {name: kept.scales})
            if not kept.enabled:
                disable(transformer, name)

    def _put(self, transformer: nn.Module, folder: Path, name: str) -> None:
        saved = read_config(folder)
        if self.is_whole and not (folder / WEIGHTS_NAME).is_file():
            raise FileNotFoundError(f"{folder} holds no {WEIGHTS_NAME}, so its adapter is not whole")
        built = build(transformer, saved.config)
        found = describe_base(transformer, built.family)
        if not saved.base.fits(found):
            raise ValueError(f"the adapter in {folder} was made for {saved.base}, but this model is {found}")
        install(transformer, built, name=name)


def _fetch(model: str) -> Path:
    """Bring the small files of a hub pipeline, and no weights, into the hub's cache."""
    try:
        return Path(snapshot_download(model, allow_patterns=list(SMALL_FILES)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise FileNotFoundError(f"no model at {model!r}: no such folder here, and on the hub: {reason}") from error
