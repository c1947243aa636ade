"""Configurations written to a file, and how they are read or refused."""

import pytest
import yaml

from mmpreproj.training.config import ConfigError, read_config


@pytest.fixture
def write(tmp_path):
    def run(values):
        path = tmp_path / "run.yaml"
        path.write_text(values if isinstance(values, str) else yaml.safe_dump(values), encoding="utf-8")
        return path

    return run


@pytest.fixture
def read(write):
    return lambda values, *overrides: read_config(write(values), overrides)


@pytest.fixture
def refusal(read):
    """The message with which values are refused."""

    def run(values, *overrides):
        with pytest.raises(ConfigError) as caught:
            read(values, *overrides)
        return str(caught.value)

    return run
