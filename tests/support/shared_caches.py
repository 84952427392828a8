"""Random conversations that share beginnings, served together through a prefix cache as the server does."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from mlx_spec.apps.server.engine.prefix_cache import PrefixCache
from mlx_spec.apps.server.engine.prefix_files import PrefixFiles
from mlx_spec.decode.loop import decode
from mlx_spec.decode.running import RunningSequence
from mlx_spec.decode.scheduler import Batch, Entry
from mlx_spec.decode.sequence import CachedSequence
from mlx_spec.pair import Pair
from mlx_spec.prompt import Prompt
from mlx_spec.types import Round


@dataclass
class Talk:
    """A prompt that was answered."""

    prompt: Prompt
    said: list[int]


@dataclass(eq=False)
class Served:
    """A request on its way through the batch."""

    prompt: Prompt
    most: int  # tokens of the answer
    cut: int | None  # it is cancelled after this many, or ends there at a stop string
    caches: CachedSequence | None = None
    reused: int = 0
    said: list[int] = field(default_factory=list)


class Talks:
    """Makes prompts: new ones, ones that go on, next questions without thinking, edits and retries."""

    def __init__(self, draw: random.Random, tokens: Sequence[int], longest: int, first: Prompt) -> None:
        self._draw, self._tokens, self._longest = draw, tokens, longest
        self._first = first  # all begin with it
        self.held: list[Talk] = []

    def text(self, low: int, high: int) -> list[int]:
        """Return tokens that repeat, so that lookup has something to draft."""
        count = self._draw.randrange(low, high)
        base = self._draw.choices(self._tokens, k=max(3, count // 5))
        return [
            self._draw.choice(base) if self._draw.random() < 0.3 else base[i % len(base)]
            for i in range(count)
        ]

    def prompt(self) -> Prompt:
        """Return the next prompt."""
        recent = self.held[-5:]
        short = [talk for talk in recent if len(talk.prompt) + len(talk.said) < 0.8 * self._longest]
        kind = self._draw.choices(range(5), (3, 5, 3, 2, 2))[0]
        if not short or kind == 0:
            return self._then(self._first, len(self._first), self._long())
        talk = self._draw.choice(short)
        held = talk.prompt
        if kind == 1:  # goes on
            return self._then(held, len(held), talk.said + self.text(3, 30))
        if kind == 2 and held.turns:  # thinking is left out: from the end of a turn on, all is new
            return self._then(held, self._draw.choice(held.turns), self._long())
        if kind == 3:  # an earlier message was edited
            return self._then(held, self._draw.randrange(1, len(held)), self._long())
        return held

    def _long(self) -> list[int]:
        return self.text(5, max(6, min(self._longest // 3, 400)))

    def _then(self, held: Prompt, size: int, more: list[int]) -> Prompt:
        """Return a prompt with the first tokens of another one, and more."""
        size = held.whole(max(size, 1))
        tokens = (*held.tokens[:size], *more)[: self._longest]
        ends = {size, len(tokens) - self._draw.randrange(1, 6)}
        turns = sorted(t for t in {*held.turns, *ends} if 0 < t <= len(tokens))
        spans = tuple(span for span in held.spans if span.end <= size)
        return Prompt(tokens, spans, tuple(t for t in turns if held.whole(t) == t or t > size))


def hooked(entry: Entry, **hooks: object) -> Entry:
    """Give an entry other hooks or options, each in the place of one that it has."""
    for name, hook in hooks.items():
        assert hasattr(entry, name)
        setattr(entry, name, hook)
    return entry


def serve(batch: Batch, cache: PrefixCache, pair: Pair, requests: Sequence[Served]) -> None:
    """Answer requests together. Each begins with what the prefix cache has, and waits where it should."""
    by_id = dict[int, Served]()

    def begin(request: Served) -> RunningSequence:
        request.caches = cache.take(request.prompt)
        running = pair.prepare(request.caches, request.prompt, max_tokens=request.most)
        request.reused = request.caches.rewind_to_prefix(request.prompt)
        return running

    def end(id: int) -> None:
        request = by_id.pop(id)
        assert request.caches is not None
        batch.remove(id)
        request.caches.truncate(len(request.prompt) + len(request.said))
        cache.give_back(request.caches)

    for request in requests:
        hooks = {"begin": partial(begin, request), "waits": partial(cache.waits, request.prompt, 16)}
        entry = hooked(Entry(park=True), **hooks)
        by_id[batch.enter(entry)] = request
    while by_id:
        for id, result in batch.step():
            assert isinstance(result, Round), result
            request = by_id[id]
            request.caches.append(result.tokens)  # type: ignore[union-attr]
            request.said += result.tokens
            if request.cut is not None and len(request.said) >= request.cut:
                request.said = request.said[: request.cut]
                end(id)
            elif result.finish_reason is not None:
                end(id)


@dataclass
class Found:
    """Counts of a random session."""

    texts: int = 0
    differ: int = 0
    tokens: int = 0  # of prompts
    reused: int = 0
    forks: int = 0
    evicted: int = 0


def random_session(
    pair: Pair,
    talks: Talks,
    draw: random.Random,
    steps: int,
    *,
    together: int = 3,
    max_bytes: int = 10**9,
    answer: int = 10,
    files: PrefixFiles | None = None,
) -> Found:
    """Serve random requests, and compare each text with one of fresh caches."""
    cache = PrefixCache(pair.open, draw.choice((2, 3, 8)), lambda: max_bytes, files, min_fork=8)
    batch, found = pair.batch(together), Found()
    for _ in range(steps):
        requests = []
        for _ in range(draw.randrange(1, together + 1)):
            cut = draw.randrange(1, answer) if draw.random() < 0.2 else None
            requests.append(Served(talks.prompt(), answer, cut))
        serve(batch, cache, pair, requests)
        for request in requests:
            fresh = decode(pair.prepare(pair.open(), request.prompt, max_tokens=answer))
            expected = [token for round in fresh for token in round.tokens]
            found.texts += 1
            found.differ += request.said != expected[: len(request.said)]
            found.tokens += len(request.prompt)
            found.reused += request.reused
            talks.held.append(Talk(request.prompt, request.said))
    found.forks, found.evicted = cache.counters.forks, cache.counters.evicted
    return found
