"""Trees of draft tokens: which token follows which.

Row 0 of the target's pass is the pending token and row j + 1 is draft token j. A token comes after the one
that it follows, and likelier guesses for a place before others; where all tokens are in depth-first order,
the first of them up to the first leaf are what a chain would hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache


@dataclass(frozen=True)
class Tree:
    """A tree of K draft tokens, T = K + 1 rows with the pending token."""

    parents: tuple[int, ...]  # [K] the row that each draft token follows

    def __post_init__(self) -> None:
        assert all(0 <= row <= j for j, row in enumerate(self.parents)), f"no tree: {self.parents}"

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """[T] tokens behind the pending one, that of the row included."""
        depths = [0]
        for row in self.parents:
            depths.append(depths[row] + 1)
        return tuple(depths)

    @property
    def height(self) -> int:
        """Tokens of the longest path."""
        return max(self.depths)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """[T] how many guesses for the same place come before that of the row."""
        return (0, *(self.parents[:j].count(row) for j, row in enumerate(self.parents)))

    @cached_property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """By row: the rows from the pending token to it, both included."""
        paths: list[tuple[int, ...]] = [(0,)]
        for j, row in enumerate(self.parents):
            paths.append((*paths[row], j + 1))
        return tuple(paths)

    @cached_property
    def segments(self) -> tuple[tuple[int, ...], ...]:
        """All rows, in runs in which each follows the one before it."""
        runs: list[list[int]] = [[0]]
        for j, row in enumerate(self.parents):
            if row == j:
                runs[-1].append(j + 1)
            else:
                runs.append([j + 1])
        return tuple(tuple(run) for run in runs)

    def widths(self, ranks: Sequence[int]) -> list[int]:
        """How many guesses there are for each place of the path with these ranks and for the one behind."""
        row, widths = 0, [self.parents.count(0)]
        for rank in ranks:
            row = [j + 1 for j, parent in enumerate(self.parents) if parent == row][rank]
            widths.append(self.parents.count(row))
        return widths

    def above(self) -> list[list[bool]]:
        """[T, T] whether the column's row is on the path to the row, itself included."""
        rows = range(len(self.paths))
        return [[other in path for other in rows] for path in self.paths]

    def elders(self) -> list[list[bool]]:
        """[K, K] whether the column's token is an earlier guess for the same place."""
        numbered = list(enumerate(self.parents))
        return [[row == other and i < j for i, other in numbered] for j, row in numbered]


@lru_cache(maxsize=256)
def tree_of(parents: tuple[int, ...]) -> Tree:
    """The tree with these parents, with all that is known of it."""
    return Tree(parents)


@dataclass(frozen=True)
class Growth:
    """Places for draft tokens, the likeliest first, so that the first of them are a tree for any number."""

    paths: tuple[tuple[int, ...], ...]  # each by ranks from the first place on
    reach: tuple[float, ...]  # how often the whole path is right

    def tree(self, nodes: int) -> Tree:
        """The first `nodes` of them, in depth-first order; fewer where there are no more."""
        ordered = [(), *sorted(self.paths[:nodes])]
        return tree_of(tuple(ordered.index(path[:-1]) for path in ordered[1:]))


def grown(nodes: int, rates: Sequence[Sequence[float]]) -> Growth:
    """The likeliest `nodes` places, from how often each guess for one is right: by depth, the best first.

    Medusa's own trees are made like this (arXiv:2401.10774), from counts over a calibration text.
    """
    paths, reach = list[tuple[int, ...]](), list[float]()
    front: dict[tuple[int, ...], float] = {(0,): rates[0][0]}  # places next to those chosen
    while front and len(paths) < nodes:
        best = max(front, key=lambda path: front[path])
        likely = front.pop(best)
        paths.append(best)
        reach.append(likely)
        depth, rank = len(best), best[-1]
        if depth < len(rates):
            front[(*best, 0)] = likely * rates[depth][0]
        if rank + 1 < len(rates[depth - 1]):
            behind = likely / rates[depth - 1][rank] if rates[depth - 1][rank] else 0.0
            front[(*best[:-1], rank + 1)] = behind * rates[depth - 1][rank + 1]
    return Growth(tuple(paths), tuple(reach))
