"""A study as rows of figures: each arm on each text, beside the base and beside LoRA."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import fmean, median

import numpy as np

from mmpreproj.language.config import BASE, ArmName
from mmpreproj.language.evaluation.bootstrap import (
    Comparison,
    Estimate,
    mean_and_error,
    paired_difference,
    paired_perplexity_ratio,
    perplexity_and_error,
)
from mmpreproj.language.evaluation.scores import Scores
from mmpreproj.language.trials import Trial, TrialRecord
from mmpreproj.recipes.probe.run import Study

AGAINST: tuple[ArmName, ...] = (BASE, "lora_matched", "lora")
PERPLEXITY = "perplexity"


@dataclass(frozen=True)
class Measure:
    """One figure of an arm.

    Attributes:
        estimate: its value and standard error over items and seeds.
        against: by arm, what it is compared to: a ratio for perplexities, a difference for shares.
    """

    estimate: Estimate
    against: Mapping[ArmName, Comparison]


@dataclass(frozen=True)
class Row:
    """One arm on one text.

    Attributes:
        text: name of the text.
        arm: name of the arm.
        learning_rate: that was chosen; None for the base.
        at_edge: whether that is the smallest or largest there was to choose from.
        seeds: number of trainings.
        parameters: that were trained.
        lora_rank: of its LoRA; 0 where there is none.
        validation_perplexity: mean over seeds.
        measures: of test text and tasks, by name: `perplexity`, `lambada accuracy`, …
        step_seconds: median time of a training step; None for the base.
        peak_memory: the largest of its trainings, in bytes; None where it is not known.
        added_cache_bytes: beyond the base's K/V cache.
    """

    text: str
    arm: ArmName
    learning_rate: float | None
    at_edge: bool
    seeds: int
    parameters: int
    lora_rank: int
    validation_perplexity: float
    measures: Mapping[str, Measure]
    step_seconds: float | None
    peak_memory: int | None
    added_cache_bytes: int | None


def compare_arms(study: Study) -> list[Row]:
    """Compare the arms of a study, in the order of its texts and arms."""
    return [_row(study, text, arm) for text in study.config.texts for arm in study.config.arms]


def chosen_trials(study: Study, text: str, arm: ArmName) -> list[Trial]:
    """List an arm's trials at its chosen learning rate, a seed each; the base has one."""
    rate = study.chosen_rate(text, arm)
    seeds = study.config.seeds if arm != BASE else study.config.seeds[:1]
    return [Trial(text, arm, rate, seed) for seed in seeds]


def _row(study: Study, text: str, arm: ArmName) -> Row:
    trials = chosen_trials(study, text, arm)
    records = [study.trials[trial] for trial in trials]
    rates = sorted(study.config.rates_of(arm))
    rate = trials[0].learning_rate
    steps = [record.step_seconds for record in records if record.step_seconds is not None]
    peaks = [record.peak_memory for record in records if record.peak_memory is not None]
    others = _compared_to(study, arm)
    return Row(
        text=text,
        arm=arm,
        learning_rate=rate,
        at_edge=len(rates) > 1 and rate in (rates[0], rates[-1]),
        seeds=len(trials),
        parameters=records[0].parameters,
        lora_rank=records[0].lora_rank,
        validation_perplexity=fmean(record.validation_perplexity for record in records),
        measures=_measures(study, trials, {other: chosen_trials(study, text, other) for other in others}),
        step_seconds=median(steps) if steps else None,
        peak_memory=max(peaks) if peaks else None,
        added_cache_bytes=_added_cache(study, text, records[0]),
    )


def _compared_to(study: Study, arm: ArmName) -> list[ArmName]:
    """List what an arm is compared to; the base, which the others are compared to, is compared to none of them."""
    return [other for other in AGAINST if other in study.config.arms and BASE != arm != other]


def _measures(study: Study, trials: list[Trial], others: Mapping[ArmName, list[Trial]]) -> dict[str, Measure]:
    own = [study.scores[trial] for trial in trials]
    rivals = {arm: [study.scores[trial] for trial in found] for arm, found in others.items()}
    resamples = study.config.evaluation.resamples
    found = {
        PERPLEXITY: _perplexity(
            own, rivals, lambda scores: (scores.text.nll, scores.text.counts.astype(float)), resamples
        )
    }
    for task, metrics in own[0].tasks.items():
        for metric in metrics:
            if metric == "nll":  # of a last word, whose perplexity is what is told
                found[f"{task} {PERPLEXITY}"] = _perplexity(own, rivals, _word(task), resamples)
            else:
                found[f"{task} {metric.replace('_', ' ')}"] = _share(own, rivals, task, metric, resamples)
    return found


def _word(task: str) -> Callable[[Scores], tuple[np.ndarray, np.ndarray]]:
    def read(scores: Scores) -> tuple[np.ndarray, np.ndarray]:
        values = scores.tasks[task]["nll"]
        return values, np.ones_like(values)

    return read


def _perplexity(
    own: list[Scores],
    rivals: Mapping[ArmName, list[Scores]],
    read: Callable[[Scores], tuple[np.ndarray, np.ndarray]],
    resamples: int,
) -> Measure:
    def stacked(scores: list[Scores]) -> tuple[np.ndarray, np.ndarray]:
        sums, counts = zip(*(read(each) for each in scores), strict=True)
        return np.stack(sums), np.stack(counts)

    mine = stacked(own)
    against = {arm: paired_perplexity_ratio(*mine, *stacked(s), resamples=resamples) for arm, s in rivals.items()}
    return Measure(perplexity_and_error(*mine, resamples=resamples), against)


def _share(
    own: list[Scores], rivals: Mapping[ArmName, list[Scores]], task: str, metric: str, resamples: int
) -> Measure:
    def stacked(scores: list[Scores]) -> np.ndarray:
        return np.stack([each.tasks[task][metric] for each in scores])

    mine = stacked(own)
    against = {arm: paired_difference(mine, stacked(s), resamples=resamples) for arm, s in rivals.items()}
    return Measure(mean_and_error(mine, resamples=resamples), against)


def _added_cache(study: Study, text: str, record: TrialRecord) -> int | None:
    base = study.trials.get(Trial(text, BASE, None, study.config.seeds[0]))
    return None if base is None else record.cache_bytes - base.cache_bytes
