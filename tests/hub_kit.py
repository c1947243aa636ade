"""A small server that answers as the hub's own interface does, and the only hub that a test can reach."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import close_session, constants

REPO, TOKEN = "someone/some-adapter", "hf_mine"


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
        if path == "/api/whoami-v2":
            known = self.headers.get("Authorization") == f"Bearer {TOKEN}"
            found = {"name": "someone", "type": "user", "orgs": []} if known else {"error": "Invalid token"}
            self.answer(found, status=200 if known else 401)
        elif files is None:
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


@contextmanager
def running_hub(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[Hub]:
    """A hub of one's own, the only one that can be reached; with an empty cache in `folder`, and nobody logged in."""
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", server.address)
    template = f"{server.address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", True)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(folder / "token"))
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    close_session()  # clients are kept, and read their proxies when they are made
    yield server
    close_session()
    server.shutdown()
    server.server_close()
    thread.join()


def log_in(monkeypatch: pytest.MonkeyPatch, token: str) -> None:
    """Have a token that is taken unasked, as `hf auth login` leaves one."""
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", False)
    monkeypatch.setenv("HF_TOKEN", token)
