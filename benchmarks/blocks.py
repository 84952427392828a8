"""Blocks of runs: every arm once on one prompt, one after the other; and what follows from many of them."""

from __future__ import annotations

import argparse
import hashlib
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from arms import Decoder, Prompt
from timing import interval, latin_square

BASE = "mlx-lm"
PLAIN, AGAIN = "plain", "plain, again"
DRAWS = 2000


@dataclass(frozen=True)
class Run:
    tokens: list[int]
    drafted: list[int]  # draft tokens verified, by step
    decode: float  # tokens a second from the end of the prompt
    whole: float  # tokens a second from the start

    @property
    def hash(self) -> str:
        return hashlib.sha256(str(self.tokens).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Block:
    """All arms once on one prompt."""

    first: Run
    last: Run
    runs: dict[str, Run]

    @property
    def null(self) -> float:
        return self.last.decode / self.first.decode

    def ratio(self, arm: str, base: str, measure: str) -> float:
        """To another arm: of mlx-lm and of our plain arm to the mean of their two runs."""
        runs = [self.first, self.last]
        if base != BASE:
            names = [name for name in ((PLAIN, AGAIN) if base == PLAIN else (base,)) if name != arm]
            runs = [self.runs[name] for name in names if name in self.runs] or [self.runs[arm]]
        return float(getattr(self.runs[arm], measure) / statistics.mean(getattr(r, measure) for r in runs))


def measure(
    decoders: dict[str, Decoder], names: list[str], prompts: list[Prompt], settings: argparse.Namespace
) -> list[list[Block]]:
    """Blocks by prompt, the first of each already dropped."""
    square = latin_square(names)
    random.Random(settings.seed).shuffle(square)
    done: list[list[Block]] = [[] for _ in prompts]
    for repeat in range(settings.repeats):
        for i, prompt in enumerate(prompts):
            order = square[(repeat * len(prompts) + i) % len(square)]
            arms = [decoders[n] for n in (BASE, *order, BASE)]
            first, *runs, last = in_turns(arms, prompt, settings.burst, repeat)
            if repeat > 0:
                done[i].append(Block(first, last, dict(zip(order, runs, strict=True))))
        print(f"repeat {repeat + 1} of {settings.repeats}", file=sys.stderr, flush=True)
    return done


def in_turns(decoders: Sequence[Decoder], prompt: Prompt, burst: int, start: int) -> list[Run]:
    """One run of each, in bursts of tokens that take turns: slow changes of the machine meet all alike."""
    going = [Going(decoder, prompt) for decoder in decoders]
    for turn in range(len(going) * prompt.count):
        for i in range(len(going)):
            going[(i + start + turn) % len(going)].go(burst)
        if all(each.done for each in going):
            break
    return [each.run() for each in going]


class Going:
    """A run under way. Waiting for what it has queued counts, but for what is queued behind its end.

    A decoder that does not say when it has read the prompt is timed from its first step on, and that step's
    tokens are left out. It is flattered a little where it has begun the next one by then.
    """

    def __init__(self, decoder: Decoder, prompt: Prompt) -> None:
        self._steps, self._count = decoder(prompt, self._read), prompt.count
        self._tokens: list[int] = []
        self._drafted: list[int] = []
        self._started = 0.0  # on the clock: this turn
        self._seconds = 0.0  # of the turns before
        self._prefill: float | None = None  # seconds until the prompt was read; None: that was not said
        self._first = 0  # tokens that came before decoding was timed

    @property
    def done(self) -> bool:
        return len(self._tokens) >= self._count

    def go(self, burst: int) -> None:
        """At least so many tokens more; the first step, with the prompt, is a turn of its own."""
        if self.done:
            return
        goal = min(len(self._tokens) + burst, self._count) if self._tokens else 1
        self._started = time.perf_counter()
        while len(self._tokens) < goal:
            new, count = next(self._steps)
            self._tokens += new
            self._drafted.append(count)
        end = time.perf_counter()
        mx.synchronize()  # a pipelined decoder has queued one step more
        self._seconds += (end if self.done else time.perf_counter()) - self._started
        if self._prefill is None:
            self._first, self._prefill = len(self._tokens), self._seconds

    def run(self) -> Run:
        self._steps = iter(())  # it holds this run: it would be closed later, during another on its caches
        seconds = self._seconds - (self._prefill or 0.0)
        decode = (len(self._tokens) - self._first) / max(seconds, 1e-9)
        return Run(self._tokens, self._drafted, decode, len(self._tokens) / self._seconds)

    def _read(self) -> None:
        self._prefill = self._seconds + time.perf_counter() - self._started


def summary(
    blocks: list[list[Block]], prompts: list[Prompt], names: list[str], settings: argparse.Namespace
) -> dict[str, Any]:
    """Everything the record holds of the blocks."""
    used, kept = within(blocks, prompts, settings.spread)
    kinds = list(dict.fromkeys(prompt.kind for prompt in prompts))
    nulls = sorted(b.null for by_prompt in blocks for b in by_prompt)
    base = [r.decode for by_prompt in used for b in by_prompt for r in (b.first, b.last)]
    return {
        "arms": {name: summary_of(name, used, blocks, settings.seed) for name in names},
        "kinds": {kind: of_kind(kind, names, used, blocks, prompts, settings.seed) for kind in kinds},
        "mlx-lm tokens/s": round(statistics.median(base), 1),
        "null": interval([[b.null for b in by_prompt] for by_prompt in blocks], settings.seed),
        "null, quartiles": [round(nulls[len(nulls) * i // 4], 3) for i in (1, 3)],
        "blocks": sum(map(len, blocks)),
        "blocks within the spread": kept,
        "noisy blocks used": used is blocks,
        "prompts": [
            {"kind": p.kind, "prompt tokens": len(p.tokens), "new tokens": p.count, "hash": b[0].first.hash}
            for p, b in zip(prompts, blocks, strict=True)
        ],
    }


def within(blocks: list[list[Block]], prompts: list[Prompt], spread: float) -> tuple[list[list[Block]], int]:
    """The blocks whose null is within the spread, and how many; all, if those leave a kind without any."""
    quiet = [[b for b in by_prompt if abs(b.null - 1) <= spread] for by_prompt in blocks]
    kinds = {prompt.kind for prompt in prompts}
    left = {prompt.kind for prompt, found in zip(prompts, quiet, strict=True) if found}
    return (quiet if left == kinds else blocks), sum(map(len, quiet))


def of_kind(
    kind: str,
    names: list[str],
    used: list[list[Block]],
    every: list[list[Block]],
    prompts: list[Prompt],
    seed: int,
) -> dict[str, Any]:
    """All arms on the prompts of one kind."""
    at = [i for i, prompt in enumerate(prompts) if prompt.kind == kind]
    return {name: summary_of(name, [used[i] for i in at], [every[i] for i in at], seed) for name in names}


def summary_of(name: str, blocks: list[list[Block]], every: list[list[Block]], seed: int) -> dict[str, Any]:
    """Medians of ratios with intervals, what the steps of an arm were like, and where its tokens differ."""

    def against(base: str, measure: str) -> list[float]:
        found = [[b.ratio(name, base, measure) for b in by_prompt] for by_prompt in blocks if by_prompt]
        return interval(found, seed, DRAWS)

    runs = [b.runs[name] for by_prompt in blocks for b in by_prompt]
    plain = any(PLAIN in b.runs for by_prompt in blocks for b in by_prompt)
    return {
        "decode": against(BASE, "decode"),
        "whole": against(BASE, "whole"),
        "to plain": against(PLAIN, "decode") if plain else None,
        "tokens/s": round(statistics.median(r.decode for r in runs), 1),
        **shape(runs),
        **differences(name, every),
    }


def shape(runs: Sequence[Run]) -> dict[str, Any]:
    """Tokens and draft tokens a step, and the share of steps without a draft."""
    drafted = [k for r in runs for k in r.drafted]
    return {
        "tokens a step": round(sum(len(r.tokens) for r in runs) / len(drafted), 2),
        "drafted a step": round(statistics.mean(drafted), 2),
        "steps without a draft": round(drafted.count(0) / len(drafted), 3),
    }


def differences(name: str, blocks: list[list[Block]]) -> dict[str, Any]:
    """How many prompts gave other tokens than mlx-lm, which, and where the first of them did."""
    places: dict[int, int] = defaultdict(int)
    hashes: dict[str, str] = {}
    for i, by_prompt in enumerate(blocks):
        for block in by_prompt:
            a, b = block.first.tokens, block.runs[name].tokens
            if a != b:
                pairs = enumerate(zip(a, b, strict=False))
                places[i] = next((j for j, (x, y) in pairs if x != y), min(len(a), len(b)))
                hashes[str(i)] = block.runs[name].hash
    return {"differ": len(places), "first at": min(places.values(), default=None), "other hashes": hashes}
