"""Add the routes and guards of the server, and run it from its first line to its exit status."""

from __future__ import annotations

import errno
import logging
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mlx_spec import __version__
from mlx_spec.cli.command import tell
from mlx_spec.device.blas import blas_hint
from mlx_spec.errors import InvalidValue

from . import page
from .connection import Connection
from .engine import answers
from .engine.engine_thread import EngineThread
from .engine.metrics import RequestCounter, Status
from .engine.models import Loader, ModelCard, checkpoints_of, load_served
from .errors import LOG, Failure
from .http import Api, answer, answer_error
from .page import race, shelf
from .ports import is_answered
from .protocols import (
    anthropic_messages,
    ollama,
    openai_chat,
    openai_completions,
    openai_responses,
    stored_responses,
)
from .security import Bodies, Guards, PlainPaths
from .settings import CANNOT_LISTEN, Settings

RESPONSE_TIMEOUT_S = 2  # until the last bytes of a response are sent, after its request ended
# Until the head of a request comes. Clients reuse a connection, httpx within 5 s and aiohttp within 15 s: if
# the server closed it before, their request would fail.
IDLE_CONNECTION_S = 75
WRITE_TIMEOUT_S = 30.0  # to write prompts to files: they begin for 10 s, and the last one is completed


# --- routes


def create(
    settings: Settings,
    engine: EngineThread,
    bodies: Bodies | None = None,
    store: stored_responses.ResponseStore | None = None,
) -> Starlette:
    """Return the application. Its lifespan starts the engine and closes it."""

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        engine.start()
        try:
            yield
        finally:
            close_timeout_s = 2.0  # for the engine to end a round; loading a model may take longer
            try:
                await run_in_threadpool(engine.close, close_timeout_s)
            except RuntimeError:  # there is no memory for a thread
                engine.close(close_timeout_s)
            models.close()

    models = shelf.Shelf(engine, settings)
    handlers = {Failure: answer_error, HTTPException: answer_error}
    app = Starlette(lifespan=lifespan, exception_handlers=handlers)
    app.router.redirect_slashes = False
    store = store or stored_responses.ResponseStore(settings.store)
    apis: dict[str, Api] = {
        "/v1/chat/completions": openai_chat.API,
        "/v1/completions": openai_completions.API,
        "/v1/messages": anthropic_messages.API,
        "/infill": openai_completions.INFILL_API,
        "/race": race.API,
    }
    # By the beginnings of the paths whose failures they write.
    app.state.apis = {**apis, "/v1/responses": openai_chat.API}
    for path, api in apis.items():
        endpoint = partial(answer, engine=engine, settings=settings, api=api)
        app.add_route(path, endpoint, methods=["POST"])
    count_tokens = partial(anthropic_messages.count_tokens, engine=engine, settings=settings)
    app.add_route("/v1/messages/count_tokens", count_tokens, methods=["POST"])
    respond = partial(openai_responses.respond, engine=engine, settings=settings, store=store)
    app.add_route("/v1/responses", respond, methods=["POST"])
    count_input = partial(openai_responses.count_input, engine=engine, settings=settings, store=store)
    app.add_route("/v1/responses/input_tokens", count_input, methods=["POST"])
    _add_read_routes(app, engine)
    ollama.add_routes(app, engine, settings)
    stored_responses.add_routes(app, store)
    page.add_routes(app)
    shelf.add_routes(app, models)
    # Starlette raises an exception again after a handler of the application for all exceptions.
    app.add_middleware(ExceptionMiddleware, handlers={Exception: answer_error})
    app.add_middleware(Guards, settings=settings, bodies=bodies or Bodies())
    paths = frozenset(route.path for route in app.routes if isinstance(route, Route))
    # The middleware that is added last is the outermost.
    app.add_middleware(RequestCounter, metrics=engine.metrics, paths=paths)
    app.add_middleware(PlainPaths)
    return app


