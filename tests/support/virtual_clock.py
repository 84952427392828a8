"""A device that exists only as a cost curve, scripted texts, and the engine's rounds on it.

All times are SIMULATED and no arrays are computed. The device is a queue: work starts after the work
submitted before it, and a read waits for the work that it reads. So a plain token that was queued ahead
hides the host's time, and a round with a draft does not. `decode` makes the rounds of
`mlx_spec.decode.round`; a test compares the two. The benchmark `policy.py` and the tests of
`mlx_spec/policy` use this file. A "step" is the time of one plain token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Protocol

import numpy as np

from mlx_spec.policy import Table
from mlx_spec.types import MAX_DRAFT_TOKENS, DraftChoice, DraftLengthPolicy, RequestDrafter, Round

MAX_MISSES = 2  # the engine's: rounds without the wanted draft, after which tokens are queued ahead again
PLAIN_SECONDS = 0.03  # of a plain token
LOOKAHEAD = 40  # tokens of text after the answer: a drafter may draft beyond its end
ROWS = range(1, MAX_DRAFT_TOKENS + 2)


@dataclass(frozen=True)
class Curve:
    """The costs of a device, in steps."""

    passes: dict[int, float]  # rows -> a pass on the device; straight lines between
    drafted: float = 0.06  # one draft token
    host: float = 0.02  # one wait of the host for an idle device
    source: str = ""

    def rows(self, rows: int) -> float:
        """Return the steps of a pass."""
        return float(np.interp(rows, list(self.passes), list(self.passes.values())))

    def table(self, drafters: Sequence[float] = (1.0,)) -> Table:
        """Return what a calibration would measure, for drafters of these relative costs."""
        verify = {rows: PLAIN_SECONDS * (self.rows(rows) + self.host) for rows in ROWS}
        draft = [{k: PLAIN_SECONDS * max(self.drafted * cost, 1e-5) * k for k in ROWS} for cost in drafters]
        return Table(PLAIN_SECONDS, verify, tuple(draft), PLAIN_SECONDS * self.host)


# Published costs. "mlx#" numbers are issues and pull requests of github.com/ml-explore/mlx.
CURVES = {
    "M1 Ultra": Curve(
        {1: 1.0, 17: 1 + 16 * 0.346},
        source="mlxcel docs/benchmarks.md: Gemma-4-12B rounds grow by 0.346 plain steps a row",
    ),
    "M3 Max": Curve(
        {1: 1.0, 2: 1.0, 4: 1.28, 6: 2.04, 8: 2.50, 9: 3.14, 10: 3.95, 17: 3.95},
        source="mlx#3863: 5120 -> 17408, 4 bits, cold",
    ),
    "M4 Pro": Curve(
        {1: 1.0, 2: 1.0, 3: 1.13, 4: 1.43, 5: 1.75, 8: 2.84, 10: 4.5, 17: 4.5},
        source="mlx#3852: 5120 -> 17408, 4 bits, groups of 128",
    ),
    "M5 Max": Curve(
        {1: 1.0, 3: 1.12, 5: 1.45, 8: 2.2, 12: 3.2, 16: 3.9, 17: 3.9}, source="mlx#3791: a 70B model, 4 bits"
    ),
    "CUDA linear": Curve(
        {1: 1.0, 17: 17.0}, source="mlxcel on GB10: passes of 1, 2, 4 rows take 69, 140, 270 ms"
    ),
    "flat": Curve({1: 1.0, 17: 1.0}, source="ideal: bound by reading the weights"),
}


class Device:
    """A queue of work and a clock, in seconds. `slowdown` is 1.5 if all work takes 1.5 times as long."""

    def __init__(self, curve: Curve, noise: float = 0.0, seed: Sequence[int] = (0,)) -> None:
        self.curve = curve
        self.passes = [0.0, *(curve.rows(rows) for rows in ROWS)]
        self.now = 0.0
        self.slowdown = 1.0
        self._free = 0.0  # when the queue is empty
        self._noise, self._random = noise, np.random.default_rng(list(seed))
        self._factors: list[float] = []  # of the next pieces of work

    def clock(self) -> float:
        """Return the time."""
        return self.now

    def submit(self, steps: float) -> float:
        """Queue work. Return when it will be done. The host is waited for if the device is idle."""
        if self._free <= self.now:
            self.now += self.curve.host * PLAIN_SECONDS
            self._free = self.now
        self._free += steps * PLAIN_SECONDS * self.slowdown * self._factor()
        return self._free

    def read(self, done: float) -> None:
        """Wait for work."""
        self.now = max(self.now, done)

    def _factor(self) -> float:
        if not self._noise:
            return 1.0
        if not self._factors:
            draws = self._random.normal(0, self._noise, 4096)
            self._factors = np.exp(draws - self._noise**2 / 2).tolist()
        return self._factors.pop()


class VirtualDrafter(Protocol):
    """A drafter of one answer."""

    def draft(self, place: int, limit: int, device: Device) -> Sequence[bool]:
        """Return for each drafted token whether it is right. `place` is the length of the history."""
        ...


@dataclass
class ModelDrafter:
    """A drafter with one pass per token, right with probability `rates[place]`, less at later positions."""

    draws: list[float]  # uniform random numbers by place: right if below the rate
    rates: list[float]
    decline: float = 1.0  # factor of the rate for every further position of a draft

    def draft(self, place: int, limit: int, device: Device) -> Sequence[bool]:
        """Return whether each token is right, and take the device's time for it."""
        end = min(place + limit, len(self.rates))
        if place >= end:
            return ()
        device.submit(device.curve.drafted * (end - place))
        if self.decline == 1.0:
            return [self.draws[i] < self.rates[i] for i in range(place, end)]
        return [self.draws[i] < self.rates[i] * self.decline ** (i - place) for i in range(place, end)]


