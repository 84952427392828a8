"""A live sequence of a target, and the passes of a round on it. None of them leaves a trace in its caches."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import cast

import mlx.core as mx
from arms import PROMPTS, Folders
from shapes import SHAPES

from mlx_spec import load
from mlx_spec.engine import PREFILL_STEP, generate
from mlx_spec.hub.weights import WeightFormat, decode_sizes
from mlx_spec.model.target import LMTarget
from mlx_spec.policy import FixedPolicy
from mlx_spec.sampling import Sampling
from mlx_spec.types import Draft, Drafter, Round, Sampler

RUN = 8  # plain tokens, one in flight behind the other
Parts = tuple[LMTarget, tuple[Drafter, ...]]


@dataclass(frozen=True)
class Subject:
    """What is measured."""

    name: str
    format: WeightFormat
    read: float  # bytes of weights that one token reads
    vocab: int
    text: list[int]  # to fill contexts with, again and again
    parts: Callable[[], Parts]
    longest: int | None  # context

    def prompt(self, context: int) -> list[int]:
        return (self.text * (context // len(self.text) + 1))[:context]

    def open(self, context: int) -> Live:
        """A sequence of `context` tokens behind which a drafter can draft."""
        target, drafters = self.parts()
        history = self.prompt(context - 2)
        for low in range(0, len(history) - 1, PREFILL_STEP):
            high = min(low + PREFILL_STEP, len(history) - 1)
            features = target.prefill(history[low:high])
            for drafter in drafters:
                drafter.observe(history[: high + 1], features)
        live = Live(target, drafters, history, Sampling().sampler(context, self.vocab))
        for _ in range(2):  # some drafters wait for the activations of a generated token
            live.grow()
        return live

    def rounds(self, context: int, K: int) -> Iterator[Round]:
        """Rounds of the engine, with K draft tokens each."""
        target, drafters = self.parts()
        sampler = Sampling().sampler(context, self.vocab)
        return generate(target, drafters, FixedPolicy(K), sampler, self.prompt(context), max_tokens=2**20)


@dataclass
class Live:
    """All rows but the last are committed, and none is on trial."""

    target: LMTarget
    drafters: tuple[Drafter, ...]
    history: list[int]
    sampler: Sampler

    def grow(self) -> None:
        token, _ = self.sampler.draw(self.target.verify(self.rows(1)), self.history, self.rows(0))
        self.history += cast(list[int], token.tolist())
        features = self.target.commit(1)
        for drafter in self.drafters:
            drafter.observe(self.history, features)

    def rows(self, count: int) -> mx.array:
        """The pending token, and tokens of the text behind it."""
        return mx.array([self.history[-1], *self.history[:count]][:count], dtype=mx.int32)

    @property
    def drafts(self) -> bool:
        """Whether there is a drafter and it has a draft."""
        return bool(self.drafters) and self.drafters[0].draft(self.history, 1, self.sampler).tokens.size > 0

    def plain(self) -> float:
        """Seconds of a token, the next one always on its way."""
        start = time.perf_counter()
        token, before = self.rows(1), None
        for _ in range(RUN):
            token, _ = self.sampler.draw(self.target.verify(token), self.history, self.rows(0))
            mx.async_eval(token)
            if before is not None:
                before.tolist()
            before = token
        token.tolist()
        self.target.commit(0)
        return (time.perf_counter() - start) / RUN

    def host(self) -> float:
        """Seconds to compute next to nothing and read it."""
        start = time.perf_counter()
        (self.rows(1) + 1).tolist()
        return time.perf_counter() - start

    def verify(self, rows: int) -> tuple[float, float]:
        """Seconds of a pass that judges a draft, and those of building its graph."""
        start = time.perf_counter()
        tokens = self.rows(rows)
        verdict = self.sampler.verify(self.target.verify(tokens), self.history, Draft(tokens[1:]))
        built = time.perf_counter()
        verdict.tolist()
        self.target.commit(0)
        return time.perf_counter() - start, built - start

    def draft(self, K: int) -> float:
        """Seconds until K draft tokens are there."""
        start = time.perf_counter()
        mx.eval(self.drafters[0].draft(self.history, K, self.sampler).tokens)
        return time.perf_counter() - start


def of_checkpoint(name: str, folders: Folders, kv_bits: int | None) -> Subject:
    """A pair on disk."""
    pair = load(folders.target, folders.drafter or "none", num_draft_tokens=1, kv_bits=kv_bits)
    model = decode_sizes(folders.target, 1)

    def parts() -> Parts:
        opened = pair.open()
        return opened.target, opened.drafters

    return Subject(
        name,
        model.format,
        model.read,
        pair.info.vocab_size,
        pair.text.encode((PROMPTS / "chat.txt").read_text()),
        parts,
        pair.info.context_length,
    )


def of_shape(name: str) -> Subject:
    """Random weights."""
    made = SHAPES[name]()

    def parts() -> Parts:
        target = LMTarget(made.model, made.needs)
        return target, (made.make_drafter(target.parts),) if made.make_drafter else ()

    text = cast(list[int], mx.random.randint(0, made.vocab, (1024,), key=mx.random.key(0)).tolist())
    return Subject(f"{name}, random weights", made.format, made.read, made.vocab, text, parts, None)
