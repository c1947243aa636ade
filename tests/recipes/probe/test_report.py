"""What a study leaves to be read: a table of every arm, figures as JSON, and pictures."""

import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from study_kit import ARMS, run_quietly

from mmpreproj.language.config import StudyConfig
from mmpreproj.language.evaluation.scores import Scores
from mmpreproj.language.evaluation.scoring import TextScore
from mmpreproj.language.trials import Trial, TrialRecord
from mmpreproj.recipes.probe import Study, write_report
from mmpreproj.recipes.probe.comparison import compare_arms
from mmpreproj.recipes.probe.figures import draw_learning_rates, draw_skip_profile

RATES = (1e-2, 1e-4, 1e-3)


def tables(report):
    """Read the tables of a report: a list of rows by column for each text and heading."""
    found, heading, rival = {}, "", ""
    for line in report.read_text().splitlines():
        if line.startswith("## "):
            heading, rival = line[3:], ""
        elif line.startswith("Against "):
            rival = line[8:-1]
        elif line.startswith("| arm |"):
            names = [cell.strip() for cell in line.strip("|").split("|")]
            kind = "cost" if "parameters" in names else rival
            found[heading, kind] = []
        elif line.startswith("| "):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            assert len(cells) == len(names)
            found[heading, kind].append(dict(zip(names, cells, strict=True)))
    return found


def test_the_table_has_every_arm_on_every_text(finished):
    found = tables(finished.report)
    assert set(found) == {(text, kind) for text in ("docs", "tales") for kind in ("", "base", "lora", "cost")}
    for (_, kind), rows in found.items():
        left_out = {"": (), "cost": (), "base": ("base",), "lora": ("base", "lora")}[kind]
        assert [row["arm"] for row in rows] == [arm for arm in ARMS if arm not in left_out]


def test_the_table_says_what_was_measured(finished):
    found, study = tables(finished.report), finished.study
    names = {"perplexity", "words accuracy", "words perplexity", "choices accuracy", "choices normalised accuracy"}
    for text in ("docs", "tales"):
        for row in found[text, ""]:
            assert set(row) == {"arm", *names}
            rate = study.chosen_rate(text, row["arm"])
            trials = [Trial(text, row["arm"], rate, seed) for seed in ((0,) if row["arm"] == "base" else (0, 1))]
            texts = [study.scores[trial].text for trial in trials]
            mean = sum(score.nll.sum() for score in texts) / sum(score.counts.sum() for score in texts)
            assert float(row["perplexity"].split()[0]) == pytest.approx(np.exp(mean), abs=1e-3)
            right = np.mean([study.scores[trial].tasks["choices"]["accuracy"].mean() for trial in trials])
            assert row["choices accuracy"].startswith(f"{right:.1%} ± ")
        against = {row["arm"]: row["perplexity"] for row in found[text, "base"]}
        own = {row["arm"]: float(row["perplexity"].split()[0]) for row in found[text, ""]}
        for arm, told in against.items():
            ratio, low, high = map(float, re.findall(r"[\d.]+", told))
            assert ratio == pytest.approx(own[arm] / own["base"], abs=2e-4)
            assert low <= ratio <= high


def test_the_table_says_what_it_costs(finished):
    for text in ("docs", "tales"):
        rows = {row["arm"]: row for row in tables(finished.report)[text, "cost"]}
        assert {row["cache"] for arm, row in rows.items() if arm != "base"} == {"+0 bytes"}
        assert rows["base"]["parameters"] == "0" and rows["base"]["cache"] == rows["base"]["learning rate"] == "-"
        assert rows["lora"]["parameters"].endswith("(rank 8)")
        assert {row["seeds"] for row in rows.values()} == {"1", "2"}
        assert all(row["learning rate"].endswith("(edge)") for arm, row in rows.items() if arm != "base")


def test_the_report_says_how_it_was_made(finished):
    text = finished.report.read_text()
    assert "3 steps of 2 blocks of 16 tokens (96 tokens)" in text
    assert "from 0.001, 0.01" in text and "windows of 16 tokens and a stride of 8" in text
    assert text.count("](profile.png)") == text.count("](learning_rates.png)") == 1


def test_the_figures_are_json_with_a_row_for_each_arm(finished):
    rows = json.loads((finished.folder / "results.json").read_text(), parse_constant=pytest.fail)
    assert [(row["text"], row["arm"]) for row in rows] == [(text, arm) for text in ("docs", "tales") for arm in ARMS]
    assert rows[1]["measures"]["perplexity"]["against"].keys() == {"base"}


def test_the_pictures_are_pictures(finished):
    for name in ("profile.png", "learning_rates.png"):
        with Image.open(finished.folder / name) as picture:
            assert picture.width > 2 * picture.height > 600


