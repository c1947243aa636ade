"""A study from its configuration: which trials there are, which are done, and what is left to do."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator
from rich.console import Console

from mmpreproj.files import write_atomically
from mmpreproj.language.arms import count_parameters, make_arm, on_model, save_arm
from mmpreproj.language.caches import cache_bytes
from mmpreproj.language.config import BASE, ArmName, StudyConfig
from mmpreproj.language.evaluation.scores import Scores, read_scores, score_model, validation_perplexity, write_scores
from mmpreproj.language.evaluation.tasks import Task
from mmpreproj.language.fitting import DivergedError, Fit, fit, forget_unfinished, make_accelerator
from mmpreproj.language.trials import Trial, TrialRecord, read_record, write_record
from mmpreproj.patching.lookup import is_patched
from mmpreproj.patching.profile import profile
from mmpreproj.recipes.locking import locked
from mmpreproj.recipes.probe.inputs import Inputs, open_inputs
from mmpreproj.recipes.probe.progress import StudyReporter
from mmpreproj.training.config import ConfigError
from mmpreproj.training.config.file import write_config
from mmpreproj.training.optimisation import check_optimizer
from mmpreproj.training.processes import on_main_process

LOSSES = "losses.json"
NOT_THE_RESULT = {"checkpoint_every", "micro_batch_size"}  # of the training's settings


@dataclass(frozen=True)
class Study:
    """What a study has found.

    Attributes:
        config: its settings.
        trials: every training, those for the choice of a learning rate too.
        scores: of the chosen trials.
    """

    config: StudyConfig
    trials: Mapping[Trial, TrialRecord]
    scores: Mapping[Trial, Scores]

    def chosen_rate(self, text: str, arm: ArmName) -> float | None:
        """Return the rate with the lowest validation perplexity at the first seed; None for the base."""
        if arm == BASE:
            return None
        first = self.config.seeds[0]
        return min(
            self.config.rates_of(arm),
            key=lambda rate: self.trials[Trial(text, arm, rate, first)].validation_perplexity,
        )


def run_study(config: StudyConfig, *, console: Console | None = None) -> Study:
    """Train and evaluate what a study lacks; its folder is what it goes on from.

    Args:
        config: its settings.
        console: where to show progress; standard output by default.

    Raises:
        ConfigError: if the configuration cannot be used, the folder holds trials that were made with other settings,
            or another study is writing to it.
        RuntimeError: if a training diverges.
    """
    accelerator = make_accelerator(config)
    _check_output(config.output)
    check_optimizer(config.optimizer, device=accelerator.device)
    reporter = StudyReporter(console or Console(), show=accelerator.is_main_process)
    with locked(config.output, accelerator), reporter:
        runner = _Runner(config, open_inputs(config, reporter), accelerator, reporter)
        on_main_process(accelerator, lambda: _begin_output(config))
        reporter.begin(sum(_number_of_trials(config, arm) for arm in config.arms) * len(config.texts))
        for text in config.texts:
            for arm in config.arms:
                runner.compare(text, arm)
    return Study(config, runner.trials, runner.scores)


def _check_output(output: Path) -> None:
    there = next(place for place in (output, *output.absolute().parents) if place.exists())
    if not there.is_dir():
        raise ConfigError(f"output: {there} is a file; choose another output")


def _begin_output(config: StudyConfig) -> None:
    config.records.mkdir(parents=True, exist_ok=True)
    write_atomically(config.output / "config.yaml", lambda path: write_config(config, Path(path)))


def _number_of_trials(config: StudyConfig, arm: ArmName) -> int:
    return 1 if arm == BASE else len(config.rates_of(arm)) + len(config.seeds) - 1


class _Runner:
    """Works through a study's trials, each of which is read where it is done already.

    What the main process reads and writes, the others are told, so that all take the same way.
    """

    def __init__(self, config: StudyConfig, inputs: Inputs, accelerator: Accelerator, reporter: StudyReporter) -> None:
        self.config = config
        self.inputs = inputs
        self.accelerator = accelerator
        self.reporter = reporter
        self.arms = {name: make_arm(name, inputs.model, config) for name in config.arms}
        self.trials: dict[Trial, TrialRecord] = {}
        self.scores: dict[Trial, Scores] = {}
        inputs.model.to(accelerator.device)

    def compare(self, text: str, name: ArmName) -> None:
        """Choose an arm's learning rate, train it at every seed, and evaluate it."""
        seeds = self.config.seeds
        if name == BASE:
            trials = [Trial(text, name, None, seeds[0])]
        else:
            for rate in self.config.rates_of(name):
                self._train(Trial(text, name, rate, seeds[0]))
            chosen = Study(self.config, self.trials, {}).chosen_rate(text, name)
            trials = [Trial(text, name, chosen, seed) for seed in seeds]
        made = []
        for trial in trials:  # each scored before the next is trained, so that one broken off has lost the least
            if trial not in self.trials:
                self._train(trial)
            self._check_converged(trial)
            made.append(self._evaluate(trial))
        if any(made):
            found = ", ".join(f"{self.scores[trial].text.perplexity:.3f}" for trial in trials)
            at = "" if name == BASE else f" at rate {trials[0].learning_rate:g}"
            self.reporter.say(f"{text}: {name}{at}: test perplexity {found}")

    def _check_converged(self, trial: Trial) -> None:
        if self.trials[trial].validation_perplexity < math.inf:
            return
        rates = ", ".join(f"{rate:g}" for rate in self.config.rates_of(trial.arm))
        where = (
            f"every rate of learning_rates ({rates})" if trial.seed == self.config.seeds[0] else f"seed {trial.seed}"
        )
        raise ConfigError(f"texts.{trial.text}: {trial.arm} diverged at {where}; give lower learning_rates")

    def _train(self, trial: Trial) -> None:
        folder, settings = trial.folder(self.config.records), self._settings(trial)
        told, record = None, on_main_process(self.accelerator, lambda: read_record(folder, settings))
        if record is None:
            self.reporter.trial_starts()
            on_main_process(self.accelerator, lambda: folder.mkdir(parents=True, exist_ok=True))
            made = self._trained(trial, folder, settings)
            record = on_main_process(self.accelerator, lambda: _finished(made, folder))
            told = f"{trial}: validation perplexity {record.validation_perplexity:.3f}"
        self.trials[trial] = replace(record, trial=trial)
        self.reporter.trial_is_done(told)

    def _trained(self, trial: Trial, folder: Path, settings: Mapping[str, Any]) -> TrialRecord:
        arm, text = self.arms[trial.arm], self.inputs.texts[trial.text]
        torch.manual_seed(trial.seed)
        with on_model(self.inputs.model, arm) as wrapped:
            initial = _skip_norms(wrapped)
            record = TrialRecord(
                trial=trial,
                settings=settings,
                parameters=count_parameters(wrapped),
                lora_rank=0 if arm.lora is None else arm.lora.rank,
                validation_perplexity=math.inf,
                cache_bytes=cache_bytes(wrapped),
                initial_skip_norms=initial,
            )
            try:
                result = None if trial.learning_rate is None else self._fitted(wrapped, trial, folder, settings)
            except DivergedError as error:  # that a rate is too high is an answer, too
                self.reporter.say(f"{trial}: {error}")
                return record
            return replace(
                record,
                validation_perplexity=validation_perplexity(
                    wrapped, text, self.config.evaluation, on_progress=self._show(trial, "validation text")
                ),
                loss=None if result is None else _end(result.losses),
                step_seconds=None if result is None else result.step_seconds,
                peak_memory=None if result is None else result.peak_memory,
                skip_norms=_skip_norms(wrapped),
            )

    def _fitted(self, wrapped: Any, trial: Trial, folder: Path, settings: Mapping[str, Any]) -> Fit:
        """Train what an arm has put on the model, and keep what comes of it."""
        result = fit(
            wrapped,
            self.inputs.texts[trial.text].train,
            self.config,
            learning_rate=cast(float, trial.learning_rate),
            seed=trial.seed,
            accelerator=self.accelerator,
            folder=folder,
            identity=settings,
            on_step=self._show_step(trial),
        )

        def write() -> None:
            save_arm(wrapped, self.arms[trial.arm], folder)
            text = json.dumps([round(loss, 6) for loss in result.losses])
            write_atomically(folder / LOSSES, lambda path: Path(path).write_text(text, encoding="utf-8"))

        on_main_process(self.accelerator, write)
        return result

    def _evaluate(self, trial: Trial) -> bool:
        """Score a trained arm, or read its scores; returns whether it was scored now."""
        folder = trial.folder(self.config.records)
        settings = self._settings(trial) | {"evaluation": self._measured_by()}
        scores = on_main_process(self.accelerator, lambda: read_scores(folder, settings))
        if scores is not None:
            self.scores[trial] = scores
            return False
        made = self._scored(trial, None if trial.arm == BASE else folder)
        on_main_process(self.accelerator, lambda: write_scores(made, folder, settings))
        self.scores[trial] = made
        return True

    def _scored(self, trial: Trial, saved: Path | None) -> Scores:
        """Score a trained arm, from its files."""
        with on_model(self.inputs.model, self.arms[trial.arm], saved=saved) as wrapped:
            return score_model(
                wrapped,
                self.inputs.tokenizer,
                self.inputs.texts[trial.text],
                self.inputs.tasks,
                self.config.evaluation,
                on_progress=lambda what, done, total: self.reporter.stage(f"{trial}: {what}", done, total),
            )

    def _settings(self, trial: Trial) -> dict[str, Any]:
        """Collect all that a trial's result depends on."""
        arm, config = self.arms[trial.arm], self.config
        settings: dict[str, Any] = {
            "model": self.inputs.identity,
            "text": self.inputs.texts[trial.text].digest,
            "validation": config.evaluation.model_dump(include={"length", "stride", "validation_tokens"}),
        }
        if trial.arm != BASE:
            settings |= {
                "learning_rate": trial.learning_rate,
                "seed": trial.seed,
                "adapter": None if arm.adapter is None else arm.adapter.to_dict(),
                "lora": None if arm.lora is None else asdict(arm.lora),
                "training": config.training.model_dump(exclude=NOT_THE_RESULT),
                "optimizer": config.optimizer.model_dump(exclude={"learning_rate", "learning_rates"}),
            }
        return json.loads(json.dumps(settings))

    def _measured_by(self) -> dict[str, Any]:
        chosen = self.config.evaluation.model_dump(
            mode="json", exclude={"validation_tokens", "batch_size", "resamples", "tasks"}
        )
        return chosen | {"tasks": {task.name: _digest(task) for task in self.inputs.tasks}}

    def _show_step(self, trial: Trial) -> Callable[[int, float], None]:
        total = self.config.training.steps
        return lambda step, loss: self.reporter.stage(f"{trial}: steps", step, total, detail=f"loss {loss:.4f}")

    def _show(self, trial: Trial, what: str) -> Callable[[int, int], None]:
        return lambda done, total: self.reporter.stage(f"{trial}: {what}", done, total)


def _finished(record: TrialRecord, folder: Path) -> TrialRecord:
    write_record(record, folder)
    forget_unfinished(folder)
    return record


def _skip_norms(model: Any) -> tuple[float, ...]:
    if not is_patched(model):
        return ()
    return tuple(row.skip for row in profile(model) if row.skip is not None)


def _end(losses: tuple[float, ...]) -> float:
    """Average the last tenth of the steps."""
    last = losses[-max(1, len(losses) // 10) :]
    return sum(last) / len(last)


def _digest(task: Task) -> str:
    return hashlib.sha256(json.dumps([task.kind, [asdict(item) for item in task.items]]).encode()).hexdigest()[:32]
