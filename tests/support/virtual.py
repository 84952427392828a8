"""A virtual clock: the real policy and the real round loop on a device that exists only as a cost curve.

Everything timed with it is SIMULATED. A text is a line of difficulties; a drafter is right about a token with
the probability of its place and says how sure it is, with an error. The device is a queue: work waits for
what was submitted before, a read waits for the work it reads. So a plain token that was queued ahead hides
the host's time, and a speculative round does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_spec.engine import generate
from mlx_spec.sampling import Sampling
from mlx_spec.tuning.costs import Costs, Table
from mlx_spec.types import (
    MAX_DRAFT_TOKENS,
    Decision,
    Draft,
    Drafter,
    DraftLengthPolicy,
    Features,
    FeatureSpec,
    Round,
    Sampler,
    no_draft,
)

Floats = NDArray[np.float64]
ROWS = range(1, MAX_DRAFT_TOKENS + 2)


@dataclass(frozen=True)
class Curve:
    """The costs of a device, in plain steps."""

    passes: dict[int, float]  # rows -> a pass on the device; straight lines between
    drafted: float = 0.06  # one draft token
    host: float = 0.02  # of a round that was not begun ahead, and of one more read
    source: str = ""

    def rows(self, rows: int) -> float:
        """A pass of so many rows."""
        return float(np.interp(rows, list(self.passes), list(self.passes.values())))

    def table(self, plain: float) -> Table:
        """What a calibration would measure."""
        verify = {rows: plain * (self.rows(rows) + self.host) for rows in ROWS}
        draft = {k: plain * max(self.drafted, 1e-4) * k for k in ROWS[:-1]}
        return Table(plain, verify, (draft,), plain * self.host)

    def costs(self, plain: float) -> Costs:
        """Measured costs of one drafter."""
        return Costs(("drafter",), {512: self.table(plain)})


# Plain steps by rows, as published. "mlx#" numbers are issues and pull requests of github.com/ml-explore/mlx.
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
        {1: 1.0, 3: 1.12, 5: 1.45, 8: 2.2, 12: 3.2, 16: 3.9, 17: 3.9},
        source="mlx#3791: a 70B model, 4 bits",
    ),
    "CUDA linear": Curve(
        {1: 1.0, 17: 17.0},
        source="mlxcel on GB10: passes of 1, 2, 4 rows take 69, 140, 270 ms",
    ),
    "flat": Curve({1: 1.0, 17: 1.0}, source="ideal: bound by reading the weights"),
}

# Of answers in their dozens: a small model on two cores, where a row is dear and a draft token, too.
TWO_CORES = Curve(
    {1: 1.0, 2: 1.36, 3: 1.67, 4: 1.93, 5: 2.15, 6: 2.6, 8: 3.05, 17: 6.2},
    drafted=0.28,
    host=0.05,
    source="measured: the demo pair on two cores of a server",
)
RIGHT, WRONG = 0.93, 0.05  # chance that a token is right, in answers that the drafter knows and does not
SHORT, LONG = 40, 150  # tokens of an answer

# Chance of an easy, a middling and a hard stretch of text, and the spread of acceptance within one.
WORKLOADS = {"code": (0.7, 0.2, 0.1), "mixed": (0.4, 0.35, 0.25), "prose": (0.1, 0.35, 0.55)}
STRETCHES = ((18.0, 1.6), (6.0, 3.0), (2.0, 4.0))  # Beta laws


@dataclass(frozen=True)
class Text:
    """By place: whether the drafter is right there, and how sure it says it is."""

    right: NDArray[np.bool_]
    sure: Floats

    @staticmethod
    def make(workload: str, length: int, seed: int, *, noise: float = 0.12, switch: float = 0.02) -> Text:
        """Stretches of difficulty that change with chance `switch` a token."""
        chance = np.random.default_rng([seed, *map(ord, workload)])
        stretch = 0
        odds: list[float] = []
        for _ in range(length):
            if not odds or chance.random() < switch:
                stretch = int(chance.choice(3, p=WORKLOADS[workload]))
            odds.append(chance.beta(*STRETCHES[stretch]))
        return Text.of(np.array(odds), chance, noise)

    @staticmethod
    def of(odds: Floats, chance: np.random.Generator, noise: float = 0.12) -> Text:
        """A text with these chances of acceptance, of which confidence is a noisy image, or none (inf)."""
        sure = chance.random(len(odds)) if np.isinf(noise) else odds + chance.normal(0, noise, len(odds))
        return Text(chance.random(len(odds)) < odds, np.clip(sure, 0.0, 0.999))


@dataclass
class Device:
    """A queue of work and a clock; seconds."""

    curve: Curve
    plain: float = 0.03
    now: float = 0.0
    free: float = 0.0  # when the queue is empty
    noise: Callable[[], float] = lambda: 1.0
    in_order: bool = False  # a read waits for all that was submitted, as on MLX's CPU backend

    def clock(self) -> float:
        """The time."""
        return self.now

    def submit(self, steps: float) -> float:
        """Queue work; when it will be done. On an idle device the host is waited for."""
        if self.free <= self.now:
            self.now += self.curve.host * self.plain
            self.free = self.now
        self.free += steps * self.plain * self.noise()
        return self.free

    def read(self, done: float) -> None:
        """Wait for work."""
        self.now = max(self.now, self.free if self.in_order else done)


VOCABULARY = 4
TRUTH = mx.eye(VOCABULARY)[0]


class VirtualTarget:
    """Says token 0 at every place, and takes the device's time for it."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.size = 0
        self.trial: list[float] = []  # when each row on trial is done
        self.committed = 0.0  # when the last committed row was done

    @property
    def on_trial(self) -> int:
        """Rows not yet committed."""
        return len(self.trial)

    def prefill(self, tokens: list[int]) -> Features:
        """No time: it is not what is tested."""
        self.size += len(tokens)
        return Features()

    def verify(self, tokens: mx.array) -> mx.array:
        """Logits [T, V]."""
        rows = tokens.shape[0]
        self.trial += [self._device.submit(self._device.curve.rows(rows))] * rows
        return mx.broadcast_to(TRUTH, (rows, VOCABULARY))

    def commit(self, keep: int) -> Features:
        """What is committed is what will have been read at the end of the round."""
        if keep:
            self.committed = self.trial[keep - 1]
        self.size += keep
        self.trial = []
        return Features()


