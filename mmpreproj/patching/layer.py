"""The module that a patched attention carries: its adapters, and which stream uses which weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import cast

import torch
from accelerate.utils import align_module_device
from torch import Tensor, nn

from mmpreproj.core.content_skip import ContentSkip
from mmpreproj.core.preprojection import PreProjection
from mmpreproj.core.rotary_gain import RotaryGain
from mmpreproj.core.scale import Scale
from mmpreproj.core.sharding import whole
from mmpreproj.patching.config import PreProjConfig
from mmpreproj.patching.families import AttentionSite, Family, Stream
from mmpreproj.patching.positions.tables import RotaryTables

SHARED = "shared"


class AttentionAdapter(nn.Module):
    """One adapter's weights on one attention module.

    `pre_projection` and `content_skip` are keyed by `"shared"`, or by stream name with `share="stream"`; `rotary_gain`
    by stream name. A module that no output would read is not made, so every parameter gets a gradient.

    Args:
        config: the adapter's settings.
        streams: the streams of this attention.
        content: whether this attention is among those with pre-projection and skip; positions are everywhere.
        skipped: names of the streams whose attention output is used, and so may carry a skip.
        widths: token width D of each stream; the same where they share weights.
        heads: number of attention heads H.
        device: where the weights are made.
        dtype: dtype of the weights.

    Attributes:
        text_length: longest text, in tokens, that the adapter was trained with; None where nothing says.
    """

    text_length: int | None = None

    def __init__(
        self,
        config: PreProjConfig,
        *,
        streams: tuple[Stream, ...],
        content: bool,
        skipped: tuple[str, ...],
        widths: Mapping[str, int],
        heads: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.config = config
        self.needs_processor = config.needs_processor
        self.skipped = skipped
        self.enabled = True
        self.suspended = 0  # by how many `disabled` blocks
        self.scale = Scale(device=device)
        self.keys = {stream.name: SHARED if config.share == "block" else stream.name for stream in streams}
        self.widths = dict(widths)
        width = {key: widths[name] for name, key in self.keys.items()}
        projected = sorted(set(self.keys.values())) if config.pre_projection and content else []
        bypassed = sorted({self.keys[name] for name in skipped}) if config.skip and content else []
        positions = config.positions
        self.rotated = tuple(name for name in self.keys if positions is not None and name in positions.streams)
        learned = self.rotated if positions is not None and positions.start == "identity" else ()
        std = config.start_std
        self.pre_projection = nn.ModuleDict(
            {
                key: PreProjection(width[key], expansion=config.expansion, init_std=std, device=device, dtype=dtype)
                for key in projected
            }
        )
        self.content_skip = nn.ModuleDict(
            {key: ContentSkip(width[key], init_std=std, device=device, dtype=dtype) for key in bypassed}
        )
        self.rotary_gain = nn.ModuleDict({name: RotaryGain(heads, device=device, dtype=dtype) for name in learned})
        self.initial_norms = self.norms()

    def forward(self, hidden_states: Tensor, stream: str) -> tuple[Tensor | None, Tensor | None]:
        """Compute what a stream's normed tokens `x_hat` `[B, N, D]` are given.

        Returns:
            The scaled increment `s · Δ(x_hat)` to the features, and the scaled skip `s · W_skip · (x_hat + Δ(x_hat))`
            to the attention output, both `[B, N, D]`; None for a part that there is not.

        Raises:
            ValueError: if tokens are not as wide as the model's row says.
        """
        if hidden_states.shape[-1] != self.widths[stream]:
            raise ValueError(
                f"the {stream} stream's tokens are {list(hidden_states.shape)}, but the adapter was made for tokens "
                f"{self.widths[stream]} wide, as the model's row says. Correct Family.width, or give that stream a "
                "width or an argument of its own"
            )
        increment, skip, key = None, None, self.keys[stream]
        features = hidden_states
        if key in self.pre_projection:
            increment = self.pre_projection[key](hidden_states)  # [B, N, D]
            features = hidden_states + increment
            increment = self.scale(increment)
        if stream in self.skipped and key in self.content_skip:
            skip = self.scale(self.content_skip[key](features))  # [B, N, D]
        return increment, skip

    def turn(self, angles: Tensor, stream: str) -> Tensor:
        """Turn a stream's table of angles `[N, P]` into those that this adapter adds, `[N, H or 1, P]`."""
        scaled = self.scale(angles)
        return self.rotary_gain[stream](scaled) if stream in self.rotary_gain else scaled[:, None]

    @property
    def takes_part(self) -> bool:
        """Whether the adapter is switched on, and in no `disabled` block."""
        return self.enabled and not self.suspended

    def projects(self, stream: str) -> bool:
        """Tell whether a stream is pre-projected."""
        return self.keys[stream] in self.pre_projection

    def gains(self) -> dict[str, float | None]:
        """Measure the mean size of each stream's rotary gains; None while they are on `meta`."""
        return {stream: mean_size(cast(RotaryGain, module)) for stream, module in self.rotary_gain.items()}

    def norms(self) -> dict[str, dict[str, float | None]]:
        """Measure `‖W_down‖_F` and `‖W_skip‖_F` per set of weights, in fp32; None while weights are on `meta`."""
        return {
            "down": {key: frobenius_norm(cast(nn.Module, module.down)) for key, module in self.pre_projection.items()},
            "skip": {key: frobenius_norm(cast(nn.Module, module.map)) for key, module in self.content_skip.items()},
        }


