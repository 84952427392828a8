"""Preparing requests on threads of their own: compiling grammars, counting tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from served import (
    DEMO,
    ENDLESS,
    QUESTION,
    answer,
    begin,
    chat,
    closed,
    failure,
    text_of,
    wait_until_idle,
    working,
)
from waiting import wait_until

from mlx_spec.apps.server import models
from mlx_spec.apps.server.engine_thread import EngineThread
from mlx_spec.apps.server.errors import Failure
from mlx_spec.apps.server.request import OutputFormat, RoundDone
from mlx_spec.apps.server.settings import Limits
from mlx_spec.grammar import Grammar, GrammarKind

PARTS = [{"pattern": f".*a.{{{n}}}b"} for n in range(1, 30)]
SLOW = OutputFormat("json_schema", json.dumps({"type": "string", "allOf": PARTS}))  # takes forever
SECONDS = 1.0  # that it is given


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineThread]:
    limits = Limits(running=2, grammar_seconds=SECONDS)
    with working(replace(DEMO, limits=limits)) as engine:
        yield engine


def test_a_grammar_that_takes_long_holds_up_nobody_else(engine: EngineThread) -> None:
    closed(answer(engine, chat(QUESTION, format=OutputFormat("regex", "a"))))  # starts the sandbox
    running = begin(engine, chat(QUESTION, sampling=ENDLESS, max_tokens=3000))
    running.until(RoundDone)
    slow = begin(engine, chat(QUESTION, format=SLOW))
    while not running.events.empty():
        running.next()
    rounds = 0
    while slow.events.empty():
        running.until(RoundDone)
        rounds += 1
    running.job.cancel()
    assert rounds > 3, "one may end before the engine is asked to compile, and one behind it"
    assert "takes more than 1 s to compile" in failure(slow.all()).message
    wait_until_idle(engine)


def test_a_request_cancelled_while_it_is_prepared_frees_its_slot(engine: EngineThread) -> None:
    slow = begin(engine, chat(QUESTION, format=SLOW))
    wait_until(lambda: engine.status().running)
    slow.job.cancel()
    wait_until_idle(engine)
    closed(answer(engine, chat(QUESTION, max_tokens=2)))
    assert slow.events.empty()


def test_a_grammar_is_compiled_once(engine: EngineThread, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = []
    compile = models.compile_grammar

    def counted(kind: GrammarKind, source: str, *rest: Any, **more: Any) -> Grammar:
        sources.append(source)
        return compile(kind, source, *rest, **more)

    monkeypatch.setattr(models, "compile_grammar", counted)
    requests = [chat(QUESTION, format=OutputFormat("regex", one)) for one in ("[a-f]{4}", "[g-k]{4}") * 2]
    texts = [text_of(answer(engine, request)) for request in requests]
    assert sources == ["[a-f]{4}", "[g-k]{4}"]
    assert texts[:2] == texts[2:] and texts[0] != texts[1]
    closed(answer(engine, chat(QUESTION, thinking=True, format=OutputFormat("regex", "[a-f]{4}"))))
    assert len(sources) == 2


def test_tokens_are_counted_as_they_will_be(engine: EngineThread) -> None:
    request = chat("What is a list?", "A type.", "And a tuple?", max_tokens=2)
    assert engine.count_tokens(request) == closed(answer(engine, request)).usage.prompt_tokens
    with pytest.raises(Failure, match="no model") as caught:
        engine.count_tokens(replace(request, model="other"))
    assert caught.value.status == 404
