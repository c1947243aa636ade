"""What was added to a model, in words and numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from torch import nn

from mmpreproj.patching.layer import AttentionAdapter, PreProjLayer
from mmpreproj.patching.lookup import block_of, layers_with, named_adapters, parameters, resolve_name, unwrap
from mmpreproj.patching.points.hooks import path_of
from mmpreproj.patching.points.settings import PointPathConfig
from mmpreproj.patching.positions.settings import Positions


@dataclass(frozen=True)
class SiteReport:
    """What one attention module received: streams by name, and the number of parameters."""

    block: int
    path: str
    projected: tuple[str, ...]
    skipped: tuple[str, ...]
    parameters: int
    rotated: tuple[str, ...] = ()


@dataclass(frozen=True)
class PatchReport:
    """What `patch` or `load` added to a model; `str(report)` is a short table."""

    name: str
    model_class: str
    sites: tuple[SiteReport, ...]
    base_parameters: int
    notes: tuple[str, ...] = ()
    positions: Positions | None = None
    mask_padding: bool = False
    points: PointPathConfig | None = None
    point_parameters: int = 0

    @property
    def blocks(self) -> tuple[int, ...]:
        """Indices of the patched blocks."""
        return tuple(sorted({site.block for site in self.sites}))

    @property
    def streams(self) -> tuple[str, ...]:
        """Names of the streams that pass through the adapter somewhere."""
        parts = (part for site in self.sites for part in (site.projected, site.skipped, site.rotated))
        return tuple(sorted({stream for part in parts for stream in part}))

    @property
    def parameters(self) -> int:
        """Number of parameters added, those of the point path included."""
        return sum(site.parameters for site in self.sites) + self.point_parameters

    def __str__(self) -> str:
        lines = [
            f"adapter {self.name!r} on {self.model_class}: {len(self.blocks)} blocks, {len(self.sites)} attentions, "
            f"{self.parameters:,} parameters ({self.parameters / max(1, self.base_parameters):.1%} of the base)"
        ]
        for site in self.sites:
            projected, skipped = ", ".join(site.projected) or "-", ", ".join(site.skipped) or "-"
            rotated = f"; positions {', '.join(site.rotated)}" if site.rotated else ""
            lines.append(f"  {site.path}: pre-projection {projected}; skip {skipped}{rotated}; {site.parameters:,}")
        if self.positions is not None:
            settings = (f"{key} {value}" for key, value in self.positions.to_dict().items())
            lines.append(f"  positions: {', '.join(settings)}")
        if self.points is not None:
            settings = (f"{key} {value}" for key, value in self.points.to_dict().items())
            lines.append(f"  points: {', '.join(settings)}; {self.point_parameters:,}")
        if self.mask_padding:
            lines.append("  padding of texts is masked by our trainer and pipeline")
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])


def report(model: nn.Module, *, name: str | None = None) -> PatchReport:
    """Describe an adapter that a model carries, the only one there is for None.

    Raises:
        ValueError: if the model carries no adapter, none of that name, or several where none is named.
    """
    model = unwrap(model)
    name = resolve_name(model, name)
    sites = tuple(_describe_site(path, layer, name) for path, layer in layers_with(model, name))
    added = sum(parameter.numel() for parameter in parameters(model))
    base = sum(parameter.numel() for parameter in model.parameters()) - added
    config = next(adapter.config for _, adapter in named_adapters(model, name))
    notes = _notes(model, name)
    points = path_of(model, name)
    return PatchReport(
        name,
        type(model).__name__,
        sites,
        base,
        notes=notes,
        positions=config.positions,
        mask_padding=config.mask_padding,
        points=config.points,
        point_parameters=0 if points is None else sum(parameter.numel() for parameter in points.parameters()),
    )


def _describe_site(path: str, layer: PreProjLayer, name: str) -> SiteReport:
    adapter = cast(AttentionAdapter, layer.adapters[name])
    streams = [stream.name for stream in layer.site.streams]
    return SiteReport(
        block=block_of(path),
        path=path,
        projected=tuple(stream for stream in streams if adapter.projects(stream)),
        skipped=adapter.skipped if len(adapter.content_skip) else (),
        parameters=sum(parameter.numel() for parameter in adapter.parameters()),
        rotated=adapter.rotated,
    )


def _notes(model: nn.Module, name: str) -> tuple[str, ...]:
    """Say where the adapter's weights are kept in another dtype than the base's."""
    own = {id(parameter) for parameter in parameters(model)}
    adapter = {parameter.dtype for parameter in parameters(model, name)}
    base = {parameter.dtype for parameter in model.parameters() if id(parameter) not in own and parameter.ndim > 1}
    if base <= adapter or not adapter:
        return ()
    words = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in adapter))
    others = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in base - adapter))
    return (f"the adapter is {words}; the base is kept in {others} too, which the adapter takes no part in",)
