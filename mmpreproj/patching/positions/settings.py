"""Which positions text and image tokens have: settings of an adapter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from mmpreproj.patching.checks import check_choice, positive_number, read_settings


@dataclass(frozen=True)
class Positions:
    """Rotary positions at queries and keys, and nowhere else.

    They hold in every joint attention of the model, whatever blocks the adapter's other parts are on. In SD3.5's
    second, image-only attention the image's hold.

    Args:
        text: `"1d"`, places in the text on an axis of its own; `"diagonal"`, as in Qwen-Image the text continues the
            image's diagonal; `"none"`, as in FLUX.
        image: `"2d"`, row and column of the patch; `"none"`.
        absolute: what becomes of the base's sin-cos table: `"keep"`, or `"remove"` from the residual stream, for
            models trained from nothing.
        theta: base of the frequencies.
        start: `"identity"`, angles are multiplied by a learned gain per attention, modality and head, at first 0, so a
            pretrained base is itself until trained; `"full"`, whole angles and nothing to learn, for models trained
            from nothing.
        scaling: what is done on pictures with more patches along an axis than `base_size`: `"none"`, `"linear"`,
            `"ntk"` or `"yarn"`; see `mmpreproj.core.rotary.axis_angles`. The text's angles stay those of the base.
        base_size: patches along the side of the pictures that were trained on; None for the model's own,
            `sample_size / patch_size`, or in our trainer for its `data.resolution`. Up to it every scaling is the same
            as none.

    Raises:
        TypeError: if a field has the wrong type.
        ValueError: if a field has the right type but no valid value, or nothing would be added or removed.
    """

    text: Literal["1d", "none", "diagonal"] = "1d"
    image: Literal["2d", "none"] = "2d"
    absolute: Literal["keep", "remove"] = "keep"
    theta: float = 10_000.0
    start: Literal["identity", "full"] = "identity"
    scaling: Literal["none", "linear", "ntk", "yarn"] = "none"
    base_size: int | None = None

    def __post_init__(self) -> None:
        check_choice("positions.text", self.text, ("1d", "none", "diagonal"))
        check_choice("positions.image", self.image, ("2d", "none"))
        check_choice("positions.absolute", self.absolute, ("keep", "remove"))
        object.__setattr__(self, "theta", positive_number("positions.theta", self.theta))
        if self.theta <= 1:
            raise ValueError(f"positions.theta must be above 1, so that frequencies fall; got {self.theta!r}")
        check_choice("positions.start", self.start, ("identity", "full"))
        check_choice("positions.scaling", self.scaling, ("none", "linear", "ntk", "yarn"))
        if self.base_size is not None and (isinstance(self.base_size, bool) or not isinstance(self.base_size, int)):
            raise TypeError(f"positions.base_size must be a whole number of patches; got {self.base_size!r}")
        if self.base_size is not None and self.base_size < 2:
            raise ValueError(f"positions.base_size must be at least 2 patches; got {self.base_size}")
        if self.image == "none":
            self._check_without_image()

    def _check_without_image(self) -> None:
        if self.text == "diagonal":
            raise ValueError("positions.text 'diagonal' continues the image's, but positions.image is 'none'")
        if self.scaling != "none":
            raise ValueError(
                f"positions.scaling {self.scaling!r} is of image positions, but positions.image is 'none'"
            )
        if self.text == "none" and self.absolute == "keep":
            raise ValueError("positions would change nothing: text and image are 'none' and absolute is 'keep'")

    @property
    def streams(self) -> tuple[str, ...]:
        """Names of the streams whose queries and keys are turned."""
        kinds = {"image": self.image, "text": self.text}
        return tuple(stream for stream, kind in kinds.items() if kind != "none")

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Positions:
        """Build positions from plain values, as read from JSON or YAML.

        Raises:
            ValueError: on a key that is not a field (names the nearest one), or a bad value.
            TypeError: on a value of the wrong type.
        """
        return read_settings(cls, "positions", values)
