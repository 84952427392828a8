"""The routes of Ollama's API: both that generate, and what its clients ask about models."""

from __future__ import annotations

import hashlib
from functools import lru_cache, partial
from pathlib import Path

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlx_spec import __version__
from mlx_spec.errors import SpecError
from mlx_spec.hub.inspect import CheckpointInfo, inspect_checkpoint

from . import parsing
from .engine_thread import EngineThread
from .errors import Failure, unsupported
from .http import JSON_LINES, OLLAMA_PATH, Api, Json, answer_body, json_line
from .metrics import CountedEngine
from .models import ModelCard, checkpoint_folders
from .ollama import LATEST, ModelName, apis, find_card, timestamp
from .parameters import check_unknown
from .parsing import Fields
from .request import RawPrompts
from .settings import ServedModel, Settings

VERSION = "0.13.0"  # of the Ollama whose API this is: clients compare it with what they need
REFUSED_PATHS = {
    "embed": "there are no embeddings here",
    "embeddings": "there are no embeddings here",
    "create": "make a model with `mlx-spec convert`",
    "copy": "name a model with `mlx-spec serve --alias`",
    "delete": "remove a model with `mlx-spec rm`",
    "push": "nothing is ever uploaded here",
}


class OllamaName(Fields):
    """The name of a model, for the routes that need no more; `name` is an older field."""

    model: ModelName = None
    name: ModelName = None
    stream: bool | None = None


@lru_cache
def _inspect(folder: Path) -> CheckpointInfo:
    return inspect_checkpoint(folder, folder.name)


def _checkpoint(served: ServedModel) -> CheckpointInfo | None:
    """Return what the headers of a target say; None if it is not on this machine yet."""
    try:
        return _inspect(checkpoint_folders(served)[0])
    except SpecError:
        return None


def _model_json(name: str, found: CheckpointInfo | None) -> Json:
    tagged = name if ":" in name else name + LATEST
    details: Json = {"parent_model": "", "format": "safetensors"}
    if found is not None:
        millions = found.parameters / 1e6
        details |= {
            "family": found.family,
            "families": [found.family],
            "parameter_size": f"{millions:.1f}M" if millions < 1000 else f"{millions / 1000:.1f}B",
            "quantization_level": found.precision,
        }
    digest = hashlib.sha256(repr((name, found)).encode()).hexdigest()
    size = found.size if found else 0
    return {"name": tagged, "model": tagged, "size": size, "digest": digest, "details": details}


def _shown(card: ModelCard, found: CheckpointInfo | None) -> Json:
    """Return what `/api/show` tells of a model. Values that only a loaded model knows are left out."""
    info: Json = {"general.basename": card.name}
    if found is not None:
        values = {
            "context_length": card.context_length or found.context,
            "embedding_length": found.hidden_size,
            "block_count": found.layers,
            "attention.head_count": found.heads,
            "attention.head_count_kv": found.kv_heads,
            "vocab_size": found.vocab_size,
        }
        info |= {"general.architecture": found.family, "general.parameter_count": found.parameters}
        info |= {f"{found.family}.{key}": value for key, value in values.items() if value is not None}
    extras = [name for name, can in (("tools", card.tools), ("thinking", card.thinks)) if can]
    return {
        "modified_at": timestamp(card.created),
        "details": _model_json(card.name, found)["details"],
        "capabilities": ["completion", *extras],
        "model_info": info,
        "parameters": "",
        "template": "",
        "modelfile": "",
    }


# --- routes


def add_routes(app: FastAPI, engine: EngineThread, counted: CountedEngine, settings: Settings) -> None:
    """Add all routes under `/api/`."""
    checkpoints = {served.name: partial(_checkpoint, served) for served in settings.models}

    async def respond(http_request: Request, *, api: Api) -> Response:
        body = await parsing.read_body(http_request, api.body)
        name = engine.resolve(body.model or None)
        request = api.parse(body, name)
        check_unknown(body.options, settings.allow_extra_parameters)
        unloads = request.prompt == RawPrompts(()) and request.keep_alive == 0
        if unloads and not find_card(engine, name).loaded:
            return JSONResponse(api.writer(body, request).whole(()))  # it need not be loaded to be unloaded
        return await answer_body(http_request, body, engine=counted, settings=settings, api=api)

    for path, api in apis(engine).items():
        app.add_route(OLLAMA_PATH + path, partial(respond, api=api), methods=["POST"])

    async def version(_: Request) -> Response:
        return JSONResponse({"version": VERSION, "mlx_spec": __version__})

    async def tags(_: Request) -> Response:
        listed = [
            _model_json(name, checkpoints[card.name]()) | {"modified_at": timestamp(card.created)}
            for card in engine.models()
            for name in (card.name, *card.aliases)
        ]
        return JSONResponse({"models": listed})

    async def running(_: Request) -> Response:
        listed = []
        for status in engine.status().models:
            shown = _model_json(status.name, checkpoints[status.name]())
            size, context = status.weights + status.caches, find_card(engine, status.name).context_length
            shown |= {"size": size, "size_vram": size, "expires_at": timestamp(status.expires_at)}
            listed.append(shown | {"context_length": context})
        return JSONResponse({"models": listed})

    async def show(http_request: Request) -> Response:
        given = await parsing.read_body(http_request, OllamaName)
        card = find_card(engine, engine.resolve(given.model or given.name))
        return JSONResponse(_shown(card, checkpoints[card.name]()))

    async def pull(http_request: Request) -> Response:
        given = await parsing.read_body(http_request, OllamaName)
        try:
            engine.resolve(given.model or given.name)
        except Failure as failure:
            way = "fetch it with `mlx-spec convert`, then serve it"
            raise Failure(failure.status, f"{failure.message}; {way}", code=failure.code) from failure
        return Response(json_line({"status": "success"}) + "\n", media_type=JSON_LINES)

    async def refuse(http_request: Request) -> Response:
        path = http_request.url.path
        raise unsupported(f"{path}: is not supported: {REFUSED_PATHS[path.removeprefix(OLLAMA_PATH)]}", path)

    app.add_route("/api/version", version)
    app.add_route("/api/tags", tags)
    app.add_route("/api/ps", running)
    app.add_route("/api/show", show, methods=["POST"])
    app.add_route("/api/pull", pull, methods=["POST"])
    for path in REFUSED_PATHS:
        app.add_route(OLLAMA_PATH + path, refuse, methods=["POST", "DELETE"])
