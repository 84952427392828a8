"""The engine thread: requests are exact, take turns, stop within a round when cancelled, and fail alone."""

from __future__ import annotations

import gc
import json
import logging
import math
import queue
import re
import statistics
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from support import mac, served
from support.pairs import make_pair
from support.served import (
    DEMO,
    ENDLESS,
    PLAIN,
    QUESTION,
    answer,
    before_prefill,
    begin,
    body,
    chat,
    closed,
    failure,
    load_once,
    load_tiny,
    raw,
    text_of,
    wait_until_idle,
    working,
)
from support.waiting import wait_until

from mlx_spec import demo
from mlx_spec.apps.server.engine import models, preparation
from mlx_spec.apps.server.engine.answers import (
    ChoiceEnded,
    Event,
    Failed,
    Finished,
    PromptProgress,
    PromptRead,
    RoundDone,
    TextDelta,
    ToolCall,
    timings_json,
)
from mlx_spec.apps.server.engine.engine_thread import EngineThread
from mlx_spec.apps.server.engine.job import RequestChoice
from mlx_spec.apps.server.engine.metrics import JobCounter, Metrics, Status
from mlx_spec.apps.server.engine.models import load_served
from mlx_spec.apps.server.errors import Failure, unavailable
from mlx_spec.apps.server.requests.request import OutputFormat, Tool, ToolUse
from mlx_spec.apps.server.settings import Limits, ServedModel, Settings
from mlx_spec.checkpoint.config import read_checkpoint
from mlx_spec.checkpoint.memory import memory_need
from mlx_spec.errors import BadCheckpoint, InvalidValue
from mlx_spec.hub.catalog import PairSpec
from mlx_spec.model.target import LMTarget
from mlx_spec.model.target_batch import TargetBatch
from mlx_spec.pair import Pair
from mlx_spec.policy import AdaptivePolicies, Table
from mlx_spec.policy.costs import CostModel
from mlx_spec.sampling import Sampling
from mlx_spec.tokenizer import Tokenizer, read_tokenizer
from mlx_spec.types import Reason, Round

LONG = "tell me everything about " + "itertools and functools and os and " * 20


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineThread]:
    with working() as engine:
        yield engine


@pytest.fixture(scope="module")
def plain() -> Iterator[EngineThread]:
    """The same without speculation."""
    with working(PLAIN, load_once) as engine:
        yield engine


# --- answers


