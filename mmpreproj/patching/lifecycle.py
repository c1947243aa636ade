"""Patch a model, find what was added, take it off again."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
from accelerate.utils import extract_model_from_parallel
from torch import nn

from mmpreproj.patching.config import PreProjConfig
from mmpreproj.patching.families import AttentionSite, Family, find_family, joint_blocks
from mmpreproj.patching.hooks import CHILD, attach, detach, layer_of
from mmpreproj.patching.layer import AttentionAdapter, PreProjLayer
from mmpreproj.patching.report import PatchReport, describe_site


def patch(
    model: nn.Module, config: PreProjConfig | None = None, *, name: str = "default", family: Family | None = None
) -> PatchReport:
    """Add pre-projection and content skip to a model's joint attention, in place.

    In an adaLN block the attention branch is gated, and the skip joins it before the gate:
    `x + gate ⊙ (attention(x_tilde) + W_skip · x_tilde)`. With a gate of 1 that is the paper's equation to the letter.
    New weights take the device and dtype of the attention they join; nothing of the base changes.

    Args:
        model: a transformer of a known family, e.g. `SD3Transformer2DModel`; compiled and parallel wrappers are
            looked through.
        config: the adapter's settings; defaults to `PreProjConfig()`.
        name: what the adapter is called on this model; it never enters a saved file.
        family: a row of your own for a model that the table does not know.

    Returns:
        A report of blocks, streams and parameters.

    Raises:
        TypeError: if the model has no joint-attention blocks.
        ValueError: if the model already carries an adapter, or the config does not fit the model.

    Source: arXiv 2604.10791; gate placement as stated above.
    """
    config = PreProjConfig() if config is None else config
    model = unwrap(model)
    family = find_family(model) if family is None else family
    _check_name(model, name)
    layers = _build_layers(model, config, name=name, family=family)
    for attention, layer in layers.values():
        attach(attention, layer)
    _forget_compiled_graphs()
    return report(model, name=name)


def unpatch(model: nn.Module, name: str | None = None) -> None:
    """Take the adapter off again: parameters, hooks and state-dict keys are the base's, bit for bit.

    Args:
        model: a patched model.
        name: the adapter to remove; None removes whichever there is.

    Raises:
        ValueError: if the model carries no adapter, or none of that name.
    """
    model = unwrap(model)
    resolve_name(model, name)
    for _, attention in list(patched_attentions(model)):
        detach(attention)
    _forget_compiled_graphs()


def is_patched(model: nn.Module) -> bool:
    """Tell whether a model carries an adapter."""
    return any(True for _ in patched_attentions(unwrap(model)))


def adapters(model: nn.Module) -> tuple[str, ...]:
    """List the names of the adapters that a model carries."""
    layers = (layer_of(attention) for _, attention in patched_attentions(unwrap(model)))
    return tuple(dict.fromkeys(name for layer in layers for name in layer.adapters))


def named_parameters(model: nn.Module, name: str | None = None) -> Iterator[tuple[str, nn.Parameter]]:
    """Iterate over the adapter's parameters and their full names in the model.

    Raises:
        ValueError: if the model carries no adapter, or none of that name.
    """
    model = unwrap(model)
    name = resolve_name(model, name)
    return (
        (f"{path}.{CHILD}.adapters.{name}.{key}", parameter)
        for path, adapter in named_adapters(model, name)
        for key, parameter in adapter.named_parameters()
    )


def parameters(model: nn.Module, name: str | None = None) -> Iterator[nn.Parameter]:
    """Iterate over the adapter's parameters; see `named_parameters`."""
    return (parameter for _, parameter in named_parameters(model, name))


@contextmanager
def detached(model: nn.Module) -> Iterator[nn.Module]:
    """Take the adapters off for the length of a `with` block, for instance to save the base alone."""
    bare = unwrap(model)
    layers = [(attention, detach(attention)) for _, attention in list(patched_attentions(bare))]
    try:
        yield bare
    finally:
        for attention, layer in layers:
            attach(attention, layer)


def family_of(model: nn.Module) -> Family:
    """Return the row of the table that a model was patched by."""
    return next(layer_of(attention) for _, attention in patched_attentions(model)).family


def report(model: nn.Module, *, name: str | None = None) -> PatchReport:
    """Describe the adapter that a model carries.

    Raises:
        ValueError: if the model carries no adapter, or none of that name.
    """
    model = unwrap(model)
    name = resolve_name(model, name)
    sites = tuple(describe_site(path, layer, name) for path, layer in _layers_with(model, name))
    added = sum(site.parameters for site in sites)
    total = sum(parameter.numel() for parameter in model.parameters())
    return PatchReport(name, type(model).__name__, sites, total - added)


def unwrap(model: nn.Module) -> nn.Module:
    """Look through `torch.compile` and parallel wrappers.

    Raises:
        TypeError: if the model is not a module; a pipeline is answered with its transformer's name.
    """
    if not isinstance(model, nn.Module):
        hint = "; pass its transformer, pipe.transformer" if hasattr(model, "transformer") else ""
        raise TypeError(f"expected a torch.nn.Module, got {type(model).__name__}{hint}")
    return extract_model_from_parallel(model, keep_torch_compile=False)


