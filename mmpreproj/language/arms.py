"""The arms of a study: what each puts on the frozen base, saves, and takes off again."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from diffusers.training_utils import cast_training_params
from safetensors import SafetensorError
from torch import nn

from mmpreproj.language.config import ArmName, LanguageLora, StudyConfig
from mmpreproj.patching.config import PreProjConfig
from mmpreproj.patching.control import thaw
from mmpreproj.patching.files.storage import load, save
from mmpreproj.patching.lifecycle import build, patch, unpatch
from mmpreproj.patching.lookup import is_patched
from mmpreproj.training.config import ConfigError
from mmpreproj.training.trainable import named_parts

ADAPTER, LORA = "adapter", "lora"
ALL_LINEAR = "all-linear"  # PEFT's word for all but the head


@dataclass(frozen=True)
class LoraShape:
    """A LoRA of an arm.

    Attributes:
        rank: r of each pair of matrices.
        alpha: the update is scaled by `alpha / rank`.
        dropout: of what enters the matrices.
        targets: ends of the paths of the layers that get it; none for PEFT's own choice.
    """

    rank: int
    alpha: float
    dropout: float
    targets: tuple[str, ...]


@dataclass(frozen=True)
class Arm:
    """What an arm puts on the base; nothing at all for `base`.

    Attributes:
        name: as the configuration calls it.
        adapter: pre-projection and skip, or one of them; None for neither.
        lora: LoRA; None for none.
    """

    name: ArmName
    adapter: PreProjConfig | None = None
    lora: LoraShape | None = None


def make_arm(name: ArmName, model: nn.Module, config: StudyConfig) -> Arm:
    """Settle what an arm puts on a bare model; `lora_matched` gets the rank that its parameters ask for.

    LoRA is put on and taken off once, so that a mistake is told before anything is trained. The random state stays.

    Raises:
        ConfigError: if LoRA has no layers of the wanted names.
    """
    parts = name.split("+")
    projects, skips = "pre_projection" in parts, "skip" in parts
    adapter = replace(config.adapter, pre_projection=projects, skip=skips) if projects or skips else None
    if name == "lora_matched":
        return Arm(name, lora=_matched(model, config))
    if "lora" not in parts:
        return Arm(name, adapter)
    settings = config.lora
    lora = LoraShape(settings.rank, settings.alpha, settings.dropout, settings.targets)
    _count_lora(model, lora, "lora.targets")
    return Arm(name, adapter, lora)


@contextmanager
def on_model(model: nn.Module, arm: Arm, *, saved: Path | None = None) -> Iterator[nn.Module]:
    """Put an arm on a frozen model for a `with` block; afterwards the model is the base again, bit for bit.

    LoRA comes first, so that it takes the base's layers alone. What is added trains, in fp32; nothing else does. A
    model that PEFT or accelerate has left something on, as where an error came up, is the base again as well.

    Args:
        model: a bare causal language model.
        arm: what is put on it.
        saved: the folder of a trained arm, whose weights it takes; None for new ones.

    Returns:
        The model to call: PEFT's wrapper where there is LoRA.

    Raises:
        ConfigError: if LoRA has no layers of the wanted names, or a saved arm cannot be read.
    """
    model.requires_grad_(False)
    with _restored(model):
        with nullcontext() if saved is None else torch.random.fork_rng():  # a start that is overwritten draws nothing
            wrapped = _add(model, arm, saved)
        yield wrapped


def _add(model: nn.Module, arm: Arm, saved: Path | None) -> nn.Module:
    wrapped = model if arm.lora is None else _with_lora(model, arm.lora, saved)
    if arm.adapter is not None:
        patch(model, arm.adapter)
        thaw(model)
    if wrapped is not model or arm.adapter is not None:
        cast_training_params(wrapped, dtype=torch.float32)
    if arm.adapter is not None and saved is not None:
        load(model, saved / ADAPTER, replace=True)  # in place, and so in fp32
    return wrapped.train(model.training)


@contextmanager
def _restored(model: nn.Module) -> Iterator[None]:
    """Put back all that a model had of modules, modes and attributes of its own."""
    modules = [(module, dict(module._modules), module.training) for module in model.modules()]
    attributes = set(vars(model))
    try:
        yield
    finally:
        if is_patched(model):
            unpatch(model)
        for module, children, training in modules:
            module._modules.clear()
            module._modules.update(children)
            module.training = training
        for name in set(vars(model)) - attributes:  # PEFT's and accelerate's marks
            del vars(model)[name]
        model.requires_grad_(False)


def save_arm(wrapped: nn.Module, arm: Arm, folder: Path) -> None:
    """Write what an arm has on a model: `adapter/` by ourselves, `lora/` by PEFT."""
    if arm.adapter is not None:
        save(wrapped, folder / ADAPTER, card=False)
    if arm.lora is not None:
        cast(Any, wrapped).save_pretrained(folder / LORA, save_embedding_layers=False)  # or it asks the hub


def count_parameters(wrapped: nn.Module) -> int:
    """Count what an arm has added to a model."""
    return sum(parameter.numel() for _, part, parameter in named_parts(wrapped) if part in (ADAPTER, LORA))


def _with_lora(model: nn.Module, shape: LoraShape, saved: Path | None, *, field: str = "lora.targets") -> nn.Module:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)  # of transformers, for PEFT to heed
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set")  # by PEFT itself, for GPT-2's maps
        return _new_lora(model, shape, field) if saved is None else _saved_lora(model, saved / LORA)


def _new_lora(model: nn.Module, shape: LoraShape, field: str) -> nn.Module:
    peft = import_peft()
    targets: Any = list(shape.targets) or None
    if shape.targets == (ALL_LINEAR,):
        targets = ALL_LINEAR
    config = peft.LoraConfig(
        r=shape.rank,
        lora_alpha=cast(int, shape.alpha),  # PEFT's hint is int; it divides by r
        lora_dropout=shape.dropout,
        target_modules=targets,
        task_type="CAUSAL_LM",
    )
    try:
        return peft.get_peft_model(model, config)
    except (ValueError, TypeError) as error:
        given = f"{list(shape.targets)!r} cannot be used" if shape.targets else "is empty, and PEFT has no choice"
        raise ConfigError(
            f"{field}: {given} on {type(model).__name__} ({error}); give ends of the paths of its linear layers, or "
            f"{ALL_LINEAR}"
        ) from error


def _saved_lora(model: nn.Module, folder: Path) -> nn.Module:
    if not (folder / "adapter_config.json").is_file():  # PEFT would look for it on the hub
        raise ConfigError(f"{folder} has no LoRA; remove the folder that it is in, and the trial is made again")
    try:
        return import_peft().PeftModel.from_pretrained(model, folder, is_trainable=True)
    except (SafetensorError, ValueError, RuntimeError, OSError) as error:
        raise ConfigError(
            f"{folder} is damaged ({error}); remove the folder that it is in, and the trial is made again"
        ) from error


def _matched(model: nn.Module, config: StudyConfig) -> LoraShape:
    """Choose the rank with which LoRA has as many parameters as pre-projection and skip together."""
    settings: LanguageLora = config.lora
    with torch.random.fork_rng():
        wanted = sum(parameter.numel() for _, parameter in build(model, config.adapter).named_parameters())
    each = _count_lora(model, LoraShape(1, 1.0, 0.0, settings.matched_targets), "lora.matched_targets")
    rank = max(1, round(wanted / each))
    return LoraShape(rank, settings.alpha / settings.rank * rank, settings.dropout, settings.matched_targets)


def _count_lora(model: nn.Module, shape: LoraShape, field: str) -> int:
    """Count the parameters of a LoRA; the random state stays."""
    with torch.random.fork_rng(), _restored(model):
        return count_parameters(_with_lora(model, shape, None, field=field))


def import_peft() -> Any:
    """Import PEFT.

    Raises:
        ImportError: saying how it is installed.
    """
    try:
        import peft
    except ImportError as error:
        raise ImportError("LoRA needs the package 'peft'; run: pip install 'mmpreproj[lm]'") from error
    return peft
