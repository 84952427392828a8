"""Rewind points: sizes that a sequence can return to when window rows are gone, or its state is recurrent.

A point costs as much as the windows or the states: as K/V of some hundred to 20,000 tokens. So points share
the window rows that they have in common, and their bytes are bounded. Those that cost least to read again,
per byte, go first.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, get_args

import mlx.core as mx

from mlx_spec.model.layer_caches import step_below
from mlx_spec.prompt import Span
from mlx_spec.types import CacheState

Arrays = list[mx.array | None]
# What ended at a point: a chunk or an earlier prompt, a chunk before the first turn, a turn, or the prompt.
RewindReason = Literal["chunk", "opening", "turn", "end"]
RewindKey = tuple[int, int]
Rows = tuple[int | None, int, int]  # window, None for states; first position, and the one after the last


@dataclass(frozen=True, eq=False)
class CacheBlock:
    """Rows of the windows of one length, or states, of all layers. Rewind points and forks share it."""

    rows: Rows
    layers: list[Arrays]  # by layer, empty for layers of another kind

    def arrays(self) -> list[mx.array]:
        return [array for layer in self.layers for array in layer if array is not None]

    @cached_property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays())


@dataclass(frozen=True)
class RewindPoint:
    """A size that one sequence can return to. It holds no more than windows and states."""

    size: int
    # By window: first and oldest position, number of columns, reach.
    windows: dict[int, tuple[int, int, int, int]]
    blocks: tuple[CacheBlock, ...]  # of each kind in the order of the text
    reason: RewindReason = "end"

    def first_size(self) -> int:
        """Return the smallest size that `rewind` can return to from here."""
        if self.is_state:
            return self.size
        return first_size((oldest, reach) for _, oldest, _, reach in self.windows.values())

    @property
    def is_state(self) -> bool:
        """Return True if it has states, which cannot be cut."""
        return any(block.rows[0] is None for block in self.blocks)

    def adjoins(self, later: RewindPoint) -> bool:
        """Return True if no row is missing between its windows and the windows of a later point."""
        oldest = [window[1] for window in later.windows.values()]
        return not self.is_state and all(at <= self.size and at == step_below(at) for at in oldest)

    def joined(self, later: RewindPoint) -> RewindPoint:
        blocks = {(b.rows[0] or 0, step_below(b.rows[1])): b for b in (*self.blocks, *later.blocks)}
        windows = {
            w: (first, oldest, later.size - first, r) for w, (first, oldest, _, r) in self.windows.items()
        }
        return replace(later, windows=windows, blocks=tuple(blocks[at] for at in sorted(blocks)))

    def cut(self, size: int) -> RewindPoint:
        """Return a point of at least `size` tokens, with the blocks alone that a query at `size` sees."""
        if self.is_state:
            return self
        blocks, windows, end = list[CacheBlock](), dict[int, tuple[int, int, int, int]](), size
        for window, (*_, reach) in self.windows.items():
            visible = [b for b in self.blocks if b.rows[0] == window]
            visible = [b for b in visible if b.rows[2] > size - reach + 1 and step_below(b.rows[1]) < size]
            oldest, end = visible[0].rows[1], visible[-1].rows[2]
            windows[window] = step_below(oldest), oldest, end - step_below(oldest), reach
            blocks += visible
        return replace(self, size=end, windows=windows, blocks=tuple(blocks))

    def arrays(self) -> list[mx.array]:
        return [array for block in self.blocks for array in block.arrays()]

    def layers(self) -> list[Arrays]:
        """Return the arrays of each layer: states, or the rows of all blocks one after the other."""
        layers = list[Arrays]()
        for of_layer in zip(*(block.layers for block in self.blocks), strict=True):
            of_blocks = [arrays for arrays in of_layer if arrays]
            layers.append([_joined(arrays) for arrays in zip(*of_blocks, strict=True)])
        return layers

    @property
    def key(self) -> RewindKey:
        """Return a key that forks share."""
        return self.size, id(self.blocks[-1])

    @property
    def nbytes(self) -> int:
        """Return the bytes of its arrays, also of those that it shares."""
        return sum(block.nbytes for block in self.blocks)


def _joined(arrays: Sequence[mx.array | None]) -> mx.array | None:
    """Return rows [1, H, columns, D] one after the other. One part is returned as it is."""
    rows = [array for array in arrays if array is not None]
    return arrays[0] if len(arrays) == 1 else mx.concatenate(rows, axis=2)


def first_size(windows: Iterable[tuple[int, int]]) -> int:
    """Return the first position whose query sees no row before the oldest one, of windows with a reach."""
    return max((oldest + reach - 1 for oldest, reach in windows if oldest), default=0)


class RewindPoints:
    """The rewind points of one sequence, in the order of their sizes."""

    def __init__(self, points: Iterable[RewindPoint] = ()) -> None:
        self._points = list(points)
        self.parked: RewindPoint | None = None  # the end of the sequence, while its caches have no windows
        self._reach: list[tuple[int, int, RewindPoint]] | None = None  # None after a change
        self.wanted: set[int] = set()  # sizes at which to keep a point of the prompt that is read
        self._expected = 0  # its tokens
        self._opening = 0  # those before the end of its first turn

    def __iter__(self) -> Iterator[RewindPoint]:
        return iter(self._points)

    def blocks(self) -> dict[Rows, CacheBlock]:
        """Return the blocks of all points, with the parked end."""
        points = self._points if self.parked is None else [*self._points, self.parked]
        return {block.rows: block for point in points for block in point.blocks}

    def park(self, point: RewindPoint | None) -> None:
        """Hold the end of the sequence, while its caches have no windows; None once they have them."""
        self.parked, self._reach = point, None

    def reach(self) -> list[tuple[int, int, RewindPoint]]:
        """Return the ranges of sizes, both ends included, that the points give back, and what they hold.

        Points whose rows follow each other without a gap give back all sizes between them.
        """
        if self._reach is None:
            runs = list[RewindPoint]()
            for point in self._points if self.parked is None else [*self._points, self.parked]:
                runs.append(runs.pop().joined(point) if runs and runs[-1].adjoins(point) else point)
            self._reach = [(run.first_size(), run.size, run) for run in runs]
        return self._reach

    def before(self, size: int) -> RewindPoints:
        """Return the points that the first `size` tokens have. They share their arrays with these."""
        return RewindPoints(point for point in self._points if point.size <= size)

    def end_prompt(self) -> None:
        """Treat the end of the last prompt as the end of a chunk: another prompt has been read."""
        self._points = [replace(p, reason="chunk") if p.reason == "end" else p for p in self._points]

    def pin_at(self, sizes: Sequence[int], length: int, opening: int) -> None:
        """Keep points at these sizes of a prompt of that `length`, too."""
        self.wanted |= set(sizes)
        self._expected, self._opening = max(self._expected, length), max(self._opening, opening)

    def keep(
        self,
        within: Iterable[RewindPoint],
        sizes: tuple[int, int],
        make: Callable[[int, RewindReason, dict[Rows, CacheBlock]], RewindPoint],
        row_bytes: int,
        ends_prompt: bool,
        apart: int,
        fewest: int = 12,
        fewest_apart: int = 512,
    ) -> None:
        """Keep points `within` a chunk, and those wanted from the first to the last of `sizes`.

        `make` makes them. There is one at the end of a prompt. Ends of chunks have one at least `apart`
        tokens after the point before, further apart the longer the prompt is. The opening has one at each
        short window, at least `fewest_apart` tokens apart. After it, points that cost more than K and V of
        the tokens between them are at least 4 * `apart` tokens apart. Together they take at most the bytes of
        the prompt in full attention, `row_bytes` a token. A short prompt may have `fewest` points that share
        nothing, and twice as many if they are cheap.
        """
        (first, size), known, points = sizes, self.blocks(), list(within)
        kv_bytes = row_bytes * max(size, self._expected)

        def added(at: int, reason: RewindReason) -> RewindPoint:
            made = make(at, reason, known)
            known.update((block.rows, block) for block in made.blocks)
            return made

        points += [added(at, "turn") for at in sorted(self.wanted) if first <= at <= size]
        gap = size - max(point.size for point in [*self._points, *points, RewindPoint(0, {}, ())])
        is_opening = size <= self._opening
        if ends_prompt:
            self.end_prompt()
            made = added(size, "end")
            points.append(made)
        else:
            made = added(size, "opening" if is_opening else "chunk")
            is_wanted = is_opening or made.nbytes <= 2 * gap * kv_bytes // size or gap >= 4 * apart
            if gap >= max(apart, size // 8) and is_wanted:
                points.append(made)
        step = max(min(made.windows, default=apart), fewest_apart)  # then no row of an opening is missing
        marks = range(-(-first // step) * step, min(size, self._opening) + 1, step) if step < apart else ()
        has_one = {point.size for point in points}
        points += [added(at, "opening") for at in marks if at not in has_one]
        if points:
            mx.eval([point.arrays() for point in points])
            one = points[-1].nbytes
            is_cheap = one <= 2 * apart * row_bytes
            self.add(points, max(kv_bytes, fewest * one, min(4 * kv_bytes, 2 * fewest * one) * is_cheap))

    def add(self, points: Iterable[RewindPoint], most_bytes: int) -> None:
        """Add points, and drop others until all have at most `most_bytes`; of one size, one is kept."""
        rank = get_args(RewindReason).index
        ordered = sorted([*self._points, *points], key=lambda point: (point.size, rank(point.reason)))
        self._points, self._reach = list({point.size: point for point in ordered}.values()), None
        excess = sum(block.nbytes for block in self.blocks().values()) - most_bytes
        for _, freed, point in self.costs() if excess > 0 else ():
            if excess <= 0:
                break
            self.drop(point.size)
            excess -= freed

    def state(self) -> dict[str, CacheState]:
        """Return the content of blocks ("@1", ...) and of points ("place1", ...), by name."""
        states, numbers = dict[str, CacheState](), dict[CacheBlock, int]()
        for block in (block for point in self._points for block in point.blocks):
            if block not in numbers:
                numbers[block] = n = len(numbers) + 1
                window, low, high = block.rows
                layers = [[array for array in layer if array is not None] for layer in block.layers]
                arrays = {
                    f"{i}.{j}": array for i, layer in enumerate(layers) for j, array in enumerate(layer)
                }
                of_layers = [len(layer) for layer in block.layers]
                states[f"@{n}"] = CacheState(arrays, {"rows": [window or 0, low, high], "layers": of_layers})
        for n, point in enumerate(self._points, 1):
            size = [point.size, get_args(RewindReason).index(point.reason)]
            windows = [number for window, bounds in point.windows.items() for number in (window, *bounds)]
            blocks = [numbers[block] for block in point.blocks]
            # "place" is the name in saved files.
            states[f"place{n}"] = CacheState(numbers={"size": size, "windows": windows, "blocks": blocks})
        return states

    @classmethod
    def load(cls, state: CacheState) -> RewindPoints:
        blocks, points, numbers = dict[int, CacheBlock](), list[RewindPoint](), state.numbers
        for n in itertools.takewhile(lambda n: f"@{n}.rows" in numbers, itertools.count(1)):
            window, low, high = numbers[f"@{n}.rows"]
            layers = list[Arrays]()
            for i, count in enumerate(numbers[f"@{n}.layers"]):
                layers.append([state.arrays[f"@{n}.{i}.{j}"] for j in range(count)])
            blocks[n] = CacheBlock((window or None, low, high), layers)
        for n in itertools.takewhile(lambda n: f"place{n}.size" in numbers, itertools.count(1)):
            flat = iter(numbers[f"place{n}.windows"])
            windows = {w: (first, *rest) for w, first, *rest in zip(*[flat] * 5, strict=True)}
            held = tuple(blocks[number] for number in numbers[f"place{n}.blocks"])
            size, reason = numbers[f"place{n}.size"]
            points.append(RewindPoint(size, windows, held, get_args(RewindReason)[reason]))
        return cls(points)

    def drop(self, size: int) -> None:
        self._points, self._reach = [point for point in self._points if point.size != size], None

    def core(self) -> set[CacheBlock]:
        """Return the blocks of the end of the last prompt, and of the parked end."""
        points = [point for point in [*self._points, self.parked] if point is not None]
        return {block for point in points if point.reason == "end" for block in point.blocks}

    def costs(self, elsewhere: Container[int] = ()) -> Iterator[tuple[float, int, RewindPoint]]:
        """Yield points in the order in which to drop them: tokens lost per byte, bytes, point.

        The loss is the tokens since the point before, times the chance that a prompt parts there. The chance
        is less at the end of a chunk than at the end of a turn, or where a prompt parted before. An opening
        has about eight points, and prompts part at one. The bytes are in no point that is left then; blocks
        whose id is `elsewhere` do not count. The end of the last prompt is not among the points.
        """
        chances = {"chunk": 1 / 32, "opening": 1 / 8, "turn": 1.0, "end": None}
        left, worth = list(self._points), 0.0
        parked = () if self.parked is None else self.parked.blocks
        holders = Counter([*parked, *(block for point in left for block in point.blocks)])
        while True:
            best: tuple[float, int, RewindPoint] | None = None
            before = 0
            for point in left:
                if (chance := chances[point.reason]) is not None:
                    unshared = [b for b in point.blocks if holders[b] == 1 and id(b) not in elsewhere]
                    freed = sum(block.nbytes for block in unshared)
                    ratio = (point.size - before) * chance / max(freed, 1)
                    if best is None or ratio < best[0]:
                        best = ratio, freed, point
                before = point.size
            if best is None:
                return
            left.remove(best[2])
            holders.subtract(best[2].blocks)
            worth = max(worth, best[0])  # it is lost after those before it
            yield worth, best[1], best[2]


def cuts(
    wanted: Iterable[int], start: int, end: int, spans: Sequence[Span], ends_prompt: bool, apart: int = 32
) -> list[tuple[int, RewindReason]]:
    """Return the sizes between `start` and `end` at which a pass should end to keep a state, and why.

    At the end of a prompt the last cut is 32 tokens earlier: the next turn often drops what a chat template
    appends to begin an answer. A span, whose rows would be computed again, ends before it. Cuts are at least
    `apart` tokens apart.
    """
    reasons = dict[int, RewindReason]()
    if ends_prompt:
        early = end - 32
        early = next((span.end for span in spans if span.start < early < span.end < end), early)
        reasons = {early: "end"}
    for size in sorted(wanted, reverse=True):
        if not any(span.start < size < span.end for span in spans):
            reasons = {other: reason for other, reason in reasons.items() if abs(other - size) >= apart}
            reasons[size] = "turn"
    return [(size, reasons[size]) for size in sorted(reasons) if start < size < end]
