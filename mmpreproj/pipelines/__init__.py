"""Pipelines: diffusers' own, with the adapter saved and loaded beside the base."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mmpreproj.pipelines.sd3 import PreProjSD3Pipeline
    from mmpreproj.pipelines.shapes import PreProjShapePipeline

_HOMES = {"PreProjSD3Pipeline": "sd3", "PreProjShapePipeline": "shapes"}

__all__ = ["PreProjSD3Pipeline", "PreProjShapePipeline"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'mmpreproj.pipelines' has no attribute {name!r}")
    return getattr(import_module(f"mmpreproj.pipelines.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