@dataclass
class LookupDrafter:
    """A drafter that copies `lengths[place]` tokens for nothing, right or not."""

    lengths: list[int]
    right: list[bool]

    def draft(self, place: int, limit: int, device: Device) -> Sequence[bool]:
        """Return whether each token is right. It takes no time."""
        return self.right[place : place + min(limit, self.lengths[place])]


@dataclass
class Answer:
    """The rounds of one answer and its time."""

    seconds: float = 0.0
    rounds: list[Round] = field(default_factory=list)


def decode(
    policy: DraftLengthPolicy,
    device: Device,
    drafters: Sequence[VirtualDrafter],
    tokens: int,
    request_drafters: Sequence[RequestDrafter] = (),
) -> Answer:
    """Decode one answer in the rounds of `mlx_spec.decode.round`. The history starts with one token."""
    place, remaining, misses = 1, tokens, 0
    queued: float | None = None  # when the queued token is done
    answer, start = Answer(), device.now
    policy.begin(request_drafters)
    while remaining > 0:
        decision = policy.decide(range(place))
        began, most = device.now, remaining - 1
        wanted = [c if c.limit <= most else replace(c, limit=most) for c in decision.choices if most]
        found, queue_next = None, not wanted
        if wanted and (queued is None or misses >= MAX_MISSES):
            found = _first_draft(wanted, drafters, place, device)
            misses = 0 if found else misses + 1
            queue_next = misses >= MAX_MISSES
        if found and queued is None:
            choice, right = found
            done = device.submit(device.passes[len(right) + 1])
            policy.settle()
            device.read(done)
            accepted = next((i for i, good in enumerate(right) if not good), len(right))
            round = Round(
                [0] * (accepted + 1),
                len(right),
                accepted,
                "draft",
                choice.source,
                drafter_index=choice.drafter_index,
            )
        else:
            done = device.submit(device.passes[1]) if queued is None else queued
            queued = device.submit(device.passes[1]) if queue_next and remaining > 1 else None
            policy.settle()
            device.read(done)
            round = Round([0], 0, 0, "plain" if queued is not None else "drained")
        place += len(round.tokens)
        remaining -= len(round.tokens)
        round = replace(
            round,
            seconds=device.now - began,
            reason=decision.reason,
            finish_reason=None if remaining else "length",
            plain_seconds=decision.plain_seconds,
            cost=decision.cost_of(round),
        )
        policy.observe(round)
        answer.rounds.append(round)
    answer.seconds = device.now - start
    return answer


