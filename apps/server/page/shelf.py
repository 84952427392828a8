"""Manage the models of this machine for the page: list, load, unload, fetch and remove them.

Only the server's own page may ask, on this machine: its origin, a loopback name, and the token that only a
page of this origin can read. A server with an API key, or one that other machines reach, has none of this. A
name in a request is looked up among the models on the disk and in the catalogue; it never becomes a path.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlx_spec import hub
from mlx_spec.device import memory_for_models
from mlx_spec.errors import NotFound, SpecError
from mlx_spec.hub.catalog import ALIASES, LOOKUP, SMOLLM2, PairSpec, find_alias
from mlx_spec.hub.download import on_disk
from mlx_spec.hub.inspect import CheckpointInfo, ConvertedPair
from mlx_spec.hub.local import LocalModel, disk_size, local_models, partners, plan_removal
from mlx_spec.hub.names import cache_folder, repository_folder
from mlx_spec.sampling import Sampling

from ... import listing, roofline
from ...models import smollm2_bytes
from ..engine.answers import Event, Failed
from ..engine.engine_thread import EngineThread
from ..errors import Failure, invalid
from ..requests.parsing import Fields, read_body
from ..requests.request import GenerationRequest, RawPrompts
from ..settings import ServedModel, Settings, is_loopback, is_same_origin, origin_names


class NamedModel(Fields):
    """The body of a request: a name of the list."""

    name: str


@dataclass
class Fetch:
    """A download that `mlx-spec pull` runs. What arrived stays, so a later one goes on from there."""

    name: str
    repositories: Sequence[str]
    total: int  # bytes, 0 if it is not known
    state: Literal["running", "done", "failed", "stopped"] = "running"
    problem: str | None = None
    process: subprocess.Popen[str] | None = field(default=None, repr=False)
    folder: Path | None = None  # where pip writes while it downloads a package

    def json(self) -> dict[str, Any]:
        folders = [*map(repository_folder, self.repositories)]
        folders += [] if self.folder is None else [self.folder]
        done = min(sum(map(disk_size, folders)), self.total)
        facts = {"name": self.name, "state": self.state, "problem": self.problem}
        return facts | {"bytes": self.total if self.state == "done" else done, "total": self.total}


class Shelf:
    """The models that the page shows and manages."""

    def __init__(self, engine: EngineThread, settings: Settings) -> None:
        self._engine, self._settings = engine, settings
        self._token = secrets.token_urlsafe(32)
        self._models: list[LocalModel] | None = None  # on the disk; None: to be read again
        self._fetches: dict[str, Fetch] = {}
        self._problems: dict[str, str] = {}  # why a model could not be loaded, by its served name
        self._names = {one.spec.target: one.name for one in settings.models}  # served names by target
        self._lock = threading.Lock()

    def check(self, http_request: Request, *, writes: bool) -> None:
        """Raise Failure (403) unless the server's own page on this machine asks."""
        headers = http_request.headers
        origin, host = headers.get("origin"), headers.get("host", "")
        is_own = is_same_origin(origin, host) if origin is not None else not writes
        is_own &= headers.get("sec-fetch-site", "same-origin") == "same-origin"
        is_here = is_loopback(self._settings.host) and "localhost" in origin_names(f"http://{host}")
        token = headers.get("x-page-token", "")
        if self._settings.api_key is not None or not is_here or not is_own:
            message = (
                "models are managed by the server's own page on this machine only, and not if the server has "
                "a key or other machines reach it: use `mlx-spec models`, `pull` and `rm`"
            )
            raise Failure(403, message, type="permission_error", code="models_not_managed")
        if writes and not secrets.compare_digest(token.encode(), self._token.encode()):
            message = "the page is older than the server: load it again"
            raise Failure(403, message, type="permission_error", code="page_token")

    # --- what there is

    def json(self) -> dict[str, Any]:
        """Return the models on the disk and in the catalogue. This reads files."""
        with self._lock:
            if self._models is None:
                with suppress(SpecError):  # its package may be here, and its checkpoint not yet
                    on_disk(SMOLLM2)
                self._models = local_models()
            models = self._models
        budget, chip = memory_for_models(), roofline.this_chip()
        here = {model.name for model in models}
        disk = [self._model_json(model, models, budget, chip) for model in models if not model.is_drafter]
        return {
            "token": self._token,
            "disk": disk,
            "catalogue": [
                {"name": name, "target": target, "drafter": spec.drafter}
                for name in [SMOLLM2, *ALIASES]
                if (spec := find_alias(name) or PairSpec(name)) and (target := spec.target) not in here
            ],
        } | self.progress()

    def progress(self) -> dict[str, Any]:
        """Return what changes by itself: downloads, and which models are loaded."""
        status = self._engine.status()
        return {
            "fetches": [one.json() for one in list(self._fetches.values())],
            "loaded": [one.name for one in status.models],
            "loading": status.loading,
            "problems": dict(self._problems),
        }

    def _model_json(
        self, model: LocalModel, models: list[LocalModel], budget: int, chip: roofline.Chip | None
    ) -> dict[str, Any]:
        context, need = _memory_with_context(model, models) or (None, None)
        gain = None if chip is None or model.problem else listing.expected_gain(model.name, chip)
        return {
            "name": model.name,
            "shown": self._served_name(model),
            "size": model.size,
            "context": context,
            "memory": need,
            "fits": None if need is None else need <= budget,
            "drafter": listing.drafter_words(model, models),
            "gain": gain,
            "problem": model.problem,
            "removable": model.origin != "bundled" and model.name not in self._first_targets(),
        }

    def _first_targets(self) -> set[str]:
        return {one.spec.target for one in self._settings.models}

    def _served_name(self, model: LocalModel) -> str:
        """Return the name for requests: a short name, the repository or the folder's name."""
        if model.name in self._names:
            return self._names[model.name]
        short = next((n for n in ALIASES if (spec := find_alias(n)) and spec.target == model.name), None)
        return short or (model.name if model.origin == "cached" else Path(model.name).name)

    def _find(self, name: str) -> LocalModel:
        """Return the model of the list with that name. Raises Failure (404)."""
        with self._lock:
            models = self._models or []
        for model in models:
            if model.name == name:
                return model
        raise Failure(404, "no such model is on the list: load the page again", code="model_not_found")

    # --- what the page may do

    def load(self, name: str) -> None:
        """Offer a model of the disk to requests, and load it."""
        model = self._find(name)
        if model.problem or model.is_drafter:
            raise invalid(model.problem or f"{name} is a drafter: load its target", "name")
        served_name = self._served_name(model)
        if name not in self._names:
            self._engine.offer(ServedModel(served_name, _spec(model, self._models or [])))
            self._names[name] = served_name
        self._ask(served_name, None)

    def unload(self, name: str) -> None:
        """Give the memory of a model back once no request uses it."""
        if (served_name := self._names.get(self._find(name).name)) is not None:
            self._ask(served_name, 0)

    def _ask(self, served_name: str, keep_alive: float | None) -> None:
        """Send the engine a request without a prompt, which only loads or unloads its model."""
        self._problems.pop(served_name, None)

        def send(event: Event) -> None:
            if isinstance(event, Failed):
                self._problems[served_name] = event.failure.message

        request = GenerationRequest(served_name, RawPrompts(()), Sampling(), keep_alive=keep_alive)
        self._engine.submit(request, send)

    def plan(self, name: str) -> dict[str, Any]:
        """Return what a download would take; `missing` is None if it is not known. Asks the Hub.

        Raises NotFound.
        """
        facts = {"name": name, "free": hub.free_bytes(cache_folder())}
        if name == SMOLLM2:
            size = smollm2_bytes()
            return facts | {"missing": size, "total": size or 0}
        plans = [hub.plan(repository) for repository in self._wanted(name)]
        return facts | {
            "missing": sum(one.missing for one in plans),
            "total": sum(one.total for one in plans),
        }

    def fetch(self, name: str) -> None:
        """Begin a download, or go on with one that ended early."""
        wanted = self._wanted(name)
        if (before := self._fetches.get(name)) is not None and before.state == "running":
            return
        fetch = self._fetches[name] = Fetch(name, wanted, int(self.plan(name)["total"]))
        fetch.folder = None if wanted else Path(tempfile.mkdtemp(prefix="mlx_spec-"))
        fetch.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "mlx_spec", "pull", name],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=os.environ | ({} if fetch.folder is None else {"TMPDIR": str(fetch.folder)}),
        )
        threading.Thread(target=self._watch, args=(fetch,), name="mlx_spec fetching", daemon=True).start()

    def _watch(self, fetch: Fetch) -> None:
        process = fetch.process
        assert process is not None and process.stderr is not None
        last = ""
        with process:
            for line in process.stderr:
                last = line.strip().rpartition("\r")[2].removeprefix("mlx-spec: ") or last
        if process.returncode == 0:
            fetch.state = "done"
        elif fetch.state == "running":
            fetch.state, fetch.problem = "failed", last[:400]
        if fetch.folder is not None:
            shutil.rmtree(fetch.folder, ignore_errors=True)
        with self._lock:
            self._models = None

    def stop(self, name: str) -> None:
        """Stop a download; what arrived stays."""
        fetch = self._fetches.get(name)
        if fetch is not None and fetch.process is not None and fetch.state == "running":
            fetch.state = "stopped"
            fetch.process.terminate()

    def remove(self, name: str) -> None:
        """Remove a model from the disk; a loaded one first gives its memory back."""
        model = self._find(name)
        if model.name in self._first_targets():
            raise invalid(f"{name} is what this server was started with: stop it, then `mlx-spec rm`", "name")
        served_name = self._names.get(model.name)
        if served_name in {one.name for one in self._engine.status().models}:
            raise invalid(f"{served_name} is loaded: unload it first", "name")
        plan_removal(model.name).carry_out()
        if served_name is not None:
            self._engine.withdraw(served_name)
            del self._names[model.name]
        with self._lock:
            self._models = None

    def close(self) -> None:
        for name in list(self._fetches):
            self.stop(name)

    def _wanted(self, name: str) -> list[str]:
        """Return the repositories of a name of the catalogue or list. Raises Failure (404)."""
        if name == SMOLLM2:
            return []
        spec = find_alias(name) if name in ALIASES else PairSpec(self._find(name).name)
        return [repository for repository in (spec and (spec.target, spec.drafter)) or () if repository]


