"""Pre-projection and content skip for multimodal diffusion transformers.

Importing this package is cheap: torch and diffusers are imported when a name that needs them is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from mmpreproj.patching.config import PreProjConfig
    from mmpreproj.patching.control import (
        disable,
        disabled,
        enable,
        is_enabled,
        scales,
        set_scale,
        set_scaling,
        thaw,
    )
    from mmpreproj.patching.files.storage import load, push_to_hub, save
    from mmpreproj.patching.integrity import check_intact
    from mmpreproj.patching.lifecycle import patch, unpatch
    from mmpreproj.patching.lookup import adapters, is_patched, named_parameters, parameters
    from mmpreproj.patching.points.settings import PointPathConfig
    from mmpreproj.patching.positions.settings import Positions
    from mmpreproj.patching.profile import Profile, profile
    from mmpreproj.patching.report import PatchReport, report

_HOMES = {
    "PreProjConfig": "patching.config",
    "disable": "patching.control",
    "disabled": "patching.control",
    "enable": "patching.control",
    "is_enabled": "patching.control",
    "scales": "patching.control",
    "set_scale": "patching.control",
    "set_scaling": "patching.control",
    "thaw": "patching.control",
    "check_intact": "patching.integrity",
    "patch": "patching.lifecycle",
    "unpatch": "patching.lifecycle",
    "adapters": "patching.lookup",
    "is_patched": "patching.lookup",
    "named_parameters": "patching.lookup",
    "parameters": "patching.lookup",
    "PointPathConfig": "patching.points.settings",
    "Positions": "patching.positions.settings",
    "Profile": "patching.profile",
    "profile": "patching.profile",
    "PatchReport": "patching.report",
    "report": "patching.report",
    "load": "patching.files.storage",
    "push_to_hub": "patching.files.storage",
    "save": "patching.files.storage",
}

__all__ = [
    "PatchReport",
    "PointPathConfig",
    "Positions",
    "PreProjConfig",
    "Profile",
    "__version__",
    "adapters",
    "check_intact",
    "disable",
    "disabled",
    "enable",
    "is_enabled",
    "is_patched",
    "load",
    "named_parameters",
    "parameters",
    "patch",
    "profile",
    "push_to_hub",
    "report",
    "save",
    "scales",
    "set_scale",
    "set_scaling",
    "thaw",
    "unpatch",
]


def __getattr__(name: str) -> Any:
    if name == "points":  # a package, of which everything is found without a second import
        return import_module("mmpreproj.points")
    if name not in _HOMES:
        raise AttributeError(f"module 'mmpreproj' has no attribute {name!r}")
    return getattr(import_module(f"mmpreproj.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
