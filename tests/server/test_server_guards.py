"""Guards: host names, origins of web pages, the API key."""

from __future__ import annotations

import asyncio
from functools import cache

import pytest
from starlette.testclient import TestClient
from support.endpoint import CHAT, DEMO, HELLO, Stub, error_of, stubbed

from mlx_spec.apps.server.errors import Failure
from mlx_spec.apps.server.security import Bodies, Guards
from mlx_spec.apps.server.settings import Settings, parse

PLAIN, LOCKED = Settings(DEMO), Settings(DEMO, api_key="k")


@cache
def client(settings: Settings = PLAIN) -> TestClient:
    return stubbed(Stub(), settings).client


def send(settings: Settings = PLAIN, **headers: str):
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    return client(settings).post(CHAT, json={"messages": HELLO}, headers=headers)


# --- the name of the server


@pytest.mark.parametrize(
    ("settings", "ours", "foreign"),
    [
        (PLAIN, "localhost LOCALHOST:8080 127.0.0.1:1 [::1]:8080 localhost.", ""),
        (Settings(DEMO, hosts=("My.box",)), "my.BOX:9", "other.box"),
        (Settings(DEMO, hosts=("[fe80::1]",)), "[fe80::1]:80", ""),
        (Settings(DEMO, host="0.0.0.0", api_key="k"), "192.168.0.7:8080 [fe80::1]:8080", "evil.example"),
    ],
)
def test_names_of_this_machine_and_allowed_ones_are_ours(settings, ours, foreign):
    for names, status in ((ours, 200), (foreign, 403)):
        for host in names.split():
            assert send(settings, host=host, x_api_key="k").status_code == status


FOREIGN_HOSTS = "evil.example localhost.evil.example evil.example:80@localhost localhost@evil.example"
FOREIGN_HOSTS += " 127.0.0.1.evil.example 192.168.0.7 localhost/x [::1 ::1 localhost:80:80 [::1]evil.example"


@pytest.mark.parametrize("host", [*FOREIGN_HOSTS.split(), ""])
def test_rebound_names_are_refused(host):
    for path in ("/", "/health", "/v1/models", "/metrics"):
        error_of(client().get(path, headers={"host": host}), 403)
    assert error_of(send(host=host), 403)["code"] == "host_not_allowed"


def test_http_1_0_without_a_name_is_no_browser():
    sent = []

    async def receive():
        return {"type": "http.request", "body": b""}

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": "/health", "query_string": b"", "headers": []}
    asyncio.run(client().app(scope, receive, send))
    assert sent[0]["status"] == 200


# --- the page that asks


def allowing(*options: str) -> Settings:
    return Settings(DEMO, origins=tuple(parse(["--cors-origin", option]).origins[0] for option in options))


WEB = "http://localhost.evil.example http://localhost@evil.example http://evil.example null"
FOREIGN = f"{WEB} http://localhost:3000 http://127.0.0.1 chrome-extension://localhost localhost * ://app"
FOREIGN += " http://app https://tauri.localhost app app: http://*"
APPS = "app://obsidian.md tauri://localhost vscode-webview://1f2e3d vscode-file://vscode-app file://"
APPS += " capacitor://localhost ionic://localhost APP://x"
PAGES = "http://localhost:3000 http://127.0.0.1:5173 https://[::1]:8443"
TWO = Settings(DEMO, origins=("http://localhost:3000", "app://notes", "not an origin"))
OWN, REFUSED, ITSELF = None, "refused", "itself"  # needs no header, gets 403, is named in the header


@pytest.mark.parametrize(
    ("settings", "origins", "allowed"),
    [
        (PLAIN, "http://localhost http://localhost:80", OWN),
        (PLAIN, FOREIGN, REFUSED),
        (PLAIN, APPS, ITSELF),  # a page of the web cannot have their schemes
        (allowing("null"), "null", ITSELF),
        (allowing("null"), "http://a.b", REFUSED),
        (allowing("chrome-extension://*"), "chrome-extension://abc", ITSELF),
        (allowing("chrome-extension://*"), "moz-extension://abc", REFUSED),
        (allowing("chrome-extension://abc"), "chrome-extension://abc", ITSELF),
        (allowing("chrome-extension://abc"), "chrome-extension://abcd", REFUSED),
        (allowing("localhost"), PAGES, ITSELF),
        (allowing("localhost"), WEB, REFUSED),
        (TWO, "http://localhost:3000 app://notes", ITSELF),
        (TWO, "http://localhost:3001 https://localhost:3000 null http://localhost:3000.evil", REFUSED),
        (Settings(DEMO, origins=("*",)), "http://evil.example", "*"),
    ],
)
def test_pages_that_may_ask(settings, origins, allowed):
    for origin in [*origins.split(), *([""] if origins == FOREIGN else ())]:
        response = send(settings, origin=origin)
        header = response.headers.get("access-control-allow-origin")
        assert "access-control-allow-credentials" not in response.headers
        if allowed == REFUSED:
            assert error_of(response, 403)["code"] == "origin_not_allowed" and header is None, origin
        else:
            assert response.status_code == 200 and header == (origin if allowed == ITSELF else allowed)
            assert header in (None, "*") or response.headers["vary"] == "Origin"


