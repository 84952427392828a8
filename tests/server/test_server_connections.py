"""Connections of silent, slow and half-closed clients, on a real port."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from starlette.testclient import TestClient
from support.endpoint import ANSWER, CHAT, DEMO, HELLO, READ, ROUND, Stub, running
from support.waiting import LIMIT, wait_until

from mlx_spec.apps.server import app, settings
from mlx_spec.apps.server.app import Server
from mlx_spec.apps.server.connection import Connection
from mlx_spec.apps.server.engine.answers import TextDelta
from mlx_spec.apps.server.security import Bodies
from mlx_spec.apps.server.settings import Settings

Address = tuple[str, int]


@contextmanager
def listening(stub: Stub, body_s: float = LIMIT, idle_s: float = LIMIT, **limits: Any) -> Iterator[Address]:
    """A server with other limits of a connection."""
    connection = type("Limited", (Connection,), limits)
    parts: Any = {"bodies": Bodies(body_s), "connection": connection, "idle_connection_s": idle_s}
    server = Server(Settings(DEMO), stub, **parts)  # type: ignore[arg-type]
    server.config.timeout_graceful_shutdown = 0
    with running(server) as address:
        yield address


def request(*, stream: bool = False, path: str = CHAT, length: int | None = None) -> bytes:
    body = json.dumps({"messages": HELLO, "stream": stream}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {length or len(body)}\r\n\r\n".encode() + body


def connect(address: Address, text: bytes = b"", *, ends: bool = False) -> socket.socket:
    made = socket.create_connection(address, timeout=LIMIT)
    made.sendall(text)
    if ends:
        made.shutdown(socket.SHUT_WR)
    return made


def read(made: socket.socket) -> str:
    with made, suppress(ConnectionResetError):
        return b"".join(iter(lambda: made.recv(4096), b"")).decode()
    return ""


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("count", [1, 3])
def test_a_half_closed_client_gets_its_answers(stream: bool, count: int) -> None:
    with listening(Stub((READ, 0.1, *ANSWER[1:]))) as address:
        found = read(connect(address, request(stream=stream) * count, ends=True))
    assert found.count("HTTP/1.1 200 OK") == count
    assert found.count("[DONE]" if stream else '"finish_reason":"stop"') == count


def test_a_client_that_waits_long_is_told_to_wait_and_then_gets_its_answer() -> None:
    with listening(Stub((READ, 0.4, *ANSWER[1:])), probes_s=(0.05, 0.1)) as address:
        found = read(connect(address, request(), ends=True))
    assert found.startswith("HTTP/1.1 100 \r\n\r\nHTTP/1.1 100 \r\n\r\nHTTP/1.1 200 OK")


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_is_noticed(stream: bool) -> None:
    gate = threading.Event()
    stub = Stub((gate, *ANSWER) if not stream else (*ANSWER[:4], ROUND, *[0.05, *ANSWER[2:4], ROUND] * 99))
    with listening(stub, probes_s=(0.05, 0.1)) as address:
        made = connect(address, request(stream=stream))
        if stream:
            made.recv(100)
        wait_until(lambda: bool(stub.jobs))
        made.close()
        assert stub.jobs[0].cancelled.wait(LIMIT)


def test_a_request_without_its_end_is_not_answered() -> None:
    with listening(Stub()) as address:
        for text in (b"", request()[:40], request(length=1000)):
            assert read(connect(address, text, ends=True)) == ""


def test_silent_connections_shut_nobody_out() -> None:
    """The one that is silent longest gives way, and none that is being answered."""
    gate = threading.Event()
    stub = Stub((READ, gate, *ANSWER[1:]))
    with listening(stub, most_connections=8, least_silence_s=0.0) as address:
        busy = connect(address, request())
        wait_until(lambda: bool(stub.jobs))
        silent = [connect(address, b"GET" if i % 2 else b"") for i in range(20)]
        assert '"status":"ok"' in read(connect(address, HEALTH))
        assert all(read(each) == "" for each in silent[:8])
        gate.set()
        assert "HTTP/1.1 200 OK" in answered(busy)
        for each in silent[8:]:
            each.close()


HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


def answered(made: socket.socket) -> str:
    made.shutdown(socket.SHUT_WR)
    return read(made)


def test_a_head_or_a_body_that_comes_slowly_ends() -> None:
    """Each byte restarted the timeout."""
    with listening(Stub(), body_s=0.3, idle_s=0.3) as address:
        head, body = connect(address, b"POST / HT"), connect(address, request(length=1000))
        began, open_ones = time.monotonic(), {head, body}
        while open_ones and time.monotonic() - began < LIMIT:
            time.sleep(0.05)
            for each in tuple(open_ones):
                try:
                    each.sendall(b"x")
                    each.settimeout(0.001)
                    open_ones -= {each} if each.recv(9) in (b"", b"HTTP/1.1 ") else set()
                except TimeoutError:
                    pass
                except OSError:
                    open_ones -= {each}
        for each in (head, body):
            each.close()
        assert not open_ones


def test_a_client_that_reads_nothing_ends() -> None:
    more_than_buffers = [TextDelta(0, "answer", "x" * 500_000), ROUND] * 40
    stub = Stub((READ, *more_than_buffers, 30.0))
    with listening(stub, unread_s=0.2) as address, connect(address, request(stream=True)):
        wait_until(lambda: bool(stub.jobs))
        assert stub.jobs[0].cancelled.wait(LIMIT)


def test_the_key_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_SPEC_API_KEY", "of the environment")
    assert settings.parse(["demo"]).api_key == "of the environment"
    assert settings.parse(["demo", "--host", "0.0.0.0"]).api_key == "of the environment"
    assert settings.parse(["demo", "--api-key", "of the line"]).api_key == "of the line"
    monkeypatch.setenv("MLX_SPEC_API_KEY", "")
    assert settings.parse(["demo"]).api_key is None


def test_a_server_without_memory_for_a_thread_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = list[float]()

    class Engine(Stub):
        def close(self, timeout: float) -> bool:
            waited.append(timeout)
            return True

    async def fails(*given: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(app, "run_in_threadpool", fails)
    with TestClient(app.create(Settings(DEMO), Engine())):
        pass
    assert waited
