"""Pictures of a study: the norm of the skip by layer, and what the learning rates gave."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np

from mmpreproj.files import write_atomically
from mmpreproj.language.config import BASE, ArmName
from mmpreproj.language.trials import Trial
from mmpreproj.recipes.probe.comparison import chosen_trials
from mmpreproj.recipes.probe.run import Study

START = "#888888"
COLOURS = {arm: f"C{number}" for number, arm in enumerate(get_args(ArmName))}
SPREAD = 3.0  # largest perplexity over the smallest, beyond which the axis is logarithmic


def draw_skip_profile(study: Study, path: Path) -> bool:
    """Draw `‖W_skip‖_F` by layer, mean and range over seeds, for each text and arm that has a skip.

    Returns:
        Whether there was any.

    Source: arXiv 2604.10791, figure 2.
    """
    arms = [arm for arm in study.config.arms if "skip" in arm.split("+")]
    if not arms:
        return False
    axes = _panels(study, "layer", "‖W_skip‖, Frobenius norm")
    for panel, text in zip(axes, study.config.texts, strict=True):
        for arm in arms:
            records = [study.trials[trial] for trial in chosen_trials(study, text, arm)]
            norms = np.array([record.skip_norms for record in records])  # [seeds, layers]
            layers = np.arange(norms.shape[1])
            panel.plot(layers, norms.mean(axis=0), marker="o", markersize=3, color=COLOURS[arm], label=arm)
            panel.fill_between(
                layers, norms.min(axis=0), norms.max(axis=0), color=COLOURS[arm], alpha=0.2, linewidth=0
            )
        panel.plot(layers, records[0].initial_skip_norms, color=START, linestyle=":", label="at the start")
        panel.set_ylim(bottom=0)
        panel.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    _write(axes, path)
    return True


def draw_learning_rates(study: Study, path: Path) -> None:
    """Draw validation perplexity at the first seed against the learning rate, a line an arm, and the base's."""
    axes = _panels(study, "learning rate", "validation perplexity, first seed")
    for panel, text in zip(axes, study.config.texts, strict=True):
        drawn = [value for arm in study.config.arms for value in _draw_rates(panel, study, text, arm)]
        _mark_rates(panel, {rate for arm in study.config.arms if arm != BASE for rate in study.config.rates_of(arm)})
        if max(drawn) > SPREAD * min(drawn):  # one that has gone wrong would press the others together
            panel.set_yscale("log")
            panel.yaxis.set_major_formatter("{x:g}")
            panel.yaxis.set_minor_formatter("{x:g}")
    _write(axes, path)


def _draw_rates(panel: Any, study: Study, text: str, arm: ArmName) -> list[float]:
    seed = study.config.seeds[0]
    if arm == BASE:
        base = study.trials[Trial(text, arm, None, seed)].validation_perplexity
        panel.axhline(base, color=START, linestyle=":", label=BASE)
        return [base]
    rates = sorted(study.config.rates_of(arm))
    found = [study.trials[Trial(text, arm, rate, seed)].validation_perplexity for rate in rates]
    panel.plot(rates, found, marker="o", markersize=4, color=COLOURS[arm], label=arm)
    return [value for value in found if math.isfinite(value)] or [1.0]


def _mark_rates(panel: Any, rates: Collection[float]) -> None:
    """Put ticks where something was tried, some where that would be too many."""
    panel.set_xscale("log")
    chosen = sorted(rates)[:: 1 + len(rates) // 8]
    panel.set_xticks(chosen, [f"{rate:g}" for rate in chosen])
    panel.set_xticks([], minor=True)


def _panels(study: Study, across: str, up: str) -> Sequence[Any]:
    from matplotlib.figure import Figure  # a second to import

    texts = list(study.config.texts)
    figure = Figure(figsize=(5 * len(texts), 4.4), layout="constrained")
    axes = figure.subplots(1, len(texts), squeeze=False)[0]
    for panel, text in zip(axes, texts, strict=True):
        panel.set(title=text, xlabel=across)
        panel.grid(alpha=0.3)
    axes[0].set_ylabel(up)
    return axes


def _write(axes: Sequence[Any], path: Path) -> None:
    """Put one legend below all panels, and write the picture."""
    figure = axes[0].figure
    lines, names = axes[0].get_legend_handles_labels()
    columns = min(len(names), 2 * len(axes) if len(names) > 2 else 2)
    figure.legend(lines, names, loc="outside lower center", ncols=columns, frameon=False, fontsize="small")
    write_atomically(path, lambda place: figure.savefig(place, dpi=110, format="png"))
