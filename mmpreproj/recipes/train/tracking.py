"""Trackers: losses, rates, pictures and profile to TensorBoard or Weights & Biases, through accelerate's."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from accelerate.tracking import GeneralTracker, TensorBoardTracker, WandBTracker
from PIL import Image

from mmpreproj.training.config import ConfigError, TrainConfig
from mmpreproj.training.loop import StepRecord


class Trackers:
    """What a run tells trackers, beside the files that it always writes.

    Args:
        config: the run's settings, which name the trackers.
        from_step: what was told of later steps, before the run was taken up again, is dropped.
        is_main: whether this is the process that tells.
    """

    def __init__(self, config: TrainConfig, *, from_step: int = 0, is_main: bool = True) -> None:
        names = config.trackers if is_main else ()
        self._trackers: list[GeneralTracker] = [_open(name, config, from_step) for name in names]

    def step(self, record: StepRecord, *, profile: Mapping[str, float]) -> None:
        """Tell of a step, and of the skip profile where it was measured."""
        values: dict[str, float | None] = {
            "loss/training": record.loss,
            **{f"learning rate/{part}": rate for part, rate in record.learning_rates.items()},
            "gradient norm": record.grad_norm,
            "pictures per second": record.pictures_per_second,
            **({f"loss/{name}": loss for name, loss in record.losses.items()} if len(record.losses) > 1 else {}),
            **{f"held out/{name}": loss for name, loss in record.held_out_losses.items()},
            **{f"skip norm/{name}": norm for name, norm in profile.items()},
        }
        known = {name: value for name, value in values.items() if value is not None}
        for tracker in self._trackers:
            tracker.log(known, step=record.step)

    def picture(self, name: str, path: Path, *, step: int) -> None:
        """Show a PNG file."""
        if not self._trackers:
            return
        with Image.open(path) as image:
            pixels = np.asarray(image.convert("RGB"))[None]  # [1, H, W, 3]
        for tracker in self._trackers:
            layout = {"dataformats": "NHWC"} if isinstance(tracker, TensorBoardTracker) else {}
            tracker.log_images({name: pixels}, step=step, **layout)

    def close(self) -> None:
        """End them, so that everything is on disk or sent."""
        for tracker in self._trackers:
            tracker.finish()
        self._trackers = []


def check_trackers(config: TrainConfig) -> None:
    """Refuse a tracker whose package is missing, before anything is computed.

    Raises:
        ConfigError: naming the package.
    """
    for name in config.trackers:
        if find_spec(name) is None:
            raise ConfigError(
                f"trackers: {name} needs the package {name!r}; run: pip install {name}, or set trackers: []"
            )


def _open(name: str, config: TrainConfig, from_step: int) -> GeneralTracker:
    if name == "tensorboard":
        settings: dict[str, Any] = {"purge_step": from_step + 1} if from_step else {}
        board = TensorBoardTracker("tensorboard", logging_dir=str(config.output), **settings)
        board.start()
        return board
    wandb = WandBTracker("mmpreproj", name=config.output.name, dir=str(config.output))
    wandb.start()
    wandb.store_init_configuration(config.model_dump(mode="json"))
    return wandb