LOOK_UP = {"type": "object", "properties": {"name": {"enum": ["os", "re"]}}}
TOOLS = ToolUse((Tool("look_up", "Look a name up.", LOOK_UP),), "required")
REQUESTS = {
    "a call": chat(QUESTION, tools=TOOLS, max_tokens=30),
    "chat": chat(QUESTION),
    "to the end": chat(QUESTION, max_tokens=None),
    "thinking": chat(QUESTION, thinking=True),
    "n": chat(QUESTION, n=3, sampling=Sampling(temperature=1.0, seed=3)),
    "stop": chat(QUESTION, stop=("path.jo", "two")),
    "prompts": raw("What does", "os.path.join: Join", (2, 5, 9), n=2),
    "echo": raw("os.path.join: Join", echo=True),
    "echo with logprobs": raw("os.path.join: Join two or more", echo=True, top_logprobs=1, max_tokens=0),
    "min_tokens": chat(QUESTION, max_tokens=36, sampling=Sampling(min_tokens=32)),
    "penalties": chat(QUESTION, sampling=Sampling(presence_penalty=1.0, logit_bias={5: 2.0})),
    "prediction": chat(QUESTION, prediction="os.path.join: Join three or more pathname components"),
    "regex": chat(QUESTION, format=OutputFormat("regex", "[a-z]{3,9}: [0-9]+")),
    "json": chat(QUESTION, format=OutputFormat("json_schema", '{"type": "boolean"}')),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_speculation_changes_no_answer(engine: EngineThread, plain: EngineThread, name: str) -> None:
    events = answer(engine, REQUESTS[name])
    assert body(events) == body(answer(plain, REQUESTS[name]))
    assert name != "a call" or any(isinstance(e, ToolCall) for e in events)
    spans = [(e.text, "".join(span.text for span in e.spans)) for e in events if isinstance(e, TextDelta)]
    assert all(text == pieced for text, pieced in spans)


def test_the_form_of_an_answer_holds_after_a_raw_prompt_that_opens_thinking(engine: EngineThread) -> None:
    """Its text is answer from the first token on."""
    form = OutputFormat("regex", "[0-9]{3}")
    events = answer(engine, raw(f"{QUESTION}<|channel>thought\n", format=form, max_tokens=12))
    assert re.fullmatch(form.text, text_of(events))


def test_an_answer(engine: EngineThread) -> None:
    events = answer(engine, chat(QUESTION, max_tokens=None))
    assert text_of(events) == ("os.path.join: Join two or more pathname components, inserting '/' as needed.")
    usage, timings = closed(events).usage, closed(events).timings
    rounds = [e for e in events if isinstance(e, RoundDone)]
    assert isinstance(events[0], PromptRead) and events[0].prompt_tokens == usage.prompt_tokens == 18
    assert isinstance(events[-2], ChoiceEnded) and events[-2].reason == "stop"
    assert usage.completion_tokens == timings.statistics.generated_tokens == 25
    assert len(rounds) == timings.statistics.rounds and rounds[-1].statistics == timings.statistics
    assert timings.draft_kind == "gemma4_assistant" and timings.statistics.accepted > 10
    assert 0 <= timings.queued_seconds < timings.first_token_seconds
    sources = {span.source for e in events if isinstance(e, TextDelta) for span in e.spans}
    assert sources == {None, "gemma4_assistant"}


def test_ends_of_an_answer(engine: EngineThread) -> None:
    plain = answer(engine, chat(QUESTION, max_tokens=None, top_logprobs=0))
    text = text_of(plain)
    for given, least in (({"sampling": Sampling(min_tokens=28)}, 29), ({"ignore_eos": True}, 32)):
        events = answer(engine, chat(QUESTION, max_tokens=32, **given))
        assert text_of(events).startswith(text) and closed(events).usage.completion_tokens >= least
    ended = answer(engine, chat(QUESTION, max_tokens=32, sampling=Sampling(min_tokens=5)))
    assert text_of(ended) == text
    tokens = [one for event in plain if isinstance(event, TextDelta) for one in event.logprobs]
    stop, before = tokens[6], b"".join(one.token_bytes for one in tokens[:6]).decode()
    events = answer(engine, chat(QUESTION, stop_tokens=(stop.token, 10**6)))
    assert text_of(events) == before and closed(events).usage.completion_tokens == 7
    assert [e.reason for e in events if isinstance(e, ChoiceEnded)] == ["stop"]
    late = Sampling(min_tokens=10)
    assert text_of(answer(engine, chat(QUESTION, stop_tokens=(stop.token,), sampling=late))) != before


@pytest.mark.parametrize(("parallel", "calls"), [(True, 2), (False, 1)])
def test_one_call_at_a_time_where_no_grammar_can_say_so(
    engine: EngineThread, monkeypatch: pytest.MonkeyPatch, parallel: bool, calls: int
) -> None:
    """The demo writes no calls of its own: their tokens take the place of its own."""
    monkeypatch.setattr(preparation, "answer_grammar", lambda *_: None)
    call, tokenizer = (
        '<|tool_call>call:look_up{name:<|"|>os<|"|>}<tool_call|>',
        read_tokenizer(read_checkpoint(demo.TARGET)),
    )
    written, close = tokenizer.encode(f"So. {call}{call} And so on"), tokenizer.token_id("<tool_call|>")
    read, rest = RequestChoice.read, list(written)

    def write(row: RequestChoice, round: Round) -> Iterator[Event]:
        tokens, rest[:] = rest[:5], rest[5:]
        return read(row, replace(round, tokens=tokens or round.tokens))

    monkeypatch.setattr(RequestChoice, "read", write)
    use = ToolUse(TOOLS.tools, parallel=parallel)
    most = len(written) + 1
    events = answer(engine, chat(QUESTION, tools=use, sampling=ENDLESS, max_tokens=most))
    ends = [event for event in events if isinstance(event, ChoiceEnded)]
    assert [event.call for event in events if isinstance(event, ToolCall)] == [*range(calls)]
    assert ends == [ChoiceEnded(0, "length" if parallel else "tool_calls")]
    assert parallel or closed(events).usage.completion_tokens == written.index(close) + 1


def test_choices_are_those_of_seeds_in_a_row(engine: EngineThread) -> None:
    def asked(seed: int, n: int) -> Any:
        return chat("Hm?", n=n, sampling=Sampling(temperature=4.0, top_k=50, seed=seed), max_tokens=8)

    events = answer(engine, asked(5, 3))
    alone = [text_of(answer(engine, asked(5 + i, 1))) for i in range(3)]
    assert [text_of(events, i) for i in range(3)] == alone
    assert len(set(alone)) > 1
    assert sorted(e.index for e in events if isinstance(e, ChoiceEnded)) == [0, 1, 2]
    assert sum(isinstance(e, PromptRead) for e in events) == 1  # one prefill
    usage = closed(events).usage
    assert usage.prompt_tokens == next(e.prompt_tokens for e in events if isinstance(e, PromptRead))


def test_the_next_turn_is_cached_up_to_the_stop_string(engine: EngineThread, plain: EngineThread) -> None:
    first = answer(engine, chat("Explain len()", stop=("of",)))
    prompt = closed(first).usage.prompt_tokens
    again = chat("Explain len()", text_of(first), "And os.getcwd?")
    events = answer(engine, again)
    assert closed(events).usage.cached_tokens > prompt
    assert body(events) == body(answer(plain, again))


# --- batches


def test_a_prompt_is_read_once_for_all_its_choices(engine: EngineThread) -> None:
    read = list[int]()
    with before_prefill(lambda tokens: read.append(len(tokens))):
        found = closed(answer(engine, chat("Tell me once " + LONG, n=6, sampling=ENDLESS, max_tokens=10)))
    assert sum(read) <= found.usage.prompt_tokens + 6 * 2
    assert found.timings.statistics.batch_size > 2


def test_a_mac_stays_awake_while_a_request_runs(
    plain: EngineThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = mac.caffeinate(tmp_path, monkeypatch)
    monkeypatch.setattr(plain._awake, "_program", str(tmp_path / "caffeinate"))
    closed(answer(plain, chat(QUESTION, sampling=ENDLESS, max_tokens=5)))
    wait_until(lambda: calls.exists() and plain._awake._process is None)


def test_choices_and_requests_that_come_at_once_begin_together(
    plain: EngineThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlx_spec.decode.pace.MAX_DEFERRAL_S", 60)  # however busy the machine is
    request = chat("Tell me twice " + LONG, n=4, sampling=ENDLESS, max_tokens=6)
    assert closed(answer(plain, request)).timings.statistics.batch_size == 4
    monkeypatch.setattr("mlx_spec.apps.server.engine.engine_thread.wait", lambda futures, _: wait(futures))
    all_came = threading.Event()
    texts = ["Tell me thrice " + LONG, QUESTION, "What does os.path.split do?", "What does zip do?"]
    with before_prefill(lambda _: all_came.wait(served.TIMEOUT_S)):
        streams = [begin(plain, chat(text, sampling=ENDLESS, max_tokens=6)) for text in texts]
        all_came.set()
        sizes = [closed(stream.all()).timings.statistics.batch_size for stream in streams]
    assert sizes == [4] * 4


def test_short_prompts_are_read_in_one_pass(plain: EngineThread, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the bits of each text must be those alone: the demo is in half precision."""
    passes, prefill = list[int](), TargetBatch.prefill

    def counted(target: TargetBatch, tokens: mx.array, sizes: Sequence[int]) -> Any:
        passes.append(len(sizes))
        return prefill(target, tokens, sizes)

    monkeypatch.setattr(TargetBatch, "prefill", counted)
    request = raw("tell me now of zip", "say to me what map does", "ask me how sum adds", top_logprobs=1)
    spec = PairSpec("demo", num_draft_tokens=4, exact="off")
    with working(Settings(models=(ServedModel("demo", spec),))) as engine:
        events = answer(engine, request)
    assert passes == [3]
    assert body(events) == body(answer(plain, request))
    assert passes == [3]
    assert closed(events).timings.statistics.prefill_seconds > 0


def test_a_request_with_many_choices_leaves_room_for_others() -> None:
    with working(replace(DEMO, max_running=2), load_tiny) as engine:
        many = begin(engine, chat(QUESTION, n=6, sampling=ENDLESS, max_tokens=16), held=True)
        many.until(RoundDone)
        other = begin(engine, chat(QUESTION, max_tokens=5))
        many.go_on()
        closed(other.all())
        assert sum(isinstance(e, ChoiceEnded) for e in many.all()) == 6
        ends = [number for number, event in many.sent if isinstance(event, ChoiceEnded)]
        assert other.number(Finished) < ends[3]


def test_what_does_not_fit_the_memory_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "memory_need", partial(memory_need, reserved=200))
    with working(replace(PLAIN, memory_bytes=models.need_of(PLAIN.models[0]).total), load_once) as engine:
        prompts = [raw((5 + i,) * 200, sampling=ENDLESS) for i in range(2)]
        streams = [begin(engine, prompt, held=prompt is prompts[0]) for prompt in prompts]
        streams[0].until(RoundDone)
        streams[0].go_on(1)  # in whose turn the second begins
        streams[0].until(RoundDone)
        assert engine.status().running == 2 and not streams[1].events.qsize()
        streams[0].go_on()
        assert [closed(stream.all()).timings.statistics.batch_size for stream in streams] == [1, 1]


def test_a_prompt_takes_the_room_of_free_caches_once_it_is_read(engine: EngineThread) -> None:
    closed(answer(engine, chat(QUESTION, max_tokens=2)))
    (model,) = engine._models.loaded()
    cache, limit = model.prefix_cache, model.prefix_cache.max_bytes
    assert cache.nbytes > cache.used_nbytes == 0
    cache.max_bytes = lambda: 0
    stream = begin(engine, raw((7, 8, 9), sampling=ENDLESS), held=True)
    stream.until(RoundDone)
    assert cache.nbytes == cache.used_nbytes > 0
    cache.max_bytes = limit
    stream.go_on()
    closed(stream.all())


def test_a_choice_that_has_ended_holds_no_caches(engine: EngineThread) -> None:
    """Else the caches of short choices would stay in memory until the longest one has ended."""
    (model,) = engine._models.loaded()
    cache, limit = model.prefix_cache, model.prefix_cache.max_bytes
    stream = begin(engine, raw("os.path.join: Join one", (7, 8, 9), max_tokens=60), held=True)
    while not any(isinstance(event, ChoiceEnded) for event in stream.seen):
        stream.go_on(1)
        stream.until(RoundDone)
    stream.until(RoundDone)  # of the other choice: the engine waits within it
    before = {weakref.ref(kept.sequence) for kept in cache._kept}
    cache.max_bytes = lambda: 0
    cache.shrink()
    gc.collect()
    left, cache.max_bytes = [one for one in before if one() is not None], limit
    stream.go_on()
    closed(stream.all())
    assert len(left) == 1 < len(before)  # of the choice that goes on


def test_a_prompt_with_scores_is_read_whole(engine: EngineThread) -> None:
    first, again = [answer(engine, REQUESTS["echo with logprobs"]) for _ in range(2)]
    assert body(first) == body(again) and closed(again).usage.cached_tokens == 0


# --- turns


def test_a_long_prompt_does_not_hold_up_others(monkeypatch: pytest.MonkeyPatch, engine: EngineThread) -> None:
    """A step comes between two rounds, and the short one has fewer rounds than the long one has steps.

    A step is a chunk, or a layer of one where steps of its size are not known yet.
    """
    monkeypatch.setattr("mlx_spec.decode.running.PREFILL_STEP", 16)
    monkeypatch.setattr("mlx_spec.decode.pace.MAX_PAUSE_S", 0.0)
    short = begin(engine, chat(QUESTION, sampling=ENDLESS, max_tokens=5), held=True)
    short.until(RoundDone)
    long = begin(engine, chat("And now " + 3 * LONG, max_tokens=4))
    short.go_on()
    closed(short.all())
    usage = closed(long.all()).usage
    assert usage.prompt_tokens - usage.cached_tokens > 16 * 15, "other tests may have read its beginning"
    assert short.number(Finished) < long.number(RoundDone)


Log = list[tuple[str, int]]


def by_batch(pair: Pair, prompts: list[tuple[int, ...]], log: Log) -> None:
    rounds = pair.generate_batch(prompts, max_tokens=2, max_running=8)
    log.clear()
    for index, _ in rounds:
        log.append(("token", index))


def by_server(pair: Pair, prompts: list[tuple[int, ...]], log: Log) -> None:
    events: queue.Queue[Any] = queue.Queue()

    def send(event: Any) -> None:
        events.put(event)
        if isinstance(event, RoundDone):
            log.append(("token", event.index))

    with working(replace(DEMO, max_running=8), lambda _: pair) as engine:
        log.clear()
        engine.submit(raw(*prompts, max_tokens=2), send)
        while not isinstance(events.get(timeout=served.TIMEOUT_S), Finished):
            pass


@pytest.mark.parametrize("answer_all", [by_batch, by_server])
def test_a_short_prompt_does_not_wait_for_all_long_ones(
    monkeypatch: pytest.MonkeyPatch, answer_all: Callable[[Pair, list[tuple[int, ...]], Log], None]
) -> None:
    """The oldest prompt and the shortest are read in turns. What is read is counted, not seconds."""
    monkeypatch.setattr("mlx_spec.decode.running.PREFILL_STEP", 16)
    monkeypatch.setattr("mlx_spec.decode.pace.MAX_DEFERRAL_S", 0.0)
    log = Log()
    with before_prefill(lambda tokens: log.append(("chunk", len(tokens)))):
        answer_all(make_pair("full", context=200), [*((5 + i,) * 60 for i in range(5)), (7,) * 4], log)
    first_tokens = [log.index(("token", index)) for index in range(6)]
    assert log[:2] == [("chunk", 16), ("chunk", 3)] and first_tokens[5] <= 3
    assert first_tokens[:5] == sorted(first_tokens[:5])  # long ones do not starve


def test_how_much_of_a_prompt_is_read(monkeypatch: pytest.MonkeyPatch, engine: EngineThread) -> None:
    monkeypatch.setattr("mlx_spec.decode.running.PREFILL_STEP", 16)
    quiet = answer(engine, chat("Once more " + LONG, max_tokens=1))
    assert not any(isinstance(event, PromptProgress) for event in quiet)
    events = answer(engine, chat("Now again " + LONG, max_tokens=1, progress=True))
    found = [event for event in events if isinstance(event, PromptProgress)]
    assert events[: len(found)] == found and isinstance(events[len(found)], PromptRead)
    total, cached = found[0].prompt_tokens, found[0].cached_tokens
    assert [event.read_tokens for event in found] == [*range(cached, total - 1, 16), total - 1]


# --- cancelling


@pytest.mark.parametrize("rounds", [0, 2])
def test_cancelled_within_a_round(engine: EngineThread, plain: EngineThread, rounds: int) -> None:
    request = chat("Explain os.getcwd", sampling=ENDLESS, max_tokens=300)
    stream = begin(engine, request)
    for _ in range(rounds):
        stream.until(RoundDone)
    stream.job.cancel()
    stream.job.cancel()
    sent = stream.events.qsize()
    wait_until_idle(engine)
    assert stream.events.qsize() <= sent + 1 + (rounds == 0)
    assert not any(isinstance(e, Failed) for e in tuple(stream.events.queue))
    again = replace(request, max_tokens=20)  # the same conversation afterwards
    assert body(answer(engine, again)) == body(answer(plain, again))


# --- preparing


PARTS = [{"pattern": f".*a.{{{n}}}b"} for n in range(1, 30)]
SLOW = OutputFormat("json_schema", json.dumps({"type": "string", "allOf": PARTS}))  # takes forever


def test_a_grammar_that_takes_long_is_refused() -> None:
    with working(replace(PLAIN, limits=Limits(grammar_seconds=0.3)), load_once) as engine:
        found = failure(answer(engine, chat(QUESTION, format=SLOW)))
    assert found.status == 400 and "takes more than 0.3 s to compile" in found.message


def test_a_grammar_that_takes_long_holds_up_nobody_else_and_frees_its_slot() -> None:
    with working(replace(PLAIN, max_running=2, limits=Limits(grammar_seconds=600.0)), load_once) as engine:
        running = begin(engine, chat(QUESTION, sampling=ENDLESS, max_tokens=3000))
        running.until(RoundDone)
        slow = begin(engine, chat(QUESTION, format=SLOW))
        wait_until(lambda: engine.status().running == 2)
        while not running.events.empty():
            running.next()
        for _ in range(4):  # one may end before the engine is asked to compile, and one behind it
            running.until(RoundDone)
        for each in (running, slow):
            each.job.cancel()
        wait_until_idle(engine)
        closed(answer(engine, chat(QUESTION, max_tokens=2)))
        assert slow.events.empty()


def test_a_grammar_is_compiled_once(engine: EngineThread, monkeypatch: pytest.MonkeyPatch) -> None:
    format = OutputFormat("regex", "[a-f]{4}")
    for thinking in (False, True):
        closed(answer(engine, chat(QUESTION, thinking=thinking, format=format)))
        monkeypatch.setattr(models, "compile_grammar", lambda *_, **__: 1 / 0)


def test_tokens_are_counted_as_they_will_be(engine: EngineThread) -> None:
    request = chat("What is a list?", "A type.", "And a tuple?", max_tokens=2)
    assert engine.count_tokens(request) == closed(answer(engine, request)).usage.prompt_tokens
    with pytest.raises(Failure, match="no model") as caught:
        engine.count_tokens(replace(request, model="other"))
    assert caught.value.status == 404


# --- admission


def test_the_queue_has_an_end_and_who_waits_can_be_cancelled() -> None:
    with working(replace(DEMO, max_running=1, max_waiting=2), load_tiny) as engine:
        streams = [begin(engine, chat(LONG, sampling=ENDLESS, max_tokens=300), held=True)]
        streams[0].until(RoundDone)
        streams += [begin(engine, chat(QUESTION, max_tokens=3)) for _ in range(2)]
        assert (engine.status().running, engine.status().waiting) == (1, 2)
        with pytest.raises(Failure, match="2 requests are waiting") as caught:
            begin(engine, chat(QUESTION))
        assert caught.value.status == 429 and (caught.value.retry_after or 0) >= 1
        streams[1].job.cancel()
        assert engine.status().waiting == 1
        streams.append(begin(engine, chat(QUESTION, max_tokens=3)))  # in the place that is free again
        streams[0].job.cancel()
        streams[0].go_on()
        for stream in streams[2:]:
            closed(stream.all())
        assert streams[1].events.empty()


def test_close_ends_what_runs_and_what_waits() -> None:
    with working(replace(DEMO, max_running=1), load_tiny) as engine:
        streams = [begin(engine, chat(LONG, sampling=ENDLESS, max_tokens=3000)) for _ in range(2)]
        streams[0].until(RoundDone)
        engine.close()
        for stream in streams:
            assert failure(stream.all()).status == 503
        assert engine.status().state == "closed"
        assert not engine.status().models
        with pytest.raises(Failure, match="shutting down"):
            begin(engine, chat(QUESTION))
        engine.close()


def test_close_fails_requests_while_a_pass_runs() -> None:
    """The server gives responses two seconds to end; a chunk of a prompt may take longer."""
    begun, go = threading.Event(), threading.Event()
    with (
        working(loader=load_tiny) as engine,
        before_prefill(lambda _: begun.set() or go.wait(served.TIMEOUT_S)),
    ):
        streams = [begin(engine, chat(LONG, max_tokens=2)), begin(engine, chat(QUESTION, max_tokens=2))]
        begun.wait(served.TIMEOUT_S)
        assert not engine.close(0.0)
        assert [failure(stream.all()).code for stream in streams] == ["shutting_down"] * 2
        go.set()
        assert engine.close(served.TIMEOUT_S)
        assert all(stream.events.empty() for stream in streams)


def test_a_request_that_two_threads_end_counts_once() -> None:
    metrics, codes = Metrics(lambda: Status("ready")), ("shutting_down", "internal_error")
    counter = JobCounter(metrics, "demo")
    for code in codes:
        counter.count(Failed(unavailable("too late", code)))
    value = metrics.registry.get_sample_value
    found = [value("mlx_spec_failures_total", {"model": "demo", "code": code}) for code in codes]
    assert found == [1.0, None]


@contextmanager
def loading(
    settings: Settings = DEMO, error: str | None = None, **seconds: float
) -> Iterator[tuple[EngineThread, Any]]:
    """An engine that loads its first model, or fails to, once the function is called."""
    go = threading.Event()

    def slowly(one: ServedModel) -> Any:
        go.wait(served.TIMEOUT_S)
        if error is not None:
            raise BadCheckpoint(error)
        return load_tiny(one)

    engine = EngineThread(settings, slowly, **seconds)
    engine.start()
    try:
        yield engine, go.set
    finally:
        go.set()
        engine.close()


def test_requests_wait_while_the_first_model_loads() -> None:
    with loading(replace(DEMO, max_waiting=1)) as (engine, go):
        assert engine.status().state == "loading" and not engine.models()[0].loaded
        streams = [
            begin(engine, chat(QUESTION, max_tokens=2)) for _ in range(2)
        ]  # one of them begins at once
        with pytest.raises(Failure, match="waiting") as full:
            begin(engine, chat(QUESTION))
        with pytest.raises(Failure) as unknown:
            begin(engine, chat(QUESTION, model="other"))
        assert (full.value.status, unknown.value.status) == (429, 404)
        assert engine.status().waiting == 2 and not any(stream.sent for stream in streams)
        go()
        for stream in streams:
            closed(stream.all())


def test_a_wait_for_the_first_model_has_a_bound() -> None:
    with loading(loading_wait_s=0.05, idle_s=0.05) as (engine, go):
        late = begin(engine, chat(QUESTION))
        found = failure(late.all())
        assert (found.status, found.code) == (503, "loading") and found.retry_after
        assert not engine.status().waiting
        go()
        assert engine.wait_loaded(served.TIMEOUT_S)
        closed(answer(engine, chat(QUESTION, max_tokens=2)))


def test_those_who_wait_are_told_once_that_the_first_model_cannot_be_loaded() -> None:
    with loading(error="a damaged file") as (engine, go):
        streams = [begin(engine, chat(QUESTION)) for _ in range(2)]
        go()
        for stream in streams:
            found = failure(stream.all())
            assert (found.status, found.code) == (503, "model_not_loaded")
        assert engine.status().problem == "a damaged file" and not engine.status().waiting


# --- failures


@pytest.mark.parametrize(
    ("given", "param", "message"),
    [
        (raw("x", (1,) * 4096, n=2), "prompt", "prompt is too long: 4096 tokens > 4096 maximum, the context"),
        (raw("x", (1, 9999), n=2), "prompt", "the prompt holds token 9999"),
        (raw("x", (), n=2), "prompt", "empty"),
        (chat(QUESTION, stop=("",)), None, "stop"),
        (chat(QUESTION, sampling=Sampling(logit_bias={9999: 1.0})), "logit_bias", "has token id 9999"),
        (raw("x", "y", sampling=Sampling(logit_bias={9999: 1.0})), "logit_bias", "has token id 9999"),
        (chat(QUESTION, format=OutputFormat("regex", "[")), "response_format", "regular expression"),
    ],
)
def test_what_cannot_be_answered(
    engine: EngineThread, given: Any, param: str | None, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Where one prompt cannot be, nothing is generated for the others. It is not an error of the server."""
    events = answer(engine, given)
    found = failure(events)
    assert (found.status, found.param, len(events)) == (400, param, 1) and message in found.message
    assert found.code == ("context_length_exceeded" if "context" in message else "invalid_value")
    closed(answer(engine, chat(QUESTION, max_tokens=2)))
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize("limit", [None, 7])
def test_a_limit_beyond_the_context_is_cut(limit: int | None) -> None:
    with working(DEMO, lambda _: make_pair("full", context=64)) as engine:
        events = answer(engine, raw((5,) * 58, max_tokens=limit))
    assert closed(events).usage.completion_tokens == 6
    assert next(e for e in events if isinstance(e, ChoiceEnded)).reason == "length"


def test_an_error_fails_one_request(
    engine: EngineThread,
    plain: EngineThread,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    other = begin(engine, chat("Explain len()", sampling=ENDLESS, max_tokens=20))
    other.until(RoundDone)
    request = raw(tuple(range(300, 318)), sampling=ENDLESS, max_tokens=24)
    with monkeypatch.context() as broken, caplog.at_level(logging.ERROR):
        read = RequestChoice.read

        def breaks(self: Any, round: Any) -> Any:
            if self.statistics.prompt_tokens == 18 and self.statistics.rounds == 3:
                raise RuntimeError("a secret of the house")
            return read(self, round)

        broken.setattr(RequestChoice, "read", breaks)
        found = failure(answer(engine, request))
    assert (found.status, found.code) == (500, "internal_error")
    assert "secret" not in found.message and "a secret of the house" in caplog.text
    closed(other.all())
    again = answer(engine, request)
    assert body(again) == body(answer(plain, request))
    assert closed(again).usage.cached_tokens == 0  # nothing is kept of the caches


def test_a_drafter_that_fails_costs_its_drafts_alone(
    engine: EngineThread,
    plain: EngineThread,
    monkeypatch: pytest.MonkeyPatch,
    draft_errors: list[str],
) -> None:
    (loaded,) = engine._models.loaded()
    kind, request = type(loaded.pair.open().drafters[0]), raw("os.path.join: Join one", max_tokens=20)
    with monkeypatch.context() as broken:
        broken.setattr(kind, "observe", lambda *given: 1 / 0)
        events = answer(engine, request)
    assert body(events) == body(answer(plain, request))
    assert timings_json(closed(events).timings)["reason"] == "drafter failed"
    assert "ZeroDivisionError" in draft_errors.pop()
    again = answer(engine, request)
    assert body(again) == body(events)
    assert closed(again).timings.statistics.reason is not Reason.FAILED


def test_a_tokenizer_that_fails_on_one_token_ends_one_answer(
    engine: EngineThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = begin(engine, raw((301, 426), sampling=ENDLESS, max_tokens=40))
    other.until(RoundDone)
    decoded, bad = Tokenizer._decoded, 318  # in the answer to the question

    def fails(self: Tokenizer, tokens: Sequence[int], **more: Any) -> str:
        if bad in tokens:
            raise InvalidValue("the tokenizer fails on these tokens: it panics")
        return decoded(self, tokens, **more)

    with monkeypatch.context() as broken:
        broken.setattr(Tokenizer, "_decoded", fails)
        stream = begin(engine, chat(QUESTION, max_tokens=24))
        found = [event for event in stream.all() if isinstance(event, Failed)]
    assert found and "the tokenizer fails on these tokens" in found[0].failure.message
    closed(other.all())
    assert text_of(answer(engine, chat(QUESTION))).startswith("os.path.join: Join")


def test_an_error_of_one_choice_ends_the_others_of_its_request(
    engine: EngineThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their results may come in the same step."""
    stream = begin(engine, chat(QUESTION, n=3, sampling=ENDLESS, max_tokens=3000))
    wait_until(lambda: {e.index for _, e in tuple(stream.sent) if isinstance(e, RoundDone)} == {0, 1, 2})
    with monkeypatch.context() as broken:
        broken.setattr(RequestChoice, "read", lambda *given: 1 / 0)
        assert failure(stream.all()).code == "internal_error"
    closed(answer(engine, chat(QUESTION, max_tokens=2)))


class Panic(BaseException):
    """As the error of Rust code that panics."""


def panic(*_: Any, **__: Any) -> None:
    raise Panic("a panic")


def error(*_: Any, **__: Any) -> None:
    raise RuntimeError("a secret of the house")


VERIFY = LMTarget.verify
FAULTS: list[tuple[str, Any, bool, str]] = [  # what breaks and how, whether in a pass, words of the failure
    ("apps.server.engine.job.prepare", panic, False, "its log says why"),
    ("pair.Pair.prepare", panic, False, "its log says why"),
    ("decode.scheduler.Batch.step", panic, True, "its log says why"),
    ("decode.round.Group.step", error, True, "its log says why"),
    ("decode.scheduler.Batch._regroup", error, True, "its log says why"),
    (
        "model.target.LMTarget.verify",
        lambda *given, **more: VERIFY(*given, **more) * math.nan,
        True,
        "not finite after 0 tokens of the answer: --exact float32",
    ),
]


@pytest.mark.parametrize(("place", "breaks", "is_pass", "words"), FAULTS, ids=[row[0] for row in FAULTS])
def test_a_fault_ends_the_requests_that_it_meets(
    engine: EngineThread, monkeypatch: pytest.MonkeyPatch, place: str, breaks: Any, is_pass: bool, words: str
) -> None:
    """Those in a pass that fails, or the one that cannot begin; the next one is answered."""
    stream = begin(engine, chat(QUESTION, sampling=ENDLESS, max_tokens=3000))
    stream.until(RoundDone)
    with monkeypatch.context() as broken:
        broken.setattr(f"mlx_spec.{place}", breaks)
        found = failure(answer(engine, chat(QUESTION)))
        assert found.status == 500 and all(part in found.message for part in words.split(": "))
        assert found.code == ("not_finite" if "finite" in words else "internal_error")
        if is_pass:
            assert failure(stream.all()).status == 500
    assert text_of(answer(engine, chat(QUESTION))).startswith("os.path.join: Join")
    assert engine.status().state == "ready"
    stream.job.cancel()
    wait_until_idle(engine)


def test_costs_that_keep_drafts_off_are_measured_again_while_nobody_waits() -> None:
    """A pair that was loaded beside a busy program took its drafter for too dear, until the next load."""
    pairs: list[Pair] = []

    def of_a_busy_machine(one: ServedModel) -> Pair:
        pair = load_served(one)
        assert isinstance(pair.policies, AdaptivePolicies)
        pair.policies.use(Table(0.01, {1: 0.01, 17: 0.17}, [{1: 0.5}] * len(pair.policies.names)))
        pairs.append(pair)
        return pair

    def queued() -> float:
        return closed(answer(engine, chat(QUESTION, max_tokens=4))).timings.queued_seconds

    with working(Settings((ServedModel("demo", PairSpec("demo")),)), of_a_busy_machine) as engine:
        assert statistics.median(queued() for _ in range(7)) < 0.3
        wait_until(lambda: engine.status().measuring is not None)
        waited, began = queued(), time.monotonic()
        wait_until(lambda: costs(pairs[0]).drafting(0, 1) <= 0.4)
        wait_until(lambda: engine.status().measuring is None)
        assert waited < (time.monotonic() - began) / 3, "less than all that was left to measure"


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (Status("ready", waiting=0, running=1), None),
        (Status("ready", waiting=1, running=1), "answers"),
        (Status("ready", waiting=1, measuring="a"), "measuring"),
        (Status("ready", waiting=1, running=1, loading="b"), "loading"),
    ],
)
def test_the_queue_says_what_its_requests_wait_for(status: Status, reason: str | None) -> None:
    assert Metrics(lambda: status).json()["queue"]["waits_for"] == reason


def costs(pair: Pair) -> CostModel:
    assert isinstance(pair.policies, AdaptivePolicies) and pair.policies.costs is not None
    return pair.policies.costs.at(1)
