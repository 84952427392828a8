"""Serve the page at `/`: a chat that shows which tokens were drafted, and live figures.

The files are read once, at the start. Each has a route, so no path in a request becomes a file name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from importlib.resources import files

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "mjs": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
INDEX = "index.html"


def _scripts(folder: str) -> tuple[str, ...]:
    """Return the paths of the scripts in a folder of the page."""
    names = sorted(file.name for file in files(__name__).joinpath(folder).iterdir())
    return tuple(folder + name for name in names if name.endswith((".js", ".mjs")))


MODULES, LIBRARIES = _scripts(""), _scripts("vendor/")  # for libraries see vendor/README.md
FILES = (INDEX, "style.css", "icon.svg", *MODULES, *LIBRARIES)
PREFIX = "/page/"
HEADERS = {
    "content-security-policy": (
        "default-src 'self'; img-src 'self' data:; object-src 'none'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",  # browsers compare the etag each time, so a new version shows at once
}


def add_routes(app: Starlette) -> None:
    """Add the routes of `/` and of its files under `/page/`. They hold no secret and need no key."""
    for name in FILES:
        app.add_route("/" if name == INDEX else PREFIX + name, _sender(name))


def _sender(name: str) -> Callable[[Request], Awaitable[Response]]:
    content = files(__name__).joinpath(name).read_bytes()
    media_type = TYPES[name.rsplit(".", 1)[1]]
    tag = f'"{hashlib.sha256(content).hexdigest()[:20]}"'
    headers = {**HEADERS, "etag": tag}

    async def send(http_request: Request) -> Response:
        if tag in http_request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=media_type, headers=headers)

    return send
