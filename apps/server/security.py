"""Guards in front of the routes: paths, host names, origins of web pages, the API key, sizes of bodies.

Starlette's own middleware is not enough. TrustedHostMiddleware knows no IPv6 addresses and answers in plain
text. CORSMiddleware passes the requests of foreign pages on and only hides the response. `max_body_size`
answers in plain text, without the handlers of the application.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import socket

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import LOG, Failure, shutting_down
from .http import error_response, given_keys, is_base_in_browser
from .settings import (
    ANY_NAME,
    ANY_ORIGIN,
    LOCAL_PAGES,
    Settings,
    ip_address,
    is_loopback,
    is_same_origin,
    normal_origin,
    origin_names,
)


class PlainPaths:
    """ASGI middleware: normalize paths to single slashes, none at the end, and no scheme and host in front.

    Clients join a base URL and a path with one slash too many, or have a base URL without /v1. Proxies send
    an absolute URL; its host replaces the header `host`.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path, headers = scope["path"], scope["headers"]
            # An absolute URL, as in a request to a proxy.
            if url := re.fullmatch(r"https?://([^/]*)(.*)", path, re.IGNORECASE | re.DOTALL):
                path, host = url[2], url[1].encode("latin-1", "replace")
                headers = [*((name, value) for name, value in headers if name != b"host"), (b"host", host)]
            parts = list(filter(None, path.split("/")))
            if parts and parts[0] in ("chat", "completions", "responses", "messages", "models"):
                parts.insert(0, "v1")
            path = "/" + "/".join(parts)
            scope = {**scope, "path": path, "headers": headers}
        await self._app(scope, receive, send)


