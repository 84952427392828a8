"""The figures that every protocol reports, and the bridge from the engine's thread to the event loop."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from dataclasses import replace

import pytest
from scripted import OPENED, STATISTICS, TIMINGS, TURN, Scripted, logprob, said

from mlx_spec.apps.server.errors import Failure, internal_error, queue_full
from mlx_spec.apps.server.http import STEP_EVENTS, EventQueue, LoopWaker, named_event, read_events
from mlx_spec.apps.server.request import Chat, Failed, GenerationRequest, RoundDone, TextDelta, Timings
from mlx_spec.apps.server.usage import logprob_json, timings_json
from mlx_spec.sampling import Sampling
from mlx_spec.session import Statistics
from mlx_spec.types import Reason

ASK = GenerationRequest("demo", Chat(()), Sampling())
PIECE, DONE = TextDelta(0, "answer", "x"), RoundDone(0, STATISTICS)


def test_timings_name_everything():
    assert timings_json(TIMINGS) == {
        "draft_kind": "mtp",
        "draft_rounds": 5,
        "draft_n": 15,
        "draft_n_accepted": 11,
        "drafted_at": [5, 5, 5],
        "accepted_at": [5, 4, 2],
        "draft_length": 3,
        "cache_n": 12,
        "drafter_cold_n": 0,
        "prompt_n": 18,
        "prompt_ms": 500.0,
        "prompt_per_second": 36.0,
        "predicted_n": 17,
        "predicted_ms": 250.0,
        "predicted_per_second": 68.0,
        "gain": 2.0,
        "speculation": "on",
        "reason": "speculation pays",
        "queued_ms": 1.0,
        "ttft_ms": 510.0,
    }


@pytest.mark.parametrize("reason", list(Reason))
def test_speculation_is_on_unless_its_reason_says_off(reason: Reason):
    on = reason in (Reason.FIXED, Reason.WARMING_UP, Reason.PAYS, Reason.WAITING, Reason.PROBE)
    found = timings_json(replace(TIMINGS, statistics=replace(STATISTICS, reason=reason)))
    assert (found["speculation"], found["reason"]) == ("on" if on else "off", reason.value)


def test_timings_of_nothing():
    found = timings_json(Timings(Statistics(), None, 0.0, 0.0))
    assert [found[key] for key in ("prompt_per_second", "predicted_per_second", "gain")] == [None] * 3


def test_logprobs_are_json():
    assert logprob_json(logprob("ü".encode()[:1])) == {
        "token": "�",
        "logprob": -0.25,
        "bytes": [195],
        "top_logprobs": [
            {"token": "�", "logprob": -0.25, "bytes": [195]},
            {"token": "�", "logprob": -9999.0, "bytes": [255]},
        ],
    }


def test_a_frame_is_one_line_of_data():
    text = "".join(map(chr, range(0x2030))) + "ü🌦"
    name, data = named_event("x", {"text": text}).removesuffix("\n\n").splitlines()
    assert name == "event: x" and json.loads(data.removeprefix("data: ")) == {"text": text}
    assert named_event("x", {"text": "ü"}) == 'event: x\ndata: {"text":"ü"}\n\n'


def test_all_events_arrive_in_order():
    async def read() -> list[object]:
        return [event async for event in read_events(worker, ASK)]

    worker = Scripted()
    worker.script = TURN
    assert asyncio.run(read()) == list(TURN) and worker.jobs[0].gone.is_set()


def test_a_failure_is_the_last_event():
    async def read() -> list[object]:
        return [event async for event in read_events(worker, ASK)]

    worker = Scripted()
    worker.script = (OPENED, Failed(internal_error()), *said("never"))
    assert len(asyncio.run(read())) == 2


def test_closing_early_cancels():
    async def read() -> None:
        async with aclosing(read_events(worker, ASK)) as source:
            assert await anext(source) == OPENED
            assert not worker.jobs[0].gone.is_set()
        assert worker.jobs[0].gone.is_set()

    worker = Scripted()
    worker.script = (OPENED, 5.0, *said("never"))
    asyncio.run(read())


def test_cancelling_whoever_waits_cancels():
    async def read() -> None:
        waiting = asyncio.create_task(anext(source))
        await asyncio.sleep(0.05)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    worker = Scripted()
    worker.script = (5.0,)
    source = read_events(worker, ASK)
    asyncio.run(read())
    assert worker.jobs[0].gone.is_set()


def test_a_refusal_is_raised_at_once():
    worker = Scripted()
    worker.refuses = queue_full(1, 1)
    with pytest.raises(Failure, match="1 requests"):
        asyncio.run(anext(read_events(worker, ASK)))  # type: ignore[arg-type]


def test_silence_loses_nothing():
    async def read() -> list[object]:
        return [event async for event in read_events(worker, ASK, 0.01)]

    worker = Scripted()
    pieces = [TextDelta(0, "answer", str(i)) for i in range(20)]
    worker.script = tuple(step for piece in pieces for step in (0.0101, piece)) + said()[-1:]
    assert [event for event in asyncio.run(read()) if event is not None] == [*pieces, said()[-1]]


def test_silence_is_told_and_what_comes_after_it_arrives():
    async def read() -> list[object]:
        inbox = EventQueue(STEP_EVENTS, 0.01)
        found: list[object] = [await inbox.get(), await inbox.get()]
        inbox.put(OPENED)
        return [*found, await inbox.get(), await inbox.get()]

    assert asyncio.run(read()) == [None, None, OPENED, None]


def test_text_waits_for_the_end_of_its_step():
    async def read() -> list[object]:
        inbox = EventQueue(STEP_EVENTS, None)
        waiting = asyncio.create_task(inbox.get())
        await asyncio.sleep(0)
        for event in (PIECE, PIECE):
            inbox.put(event)
        await asyncio.sleep(0.05)
        assert not waiting.done()
        inbox.put(DONE)
        return [await waiting, await inbox.get(), await inbox.get()]

    assert asyncio.run(read()) == [PIECE, PIECE, DONE]


def test_a_loop_is_woken_once_for_all_that_it_has_not_looked_at(monkeypatch):
    async def read() -> list[object]:
        inbox = EventQueue(STEP_EVENTS, None)
        for _ in range(100):
            inbox.put(DONE)  # the loop is busy: it runs this
        found = [await inbox.get() for _ in range(100)]
        await asyncio.sleep(0.05)
        inbox.put(DONE)
        return [*found, await inbox.get()]

    calls, call = list[object](), LoopWaker.call
    monkeypatch.setattr(LoopWaker, "call", lambda self, *args: (calls.append(args), call(self, *args)))
    assert asyncio.run(read()) == [DONE] * 101 and len(calls) == 2


def test_being_woken_for_what_was_read_already_is_no_silence():
    async def read() -> object:
        inbox = EventQueue(STEP_EVENTS, 60.0)
        inbox.put(DONE)
        assert await inbox.get() is DONE  # before the loop was woken for it
        waiting = asyncio.create_task(inbox.get())
        await asyncio.sleep(0.1)
        assert not waiting.done()
        inbox.put(DONE)
        return await asyncio.wait_for(waiting, 10)

    assert asyncio.run(read()) is DONE