def _memory_with_context(
    model: LocalModel, models: Sequence[LocalModel], most: int = 2**15
) -> tuple[int, int] | None:
    """Return a length of conversation, up to `most` tokens, and the bytes that all takes with it."""
    info = model.found
    target = info.target if isinstance(info, ConvertedPair) else info
    if target is None or not target.contexts:
        return None
    sizes: Mapping[int, int] = target.contexts
    tokens = max((length for length in sizes if length <= most), default=min(sizes))
    if isinstance(info, ConvertedPair):
        return tokens, sizes[tokens] + (info.drafter.size if info.drafter else 0)
    here = partners(model, models)[:1]
    return tokens, sizes[tokens] + sum(other.size for other in models if other.name in here)


def _spec(model: LocalModel, models: Sequence[LocalModel]) -> PairSpec:
    """Return a pair that loads without a download: with the model's own drafter, or one on this disk."""
    info = model.found
    if not isinstance(info, CheckpointInfo) or info.speculative_heads == "present":
        return PairSpec(model.name)
    here = partners(model, models)
    return PairSpec(model.name, here[0] if here else LOOKUP)


def add_routes(app: Starlette, shelf: Shelf) -> None:
    """Add the routes below `/page/models`."""

    def view(read: Callable[[], Any]) -> Callable[[Request], Any]:
        async def answer(http_request: Request) -> Response:
            shelf.check(http_request, writes=False)
            return JSONResponse(await run_in_threadpool(read))

        return answer

    def action(act: Callable[[str], Any]) -> Callable[[Request], Any]:
        async def answer(http_request: Request) -> Response:
            shelf.check(http_request, writes=True)
            body = await read_body(http_request, NamedModel)
            try:
                result = await run_in_threadpool(act, body.name)
            except NotFound as error:
                raise Failure(404, str(error), code="not_found") from error
            except SpecError as error:
                raise invalid(str(error), "name") from error
            return JSONResponse(result or shelf.progress())

        return answer

    app.add_route("/page/models", view(shelf.json))
    app.add_route("/page/models/progress", view(shelf.progress))
    for act in (shelf.load, shelf.unload, shelf.plan, shelf.fetch, shelf.stop, shelf.remove):
        app.add_route(f"/page/models/{act.__name__}", action(act), methods=["POST"])
