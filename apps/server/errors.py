"""Failures of requests, OpenAI's error object, and the log."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

from mlx_spec.errors import NotFinite, SpecError

LOG = logging.getLogger("mlx_spec.server")  # ids, counts and places in the code, but no text of a request
MAX_NAME_CHARS = 200  # characters of a name that the client made up; longer ones are not sent back whole


@dataclass(eq=False)
class Failure(Exception):
    """A request that is refused or failed: an HTTP status and the parts of OpenAI's error object."""

    status: int
    message: str
    _: KW_ONLY
    type: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    retry_after: int | None = None  # seconds, sent as a header
    details: Mapping[str, Any] | None = None  # of Anthropic's error object, for its SDK to react

    def __post_init__(self) -> None:
        """Cut the middle out of a long message: the field and the way out are at its ends."""
        if len(self.message) > 600:
            self.message = f"{self.message[:400]} ... {self.message[-195:]}"
        self.param = self.param and self.param[:MAX_NAME_CHARS]
        super().__init__(self.message)

    @property
    def body(self) -> dict[str, Any]:
        """Return OpenAI's error object, always with all four keys."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": error}


def invalid(message: str, param: str | None = None, code: str | None = "invalid_value") -> Failure:
    """Return the failure for a value that cannot be honoured: 400."""
    return Failure(400, message, param=param, code=code)


def invalid_field(field: str, problem: object, code: str = "invalid_value") -> Failure:
    """Return the failure for a value of a field that cannot be honoured: 400."""
    return invalid(f"{field}: {problem}", field, code)


def missing(field: str, problem: str = "Field required") -> Failure:
    """Return the failure for a field that is required: 400."""
    return invalid_field(field, problem, "missing_required_parameter")


def unsupported(message: str, param: str) -> Failure:
    """Return the failure for a value that is known but not supported: 400."""
    return Failure(400, message, param=param, code="unsupported_value")


def unsupported_field(field: str, problem: str) -> Failure:
    """Return the failure for a value of a field that is known but not supported: 400."""
    return unsupported(f"{field}: {problem}", field)


def unknown_model(name: str, known: str) -> Failure:
    """Return the failure for a model that the server does not have: 404."""
    shown = name if len(name) <= MAX_NAME_CHARS else f"{name[:MAX_NAME_CHARS]}..."
    message = f"no model {shown!r} here: there is {known}"
    return Failure(404, message, param="model", code="model_not_found")


def queue_full(waiting: int, seconds: int) -> Failure:
    """Return the failure for a request that finds the queue full: 429."""
    message = f"{waiting} requests are waiting, which is the limit: try again in {seconds} s"
    return Failure(429, message, type="rate_limit_error", code="queue_full", retry_after=seconds)


def unavailable(message: str, code: str) -> Failure:
    """Return the failure for a server that is loading or shutting down: 503."""
    return Failure(503, message, type="server_error", code=code, retry_after=5)


def shutting_down() -> Failure:
    """Return the failure for a server that ends: 503."""
    return unavailable("the server is shutting down", "shutting_down")


def internal_error() -> Failure:
    """Return the failure for a bug of the server: 500, without details."""
    message = "the server failed on this request; its log says why"
    return Failure(500, message, type="server_error", code="internal_error")


def hung_up() -> Failure:
    """Return the failure for a request whose client hung up: 499, which no client reads."""
    return Failure(499, "the client hung up", code="disconnected")


def to_failure(error: BaseException) -> Failure:
    """Return the failure for an exception; log an unexpected one."""
    if isinstance(error, Failure):
        return error
    if isinstance(error, NotFinite):
        LOG.error("a request failed: %s", error)
        return Failure(500, str(error), type="server_error", code="not_finite")
    if isinstance(error, SpecError):
        return invalid(str(error))
    LOG.error("a request failed", exc_info=error)
    return internal_error()
