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
import mlx.core as mx
import pytest
import tiny
from exact_distribution import V
from test_ahead import (
    NOTHING,
    PROMPT,
    SAME,
    SAMPLINGS,
    SOURCES,
    K,
    assert_one_guess_hits,
    assert_plain_text,
    counted,
    law_source,
    noisy,
    read,
)

from mlx_spec.drafters.ahead import ahead_source
from mlx_spec.drafters.ahead_rank import DraftRank, RankDrafting
from mlx_spec.drafters.draft_model import DraftModel, draft_model_source
from mlx_spec.drafters.drawing import AheadRequest, DrafterSource, Outcome
from mlx_spec.model.target import LMTarget
from mlx_spec.sampling import Sampling
from mlx_spec.types import Draft


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
    with rank_of(SOURCES[name](), tiny.VOCAB) as (rank, line):
        assert_plain_text(name, sampling, rank)
    first, *others = [message[4] for message in line.sent if message[0] == "ahead"]
    assert first == (tiny.prompt(25) * 2)[: len(first)] and max(map(len, others)) <= K + 1


def test_the_noise_of_a_seed_is_known_there() -> None:
    with rank_of(draft_model_source("same", tiny.full(), SAME), tiny.VOCAB) as (rank, _):
        assert_one_guess_hits("filtered", rank)


def test_unseeded_samples_keep_the_distribution() -> None:
    """A right store is rejected once in a million; the keys are fixed, so a pass stays a pass."""
    with rank_of(law_source(), V) as (rank, _):
        counts, exact, rate = counted(DraftModel, 250, rank)
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
        sampler = Sampling().sampler(len(PROMPT), tiny.VOCAB)
        history = list(PROMPT)
        for _ in range(3):
            draft = drafter.draft(history, K, sampler)
            assert not draft.ahead
            drafter.prepare(history, draft, sampler)
            history += [*read(draft.tokens), 3]
        drafter.observe([1, 2, 3], NOTHING)
    assert [message[:2] for message in line.sent] == [
        (word, number) for number in range(3) for word in ("ahead", "cancel")
    ] + [("end", 0)]


def test_ended_sequences_are_forgotten() -> None:
    with rank_of(SOURCES["draft model"](), tiny.VOCAB) as (rank, line):
        source, parts = ahead_source(SOURCES["draft model"](), rank), LMTarget(tiny.full()).parts
        sampler = Sampling().sampler(len(PROMPT), tiny.VOCAB)
        for _ in range(2):
            drafter = source.make(parts)
            drafter.prepare(PROMPT, drafter.draft(PROMPT, K, sampler), sampler)
            del drafter
            gc.collect()
    assert [message[0] for message in line.sent] == ["ahead", "close", "ahead", "end"]
