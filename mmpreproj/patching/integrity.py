"""Notice when something else took a patch, or a part of it, off a model without saying so.

Replacing an attention module, or clearing its hooks, raises no error: the model merely runs as its base again. So the
patched paths are noted on the model, and compared with what is there before training and generation.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from torch import nn

from mmpreproj.patching.config import PreProjConfig
from mmpreproj.patching.hooks import is_attached, layer_of
from mmpreproj.patching.layer import AttentionAdapter
from mmpreproj.patching.lookup import patched_attentions, plain_path, unwrap
from mmpreproj.patching.points.hooks import are_points_attached
from mmpreproj.patching.positions.processor import is_ours
from mmpreproj.patching.positions.root import is_root_attached

_NOTE = "_preproj_sites"


def note_sites(model: nn.Module, name: str, paths: tuple[str, ...]) -> None:
    """Note on a model which attentions an adapter was put on."""
    vars(model).setdefault(_NOTE, {})[name] = paths


def forget_sites(model: nn.Module, name: str) -> None:
    """Drop the notes of an adapter on a model and its parts, and with the last one every trace."""
    for owner in list(_owners(model)):
        notes = vars(owner)[_NOTE]
        notes.pop(name, None)
        if not notes:
            del vars(owner)[_NOTE]


def noted_adapters(model: nn.Module) -> tuple[str, ...]:
    """List the adapters that a model should carry."""
    return tuple(dict.fromkeys(name for owner in _owners(unwrap(model)) for name in vars(owner)[_NOTE]))


def check_intact(model: nn.Module) -> None:
    """Make sure that every adapter put on a model, or on a part of it, is still there and takes part.

    Raises:
        ValueError: if one is missing somewhere, or has lost its hooks; named are the adapter, the first place, and the
            way out.
    """
    for owner in _owners(unwrap(model)):
        found = {
            plain_path(path): tuple(layer_of(attention).adapters) if is_attached(attention) else ()
            for path, attention in patched_attentions(owner)
        }
        for name, paths in vars(owner)[_NOTE].items():
            lost = [path for path in paths if name not in found.get(path, ())]
            if lost:
                raise ValueError(
                    f"{type(owner).__name__} has lost the adapter {name!r} at {lost[0]} ({len(lost)} of {len(paths)} "
                    "attentions): the module was replaced or its hooks were removed after patching. Load the base "
                    "anew and patch it last, or call mmpreproj.unpatch(model) to go on without the adapter"
                )
        _check_positions(owner)
        _check_points(owner)


def _check_positions(owner: nn.Module) -> None:
    """Make sure that what an adapter's positions need at the model itself and as processors is still there."""
    needing = [(path, attention) for path, attention in patched_attentions(owner) if _needs_processor(attention)]
    if needing and not is_root_attached(owner):
        raise ValueError(
            f"{type(owner).__name__} has lost the hooks that make its positions: they were removed after patching. "
            "Load the base anew and patch it last, or call mmpreproj.unpatch(model) to go on without the adapter"
        )
    for path, attention in needing:
        if layer_of(attention).needs_processor and not is_ours(attention):  # one that is switched off has no say
            raise ValueError(
                f"{type(owner).__name__} has lost the attention processor that knows its positions at "
                f"{plain_path(path)}: {type(attention.processor).__name__} was put in its place after patching (as "
                "IP-Adapter, PAG and fuse_qkv_projections do). Undo that (model.unfuse_qkv_projections(), or "
                "set_attn_processor with the model.attn_processors of before), or call mmpreproj.unpatch(model)"
            )


def _check_points(owner: nn.Module) -> None:
    """Make sure that an adapter's point path is still there, with its hooks."""
    families = {layer_of(attention).family for _, attention in patched_attentions(owner) if _has_points(attention)}
    if not all(are_points_attached(owner, family) for family in families):
        raise ValueError(
            f"{type(owner).__name__} has lost its point path, or a hook of it: they were removed after patching. "
            "Load the base anew and patch it last, or call mmpreproj.unpatch(model) to go on without the adapter"
        )


def _needs_processor(attention: nn.Module) -> bool:
    return any(config.needs_processor for config in _configs(attention))


def _has_points(attention: nn.Module) -> bool:
    return any(config.points is not None for config in _configs(attention))


def _configs(attention: nn.Module) -> Iterator[PreProjConfig]:
    return (cast(AttentionAdapter, adapter).config for adapter in layer_of(attention).adapters.values())


def _owners(model: nn.Module) -> Iterator[nn.Module]:
    """Iterate over the modules that were patched: the model, or, where it is a wrapper, a part of it."""
    return (module for module in model.modules() if _NOTE in vars(module))
