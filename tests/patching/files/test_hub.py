"""To the hub and back, against a small server that answers as the hub's own interface does."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hub_kit import REPO, Hub, running_hub
from huggingface_hub.errors import HfHubHTTPError

import mmpreproj
from mmpreproj import PreProjConfig

FILES = ["README.md", "adapter_config.json", "adapter_model.safetensors", "profile.png"]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A hub of one's own."""
    with running_hub(monkeypatch, tmp_path) as server:
        yield server


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder that temporary files are made in."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_pushed_and_loaded_again(hub, make_transformer, shake, predict, temporary):
    model, other = make_transformer("sd35"), make_transformer("sd35")
    mmpreproj.patch(model, PreProjConfig(share="stream"), name="mine")
    mmpreproj.patch(model, name="beside")
    shake(model)
    url = mmpreproj.push_to_hub(
        model, REPO, name="mine", base_model="someone/base", private=True, token="hf_mine", commit_message="Hello"
    )
    assert url.startswith(f"{hub.address}/{REPO}/commit/")
    assert sorted(hub.repos[REPO]) == FILES
    assert hub.commits == ["Hello"]
    assert hub.tokens == {"Bearer hf_mine"}
    assert [(wanted["name"], wanted["visibility"]) for wanted in hub.created] == [("some-adapter", "private")]
    assert b"base_model: someone/base" in hub.repos[REPO]["README.md"]
    assert not list(temporary.iterdir())
    mmpreproj.load(other, REPO)
    mmpreproj.unpatch(model, "beside")
    assert torch.equal(predict(other), predict(model))


def test_pushing_again_replaces_what_is_there(hub, make_transformer, shake, predict):
    model, other = make_transformer(), make_transformer()
    mmpreproj.patch(model)
    mmpreproj.push_to_hub(model, REPO, token="hf_mine")
    mmpreproj.load(other, REPO)
    shake(model)
    mmpreproj.push_to_hub(model, REPO, token="hf_mine")
    assert not torch.equal(predict(other), predict(model))
    mmpreproj.load(other, REPO, replace=True)
    assert torch.equal(predict(other), predict(model))


@pytest.mark.parametrize("refused", ["/api/repos/create", "/preupload/", "/commit/"])
def test_a_refused_upload_leaves_nothing_behind(hub, make_transformer, snapshot, temporary, refused: str):
    model = make_transformer()
    mmpreproj.patch(model)
    before = snapshot(model)
    hub.refuses = refused
    with pytest.raises(HfHubHTTPError, match="not today"):
        mmpreproj.push_to_hub(model, REPO, token="hf_mine")
    assert not any(hub.repos.values())
    assert not list(temporary.iterdir())
    before.check(model)


def test_weights_that_are_not_finite_are_not_uploaded(hub, make_transformer, temporary):
    model = make_transformer()
    mmpreproj.patch(model)
    with torch.no_grad():
        next(mmpreproj.parameters(model)).fill_(float("nan"))
    with pytest.raises(ValueError, match="holds NaN or infinite values; nothing was saved"):
        mmpreproj.push_to_hub(model, REPO, token="hf_mine")
    assert not hub.created
    assert not list(temporary.iterdir())


def test_a_repository_that_is_not_there_is_refused(hub, make_transformer, snapshot):
    model = make_transformer()
    before = snapshot(model)
    with pytest.raises(FileNotFoundError, match=f"no adapter at '{REPO}': .*the hub gives no such repository"):
        mmpreproj.load(model, REPO)
    before.check(model)


def test_a_repository_without_an_adapter_is_refused(hub, make_transformer, snapshot):
    hub.repos[REPO] = {"README.md": b"# Something else"}
    model = make_transformer()
    before = snapshot(model)
    with pytest.raises(FileNotFoundError, match=r"holds no adapter_config\.json"):
        mmpreproj.load(model, REPO)
    before.check(model)