class VirtualDrafter:
    """Drafts token 0 where the text says it is right, token 1 elsewhere."""

    needs = FeatureSpec()

    def __init__(self, device: Device, text: Text, *, tells: bool = True) -> None:
        self._device, self._text, self._tells = device, text, tells
        self._tokens = mx.array(np.where(text.right, 0, 1).astype(np.int32))
        self._sure = mx.array(text.sure.astype(np.float32))
        mx.eval(self._tokens, self._sure)

    def observe(self, history: Sequence[int], features: Features) -> None:
        """Nothing to keep."""

    def draft(self, history: Sequence[int], limit: int, sampler: Sampler) -> Draft:
        """As many tokens as asked for."""
        start = len(history)
        if start >= len(self._text.right):
            return no_draft()
        tokens = self._tokens[start : start + limit]
        self._device.submit(self._device.curve.drafted * tokens.shape[0])
        return Draft(tokens, confidence=self._sure[start : start + limit] if self._tells else None)


class VirtualLookup:
    """Copies, for nothing, where the text repeats itself; elsewhere it has no draft."""

    needs = FeatureSpec()

    def __init__(self, repeats: NDArray[np.bool_], wrong: NDArray[np.bool_]) -> None:
        self._repeats, self._wrong = repeats, wrong

    def observe(self, history: Sequence[int], features: Features) -> None:
        """Nothing to keep."""

    def draft(self, history: Sequence[int], limit: int, sampler: Sampler) -> Draft:
        """Up to the end of the repetition."""
        places = slice(len(history), len(history) + limit)
        ends = np.flatnonzero(~self._repeats[places])
        length = int(ends[0]) if len(ends) else len(self._repeats[places])
        tokens = self._wrong[places][:length].astype(np.int32)
        return Draft(mx.array(tokens)) if length else no_draft()


