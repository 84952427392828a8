"""What rounds cost on this device, for one target and its drafters: measured, and corrected as rounds go by.

Everything is seconds, in buckets of context length. Plain decoding is the unit: when a plain token takes
longer, by heat or by context, everything that was not seen since is scaled with it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from mlx_spec.tuning.curve import Curve
from mlx_spec.tuning.purse import Purse

MAX_DRAFT_TOKENS = 16
FIRST_EDGE, EDGE_FACTOR = 512, 4  # tokens: buckets of context end at 512, 2048, 8192, ...
GAIN, LEAST_GAIN = 0.3, 0.1  # weight of one observation: of the first ones, and of many that agree
CLAMP = 1.33  # one observation counts as no more than this times what was expected, or that much less
PLAIN_GAIN = 0.04  # least weight of one plain token
WANE = 1 - 1 / 128  # of what plain tokens seen before count for, a speculative round
ESTABLISHED = 4  # rounds of a size after which three surprises in a row are needed; before that, two
GUESSES = 2  # rounds without which nothing is known
ASSUMED_ROW, ASSUMED_DRAFT = 0.05, 0.05  # plain steps of one more row, of one draft token; until timed


class BadTable(ValueError):
    """A saved table that cannot be used; the text is one line."""


@dataclass(frozen=True)
class Table:
    """Seconds at one context length, at the sizes that were measured."""

    plain: float  # one token of pipelined plain decoding
    verify: Mapping[int, float]  # by rows: one pass and its acceptance, not pipelined
    draft: tuple[Mapping[int, float], ...]  # by drafter, by tokens
    host: float = 0.0  # one more read of the device in a round


@dataclass
class _Bucket:
    plain: float
    unit: float  # `plain` when the curves were measured
    verify: Curve
    draft: list[Curve]
    host: float
    measured: bool
    timed: int = 0  # plain tokens seen
    weight: float = 0.0  # what they count for now
    ticks: int = 0
    rounds: int = 0

    def now(self) -> tuple[int, int]:
        """Ticks and rounds, to read its curves with, which are first scaled to `plain` as it is now."""
        scale = self.plain / self.unit
        for curve in (self.verify, *self.draft):
            curve.rescale(scale)
        return self.ticks, self.rounds


class Costs:
    """Seconds of every kind of round. Shared by all sequences of a pair.

    Accessors return None as long as nothing is known: no table, and no plain token was timed.
    """

    def __init__(self, drafters: Sequence[str] = (), tables: Mapping[int, Table] | None = None) -> None:
        self.drafters = tuple(drafters)
        self.purse = Purse()  # of plain steps at these costs
        self._buckets: dict[int, _Bucket] = {}
        self._surprises: dict[tuple[int, ...], list[float]] = {}  # (bucket, drafter or -1) -> ratios in a row
        self.warm: set[tuple[int, bool]] = set()  # by drafter and verified or not: this process did that
        self._used: set[tuple[int, ...]] = set()  # rounds that were run before: their code is compiled
        for context, table in (tables or {}).items():
            self.measured(context, table)
        self.warm.clear()  # another process measured those

    def measured(self, context: int, table: Table) -> None:
        """Take a table measured at this context length. Raises BadTable."""
        _check(table, len(self.drafters))
        verify = Curve(table.verify, 1, MAX_DRAFT_TOKENS + 1)
        draft = [Curve({0: 0.0, **points}, 0, MAX_DRAFT_TOKENS) for points in table.draft]
        plain = table.plain
        self._buckets[bucket(context)] = _Bucket(plain, plain, verify, draft, table.host, True)
        self.warm.update((drafter, done) for drafter in range(len(draft)) for done in (False, True))

    def plain(self, context: int) -> float | None:
        """Seconds of one token of plain decoding."""
        found = self._bucket(context)
        return found.plain if found else None

    def timed(self, context: int) -> int:
        """How many plain tokens came in this bucket of context, those included whose time nobody knows."""
        found = self._buckets.get(bucket(context))
        return found.timed if found else 0

    def verify(self, rows: int, context: int) -> float | None:
        """Seconds of one pass of so many rows."""
        found = self._bucket(context)
        return found.verify.at(rows, *found.now()) if found else None

    def draft(self, drafter: int, tokens: int, context: int) -> float | None:
        """Seconds of drafting so many tokens."""
        found = self._bucket(context)
        return found.draft[drafter].at(tokens, *found.now()) if found else None

    def host(self, context: int) -> float | None:
        """Seconds of one more read of the device."""
        found = self._bucket(context)
        return found.host if found else None

    def guessed(self, context: int) -> bool:
        """Whether passes here are neither measured nor seen."""
        found = self._bucket(context)
        return found is not None and found.verify.assumed and found.rounds < GUESSES

    def verify_curve(self, context: int) -> list[float] | None:
        """Seconds by rows, 0 to 17; entry 0 means nothing."""
        found = self._bucket(context)
        return found.verify.values(*found.now()) if found else None

    def draft_curve(self, drafter: int, context: int) -> list[float] | None:
        """Seconds by tokens, 0 to 16."""
        found = self._bucket(context)
        return found.draft[drafter].values(*found.now()) if found else None

    def round(self, drafter: int, proposed: int, verified: int, context: int) -> float | None:
        """Seconds of a round that drafts `proposed` tokens and verifies `verified` of them."""
        draft, verify = self.draft(drafter, proposed, context), self.verify(verified + 1, context)
        return None if draft is None or verify is None else draft + verify

    def saw_plain(self, context: int, seconds: float) -> None:
        """A plain token took so long."""
        found = self._bucket(context)
        if found is None:
            self._buckets[bucket(context)] = self._assumed(seconds)
            return
        found.ticks += 1
        gain = max(1 / (3 + found.weight), PLAIN_GAIN)
        step = self._step((bucket(context),), seconds / found.plain, gain, 2)
        found.plain *= 1 + step
        found.timed += 1
        found.weight += 1

    def went_by(self, context: int) -> None:
        """A plain token came, and nobody knows how long it took."""
        found = self._bucket(context)
        if found is not None:
            found.timed += 1

    def saw_round(
        self, drafter: int, proposed: int, verified: int, context: int, seconds: float, *, selective: bool
    ) -> None:
        """A round took so long. The error goes to draft and pass as their shares were expected to be."""
        found = self._bucket(context)
        if found is None:
            return
        found.ticks += 1
        found.rounds += 1
        found.weight *= WANE
        draft, rows, now = found.draft[drafter], verified + 1, found.now()
        drafting, passing = draft.at(proposed, *now), found.verify.at(rows, *now)
        expected = drafting + passing + selective * found.host
        size = (drafter, proposed, verified)
        times = found.verify.times(rows)
        gain = 1.0 if found.verify.assumed and not times else max(GAIN / (1 + times / 4), LEAST_GAIN)
        needed = 3 if times >= ESTABLISHED or size not in self._used else 2
        step = self._step((bucket(context), drafter), seconds / expected, gain, needed)
        self._used.add(size)
        share = drafting / expected
        found.verify.learn(rows, passing + (1 - share) * step * expected, *now)
        if proposed:
            draft.learn(proposed, drafting + share * step * expected, *now)

    def saw_begin(self, context: int, seconds: float) -> None:
        """A pass of one row took so long, when nothing had been begun for it."""
        found = self._bucket(context)
        if found is not None:
            now = found.now()
            passing = found.verify.at(1, *now)
            step = self._step((bucket(context), -1), seconds / passing, GAIN, 2)
            found.verify.learn(1, passing * (1 + step), *now)

    def table(self) -> dict[str, Any]:
        """What is believed now, for saving: milliseconds, drafters by name."""
        return {
            str(edge(index)): {
                "plain": _ms(found.plain),
                "verify": _saved(found.verify.values(*found.now()), 1),
                "draft": {
                    name: _saved(curve.values(*found.now()), 1)
                    for name, curve in zip(self.drafters, found.draft, strict=True)
                },
                "host": _ms(found.host),
            }
            for index, found in sorted(self._buckets.items())
            if found.measured or found.rounds
        }

    @classmethod
    def from_table(cls, saved: Mapping[str, Any], drafters: Sequence[str]) -> Costs:
        """The costs that `table` returned. Raises BadTable where the drafters or the numbers do not fit."""
        tables = {}
        for context, entry in saved.items():
            if not context.isdecimal() or not isinstance(entry, Mapping):
                raise BadTable(f"{context!r} is no context length with a table: measure again")
            tables[int(context)] = _loaded(entry, drafters)
        return cls(drafters, tables)

    def _bucket(self, context: int) -> _Bucket | None:
        """The bucket of a context length; one that was never seen starts as the nearest that was."""
        index = bucket(context)
        found = self._buckets.get(index)
        if found is None and self._buckets:
            nearest = min(self._buckets, key=lambda other: (abs(other - index), other))
            found = self._buckets[index] = self._copied(self._buckets[nearest])
        return found

    def _copied(self, source: _Bucket) -> _Bucket:
        now = source.now()
        verify, draft = source.verify.copy(*now), [curve.copy(*now) for curve in source.draft]
        return _Bucket(source.plain, source.plain, verify, draft, source.host, False)

    def _assumed(self, plain: float) -> _Bucket:
        """Nothing was measured: cheap enough to be tried."""
        rows = {1: plain, 2: plain * (1 + ASSUMED_ROW)}
        tokens = {0: 0.0, 1: plain * ASSUMED_DRAFT}
        draft = [Curve(tokens, 0, MAX_DRAFT_TOKENS, assumed=True) for _ in self.drafters]
        return _Bucket(plain, plain, Curve(rows, 1, MAX_DRAFT_TOKENS + 1, assumed=True), draft, 0.0, False, 1)

    def _step(self, key: tuple[int, ...], ratio: float, gain: float, needed: int) -> float:
        """By how much to change an expectation, relative to it, after seeing `ratio` times it.

        A surprise is clamped, for the machine may have paused. The least of `needed` in a row is believed.
        """
        clamped = min(max(ratio, 1 / CLAMP), CLAMP)
        before = self._surprises.pop(key, [])
        if ratio == clamped:
            return gain * (ratio - 1)
        row = [r for r in before if (r > 1) == (ratio > 1)] + [ratio]
        self._surprises[key] = row[-2:]
        if len(row) < needed:
            return GAIN * (clamped - 1)
        return (min if ratio > 1 else max)(row) - 1


@lru_cache(maxsize=8)
def bucket(context: int) -> int:
    """The index of the bucket that a context length lies in."""
    return max(0, ((context - 1) // FIRST_EDGE).bit_length() + 1) // 2


def edge(index: int) -> int:
    """The longest context of a bucket, in tokens."""
    return int(FIRST_EDGE * EDGE_FACTOR**index)


def _check(table: Table, drafters: int) -> None:
    """Raise BadTable for numbers that no measurement gives."""
    if len(table.draft) != drafters:
        raise BadTable(f"the table is of {len(table.draft)} drafters, there are {drafters}: measure again")
    _check_sizes("passes of", table.verify, MAX_DRAFT_TOKENS + 1)
    for points in table.draft:
        _check_sizes("drafts of", points, MAX_DRAFT_TOKENS)
    times = [table.plain, *table.verify.values(), *(s for points in table.draft for s in points.values())]
    if not all(0 < seconds < math.inf for seconds in times) or not 0 <= table.host < math.inf:
        raise BadTable(f"times must be positive numbers, the table has {sorted(times)[:3]}: measure again")


def _check_sizes(what: str, points: Mapping[int, float], most: int) -> None:
    if not points or min(points) < 1 or max(points) > most:
        raise BadTable(f"the table has {what} {sorted(points)}, they must be of 1 to {most}: measure again")


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 4)


def _saved(values: Sequence[float], first: int) -> dict[str, float]:
    return {str(size): _ms(seconds) for size, seconds in enumerate(values) if size >= first}


def _loaded(entry: Mapping[str, Any], drafters: Sequence[str]) -> Table:
    """One bucket of a saved table. Raises BadTable."""
    names = list(entry["draft"]) if isinstance(entry.get("draft"), Mapping) else []
    if sorted(names) != sorted(drafters):
        raise BadTable(f"the table is of drafters {names}, these are {list(drafters)}: measure again")
    try:
        verify = _points(entry["verify"])
        draft = tuple(_points(entry["draft"][name]) for name in drafters)
        return Table(float(entry["plain"]) / 1000, verify, draft, float(entry["host"]) / 1000)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadTable(f"the table cannot be read ({type(error).__name__}: {error}): measure again") from None


def _points(saved: Mapping[str, float]) -> dict[int, float]:
    return {int(size): float(ms) / 1000 for size, ms in saved.items()}
