"""What a client is told when a request cannot be answered."""

from __future__ import annotations

import logging
from typing import Any

from mlx_spec.errors import PromptTooLong, SpecError

LONGEST_NAME = 200  # characters of what a client made up that it is told

_log = logging.getLogger("mlx_spec.server")


class Failure(Exception):
    """A request that is refused or failed, with the HTTP status and the parts of OpenAI's error object."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,  # seconds, sent as a header
    ) -> None:
        super().__init__(message)
        self.status, self.message = status, message
        self.type, self.param, self.code = type, param, code
        self.retry_after = retry_after

    @property
    def body(self) -> dict[str, Any]:
        """The error object of the response: all four keys, always."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": error}


def invalid(message: str, param: str | None = None, code: str | None = "invalid_value") -> Failure:
    """A value that cannot be honoured: 400."""
    return Failure(400, message, param=param, code=code)


def unsupported(message: str, param: str) -> Failure:
    """A value that is known and not supported: 400."""
    return Failure(400, message, param=param, code="unsupported_value")


def no_such_model(name: str, known: str) -> Failure:
    """404, before anything is loaded or unloaded."""
    shown = name if len(name) <= LONGEST_NAME else f"{name[:LONGEST_NAME]}..."
    message = f"no model {shown!r} here: there is {known}"
    return Failure(404, message, param="model", code="model_not_found")


def busy(waiting: int, seconds: int) -> Failure:
    """429: the queue is full."""
    message = f"{waiting} requests are waiting, which is the limit: try again in {seconds} s"
    return Failure(429, message, type="rate_limit_error", code="queue_full", retry_after=seconds)


def unavailable(message: str, code: str) -> Failure:
    """503: loading, or shutting down."""
    return Failure(503, message, type="server_error", code=code, retry_after=5)


def broken(message: str = "the server failed on this request; its log says why") -> Failure:
    """500."""
    return Failure(500, message, type="server_error", code="internal_error")


def told(error: Exception) -> Failure:
    """What a client is told of an error; what it must not know goes to the log."""
    match error:
        case Failure():
            return error
        case PromptTooLong():
            return invalid(str(error), code="context_length_exceeded")
        case SpecError():
            return invalid(str(error))
    _log.error("a request failed", exc_info=error)
    return broken()