class Clocked:
    """A policy, with the waiting done before it looks at the clock."""

    def __init__(self, policy: DraftLengthPolicy, device: Device, target: VirtualTarget) -> None:
        self._policy, self._device, self._target = policy, device, target

    def begin(self) -> None:
        self._policy.begin()

    def decide(self, history: Sequence[int]) -> Decision:
        """The policy's."""
        return self._policy.decide(history)

    def cut(self, drafter: int, confidence: Sequence[float]) -> int:
        """The policy's, after the draft was read."""
        self._device.read(self._device.free)
        return self._policy.cut(drafter, confidence)

    def observe(self, round: Round) -> None:
        """Time of the end of a round: what was committed has been read."""
        self._device.read(self._target.committed)
        self._policy.observe(round)


@dataclass
class Outcome:
    """How a run went."""

    seconds: float
    plain: float  # of one plain token
    rounds: list[Round] = field(default_factory=list)
    worst: float = 0.0  # largest loss against plain decoding at the end of any round, plain steps

    @property
    def speed(self) -> float:
        """Times plain decoding."""
        return sum(len(r.tokens) for r in self.rounds) * self.plain / self.seconds

    def share(self, drafted: int) -> float:
        """Of rounds that drafted so many tokens."""
        return sum(r.drafted == drafted for r in self.rounds) / len(self.rounds)


def run(policy: DraftLengthPolicy, device: Device, drafters: Sequence[Drafter], tokens: int) -> Outcome:
    """Generate with the real engine."""
    target = VirtualTarget(device)
    clocked = Clocked(policy, device, target)
    outcome, start, emitted = Outcome(0.0, device.plain), device.now, 0
    sampler = Sampling().sampler(1, VOCABULARY)
    for round in generate(target, drafters, clocked, sampler, [0], max_tokens=tokens):
        outcome.rounds.append(round)
        emitted += len(round.tokens)
        outcome.worst = max(outcome.worst, (device.now - start) / device.plain - emitted)
    outcome.seconds = device.now - start
    return outcome


def fixed(curve: Curve, text: Text, drafted: int, tokens: int) -> float:
    """Times plain decoding, of a fixed number of draft tokens. By counting: the engine gives the same."""
    place, steps = 1, 0.0
    if not drafted:
        return tokens / (tokens + curve.host)
    ends = np.append(np.flatnonzero(~text.right), len(text.right))
    wrong = ends[np.searchsorted(ends, np.arange(tokens + 1))].tolist()  # by place: the next one that is
    whole = curve.rows(drafted + 1)
    while place < tokens + 1:
        k = min(drafted, tokens - place)
        place += min(wrong[place] - place, k) + 1
        steps += curve.host + k * curve.drafted + (whole if k == drafted else curve.rows(k + 1))
    return tokens / steps


@dataclass(frozen=True)
class Answers:
    """Many short answers by one policy, of those that the drafter knows or of the others."""

    tokens: int = 0
    steps: float = 0.0  # plain steps that they took
    fixed: tuple[float, ...] = (0.0,) * len(ROWS)  # ... with a fixed number of draft tokens, by that number

    def plus(self, tokens: int, steps: float, fixed: Sequence[float]) -> Answers:
        """One more."""
        sums = tuple(a + b for a, b in zip(self.fixed, fixed, strict=True))
        return Answers(self.tokens + tokens, self.steps + steps, sums)

    @property
    def speed(self) -> float:
        """Times plain decoding."""
        return self.tokens / self.steps

    @property
    def of_best(self) -> float:
        """Times the best fixed length for all of them."""
        return min(self.fixed) / self.steps


def short_answers(
    make: Callable[[Device], DraftLengthPolicy], curve: Curve, known: float, count: int, seed: int
) -> tuple[Answers, Answers]:
    """A conversation in which a share of the answers is `known`, in any order: those, and the others."""
    chance = np.random.default_rng([seed])
    device = Device(curve)
    policy, found = make(device), {True: Answers(), False: Answers()}
    for right in (chance.random(count) < known).tolist():
        tokens = int(chance.integers(SHORT, LONG + 1))
        text = Text.of(np.full(tokens + 40, RIGHT if right else WRONG), chance)
        outcome = run(policy, device, [VirtualDrafter(device, text)], tokens)
        lengths = [tokens / fixed(curve, text, k, tokens) for k in range(len(ROWS))]
        found[right] = found[right].plus(tokens, outcome.seconds / outcome.plain, lengths)
    return found[True], found[False]