def _add_read_routes(app: Starlette, engine: EngineThread) -> None:
    def models(_: Request) -> Response:  # not async, so it runs on a thread: it may read files
        cards = engine.models()
        listed = [_model_json(card.name, card) for card in cards]
        listed += [_model_json(alias, card) for card in cards for alias in card.aliases]
        ends = {"first_id": listed[0]["id"], "last_id": listed[-1]["id"], "has_more": False}
        return JSONResponse({"object": "list", "data": listed, **ends})

    def model(http_request: Request) -> Response:
        name = http_request.path_params["name"]
        return JSONResponse(_model_json(name, engine.card(engine.resolve(name))))

    def health_json(status: Status) -> dict[str, Any]:
        health_names = {"ready": "ok", "closed": "draining"}  # the other states go by their own names
        return {
            "status": health_names.get(status.state, status.state),
            "service": "mlx_spec",
            "version": __version__,
            "waiting": status.waiting,
            "running": status.running,
        }

    async def health(_: Request) -> Response:
        status = engine.status()
        return JSONResponse(health_json(status), status_code=200 if status.state == "ready" else 503)

    async def page_health(_: Request) -> Response:  # browsers log every 503
        return JSONResponse(health_json(engine.status()))

    async def read_metrics(_: Request) -> Response:
        return Response(generate_latest(engine.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    app.add_route("/v1/models", models)
    app.add_route("/v1/models/{name:path}", model)
    app.add_route("/health", health)
    app.add_route("/page/health", page_health)
    app.add_route("/metrics", read_metrics)
    app.add_route("/metrics.json", lambda _: JSONResponse(engine.metrics.json()))


def _model_json(name: str, card: ModelCard) -> dict[str, Any]:
    """Return a model as OpenAI's and Anthropic's clients read it."""
    written_apart = ("name", "aliases", "template")
    facts = {key: value for key, value in vars(card).items() if key not in written_apart}
    facts |= {"type": "model", "display_name": name, "created_at": answers.timestamp(card.created)}
    facts |= {"max_input_tokens": card.context_length}
    return {"id": name, "object": "model", "owned_by": "mlx_spec", "model": card.name, **facts}


# --- the process


def run(settings: Settings, loader: Loader = load_served) -> int:
    """Serve until a signal ends it. Return the exit status: 0, or 1 if the first model cannot be loaded.

    Raises NotFound or BadCheckpoint for a model that no load can find, and InvalidValue if the address or the
    log file cannot be used.
    """
    for model in settings.models:
        for checkpoint in checkpoints_of(model, complete=False):
            _ = checkpoint.model_type
    listener = _bind(settings.host, settings.port)
    _configure_log(settings.log_file)
    engine = EngineThread(settings, loader)
    server = Server(settings, engine)
    names = ", ".join(model.name for model in settings.models)
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    url = f"http://{host}:{listener.getsockname()[1]}"
    print(f"mlx-spec: loading {names} (Ctrl-C stops the server)\n  page  {url}\n  API   {url}/v1", flush=True)
    threading.Thread(target=server.watch, name="mlx_spec watching", daemon=True).start()
    server.run([listener])
    status = 1 if server.problem else 0
    if settings.cache_folder is not None and engine.status().loading is None:
        with suppress(KeyboardInterrupt):
            engine.close(WRITE_TIMEOUT_S)
    if engine.status().state != "closed":  # the interpreter must not end while a thread is in MLX
        LOG.warning("the engine is still busy: leaving it")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


class Server(uvicorn.Server):
    """Closes requests before connections: on a signal, streams get an error and then end."""

    def __init__(
        self,
        settings: Settings,
        engine: EngineThread,
        *,
        bodies: Bodies | None = None,
        connection: type[Connection] = Connection,
        idle_connection_s: int = IDLE_CONNECTION_S,
    ) -> None:
        self._bodies = bodies or Bodies()
        super().__init__(
            uvicorn.Config(
                create(settings, engine, self._bodies),
                http=connection,
                ws="none",
                loop="asyncio",
                lifespan="on",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                backlog=256,  # accepted at once, before the first of them can be refused
                timeout_keep_alive=idle_connection_s,
                timeout_graceful_shutdown=RESPONSE_TIMEOUT_S,
            )
        )
        self._engine = engine
        self._has_log_file = settings.log_file is not None
        self.problem: str | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End the server on a signal. uvicorn's own handler would raise the signal again in the end.

        A second signal changes nothing: the rest takes seconds only.
        """
        self.should_exit = True
        # Not on this thread: the signal may have interrupted it while it holds the engine's lock.
        with suppress(RuntimeError):  # without memory for a thread, the lifespan closes the engine
            threading.Thread(target=self._engine.close, name="mlx_spec closing", daemon=True).start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Shut down, without waiting for clients that have sent half a request."""
        self._bodies.end()
        await super().shutdown(sockets)

    def watch(self) -> None:
        """Wait for the first model and say that it is ready; end the server if it cannot be loaded."""
        began, seconds, shows = time.monotonic(), 0, sys.stdout.isatty()
        while not (is_loaded := self._engine.wait_loaded(1.0)) and self._engine.status().state == "loading":
            seconds = round(time.monotonic() - began)
            if shows:  # the progress of measuring costs is written over this line
                print(f"\rmlx-spec: loading, {seconds} s ", end="", flush=True)
        if is_loaded:
            start = "\r\x1b[K" if shows and seconds else ""
            print(f"{start}mlx-spec: ready in {time.monotonic() - began:.0f} s", flush=True)
            if hint := blas_hint():
                tell(hint)
            if self._engine.wait_ended():
                self._fail("the engine ended: the log says why")
            return
        if self._engine.status().state != "failed":  # it was ended before
            return
        self._fail(self._engine.status().problem)

    def _fail(self, problem: str | None) -> None:
        self.problem = problem
        if problem and self._has_log_file:  # else the log has said so on stderr
            print(f"mlx-spec: {problem}", file=sys.stderr)
        self.should_exit = True


def _bind(host: str, port: int) -> socket.socket:
    """Return a socket that listens. Raises InvalidValue."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        dual = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        backlog = 128  # connections that wait to be accepted
        if port and is_answered(host, port):
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        return socket.create_server(address, family=family, backlog=backlog, dualstack_ipv6=dual)
    except UnicodeError as error:  # a name that IDNA cannot encode
        raise InvalidValue(f"{CANNOT_LISTEN} {host}: that is not a name; choose another --host") from error
    except OSError as error:
        is_name = isinstance(error, socket.gaierror)  # the text of other errors repeats the address
        reason = str(error.strerror if is_name else os.strerror(error.errno or 0)).lower()
        raise InvalidValue(f"{CANNOT_LISTEN} {host}, port {port}: {reason}; choose another --port") from error


# --- the log


class DiscreetFormatter(logging.Formatter):
    """Write the type of an exception and where it was raised; its text may quote a request."""

    def formatException(self, ei: Any) -> str:
        """Return one line."""
        error_type, _, trace = ei
        max_frames = 6  # innermost frames that are named; the outer ones are always the same
        frames = traceback.extract_tb(trace)[-max_frames:]
        calls = " < ".join(f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in reversed(frames))
        return f"{error_type.__name__ if error_type else 'no exception'} at {calls}"


def _configure_log(file: Path | None) -> None:
    """Send the log to a file, or its warnings to stderr. Raises InvalidValue for a bad file."""
    handler: logging.Handler
    try:
        handler = logging.StreamHandler(sys.stderr) if file is None else logging.FileHandler(file)
    except OSError as error:
        raise InvalidValue(f"the log file {file} cannot be written: {error.strerror}") from error
    logging.raiseExceptions = False  # a full disk does not justify a traceback with every request
    prefix = "mlx-spec: " if file is None else "%(asctime)s %(levelname)s "
    handler.setFormatter(DiscreetFormatter(f"{prefix}%(message)s"))
    loggers = (LOG.name, "uvicorn.error", "asyncio")
    for name in loggers:
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(logging.ERROR)  # uvicorn's warnings blame clients, and name packages to install
    LOG.setLevel(logging.WARNING if file is None else logging.INFO)
    package = logging.getLogger("mlx_spec")  # of the code below the server
    package.handlers, package.propagate = [handler], False