def patched_attentions(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Iterate over patched attention modules and their paths."""
    for path, module in model.named_modules():
        if isinstance(module._modules.get(CHILD), PreProjLayer):
            yield path, module


def named_adapters(model: nn.Module, name: str) -> Iterator[tuple[str, AttentionAdapter]]:
    """Iterate over one adapter's modules and the paths of the attentions that carry them."""
    for path, layer in _layers_with(model, name):
        yield path, cast(AttentionAdapter, layer.adapters[name])


def attention_sites(model: nn.Module, family: Family) -> Iterator[tuple[int, str, AttentionSite, nn.Module]]:
    """Iterate over (block index, path, site, attention) of every joint attention in a model."""
    for index, block in enumerate(joint_blocks(model, family)):
        for site in family.sites:
            attention = getattr(block, site.child, None)
            if attention is not None:
                yield index, f"{family.blocks}.{index}.{site.child}", site, attention


def _build_layers(
    model: nn.Module, config: PreProjConfig, *, name: str, family: Family
) -> dict[str, tuple[nn.Module, PreProjLayer]]:
    """Make every layer before any is attached, so that a failure leaves the model untouched."""
    wanted = config.block_indices(len(joint_blocks(model, family)))
    layers = {}
    for index, path, site, attention in attention_sites(model, family):
        if index in wanted and (config.dual_attention or not site.dual):
            _check_site(path, site, attention)
            layer = PreProjLayer(family, site)
            layer.adapters[name] = _build_adapter(config, site, attention, family.width)
            layer.train(attention.training)
            layers[path] = (attention, layer)
    if not layers:
        children = ", ".join(site.child for site in family.sites)
        raise TypeError(f"{type(model).__name__} has no joint attention in {family.blocks} (looked for: {children})")
    return layers


def _check_site(path: str, site: AttentionSite, attention: nn.Module) -> None:
    """Refuse an attention that the adapter would not reach."""
    arguments = inspect.signature(type(attention).forward).parameters
    for stream in site.streams:
        if stream.argument not in arguments:
            raise ValueError(
                f"{path} takes no argument {stream.argument!r} for the {stream.name} stream; its forward takes "
                f"{', '.join(list(arguments)[1:])}. Correct the family's row"
            )
    offloaded = any(parameter.is_meta for parameter in attention.parameters())
    if offloaded and any(hasattr(module, "_hf_hook") for module in attention.modules()):
        raise ValueError(
            f"{path} has been offloaded by accelerate, so new weights would never be brought in; patch or load first, "
            "then offload (accelerate.hooks.remove_hook_from_submodules(model) undoes it)"
        )


def _build_adapter(config: PreProjConfig, site: AttentionSite, attention: nn.Module, width: str) -> AttentionAdapter:
    device, dtype = _placement(attention)
    return AttentionAdapter(
        config,
        streams=site.streams,
        skipped=tuple(stream.name for stream in site.streams if not stream.is_discarded(attention)),
        width=getattr(attention, width),
        device=device,
        dtype=dtype,
    )


def _placement(attention: nn.Module) -> tuple[torch.device, torch.dtype]:
    """Choose where new weights live: device and dtype of the attention, fp32 where its own dtype is a storage one."""
    device = torch.device("cpu")
    for parameter in attention.parameters():
        device = parameter.device
        if parameter.dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            return device, parameter.dtype
    return device, torch.float32


def _layers_with(model: nn.Module, name: str) -> Iterator[tuple[str, PreProjLayer]]:
    for path, attention in patched_attentions(model):
        layer = layer_of(attention)
        if name in layer.adapters:
            yield path, layer


def _forget_compiled_graphs() -> None:
    """Have `torch.compile` look again: it does not notice hooks that come and go after a model has run compiled."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def _check_name(model: nn.Module, name: str) -> None:
    if not isinstance(name, str) or not name or "." in name:
        raise ValueError(f"name must be a non-empty string without dots; got {name!r}")
    if hasattr(nn.ModuleDict, name) or hasattr(nn.ModuleDict(), name):
        raise ValueError(f"name must not be an attribute of torch modules, such as {name!r}; choose another")
    taken = adapters(model)
    if name in taken:
        raise ValueError(
            f"{type(model).__name__} is already patched under the name {name!r}; call mmpreproj.unpatch(model) first"
        )
    if taken:
        raise ValueError(
            f"{type(model).__name__} already carries the adapter {taken[0]!r}, and one at a time is "
            "supported; call mmpreproj.unpatch(model) first"
        )


def resolve_name(model: nn.Module, name: str | None) -> str:
    """Resolve an adapter's name, the only one there is for None."""
    taken = adapters(model)
    if not taken:
        raise ValueError(f"{type(model).__name__} is not patched; call mmpreproj.patch(model, config) first")
    if name is not None and name not in taken:
        raise ValueError(f"{type(model).__name__} carries no adapter {name!r}; it carries {', '.join(taken)}")
    return taken[0] if name is None else name
