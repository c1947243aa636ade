"""What is added to a model: the adapter's configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from mmpreproj.patching.checks import check_bool, check_choice, check_fields, positive_number
from mmpreproj.patching.points.settings import PointPathConfig
from mmpreproj.patching.positions.settings import Positions

Blocks = Literal["all"] | Sequence[int] | Mapping[str, int]


@dataclass(frozen=True)
class PreProjConfig:
    """Settings of one adapter, the same for every block it touches.

    Args:
        expansion: hidden width of the pre-projection as a multiple of the token width; above 0.
        pre_projection: add the nonlinear features before Q/K/V.
        skip: add the linear way around attention.
        share: `"block"`, one pair of modules per attention serves every stream (text and image); `"stream"`, each
            stream has its own, which models with streams of different widths need.
        blocks: `"all"`, a list of block indices, or `{"last": n}`.
        dual_attention: also patch the second, image-only attention of SD3.5-medium's blocks.
        init: `"paper"`, small random `W_down` and `W_skip`; `"zero"`, both exactly zero, so the patched model is
            bit-identical to its base until trained.
        init_std: standard deviation of that small start; above 0.
        positions: rotary positions at queries and keys; None leaves the base's as they are.
        mask_padding: our pipeline and trainer keep attention from the padding of a text, which stock SD3 attends to.
            Elsewhere give the mask yourself, `joint_attention_kwargs={"attention_mask": [B, L]}`, true at tokens.
        points: a way for point clouds through the patched blocks; None for none.

    Raises:
        TypeError: if a field has the wrong type.
        ValueError: if a field has the right type but no valid value.
    """

    expansion: float = 1.25
    pre_projection: bool = True
    skip: bool = True
    share: Literal["block", "stream"] = "block"
    blocks: Blocks = "all"
    dual_attention: bool = True
    init: Literal["paper", "zero"] = "paper"
    init_std: float = 1e-4
    positions: Positions | None = None
    mask_padding: bool = False
    points: PointPathConfig | None = None

    def __post_init__(self) -> None:
        for name in ("expansion", "init_std"):
            object.__setattr__(self, name, positive_number(name, getattr(self, name)))
        for name in ("pre_projection", "skip", "dual_attention", "mask_padding"):
            check_bool(name, getattr(self, name))
        check_choice("share", self.share, ("block", "stream"))
        check_choice("init", self.init, ("paper", "zero"))
        object.__setattr__(self, "blocks", _canonical_blocks(self.blocks))
        if self.positions is not None and not isinstance(self.positions, Positions):
            raise TypeError(
                f"positions must be a Positions or None; got {self.positions!r}"
                + ("; plain values are read by PreProjConfig.from_dict" if isinstance(self.positions, Mapping) else "")
            )
        self._check_points()
        if not (self.pre_projection or self.skip or self.needs_processor):
            raise ValueError(
                "pre_projection and skip are both False, and there are no positions and no mask_padding, so nothing "
                "would be added; set one of them"
            )

    def _check_points(self) -> None:
        if self.points is not None and not isinstance(self.points, PointPathConfig):
            raise TypeError(
                f"points must be a PointPathConfig or None; got {self.points!r}"
                + ("; plain values are read by PreProjConfig.from_dict" if isinstance(self.points, Mapping) else "")
            )
        if self.points is not None and not self.skip:
            raise ValueError("points go through a block by its content skip alone, but skip is False; set skip=True")

    def __hash__(self) -> int:
        return hash(self.to_json())

    @property
    def start_std(self) -> float:
        """Standard deviation of `W_down` and `W_skip` at the start: 0 with `init="zero"`."""
        return 0.0 if self.init == "zero" else self.init_std

    @property
    def needs_processor(self) -> bool:
        """Whether attention must be computed by `mmpreproj.patching.positions.processor`."""
        return self.positions is not None or self.mask_padding

    def block_indices(self, depth: int) -> tuple[int, ...]:
        """List the blocks to patch in a model of `depth` blocks, in ascending order.

        Raises:
            ValueError: if the setting asks for blocks that the model does not have.
        """
        if self.blocks == "all":
            return tuple(range(depth))
        if isinstance(self.blocks, Mapping):
            last = self.blocks["last"]
            if last > depth:
                raise ValueError(f"blocks: the last {last} were asked for, but the model has {depth} blocks")
            return tuple(range(depth - last, depth))
        beyond = [index for index in self.blocks if int(index) >= depth]
        if beyond:
            raise ValueError(f"blocks: {beyond} do not exist; the model has {depth} blocks, 0 to {depth - 1}")
        return tuple(int(index) for index in self.blocks)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON values."""
        values = asdict(self)
        values["blocks"] = list(self.blocks) if isinstance(self.blocks, tuple) else values["blocks"]
        return values

    def to_json(self) -> str:
        """Return the fields as JSON text, keys in a fixed order."""
        return json.dumps(self.to_dict(), sort_keys=True)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> PreProjConfig:
        """Build a config from plain values, as read from JSON or YAML.

        Raises:
            ValueError: on a key that is not a field (names the nearest one), or a bad value.
            TypeError: on a value of the wrong type.
        """
        check_fields("PreProjConfig", values, [field.name for field in fields(cls)])
        positions = values.get("positions")
        if positions is not None and not isinstance(positions, Positions):
            values = {**values, "positions": Positions.from_dict(positions)}
        points = values.get("points")
        if points is not None and not isinstance(points, PointPathConfig):
            values = {**values, "points": PointPathConfig.from_dict(points)}
        return cls(**values)

    @classmethod
    def from_json(cls, text: str) -> PreProjConfig:
        """Build a config from JSON text; see `from_dict`."""
        return cls.from_dict(json.loads(text))


def _canonical_blocks(value: Any) -> Any:
    takes = '"all", a list of block indices such as [0, 5], or {"last": n}'
    if isinstance(value, str):
        if value != "all":
            raise ValueError(f"blocks must be {takes}; got {value!r}")
        return value
    if isinstance(value, Mapping):
        if set(value) != {"last"} or not _is_index(value["last"]) or value["last"] < 1:
            raise ValueError(f"blocks must be {takes} with n of at least 1; got {dict(value)!r}")
        return {"last": value["last"]}
    if not isinstance(value, Sequence):
        raise TypeError(f"blocks must be {takes}; got {value!r} ({type(value).__name__})")
    if not value or not all(_is_index(index) for index in value):
        raise ValueError(f"blocks must be {takes}, with indices of 0 or more; got {list(value)!r}")
    if len(set(value)) != len(value):
        raise ValueError(f"blocks names a block twice: {list(value)!r}")
    return tuple(sorted(value))


def _is_index(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
