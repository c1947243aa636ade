"""A run's result goes to the hub; what keeps it from there is told before the run, or costs nothing after it."""

import io

import pytest
import torch
from hub_kit import REPO, TOKEN, log_in, running_hub
from huggingface_hub import constants
from rich.console import Console

import mmpreproj
from mmpreproj.pipelines import PreProjSD3Pipeline
from mmpreproj.recipes.progress import Reporter
from mmpreproj.recipes.train.upload import upload
from mmpreproj.training.config import ConfigError

PARTS = (("adapter", "."), ("lora", "lora"))  # of a run, and where they go


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub of one's own, with nobody logged in."""
    with running_hub(monkeypatch, tmp_path / "hub") as server:
        yield server


def test_a_run_is_uploaded_and_the_hub_gives_its_adapter(hub, run, make_config, base, monkeypatch):
    log_in(monkeypatch, TOKEN)
    done, said = run(make_config(push_to_hub=REPO, steps=1))
    assert set(hub.repos[REPO]) == {path.name for path in done.saved.iterdir()}
    assert f"uploaded: {hub.address}/{REPO}" in said
    fresh = PreProjSD3Pipeline.from_pretrained(base).transformer
    mmpreproj.load(fresh, REPO)
    for ours, theirs in zip(mmpreproj.parameters(done.pipeline.transformer), mmpreproj.parameters(fresh), strict=True):
        assert torch.equal(ours, theirs)


def test_a_lora_goes_with_its_adapter(hub, trained_together, monkeypatch):
    log_in(monkeypatch, TOKEN)
    run = trained_together
    config = run.config.model_copy(update={"push_to_hub": REPO})
    assert upload(config, run.saved, say=lambda text: None) == f"{hub.address}/{REPO}"
    assert {"adapter_config.json", "lora/pytorch_lora_weights.safetensors", "lora/README.md"} <= set(hub.repos[REPO])


def test_without_the_setting_the_hub_is_left_alone(hub, trained_together, monkeypatch):
    log_in(monkeypatch, TOKEN)
    assert upload(trained_together.config, trained_together.saved, say=print) is None
    assert not hub.tokens
    assert not hub.repos


@pytest.mark.parametrize("refused", ["/api/repos/create", "/preupload/", "/commit/"])
def test_a_refused_upload_ends_no_run_and_says_how_to_try_again(hub, run, make_config, monkeypatch, refused):
    log_in(monkeypatch, TOKEN)
    hub.refuses = refused
    done, said = run(make_config(push_to_hub=REPO, steps=1))
    assert (done.saved / "adapter_model.safetensors").is_file()
    assert f"not uploaded to {REPO}: " in said
    assert f"the results are in {done.saved}" in said
    assert f"hf upload {REPO} {done.saved} ." in said


def test_commands_for_both_parts_are_told_unbroken_where_neither_went(trained_together, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    narrow = Console(file=io.StringIO(), width=40)
    config = trained_together.config.model_copy(update={"push_to_hub": REPO})
    assert upload(config, trained_together.saved, say=Reporter(narrow).say) is None
    commands = [f"  hf upload {REPO} {config.output / name} {place}" for name, place in PARTS]
    assert narrow.file.getvalue().splitlines()[-2:] == commands


def test_nobody_being_logged_in_is_told_before_anything_is_computed(hub, run, make_config):
    config = make_config(push_to_hub=REPO)
    with pytest.raises(ConfigError, match=f"push_to_hub: {REPO} .*nobody is logged in.*`hf auth login`"):
        run(config)
    assert not config.output.exists()


def test_a_token_that_the_hub_refuses_is_told_before_anything_is_computed(hub, run, make_config, monkeypatch):
    log_in(monkeypatch, "hf_of_yesterday")
    config = make_config(push_to_hub=REPO)
    with pytest.raises(ConfigError, match=r"push_to_hub: .*refuses the token.*`hf auth login`"):
        run(config)
    assert not config.output.exists()


def test_what_is_no_repositorys_id_is_refused(run, make_config):
    config = make_config(push_to_hub="me/my adapter")
    with pytest.raises(ConfigError, match="push_to_hub: 'me/my adapter' is no repository's id, such as me/my-adapter"):
        run(config)
    assert not config.output.exists()


def test_without_a_network_the_run_goes_on_and_the_results_stay(run, make_config, monkeypatch):
    log_in(monkeypatch, TOKEN)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    done, said = run(make_config(push_to_hub=REPO, steps=1))
    assert (done.saved / "adapter_model.safetensors").is_file()
    assert f"not uploaded to {REPO}: " in said
