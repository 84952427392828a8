"""The places that one sequence can go back to when rows of windows are gone, or its state is recurrent.

A place costs as much as the windows or the states: as K/V of some hundred to 20,000 tokens. So places share
the rows of windows that they have in common, their bytes are bounded, and those whose loss costs least to
read again per byte go first.
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
# Why a place is kept: there ended a chunk or an earlier prompt, a chunk before the first turn, a turn, or the
# prompt.
Kind = Literal["chunk", "opening", "turn", "end"]
PlaceKey = tuple[int, int]
Rows = tuple[int | None, int, int]  # window, None for states; first position, and the one after the last


@dataclass(frozen=True, eq=False)
class PlaceBlock:
    """Rows of the windows of one length, or states, of all layers. Places and forks share it."""

    rows: Rows
    layers: list[Arrays]  # by layer, empty for layers of another kind

    def arrays(self) -> list[mx.array]:
        """Return its arrays."""
        return [array for layer in self.layers for array in layer if array is not None]

    @cached_property
    def nbytes(self) -> int:
        """Return the bytes of its arrays."""
        return sum(array.nbytes for array in self.arrays())


@dataclass(frozen=True)
class RewindPoint:
    """A place that one sequence can return to. It holds no more than windows and states."""

    size: int
    # By window: first and oldest position, number of columns, reach.
    places: dict[int, tuple[int, int, int, int]]
    blocks: tuple[PlaceBlock, ...]  # of each kind in the order of the text
    kind: Kind = "end"

    def first_size(self) -> int:
        """Return the smallest size that `rewind` can return to from here."""
        if self.is_state:
            return self.size
        return first_size((oldest, reach) for _, oldest, _, reach in self.places.values())

    @property
    def is_state(self) -> bool:
        """Return True if it has states, which cannot be cut."""
        return any(block.rows[0] is None for block in self.blocks)

    def adjoins(self, later: RewindPoint) -> bool:
        """Return True if no row is missing between its windows and those of a later place."""
        oldest = [place[1] for place in later.places.values()]
        return not self.is_state and all(at <= self.size and at == step_below(at) for at in oldest)

    def joined(self, later: RewindPoint) -> RewindPoint:
        """Return a place with the rows of both."""
        blocks = {(b.rows[0] or 0, step_below(b.rows[1])): b for b in (*self.blocks, *later.blocks)}
        places = {
            w: (first, oldest, later.size - first, r) for w, (first, oldest, _, r) in self.places.items()
        }
        return replace(later, places=places, blocks=tuple(blocks[at] for at in sorted(blocks)))

    def cut(self, size: int) -> RewindPoint:
        """Return a place of at least `size` tokens, with the blocks alone that a query at `size` sees."""
        if self.is_state:
            return self
        blocks, places, end = list[PlaceBlock](), dict[int, tuple[int, int, int, int]](), size
        for window, (*_, reach) in self.places.items():
            own = [b for b in self.blocks if b.rows[0] == window]
            own = [b for b in own if b.rows[2] > size - reach + 1 and step_below(b.rows[1]) < size]
            oldest, end = own[0].rows[1], own[-1].rows[2]
            places[window] = step_below(oldest), oldest, end - step_below(oldest), reach
            blocks += own
        return replace(self, size=end, places=places, blocks=tuple(blocks))

    def arrays(self) -> list[mx.array]:
        """Return its arrays."""
        return [array for block in self.blocks for array in block.arrays()]

    def layers(self) -> list[Arrays]:
        """Return the arrays of each layer: states, or the rows of all blocks one after the other."""
        layers = list[Arrays]()
        for parts in zip(*(block.layers for block in self.blocks), strict=True):
            held = [part for part in parts if part]
            layers.append([_joined(arrays) for arrays in zip(*held, strict=True)])
        return layers

    @property
    def key(self) -> PlaceKey:
        """Return a key that forks share."""
        return self.size, id(self.blocks[-1])

    @property
    def nbytes(self) -> int:
        """Return the bytes of its arrays, also of those that it shares."""
        return sum(block.nbytes for block in self.blocks)


def _joined(parts: Sequence[mx.array | None]) -> mx.array | None:
    """Return rows [1, H, columns, D] one after the other. One part is returned as it is."""
    rows = [part for part in parts if part is not None]
    return parts[0] if len(parts) == 1 else mx.concatenate(rows, axis=2)


def first_size(windows: Iterable[tuple[int, int]]) -> int:
    """Return the first position whose query sees no row before the oldest one, of windows with a reach."""
    return max((oldest + reach - 1 for oldest, reach in windows if oldest), default=0)


class RewindPoints:
    """The checkpoints of one sequence, in the order of their sizes."""

    def __init__(self, places: Iterable[RewindPoint] = ()) -> None:
        self._places = list(places)
        self.parked: RewindPoint | None = None  # the end of the sequence, while its caches have no windows
        self._reach: list[tuple[int, int, RewindPoint]] | None = None  # None after a change
        self.wanted: set[int] = set()  # sizes at which to keep a place of the prompt that is read
        self._expected = 0  # its tokens
        self._opening = 0  # those before the end of its first turn

    def __iter__(self) -> Iterator[RewindPoint]:
        return iter(self._places)

    def blocks(self) -> dict[Rows, PlaceBlock]:
        """Return what the places hold, with the parked end."""
        places = self._places if self.parked is None else [*self._places, self.parked]
        return {block.rows: block for place in places for block in place.blocks}

    def park(self, place: RewindPoint | None) -> None:
        """Hold the end of the sequence, while its caches have no windows; None once they have them."""
        self.parked, self._reach = place, None

    def reach(self) -> list[tuple[int, int, RewindPoint]]:
        """Return the ranges of sizes, both ends included, that the places give back, and what they hold.

        Places whose rows follow each other without a gap give back all sizes between them.
        """
        if self._reach is None:
            runs = list[RewindPoint]()
            for place in self._places if self.parked is None else [*self._places, self.parked]:
                runs.append(runs.pop().joined(place) if runs and runs[-1].adjoins(place) else place)
            self._reach = [(run.first_size(), run.size, run) for run in runs]
        return self._reach

    def before(self, size: int) -> RewindPoints:
        """Return the checkpoints that the first `size` tokens have. They share their arrays with these."""
        return RewindPoints(place for place in self._places if place.size <= size)

    def end_prompt(self) -> None:
        """Treat the end of the last prompt as the end of a chunk: another prompt has been read."""
        self._places = [replace(p, kind="chunk") if p.kind == "end" else p for p in self._places]

    def pin_at(self, sizes: Sequence[int], length: int, opening: int) -> None:
        """Keep places at these sizes of a prompt of that `length`, too."""
        self.wanted |= set(sizes)
        self._expected, self._opening = max(self._expected, length), max(self._opening, opening)

    def keep(
        self,
        points: Iterable[RewindPoint],
        sizes: tuple[int, int],
        make: Callable[[int, Kind, dict[Rows, PlaceBlock]], RewindPoint],
        row_bytes: int,
        ends_prompt: bool,
        apart: int,
        fewest: int = 12,
        fewest_apart: int = 512,
    ) -> None:
        """Keep `points`, and those wanted at `sizes`, from the first to the present one; `make` makes them.

        There is one at the end of a prompt, and at the ends of chunks at least `apart` tokens from the place
        before, and further the longer the prompt is; in the opening at each short window, at least
        `fewest_apart` tokens apart. After it those that cost more than K and V of the tokens between them are
        at least 4 * `apart` tokens apart. Together they take at most the bytes of the prompt in full
        attention, `row_bytes` a token; a short prompt may have `fewest` places that share nothing, and twice
        as many if they are cheap.
        """
        (first, size), known, places = sizes, self.blocks(), list(points)
        kv_bytes = row_bytes * max(size, self._expected)

        def added(at: int, kind: Kind) -> RewindPoint:
            made = make(at, kind, known)
            known.update((block.rows, block) for block in made.blocks)
            return made

        places += [added(at, "turn") for at in sorted(self.wanted) if first <= at <= size]
        gap = size - max(place.size for place in [*self._places, *places, RewindPoint(0, {}, ())])
        is_opening = size <= self._opening
        if ends_prompt:
            self.end_prompt()
            made = added(size, "end")
            places.append(made)
        else:
            made = added(size, "opening" if is_opening else "chunk")
            is_wanted = is_opening or made.nbytes <= 2 * gap * kv_bytes // size or gap >= 4 * apart
            if gap >= max(apart, size // 8) and is_wanted:
                places.append(made)
        step = max(min(made.places, default=apart), fewest_apart)  # then no row of an opening is missing
        marks = (
            range(-(-first // step) * step, min(size - 1, self._opening) + 1, step) if step < apart else ()
        )
        places += [added(at, "opening") for at in marks if at not in self.wanted]
        if places:
            mx.eval([place.arrays() for place in places])
            one = places[-1].nbytes
            is_cheap = one <= 2 * apart * row_bytes
            self.add(places, max(kv_bytes, fewest * one, min(4 * kv_bytes, 2 * fewest * one) * is_cheap))

    def add(self, places: Iterable[RewindPoint], most_bytes: int) -> None:
        """Add places, and drop others until all have at most `most_bytes`; of one size, one is kept."""
        rank = get_args(Kind).index
        ordered = sorted([*self._places, *places], key=lambda place: (place.size, rank(place.kind)))
        self._places, self._reach = list({place.size: place for place in ordered}.values()), None
        excess = sum(block.nbytes for block in self.blocks().values()) - most_bytes
        for _, freed, place in self.costs() if excess > 0 else ():
            if excess <= 0:
                break
            self.drop(place.size)
            excess -= freed

    def state(self) -> dict[str, CacheState]:
        """Return the content of blocks ("@1", ...) and of places ("place1", ...), by name."""
        parts, numbers = dict[str, CacheState](), dict[PlaceBlock, int]()
        for block in (block for place in self._places for block in place.blocks):
            if block not in numbers:
                numbers[block] = n = len(numbers) + 1
                window, low, high = block.rows
                layers = [[array for array in layer if array is not None] for layer in block.layers]
                arrays = {
                    f"{i}.{j}": array for i, layer in enumerate(layers) for j, array in enumerate(layer)
                }
                of_layers = [len(layer) for layer in block.layers]
                parts[f"@{n}"] = CacheState(arrays, {"rows": [window or 0, low, high], "layers": of_layers})
        for n, place in enumerate(self._places, 1):
            size = [place.size, get_args(Kind).index(place.kind)]
            windows = [number for window, bounds in place.places.items() for number in (window, *bounds)]
            blocks = [numbers[block] for block in place.blocks]
            parts[f"place{n}"] = CacheState(numbers={"size": size, "windows": windows, "blocks": blocks})
        return parts

    @classmethod
    def load(cls, state: CacheState) -> RewindPoints:
        """Return the checkpoints of a state."""
        blocks, places, numbers = dict[int, PlaceBlock](), list[RewindPoint](), state.numbers
        for n in itertools.takewhile(lambda n: f"@{n}.rows" in numbers, itertools.count(1)):
            window, low, high = numbers[f"@{n}.rows"]
            layers = list[Arrays]()
            for i, count in enumerate(numbers[f"@{n}.layers"]):
                layers.append([state.arrays[f"@{n}.{i}.{j}"] for j in range(count)])
            blocks[n] = PlaceBlock((window or None, low, high), layers)
        for n in itertools.takewhile(lambda n: f"place{n}.size" in numbers, itertools.count(1)):
            flat = iter(numbers[f"place{n}.windows"])
            windows = {w: (first, *rest) for w, first, *rest in zip(*[flat] * 5, strict=True)}
            held = tuple(blocks[number] for number in numbers[f"place{n}.blocks"])
            size, kind = numbers[f"place{n}.size"]
            places.append(RewindPoint(size, windows, held, get_args(Kind)[kind]))
        return cls(places)

    def drop(self, size: int) -> None:
        """Drop the place at a size."""
        self._places, self._reach = [place for place in self._places if place.size != size], None

    def core(self) -> set[PlaceBlock]:
        """Return the blocks of the end of the last prompt, and of the parked end."""
        places = [place for place in [*self._places, self.parked] if place is not None]
        return {block for place in places if place.kind == "end" for block in place.blocks}

    def costs(self, elsewhere: Container[int] = ()) -> Iterator[tuple[float, int, RewindPoint]]:
        """Yield places in the order in which to drop them: tokens that the loss costs per byte, the bytes.

        They are the tokens from the place before it on, times the chance that a prompt parts there: less at
        the end of a chunk than at the end of a turn, or where a prompt parted before. Of the places in an
        opening, about eight, prompts part at one. The bytes are those that no place has that is left then;
        blocks whose id is `elsewhere` do not count. The end of the last prompt is not among the places.
        """
        chances = {"chunk": 1 / 32, "opening": 1 / 8, "turn": 1.0, "end": None}
        left, worth = list(self._places), 0.0
        parked = () if self.parked is None else self.parked.blocks
        holders = Counter([*parked, *(block for place in left for block in place.blocks)])
        while True:
            best: tuple[float, int, RewindPoint] | None = None
            before = 0
            for place in left:
                if (chance := chances[place.kind]) is not None:
                    own = [b for b in place.blocks if holders[b] == 1 and id(b) not in elsewhere]
                    freed = sum(block.nbytes for block in own)
                    ratio = (place.size - before) * chance / max(freed, 1)
                    if best is None or ratio < best[0]:
                        best = ratio, freed, place
                before = place.size
            if best is None:
                return
            left.remove(best[2])
            holders.subtract(best[2].blocks)
            worth = max(worth, best[0])  # it is lost after those before it
            yield worth, best[1], best[2]


def cuts(
    wanted: Iterable[int], start: int, end: int, spans: Sequence[Span], ends_prompt: bool, apart: int = 32
) -> list[tuple[int, Kind]]:
    """Return the sizes between `start` and `end` at which a pass should end to keep a state, and why.

    At the end of a prompt there is one 32 tokens before, because the next turn often drops what a chat
    template appends to begin an answer. A span, whose rows would be computed again, ends before it. Cuts are
    at least `apart` tokens apart.
    """
    reasons = dict[int, Kind]()
    if ends_prompt:
        early = end - 32
        early = next((span.end for span in spans if span.start < early < span.end < end), early)
        reasons = {early: "end"}
    for size in sorted(wanted, reverse=True):
        if not any(span.start < size < span.end for span in spans):
            reasons = {other: kind for other, kind in reasons.items() if abs(other - size) >= apart}
            reasons[size] = "turn"
    return [(size, reasons[size]) for size in sorted(reasons) if start < size < end]