def _first_draft(
    wanted: Sequence[DraftChoice], drafters: Sequence[VirtualDrafter], place: int, device: Device
) -> tuple[DraftChoice, Sequence[bool]] | None:
    for choice in wanted:
        right = drafters[choice.drafter_index].draft(place, choice.limit, device)
        if right:
            return choice, right
    return None


# Texts: by name, the drafters of one answer. The order of random draws is that of the recorded figures.

WORKLOADS = {"code": (0.7, 0.2, 0.1), "mixed": (0.4, 0.35, 0.25), "prose": (0.1, 0.35, 0.55)}
STRETCHES = ((18.0, 1.6), (6.0, 3.0), (2.0, 4.0))  # Beta distributions of the rate: easy, middling, hard text
STRETCH_END = 0.02  # probability that a stretch ends at a token
TEXTS = (
    "code mixed prose switch kinds ind60 ind80 ind90 decline useless lookup+mtp lookup"  # see `make_text`
).split()


def make_text(kind: str, tokens: int, seed: Sequence[int]) -> list[VirtualDrafter]:
    """Return the drafters of one answer.

    code, mixed, prose: stretches of three difficulties. decline: code with a drafter that gets worse within
    its draft. switch: 0.93 or 0.08, changing every 60 tokens. kinds: the whole answer is known or not. indNN:
    independent tokens. useless: 0.02. lookup: stretches that can be copied, for nothing, beside the drafter.
    """
    return list(_text(kind, tokens + LOOKAHEAD, (*seed, *map(ord, kind))))


@lru_cache(maxsize=256)
def _text(kind: str, length: int, seed: tuple[int, ...]) -> Sequence[VirtualDrafter]:
    random = np.random.default_rng(seed)
    if kind == "lookup":
        return [_copied(random, length, 0.15)]
    rates, decline = _rates(kind, length, random)
    random.normal(size=length)  # the recorded policy read confidences, which were drawn here
    model = ModelDrafter(random.random(length).tolist(), rates.tolist(), decline)
    return [_copied(random, length, 0.08), model] if kind == "lookup+mtp" else [model]


def _rates(kind: str, length: int, random: np.random.Generator) -> tuple[np.ndarray, float]:
    """Return the acceptance rate of every place, and the decline within a draft."""
    if kind in WORKLOADS:
        return _stretches(random, kind, length), 1.0
    match kind:
        case "decline":
            return np.clip(_stretches(random, "code", length) * 1.03, 0, 0.99), 0.93
        case "switch":
            rates, high = np.empty(length), random.random() < 0.5
            for i in range(length):
                high ^= bool(random.random() < 1 / 60)
                rates[i] = 0.93 if high else 0.08
            return rates, 1.0
        case "kinds":
            return np.full(length, 0.93 if random.random() < 0.5 else 0.05), 1.0
        case "useless":
            return np.full(length, 0.02), 1.0
        case "lookup+mtp":
            return _stretches(random, "mixed", length), 1.0
    return np.full(length, int(kind.removeprefix("ind")) / 100), 1.0


def _stretches(random: np.random.Generator, workload: str, length: int) -> np.ndarray:
    rates, stretch = [], None
    for _ in range(length):
        if stretch is None or random.random() < STRETCH_END:
            stretch = int(random.choice(3, p=WORKLOADS[workload]))
        rates.append(random.beta(*STRETCHES[stretch]))
    return np.array(rates)


def _copied(random: np.random.Generator, length: int, share: float, mean: float = 16.0) -> LookupDrafter:
    """Return stretches that repeat earlier text, and short matches elsewhere that are mostly wrong."""
    inside, place = np.zeros(length, bool), 0
    while place < length:
        gap = int(random.geometric(share / (mean * (1 - share))))
        run = 4 + int(random.geometric(1 / (mean - 4)))
        inside[place + gap : place + gap + run] = True
        place += gap + run
    lengths, right, end = [0] * (length + 1), [False] * (length + 1), length
    for i in reversed(range(length)):
        end = end if inside[i] else i
        lengths[i] = end - i if inside[i] else 0
        right[i] = bool(random.random() < (0.97 if inside[i] else 0.3))
        if not inside[i] and random.random() < 0.1:
            lengths[i] = int(random.integers(1, 3))
    return LookupDrafter(lengths, right)
