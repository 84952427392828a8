"""Every way in which a request can fail, as an error body of the protocol that was spoken."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlx_spec.apps.server.bodies import refusal
from mlx_spec.apps.server.bridge import frame
from mlx_spec.apps.server.failures import Failure, broken, invalid
from mlx_spec.apps.server.log import LOG
from mlx_spec.apps.server.messages.errors import error_json, translated
from mlx_spec.apps.server.stream import data

MESSAGES = "/v1/messages"
CODES = {404: "unknown_url", 405: "method_not_allowed"}


def response_of(path: str, failure: Failure) -> Response:
    """The response to a request for `path` that failed before it was answered."""
    if path.startswith(MESSAGES):
        found = refusal(translated(failure), error_json(failure))
    else:
        found = refusal(failure, failure.body)
    if failure.status == 401:
        found.headers["www-authenticate"] = "Bearer"
    return found


def add_handlers(app: FastAPI) -> None:
    """Have `app` answer what its routes raise."""

    async def failed(request: Request, error: Exception) -> Response:
        assert isinstance(error, Failure)
        return response_of(request.url.path, error)

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path = request.url.path
        told = {
            404: f"there is nothing at {path[:128]}",
            405: f"{request.method} is not for {path[:128]}",
        }
        message = told.get(error.status_code, str(error.detail))
        found = response_of(path, Failure(error.status_code, message, code=CODES.get(error.status_code)))
        found.headers.update(error.headers or {})
        return found

    async def malformed(request: Request, _error: Exception) -> Response:
        return response_of(request.url.path, invalid("the request is not what is expected here"))

    app.add_exception_handler(Failure, failed)
    app.add_exception_handler(HTTPException, refused)
    app.add_exception_handler(RequestValidationError, malformed)


class LastResort:
    """ASGI: our own bugs become a 500 without details, or the error at the end of a stream."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass it on."""
        begun: Message | None = None

        async def watched(message: Message) -> None:
            nonlocal begun
            begun = message if begun is None else begun
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception as error:
            if scope["type"] != "http":
                raise
            LOG.error("a request failed", exc_info=error)
            await _end(scope, receive, send, begun)


def _event(path: str, failure: Failure) -> str:
    """The event that ends a stream which failed, as the protocol of its path has it."""
    if path.startswith(MESSAGES):
        return frame("error", error_json(failure))
    return data(failure.body)


async def _end(scope: Scope, receive: Receive, send: Send, begun: Message | None) -> None:
    if begun is None:
        await response_of(scope["path"], broken())(scope, receive, send)
        return
    streams = any(value.startswith(b"text/event-stream") for _, value in begun.get("headers", ()))
    last = _event(scope["path"], broken()).encode() if streams else b""
    await send({"type": "http.response.body", "body": last, "more_body": False})
