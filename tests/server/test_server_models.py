"""Several models: names, memory, unloading, and models that cannot be loaded."""

from __future__ import annotations

import gc
import logging
import threading
import time
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import mlx.core as mx
import pytest
from support.pairs import make_pair
from support.served import (
    ENDLESS,
    QUESTION,
    TIMEOUT_S,
    answer,
    begin,
    chat,
    closed,
    failure,
    raw,
    working,
)
from support.spans import ROOT, vision_of
from support.waiting import wait_until

from mlx_spec import demo
from mlx_spec.apps.server.engine.answers import ChoiceEnded, RoundDone
from mlx_spec.apps.server.engine.engine_thread import EngineThread
from mlx_spec.apps.server.engine.models import Models, load_served, need_of, next_in_queue
from mlx_spec.apps.server.errors import Failure
from mlx_spec.apps.server.requests.request import OutputFormat
from mlx_spec.apps.server.settings import ServedModel, Settings
from mlx_spec.decode.loop import decode
from mlx_spec.device import memory_for_models
from mlx_spec.errors import NotFound
from mlx_spec.hub.catalog import PairSpec
from mlx_spec.pair import Pair
from mlx_spec.prompt import text_prompt

ONE, TWO, THREE = (
    ServedModel(name, PairSpec("demo", num_draft_tokens=2)) for name in ("one", "two", "three")
)
NEED = need_of(ONE)


def settings(*served: ServedModel, room: float = 10, **given: Any) -> Settings:
    """A server with room for so many models and a conversation."""
    return replace(Settings(served), **{"memory_bytes": budget(room)} | given)


def budget(room: float) -> int:
    return int(room * NEED.weights) + NEED.caches + NEED.chunk


def sized(_: ServedModel) -> Pair:
    """A tiny pair that says to be as large as the demo."""
    pair = make_pair("full")
    pair.info = replace(pair.info, target_bytes=NEED.weights)
    return pair


def loaded(engine: EngineThread) -> list[str]:
    return [card.name for card in engine.models() if card.loaded]


# --- names


def test_names_and_aliases() -> None:
    found = Models(settings(ONE, TWO, aliases=(("gpt-4o", "two"), ("best", "two"))))
    assert [found.resolve(name) for name in (None, "one", "two", "gpt-4o")] == ["one", "one", "two", "two"]
    assert [found.resolve(f"{name}:latest") for name in ("one", "best")] == ["one", "two"]
    tagged = Models(settings(replace(ONE, name="a:latest"), replace(TWO, name="a:4b")))
    assert [tagged.resolve(name) for name in ("a", "a:latest", "a:4b")] == ["a:latest", "a:latest", "a:4b"]
    cards = [(card.name, card.aliases) for card in found.cards()]
    assert cards == [("one", ()), ("two", ("gpt-4o", "best"))]
    assert not any(card.loaded for card in found.cards())
    for name in (
        "three",
        "demo",
        "",
        ":latest",
        "one:latest:latest",
        "one:4b",
        str(demo.TARGET),
        "../one",
        "google/gemma-4-E2B-it",
    ):
        with pytest.raises(Failure, match="no model") as caught:
            found.resolve(name)
        assert (caught.value.status, caught.value.code) == (404, "model_not_found")


# --- room


def test_the_need_of_a_model_is_what_it_takes() -> None:
    gc.collect()  # what earlier tests left
    before = mx.get_active_memory()
    pair = load_served(ONE)
    list(pair.generate([5] * 9, max_tokens=4))
    gc.collect()  # the scratch caches of checks at load
    assert NEED.weights == pytest.approx(mx.get_active_memory() - before, rel=0.02)
    assert NEED.context == pair.info.context_length == 4096
    assert need_of(ServedModel("one", PairSpec("demo", "none"))).weights < NEED.weights
    assert memory_for_models() > 10**8


def test_clients_see_what_contexts_take_here() -> None:
    (card,) = Models(settings(ONE, room=1.2)).cards()
    (context,) = card.contexts  # the demo's own is 4,096 tokens
    assert context["tokens"] == 4096 and NEED.weights < context["bytes"] < NEED.total + 2**27
    (card,) = Models(settings(ONE, memory_bytes=NEED.weights)).cards()
    assert not card.contexts[0]["fits"]


