"""Attention with positions against a slow float64 reference.

The reference is written from the docstrings of `Positions` and `core/rotary.py`, in numpy, and calls nothing of the
package; it reads weights by their names in the state dict.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from positions_kit import (
    SCALINGS,
    TEXTS,
    output,
    picture,
    watched,
)
from torch import nn

import mmpreproj
from mmpreproj import Positions, PreProjConfig

# The reference

Weights = dict[str, np.ndarray]
MAPS = {"image": ("to_{}", "norm_{}", "to_out.0"), "text": ("add_{}_proj", "norm_added_{}", "to_add_out")}
MISTAKES = (
    "rows and columns exchanged",
    "pairs of distant channels",
    "turned before the norm",
    "keys turned backwards",
    "values turned",
    "text not turned",
    "image not turned",
    "text has the image's table",
    "attn2 not turned",
    "one gain for all heads",
    "from the corner",
    "no temperature",
)


@dataclass(frozen=True)
class Adapter:
    """What the reference must know of an adapter beside its weights."""

    name: str
    positions: Positions
    scale: float = 1.0


def linear(w: Weights, name: str, x: np.ndarray) -> np.ndarray:
    return np.einsum("oi,bni->bno", w[f"{name}.weight"], x) + w.get(f"{name}.bias", 0.0)


def axis_angle(place: int, count: int, pair: int, width: int, positions: Positions, mistake: str) -> float:
    """Angle of pair `pair` of an axis with `width` channels, for patch `place` of `count`."""
    speed = positions.theta ** (-2 * pair / width)
    if positions.scaling == "none" or count <= positions.base_size:
        return (place - (0 if mistake == "from the corner" else math.ceil(count / 2))) * speed
    base = positions.base_size
    stretch = (count - 1) / (base - 1)
    place = place - stretch * math.ceil(base / 2)
    if positions.scaling == "linear":
        return place / stretch * speed
    if positions.scaling == "ntk":
        return place * (positions.theta * stretch ** (width / (width - 2))) ** (-2 * pair / width)
    kept = min(1, max(0, (base * speed / (2 * math.pi) - 1) / 31))
    return place * (kept * speed + (1 - kept) * speed / stretch)


def image_table(rows: int, columns: int, width: int, positions: Positions, mistake: str) -> np.ndarray:
    """Angles `[N, D/2]`: the first half of the pairs by the row, the second by the column."""
    table = np.zeros((rows, columns, width // 2))
    for row, column, pair in np.ndindex(table.shape):
        by_row = (pair < width // 4) != (mistake == "rows and columns exchanged")
        place, count = (row, rows) if by_row else (column, columns)
        table[row, column, pair] = axis_angle(place, count, pair % (width // 4), width // 2, positions, mistake)
    return table.reshape(rows * columns, -1)


def text_table(length: int, rows: int, columns: int, width: int, positions: Positions) -> np.ndarray:
    """Angles `[L, D/2]`: on one axis, or on both of the image's after its diagonal."""
    table = np.zeros((length, width // 2))
    limit = positions.base_size if positions.scaling != "none" else math.inf
    start = max(int(min(rows, limit)) // 2, int(min(columns, limit)) // 2)
    for token, pair in np.ndindex(table.shape):
        if positions.text == "1d":
            table[token, pair] = token * positions.theta ** (-2 * pair / width)
        else:
            table[token, pair] = (start + token) * positions.theta ** (-2 * (pair % (width // 4)) / (width // 2))
    return table


def temperature(rows: int, columns: int, positions: Positions, mistake: str) -> float:
    if positions.scaling != "yarn" or mistake == "no temperature":
        return 1.0
    stretches = [max(1, (count - 1) / (positions.base_size - 1)) for count in (rows, columns)]
    return 0.1 * math.log(math.sqrt(math.prod(stretches))) + 1


def turn(x: np.ndarray, angles: np.ndarray, factor: np.ndarray, mistake: str) -> np.ndarray:
    """Turn `[B, N, H, D]` by angles `[N, H, D/2]`, pair by pair with a 2 × 2 matrix, and multiply by `[H]`."""
    half, turned = x.shape[-1] // 2, np.zeros_like(x)
    for token, head, pair in np.ndindex(angles.shape):
        cos, sin = math.cos(angles[token, head, pair]), math.sin(angles[token, head, pair])
        channels = [pair, half + pair] if mistake == "pairs of distant channels" else [2 * pair, 2 * pair + 1]
        matrix = factor[head] * np.array([[cos, -sin], [sin, cos]])
        turned[:, token, head, channels] = x[:, token, head, channels] @ matrix.T
    return turned


def rms_norm(w: Weights, name: str, x: np.ndarray) -> np.ndarray:
    if f"{name}.weight" not in w:
        return x
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * w[f"{name}.weight"]


class Reference:
    """One attention with positions of several adapters, image tokens first."""

    def __init__(
        self, model: nn.Module, grid: tuple[int, int, int], adapters: list[Adapter], mistake: str = ""
    ) -> None:
        self.w = {key: value.double().numpy() for key, value in model.state_dict().items()}
        self.grid, self.adapters, self.mistake, self.heads, self.width = grid, adapters, mistake, 2, 16

    def angles(self, path: str, stream: str, count: int) -> tuple[np.ndarray, np.ndarray]:
        """`Σ sᵢ gᵢ θᵢ` `[N, H, D/2]`, and the factor `[H]` on queries and keys."""
        rows, columns, length = self.grid
        total, factor = np.zeros((count, self.heads, self.width // 2)), np.ones(self.heads)
        skipped = (f"{stream} not turned", f"{path.split('.')[-1]} not turned")
        for adapter in self.adapters if self.mistake not in skipped else []:
            kind = adapter.positions
            if getattr(kind, stream) == "none":
                continue
            gain = self.w.get(f"{path}.preproj.adapters.{adapter.name}.rotary_gain.{stream}.gain", np.ones(self.heads))
            gain = adapter.scale * (gain.mean() * np.ones(self.heads) if "one gain" in self.mistake else gain)
            if stream == "image" or self.mistake == "text has the image's table":
                table = image_table(rows, columns, self.width, kind, self.mistake)[:count]
            else:
                table = text_table(length, rows, columns, self.width, kind)
            total += table[:, None] * gain[:, None]
            if stream == "image":
                heat = temperature(rows, columns, kind, self.mistake) - 1
                factor *= 1 + heat * np.minimum(1, np.abs(gain))
        return total, factor

    def features(self, path: str, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """`x_tilde`, and the skip, of adapters whose streams share their weights."""
        tilde, skip = x, np.zeros_like(x)
        for adapter in self.adapters:
            own = f"{path}.preproj.adapters.{adapter.name}"
            if f"{own}.content_skip.shared.map.weight" not in self.w:
                continue
            hidden = linear(self.w, f"{own}.pre_projection.shared.up", x)
            increment = linear(self.w, f"{own}.pre_projection.shared.down", hidden / (1 + np.exp(-hidden)))
            tilde = tilde + adapter.scale * increment
            skip = skip + adapter.scale * linear(self.w, f"{own}.content_skip.shared.map", x + increment)
        return tilde, skip

    def project(self, path: str, stream: str, kind: str, x: np.ndarray) -> np.ndarray:
        """Queries, keys or values `[B, N, H, D]` of a stream, normed and turned where they are."""
        to, norm, _ = MAPS[stream]
        made = linear(self.w, f"{path}.{to.format(kind)}", x).reshape(*x.shape[:2], self.heads, self.width)
        angles, factor = self.angles(path, stream, x.shape[1])
        if kind == "v":
            return turn(made, angles, factor, self.mistake) if self.mistake == "values turned" else made
        angles = -angles if kind == "k" and self.mistake == "keys turned backwards" else angles
        if self.mistake == "turned before the norm":
            return rms_norm(self.w, f"{path}.{norm.format(kind)}", turn(made, angles, factor, self.mistake))
        return turn(rms_norm(self.w, f"{path}.{norm.format(kind)}", made), angles, factor, self.mistake)

    def attention(self, path: str, x_hat: dict[str, np.ndarray]) -> list[np.ndarray]:
        """`attention(x_tilde) + skip` of each stream; the last block's text is neither projected nor has a skip."""
        both = {stream: self.features(path, x) for stream, x in x_hat.items()}
        q, k, v = (
            np.concatenate([self.project(path, stream, kind, tilde) for stream, (tilde, _) in both.items()], axis=1)
            for kind in "qkv"
        )
        attended = np.zeros_like(q)
        for batch, head, query in np.ndindex(q.shape[0], self.heads, q.shape[1]):
            logits = k[batch, :, head] @ q[batch, query, head] / math.sqrt(self.width)
            weights = np.exp(logits - logits.max())
            attended[batch, query, head] = weights / weights.sum() @ v[batch, :, head]
        outputs, start = [], 0
        for stream, x in x_hat.items():
            out = attended[:, start : start + x.shape[1]].reshape(x.shape)
            name = f"{path}.{MAPS[stream][2]}"
            has_output = f"{name}.weight" in self.w
            outputs.append(linear(self.w, name, out) + both[stream][1] if has_output else out)
            start += x.shape[1]
        return outputs


def differences(
    model: nn.Module, size: tuple[int, int, int], adapters: list[Adapter], mistake: str = ""
) -> list[float]:
    """Run the model and return, for each stream of each attention, how far it is from the reference."""
    height, width, length = size
    with watched(model) as calls:
        output(model, picture(*size, dtype=torch.float64))
    reference, found = Reference(model, (height // 2, width // 2, length), adapters, mistake), []
    for path, call in calls.items():
        arguments = (("image", "hidden_states"), ("text", "encoder_hidden_states"))
        x_hat = {name: call.arguments[key].numpy() for name, key in arguments if key in call.arguments}
        expected = reference.attention(path, x_hat)
        assert len(expected) == len(call.outputs) == len(x_hat)
        found += [float(np.abs(a.numpy() - b).max()) for a, b in zip(call.outputs, expected, strict=True)]
    return found


@pytest.fixture
def make_exact(make_transformer, shake) -> Callable[..., nn.Module]:
    """A float64 model, its norms of queries and keys not all ones, with trained adapters of the given positions."""

    def make(style: str, *all_positions: Positions, **overrides: Any) -> nn.Module:
        model = make_transformer(style, **overrides).double()
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if ".norm_" in name and "attn" in name:
                    parameter.copy_(0.5 + torch.rand(parameter.shape, generator=generator))
        for index, positions in enumerate(all_positions):
            mmpreproj.patch(model, PreProjConfig(positions=positions), name=f"a{index}")
        shake(model)
        with torch.no_grad():
            for name, parameter in mmpreproj.named_parameters(model):
                if "rotary_gain" in name:
                    parameter.mul_(3)  # some beyond 1, some negative
        return model

    return make


VARIANTS: list[dict[str, Any]] = [
    *({"text": text} for text in TEXTS),
    {"image": "none"},
    {"text": "diagonal", "start": "full"},
    {"text": "1d", "start": "full", "theta": 100.0, "absolute": "remove"},
    *({"scaling": scaling, "base_size": 4, "text": "diagonal"} for scaling in SCALINGS[1:]),
    {"scaling": "yarn", "base_size": 2, "text": "1d", "start": "full", "theta": 50.0},
]


@pytest.mark.parametrize("values", VARIANTS, ids=str)
@pytest.mark.parametrize("size", [(6, 10, 7), (14, 4, 3)], ids=str)
def test_every_attention_is_what_the_equations_say(make_exact, style, values: dict[str, Any], size):
    positions = Positions(**values)
    found = differences(make_exact(style, positions), size, [Adapter("a0", positions)])
    assert len(found) == (5 if style == "sd35" else 4), "image and text of two blocks, and the image of attn2"
    assert max(found) < 5e-6, "rotations are computed in float32"


@pytest.mark.parametrize("scaling", SCALINGS[1:])
def test_a_long_axis_is_scaled_as_stated(make_exact, scaling: str):
    """Here some of YaRN's frequencies lie on the ramp: one turn and more over 32 patches."""
    positions = Positions(scaling=scaling, base_size=32, theta=100.0, start="full")
    model = make_exact("sd35", positions, pos_embed_max_size=48)
    assert max(differences(model, (90, 4, 3), [Adapter("a0", positions)])) < 2e-5


@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.5, -0.25), (0.0, 1.5), (1.0, 0.0)], ids=str)
def test_angles_of_several_adapters_add_up(make_exact, style, scales: tuple[float, float]):
    kinds = [Positions(text="1d", start="full"), Positions(text="diagonal", theta=50.0, scaling="yarn", base_size=3)]
    model = make_exact(style, *kinds)
    mmpreproj.set_scale(model, {f"a{index}": scale for index, scale in enumerate(scales)})
    adapters = [Adapter(f"a{index}", kinds[index], scale) for index, scale in enumerate(scales)]
    assert max(differences(model, (6, 10, 7), adapters)) < 5e-6
    mmpreproj.disable(model, "a1")
    assert max(differences(model, (6, 10, 7), adapters[:1])) < 5e-6


@pytest.mark.parametrize("mistake", MISTAKES)
def test_reference_would_notice_a_mistake(make_exact, mistake: str):
    positions = Positions(text="1d", **({"scaling": "yarn", "base_size": 2} if "temperature" in mistake else {}))
    model = make_exact("sd35", positions)
    # As many tokens of text as patches, so that a table of the wrong stream would fit.
    found = differences(model, (6, 10, 15), [Adapter("a0", positions)], mistake)
    where = {"attn2 not turned": found[2:3]}.get(mistake, found[:2])
    assert min(where) > 1e-3


# Start