def test_a_page_is_ours_by_name_and_port_and_no_origin_opens_more():
    assert send(host="localhost:443", origin="https://localhost").status_code == 200
    assert send(TWO, origin="http://localhost:3000", host="evil.example").status_code == 403
    error_of(send(LOCKED, origin="app://x"), 401)
    response = send(Settings(DEMO, origins=("http://a.b",), api_key="k"), origin="http://a.b")
    assert response.status_code == 401 and response.headers["access-control-allow-origin"] == "http://a.b"


def test_a_page_of_this_machine_is_told_the_option(caplog):
    new = Settings(DEMO, port=1)  # a server that has named no page in its log
    for origin in PAGES.split():
        assert "--cors-origin localhost" in error_of(send(new, origin=origin), 403)["message"]
        assert f"{origin}: " in caplog.text  # a browser does not show the body


@pytest.mark.parametrize("option", ["http://*", "https://*:80", "http://localhost:*", "a b://*", "://*"])
def test_a_pattern_of_web_pages_is_no_origin(option, capsys):
    with pytest.raises(SystemExit):
        parse(["--cors-origin", option])
    assert "--cors-origin" in capsys.readouterr().err


def test_preflight():
    options = client(Settings(DEMO, origins=("http://a.b",), api_key="k")).options
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization, x-y"}
    found = options(CHAT, headers={**asked, "origin": "http://a.b"})
    assert found.status_code == 204 and "POST" in found.headers["access-control-allow-methods"]
    assert found.headers["access-control-allow-headers"] == "authorization, x-y"
    assert options(CHAT, headers={**asked, "origin": "http://c.d"}).status_code == 403
    assert client().options("/api/chat", headers={**asked, "origin": "app://x"}).status_code == 204


# --- the key


@pytest.mark.parametrize(
    ("name", "values", "status"),
    [
        ("authorization", ("Bearer k", "bearer  k"), 200),
        ("x_api_key", ("k",), 200),
        ("authorization", ("k", "Basic k", "Bearer", "Bearer K"), 401),
        ("x_api_key", ("kk", "", "\u00e9"), 401),
        ("accept", ("*/*",), 401),  # without a key
    ],
)
def test_the_key_opens(name, values, status):
    for value in values:
        response = send(LOCKED, **{name: value.encode("latin-1")})
        assert response.status_code == status
        if status == 401:
            assert error_of(response, 401)["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"


def test_only_health_and_the_page_are_open():
    for path in ("/health", "/", "/page/chat.js"):
        assert client(LOCKED).get(path).status_code == 200
    for path in ("/v1/models", "/metrics", "/v1/models/demo", "/nothing", "//v1//models/"):
        assert client(LOCKED).get(path).status_code == 401
    assert client(LOCKED).post("/").status_code == 401
    found = client(LOCKED).post("/v1/messages", json={})
    assert found.status_code == 401 and found.json()["error"]["type"] == "authentication_error"


# --- bodies


def test_only_incomplete_bodies_end_with_the_server():
    bodies, gone = Bodies(), {"type": "http.disconnect"}
    scope = {"type": "http", "method": "POST", "path": CHAT, "headers": [(b"host", b"localhost")]}
    found = []

    async def ends_meanwhile(scope, receive, send):
        found.append(await receive())
        bodies.end()
        found.append(await receive())  # the body is whole, so this waits for the client to hang up

    async def ask(body):
        messages = iter((body, gone))

        async def receive():
            return next(messages)

        await Guards(ends_meanwhile, PLAIN, bodies)(scope, receive, None)

    whole = {"type": "http.request", "body": b"{}"}
    asyncio.run(ask(whole))
    assert found == [whole, gone]
    with pytest.raises(Failure, match="shutting down"):
        asyncio.run(ask(whole))  # a request that comes later
