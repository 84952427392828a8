"""A small Hugging Face Hub on this machine: enough of it for a download."""

from __future__ import annotations

import hashlib
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants

from support.waiting import LIMIT

ROOT = Path(__file__).parents[2]
E2B, ASSISTANT = "mlx-community/gemma-4-e2b-it-4bit", "google/gemma-4-E2B-it-assistant"
COMMIT, PUSHED = "0" * 39 + "1", "0" * 39 + "2"


@dataclass
class Hub:
    """The served repositories, the requests, and the faults. Weights are served as LFS files."""

    repositories: dict[str, Path]  # owner/name -> folder; names with "gated" or "torn" answer so
    url: str = ""
    asked: list[str] = field(default_factory=list)  # paths, "PATH from N" for a part
    sent: int = 0  # bytes
    cut_after: int = 0  # bytes of weights after which the connection breaks
    cuts: int = 0  # how many times it does
    breaks: threading.Event = field(default_factory=threading.Event)  # until it is set, it stalls instead
    swapped: bytes | None = None  # content that is sent instead of the weights
    xet: tuple[str, str] | None = None  # a storage of Xet and the hash of the weights in it
    etag: str | None = None  # that of every file, instead of its own
    named: tuple[str, str] | None = None  # the commit and a file that it says a repository has
    pushed: dict[str, Path] = field(default_factory=dict)  # what main holds by now; else COMMIT is main

    def variables(self, home: Path) -> dict[str, str]:
        """The environment of a process that asks this hub and keeps its cache in `home`."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HOME": str(home),
            "PATH": "",
        }

    def take_place(self, patch: pytest.MonkeyPatch, cache: Path) -> None:
        """Let this process ask this hub, and keep its cache in a folder."""
        template = self.url + "/{repo_id}/resolve/{revision}/{filename}"
        settings = {"ENDPOINT": self.url, "HUGGINGFACE_CO_URL_TEMPLATE": template, "HF_HUB_CACHE": str(cache)}
        for name, value in settings.items():
            patch.setattr(constants, name, value)


@contextmanager
def serving(repositories: dict[str, Path]) -> Iterator[Hub]:
    """A hub with these repositories, for as long as the block runs."""
    hub = Hub(repositories)
    hub.breaks.set()
    server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield hub
    hub.breaks.set()
    server.shutdown()
    server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: Any) -> None:
        """Say nothing of a client that hangs up: stderr is that of the tests."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(*_)


def _describe(file: Path) -> dict[str, Any]:
    """A file as the tree of a repository lists it."""
    size = file.stat().st_size
    entry: dict[str, Any] = {"type": "file", "path": file.name, "rfilename": file.name, "size": size}
    if file.suffix == ".safetensors":
        sha = hashlib.sha256(file.read_bytes()).hexdigest()
        entry["lfs"] = {"oid": sha, "sha256": sha, "size": size, "pointerSize": 100}
    entry["oid"] = entry["blobId"] = hashlib.sha1(file.read_bytes()).hexdigest()
    return entry


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    commit: str  # that the request means

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        start = (self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").split("-")[0]
        self.hub.asked.append(path if start == "0" else f"{path} from {start}")
        parts = path.removeprefix("/api/models").strip("/").split("/")
        name = "/".join(parts[:2])
        folder = self.hub.repositories.get(name)
        revision = parts[3] if len(parts) > 3 else "main"
        self.commit = PUSHED if revision == "main" and name in self.hub.pushed else COMMIT
        if PUSHED in (revision, self.commit):
            self.commit, folder = PUSHED, self.hub.pushed.get(name)
        if "gated" in name:
            self._error(403, "GatedRepo")
        elif "torn" in name:
            self._error(500, "Broken")
        elif folder is None:
            self._error(401, "RepoNotFound")
        elif path.endswith("/xet-token") and self.hub.xet is not None:
            self._send(json.dumps({"casUrl": self.hub.xet[0], "exp": 2**32, "accessToken": "x"}).encode())
        elif path.startswith("/api/"):
            self._answer(name, folder, revision, "tree" in parts[2:3])
        elif not (file := folder / parts[-1]).is_file():
            self._error(404, "EntryNotFound")
        else:
            self._send_file(file)

    do_HEAD = do_GET

    def _answer(self, name: str, folder: Path, revision: str, is_tree: bool) -> None:
        if revision not in ("main", "v1", self.commit):
            return self._error(404, "RevisionNotFound")
        files = [_describe(file) for file in sorted(folder.iterdir()) if file.is_file()]
        whole = {"id": name, "modelId": name, "sha": self.commit, "siblings": files}
        if self.hub.named is not None:
            whole["sha"], whole["siblings"] = self.hub.named[0], [files[0] | {"rfilename": self.hub.named[1]}]
        return self._send(json.dumps(files if is_tree else whole).encode())

    def _send_file(self, file: Path) -> None:
        entry = _describe(file)
        content = file.read_bytes()
        if file.suffix == ".safetensors" and self.hub.swapped is not None:
            content = self.hub.swapped
        self._send(content, entry["lfs"]["oid"] if "lfs" in entry else entry["oid"], "lfs" in entry)

    def _send(self, content: bytes, etag: str = "", breaks: bool = False) -> None:
        wanted = self.headers.get("Range")
        first, _, last = (wanted or "bytes=0-").removeprefix("bytes=").partition("-")
        part = content[int(first) : int(last) + 1 if last else None]
        self.send_response(206 if wanted else 200)
        if wanted:
            self.send_header("Content-Range", f"bytes {first}-{int(first) + len(part) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(part)))
        self.send_header("ETag", f'"{self.hub.etag or etag}"')
        self.send_header("X-Repo-Commit", self.commit)
        if breaks and self.hub.xet is not None:
            repository = "/".join(self.path.split("/")[1:3])
            self.send_header("X-Xet-Hash", self.hub.xet[1])
            self.send_header("X-Xet-Refresh-Route", f"{self.hub.url}/api/models/{repository}/xet-token")
        self.end_headers()
        if self.command != "GET":
            return
        if breaks and self.hub.cuts > 0:
            self.hub.cuts -= 1
            self.wfile.write(part[: self.hub.cut_after])
            self.wfile.flush()
            self.hub.breaks.wait(10 * LIMIT)
        else:
            self.hub.sent += len(part)
            self.wfile.write(part)

    def _error(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass
