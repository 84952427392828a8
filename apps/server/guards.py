"""Who may ask: by the name the server is called, by the page that asks, by a key. Plain ASGI classes."""

from __future__ import annotations

import ipaddress
import re
import secrets
import socket
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlx_spec.apps.server.failures import Failure
from mlx_spec.apps.server.refusals import response_of
from mlx_spec.apps.server.settings import Settings, is_loopback

LOOPBACK = ("localhost", "127.0.0.1", "::1")
OPEN = ("/health", "/")  # to those without a key: the page has nothing to tell until it is given one
OPEN_BELOW = "/page/"
DEFAULT_PORTS = {"http": 80, "https": 443}
ANY = "*"
HEADER_NAMES = re.compile(r"[A-Za-z0-9, _-]{0,1024}")


class HostGuard:
    """Refuses requests to names that are not ours: a page that rebinds its own name to us (DNS rebinding)."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        own = () if is_loopback(settings.host) else (socket.gethostname(), f"{socket.gethostname()}.local")
        names = (*LOOPBACK, settings.host, *settings.hosts, *own)
        self._names = frozenset(name.lower().rstrip(".") for name in names)
        self._addresses = not is_loopback(settings.host)  # an address cannot be rebound

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass it on or refuse it."""
        if scope["type"] != "http" or self._allows(Headers(scope=scope).get("host", "")):
            await self._app(scope, receive, send)
            return
        message = "the server does not go by this name: start it with --allow-host NAME"
        failure = Failure(403, message, type="permission_error", code="host_not_allowed")
        await response_of(scope["path"], failure)(scope, receive, send)

    def _allows(self, host: str) -> bool:
        name = (_name_and_port(f"http://{host}") or ("", 0))[0].rstrip(".")
        return name in self._names or (self._addresses and _is_address(name))


class OriginGuard:
    """Refuses web pages of other origins, but for those that the settings allow."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._origins = frozenset(map(normal_origin, settings.origins)) - {""}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass it on, refuse it, or answer a preflight."""
        headers = Headers(scope=scope) if scope["type"] == "http" else Headers()
        origin = headers.get("origin")
        if origin is None or _is_own(origin, headers.get("host", "")):
            await self._app(scope, receive, send)
            return
        if ANY not in self._origins and normal_origin(origin) not in self._origins:
            message = "pages of this origin may not use the server: start it with --cors-origin ORIGIN"
            failure = Failure(403, message, type="permission_error", code="origin_not_allowed")
            await response_of(scope["path"], failure)(scope, receive, send)
            return
        allowed = {"access-control-allow-origin": ANY if ANY in self._origins else origin, "vary": "Origin"}
        if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
            await Response(status_code=204, headers=allowed | _preflight(headers))(scope, receive, send)
            return

        async def marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(allowed)
            await send(message)

        await self._app(scope, receive, marked)


class KeyGuard:
    """Refuses requests without the key, as `Authorization: Bearer` or `x-api-key`."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._key = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass it on or refuse it."""
        if scope["type"] != "http" or _is_open(scope) or self._has_key(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        message = "the API key is missing or wrong: send it as a Bearer token or as x-api-key"
        failure = Failure(401, message, type="authentication_error", code="invalid_api_key")
        await response_of(scope["path"], failure)(scope, receive, send)

    def _has_key(self, headers: Headers) -> bool:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = [headers.get("x-api-key", ""), token.strip() if scheme.lower() == "bearer" else ""]
        found = [secrets.compare_digest(one.encode(), self._key) for one in given]
        return any(found)


class BodyGuard:
    """Refuses bodies that are too large, before they are read where their length is known."""

    def __init__(self, app: ASGIApp, most: int) -> None:
        self._app = app
        self._most = most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass it on; whoever reads too much of it gets a Failure."""
        failure = Failure(413, f"the body has more than {self._most} bytes", code="body_too_large")
        length = Headers(scope=scope).get("content-length", "") if scope["type"] == "http" else ""
        if length.isdecimal() and int(length) > self._most:
            await response_of(scope["path"], failure)(scope, receive, send)
            return
        read = 0

        async def limited() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self._most:
                raise failure
            return message

        await self._app(scope, limited, send)


def normal_origin(origin: str) -> str:
    """An origin as it is compared: lower case, no default port, nothing after the host; "" for none."""
    if origin == ANY:
        return ANY
    found = _name_and_port(origin)
    if found is None:
        return ""
    scheme = urlsplit(origin).scheme.lower()
    return f"{scheme}://{found[0]}:{found[1]}"


def _is_own(origin: str, host: str) -> bool:
    """Whether a page of ours asks: name and port of the origin are those that were asked."""
    scheme = urlsplit(origin).scheme.lower() if _name_and_port(origin) else ""
    return scheme in DEFAULT_PORTS and _name_and_port(origin) == _name_and_port(f"{scheme}://{host}")


def _name_and_port(url: str) -> tuple[str, int] | None:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return None
    if not parts.hostname or parts.username is not None or parts.path.strip("/"):
        return None
    return parts.hostname.lower(), DEFAULT_PORTS.get(parts.scheme, 0) if port is None else port


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_open(scope: Scope) -> bool:
    path = scope["path"]
    return scope["method"] in ("GET", "HEAD") and (path in OPEN or path.startswith(OPEN_BELOW))


def _preflight(headers: Headers) -> dict[str, str]:
    names = headers.get("access-control-request-headers", "")
    found = {"access-control-allow-methods": "GET, POST", "access-control-max-age": "600"}
    found |= {"access-control-allow-headers": names} if names and HEADER_NAMES.fullmatch(names) else {}
    if headers.get("access-control-request-private-network") == "true":
        found["access-control-allow-private-network"] = "true"
    return found
