"""The page at `/`: a chat that shows which tokens were drafted, live figures, and how to use the endpoint.

Plain files, read once; a request names a route, never a file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from importlib.resources import files

from fastapi import APIRouter, Request, Response

TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
INDEX = "index.html"
STYLES = ("page.css", "chat.css", "figures.css")
MODULES = (
    "main.js",
    "answer.js",
    "chat.js",
    "charts.js",
    "counters.js",
    "elements.js",
    "figures.js",
    "guide.js",
    "markdown.js",
    "origin.js",
    "server.js",
    "settings.js",
    "watch.js",
)
FILES = (INDEX, *STYLES, *MODULES, "icon.svg")
PREFIX = "/page/"
HEADERS = {
    "content-security-policy": (
        "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",  # kept, and asked for again by its tag: a new version shows at once
}


def router() -> APIRouter:
    """`/` and the files under `/page/` that it is made of; they hold no secret and need no key."""
    routes = APIRouter(include_in_schema=False)
    for name in FILES:
        path = "/" if name == INDEX else PREFIX + name
        routes.add_api_route(path, _sender(name), methods=["GET", "HEAD"], name=name)
    return routes


def _sender(name: str) -> Callable[[Request], Awaitable[Response]]:
    content = files(__name__).joinpath(name).read_bytes()
    kind = TYPES[name.rsplit(".", 1)[1]]
    tag = f'"{hashlib.sha256(content).hexdigest()[:20]}"'
    headers = {**HEADERS, "etag": tag}

    async def send(request: Request) -> Response:
        known = request.headers.get("if-none-match", "")
        if tag in known:
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=kind, headers=headers)

    return send
