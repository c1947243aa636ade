"""Pictures of a study: the norm of the skip by layer, and what the learning rates gave."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mmpreproj.files import write_atomically
from mmpreproj.language.config import BASE, ArmName
from mmpreproj.language.trials import Trial
from mmpreproj.recipes.probe.comparison import chosen_trials
from mmpreproj.recipes.probe.run import Study

START = "#888888"


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
            (line,) = panel.plot(layers, norms.mean(axis=0), marker="o", markersize=3, label=arm)
            panel.fill_between(layers, norms.min(axis=0), norms.max(axis=0), color=line.get_color(), alpha=0.2)
        panel.plot(layers, records[0].initial_skip_norms, color=START, linestyle=":", label="at the start")
        panel.set_ylim(bottom=0)
        panel.legend(frameon=False, fontsize="small")
    _write(axes[0].figure, path)
    return True


def draw_learning_rates(study: Study, path: Path) -> None:
    """Draw validation perplexity at the first seed against the learning rate, a line an arm, and the base's."""
    axes = _panels(study, "learning rate", "validation perplexity, first seed")
    for panel, text in zip(axes, study.config.texts, strict=True):
        for arm in study.config.arms:
            _draw_rates(panel, study, text, arm)
        panel.set_xscale("log")
        panel.legend(frameon=False, fontsize="small")
    _write(axes[0].figure, path)


def _draw_rates(panel: Any, study: Study, text: str, arm: ArmName) -> None:
    seed = study.config.seeds[0]
    if arm == BASE:
        base = study.trials[Trial(text, arm, None, seed)].validation_perplexity
        panel.axhline(base, color=START, linestyle=":", label=BASE)
        return
    rates = sorted(study.config.rates_of(arm))
    found = [study.trials[Trial(text, arm, rate, seed)].validation_perplexity for rate in rates]
    panel.plot(rates, found, marker="o", markersize=4, label=arm)


def _panels(study: Study, across: str, up: str) -> Sequence[Any]:
    from matplotlib.figure import Figure  # a second to import

    texts = list(study.config.texts)
    figure = Figure(figsize=(5 * len(texts), 3.8), layout="constrained")
    axes = figure.subplots(1, len(texts), squeeze=False)[0]
    for panel, text in zip(axes, texts, strict=True):
        panel.set(title=text, xlabel=across)
        panel.grid(alpha=0.3)
    axes[0].set_ylabel(up)
    return axes


def _write(figure: Any, path: Path) -> None:
    write_atomically(path, lambda place: figure.savefig(place, dpi=110, format="png"))
