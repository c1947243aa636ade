"""Pre-projection and content skip for multimodal diffusion transformers.

Importing this package is cheap: torch and diffusers are imported when a name that needs them is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from mmpreproj.patching.config import PreProjConfig
    from mmpreproj.patching.lifecycle import (
        adapters,
        is_patched,
        named_parameters,
        parameters,
        patch,
        unpatch,
    )
    from mmpreproj.patching.profile import Profile, profile
    from mmpreproj.patching.report import PatchReport
    from mmpreproj.patching.storage import load, save

_HOMES = {
    "PreProjConfig": "patching.config",
    "PatchReport": "patching.report",
    "adapters": "patching.lifecycle",
    "is_patched": "patching.lifecycle",
    "named_parameters": "patching.lifecycle",
    "parameters": "patching.lifecycle",
    "patch": "patching.lifecycle",
    "unpatch": "patching.lifecycle",
    "Profile": "patching.profile",
    "profile": "patching.profile",
    "load": "patching.storage",
    "save": "patching.storage",
}

__all__ = [
    "PatchReport",
    "PreProjConfig",
    "Profile",
    "__version__",
    "adapters",
    "is_patched",
    "load",
    "named_parameters",
    "parameters",
    "patch",
    "profile",
    "save",
    "unpatch",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'mmpreproj' has no attribute {name!r}")
    return getattr(import_module(f"mmpreproj.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
