"""A run keeps the length of its texts with what it leaves, so that nobody needs to know it."""

import json

import yaml

from mmpreproj.patching.files.format import read_config
from mmpreproj.patching.text_length import text_length
from mmpreproj.pipelines import PreProjSD3Pipeline
from mmpreproj.pipelines.length import LENGTH_KEY
from mmpreproj.recipes.loading import load_pipeline


def index_of(folder):
    return json.loads((folder / "model_index.json").read_text())


def test_an_adapter_keeps_it_and_gives_it_to_its_base(trained):
    run, _ = trained["probe"]
    assert read_config(run.saved).max_sequence_length == run.config.max_sequence_length == 6
    assert load_pipeline(str(run.saved)).max_sequence_length == 6


def test_a_whole_model_keeps_it_beside_its_adapter_too(trained):
    run, _ = trained["full"]
    assert index_of(run.saved)[LENGTH_KEY] == 6
    assert read_config(run.saved / "preproj").max_sequence_length == 6


def test_a_model_without_an_adapter_keeps_it(run, make_config):
    done, _ = run(make_config(mode="full", adapter=None, steps=1))
    assert PreProjSD3Pipeline.from_pretrained(done.saved).max_sequence_length == 6


def test_of_a_lora_alone_the_configuration_keeps_it(run, make_config, base):
    done, _ = run(make_config(adapter=None, lora={"rank": 2}, steps=1))
    assert LENGTH_KEY not in index_of(base)
    assert done.pipeline.max_sequence_length == 256
    assert yaml.safe_load((done.config.output / "config.yaml").read_text())["max_sequence_length"] == 6


def test_training_an_adapter_on_at_another_length_changes_it(run, make_config, trained):
    first, _ = trained["full"]
    done, _ = run(make_config(model=str(first.saved), max_sequence_length=5, steps=1))
    assert text_length(done.pipeline.transformer) == 5
    assert read_config(done.saved).max_sequence_length == 5
