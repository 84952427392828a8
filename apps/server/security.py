"""Guards in front of the routes: host names, origins of web pages, the API key, sizes of bodies.

Starlette's TrustedHostMiddleware and CORSMiddleware are not enough: the first knows no IPv6 addresses and
answers in plain text, the second lets requests of foreign pages pass and only hides the response.
"""

from __future__ import annotations

import re
import secrets
import socket

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import Failure
from .http import error_response
from .settings import ANY_ORIGIN, Settings, ip_address, is_loopback, is_same_origin, normal_origin

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
OPEN_PATHS = ("/health", "/")  # need no key: the page shows nothing until it has one
OPEN_PREFIX = "/page/"
HEADER_NAMES = re.compile(r"[A-Za-z0-9, _-]{0,1024}")
PORT = re.compile(r":\d*$")  # at the end of a Host header


class Guards:
    """ASGI middleware: refuse what is not for us, in the order of the checks below.

    The name of the host comes first: a web page may rebind its own name to us (DNS rebinding).
    """

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._is_public = not is_loopback(settings.host)
        own = (socket.gethostname(), f"{socket.gethostname()}.local") if self._is_public else ()
        names = (*LOOPBACK_NAMES, settings.host, *settings.hosts, *own)
        as_header = (f"[{name.strip('[]')}]" if ":" in name else name for name in names)
        self._names = frozenset(name.lower().rstrip(".") for name in as_header)
        self._origins = frozenset(map(normal_origin, settings.origins)) - {""}
        self._key = None if settings.api_key is None else settings.api_key.encode()
        self._max_bytes = settings.limits.body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, refuse it, or answer a preflight."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            self._check_host(headers)
            if allowed := self._foreign_origin(headers):
                send = _marked(send, allowed)
                if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
                    await Response(status_code=204, headers=_preflight(headers))(scope, receive, send)
                    return
            path, reads = scope["path"], scope["method"] in ("GET", "HEAD")
            if not (reads and (path in OPEN_PATHS or path.startswith(OPEN_PREFIX))):
                self._check_key(headers)
            length = headers.get("content-length", "")
            if length.isdecimal():  # a body that is too large is not even read
                self._check_size(int(length))
        except Failure as failure:
            await error_response(scope["path"], failure)(scope, receive, send)
            return
        read = 0

        async def limited() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            self._check_size(read)
            return message

        await self._app(scope, limited, send)

    def _check_host(self, headers: Headers) -> None:
        name = PORT.sub("", headers.get("host", "").lower()).rstrip(".")
        is_address = self._is_public and ip_address(name.strip("[]"))  # none can be rebound
        # A request without the header is HTTP/1.0, as of monitors: browsers always send one.
        if name in self._names or is_address or "host" not in headers:
            return
        message = "the server does not go by this name: start it with --allow-host NAME"
        raise Failure(403, message, type="permission_error", code="host_not_allowed")

    def _foreign_origin(self, headers: Headers) -> dict[str, str]:
        """Return the headers that let a foreign page read the response; none for our own page."""
        origin = headers.get("origin")
        if origin is None or is_same_origin(origin, headers.get("host", "")):
            return {}
        if ANY_ORIGIN not in self._origins and normal_origin(origin) not in self._origins:
            message = "pages of this origin may not use the server: start it with --cors-origin ORIGIN"
            raise Failure(403, message, type="permission_error", code="origin_not_allowed")
        shown = ANY_ORIGIN if ANY_ORIGIN in self._origins else origin
        return {"access-control-allow-origin": shown, "vary": "Origin"}

    def _check_key(self, headers: Headers) -> None:
        """Look for the key as `Authorization: Bearer` or `x-api-key`."""
        if self._key is None:
            return
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = [headers.get("x-api-key", ""), token.strip() if scheme.lower() == "bearer" else ""]
        matches = [secrets.compare_digest(one.encode(), self._key) for one in given]
        if not any(matches):
            message = "the API key is missing or wrong: send it as a Bearer token or as x-api-key"
            raise Failure(401, message, type="authentication_error", code="invalid_api_key")

    def _check_size(self, size: int) -> None:
        if size > self._max_bytes:
            raise Failure(413, f"the body has more than {self._max_bytes} bytes", code="body_too_large")


def _marked(send: Send, headers: dict[str, str]) -> Send:
    """Return a `send` that adds headers to the response."""

    async def marked(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message).update(headers)
        await send(message)

    return marked


def _preflight(headers: Headers) -> dict[str, str]:
    names = headers.get("access-control-request-headers", "")
    found = {"access-control-allow-methods": "GET, POST, DELETE", "access-control-max-age": "600"}
    found |= {"access-control-allow-headers": names} if names and HEADER_NAMES.fullmatch(names) else {}
    if headers.get("access-control-request-private-network") == "true":
        found["access-control-allow-private-network"] = "true"
    return found
