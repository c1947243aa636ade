"""Patch a model, and take adapters off again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from accelerate import cpu_offload
from torch import nn

from mmpreproj.patching.config import PreProjConfig
from mmpreproj.patching.families import AttentionSite, Family, find_family, joint_blocks
from mmpreproj.patching.fitting import check_row, check_site, check_widths
from mmpreproj.patching.hooks import CHILD, attach, detach, is_attached, layer_of, without_layer
from mmpreproj.patching.integrity import forget_sites, note_sites, noted_adapters
from mmpreproj.patching.layer import AttentionAdapter, PreProjLayer
from mmpreproj.patching.lookup import (
    adapters,
    attention_sites,
    family_of,
    patched_attentions,
    resolve_names,
    unwrap,
)
from mmpreproj.patching.machinery import check_not_distributed, tell_machinery
from mmpreproj.patching.offloading import check_values_present, offloaded_to, placement
from mmpreproj.patching.points.hooks import without_points
from mmpreproj.patching.points.life import build_points, check_room_for_points, put_points, remove_points
from mmpreproj.patching.points.path import POINT_CHILD, PointAdapter
from mmpreproj.patching.positions.life import add_positions, remove_positions, settle_positions, without_positions
from mmpreproj.patching.report import PatchReport, report


def patch(
    model: nn.Module, config: PreProjConfig | None = None, *, name: str = "default", family: Family | None = None
) -> PatchReport:
    """Add pre-projection and content skip to a model's attention, in place.

    In an adaLN block the attention branch is gated, and the skip joins it before the gate:
    `x + gate ⊙ (attention(x_tilde) + W_skip · x_tilde)`. With a gate of 1 that is the paper's equation to the letter.
    Several adapters, under different names, are summed; see `set_scale`. New weights take the device and dtype of the
    attention they join; nothing of the base changes.

    Args:
        model: of a known family, e.g. `SD3Transformer2DModel`, `LlamaForCausalLM`; compiled and parallel wrappers are
            looked through.
        config: the adapter's settings; defaults to `PreProjConfig()`.
        name: what the adapter is called on this model; it never enters a saved file.
        family: a row of your own for a model that the table does not know.

    Returns:
        A report of blocks, streams and parameters.

    Raises:
        TypeError: if the table does not know the model, or `config` is something else.
        ValueError: if the model already carries an adapter of that name, the config does not fit the model, it is
            shared by several processes already, or group offloading keeps it on disk.

    Source: arXiv 2604.10791; gate placement as stated above.
    """
    wrapper, model = model, unwrap(model)
    if config is not None and not isinstance(config, PreProjConfig):
        raise TypeError(f"config must be a PreProjConfig; got {config!r}. A name is given as name=…")
    check_not_distributed(wrapper)
    check_new_name(model, name)
    check_values_present(model)
    config = config or PreProjConfig()
    check_room_for_points(model, config)
    install(model, build(model, config, family=family), name=name)
    return report(model, name=name)


def unpatch(model: nn.Module, name: str | None = None) -> None:
    """Take an adapter off; after the last one, parameters, hooks and state-dict keys are the base's, bit for bit.

    Args:
        model: a patched model.
        name: the adapter to remove; None removes all there are.

    Raises:
        ValueError: if the model carries no adapter, none of that name, or group offloading keeps it on disk.
    """
    model = unwrap(model)
    there = tuple(dict.fromkeys((*adapters(model), *noted_adapters(model))))  # with what was lost without a word
    wanted = there if name is None else (name,)
    names = wanted if wanted and set(wanted) <= set(there) else resolve_names(model, name)
    check_values_present(model)
    for _, attention in list(patched_attentions(model)):
        layer = layer_of(attention)
        for removed in names:
            if removed in layer.adapters:
                del layer.adapters[removed]
        if not layer.adapters:
            detach(attention)
    for removed in names:
        remove_points(model, removed)
        remove_positions(model, removed)
        forget_sites(model, removed)
    tell_machinery(model)


@contextmanager
def detached(model: nn.Module) -> Iterator[nn.Module]:
    """Take the adapters off for the length of a `with` block, for instance to save the base alone."""
    bare = unwrap(model)
    with ExitStack() as stack:
        stack.enter_context(without_points(bare))  # the model's last child, and so the last to be put back
        stack.enter_context(without_positions(bare))
        for _, attention in list(patched_attentions(bare)):
            stack.enter_context(without_layer(attention))
        yield bare


@dataclass(frozen=True)
class BuiltAdapter:
    """An adapter that has been made for a model and is not yet on it.

    Attributes:
        family: the row of the table.
        config: the adapter's settings, with what they leave to the model.
        sites: by the path of the attention it will join.
        points: its point path, None for none.
    """

    family: Family
    config: PreProjConfig
    sites: dict[str, tuple[AttentionSite, nn.Module, AttentionAdapter]]
    points: PointAdapter | None = None

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Iterate over its parameters and their keys in a file."""
        for path, (_, _, adapter) in self.sites.items():
            for key, parameter in adapter.named_parameters():
                yield f"{path}.{CHILD}.{key}", parameter
        if self.points is not None:
            for key, parameter in self.points.named_parameters():
                yield f"{POINT_CHILD}.{key}", parameter


