"""Errors that are no Exception: one request ends, or the server says that it ends."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from support import served
from support.endpoint import serving
from support.waiting import wait_until

from mlx_spec import demo
from mlx_spec.apps.server.engine import engine_thread
from mlx_spec.apps.server.settings import ServedModel, Settings
from mlx_spec.hub.catalog import PairSpec


class Panic(BaseException):
    """As the error of Rust code that panics."""


def panic(*_: object, **__: object) -> None:
    raise Panic("a panic")


DEAD_END = {"type": "lark", "grammar": r'start: "os" /[^\s\S]/'}


def test_a_dead_end_and_a_token_that_no_decoder_reads_end_one_request(
    tmp_path: Path, draft_errors: list[str]
) -> None:
    """Over HTTP, with a tokenizer.json whose decoder panics for the token of a comma."""
    folder = Path(shutil.copytree(demo.TARGET, tmp_path / "comma"))
    written = json.loads((folder / "tokenizer.json").read_text())
    strip = {"type": "Strip", "content": ",", "start": 0, "stop": 99}
    written["decoder"] = {"type": "Sequence", "decoders": [strip, *written["decoder"]["decoders"]]}
    (folder / "tokenizer.json").write_text(json.dumps(written))
    models = (*served.DEMO.models, ServedModel("comma", PairSpec(str(folder), "none")))
    asked = {"messages": [{"role": "user", "content": served.QUESTION}], "temperature": 0, "max_tokens": 24}
    with serving(Settings(models)) as client, ThreadPoolExecutor(8) as clients:

        def send(**more: object) -> tuple[int, str]:
            reply = client.post("/v1/chat/completions", json=asked | more)
            body = reply.json()
            return reply.status_code, body["error"]["message"] if "error" in body else reply.text

        alone = client.post("/v1/chat/completions", json=asked).json()["choices"][0]["message"]["content"]
        good, dead = (
            [clients.submit(send, **more) for _ in range(3)] for more in ({}, {"response_format": DEAD_END})
        )
        comma = clients.submit(send, model="comma")
        assert all(json.loads(each.result()[1])["choices"][0]["message"]["content"] == alone for each in good)
        for status, message in (each.result() for each in dead):
            assert status == 400 and "the grammar cannot be followed: no text matches it" in message
        assert "the tokenizer fails on these tokens" in comma.result()[1]
        assert client.get("/health").json()["status"] == "ok" and send()[0] == 200
    draft_errors.clear()  # of forced tokens: the grammar is said to be at fault


def test_an_engine_that_ends_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_thread.EngineThread, "_expire_models", panic)
    with served.working(loader=served.load_tiny) as engine:
        assert engine.wait_ended() and engine.status().state == "closed"
        with pytest.raises(Exception, match="not running"):
            engine.submit(served.chat(served.QUESTION), lambda event: None)


def test_an_engine_that_does_not_come_round_is_stuck() -> None:
    with served.working(loader=served.load_tiny, stuck_s=0.2) as engine:
        stream = served.begin(engine, replace(served.chat(served.QUESTION), max_tokens=8), held=True)
        stream.until(served.RoundDone)
        wait_until(lambda: engine.status().state == "stuck")  # until the stream is let go on
        stream.go_on()
        stream.all()
        served.wait_until_idle(engine)
        assert engine.status().state == "ready"