def test_a_prompt_beyond_the_memory_of_a_server_is_refused_with_both_numbers() -> None:
    with working(settings(ONE, memory_bytes=NEED.total)) as engine:
        (model,) = engine._models.loaded()
        model.pair.budget = lambda: NEED.weights
        found = failure(answer(engine, replace(raw((5,) * 3000), model="one")))
    assert (found.status, found.code) == (400, "context_length_exceeded")
    assert "3000 tokens > 2048 maximum" in found.message and "may use" in found.message


def test_a_vision_tower_needs_room_before_the_first_picture() -> None:
    seeing = ServedModel("one", PairSpec(str(ROOT / "e2b"), "none"))
    need, pair, tower = need_of(seeing), load_served(seeing), vision_of("e2b").nbytes
    assert need.vision == pair.info.vision_bytes == tower > 0
    assert need.total == need.weights + need.caches + tower + need.chunk
    assert "of a vision tower" in str(need)
    with working(settings(seeing), lambda _: pair) as engine:
        (loaded,) = engine.status().models
        assert loaded.weights == pair.info.target_bytes + tower
    assert need_of(replace(seeing, ranks=2)).vision == NEED.vision == 0


def test_what_grammars_share_is_made_while_a_model_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    with working(settings(ONE)) as engine:
        wait_until(lambda: "grammars" not in {thread.name for thread in threading.enumerate()})
        monkeypatch.setattr("llguidance.LLTokenizer", None)
        closed(answer(engine, chat(QUESTION, model="one", format=OutputFormat("regex", "[a-f]{4}"))))


def test_the_model_used_longest_ago_makes_room() -> None:
    with working(settings(ONE, TWO, THREE, room=2.5), sized) as engine:
        assert loaded(engine) == ["one"]
        for name in ("one", "two", "one"):
            closed(answer(engine, chat(QUESTION, model=name, max_tokens=3)))
        assert loaded(engine) == ["one", "two"]
        closed(answer(engine, chat(QUESTION, model="three", max_tokens=3)))
        assert loaded(engine) == ["one", "three"]


def test_unloading_gives_the_memory_back() -> None:
    with working(settings(ONE, TWO, room=1.2)) as engine:
        held, sizes = [], []  # as slow clients hold their jobs, after the last event
        for name in ("one", "two"):
            held.append(begin(engine, chat(QUESTION, model=name, max_tokens=9)))
            closed(held[-1].all())
            assert loaded(engine) == [name]
            gc.collect()
            sizes.append(mx.get_active_memory())
        assert sizes[1] < sizes[0] + 0.05 * NEED.weights


def test_a_model_that_does_not_fit_is_refused_with_numbers() -> None:
    with working(settings(replace(ONE, pinned=True), TWO, room=1.5), sized) as engine:
        found = failure(answer(engine, chat(QUESTION, model="two")))
        assert (found.status, found.code) == (503, "insufficient_memory")
        for number in (NEED.total, NEED.weights, NEED.caches, budget(1.5)):
            assert f"{number / 10**6:.1f} MB" in found.message
        assert loaded(engine) == ["one"]
        closed(answer(engine, chat(QUESTION, model="one", max_tokens=3)))


def test_a_model_in_use_is_not_unloaded() -> None:
    with working(settings(ONE, TWO, room=1.2), sized, idle_s=3600) as engine:  # nobody is found by chance
        long = begin(engine, chat("Go on", model="one", sampling=ENDLESS, max_tokens=12), held=True)
        long.until(RoundDone)
        other = begin(engine, chat(QUESTION, model="two", max_tokens=3))
        behind = begin(engine, chat(QUESTION, model="one", max_tokens=3))
        long.go_on()
        assert closed(long.all()).usage.completion_tokens == 12
        closed(other.all())
        closed(behind.all())  # before the other one, whose model had to be loaded
        assert loaded(engine) == ["two"]


def test_a_prompt_needs_room_beside_what_running_ones_have_not_read() -> None:
    found = Models(settings(ONE), lambda one: make_pair("full", "none"))
    model = found.ready("one", ())
    assert model is not None and model.token_bytes > 0
    most = int(model.prefix_cache.max_bytes() / model.token_bytes)
    assert model.has_room(2 * most, 0)  # alone: what it needs is checked elsewhere
    assert model.has_room(most - 9, 8) and not model.has_room(most - 9, 11)


