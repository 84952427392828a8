"""Errors that are no Exception: one request ends, or the server says that it ends."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from support import served

from mlx_spec.apps.server.engine import engine_thread, job
from mlx_spec.apps.server.engine.answers import Finished
from mlx_spec.decode.scheduler import Batch
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
