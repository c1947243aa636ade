"""What a study starts from: the language model, its texts and its tasks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import PartialState
from torch import nn

from mmpreproj.language.config import LanguageModel, StudyConfig
from mmpreproj.language.evaluation.scoring import longest_input
from mmpreproj.language.evaluation.tasks import Task, read_task
from mmpreproj.language.texts.packing import PackedText, pack_text
from mmpreproj.patching.families import find_family
from mmpreproj.pipelines.identity import fingerprint
from mmpreproj.recipes.probe.progress import StudyReporter
from mmpreproj.training.config import ConfigError


@dataclass(frozen=True)
class Inputs:
    """What every trial of a study uses.

    Attributes:
        model: the bare language model.
        tokenizer: its tokenizer.
        identity: a digest of the model, which differs where its outputs would.
        texts: packed, by name.
        tasks: from local files.
    """

    model: nn.Module
    tokenizer: Any
    identity: str
    texts: Mapping[str, PackedText]
    tasks: tuple[Task, ...]


def open_inputs(config: StudyConfig, reporter: StudyReporter) -> Inputs:
    """Open a study's model, texts and tasks; what is quick to check comes first.

    Raises:
        ConfigError: if a length is more than the model reads, a text cannot be used, or the model is of no kind that
            can be patched.
        FileNotFoundError: if a task's file or the model is not there.
        ValueError: if a task's file is damaged.
    """
    tasks = tuple(_read_task(config, number) for number in range(len(config.evaluation.tasks)))
    tokenizer = _load(config.model, "AutoTokenizer")
    texts = {}
    for name, source in config.texts.items():
        with PartialState().main_process_first():  # what it has packed is read by the others
            texts[name] = pack_text(source, tokenizer, length=config.training.length, origin=f"texts.{name}")
        counts = texts[name].counts
        told = ", ".join(f"{counts[part].tokens:,} tokens of {part}" for part in counts)
        reporter.say(f"{name}: {told}; {len(texts[name].train):,} blocks of {config.training.length}")
    model = _load(config.model, "AutoModelForCausalLM", dtype=getattr(torch, config.model.dtype))
    try:
        find_family(model)
    except TypeError as error:
        raise ConfigError(f"model: {config.model.name}: {error}") from error
    _check_lengths(config, model, tokenizer)
    model.eval().requires_grad_(False)
    return Inputs(model, tokenizer, fingerprint(SimpleNamespace(model=model), ("model",)), texts, tasks)


def _read_task(config: StudyConfig, number: int) -> Task:
    given = config.evaluation.tasks[number]
    try:
        return read_task(
            given.file.expanduser(), kind=given.kind, name=given.called, prompt_suffix=given.prompt_suffix
        )
    except FileNotFoundError as error:
        raise FileNotFoundError(f"evaluation.tasks.{number}: {error}") from error
    except ValueError as error:
        raise ConfigError(f"evaluation.tasks.{number}: {error}") from error


def _load(given: LanguageModel, kind: str, **further: Any) -> Any:
    import transformers

    try:
        loaded = getattr(transformers, kind).from_pretrained(
            given.name, revision=given.revision or "main", gguf_file=given.gguf_file, **further
        )
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        place = "cannot be opened" if Path(given.name).exists() else "no such folder here, and on the hub"
        raise ConfigError(f"model: {given.name!r}: {place}: {reason}") from error
    if given.gguf_file is not None and hasattr(loaded, "hf_quantizer"):  # its weights are widened, so it is no GGUF
        loaded.hf_quantizer, loaded.is_quantized = None, False
        del loaded.config.quantization_config
    return loaded


def _check_lengths(config: StudyConfig, model: nn.Module, tokenizer: Any) -> None:
    longest = longest_input(model, tokenizer)
    for field, length in (
        ("training.length", config.training.length),
        ("evaluation.length", config.evaluation.length),
    ):
        if length > longest:
            raise ConfigError(f"{field}: {length} tokens, and {config.model.name} reads {longest}; give at most that")
