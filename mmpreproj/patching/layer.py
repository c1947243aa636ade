"""The module that a patched attention carries: its adapters, and which stream uses which weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
from accelerate.utils import align_module_device
from torch import Tensor, nn

from mmpreproj.core.content_skip import ContentSkip
from mmpreproj.core.preprojection import PreProjection
from mmpreproj.patching.config import PreProjConfig
from mmpreproj.patching.families import AttentionSite, Family, Stream

SHARED = "shared"


class AttentionAdapter(nn.Module):
    """One adapter's weights on one attention module.

    `pre_projection` and `content_skip` are keyed by `"shared"`, or by stream name with `share="stream"`. A module
    that no output would read is not made, so every parameter gets a gradient.

    Args:
        config: the adapter's settings.
        streams: the streams of this attention.
        skipped: names of the streams whose attention output is used, and so may carry a skip.
        width: token width D.
        device: where the weights are made.
        dtype: dtype of the weights.
    """

    def __init__(
        self,
        config: PreProjConfig,
        *,
        streams: tuple[Stream, ...],
        skipped: tuple[str, ...],
        width: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.config = config
        self.skipped = skipped
        projected = sorted({self.weights_of(stream.name) for stream in streams}) if config.pre_projection else []
        bypassed = sorted({self.weights_of(name) for name in skipped}) if config.skip else []
        std = config.start_std
        self.pre_projection = nn.ModuleDict(
            {
                key: PreProjection(width, expansion=config.expansion, init_std=std, device=device, dtype=dtype)
                for key in projected
            }
        )
        self.content_skip = nn.ModuleDict(
            {key: ContentSkip(width, init_std=std, device=device, dtype=dtype) for key in bypassed}
        )
        self.initial_norms = self.norms()

    def weights_of(self, stream: str) -> str:
        """Name the weights that a stream uses."""
        return SHARED if self.config.share == "block" else stream

    def features(self, hidden_states: Tensor, stream: str) -> Tensor:
        """Turn normed tokens `x_hat` `[B, N, D]` of a stream into features `x_tilde` `[B, N, D]`."""
        key = self.weights_of(stream)
        if key not in self.pre_projection:
            return hidden_states
        return hidden_states + self.pre_projection[key](hidden_states)

    def bypass(self, features: Tensor, stream: str) -> Tensor | None:
        """Compute what a stream's features `x_tilde` `[B, N, D]` add to its attention output; None for nothing."""
        key = self.weights_of(stream)
        if stream not in self.skipped or key not in self.content_skip:
            return None
        return self.content_skip[key](features)

    def norms(self) -> dict[str, dict[str, float | None]]:
        """Measure `‖W_down‖_F` and `‖W_skip‖_F` per set of weights, in fp32; None while weights are on `meta`."""
        return {
            "down": {key: frobenius_norm(cast(nn.Module, module.down)) for key, module in self.pre_projection.items()},
            "skip": {key: frobenius_norm(cast(nn.Module, module.map)) for key, module in self.content_skip.items()},
        }


class PreProjLayer(nn.Module):
    """The child `preproj` of a patched attention module: its adapters by name, and what the table says of it.

    The hooks in `patching.hooks` call it before and after the attention; it keeps nothing between the two calls.
    """

    def __init__(self, family: Family, site: AttentionSite) -> None:
        super().__init__()
        self.family = family
        self.site = site
        self.adapters = nn.ModuleDict()

    def active(self) -> Iterator[AttentionAdapter]:
        """Iterate over the adapters that take part in the forward pass."""
        return cast(Iterator[AttentionAdapter], iter(self.adapters.values()))

    def features(self, hidden_states: Tensor, stream: str) -> Tensor:
        """Turn normed tokens `x_hat` `[B, N, D]` of a stream into features `x_tilde` `[B, N, D]`."""
        for adapter in self.active():
            hidden_states = adapter.features(hidden_states, stream)
        return hidden_states

    def add_bypass(self, attention_output: Tensor, features: Tensor, stream: str) -> Tensor:
        """Add `W_skip · x_tilde` to a stream's attention output, both `[B, N, D]`."""
        for adapter in self.active():
            skipped = adapter.bypass(features, stream)
            if skipped is not None:
                attention_output = attention_output + skipped
        return attention_output


def frobenius_norm(linear: nn.Module) -> float | None:
    """Measure the Frobenius norm of a linear map's weight in fp32; None while it is on `meta`."""
    with torch.no_grad(), align_module_device(linear):
        weight = linear.weight
        return None if weight.is_meta else float(torch.linalg.vector_norm(weight.float()))
