"""To the hub and back, against a small server that answers as the hub's own interface does."""

import base64
import hashlib
import json
import tempfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import close_session, constants
from huggingface_hub.errors import HfHubHTTPError

import mmpreproj
from mmpreproj import PreProjConfig

FILES = ["README.md", "adapter_config.json", "adapter_model.safetensors", "profile.png"]
REPO = "someone/some-adapter"


class Hub(ThreadingHTTPServer):
    """Keeps repositories as `{id: {path: content}}`; `refuses` names a request that is answered with an error."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.repos: dict[str, dict[str, bytes]] = {}
        self.created: list[dict[str, Any]] = []
        self.commits: list[str] = []
        self.tokens: set[str | None] = set()
        self.refuses: str | None = None

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Answers(BaseHTTPRequestHandler):
    """The endpoints that creating a repository, a commit without large-file storage, and a download need."""

    server: Hub

    def log_message(self, *args: Any) -> None:
        pass

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.tokens.add(self.headers.get("Authorization"))
        path = self.path.split("?")[0]
        if self.server.refuses is not None and self.server.refuses in path:
            self.answer({"error": "not today"}, status=403)
        elif path == "/api/repos/create":
            wanted = json.loads(body)
            repo = f"{wanted['organization']}/{wanted['name']}"
            self.server.created.append(wanted)
            status = 409 if repo in self.server.repos else 200
            self.server.repos.setdefault(repo, {})
            self.answer({"url": f"{self.server.address}/{repo}"}, status=status)
        elif path == "/api/validate-yaml":
            self.answer({"errors": [], "warnings": []})
        elif path == f"/api/models/{REPO}/preupload/main":
            files = [entry["path"] for entry in json.loads(body)["files"]]
            self.answer({"files": [{"path": file, "uploadMode": "regular", "shouldIgnore": False} for file in files]})
        elif path == f"/api/models/{REPO}/commit/main":
            for line in map(json.loads, body.decode().splitlines()):
                if line["key"] == "header":
                    self.server.commits.append(line["value"]["summary"])
                else:
                    self.server.repos[REPO][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            sha = self.sha()
            self.answer({"commitUrl": f"{self.server.address}/{REPO}/commit/{sha}", "commitOid": sha})
        else:
            self.answer({"error": f"no such endpoint: {path}"}, status=404)

    def do_GET(self) -> None:
        path, files = self.path.split("?")[0], self.server.repos.get(REPO)
        if files is None:
            self.answer({"error": "Repository not found"}, status=404, headers={"X-Error-Code": "RepoNotFound"})
        elif path in (f"/api/models/{REPO}", f"/api/models/{REPO}/revision/main"):
            self.answer({"id": REPO, "sha": self.sha(), "siblings": [{"rfilename": file} for file in files]})
        elif path == f"/api/models/{REPO}/tree/{self.sha()}":
            entries = [
                {"type": "file", "path": file, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for file, content in files.items()
            ]
            self.answer(entries)
        elif path.startswith(f"/{REPO}/resolve/") and path.split("/")[-1] in files:
            content = files[path.split("/")[-1]]
            headers = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": self.sha()}
            self.answer(content, headers=headers)
        else:
            self.answer({"error": f"no such endpoint: {path}"}, status=404)

    do_HEAD = do_GET

    def sha(self) -> str:
        return hashlib.sha1(repr(sorted(self.server.repos[REPO].items())).encode()).hexdigest()

    def answer(self, value: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> None:
        content = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        for key, text in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(key, text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A hub of one's own, the only one that can be reached; with an empty cache and no token of the user's."""
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", server.address)
    template = f"{server.address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", True)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    close_session()  # clients are kept, and read their proxies when they are made
    yield server
    close_session()
    server.shutdown()
    server.server_close()
    thread.join()


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