class Bodies:
    """The bodies that are being received. Only the event loop may use this class.

    A small body may take `timeout_s`; a client on this machine needs milliseconds.
    """

    def __init__(self, timeout_s: float = 75.0) -> None:
        self.timeout_s = timeout_s
        self._waiting: set[asyncio.Future[None]] = set()
        self._ended = False

    async def next(self, receive: Receive, wait_s: float) -> Message:
        """Return the next part of a body, for which the server waits that long.

        Raises Failure if none comes: 408, or 503 if the server ends.
        """
        if self._ended:
            raise shutting_down()
        ended = asyncio.get_running_loop().create_future()
        self._waiting.add(ended)
        coming = asyncio.ensure_future(receive())
        try:
            await asyncio.wait({coming, ended}, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
            if coming.done():
                return coming.result()
            if self._ended:
                raise shutting_down()
            message = f"the rest of the body did not come within {self.timeout_s:g} s: send it faster"
            raise Failure(408, message, code="request_timeout")
        finally:
            self._waiting.discard(ended)
            ended.cancel()
            coming.cancel()

    def end(self) -> None:
        """Fail the requests whose bodies are incomplete, because the server ends."""
        self._ended = True
        for ended in self._waiting:
            if not ended.done():
                ended.set_result(None)


class Guards:
    """ASGI middleware: check host, origin, API key and size of the body, in this order.

    The host is checked because a web page may point its own name to this machine (DNS rebinding).
    """

    def __init__(self, app: ASGIApp, settings: Settings, bodies: Bodies) -> None:
        self._app, self._bodies = app, bodies
        self._is_public = not is_loopback(settings.host)
        machine_names = (socket.gethostname(), f"{socket.gethostname()}.local") if self._is_public else ()
        loopback_names = ("localhost", "127.0.0.1", "::1")
        names = (*loopback_names, settings.host, *settings.hosts, *machine_names)
        as_header = (f"[{name.strip('[]')}]" if ":" in name else name for name in names)
        self._names = frozenset(name.lower().rstrip(".") for name in as_header)
        # Installed applications have these schemes, and no page of the web. Ollama allows the same ones.
        schemes = ("app", "capacitor", "file", "ionic", "tauri", "vscode-file", "vscode-webview")
        apps = [scheme + ANY_NAME for scheme in schemes]
        self._origins = frozenset([*apps, *map(normal_origin, settings.origins)]) - {""}
        self._warned: set[str] = set()  # origins of this machine that the log has named
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
            open_paths = ("/health", "/")  # need no key: the page has no data until the user gives it one
            is_open = path in open_paths or path.startswith("/page/") or is_base_in_browser(path, headers)
            if not (reads and is_open):
                self._check_key(headers)
            length = headers.get("content-length", "")
            if length.isdecimal():  # a body that is too large is not even read
                self._check_size(int(length))
        except Failure as failure:
            await error_response(scope, failure)(scope, receive, send)
            return
        read, is_whole, began = 0, False, asyncio.get_running_loop().time()
        slowest = 10_000  # bytes a second of a body that may take longer than the timeout

        async def limited() -> Message:
            nonlocal read, is_whole
            if is_whole:
                return await receive()
            end = began + self._bodies.timeout_s + read / slowest
            message = await self._bodies.next(receive, max(end - asyncio.get_running_loop().time(), 0.0))
            is_whole = not message.get("more_body", False)
            read += len(message.get("body", b""))
            self._check_size(read)
            return message

        await self._app(scope, limited, send)

    def _check_host(self, headers: Headers) -> None:
        name = re.sub(r":\d*$", "", headers.get("host", "").lower()).rstrip(".")  # without the port
        is_address = self._is_public and ip_address(name.strip("[]"))  # DNS cannot rebind an address
        # Browsers always send the header; HTTP/1.0 clients such as monitors do not.
        if name in self._names or is_address or "host" not in headers:
            return
        message = "the server does not go by this name: start it with --allow-host NAME"
        raise Failure(403, message, type="permission_error", code="host_not_allowed")

    def _foreign_origin(self, headers: Headers) -> dict[str, str]:
        """Return the headers that let a foreign page read the response; {} for the server's own page.

        Raises Failure (403) for an origin that is not allowed.
        """
        origin = headers.get("origin")
        if origin is None or is_same_origin(origin, headers.get("host", "")):
            return {}
        if ANY_ORIGIN not in self._origins and self._origins.isdisjoint(origin_names(origin)):
            is_local = LOCAL_PAGES in origin_names(origin)
            value = LOCAL_PAGES if is_local else "ORIGIN"
            message = f"pages of this origin may not use the server: start it with --cors-origin {value}"
            if is_local and origin not in self._warned:  # a browser does not show what the response says
                self._warned.add(origin)
                LOG.warning("%s: %s", origin, message)
            raise Failure(403, message, type="permission_error", code="origin_not_allowed")
        shown = ANY_ORIGIN if ANY_ORIGIN in self._origins else origin
        return {"access-control-allow-origin": shown, "vary": "Origin"}

    def _check_key(self, headers: Headers) -> None:
        """Raise Failure (401) unless `Authorization: Bearer` or `x-api-key` has the key."""
        if self._key is None:
            return
        matches = [secrets.compare_digest(one.encode(), self._key) for one in given_keys(headers)]
        if not any(matches):
            message = "the API key is missing or wrong: send it as a Bearer token or as x-api-key"
            raise Failure(401, message, type="authentication_error", code="invalid_api_key")

    def _check_size(self, size: int) -> None:
        if size > self._max_bytes:
            raise Failure(413, f"the body has more than {self._max_bytes} bytes", code="body_too_large")


def _marked(send: Send, headers: dict[str, str]) -> Send:
    """Return `send`, wrapped so that it adds headers to the response."""

    async def marked(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message).update(headers)
        await send(message)

    return marked


def _preflight(headers: Headers) -> dict[str, str]:
    names = headers.get("access-control-request-headers", "")
    allowed = {"access-control-allow-methods": "GET, POST, DELETE", "access-control-max-age": "600"}
    if re.fullmatch(r"[A-Za-z0-9, _-]{1,1024}", names):
        allowed["access-control-allow-headers"] = names
    if headers.get("access-control-request-private-network") == "true":
        allowed["access-control-allow-private-network"] = "true"
    return allowed