def test_models_share_the_limit_of_running_choices() -> None:
    with working(settings(ONE, TWO, max_running=2), sized) as engine:
        closed(answer(engine, chat(QUESTION, model="two", max_tokens=1)))  # now both are loaded
        both = begin(engine, chat("Go on", model="one", n=2, sampling=ENDLESS, max_tokens=12), held=True)
        while both.until(RoundDone).index == 0:  # until both choices run
            both.go_on(1)
        other = begin(engine, chat(QUESTION, model="two", max_tokens=3))
        both.go_on()
        closed(other.all())
        closed(both.all())
        assert other.number(RoundDone) > both.number(ChoiceEnded)


def test_models_share_the_room_for_caches() -> None:
    with working(settings(ONE, TWO), lambda one: make_pair("full", "none")) as engine:
        for name in ("one", "two"):  # now both are loaded
            closed(answer(engine, replace(raw((5, 6)), model=name)))
        both = begin(engine, replace(raw((7, 8), n=2, max_tokens=40), model="one"), held=True)
        while both.until(RoundDone).index == 0:  # until both choices run
            both.go_on(1)
        one, two = engine._models.loaded()
        caches, left = (one.prefix_cache.nbytes, one.batch.nbytes), two.prefix_cache.max_bytes()
        both.go_on()
        closed(both.all())
        assert min(caches) > 0 and left == engine._models.budget - sum(caches)


def test_a_model_that_just_fits_takes_the_room_of_free_caches() -> None:
    found = Models(settings(ONE, TWO, memory_bytes=NEED.total), lambda one: make_pair("full", "none"))
    one = found.ready("one", ())
    assert one is not None
    prompt = text_prompt([1] * 20)
    sequence = one.prefix_cache.take(prompt)
    for round in decode(one.pair.prepare(sequence, prompt, max_tokens=2)):
        sequence.append(round.tokens)
    one.prefix_cache.give_back(sequence)
    assert one.prefix_cache.nbytes > 0
    assert found.ready("two", ()) is not None and one.prefix_cache.nbytes == 0


# --- turns of several models


def order(queue: str, loaded: str) -> tuple[str, int]:
    """The models of a queue as they are answered where one fits, and how often one was passed at most."""
    waiting, passed, answered = list(enumerate(queue)), [0] * len(queue), ""
    while waiting:
        at = next_in_queue([model for _, model in waiting], loaded, passed[waiting[0][0]])
        for arrived, _ in waiting[:at]:
            passed[arrived] += 1
        loaded = waiting.pop(at)[1]
        answered += loaded
    return answered, max(passed)


@pytest.mark.parametrize(
    ("queue", "loaded", "answered"),
    [
        ("ABABAB", "A", "AAABBB"),
        ("ABABAB", "", "AAABBB"),
        ("BABA", "B", "BBAA"),
        ("B" + "A" * 20, "A", "A" * 8 + "B" + "A" * 12),  # B waits for 8 of them, not for all
        ("CBABAB", "A", "AACBBB"),
        ("ABC" * 3, "C", "CCCAAABBB"),
        ("AB" * 12, "A", "A" * 9 + "B" * 12 + "A" * 3),
    ],
)
def test_a_loaded_model_goes_first_within_a_bound(queue: str, loaded: str, answered: str) -> None:
    found, passed = order(queue, loaded)
    assert found == answered and passed <= 8


def test_each_request_is_passed_by_eight_at_most() -> None:
    random = Random(0)
    for _ in range(200):
        queue = "".join(random.choices("ABCD", [8, 2, 1, 1], k=random.randint(1, 60)))
        found, passed = order(queue, "A")
        assert passed <= 8 and sorted(found) == sorted(queue)


def test_a_request_for_another_model_is_passed_by_eight() -> None:
    given = settings(ONE, TWO, max_running=1)
    with working(given, lambda one: make_pair("full", "none")) as engine:
        first = begin(engine, replace(raw((5, 6)), model="one"), held=True)
        first.until(RoundDone)
        other, *behind = [
            begin(engine, replace(raw((5, 6), max_tokens=1), model=name)) for name in ("two", *["one"] * 10)
        ]
        first.go_on()
        for stream in (first, other, *behind):
            closed(stream.all())
        assert sum(stream.number(ChoiceEnded) < other.number(ChoiceEnded) for stream in behind) == 8


