"""The places that one sequence can go back to when rows of windows are gone, or its state is recurrent.

A place costs as much as the windows or the states: as K/V of some hundred to 20,000 tokens. So their bytes
are bounded, and those whose loss costs least to read again go first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import get_args

import mlx.core as mx

from mlx_spec.model.caches import Checkpoint, Kind
from mlx_spec.prompt import Span


class Checkpoints:
    """The checkpoints of one sequence, in the order of their sizes."""

    def __init__(self, places: Iterable[Checkpoint] = ()) -> None:
        self._places = list(places)

    def __iter__(self) -> Iterator[Checkpoint]:
        return iter(self._places)

    def arrays(self) -> list[mx.array]:
        """Return all arrays."""
        return [array for place in self._places for array in place.arrays()]

    def before(self, size: int) -> Checkpoints:
        """Return the checkpoints that the first `size` tokens have. They share their arrays with these."""
        return Checkpoints(place for place in self._places if place.size <= size)

    def end_prompt(self) -> None:
        """Treat the end of the last prompt as the end of a chunk: another prompt has been read."""
        self._places = [replace(p, kind="chunk") if p.kind == "end" else p for p in self._places]

    def keep(
        self,
        places: list[Checkpoint],
        make: Callable[[int, Kind], Checkpoint],
        size: int,
        kv_bytes: int,
        ends_prompt: bool,
        apart: int,
        fewest: int = 6,
    ) -> None:
        """Keep `places` and perhaps the present one, at `size`, which `make` returns.

        There is one at the end of a prompt, and at the ends of chunks at least `apart` tokens from the place
        before, and further the longer the prompt is. Those that cost more than K and V of the tokens between
        them are at least 4 * `apart` tokens apart. Together they take at most the `kv_bytes` of the prompt in
        full attention; a short prompt may have `fewest` places, and up to twice as many if they are cheap.
        """
        gap = size - max(place.size for place in [*self._places, *places, Checkpoint(0, {}, [])])
        if ends_prompt:
            self.end_prompt()
            places = [*places, make(size, "end")]
        elif gap >= max(apart, size // 8):
            made = make(size, "chunk")
            if made.nbytes <= 2 * gap * kv_bytes // size or gap >= 4 * apart:
                places = [*places, made]
        if places:
            mx.eval([place.arrays() for place in places])
            cheap = min(2 * kv_bytes, 2 * fewest * places[-1].nbytes)
            self.add(places, max(kv_bytes, fewest * places[-1].nbytes, cheap))

    def add(self, places: Iterable[Checkpoint], most_bytes: int) -> None:
        """Add places, and drop others until all have at most `most_bytes`; of one size, one is kept."""
        rank = get_args(Kind).index
        found = sorted([*self._places, *places], key=lambda place: (place.size, rank(place.kind)))
        self._places = list({place.size: place for place in found}.values())
        excess = sum(place.nbytes for place in self._places) - most_bytes
        for _, place in self.costs():
            if excess <= 0:
                break
            self.drop(place.size)
            excess -= place.nbytes

    def drop(self, size: int) -> None:
        """Drop the place at a size."""
        self._places = [place for place in self._places if place.size != size]

    def costs(self) -> Iterator[tuple[float, Checkpoint]]:
        """Yield places in the order in which to drop them, with the tokens that the loss of each costs.

        They are the tokens from the place before it on, times the chance that a prompt parts there: less at
        the end of a chunk than at the end of a turn, or where a prompt parted before. The end of the last
        prompt is not among them.
        """
        chances = {"chunk": 1 / 8, "turn": 1.0}
        left = list(self._places)
        while True:
            sizes = [0, *(place.size for place in left)]
            costs = [
                ((place.size - before) * chances[place.kind], i)
                for i, (place, before) in enumerate(zip(left, sizes, strict=False))
                if place.kind in chances
            ]
            if not costs:
                return
            cost, i = min(costs)
            yield cost, left.pop(i)


def cuts(
    wanted: Iterable[int], start: int, end: int, spans: Sequence[Span], ends_prompt: bool, apart: int = 32
) -> list[tuple[int, Kind]]:
    """Return the sizes between `start` and `end` at which a pass should end to keep a state, and why.

    At the end of a prompt there is one 32 tokens before, because the next turn often drops what a chat
    template appends to begin an answer. A span, whose rows would be computed again, ends before it. Cuts are
    at least `apart` tokens apart.
    """
    found = dict[int, Kind]()
    if ends_prompt:
        early = end - 32
        early = next((span.end for span in spans if span.start < early < span.end < end), early)
        found = {early: "end"}
    for size in sorted(wanted, reverse=True):
        if not any(span.start < size < span.end for span in spans):
            found = {other: kind for other, kind in found.items() if abs(other - size) >= apart}
            found[size] = "turn"
    return [(size, found[size]) for size in sorted(found) if start < size < end]