class PreProjLayer(nn.Module):
    """The child `preproj` of a patched attention module: its adapters by name, and what the table says of it."""

    def __init__(self, family: Family, site: AttentionSite) -> None:
        super().__init__()
        self.family = family
        self.site = site
        self.adapters = nn.ModuleDict()

    def active(self) -> Iterator[AttentionAdapter]:
        """Iterate over the adapters that take part in the forward pass."""
        for adapter in self.adapters.values():
            if adapter.takes_part:
                yield cast(AttentionAdapter, adapter)

    @property
    def needs_processor(self) -> bool:
        """Whether an adapter that takes part now has positions, or masks padding."""
        return any(adapter.needs_processor for adapter in self.active())

    def carries_skip(self, stream: str) -> bool:
        """Tell whether a stream's tokens have a way around the attention now."""
        return any(stream in adapter.skipped and len(adapter.content_skip) for adapter in self.active())

    def rotated(self) -> set[str]:
        """Name the streams whose queries and keys an adapter turns now."""
        return {stream for adapter in self.active() for stream in adapter.rotated}

    def rotation(self, stream: str, tables: Mapping[str, RotaryTables]) -> tuple[Tensor, Tensor] | None:
        """Return cosine and sine `[N, H or 1, D/2]` of what a stream's queries and keys are turned by; None for none.

        The angles of several adapters add up, `Σ sᵢ gᵢ θᵢ` with scales s and gains g. YaRN's temperature `t` is a
        factor `1 + (t - 1) · min(1, |s g|)`, so that it too is absent from a base and from a scale of 0.

        Args:
            stream: its name.
            tables: by adapter.
        """
        angles: Tensor | None = None
        factor: Tensor | None = None
        for name, table in tables.items():
            adapter = self._active_adapter(name)
            if adapter is None or stream not in adapter.rotated:
                continue
            turned = adapter.turn(getattr(table, stream), stream)  # [N, H or 1, D/2]
            angles = turned if angles is None else angles + turned
            if stream == "image" and table.temperature is not None:
                strength = adapter.turn(turned.new_ones(1, 1), stream).abs().clamp(max=1)  # [1, H or 1, 1]
                hotter = 1 + (table.temperature - 1) * strength
                factor = hotter if factor is None else factor * hotter
        if angles is None:
            return None
        cos, sin = angles.cos(), angles.sin()
        return (cos, sin) if factor is None else (cos * factor, sin * factor)

    def _active_adapter(self, name: str) -> AttentionAdapter | None:
        adapter = cast(AttentionAdapter, self.adapters[name]) if name in self.adapters else None
        return adapter if adapter is not None and adapter.takes_part else None

    def forward(self, hidden_states: Tensor, stream: str) -> tuple[Tensor, Tensor | None]:
        """Turn a stream's normed tokens `x_hat` `[B, N, D]` into features, and into what goes around attention.

        With adapters `i` of scale `sᵢ` and increment `Δᵢ`, each skip reads the features of its own adapter alone:
        `x_tilde = x_hat + Σ sᵢ Δᵢ(x_hat)` and `skip = Σ sᵢ Wᵢ (x_hat + Δᵢ(x_hat))`.

        Returns:
            `x_tilde` `[B, N, D]`, and the skip `[B, N, D]` or None.
        """
        features, bypass = hidden_states, None
        for adapter in self.active():
            increment, skip = adapter(hidden_states, stream)
            if increment is not None:
                features = features + increment
            if skip is not None:
                bypass = skip if bypass is None else bypass + skip
        return features, bypass


def frobenius_norm(linear: nn.Module) -> float | None:
    """Measure the Frobenius norm of a linear map's weight in fp32; None while it is on `meta`."""
    with torch.no_grad(), align_module_device(linear):
        weight = whole(cast(Tensor, linear.weight))
        return None if weight.is_meta else float(torch.linalg.vector_norm(weight.float()))


def mean_size(gain: RotaryGain) -> float | None:
    """Measure the mean of a gain's absolute values; None while it is on `meta`."""
    with torch.no_grad(), align_module_device(gain):
        values = whole(gain.gain)
        return None if values.is_meta else float(values.float().abs().mean())