def found_by(folder, *, layers=2, perplexity=lambda arm, rate: 10.0 + rate, nll=None, **changes):
    """Make up what a study has found."""
    values = {"model": "tiny", "output": folder, "texts": {"docs": {"files": ["x"]}}, "seeds": (0, 1)} | changes
    config = StudyConfig(**values, evaluation={"resamples": 200})
    trials, scores = {}, {}
    for text in config.texts:
        for arm in config.arms:
            rates = (None,) if arm == "base" else config.rates_of(arm)
            for trial in (Trial(text, arm, rate, seed) for rate in rates for seed in config.seeds):
                norms = (0.5,) * layers if "skip" in arm.split("+") else ()
                value = perplexity(arm, trial.learning_rate or 0.0)
                trials[trial] = TrialRecord(trial, {}, 1, 0, value, 64, skip_norms=norms, initial_skip_norms=norms)
                sums = np.full(9, 9.0) if nll is None else nll(arm)
                scores[trial] = Scores(TextScore(sums, np.full(9, 3)), {})
    return Study(config, trials, scores)


def test_an_arm_that_predicts_as_the_base_does_has_a_ratio_of_one(tmp_path):
    draw = np.random.default_rng(0).random(9)
    study = found_by(tmp_path, arms=("base", "skip", "lora"), nll=lambda arm: draw + 3 * np.log(2) * (arm == "skip"))
    rows = {row.arm: row.measures["perplexity"].against for row in compare_arms(study)}
    same, twice = rows["lora"]["base"], rows["skip"]["base"]
    assert (same.value, same.low, same.high) == pytest.approx((1.0, 1.0, 1.0))
    assert (twice.value, twice.low, twice.high) == pytest.approx((2.0, 2.0, 2.0))
    assert rows["base"] == {} and rows["skip"].keys() == {"base", "lora"} and rows["lora"].keys() == {"base"}


@pytest.mark.parametrize(
    ("best", "rates", "expected"),
    [(1e-3, RATES, False), (1e-2, RATES, True), (1e-4, RATES, True), (1.0, (1.0,), False)],
)
def test_a_chosen_rate_at_the_edge_is_told(best, rates, expected, tmp_path):
    study = found_by(
        tmp_path, arms=("base", "skip"), learning_rates=rates, perplexity=lambda arm, rate: 9.0 + (rate != best)
    )
    base, skip = compare_arms(study)
    assert (skip.learning_rate, skip.at_edge) == (best, expected)
    assert (base.learning_rate, base.at_edge) == (None, False)
    report = write_report(study).read_text()
    assert ("(edge)" in report) == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"arms": ("lora", "skip")},
        {"arms": ("skip",)},
        {"arms": ("base",)},
        {"arms": ("lora",), "learning_rates": (1e-3,), "seeds": (3,)},
        {"learning_rates": tuple(n * 1e-4 for n in range(1, 20)), "layers": 64},
        {"perplexity": lambda arm, rate: float("inf") if rate > 1e-3 else 10.0},
        {"perplexity": lambda arm, rate: 1e6 if rate > 1e-3 else 10.0},
    ],
    ids=["no base", "one arm", "base alone", "one rate", "many", "infinite", "diverged"],
)
def test_every_study_has_its_report(changes, tmp_path, recwarn):
    study = found_by(tmp_path, **changes)
    report = write_report(study)
    skips = any("skip" in arm.split("+") for arm in study.config.arms)
    assert (tmp_path / "profile.png").is_file() == skips == ("profile.png" in report.read_text())
    assert [row["arm"] for row in tables(report)["docs", "cost"]] == list(study.config.arms)
    if "base" not in study.config.arms:
        assert {row["cache"] for row in tables(report)["docs", "cost"]} == {"-"}
    assert not [warning for warning in recwarn if "matplotlib" in warning.filename]


@pytest.mark.parametrize("layers", [2, 30])
def test_pictures_have_one_legend_and_layers_are_whole_numbers(layers, tmp_path, monkeypatch):
    from mmpreproj.recipes.probe import figures

    kept = SimpleNamespace()
    stock = figures._write

    def write(axes, path):
        stock(axes, path)
        kept.axes = axes

    monkeypatch.setattr(figures, "_write", write)
    study = found_by(tmp_path, layers=layers, texts={"a": {"files": ["x"]}, "b": {"files": ["x"]}})
    draw_skip_profile(study, tmp_path / "profile.png")
    assert all(tick == int(tick) for tick in kept.axes[0].get_xticks())
    (legend,) = kept.axes[0].figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "skip",
        "pre_projection+skip",
        "pre_projection+skip+lora",
        "at the start",
    ]
    draw_learning_rates(study, tmp_path / "rates.png")
    assert [label.get_text() for label in kept.axes[1].get_xticklabels()] == ["0.0003", "0.001", "0.003"]
    assert [text.get_text() for text in kept.axes[0].figure.legends[0].get_texts()] == list(study.config.arms)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [{"arms": ("pre_projection", "lora_matched")}, {"arms": ("skip",), "learning_rates": (1e-2,), "seeds": (5,)}],
    ids=["no base", "one"],
)
def test_small_studies_run_and_are_reported(changes, make_study, tmp_path):
    config = make_study(**changes)
    study, _ = run_quietly(config)
    report = write_report(study)
    assert [row["arm"] for row in tables(report)["docs", ""]] == list(config.arms)
    assert not [heading for heading in tables(report) if heading[1] == "base"]
