"""Check that a row of the table fits a model, before anything is changed."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from inspect import Parameter
from typing import Any

from torch import nn

from mmpreproj.core.sharding import is_sharded
from mmpreproj.patching.config import PreProjConfig
from mmpreproj.patching.families import AttentionSite, Family, Stream, joint_blocks
from mmpreproj.patching.hooks import CHILD
from mmpreproj.patching.layer import PreProjLayer
from mmpreproj.patching.lookup import attention_sites

_POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


def check_row(model: nn.Module, family: Family) -> None:
    """Refuse a row of one's own that names what a model has not.

    What only a call can show, the width of tokens and the order of outputs, is checked when the model first runs.

    Raises:
        TypeError: if blocks or attentions are not there, or are something else.
        ValueError: if an argument, an attribute or a setting is not there, or has no valid value.
    """
    blocks = joint_blocks(model, family)
    for site in family.sites:
        _check_child(model, blocks, family, site)
    seen: dict[int, str] = {}
    for index, path, site, attention in attention_sites(model, family):
        if id(attention) in seen:
            raise ValueError(
                f"{seen[id(attention)]} and {path} are one and the same module, which cannot have an adapter of each "
                "block's own; give each block its own attention (copy.deepcopy), or leave these blocks out of the row"
            )
        seen[id(attention)] = path
        check_site(path, site, attention)
        for stream in site.streams:
            _check_position(path, stream, attention)
            family.width_of(attention, stream)
        family.width_of(attention)
        family.heads_of(attention)
        family.skipped(model, site, attention, last=index == len(blocks) - 1)
    _check_settings(model, family)


def check_site(path: str, site: AttentionSite, attention: nn.Module) -> None:
    """Refuse an attention that the adapter would not reach.

    Raises:
        ValueError: if it does not take a stream's argument, has an attribute of the adapter's name, or is
            sharded already.
    """
    arguments = _arguments(attention)
    for stream in site.streams:
        if stream.argument not in arguments and not _names_none(arguments.values()):
            raise ValueError(
                f"{path} takes no argument {stream.argument!r} for the {stream.name} stream; its forward takes "
                f"{', '.join(list(arguments)[1:])}. Correct the family's row, Stream.argument"
            )
    own = getattr(attention, CHILD, None)
    if hasattr(attention, CHILD) and not isinstance(own, PreProjLayer):
        raise ValueError(
            f"{path} has a {CHILD!r} of its own ({type(own).__name__}), which is what an adapter is called there. "
            "Rename it in the model"
        )
    if any(is_sharded(parameter) for parameter in attention.parameters()):
        raise ValueError(
            f"{path} is sharded across processes already, and what is added now would not be kept equal among them; "
            "patch first, then shard"
        )


def check_widths(config: PreProjConfig, family: Family, path: str, site: AttentionSite, attention: nn.Module) -> None:
    """Refuse one set of weights for streams of different widths.

    Raises:
        ValueError: naming the setting that serves them.
    """
    widths = {stream.name: family.width_of(attention, stream) for stream in site.streams}
    if config.share == "block" and len(set(widths.values())) > 1:
        found = " and ".join(f"{stream} {width}" for stream, width in widths.items())
        raise ValueError(
            f"share must be 'stream' for {family.model_class}: the streams of {path} have different widths ({found}), "
            "which one set of weights cannot serve; got share='block'"
        )


def _check_child(model: nn.Module, blocks: nn.ModuleList, family: Family, site: AttentionSite) -> None:
    found = [site.find(block) for block in blocks]
    if all(attention is None for attention in found) and not site.dual:
        children = ", ".join(dict.fromkeys(name for block in blocks for name, _ in block.named_children()))
        raise TypeError(
            f"{type(model).__name__} has no joint attention in {family.blocks} (looked for: {site.child}). Correct "
            f"AttentionSite.child; the children of these blocks are {children or 'none'}"
        )
    for index, attention in enumerate(found):
        path = f"{family.blocks}.{index}.{site.child}"
        if not isinstance(attention, (nn.Module, type(None))):
            raise TypeError(
                f"AttentionSite.child={site.child!r}: {path} is {type(attention).__name__}, no torch.nn.Module, and "
                "hooks need one; move the attention into a child module of the block"
            )
        if attention is not None and type(attention).forward is nn.Module.forward:
            raise TypeError(
                f"AttentionSite.child={site.child!r}: {path} is {type(attention).__name__}, which has no forward, and "
                "so is never called; name the module that is called with the normed tokens, or make one, as "
                "docs/own_models.md shows"
            )


def _check_position(path: str, stream: Stream, attention: nn.Module) -> None:
    parameters = list(_arguments(attention).values())[1:]
    positional = [parameter.name for parameter in parameters if parameter.kind in _POSITIONAL]
    if stream.argument in positional:
        expected = positional.index(stream.argument)
        if stream.position != expected:
            raise ValueError(
                f"position of the {stream.name} stream is {stream.position}, but {path} takes {stream.argument!r} at "
                f"place {expected} of {', '.join(positional)}. Correct Stream.position"
            )
    elif any(parameter.name == stream.argument for parameter in parameters) and stream.position < len(positional):
        raise ValueError(
            f"position of the {stream.name} stream is {stream.position}, where {path} takes "
            f"{positional[stream.position]!r}; {stream.argument!r} is taken by keyword alone, so set Stream.position "
            f"to {len(positional)} or more"
        )


def _arguments(attention: nn.Module) -> Mapping[str, Parameter]:
    """Return what the forward of an attention takes, `self` with it."""
    return inspect.signature(type(attention).forward).parameters


def _names_none(parameters: Iterable[Parameter]) -> bool:
    """Tell whether a forward takes whatever it is given, `(self, *args, **kwargs)`, as many wrapped ones do."""
    kinds = [parameter.kind for parameter in list(parameters)[1:]]
    return set(kinds) <= {Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD}


def _check_settings(model: nn.Module, family: Family) -> None:
    config: Any = getattr(model, "config", None)
    for key in family.settings:
        if not (key in config if isinstance(config, Mapping) else hasattr(config, key)):
            problem = (
                "has no config to read it from"
                if config is None
                else f"does not have it in its {type(config).__name__}"
            )
            raise ValueError(
                f"Family.settings names {key!r}, but {type(model).__name__} {problem}. Give model.config that entry, "
                "or take the name out of settings"
            )
    family.settings_of(model)
