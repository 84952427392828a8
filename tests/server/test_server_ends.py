"""Errors that are no Exception: one request ends, or the server says that it ends."""

from __future__ import annotations

import json
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from support import served
from support.endpoint import serving

from mlx_spec import demo
from mlx_spec.apps.server.engine import engine_thread, job
from mlx_spec.apps.server.engine.answers import Finished
from mlx_spec.apps.server.settings import ServedModel, Settings
from mlx_spec.decode.scheduler import Batch
from mlx_spec.hub.catalog import PairSpec
from mlx_spec.pair import Pair


class Panic(BaseException):
    """As the error of Rust code that panics."""


def panic(*_: object, **__: object) -> None:
    raise Panic("a panic")


@pytest.mark.parametrize(("part", "name"), [(job, "prepare"), (Pair, "prepare"), (Batch, "step")])
def test_a_panic_ends_one_request(monkeypatch: pytest.MonkeyPatch, part: object, name: str) -> None:
    with served.working() as engine:
        with monkeypatch.context() as broken:
            broken.setattr(part, name, panic)
            assert served.failure(served.answer(engine, served.chat(served.QUESTION))).status == 500
        assert isinstance(served.answer(engine, served.chat(served.QUESTION))[-1], Finished)
        assert engine.status().state == "ready"


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
    with served.working() as engine:
        assert engine.wait_ended() and engine.status().state == "closed"
        with pytest.raises(Exception, match="not running"):
            engine.submit(served.chat(served.QUESTION), lambda event: None)


def test_an_engine_that_does_not_come_round_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_thread, "STUCK_S", 0.2)
    with served.working() as engine:
        engine._longest_turn = 0.0
        stream = served.begin(engine, replace(served.chat(served.QUESTION), max_tokens=8), held=True)
        stream.until(served.RoundDone)
        time.sleep(0.5)  # the engine waits until the stream is let go on
        assert engine.status().state == "stuck"
        stream.go_on()
        stream.all()
        served.wait_until_idle(engine)
        assert engine.status().state == "ready"
