"""What was added to a model, in words and numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from mmpreproj.patching.layer import AttentionAdapter, PreProjLayer


@dataclass(frozen=True)
class SiteReport:
    """What one attention module received: streams by name, and the number of parameters."""

    block: int
    path: str
    projected: tuple[str, ...]
    skipped: tuple[str, ...]
    parameters: int


@dataclass(frozen=True)
class PatchReport:
    """What `patch` or `load` added to a model; `str(report)` is a short table."""

    name: str
    model_class: str
    sites: tuple[SiteReport, ...]
    base_parameters: int

    @property
    def blocks(self) -> tuple[int, ...]:
        """Indices of the patched blocks."""
        return tuple(sorted({site.block for site in self.sites}))

    @property
    def streams(self) -> tuple[str, ...]:
        """Names of the streams that pass through the adapter somewhere."""
        return tuple(sorted({stream for site in self.sites for stream in (*site.projected, *site.skipped)}))

    @property
    def parameters(self) -> int:
        """Number of parameters added."""
        return sum(site.parameters for site in self.sites)

    def __str__(self) -> str:
        lines = [
            f"adapter {self.name!r} on {self.model_class}: {len(self.blocks)} blocks, {len(self.sites)} attentions, "
            f"{self.parameters:,} parameters ({self.parameters / max(1, self.base_parameters):.1%} of the base)"
        ]
        for site in self.sites:
            projected, skipped = ", ".join(site.projected) or "-", ", ".join(site.skipped) or "-"
            lines.append(f"  {site.path}: pre-projection {projected}; skip {skipped}; {site.parameters:,}")
        return "\n".join(lines)


def describe_site(path: str, layer: PreProjLayer, name: str) -> SiteReport:
    """Describe what one attention module, at `path` in its model, carries of the adapter `name`."""
    adapter = cast(AttentionAdapter, layer.adapters[name])
    names = [stream.name for stream in layer.site.streams]
    return SiteReport(
        block=int(path.split(".")[-2]),
        path=path,
        projected=tuple(stream for stream in names if adapter.weights_of(stream) in adapter.pre_projection),
        skipped=adapter.skipped if len(adapter.content_skip) else (),
        parameters=sum(parameter.numel() for parameter in adapter.parameters()),
    )
