"""`mmpreproj probe` as a person types it."""

import pytest
import yaml
from typer.testing import CliRunner

from mmpreproj.cli import app


@pytest.fixture
def written(make_study, tmp_path):
    """A configuration of one text and two arms in a file."""
    config = make_study(arms=("base", "skip"), seeds=(0,), learning_rates=(1e-3,))
    path = tmp_path / "study.yaml"
    values = config.model_dump(mode="json", exclude_defaults=True) | {"texts": {}}
    values["texts"]["docs"] = config.texts["docs"].model_dump(mode="json", exclude_defaults=True)
    path.write_text(yaml.safe_dump(values))
    return path


def test_the_command_runs_a_study_and_says_where_its_report_is(written, tmp_path):
    result = CliRunner().invoke(app, ["probe", str(written), "training.steps=2"])
    assert result.exit_code == 0, result.output
    assert "[2/2] docs: skip, rate 0.001, seed 0: validation perplexity" in result.output
    assert result.output.splitlines()[-1] == f"report: {tmp_path / 'study' / 'report.md'}"
    names = {path.name for path in (tmp_path / "study").iterdir()}
    assert names == {"config.yaml", "learning_rates.png", "profile.png", "report.md", "results.json", "trials"}


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["training.stepss=2"], "stepss"),
        (["model=no/such"], "model: 'no/such': no such folder here"),
        (
            ["arms=[pre_projection+skip]", "learning_rates=[1.0e+30]", "training.steps=9"],
            "diverged at every rate of learning_rates (1e+30); give lower learning_rates",
        ),
    ],
)
def test_mistakes_are_one_message(overrides, told, written):
    result = CliRunner().invoke(app, ["probe", str(written), *overrides])
    assert result.exit_code == 1
    assert told in result.output and "Traceback" not in result.output
