"""LoRA by PEFT, alone or beside the adapter."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any

from torch import nn

from mmpreproj.patching.control import thaw
from mmpreproj.patching.lookup import is_patched
from mmpreproj.training.config import ConfigError, LoraSettings

NAME = "default"
EVERYWHERE = "all-linear"
_BLOCK = re.compile(r"^.*?blocks\.\d+\.")


def inject_lora(transformer: nn.Module, settings: LoraSettings) -> None:
    """Put a LoRA on a Diffusers transformer, as its `add_adapter` does, under PEFT's name `default`.

    `A` is drawn from `N(0, 1/rank²)`, as in Diffusers' own training scripts for SD3, with which a baseline is to be
    comparable; `B` is zero, so the model computes what it did. PEFT freezes everything else; an adapter of ours is
    thawed again.

    Raises:
        ConfigError: naming a target that is no layer of this model, and those that are near. Nothing is changed then.
        ImportError: if PEFT is missing.
        ValueError: if there is a LoRA of that name.
    """
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise ImportError("lora needs the package 'peft'; run: pip install 'mmpreproj[lora]'") from error
    if NAME in getattr(transformer, "peft_config", {}):
        raise ValueError(
            f"this {type(transformer).__name__} carries a LoRA {NAME!r} already; take it off with "
            f"transformer.delete_adapters({NAME!r}) first"
        )
    _check_targets(transformer, settings.targets)
    alpha: Any = settings.rank if settings.alpha is None else settings.alpha  # PEFT's hint is int; it divides by r
    peft_config = LoraConfig(
        r=settings.rank,
        lora_alpha=alpha,
        lora_dropout=settings.dropout,
        target_modules=EVERYWHERE if settings.targets == (EVERYWHERE,) else list(settings.targets),
        init_lora_weights="gaussian",
    )
    transformer.add_adapter(peft_config, adapter_name=NAME)  # type: ignore[operator]
    if is_patched(transformer):
        thaw(transformer)


def lora_parameters(transformer: nn.Module) -> Iterator[nn.Parameter]:
    """Iterate over the weights of every LoRA on a model."""
    return (parameter for name, parameter in transformer.named_parameters() if is_lora(name))


def is_lora(name: str) -> bool:
    """Tell by a parameter's name whether it is LoRA's, e.g. `….to_q.lora_A.default.weight`."""
    return any(part.startswith("lora_") for part in name.split("."))


def _check_targets(transformer: nn.Module, targets: tuple[str, ...]) -> None:
    """Refuse targets that match nothing, or something that is no layer; PEFT asks for one match among all of them."""
    if not targets:
        raise ConfigError("lora.targets: is empty, so nothing would train; name layers, or all-linear")
    if targets == (EVERYWHERE,):
        return
    if EVERYWHERE in targets:
        raise ConfigError("lora.targets: all-linear stands alone; leave the others out, or name layers only")
    is_layer = {
        path: isinstance(getattr(module, "base_layer", module), (nn.Linear, nn.Conv2d))  # another LoRA's wrapping
        for path, module in transformer.named_modules()
    }
    for target in targets:
        matched = {is_layer[path] for path in is_layer if _matches(path, target)}
        if matched == {True}:
            continue
        fault = "is more than a layer" if matched else "is no layer"
        layers = [path for path in is_layer if is_layer[path]]
        raise ConfigError(
            f"lora.targets: {target!r} {fault} of this {type(transformer).__name__}; "
            f"it has {', '.join(_near(target, layers))}, …"
        )


def _matches(path: str, target: str) -> bool:
    return path == target or path.endswith(f".{target}")


def _near(target: str, layers: list[str]) -> list[str]:
    """List the ends of layers' paths that are most like a target, or those that most blocks have."""
    inside = Counter(_BLOCK.sub("", path) for path in layers)
    ends = dict.fromkeys(".".join(path.split(".")[start:]) for path in inside for start in range(path.count(".") + 1))
    return get_close_matches(target, list(ends), n=3) or [end for end, _ in inside.most_common(8)]