def build(model: nn.Module, config: PreProjConfig, *, family: Family | None = None) -> BuiltAdapter:
    """Make an adapter for a model without touching the model; see `patch` for arguments and errors."""
    with torch.inference_mode(False):  # or the weights could never be changed
        return _build(model, config, family_for(model, family))


def _build(model: nn.Module, config: PreProjConfig, family: Family) -> BuiltAdapter:
    config = settle_positions(model, config, family)
    depth = len(joint_blocks(model, family))
    wanted = config.block_indices(depth)
    sites = {}
    for index, path, site, attention in attention_sites(model, family):
        content = index in wanted and (config.dual_attention or not site.dual)
        if content or config.needs_processor:
            check_site(path, site, attention)
            check_widths(config, family, path, site, attention)
            skipped = family.skipped(model, site, attention, last=index == depth - 1)
            adapter = _build_adapter(config, family, site, attention, content=content, skipped=skipped)
            sites[path] = (site, attention, adapter)
    if not sites:
        children = ", ".join(site.child for site in family.sites)
        raise TypeError(
            f"{type(model).__name__} has no joint attention in {family.blocks} (looked for: {children}); another one "
            "is described by a row of your own, family=…"
        )
    return BuiltAdapter(family, config, sites, build_points(model, config, family))


def install(model: nn.Module, built: BuiltAdapter, *, name: str) -> None:
    """Put a built adapter onto its model."""
    for site, attention, adapter in built.sites.values():
        device = offloaded_to(attention)
        if device is not None:
            cpu_offload(adapter, execution_device=device)
        if not is_attached(attention):
            attach(attention, PreProjLayer(built.family, site).train(attention.training))
        layer_of(attention).adapters[name] = adapter.train(attention.training)
    add_positions(model, built.family, built.config, name=name)
    if built.points is not None:
        put_points(model, built.family, built.points, name=name)
    note_sites(model, name, tuple(built.sites))
    tell_machinery(model)


def check_new_name(model: nn.Module, name: str) -> None:
    """Refuse a name that no adapter can have, or that one has already.

    Raises:
        ValueError: naming the way out.
    """
    if not isinstance(name, str) or not name or "." in name:
        raise ValueError(f"name must be a non-empty string without dots; got {name!r}")
    if hasattr(nn.ModuleDict, name) or hasattr(nn.ModuleDict(), name):
        raise ValueError(f"name must not be an attribute of torch modules, such as {name!r}; choose another")
    if name in adapters(model):
        raise ValueError(
            f"{type(model).__name__} is already patched under the name {name!r}; choose another name, call "
            f"mmpreproj.unpatch(model, {name!r}) first, or swap a saved one in with load(…, name=…, replace=True)"
        )


def family_for(model: nn.Module, family: Family | None) -> Family:
    """Choose the row of the table for a model: the one it was patched by, the given one, or its class's.

    Raises:
        TypeError: if the table does not know the model, or the row is none or names what the model has not.
        ValueError: if the model was patched by another row than the given one, or that does not fit the model.
    """
    if not (family is None or isinstance(family, Family)):
        raise TypeError(
            f"family must be a mmpreproj.patching.families.Family, a row that describes the model; got {family!r}"
        )
    if not any(True for _ in patched_attentions(model)):
        if family is None:
            return find_family(model)
        check_row(model, family)
        return family
    present = family_of(model)
    if family is not None and family != present:
        raise ValueError(
            f"{type(model).__name__} was patched by the row for {present.model_class}; a second adapter cannot use "
            "another row. Call mmpreproj.unpatch(model) first"
        )
    return present


def _build_adapter(
    config: PreProjConfig,
    family: Family,
    site: AttentionSite,
    attention: nn.Module,
    *,
    content: bool,
    skipped: tuple[str, ...],
) -> AttentionAdapter:
    device, dtype = placement(attention)
    return AttentionAdapter(
        config,
        streams=site.streams,
        content=content,
        skipped=skipped,
        widths={stream.name: family.width_of(attention, stream) for stream in site.streams},
        heads=family.heads_of(attention),
        device=device,
        dtype=dtype,
    )
