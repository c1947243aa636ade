"""What a study leaves to be read: `report.md`, `results.json`, `profile.png`, `learning_rates.png`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from mmpreproj.files import write_atomically
from mmpreproj.language.config import BASE
from mmpreproj.language.evaluation.bootstrap import Comparison
from mmpreproj.recipes.probe.comparison import AGAINST, PERPLEXITY, Measure, Row, compare_arms
from mmpreproj.recipes.probe.figures import draw_learning_rates, draw_skip_profile
from mmpreproj.recipes.probe.run import Study

REPORT, RESULTS, PROFILE, RATES = "report.md", "results.json", "profile.png", "learning_rates.png"


def write_report(study: Study) -> Path:
    """Write a study's table, figures and pictures into its folder.

    Returns:
        The table's path.
    """
    rows, folder = compare_arms(study), study.config.output
    _write(folder / RESULTS, json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    drawn = draw_skip_profile(study, folder / PROFILE)
    draw_learning_rates(study, folder / RATES)
    _write(folder / REPORT, "\n".join([*_head(study), *_tables(study, rows), *_pictures(drawn), ""]))
    return folder / REPORT


def _write(path: Path, text: str) -> None:
    write_atomically(path, lambda place: Path(place).write_text(text, encoding="utf-8"))


def _head(study: Study) -> list[str]:
    config = study.config
    training, measured = config.training, config.evaluation
    rates = ", ".join(f"{rate:g}" for rate in config.learning_rates)
    return [
        f"# Arms on {config.model.name}",
        "",
        f"Base frozen; {training.steps} steps of {training.batch_size} blocks of {training.length} tokens "
        f"({training.steps * training.batch_size * training.length:,} tokens); {config.optimizer.name}. Each arm took "
        f"the learning rate with the lowest validation perplexity at seed {config.seeds[0]} from {rates}"
        + ("" if not config.arm_learning_rates else " (some arms: see config.yaml)")
        + f"; what is told is of the test text, with windows of {measured.length} tokens and a stride of "
        f"{measured.stride}.",
        "",
        "± is the standard error over items and seeds together (bootstrap). Brackets are 95 % intervals of a paired "
        "bootstrap over the same items: ratios of perplexities, below 1 where the arm predicts better, and "
        "differences of shares.",
        "",
    ]


def _tables(study: Study, rows: Sequence[Row]) -> list[str]:
    lines = []
    for text in study.config.texts:
        own = [row for row in rows if row.text == text]
        lines += [f"## {text}", "", *_quality(own), "", *_cost(own), ""]
    return lines


def _quality(rows: Sequence[Row]) -> list[str]:
    names = list(rows[0].measures)
    lines = [f"| arm | {' | '.join(names)} |", "|---|" + "---|" * len(names)]
    lines += [f"| {row.arm} | {' | '.join(_value(name, row.measures[name]) for name in names)} |" for row in rows]
    there = {arm for row in rows for measure in row.measures.values() for arm in measure.against}
    for rival in (arm for arm in AGAINST if arm in there):
        lines += ["", f"Against {rival}:", "", f"| arm | {' | '.join(names)} |", "|---|" + "---|" * len(names)]
        compared = [row for row in rows if any(rival in measure.against for measure in row.measures.values())]
        for row in compared:
            cells = [_compared(name, row.measures[name].against[rival]) for name in names]
            lines.append(f"| {row.arm} | {' | '.join(cells)} |")
    return lines


def _cost(rows: Sequence[Row]) -> list[str]:
    lines = [
        "| arm | parameters | learning rate | seeds | validation perplexity | step, s | peak MB | cache |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        rank = f" (rank {row.lora_rank})" if row.lora_rank else ""
        rate = "-" if row.learning_rate is None else f"{row.learning_rate:g}" + (" (edge)" if row.at_edge else "")
        step = "-" if row.step_seconds is None else f"{row.step_seconds:.3g}"
        memory = "-" if row.peak_memory is None else f"{row.peak_memory / 1e6:,.0f}"
        cache = "-" if row.added_cache_bytes is None or row.arm == BASE else f"{row.added_cache_bytes:+,} bytes"
        lines.append(
            f"| {row.arm} | {row.parameters:,}{rank} | {rate} | {row.seeds} | {row.validation_perplexity:.3f} | "
            f"{step} | {memory} | {cache} |"
        )
    return lines


def _pictures(drawn: bool) -> list[str]:
    lines = [f"![validation perplexity by learning rate]({RATES})", ""]
    return [f"![norm of the content skip by layer]({PROFILE})", "", *lines] if drawn else lines


def _value(name: str, measure: Measure) -> str:
    estimate = measure.estimate
    if name.endswith(PERPLEXITY):
        return f"{estimate.value:.3f} ± {estimate.error:.3f}"
    return f"{estimate.value:.1%} ± {100 * estimate.error:.1f}"


def _compared(name: str, found: Comparison) -> str:
    if name.endswith(PERPLEXITY):
        return f"{found.value:.4f} [{found.low:.4f}, {found.high:.4f}]"
    return f"{100 * found.value:+.1f} [{100 * found.low:+.1f}, {100 * found.high:+.1f}]"
