"""A stand-in for the Hugging Face hub on this machine, which huggingface_hub's client talks to.

It answers the endpoints that the client uses to resolve a revision, list files, check the access to
a gated repository, and download a file. https://huggingface.co/docs/hub/api describes them.
"""

import dataclasses
import functools
import hashlib
import json
import re
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

#: The only token that the hub accepts.
TOKEN = "hf_secretsecret"

_ROUTES = {
    "info": r"/api/(models|datasets)/([^/]+/[^/]+)(?:/revision/([^/?]+))?",
    "tree": r"/api/(models|datasets)/([^/]+/[^/]+)/tree/([^/?]+)",
    "access": r"/api/(models|datasets)/([^/]+/[^/]+)/auth-check()",
    "file": r"/(?:(datasets)/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)",
}


@dataclasses.dataclass(kw_only=True)
class HubRepository:
    """A repository: revision -> commit, and commit -> path -> content."""

    is_gated: bool = False
    is_private: bool = False
    revisions: dict[str, str] = dataclasses.field(default_factory=dict)
    commits: dict[str, dict[str, bytes]] = dataclasses.field(default_factory=dict)


def use_hub(
    monkeypatch: pytest.MonkeyPatch, url: str, home: Path, *, is_offline: bool = False
) -> None:
    """Let huggingface_hub, in this process and in those that it starts, use a hub and a cache.

    Args:
        url: address of the hub.
        home: HF_HOME.
    """
    variables = {"HF_ENDPOINT": url, "HF_HOME": str(home), "HF_HUB_OFFLINE": str(int(is_offline))}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    values = {
        "ENDPOINT": url,
        "HUGGINGFACE_CO_URL_TEMPLATE": url + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_CACHE": str(home / "hub"),
        "HF_HUB_OFFLINE": is_offline,
        "HF_TOKEN_PATH": str(home / "token"),
    }
    for name, value in values.items():
        monkeypatch.setattr(constants, name, value)


class StandInHub:
    """The server; use it as a context manager.

    Attributes:
        url: its address.
        requests: method and path of all requests, in order.
        repositories: ("models" or "datasets", name) -> repository.
    """

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.repositories: dict[tuple[str, str], HubRepository] = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Handler, self))
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> "StandInHub":
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def commit(
        self,
        name: str,
        files: dict[str, bytes] | Path,
        *,
        kind: str = "models",
        revision: str = "main",
        is_gated: bool = False,
        is_private: bool = False,
    ) -> str:
        """Commit files, all that the repository has from now on, and return the commit.

        Args:
            files: path -> content, or a directory.
            is_gated: whether reading files needs the token; for a new repository.
            is_private: whether everything needs the token; for a new repository.
        """
        if isinstance(files, Path):
            paths = sorted(path for path in files.rglob("*") if path.is_file())
            files = {path.relative_to(files).as_posix(): path.read_bytes() for path in paths}
        key = (kind, name)
        new = HubRepository(is_gated=is_gated, is_private=is_private)
        repository = self.repositories.setdefault(key, new)
        number = len(repository.commits)
        commit = hashlib.sha1(f"{kind} {name} {number}".encode()).hexdigest()
        repository.commits[commit] = files
        repository.revisions[revision] = commit
        return commit

    def downloads(self) -> list[str]:
        """Return the paths of the files that were downloaded, in order."""
        matches = [re.fullmatch(r"GET .*/resolve/[^/]+/(.+)", each) for each in self.requests]
        return [match[1] for match in matches if match]


class _Handler(BaseHTTPRequestHandler):
    def __init__(self, hub: StandInHub, *args: Any):
        self._hub = hub
        super().__init__(*args)  # answers the request

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = urllib.parse.urlsplit(self.path).path
        self._hub.requests.append(f"{self.command} {urllib.parse.unquote(path)}")
        for route, pattern in _ROUTES.items():
            match = re.fullmatch(pattern, path)
            if match is not None:
                kind, name, *rest = match.groups()
                self._answer_for(
                    route,
                    self._hub.repositories.get((kind or "models", name)),
                    [urllib.parse.unquote(part or "") for part in rest],
                )
                return
        self._send(404)

    def _answer_for(self, route: str, repository: HubRepository | None, rest: list[str]) -> None:
        authorization = self.headers.get("authorization")
        is_known = authorization == f"Bearer {TOKEN}"
        if authorization is not None and not is_known:
            self._send(401, message="Invalid credentials in Authorization header")
        elif repository is None or (repository.is_private and not is_known):
            self._send(404 if is_known else 401, error="RepoNotFound")
        elif route in ("access", "file") and repository.is_gated and not is_known:
            self._send(401, error="GatedRepo")
        elif route == "access":
            self._send_json({})
        else:
            self._answer_at(route, repository, rest)

    def _answer_at(self, route: str, repository: HubRepository, rest: list[str]) -> None:
        revision = rest[0] or "main"
        commit = repository.revisions.get(revision, revision)
        files = repository.commits.get(commit)
        if files is None:
            self._send(404, error="RevisionNotFound")
        elif route == "info":
            names = [{"rfilename": path} for path in files]
            self._send_json({"id": "x", "sha": commit, "siblings": names, "tags": []})
        elif route == "tree":
            self._send_json(
                [
                    {"type": "file", "path": path, "size": len(content), "oid": _oid(content)}
                    for path, content in files.items()
                ]
            )
        elif rest[1] not in files:
            self._send(404, error="EntryNotFound")
        else:
            content = files[rest[1]]
            headers = {"ETag": f'"{_oid(content)}"', "X-Repo-Commit": commit}
            self._send_span(content, headers)

    def _send_span(self, content: bytes, headers: dict[str, str]) -> None:
        """Send a file, or the part of it that a Range header asks for."""
        match = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("range", ""))
        if match is None:
            self._send(200, content, headers=headers)
        elif match[1]:
            self._send(206, content[int(match[1]) : int(match[2]) + 1], headers=headers)
        else:
            self._send(206, content[-int(match[2]) :], headers=headers)

    def _send_json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), headers={"Content-Type": "application/json"})

    def _send(
        self,
        status: int,
        content: bytes = b"",
        *,
        error: str | None = None,
        message: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        self.send_response(status)
        errors = {"X-Error-Code": error, "X-Error-Message": message or error}
        for header, value in {**(headers or {}), **errors}.items():
            if value is not None:
                self.send_header(header, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)


def _oid(content: bytes) -> str:
    """Return the name of a content in git."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
