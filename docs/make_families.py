"""Write docs/families.md from the table of families and from the tests of each row, which this runs.

    python docs/make_families.py

The results are kept in docs/families.json, so that the page can be made anew without running them: `--keep-results`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch

from mmpreproj.patching.families import REFUSED, Family
from mmpreproj.patching.families.multimodal import MULTIMODAL

ROOT = Path(__file__).parents[1]
PAGE, RESULTS = ROOT / "docs" / "families.md", ROOT / "docs" / "families.json"
TEST_FILES = (
    "tests/patching/test_families.py",
    "tests/pipelines/test_families.py",
    "tests/training/test_families.py",
)


@dataclass(frozen=True)
class Property:
    """A column of the page's results: what holds, and the tests that show it for each row.

    Attributes:
        title: of the column.
        meaning: what the tests show.
        tests: their functions; of a whole file where it ends in `.py`.
    """

    title: str
    meaning: str
    tests: tuple[str, ...]

    def is_shown_by(self, test: str) -> bool:
        """Tell whether a test, `FILE::FUNCTION[…]`, is one of this property's."""
        file, function = test.split("[")[0].split("::")
        return function in self.tests or file in self.tests


PROPERTIES = (
    Property(
        "start",
        "with `init=\"zero\"` all outputs are the base's bit for bit, and at the paper's start within a thousandth",
        ("test_zero_init_is_the_base_bit_for_bit", "test_paper_init_is_the_base_within_a_thousandth"),
    ),
    Property(
        "equation",
        "the model computes what the equation, written out by hand around its stock attention, gives; a stream has a "
        "skip exactly where its output is read",
        (
            "test_the_model_computes_the_papers_equation_in_every_attention",
            "test_a_stream_has_a_skip_exactly_where_its_output_is_read",
            "test_each_streams_skip_reaches_the_output",
        ),
    ),
    Property(
        "gate",
        "the block multiplies the skip as the row says, told from the block's own output",
        ("test_the_gate_is_of_the_kind_that_the_row_says",),
    ),
    Property(
        "off",
        "scale 0, a disabled adapter and unpatching give the base back bit for bit, and unpatching leaves no trace",
        ("test_patching_and_unpatching_leave_no_trace", "test_a_scale_of_zero_and_a_disabled_adapter_are_the_base"),
    ),
    Property(
        "gradients",
        "every parameter of the adapter gets one, no other does, and checkpointing keeps them",
        (
            "test_every_parameter_of_the_adapter_gets_a_gradient_and_no_other",
            "test_checkpointing_keeps_the_gradients",
        ),
    ),
    Property("save, load", "into a fresh base, bit for bit", ("test_save_and_load_into_a_fresh_base",)),
    Property(
        "compile",
        "attention, block and model are one graph each wherever they are without the adapter, which is all but blocks "
        "and model of HiDream and the model of HunyuanVideo 1.5; and equal to eager",
        ("test_what_the_base_compiles_in_one_graph_still_does_and_stays_equal",),
    ),
    Property(
        "pipeline",
        "the family's stock pipeline generates with the patched model",
        ("tests/pipelines/test_families.py",),
    ),
    Property(
        "training",
        "a step of the trainer moves the adapter and nothing else",
        ("tests/training/test_families.py",),
    ),
)


class Collected:
    """A pytest plugin: what each test came to.

    Attributes:
        outcomes: `passed`, `failed`, or why a test was skipped, by its name.
    """

    def __init__(self) -> None:
        self.outcomes: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.outcomes[report.nodeid] = "failed"
        elif report.skipped:
            self.outcomes[report.nodeid] = f"skipped: {report.longrepr[2].removeprefix('Skipped: ')}"
        elif report.when == "call":
            self.outcomes.setdefault(report.nodeid, report.outcome)


def run_tests() -> dict[str, Any]:
    """Run the tests of every row, the slow ones too.

    Returns:
        The date, the versions, and of each row and property what its tests came to.

    Raises:
        SystemExit: if a test fails; the page says what holds.
    """
    collected = Collected()
    there = [str(ROOT / file) for file in TEST_FILES if (ROOT / file).is_file()]
    status = pytest.main(["-q", "-m", "slow or not slow", f"--rootdir={ROOT}", *there], plugins=[collected])
    if status != pytest.ExitCode.OK:
        sys.exit("some tests of the table do not pass, see above; docs/families.md is left as it was")
    return {
        "date": datetime.datetime.now(tz=datetime.timezone.utc).date().isoformat(),
        "diffusers": diffusers.__version__,
        "torch": torch.__version__.split("+")[0],
        "rows": {family.model_class: _summary(family, collected.outcomes) for family in MULTIMODAL},
    }


