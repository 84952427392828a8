"""Drafting ahead on another rank: the protocol, the text and the distribution. `test_ranks` has processes."""

from __future__ import annotations

import gc
import json
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import chi_square
import lossless
import mlx.core as mx
import pytest
import tiny
from exact_distribution import V
from lossless import emitted
from test_ahead import (
    AHEAD,
    GREEDY,
    NOTHING,
    PROMPT,
    SAME,
    SAMPLINGS,
    SOURCES,
    K,
    counted,
    hits,
    noisy,
    plain,
    read,
    small_source,
)

from mlx_spec.drafters.ahead import ahead_source
from mlx_spec.drafters.ahead_rank import DraftRank, RankDrafting
from mlx_spec.drafters.draft_model import DraftModel, draft_model_source
from mlx_spec.drafters.drawing import AheadRequest, DrafterSource, Outcome
from mlx_spec.model.target import LMTarget
from mlx_spec.types import Draft

GENERATIONS = 250


class Line:
    """One end of a connection within this process. Messages are JSON, as between processes."""

    def __init__(self, incoming: queue.Queue[str], outgoing: queue.Queue[str]) -> None:
        self._incoming, self._outgoing = incoming, outgoing
        self.sent = list[Any]()

    def receive(self) -> list[Any]:
        return cast(list[Any], json.loads(self._incoming.get()))

    def send(self, *message: Any) -> None:
        self.sent.append(message)
        self._outgoing.put(json.dumps(message))


class Patient(DraftRank):
    """Waits for the drafts, so that every one is there when the verdict comes."""

    def request(self, *message: Any) -> Any:
        found = super().request(*message)
        found.exception()
        return found


@contextmanager
def rank_of(
    source: DrafterSource, vocab: int, kind: type[DraftRank] = Patient
) -> Iterator[tuple[DraftRank, Line]]:
    """Give a rank that drafts in a thread, and rank 0's end of the line to it."""
    there, back = queue.Queue[str](), queue.Queue[str]()
    ours = Line(back, there)

    def work() -> None:
        with mx.stream(mx.new_stream(mx.cpu)):
            RankDrafting(Line(there, back), source, vocab).run()
        mx.clear_streams()

    thread = threading.Thread(target=work)
    thread.start()
    yield kind(ours), ours
    ours.send("end", 0)
    thread.join()


@pytest.mark.parametrize(
    ("name", "sampling"), [*(("draft model", sampling) for sampling in SAMPLINGS), ("pard", "filtered")]
)
def test_text_is_plain_decoding_s(name: str, sampling: str) -> None:
    prompt, target = tiny.prompt(25) * 2, LMTarget(tiny.full())
    with rank_of(SOURCES[name](), tiny.VOCAB) as (rank, line):
        drafter = ahead_source(SOURCES[name](), rank).make(target.parts)
        done = lossless.rounds(target, drafter, AHEAD, prompt, 50, sampling=SAMPLINGS[sampling])
    assert emitted(done) == plain(tiny.full(), SAMPLINGS[sampling], prompt)
    assert hits(done) > 0.05
    histories = [message[4] for message in line.sent if message[0] == "ahead"]
    assert histories[0] == prompt[: len(histories[0])] and max(map(len, histories[1:])) <= K + 1


def test_the_noise_of_a_seed_is_known_there() -> None:
    source, target = draft_model_source("same", tiny.full(), SAME), LMTarget(tiny.full())
    with rank_of(source, tiny.VOCAB) as (rank, _):
        drafter = ahead_source(source, rank, mean=1).make(target.parts)
        done = lossless.rounds(target, drafter, AHEAD, PROMPT, 50, sampling=SAMPLINGS["filtered"])
    assert hits(done) == 1.0
    assert sum(r.accepted for r in done) == sum(r.drafted for r in done)


def test_unseeded_samples_keep_the_distribution() -> None:
    """A right store is rejected once in a million; the keys are fixed, so a pass stays a pass."""
    with rank_of(small_source(), V) as (rank, _):
        counts, exact, rate = counted(ahead_source(small_source(), rank, mean=V), GENERATIONS)
    assert chi_square.excess(counts, exact) < 1
    assert rate > 0.9


class Slow(DraftModel):
    """Waits until nobody wants its drafts any more."""

    def draft_ahead(self, request: AheadRequest) -> dict[Outcome, Draft]:
        while not request.is_cancelled:
            threading.Event().wait(0.001)
        return {}


def test_late_drafts_are_a_miss_and_are_cancelled() -> None:
    source = draft_model_source("other", noisy(), SAME, Slow)
    with rank_of(source, tiny.VOCAB, DraftRank) as (rank, line):
        drafter = ahead_source(SOURCES["draft model"](), rank).make(LMTarget(tiny.full()).parts)
        history = list(PROMPT)
        for _ in range(3):
            draft = drafter.draft(history, K, GREEDY)
            assert not draft.ahead
            drafter.prepare(history, draft, GREEDY)
            history += [*read(draft.tokens), 3]
        drafter.observe([1, 2, 3], NOTHING)
    assert [message[:2] for message in line.sent] == [
        (word, number) for number in range(3) for word in ("ahead", "cancel")
    ] + [("end", 0)]


def test_ended_sequences_are_forgotten() -> None:
    with rank_of(SOURCES["draft model"](), tiny.VOCAB) as (rank, line):
        source, parts = ahead_source(SOURCES["draft model"](), rank), LMTarget(tiny.full()).parts
        for _ in range(2):
            drafter = source.make(parts)
            drafter.prepare(PROMPT, drafter.draft(PROMPT, K, GREEDY), GREEDY)
            del drafter
            gc.collect()
    assert [message[0] for message in line.sent] == ["ahead", "close", "ahead", "end"]
