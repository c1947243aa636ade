"""What is looked at while a run goes on: records on disk and on the screen, pictures, the profile, trackers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType

from accelerate import Accelerator

from mmpreproj.files import write_atomically
from mmpreproj.patching.lookup import is_patched
from mmpreproj.patching.profile import profile
from mmpreproj.pipelines.sd3 import PreProjSD3Pipeline
from mmpreproj.recipes.progress import Reporter
from mmpreproj.recipes.train.inputs import Inputs
from mmpreproj.recipes.train.output import preview_path
from mmpreproj.recipes.train.previews import Preview, choose_previews, draw_previews
from mmpreproj.recipes.train.tracking import Trackers
from mmpreproj.recipes.train.validation import draw_prompts
from mmpreproj.training.checkpoints import drop_later, tell_last
from mmpreproj.training.config import TrainConfig
from mmpreproj.training.loop import StepRecord
from mmpreproj.training.progress import step_of


class Watch:
    """Takes a run's records and evaluations, on every process.

    Args:
        pipeline: with the transformer in training.
        inputs: what it is trained on.
        config: the run's settings.
        accelerator: of the run.
        reporter: what a person sees.
        checkpoint: that the run goes on from; the records up to it are kept, later ones are dropped.

    Attributes:
        history: the records, those before a checkpoint included.
    """

    def __init__(
        self,
        pipeline: PreProjSD3Pipeline,
        inputs: Inputs,
        config: TrainConfig,
        *,
        accelerator: Accelerator,
        reporter: Reporter,
        checkpoint: Path | None,
    ) -> None:
        self.pipeline, self.inputs, self.config = pipeline, inputs, config
        self.accelerator, self.reporter = accelerator, reporter
        self.metrics = config.output / "metrics.jsonl"
        step = self._resumed = None if checkpoint is None else step_of(checkpoint)
        # Of the checkpoint's own run, which may be in another folder.
        earlier = None if checkpoint is None else checkpoint.parent.parent / self.metrics.name
        self.history = [] if earlier is None or step is None else read_history(earlier, up_to=step)
        self.shapes = _shapes(inputs, config)
        self.trackers = Trackers(config, from_step=step or 0, is_main=accelerator.is_main_process)
        self._measured: dict[str, float] = {}
        self._earlier: list[StepRecord] | None = list(self.history)  # to be written with the first record

    def __enter__(self) -> Watch:
        if self._resumed is None and self.accelerator.is_main_process:
            self._drop_later()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.trackers.close()

    def step(self, record: StepRecord) -> None:
        """Keep and show a record."""
        self.history.append(record)
        self.reporter.step(record, self.config.steps)
        if not self.accelerator.is_main_process:
            return
        try:
            self._drop_later()
            with self.metrics.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(record)) + "\n")
        except OSError as error:  # names no file if it comes when the file is closed
            told = f"{error.strerror or error}; {tell_last(self.config.output / 'checkpoints')}"
            raise OSError(error.errno, told, str(self.metrics)) from error
        self.trackers.step(record, profile=self._measured)
        self._measured = {}

    def _drop_later(self) -> None:
        """Drop, before the first record, what an earlier try has left of steps that are taken again.

        Not sooner: until a checkpoint has been loaded, those after it are not to be lost.
        """
        if self._earlier is None:
            return
        lines = "".join(json.dumps(asdict(record)) + "\n" for record in self._earlier)
        write_atomically(self.metrics, lambda path: Path(path).write_text(lines, encoding="utf-8"))
        if self._resumed is not None:
            drop_later(self.config.output / "checkpoints", self._resumed)
        self._earlier = None

    def evaluate(self, step: int) -> None:
        """Draw what the model makes of fixed prompts, and measure the skip profile.

        At step 0, before anything has trained, that is pictures alone, and only with `validation.at_start`: the
        profile is that of every start, and a point path that has learned nothing makes no shapes.
        """
        if step:
            self._measure_profile()
            self._draw_shapes(step)
        if step or self.config.validation.at_start:
            self._draw_pictures(step)

    def _measure_profile(self) -> None:
        if is_patched(self.pipeline.transformer):
            rows = profile(self.pipeline.transformer)
            self._measured = {f"block {row.block} {row.attention}": row.skip for row in rows if row.skip is not None}

    def _draw_shapes(self, step: int) -> None:
        if self.shapes and self.accelerator.is_main_process:
            path = preview_path(self.config.output, step, kind="shapes")
            reason = draw_previews(self.pipeline, self.shapes, path)
            self._told(reason, "shapes", step, path)

    def _draw_pictures(self, step: int) -> None:
        if self.inputs.prompts:
            path = preview_path(self.config.output, step, kind="pictures")
            reason = draw_prompts(
                self.pipeline,
                self.inputs.prompts,
                self.config,
                path if self.accelerator.is_main_process else None,
                accelerator=self.accelerator,
            )
            self._told(reason, "pictures", step, path)

    def _told(self, reason: str | None, what: str, step: int, path: Path) -> None:
        if reason is not None:
            self.reporter.say(f"no preview of {what} at step {step}: {reason}")
        elif self.accelerator.is_main_process:
            self.trackers.picture(what, path, step=step)


def read_history(path: Path, *, up_to: int) -> list[StepRecord]:
    """Read a run's records up to a step, as far as they are whole: a killed run may have left half a line."""
    records = []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    for line in lines:
        try:
            record = StepRecord(**json.loads(line))
        except (ValueError, TypeError):
            break
        if record.step > up_to:
            break
        records.append(record)
    return records


def _shapes(inputs: Inputs, config: TrainConfig) -> Sequence[Preview]:
    if config.point_path is None or not config.point_path.generate:
        return []
    return choose_previews(inputs.trained, inputs.held_out, count=config.points.previews)
