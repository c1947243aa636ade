"""Find what was added to a model: the patched attentions, the adapters by name, their parameters."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import cast

from accelerate.utils import extract_model_from_parallel
from torch import nn

from mmpreproj.patching.families import AttentionSite, Family, joint_blocks
from mmpreproj.patching.hooks import CHILD, layer_of
from mmpreproj.patching.layer import AttentionAdapter, PreProjLayer
from mmpreproj.patching.model_part import ModelPart
from mmpreproj.patching.points.path import PointLayer
from mmpreproj.patching.positions.root import RootAdapter

# What torch.compile, checkpoint wrappers and FSDP put into a module's path when they wrap a part of a model.
_WRAPPERS = re.compile(r"(^|\.)(_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)(?=\.|$)")


def is_patched(model: nn.Module) -> bool:
    """Tell whether a model carries an adapter."""
    return any(True for _ in patched_attentions(unwrap(model)))


def adapters(model: nn.Module) -> tuple[str, ...]:
    """List the names of the adapters that a model carries."""
    layers = (layer_of(attention) for _, attention in patched_attentions(unwrap(model)))
    return tuple(dict.fromkeys(name for layer in layers for name in layer.adapters))


def named_parameters(model: nn.Module, name: str | None = None) -> Iterator[tuple[str, nn.Parameter]]:
    """Iterate over an adapter's parameters and their full names in the model.

    Args:
        model: a patched model.
        name: the adapter; None for all of them.

    Raises:
        ValueError: if the model carries no adapter, or none of that name.
    """
    model = unwrap(model)
    names = resolve_names(model, name)
    return (
        (f"{path}.adapters.{found}.{key}", parameter)
        for path, layer in model.named_modules()
        if isinstance(layer, (PreProjLayer, PointLayer))
        for found, adapter in layer.adapters.items()
        if found in names
        for key, parameter in adapter.named_parameters()
    )


def parameters(model: nn.Module, name: str | None = None) -> Iterator[nn.Parameter]:
    """Iterate over an adapter's parameters; see `named_parameters`."""
    return (parameter for _, parameter in named_parameters(model, name))


def unwrap(model: nn.Module) -> nn.Module:
    """Look through `torch.compile`, parallel wrappers and PEFT's model classes.

    Raises:
        TypeError: if the model is not a module; a pipeline is answered with its transformer's name.
    """
    if not isinstance(model, nn.Module):
        hint = "; pass its transformer, pipe.transformer" if hasattr(model, "transformer") else ""
        raise TypeError(f"expected a torch.nn.Module, got {type(model).__name__}{hint}")
    model = extract_model_from_parallel(model, keep_torch_compile=False)
    peft = sys.modules.get("peft")
    if peft is not None and isinstance(model, peft.PeftModel):
        return model.get_base_model()
    return model.base_model.model if peft is not None and isinstance(model, peft.PeftMixedModel) else model


def plain_path(path: str) -> str:
    """Write a module's path without what wrappers of its parts put in, so that files do not depend on them."""
    return _WRAPPERS.sub("", path).removeprefix(".")


def patched_attentions(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Iterate over patched attention modules and their paths in the model."""
    for path, module in model.named_modules():
        if isinstance(_child(module, CHILD), PreProjLayer):
            yield path, module


def layers_with(model: nn.Module, name: str) -> Iterator[tuple[str, PreProjLayer]]:
    """Iterate over the layers that hold an adapter, and the plain paths of their attentions."""
    for path, attention in patched_attentions(model):
        layer = layer_of(attention)
        if name in layer.adapters:
            yield plain_path(path), layer


def named_adapters(model: nn.Module, name: str) -> Iterator[tuple[str, AttentionAdapter]]:
    """Iterate over one adapter's modules and the plain paths of the attentions that carry them."""
    for path, layer in layers_with(model, name):
        yield path, cast(AttentionAdapter, layer.adapters[name])


def model_parts(model: nn.Module, name: str | None = None) -> Iterator[ModelPart]:
    """Iterate over what adapters have at the model itself, of one adapter or of all of them."""
    for module in model.modules():
        held = _child(module, "adapters")
        for found, part in held.items() if isinstance(held, nn.ModuleDict) else ():
            if isinstance(part, ModelPart) and name in (None, found):
                yield part


def root_adapters(model: nn.Module, name: str | None = None) -> Iterator[RootAdapter]:
    """Iterate over the positions that adapters have at the model itself, of one adapter or of all of them."""
    return (part for part in model_parts(model, name) if isinstance(part, RootAdapter))


def attention_sites(model: nn.Module, family: Family) -> Iterator[tuple[int, str, AttentionSite, nn.Module]]:
    """Iterate over (block index, path, site, attention) of every joint attention in a model."""
    for index, block in enumerate(joint_blocks(model, family)):
        for site in family.sites:
            attention = site.find(block)
            if attention is not None:
                yield index, f"{family.blocks}.{index}.{site.child}", site.as_in(attention), attention


def family_of(model: nn.Module) -> Family:
    """Return the row of the table that a model was patched by."""
    return next(layer_of(attention) for _, attention in patched_attentions(model)).family


def block_of(path: str) -> int:
    """Read the block's index from the plain path of an attention."""
    return split_path(path)[0]


def split_path(path: str) -> tuple[int, str]:
    """Read the block's index, and the name of the attention in the block, from the plain path of an attention."""
    parts = path.split(".")
    at = max(index for index, part in enumerate(parts) if part.isdigit())
    return int(parts[at]), ".".join(parts[at + 1 :])


def resolve_names(model: nn.Module, name: str | None) -> tuple[str, ...]:
    """Resolve an adapter's name, all there are for None.

    Raises:
        ValueError: if the model carries no adapter, or none of that name.
    """
    taken = adapters(model)
    if not taken:
        raise ValueError(f"{type(model).__name__} is not patched; call mmpreproj.patch(model, config) first")
    if name is not None and name not in taken:
        raise ValueError(f"{type(model).__name__} carries no adapter {name!r}; it carries {', '.join(taken)}")
    return taken if name is None else (name,)


def resolve_name(model: nn.Module, name: str | None) -> str:
    """Resolve an adapter's name, the only one there is for None.

    Raises:
        ValueError: if the model carries no adapter, none of that name, or several where none is named.
    """
    names = resolve_names(model, name)
    if len(names) > 1:
        raise ValueError(f"{type(model).__name__} carries several adapters, {', '.join(names)}; say which with name=…")
    return names[0]


def _child(module: nn.Module, name: str) -> nn.Module | None:
    children = module._modules
    return children[name] if name in children else None  # that of a part in TorchScript has no get