def test_two_models_of_which_one_fits_do_not_take_turns() -> None:
    loads, all_came = list[str](), threading.Event()

    def counted(served: ServedModel) -> Any:
        if loads:  # the first is loaded before the first request
            all_came.wait(TIMEOUT_S)
        loads.append(served.name)
        return sized(served)

    with working(settings(ONE, TWO, room=1.5), counted) as engine:
        streams = [begin(engine, chat(QUESTION, model=name, max_tokens=3)) for name in ("two", "one") * 5]
        all_came.set()
        for stream in streams:
            closed(stream.all())
    assert len(loads) <= 4


def test_files_tell_what_a_model_can_before_it_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    others = ServedModel("far", PairSpec("nobody/nothing")), ServedModel("bad", PairSpec(str(tmp_path)))
    with working(settings(ONE, TWO, *others)) as engine:
        one, two, *unknown = engine.models()
        assert not two.loaded and two == replace(one, name="two", loaded=False)
        assert [(card.context_length, card.tools, card.thinks) for card in unknown] == [(None,) * 3] * 2


def test_an_idle_model_is_unloaded() -> None:
    with working(settings(ONE, replace(TWO, pinned=True), idle_seconds=0.3), sized, idle_s=0.1) as engine:
        closed(answer(engine, chat(QUESTION, model="two", max_tokens=3)))
        wait_until(lambda: loaded(engine) == ["two"])
        card = engine.models()[0]
        assert card.context_length == 4096 and card.tools is not None  # known since it was loaded
        closed(answer(engine, chat(QUESTION, model="one", max_tokens=3)))
        wait_until(lambda: loaded(engine) == ["two"])


def test_the_time_of_an_answer_is_not_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model was unloaded at the end of an answer that took longer than --idle."""
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    found = Models(settings(ONE, idle_seconds=60.0), lambda one: make_pair("full", "none"))
    assert found.ready("one", ()) is not None
    for then, busy, stays in ((100.0, {"one", "two"}, True), (159.0, set(), True), (161.0, set(), False)):
        now = then
        found.expire(busy)
        assert bool(found.loaded()) == stays


def test_a_model_that_a_request_waits_for_is_not_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    given = settings(ONE, TWO, idle_seconds=60.0, max_running=1)
    with working(given, lambda one: make_pair("full", "none")) as engine:
        long = begin(engine, replace(raw((5, 6), max_tokens=40), model="two"), held=True)
        long.until(RoundDone)
        behind = begin(engine, replace(raw((5, 6)), model="one"))
        later = time.monotonic() + 1000
        monkeypatch.setattr(time, "monotonic", lambda: later)
        long.go_on(3)
        for _ in range(3):
            long.until(RoundDone)
        assert loaded(engine) == ["one", "two"]
        long.go_on()
        closed(long.all())
        closed(behind.all())


# --- failures


def test_a_first_model_that_loads_in_the_end_is_no_problem() -> None:
    pairs = iter((None, make_pair("full", "none")))

    def loader(one: ServedModel) -> Any:
        if (pair := next(pairs)) is None:
            raise NotFound("it is not here yet")
        return pair

    with working(settings(ONE), loader) as engine:
        assert (engine.status().state, engine.status().problem) == ("failed", "it is not here yet")
        closed(answer(engine, replace(raw((5, 6)), model="one")))
        assert (engine.status().state, engine.status().problem) == ("ready", None)


@pytest.mark.parametrize(("target", "crashes"), [("nobody/nothing", False), ("demo", True)])
def test_a_model_that_cannot_be_loaded(target: str, crashes: bool, caplog: pytest.LogCaptureFixture) -> None:
    def loader(one: ServedModel) -> Any:
        if one.name == "two" and crashes:
            raise RuntimeError("a secret of the house")
        return load_served(one) if one.name == "two" else sized(one)

    with working(settings(ONE, ServedModel("two", PairSpec(target)), room=1.2), loader) as engine:
        with caplog.at_level(logging.ERROR):
            found = failure(answer(engine, chat(QUESTION, model="two")))
        assert (found.status, found.code) == (503, "model_not_loaded")
        assert found.message == "model 'two' could not be loaded"
        assert "two could not be loaded:" in caplog.text
        assert ("Traceback" in caplog.text) == crashes
        assert engine.status().state == "ready"
        closed(answer(engine, chat(QUESTION, model="one", max_tokens=3)))
