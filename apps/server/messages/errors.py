"""Anthropic's error objects."""

from __future__ import annotations

from typing import Any

from mlx_spec.apps.server.failures import Failure

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}
OVERLOADED = 529


def error_json(failure: Failure) -> dict[str, Any]:
    """The body of an error response, and of an `error` event."""
    fallback = "invalid_request_error" if failure.status < 500 else "api_error"
    kind = TYPES.get(failure.status, fallback)
    return {"type": "error", "error": {"type": kind, "message": failure.message}}


def translated(failure: Failure) -> Failure:
    """With the status that Anthropic's protocol has for it: 529 instead of 503."""
    status = OVERLOADED if failure.status == 503 else failure.status
    return Failure(status, failure.message, code=failure.code, retry_after=failure.retry_after)
