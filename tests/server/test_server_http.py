"""The server around its answers: errors, limits, health, models, metrics, start and end."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing, suppress
from pathlib import Path

import httpx2
import pytest
from support.endpoint import (
    BODIES,
    CHAT,
    DEMO,
    HELLO,
    MESSAGES,
    RESPONSES,
    TEXT,
    Stub,
    error_of,
    fresh,
    running,
    stubbed,
)
from support.waiting import LIMIT, wait_until

from mlx_spec import __version__
from mlx_spec.apps.server import app, main
from mlx_spec.apps.server.engine.answers import Failed
from mlx_spec.apps.server.engine.metrics import Status
from mlx_spec.apps.server.errors import Failure, internal_error, queue_full, unavailable
from mlx_spec.apps.server.security import Bodies
from mlx_spec.apps.server.settings import GB, Limits, ServedModel, Settings, parse
from mlx_spec.hub.catalog import PairSpec

LEAVING = 60  # seconds; it takes one where nothing else runs


@pytest.fixture
def stub() -> Stub:
    return Stub()


# --- errors


def test_a_compressed_body_is_refused_by_name():
    stub, endpoint = fresh()
    content = json.dumps(BODIES[CHAT]).encode("utf-8-sig")  # a byte order mark is passed over
    for coding, status in (("gzip", 400), ("zstd", 400), ("identity", 200), ("Identity", 200), ("", 200)):
        response = endpoint.client.post(CHAT, content=content, headers={"content-encoding": coding})
        assert response.status_code == status and ("send a plain body" in response.text) == (status == 400)
    assert len(stub.requests) == 3


def test_unknown_paths_methods_and_models_do_not_reach_the_engine():
    stub, endpoint = fresh()
    for path in ("/v1/nothing", "/docs", "/openapi.json"):  # docs would load scripts from elsewhere
        assert error_of(endpoint.client.get(path), 404)["code"] == "unknown_url"
    response = endpoint.client.get(CHAT)
    assert error_of(response, 405)["code"] == "method_not_allowed" and response.headers["allow"] == "POST"
    allowed = endpoint.client.put(f"{RESPONSES}/x").headers["allow"]
    assert set(allowed.split(", ")) == {"DELETE", "GET", "HEAD"}
    for path in (CHAT, TEXT, RESPONSES):
        error = endpoint.refused(path, 404, model="gpt-9" * 20_000)
        assert (error["param"], error["code"]) == ("model", "model_not_found")
        assert len(error["message"]) < 300  # a long name is not sent back
    assert stub.requests == []


@pytest.mark.parametrize("path", ["/v1//models", "//v1/models", "/v1/models/", "///v1/models//", "/models"])
def test_slashes_too_many_are_passed_over(path):
    client = fresh()[1].client
    assert client.get(f"http://localhost{path}").json() == client.get("/v1/models").json()
    assert client.post(f"http://localhost{path.replace('models', 'messages')}", json={}).status_code == 400


@pytest.mark.parametrize(
    ("target", "status"),
    [
        ("http://localhost:8080/v1/models", 200),
        ("HTTP://127.0.0.1//v1/models/", 200),
        ("http://[::1]", 200),
        ("http://evil.example/v1/models", 403),
        ("http://localhost.evil.example", 403),
        ("http://", 403),
    ],
)
def test_the_name_in_an_absolute_form_is_checked(target, status):
    """As proxies send a request; the header is not read then."""
    sent = []

    async def receive():
        return {"type": "http.request", "body": b""}

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http",
        "method": "GET",
        "path": target,
        "query_string": b"",
        "headers": [(b"host", b"localhost")],
    }
    asyncio.run(fresh()[1].app(scope, receive, send))
    assert sent[0]["status"] == status


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("/v1/embeddings", "no embeddings"),
        ("/embeddings", "no embeddings"),
        ("/v1/rerank", "no reranking"),
        ("/v1/audio/speech", "only text"),
        ("/v1/responses/compact", "as much as the context holds"),
        ("/v1/messages/batches", "at once"),
    ],
)
def test_what_is_not_here_says_why(path, why):
    response = fresh()[1].client.post(path, json={"model": "demo", "input": "x"})
    assert response.status_code in (404, 405) and why in response.json()["error"]["message"]


def test_body_limit_is_413_for_known_and_unknown_lengths(stub):
    endpoint = stubbed(stub, Settings(DEMO, limits=Limits(body_bytes=1000)))
    content = [b'{"messages": "', b"x" * 2000, b'"}']
    for path in (CHAT, TEXT, RESPONSES):
        error_of(endpoint.client.post(path, content=b"".join(content)), 413)
        error_of(endpoint.client.post(path, content=iter(content)), 413)
    found = endpoint.client.post(MESSAGES, content=iter(content))
    assert found.status_code == 413 and found.json()["type"] == "error"
    assert endpoint.chat().status_code == 200


DEEP = '{"a":' * 400 + "1" + "}" * 400
BIASES = ",".join(f'"{token}":1' for token in range(20_000))
PREFIX = '{"messages":[{"role":"user","content":"x"}],'


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        (CHAT, '{"messages":' + DEEP + "}", 400),
        (CHAT, PREFIX + '"nobody knows it":' + DEEP + "}", 400),
        (CHAT, PREFIX + '"logit_bias":{' + BIASES + "}}", 400),
        (CHAT, PREFIX + '"logit_bias":{' + ",".join([BIASES] * 45) + "}}", 413),
        (TEXT, '{"prompt":[' + ",".join(["1"] * 5_000_000) + "]}", 413),
    ],
    ids=[*"abcde"],
)
def test_excessive_bodies_are_refused_at_once(path, body, status):
    stub, endpoint = fresh()
    began = time.process_time()
    error_of(endpoint.client.post(path, content=body), status)
    assert time.process_time() - began < 1 and not stub.requests


FAILURES = {
    "rate_limit_error": queue_full(32, 7),
    "overloaded_error": unavailable("the server is loading its model", "loading"),
    "api_error": internal_error(),
    "invalid_request_error": Failure(400, "too long", param="x", code="y"),
}


@pytest.mark.parametrize("path", [CHAT, TEXT, MESSAGES, RESPONSES])
@pytest.mark.parametrize("kind", FAILURES)
def test_a_failure_before_the_first_event_has_a_status(path, kind):
    """Refused at once or failed after it was admitted, with a stream or without."""
    failure, (stub, endpoint) = FAILURES[kind], fresh()
    for admitted, stream in itertools.product((False, True), (False, True)):
        stub.events, stub.refusal = (Failed(failure),), None if admitted else failure
        response = endpoint.post(path, stream=stream)
        seconds = None if failure.retry_after is None else str(failure.retry_after)
        assert response.headers.get("retry-after") == seconds
        if path == MESSAGES:
            assert response.status_code == (529 if kind == "overloaded_error" else failure.status)
            assert response.json()["error"] == {"type": kind, "message": failure.message}
        else:
            assert (response.status_code, response.json()) == (failure.status, failure.body)


def test_our_own_bug_is_500_and_tells_nothing(caplog):
    class Buggy(Stub):
        def resolve(self, name):
            raise RuntimeError("secret")

    response = stubbed(Buggy()).chat()
    assert error_of(response, 500)["code"] == "internal_error" and "secret" not in response.text
    assert [record.getMessage() for record in caplog.records] == ["a request failed"]


# --- health, models, metrics


@pytest.mark.parametrize("name", ["mlx_spec.server", "uvicorn.error", "asyncio"])
def test_no_exception_in_the_log_quotes_a_request(name, tmp_path, monkeypatch):
    monkeypatch.setattr(logging, "raiseExceptions", True)
    app._configure_log(tmp_path / "log")
    with closing(logging.getLogger(name).handlers[0]):
        try:
            int("a secret")
        except ValueError:
            logging.getLogger(name).exception("a task failed")
    assert re.fullmatch(r"\S+ \S+ ERROR a task failed\nValueError at .*\n", (tmp_path / "log").read_text())


def test_health_says_who_we_are(stub):
    client = stubbed(stub).client
    found = client.get("/health")
    assert found.status_code == 200
    expected = {"status": "ok", "service": "mlx_spec", "version": __version__, "waiting": 0, "running": 0}
    assert found.json() == expected
    for state in ("loading", "draining", "failed"):
        stub.state = Status(state)
        found = client.get("/health")
        assert (found.status_code, found.json()["status"]) == (503, state)


def test_models():
    client = fresh()[1].client
    listed = client.get("/v1/models?").json()
    assert listed["object"] == "list" and [model["id"] for model in listed["data"]] == ["demo", "alias"]
    for path in (CHAT, TEXT, MESSAGES, RESPONSES):  # as Ollama lists names
        assert fresh()[1].post(path, model="alias:latest").status_code == 200
    assert client.get("/v1/models/alias:latest").json()["model"] == "demo"
    one = client.get("/v1/models/alias").json()
    assert (one["id"], one["model"], one["object"], one["context_length"]) == ("alias", "demo", "model", 64)
    assert {"created", "owned_by"} <= set(one) and "template" not in one
    assert (listed["first_id"], listed["last_id"], listed["has_more"]) == ("demo", "alias", False)
    assert error_of(client.get("/v1/models/owner/name"), 404)["code"] == "model_not_found"


def figures(client) -> dict[str, float]:
    lines = [line for line in client.get("/metrics").text.splitlines() if not line.startswith("#")]
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines}


def test_metrics(stub):
    endpoint = stubbed(stub)
    endpoint.chat()
    endpoint.chat(stream=True)
    endpoint.chat(temperature=-1)
    endpoint.client.get("/made/up")
    endpoint.client.get("/v1/models/made-up")
    found = figures(endpoint.client)
    assert found['mlx_spec_requests_total{path="/v1/chat/completions",status="200"}'] == 2
    assert found['mlx_spec_requests_total{path="/v1/chat/completions",status="400"}'] == 1
    assert found['mlx_spec_requests_total{path="other",status="404"}'] == 1
    assert not any("made" in name or "cancelled" in name for name in found)
    expected = {
        "prompt_tokens": 10,
        "cached_tokens": 4,
        "generation_tokens": 8,
        "spec_decode_num_drafts": 4,
        "spec_decode_num_draft_tokens": 12,
        "spec_decode_num_accepted_tokens": 4,
    }
    for name, value in expected.items():
        assert found[f'mlx_spec_{name}_total{{model="demo"}}'] == value
    at = 'mlx_spec_spec_decode_num_accepted_tokens_per_pos_total{drafter="lookup",model="demo",position="%d"}'
    assert found[at % 0] == found[at % 1] == 2 and at % 2 not in found
    assert found['mlx_spec_time_to_first_token_seconds_count{model="demo"}'] == 2
    assert found['mlx_spec_gain{model="demo"}'] == pytest.approx(1.5)
    assert found['mlx_spec_reason{model="demo",reason="speculation pays"}'] == 1
    assert {"mlx_spec_queue_depth", "mlx_spec_running"} <= set(found)


# --- as a process


def test_a_signal_ends_streams_with_an_error_and_the_server_without_a_word():
    ask = {"messages": HELLO, "max_tokens": 4000, "n": 8, "temperature": 2, "stream": True}
    ask["logit_bias"] = {"106": -100, "1": -100}  # it never ends by itself
    command = "-W error -m mlx_spec.serve --port 0 --num-draft-tokens 4 --mlx-blas"
    with subprocess.Popen(
        [sys.executable, *command.split()], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            printed = "".join(process.stdout.readline() for _ in range(3))
            said = r"mlx-spec: loading demo \(Ctrl-C .*\n  page  (http://127\.0\.0\.1:\d+)\n  API   \1/v1\n"
            url = re.fullmatch(said, printed)[1]
            assert re.fullmatch(r"mlx-spec: ready in \d+ s\n", process.stdout.readline())
            with httpx2.Client(base_url=url, timeout=LIMIT, trust_env=False) as client:
                wait_until(lambda: client.get("/health").json()["status"] == "ok")
                with client.stream("POST", CHAT, json=ask) as response:
                    assert response.status_code == 200
                    lines = response.iter_lines()
                    assert next(lines).startswith("data: ")
                    process.send_signal(signal.SIGSTOP)  # as if the machine fell asleep
                    time.sleep(0.5)
                    process.send_signal(signal.SIGCONT)
                    assert next(filter(None, lines)).startswith("data: ")
                    began = time.monotonic()
                    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGINT):  # an impatient user
                        process.send_signal(number)
                    last = [text for text in lines if text][-1]
            assert process.wait(LIMIT) == 0 and time.monotonic() - began < LEAVING
            assert json.loads(last.removeprefix("data: "))["error"]["code"] == "shutting_down"
            assert re.fullmatch(r"(measuring .*, once\n)*", process.stderr.read())  # not if another test did
        finally:
            process.kill()


def test_connections_without_a_request_are_closed(stub):
    """A silent one, half a head and half a body; at the end of the server half a body is answered, too."""
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\n".encode()
    body = head + b"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
    bodies = Bodies(0.4)
    server = app.Server(Settings(DEMO), stub, bodies=bodies, idle_connection_s=0.2)

    def send(text):
        made = socket.create_connection(address, timeout=LIMIT)
        made.sendall(text)
        return made

    def answer(made):
        with made, suppress(ConnectionResetError):  # it was closed before the text was there
            return b"".join(iter(lambda: made.recv(4096), b"")).decode()
        return ""

    with running(server) as address:
        for text in (b"", head):
            assert answer(send(text)) == ""
        server.config.timeout_keep_alive = server.config.timeout_graceful_shutdown = LIMIT
        found = answer(send(body))
        assert found.startswith("HTTP/1.1 408 ") and '"code":"request_timeout"' in found
        bodies.timeout_s = LIMIT
        wait_until(lambda: not server.server_state.tasks)  # that request's, after its connection has closed
        half = send(body)
        wait_until(lambda: server.server_state.tasks)
        server.should_exit = True
        found = answer(half)
        assert found.startswith("HTTP/1.1 503 ") and '"code":"shutting_down"' in found


def test_prompts_that_are_written_at_the_end_are_waited_for(monkeypatch, tmp_path):
    """Their files were left half written after two seconds."""
    waited = []

    class Engine(Stub):
        def wait_loaded(self, timeout):
            return False  # it is ended before

        def close(self, timeout):
            waited.append(timeout)
            self.state = Status("closed")

    monkeypatch.setattr(app, "EngineThread", lambda settings, loader: Engine())
    monkeypatch.setattr(app, "_configure_log", lambda file: None)
    monkeypatch.setattr(app.Server, "run", lambda server, sockets: sockets[0].close())
    assert app.run(Settings(DEMO, port=0, cache_folder=tmp_path)) == 0
    assert waited == [app.WRITE_TIMEOUT_S]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--port={taken}", "cannot listen on 127.0.0.1, port {taken}"),
        *((f"--port=0 --api-key=k --host={name}", f"cannot listen on {name}") for name in ("a..b", "x" * 64)),
        ("--port=0 --target={folder}", "{folder}"),
        ("--port=0 --model=a={folder}/none", "{folder}/none"),
        ("--port=0 --model=a=demo,{folder}/none", "{folder}/none"),
    ],
)
def test_what_cannot_be_served_is_one_line(options, said, tmp_path, capsys):
    with socket.create_server(("127.0.0.1", 0)) as server:
        names = {"taken": server.getsockname()[1], "folder": tmp_path}
        assert main(options.format(**names).split()) == 1
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert out == "" and line.startswith("mlx-spec: ") and said.format(**names) in line


# --- options


def test_a_connection_outlives_the_pause_between_two_requests(stub):
    """uvicorn's own 5 s are httpx's, too: now and then a request met a connection that was being closed."""
    assert app.Server(Settings(DEMO), stub).config.timeout_keep_alive > 60


def test_default_settings():
    assert parse([]) == Settings((ServedModel("demo", PairSpec("demo")),))


def test_settings_of_options():
    words = "--target a/b --drafter lookup --model c=d,e --model f=g --alias h=c --pin c --port 0"
    words += " --num-draft-tokens 3 --kv-bits 8 --api-key k --host 0.0.0.0 --allow-host me --memory 1.5"
    words += " --cors-origin http://localhost:3000 --idle 60 --max-waiting 5 --parallel 2 --conversations 1"
    found = parse(words.split())
    assert found.models == (
        ServedModel("b", PairSpec("a/b", "lookup", 3, 8)),
        ServedModel("c", PairSpec("d", "e", 3, 8), pinned=True),
        ServedModel("f", PairSpec("g", None, 3, 8)),
    )
    assert found.aliases == (("h", "c"),) and (found.max_waiting, found.max_running) == (5, 2)
    assert (found.host, found.port, found.api_key, found.hosts) == ("0.0.0.0", 0, "k", ("me",))
    assert (found.memory_bytes, found.idle_seconds) == (round(1.5 * GB), 60)
    assert parse(["--model", "c=d"]).models == (
        ServedModel("demo", PairSpec("demo")),
        ServedModel("c", PairSpec("d")),
    )
    assert parse(["--model", "demo=d"]).models == (ServedModel("demo", PairSpec("d")),)
    assert parse(["--allow-extra-parameters"]).allow_extra_parameters
    assert parse(["--draft-rank", "1"]).draft_rank == 1
    assert parse(["--target", "t", "--ahead"]).models == (ServedModel("t", PairSpec("t", ahead=True)),)
    found = parse(["--cache-folder", "~/c", "--cache-folder-gb", "0.5"])
    assert (found.cache_folder, found.cache_folder_bytes) == (Path.home() / "c", GB // 2)


def test_key_from_a_file(tmp_path):
    (tmp_path / "key").write_text("secret\n")
    assert parse(["--api-key-file", str(tmp_path / "key")]).api_key == "secret"
