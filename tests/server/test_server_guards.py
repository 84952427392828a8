"""Guards: host names, origins of web pages, the API key."""

from __future__ import annotations

import asyncio

import pytest
from endpoint import CHAT, DEMO, HELLO, Stub, error_of, fresh, stubbed

from mlx_spec.apps.server.settings import Settings

BODY = {"messages": HELLO}
OWN = "http://localhost"


def send(settings: Settings | None = None, **headers: str):
    client = (fresh()[1] if settings is None else stubbed(Stub(), settings)).client
    return client.post(CHAT, json=BODY, headers={name.replace("_", "-"): v for name, v in headers.items()})


# --- the name of the server


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8080", "127.0.0.1:1", "[::1]:8080", "localhost."])
def test_loopback_names_are_ours(host):
    assert send(host=host).status_code == 200


FOREIGN_HOSTS = "evil.example localhost.evil.example evil.example:80@localhost localhost@evil.example"
FOREIGN_HOSTS += " 127.0.0.1.evil.example 192.168.0.7 localhost/x [::1 ::1 localhost:80:80 [::1]evil.example"


@pytest.mark.parametrize("host", [*FOREIGN_HOSTS.split(), ""])
def test_rebound_names_are_refused(host):
    for path in ("/", "/health", "/v1/models", "/metrics"):
        error_of(fresh()[1].client.get(path, headers={"host": host}), 403)
    assert error_of(send(host=host), 403)["code"] == "host_not_allowed"


def test_more_names_can_be_allowed_and_on_all_addresses_any_address_is_ours():
    settings = Settings(DEMO, hosts=("My.box",))
    assert send(settings, host="my.BOX:9").status_code == 200
    assert send(settings, host="other.box").status_code == 403
    assert send(Settings(DEMO, hosts=("[fe80::1]",)), host="[fe80::1]:80").status_code == 200
    settings = Settings(DEMO, host="0.0.0.0", api_key="k")
    for host in ("192.168.0.7:8080", "[fe80::1]:8080"):
        assert send(settings, host=host, x_api_key="k").status_code == 200
    assert send(settings, host="evil.example", x_api_key="k").status_code == 403


def test_http_1_0_without_a_name_is_no_browser():
    sent, app = [], stubbed(Stub()).app

    async def receive():
        return {"type": "http.request", "body": b""}

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": "/health", "query_string": b"", "headers": []}
    asyncio.run(app(scope, receive, send))
    assert sent[0]["status"] == 200


# --- the page that asks


@pytest.mark.parametrize("origin", [OWN, "http://localhost:80", "https://localhost"])
def test_our_own_page_may_ask(origin):
    response = send(host="localhost" if origin != "https://localhost" else "localhost:443", origin=origin)
    assert response.status_code == 200
    assert not any(name.startswith("access-control") for name in response.headers)


FOREIGN_ORIGINS = "http://localhost.evil.example http://localhost@evil.example http://evil.example"
FOREIGN_ORIGINS += (
    " http://localhost:3000 http://127.0.0.1 null file:// chrome-extension://localhost localhost"
)


@pytest.mark.parametrize("origin", [*FOREIGN_ORIGINS.split(), ""])
def test_other_pages_are_refused(origin):
    response = send(origin=origin)
    assert error_of(response, 403)["code"] == "origin_not_allowed"
    assert "access-control-allow-origin" not in response.headers


def test_an_allowed_page_gets_cors_headers_without_credentials():
    settings = Settings(DEMO, origins=("http://localhost:3000", "app://notes", "not an origin"))
    for origin in ("http://localhost:3000", "app://notes"):
        response = send(settings, origin=origin)
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == origin
        assert response.headers["vary"] == "Origin"
        assert "access-control-allow-credentials" not in response.headers
    for origin in ("http://localhost:3001", "https://localhost:3000", "null", "http://localhost:3000.evil"):
        assert send(settings, origin=origin).status_code == 403
    assert send(settings, origin="http://localhost:3000", host="evil.example").status_code == 403


def test_every_page_means_a_star_and_never_credentials():
    response = send(Settings(DEMO, origins=("*",)), origin="http://evil.example")
    assert response.status_code == 200 and response.headers["access-control-allow-origin"] == "*"
    assert "access-control-allow-credentials" not in response.headers
    # errors have such headers, too
    response = send(Settings(DEMO, origins=("http://a.b",), api_key="k"), origin="http://a.b")
    assert response.status_code == 401 and response.headers["access-control-allow-origin"] == "http://a.b"


def test_preflight():
    client = stubbed(Stub(), Settings(DEMO, origins=("http://a.b",), api_key="k")).client
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization, x-y"}
    found = client.options(CHAT, headers={**asked, "origin": "http://a.b"})
    assert found.status_code == 204 and "POST" in found.headers["access-control-allow-methods"]
    assert found.headers["access-control-allow-headers"] == "authorization, x-y"
    assert client.options(CHAT, headers={**asked, "origin": "http://c.d"}).status_code == 403


# --- the key


@pytest.mark.parametrize(
    "headers", [{"authorization": "Bearer k"}, {"authorization": "bearer  k"}, {"x_api_key": "k"}]
)
def test_the_key_opens(headers):
    assert send(Settings(DEMO, api_key="k"), **headers).status_code == 200


WRONG_KEYS: list[dict[str, str]] = [
    {},
    *({"authorization": value} for value in ("k", "Basic k", "Bearer", "Bearer K")),
    *({"x_api_key": value} for value in ("kk", "", "\u00e9")),
]


@pytest.mark.parametrize("headers", WRONG_KEYS)
def test_without_the_key_it_is_401(headers):
    raw = {name: value.encode("latin-1") for name, value in headers.items()}
    response = send(Settings(DEMO, api_key="k"), **raw)
    assert error_of(response, 401)["code"] == "invalid_api_key"
    assert response.headers["www-authenticate"] == "Bearer"


def test_only_health_and_the_page_are_open():
    client = stubbed(Stub(), Settings(DEMO, api_key="k")).client
    assert client.get("/health").status_code == 200
    assert client.get("/").status_code == 200 and client.get("/page/chat.js").status_code == 200
    assert client.post("/").status_code == 401
    for path in ("/v1/models", "/metrics", "/v1/models/demo", "/health/", "/nothing"):
        assert client.get(path).status_code == 401
    found = client.post("/v1/messages", json={})
    assert found.status_code == 401 and found.json()["error"]["type"] == "authentication_error"
