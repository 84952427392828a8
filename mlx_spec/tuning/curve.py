"""Seconds by size, of a pass by its rows or of a draft by its tokens: measured points and what rounds taught.

A real curve is a staircase: a measured point is never smoothed, a line is drawn only where nothing was
measured. What rounds teach about one size is an error of the curve; sizes not seen for long take a share of
it by a straight line from the origin, where the error is none, so that a wrong curve is found out as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

FRESH = 64  # a point seen within so many rounds keeps its seconds when plain decoding becomes slower
FORGET = 512  # speculative rounds after which a point not seen again counts as not seen
CAUTION = 9.0  # squared sizes by which the error's slope is shrunk where the curve is only continued
RISE = 0.3  # plain steps by which the share of its rise is shrunk
HOPE = 0.15  # share of the rise since the size below that is not believed until it is seen
LEAST = 0.25  # of the measured seconds: no error takes more off


@dataclass(frozen=True)
class Seen:
    """A point as rounds have shown it."""

    seconds: float
    scale: float  # of the whole curve, then
    tick: int  # rounds of any kind, then
    round: int  # speculative rounds, then
    times: int


class Curve:
    """Seconds for sizes from `origin` to `last`, where all that is measured is scaled by one factor."""

    def __init__(self, points: Mapping[int, float], origin: int, last: int, *, assumed: bool = False) -> None:
        self.origin = origin
        self.assumed = assumed  # nothing was measured
        self.scale = 1.0
        self._base = filled(points, last)
        self._seen: dict[int, Seen] = {}
        self._values: list[float] | None = None

    def copy(self, tick: int, round: int) -> Curve:
        """A curve of its own that begins with these values."""
        points = dict(enumerate(self.values(tick, round)))
        return Curve(points, self.origin, len(points) - 1, assumed=self.assumed)

    def rescale(self, scale: float) -> None:
        """Everything became slower or faster by the same factor."""
        if scale != self.scale:
            self.scale, self._values = scale, None

    def learn(self, size: int, seconds: float, tick: int, round: int) -> None:
        """What this size costs now."""
        least = LEAST * self.scale * self._base[size]
        self._seen[size] = Seen(max(seconds, least), self.scale, tick, round, self.times(size) + 1)
        self._values = None

    def times(self, size: int) -> int:
        """How often a round has shown this size."""
        return self._seen[size].times if size in self._seen else 0

    def at(self, size: int, tick: int, round: int) -> float:
        """Seconds of one size."""
        seen = self._seen.get(size)
        if self._values is None and seen and tick - seen.tick <= FRESH:
            return seen.seconds  # what the whole curve would say
        return self.values(tick, round)[size]

    def values(self, tick: int, round: int) -> list[float]:
        """Seconds by size."""
        if self._values is None:
            self._values = self._corrected(tick, round)
        return self._values

    def _corrected(self, tick: int, round: int) -> list[float]:
        base = [self.scale * seconds for seconds in self._base]
        for size in [size for size, seen in self._seen.items() if round - seen.round > FORGET]:
            del self._seen[size]
        if not self._seen:
            return base
        errors = {self.origin: 0.0}
        for size, seen in sorted(self._seen.items()):
            factor = 1.0 if tick - seen.tick <= FRESH else self.scale / seen.scale
            errors[size] = factor * seen.seconds - base[size]
        error = _spread(errors, len(base))
        last = max(errors)
        for size, more in enumerate(self._beyond(errors, base), last + 1):
            error[size] += more
        values = [max(b + e, LEAST * b) for b, e in zip(base, error, strict=True)]
        return self._hopeful(values) if self.assumed else values

    def _hopeful(self, values: list[float]) -> list[float]:
        """Where nothing was measured, a size not yet seen may be on the same step as the one below."""
        known = values[0]
        for size, seconds in enumerate(values):
            if size in self._seen:
                known = seconds
            values[size] = seconds - HOPE * max(seconds - known, 0.0)
        return values

    def _beyond(self, errors: Mapping[int, float], base: Sequence[float]) -> list[float]:
        """What to add to the last known error at the sizes behind it, by least squares, shrunk.

        A curve that is too low is so by some seconds a size, one that is too high by a share of its rise.
        """
        last, origin = max(errors), self.origin
        sizes = range(last + 1, len(base))
        caution = 0.0 if self.assumed else 1.0
        runs = {size: float(size - origin) for size in errors}
        slope = _slope(runs, errors, caution * CAUTION)
        if slope >= 0:
            return [slope * (size - last) for size in sizes]
        unit = self._base[max(origin, 1)] * self.scale
        rises = {size: base[size] - base[origin] for size in errors}
        share = max(_slope(rises, errors, caution * (RISE * unit) ** 2), -1.0)
        return [share * max(base[size] - base[last], 0.0) for size in sizes]


def _slope(runs: Mapping[int, float], errors: Mapping[int, float], caution: float) -> float:
    """By least squares through the origin."""
    squares = sum(run * run for run in runs.values()) + caution
    return sum(run * errors[size] for size, run in runs.items()) / squares if squares else 0.0


def filled(points: Mapping[int, float], last: int) -> list[float]:
    """Seconds for every size from 0 to `last`: straight lines between points, the last slope beyond them.

    A size below the first point takes the first point's; one beyond the last is never below it.
    """
    sizes = sorted(points)
    result = []
    for size in range(last + 1):
        above = next((p for p in sizes if p >= size), None)
        below = max((p for p in sizes if p <= size), default=sizes[0])
        if above is not None:
            result.append(_line(size, below, points[below], above, points[above]))
            continue
        before = sizes[-2] if len(sizes) > 1 else below
        rise = _line(size, before, points[before], below, points[below])
        result.append(max(rise, points[below]))
    return result


def _line(x: int, x0: int, y0: float, x1: int, y1: float) -> float:
    return y0 if x0 == x1 or x <= x0 else y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def _spread(errors: Mapping[int, float], count: int) -> list[float]:
    """The error of every size: between known ones a line, outside of them the nearest one's."""
    sizes = sorted(errors)
    first, last = sizes[0], sizes[-1]
    result, upper = [], 0
    for size in range(count):
        if size <= first or size >= last:
            result.append(errors[first if size <= first else last])
            continue
        while sizes[upper] < size:
            upper += 1
        x0, x1 = sizes[upper - 1], sizes[upper]
        result.append(_line(size, x0, errors[x0], x1, errors[x1]))
    return result
