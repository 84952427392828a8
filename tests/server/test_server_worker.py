"""The engine thread: requests take turns, end within a round when cancelled, fail alone, and are exact."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import served
from served import DEMO, QUESTION, answer, begin, body, chat, closed, failure, raw, text_of, working
from test_session import make_pair

from mlx_spec.apps.server.ask import (
    Ask,
    CallArguments,
    CallOpened,
    Chat,
    Ended,
    Failed,
    Format,
    Opened,
    Piece,
    RoundDone,
    Tool,
    ToolUse,
)
from mlx_spec.apps.server.choice import Choice
from mlx_spec.apps.server.failures import Failure
from mlx_spec.apps.server.models import load_served
from mlx_spec.apps.server.settings import Limits, Served, Settings
from mlx_spec.apps.server.worker import Worker
from mlx_spec.sampling import Sampling

LONG = "tell me everything about " + "itertools and functools and os and " * 20
ENDLESS = Sampling(logit_bias={1: -100.0, 15: -100.0})  # without the tokens that end an answer of the demo


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with working() as worker:
        yield worker


@pytest.fixture(scope="module")
def plain() -> Iterator[Worker]:
    """The same without speculation."""
    with working(Settings(models=(Served("demo", "demo", drafter="none"),))) as worker:
        yield worker


# --- answers


ASKS = {
    "chat": chat(QUESTION),
    "length": chat(QUESTION, max_tokens=5),
    "to the end": chat(QUESTION, max_tokens=None),
    "thinking": chat(QUESTION, thinking=True),
    "n": chat(QUESTION, n=3, sampling=Sampling(temperature=1.0, seed=3)),
    "stop": chat(QUESTION, stop=("path.jo", "two")),
    "stop at once": chat(QUESTION, stop=("o",)),
    "prompts": raw("What does", "os.path.join: Join", (2, 5, 9), n=2),
    "echo": raw("os.path.join: Join", echo=True),
    "logprobs": chat(QUESTION, top_logprobs=2),
    "echo with logprobs": raw("os.path.join: Join two or more", echo=True, top_logprobs=1, max_tokens=0),
    "penalties": chat(QUESTION, sampling=Sampling(presence_penalty=1.0, logit_bias={5: 2.0})),
    "prediction": chat(QUESTION, prediction="os.path.join: Join three or more pathname components"),
    "regex": chat(QUESTION, format=Format("regex", "[a-z]{3,9}: [0-9]+")),
    "json": chat(QUESTION, format=Format("json_schema", '{"type": "boolean"}')),
}


@pytest.mark.parametrize("name", ASKS)
def test_speculation_changes_no_answer(worker: Worker, plain: Worker, name: str) -> None:
    events = answer(worker, ASKS[name])
    assert body(events) == body(answer(plain, ASKS[name]))
    spans = [(e.text, "".join(span.text for span in e.spans)) for e in events if isinstance(e, Piece)]
    assert all(text == pieced for text, pieced in spans)


def test_an_answer(worker: Worker) -> None:
    events = answer(worker, chat(QUESTION, max_tokens=None))
    assert text_of(events) == ("os.path.join: Join two or more pathname components, inserting '/' as needed.")
    usage, timings = closed(events).usage, closed(events).timings
    rounds = [e for e in events if isinstance(e, RoundDone)]
    assert isinstance(events[0], Opened) and events[0].prompt_tokens == usage.prompt_tokens == 18
    assert isinstance(events[-2], Ended) and events[-2].reason == "stop"
    assert usage.completion_tokens == timings.statistics.generated_tokens == 25
    assert len(rounds) == timings.statistics.rounds and rounds[-1].statistics == timings.statistics
    assert timings.draft_kind == "gemma4_assistant" and timings.statistics.accepted > 10
    assert 0 <= timings.queued_seconds < timings.first_token_seconds
    sources = {span.source for e in events if isinstance(e, Piece) for span in e.spans}
    assert sources == {None, "gemma4_assistant"}


def test_choices_are_those_of_seeds_in_a_row(worker: Worker) -> None:
    def asked(seed: int, n: int) -> Any:
        return chat("Hm?", n=n, sampling=Sampling(temperature=4.0, top_k=50, seed=seed), max_tokens=12)

    events = answer(worker, asked(5, 3))
    alone = [text_of(answer(worker, asked(5 + i, 1))) for i in range(3)]
    assert [text_of(events, i) for i in range(3)] == alone
    assert len(set(alone)) > 1
    assert [e.index for e in events if isinstance(e, Ended)] == [0, 1, 2]
    assert sum(isinstance(e, Opened) for e in events) == 1  # one prefill
    usage = closed(events).usage
    assert usage.prompt_tokens == next(e.prompt_tokens for e in events if isinstance(e, Opened))


def test_prompts_are_counted_together(worker: Worker) -> None:
    prompts: tuple[str | tuple[int, ...], ...] = ("What does", "os.path.join: Join", (2, 5, 9))
    events = answer(worker, raw(*prompts, n=2))
    opened = [e.prompt_tokens for e in events if isinstance(e, Opened)]
    assert len(opened) == 3 and opened[2] == 3
    assert closed(events).usage.prompt_tokens == sum(opened)
    assert [e.index for e in events if isinstance(e, Ended)] == [0, 1, 2, 3, 4, 5]
    for i, prompt in enumerate(prompts):
        single = text_of(answer(worker, raw(prompt)))
        assert text_of(events, 2 * i) == text_of(events, 2 * i + 1) == single


def test_an_answer_that_stops_is_cut_by_tokens(worker: Worker) -> None:
    whole = answer(worker, chat(QUESTION))
    events = answer(worker, chat(QUESTION, stop=("two",)))
    assert text_of(events) == text_of(whole).split("two")[0]
    ended = next(e for e in events if isinstance(e, Ended))
    assert (ended.reason, ended.stop) == ("stop", "two")
    assert closed(events).usage.completion_tokens < closed(events).timings.statistics.generated_tokens


def test_the_next_turn_is_cached_up_to_the_stop_string(worker: Worker, plain: Worker) -> None:
    first = answer(worker, chat("Explain len()", stop=("of",)))
    prompt = closed(first).usage.prompt_tokens
    again = chat("Explain len()", text_of(first), "And os.getcwd?")
    events = answer(worker, again)
    assert closed(events).usage.cached_tokens > prompt
    assert body(events) == body(answer(plain, again))


def test_echo_and_scores(worker: Worker) -> None:
    events = answer(worker, raw("os.path.join: Join two", echo=True, top_logprobs=1, max_tokens=4))
    pieces = [e for e in events if isinstance(e, Piece)]
    assert pieces[0].text == "os.path.join: Join two"
    scores = pieces[0].logprobs
    assert len(scores) == closed(events).usage.prompt_tokens
    assert scores[0].logprob != scores[0].logprob  # nan
    assert all(score.logprob <= 0 for score in scores[1:])
    unscored = answer(worker, raw("os.path.join: Join two", max_tokens=4))
    assert text_of(events) == "os.path.join: Join two" + text_of(unscored)
    assert closed(answer(worker, raw("Hi", echo=True, max_tokens=0))).usage.completion_tokens == 0


TOOL = Tool("look_up", "Look a name up.", {"type": "object", "properties": {"name": {"enum": ["os", "re"]}}})


def with_tools(ask: Ask, use: ToolUse) -> Ask:
    assert isinstance(ask.prompt, Chat)
    return replace(ask, prompt=replace(ask.prompt, tools=use))


@pytest.mark.parametrize("parallel", [True, False])
def test_a_call_that_is_required(worker: Worker, plain: Worker, parallel: bool) -> None:
    use = ToolUse((TOOL,), "required", parallel=parallel)
    ask = with_tools(chat(QUESTION, max_tokens=60), use)
    events = answer(worker, ask)
    opened = [e for e in events if isinstance(e, CallOpened)]
    assert opened[0].name == "look_up" and (parallel or len(opened) == 1)
    given = "".join(e.text for e in events if isinstance(e, CallArguments) and e.call == 0)
    assert json.loads(given).get("name", "os") in ("os", "re")
    assert next(e for e in events if isinstance(e, Ended)).reason == "tool_calls"
    assert text_of(events) == ""
    assert body(events) == body(answer(plain, ask))


def test_tools_that_must_not_be_used(worker: Worker) -> None:
    ask = chat(QUESTION, max_tokens=30)
    none = with_tools(ask, ToolUse((TOOL,), "none"))
    assert text_of(answer(worker, none)) == text_of(answer(worker, ask))


# --- turns


def test_a_short_request_is_done_while_a_long_one_runs(worker: Worker) -> None:
    long = begin(worker, chat(LONG, sampling=ENDLESS, max_tokens=400))
    long.until(RoundDone)
    short = begin(worker, chat(QUESTION, max_tokens=6))
    closed(short.all())
    assert worker.status().running == 1
    rounds = sum(isinstance(e, RoundDone) for e in (*long.seen, *tuple(long.events.queue)))
    assert rounds < 60
    long.job.cancel()


def test_a_long_prompt_does_not_hold_up_others(monkeypatch: pytest.MonkeyPatch, worker: Worker) -> None:
    monkeypatch.setattr("mlx_spec.engine.PREFILL_STEP", 16)
    short = begin(worker, chat(QUESTION, sampling=ENDLESS, max_tokens=25))
    short.until(RoundDone)
    long = begin(worker, chat("And now " + 4 * LONG, max_tokens=4))
    events = short.all()
    closed(events)
    assert not any(isinstance(e, RoundDone) for e in tuple(long.events.queue))
    assert closed(long.all()).usage.prompt_tokens > 16 * 30


def test_requests_do_not_meet(worker: Worker, plain: Worker) -> None:
    asks = [chat(f"What does {name} do?") for name in ("json.loads", "re.sub", "map")]
    streams = [begin(worker, ask) for ask in asks]
    for ask, stream in zip(asks, streams, strict=True):
        assert body(stream.all()) == body(answer(plain, ask))


# --- cancelling


def idle(worker: Worker) -> None:
    deadline = time.monotonic() + served.PATIENCE
    while worker.status().running or worker.status().waiting:
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("rounds", [0, 2])
def test_cancelled_within_a_round(worker: Worker, plain: Worker, rounds: int) -> None:
    ask = chat("Explain os.getcwd", sampling=ENDLESS, max_tokens=300)
    stream = begin(worker, ask)
    for _ in range(rounds):
        stream.until(RoundDone)
    stream.job.cancel()
    stream.job.cancel()
    sent = stream.events.qsize()
    idle(worker)
    assert stream.events.qsize() <= sent + 1 + (rounds == 0)
    assert not any(isinstance(e, Failed) for e in tuple(stream.events.queue))
    again = replace(ask, max_tokens=20)  # the same conversation afterwards
    assert body(answer(worker, again)) == body(answer(plain, again))


def test_cancelled_while_it_waits() -> None:
    with working(replace(DEMO, limits=Limits(running=1))) as worker:
        running = begin(worker, chat(LONG, sampling=ENDLESS, max_tokens=300))
        running.until(RoundDone)
        waiting = begin(worker, chat(QUESTION))
        assert worker.status().waiting == 1
        waiting.job.cancel()
        assert worker.status().waiting == 0
        running.job.cancel()
        idle(worker)
        assert waiting.events.empty()


# --- admission


def test_the_queue_has_an_end() -> None:
    with working(replace(DEMO, limits=Limits(running=1, waiting=2))) as worker:
        streams = [begin(worker, chat(LONG, sampling=ENDLESS, max_tokens=300))]
        streams[0].until(RoundDone)
        streams += [begin(worker, chat(QUESTION, max_tokens=3)) for _ in range(2)]
        assert (worker.status().running, worker.status().waiting) == (1, 2)
        with pytest.raises(Failure, match="2 requests are waiting") as caught:
            begin(worker, chat(QUESTION))
        assert caught.value.status == 429 and (caught.value.retry_after or 0) >= 1
        streams[0].job.cancel()
        for stream in streams[1:]:
            closed(stream.all())


def test_as_many_as_may_run_and_wait_are_admitted_at_once() -> None:
    with working(replace(DEMO, limits=Limits(running=2, waiting=1))) as worker:
        streams = [begin(worker, chat(QUESTION, max_tokens=40)) for _ in range(3)]
        for stream in streams:
            closed(stream.all())


def test_drain_answers_what_was_admitted() -> None:
    with working() as worker:
        stream = begin(worker, chat(QUESTION))
        worker.drain()
        with pytest.raises(Failure, match="shutting down") as caught:
            begin(worker, chat(QUESTION))
        assert caught.value.status == 503
        assert text_of(stream.all()).startswith("os.path.join")
        assert worker.status().state == "draining"


def test_close_ends_what_runs_and_what_waits() -> None:
    with working(replace(DEMO, limits=Limits(running=1))) as worker:
        streams = [begin(worker, chat(LONG, sampling=ENDLESS, max_tokens=3000)) for _ in range(2)]
        streams[0].until(RoundDone)
        worker.close()
        for stream in streams:
            assert failure(stream.all()).status == 503
        assert worker.status().state == "closed"
        assert not worker.status().models
        with pytest.raises(Failure, match="shutting down"):
            begin(worker, chat(QUESTION))
        worker.close()


def test_not_ready_while_the_first_model_loads() -> None:
    go = threading.Event()

    def slowly(one: Served) -> Any:
        go.wait(served.PATIENCE)
        return load_served(one)

    worker = Worker(DEMO, slowly)
    worker.start()
    try:
        assert worker.status().state == "loading" and not worker.models()[0].loaded
        with pytest.raises(Failure, match="loading") as caught:
            begin(worker, chat(QUESTION))
        assert caught.value.status == 503 and caught.value.retry_after
        with pytest.raises(Failure) as unknown:
            begin(worker, chat(QUESTION, model="other"))
        assert unknown.value.status == 404
        go.set()
        assert worker.begun(served.PATIENCE)
        closed(answer(worker, chat(QUESTION, max_tokens=2)))
    finally:
        go.set()
        worker.close()


# --- failures


@pytest.mark.parametrize(
    ("ask", "code", "message"),
    [
        (raw((1,) * 4096), "context_length_exceeded", "has 4096 tokens and the context of this target ends"),
        (raw((1, 9999)), "invalid_value", "the prompt holds token 9999"),
        (raw(()), "invalid_value", "the prompt is empty"),
        (chat(QUESTION, stop=("",)), "invalid_value", "stop"),
        (chat(QUESTION, format=Format("regex", "[")), "invalid_value", "regular expression"),
    ],
)
def test_what_cannot_be_answered(worker: Worker, ask: Any, code: str, message: str) -> None:
    found = failure(answer(worker, ask))
    assert (found.status, found.code) == (400, code) and message in found.message
    closed(answer(worker, chat(QUESTION, max_tokens=2)))


@pytest.mark.parametrize("prompt", [(), (-1,), (5, 9999)])
def test_a_prompt_that_cannot_be_is_named(worker: Worker, prompt: tuple[int, ...]) -> None:
    assert failure(answer(worker, raw(prompt))).param == "prompt"


@pytest.mark.parametrize("limit", [None, 7])
def test_a_limit_beyond_the_context_is_cut(limit: int | None) -> None:
    with working(DEMO, lambda _: make_pair("full", context=64)) as worker:
        events = answer(worker, raw((5,) * 58, max_tokens=limit))
    assert closed(events).usage.completion_tokens == 6
    assert next(e for e in events if isinstance(e, Ended)).reason == "length"


def test_an_error_fails_one_request(
    worker: Worker, plain: Worker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    other = begin(worker, chat("Explain len()", sampling=ENDLESS, max_tokens=50))
    other.until(RoundDone)
    ask = chat(QUESTION, sampling=Sampling(logit_bias={7: 1.0}), max_tokens=60)
    with monkeypatch.context() as broken, caplog.at_level(logging.ERROR):
        read = Choice.read

        def breaks(self: Any, round: Any, seconds: float) -> Any:
            if self.statistics.prompt_tokens == 18 and self.statistics.rounds == 2:
                raise RuntimeError("a secret of the house")
            return read(self, round, seconds)

        broken.setattr(Choice, "read", breaks)
        found = failure(answer(worker, ask))
    assert (found.status, found.code) == (500, "internal_error")
    assert "secret" not in found.message and "a secret of the house" in caplog.text
    closed(other.all())
    assert body(answer(worker, ask)) == body(answer(plain, ask))


def test_one_who_cannot_take_events_is_gone(worker: Worker, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(_: Any) -> None:
        raise OSError("hung up")

    with caplog.at_level(logging.CRITICAL, logger="mlx_spec.server"):
        worker.submit(chat(QUESTION, sampling=ENDLESS, max_tokens=3000), refuse)
        idle(worker)
    closed(answer(worker, chat(QUESTION, max_tokens=2)))


def test_no_answer_before_its_time(worker: Worker) -> None:
    """Names and status are for any thread, and touch nothing of the engine."""
    assert worker.resolve(None) == "demo"
    card = worker.models()[0]
    assert (card.name, card.loaded, card.context_length, card.thinks, card.tools) == (
        *("demo", True, 4096),
        *(True, True),
    )
    status = worker.status()
    assert status.state == "ready" and status.models[0].weights > 10**7 and status.memory.active > 10**7
