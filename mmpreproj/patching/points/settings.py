"""How points go through a model: settings of an adapter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from mmpreproj.patching.checks import check_bool, check_choice, positive_number, read_settings


@dataclass(frozen=True)
class PointPathConfig:
    """The way of points through a model's patched blocks, by their pre-projections and content skips alone.

    Args:
        features: channels F of a point beside its three coordinates, as colours or normals.
        frequencies: waves along each axis that a point's token is made from; the finest is `8 / 2^(frequencies - 1)`
            long, in coordinates times `spread`.
        normalise: what is done with clouds before anything else: `"unit_ball"`, the bounding box is centred and the
            farthest point has length 1; `"none"`, the caller has done what is to be done.
        spread: coordinates are multiplied by this inside the model, so that a cloud is about as wide as the noise it
            is made from.
        shown: most points of a cloud that a picture is shown, in our trainer and pipeline; kept with the model, so
            that both agree.
        condition: clouds condition pictures.
        generate: clouds are generated from prompts.

    Raises:
        TypeError: if a field has the wrong type.
        ValueError: if a field has the right type but no valid value.
    """

    features: int = 0
    frequencies: int = 6
    normalise: Literal["unit_ball", "none"] = "unit_ball"
    spread: float = 2.0
    shown: int = 512
    condition: bool = True
    generate: bool = True

    def __post_init__(self) -> None:
        for name, least, most in (("features", 0, 1024), ("frequencies", 0, 16), ("shown", 8, 2**20)):
            _check_count(f"points.{name}", getattr(self, name), least=least, most=most)
        check_choice("points.normalise", self.normalise, ("unit_ball", "none"))
        object.__setattr__(self, "spread", positive_number("points.spread", self.spread))
        check_bool("points.condition", self.condition)
        check_bool("points.generate", self.generate)
        if not (self.condition or self.generate):
            raise ValueError("points.condition and points.generate are both False, so points would do nothing")

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> PointPathConfig:
        """Build settings from plain values, as read from JSON or YAML.

        Raises:
            ValueError: on a key that is not a field (names the nearest one), or a bad value.
            TypeError: on a value of the wrong type.
        """
        return read_settings(cls, "points", values)


def _check_count(name: str, value: Any, *, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a whole number; got {value!r} ({type(value).__name__})")
    if not least <= value <= most:
        raise ValueError(f"{name} must be between {least} and {most}; got {value}")
