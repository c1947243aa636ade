"""Bring offloaded weights to where they are computed with, for what does not go through a module's own call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from accelerate.hooks import CpuOffload
from torch import nn


def diffusers_hook(module: nn.Module, name: str) -> Any:
    """Return the diffusers hook of that name on a module, None if there is none."""
    registry = getattr(module, "_diffusers_hook", None)
    return None if registry is None else registry.get_hook(name)


@contextmanager
def onloaded(module: nn.Module) -> Iterator[None]:
    """Bring a module's weights to where they are computed with, for a `with` block, if they are offloaded by group.

    For what calls a module's children rather than itself, which its hook does not see. What accelerate offloads whole
    is brought along too, and stays; what it offloads leaf by leaf needs nothing.
    """
    whole = getattr(module, "_hf_hook", None)
    for part in getattr(whole, "hooks", (whole,)):
        if isinstance(part, CpuOffload):
            part.pre_forward(module)
    hook = diffusers_hook(module, "group_offloading")
    if hook is None:
        yield
        return
    hook.group.onload_()
    if hook.group.stream is not None:
        hook.group.stream.synchronize()
    try:
        yield
    finally:
        hook.group.offload_()