def _summary(family: Family, outcomes: Mapping[str, str]) -> dict[str, str]:
    """Return what a row's tests came to, by property: how many passed, and why others were skipped."""
    name = re.compile(rf"\[{family.model_class}(?![A-Za-z0-9])")
    own = {test: outcome for test, outcome in outcomes.items() if name.search(test)}
    return {one.title: _told(outcome for test, outcome in own.items() if one.is_shown_by(test)) for one in PROPERTIES}


def _told(outcomes: Iterable[str]) -> str:
    found = list(outcomes)
    reasons = sorted({outcome.removeprefix("skipped: ") for outcome in found if outcome.startswith("skipped")})
    passed = found.count("passed")
    return ", ".join([*([str(passed)] if passed else []), *reasons]) or "not tested"


def render(results: Mapping[str, Any]) -> str:
    """Write the page from the table and from what the tests came to."""
    return "\n".join(
        [
            "# Families",
            "",
            "<!-- Written by docs/make_families.py; change the table in mmpreproj/patching/families/ instead. -->",
            "",
            f"`mmpreproj.patch` knows these {len(MULTIMODAL)} multimodal transformers and ControlNets of Diffusers, "
            "and their subclasses.",
            "Language models are in [language.md](language.md). For a model of your own, write a row:",
            "[own_models.md](own_models.md).",
            "",
            "## What is patched",
            "",
            *_table(("class", "blocks", "attention: streams", "text has no skip"), map(_seam, MULTIMODAL)),
            "",
            "A stream is named with the argument of the attention that brings it and the place of its result. Where",
            "the last column names a block, nothing reads what attention gives the text there: its features feed keys",
            "and values, and a skip would get no gradient.",
            "",
            "Blocks that follow, such as the single blocks of Flux and Flux2, are left alone: they read both streams",
            "through one map, and attention and feed-forward side by side from the same normed tokens, so there is no",
            "attention output of a stream to add a skip to.",
            "",
            "## What the skip means there",
            "",
            "The skip is added to attention's output, so whatever the block does to that output it does to the skip.",
            "",
            *_table(
                ("class", "norm before", "attention and skip are multiplied by", "positions"),
                map(_arithmetic, MULTIMODAL),
            ),
            "",
            "## What is tested",
            "",
            f"On tiny random models, {results['date']}, with diffusers {results['diffusers']} and torch "
            f"{results['torch']}. A number says how many",
            "tests passed, one for each setting of the model.",
            "",
            *(f"- **{one.title}**: {one.meaning}." for one in PROPERTIES),
            "",
            *_table(
                ("class", *(one.title for one in PROPERTIES)),
                ((f"`{name}`", *(found[one.title] for one in PROPERTIES)) for name, found in results["rows"].items()),
            ),
            "",
            "## Not bound",
            "",
            "Every other transformer and ControlNet of Diffusers, each with the reason; `patch` gives it too.",
            "",
            *(f"- {reason}: {', '.join(f'`{name}`' for name in names)}" for reason, names in _refused().items()),
            "",
        ]
    )


def _seam(family: Family) -> tuple[str, ...]:
    sites = "; ".join(
        f"`{site.child}`: " + ", ".join(f"{one.name} `{one.argument}` → {one.output}" for one in site.streams)
        for site in family.sites
    )
    return (f"`{family.model_class}`", f"`{family.blocks}`", sites, _without_skip(family))


def _without_skip(family: Family) -> str:
    marked = [one.discarded_by for site in family.sites for one in site.streams if one.discarded_by is not None]
    if marked:
        return f"in blocks that are `{marked[0]}`"
    if not family.unread:
        return ""
    return "in the last block" + ("" if family.followed_by is None else f" if `{family.followed_by}` is empty")


def _arithmetic(family: Family) -> tuple[str, ...]:
    return (f"`{family.model_class}`", family.norm, family.gate, family.positions)


def _refused() -> dict[str, list[str]]:
    reasons: dict[str, list[str]] = {}
    for name, reason in REFUSED.items():
        reasons.setdefault(reason, []).append(name)
    return reasons


def _table(titles: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    head = list(titles)
    return [_line(head), _line("---" for _ in head), *(_line(row) for row in rows)]


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Run the tests, unless their results are to be kept, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--keep-results", action="store_true", help="of the run before, in docs/families.json")
    if not parser.parse_args().keep_results:
        RESULTS.write_text(json.dumps(run_tests(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    PAGE.write_text(render(json.loads(RESULTS.read_text(encoding="utf-8"))), encoding="utf-8")


if __name__ == "__main__":
    main()
