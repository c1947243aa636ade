"""A study that is done, and configurations of others."""

import pytest
from study_kit import Finished, build_study, run_quietly, write_inputs

from mmpreproj.recipes.probe import write_report

datasets = pytest.importorskip("datasets")
pytest.importorskip("peft")


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory):
    """Keep what `datasets` prepares out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
        patch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
        yield


@pytest.fixture(scope="session")
def inputs(tmp_path_factory):
    """The folder of model, texts and tasks; tests must leave it as it is."""
    return write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="session")
def finished(inputs, own_cache, tmp_path_factory):
    """A whole study; tests must leave its folder as it is."""
    study, told = run_quietly(build_study(inputs, tmp_path_factory.mktemp("whole") / "study"))
    return Finished(study, told, write_report(study))


@pytest.fixture
def make_study(inputs, tmp_path):
    """Build a study's configuration; the output is a folder of the test's."""
    return lambda **changes: build_study(inputs, changes.pop("output", tmp_path / "study"), **changes)
