"""Trees of draft tokens: which token follows which. Pure.

Row 0 of the target's pass is the pending token and row j + 1 is draft token j. A token comes after its
parent, and likelier guesses for a place come before others. In depth-first order, the tokens up to the first
leaf are those of a chain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache


@dataclass(frozen=True)
class Tree:
    """A tree of K draft tokens: T = K + 1 rows with the pending token."""

    parents: tuple[int, ...]  # [K] the row that each draft token follows

    def __post_init__(self) -> None:
        assert all(0 <= row <= j for j, row in enumerate(self.parents)), f"no tree: {self.parents}"

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Return the distance of every row from the pending token, [T]."""
        depths = [0]
        for row in self.parents:
            depths.append(depths[row] + 1)
        return tuple(depths)

    @property
    def height(self) -> int:
        """Return the number of draft tokens of the longest path."""
        return max(self.depths)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Return for every row how many guesses for the same place come before it, [T]."""
        return (0, *(self.parents[:j].count(row) for j, row in enumerate(self.parents)))

    @cached_property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """Return for every row the rows from the pending token to it, both included."""
        paths: list[tuple[int, ...]] = [(0,)]
        for j, row in enumerate(self.parents):
            paths.append((*paths[row], j + 1))
        return tuple(paths)

    @cached_property
    def segments(self) -> tuple[tuple[int, ...], ...]:
        """Return all rows in runs; in a run each row follows the one before it."""
        runs: list[list[int]] = [[0]]
        for j, row in enumerate(self.parents):
            if row == j:
                runs[-1].append(j + 1)
            else:
                runs.append([j + 1])
        return tuple(tuple(run) for run in runs)

    def ancestors(self) -> list[list[bool]]:
        """Return [T, T]: True where the column's row is on the path to the row, itself included."""
        rows = range(len(self.paths))
        return [[other in path for other in rows] for path in self.paths]

    def earlier_siblings(self) -> list[list[bool]]:
        """Return [K, K]: True where the column's token is an earlier guess for the same place."""
        numbered = list(enumerate(self.parents))
        return [[row == other and i < j for i, other in numbered] for j, row in numbered]


@lru_cache(maxsize=256)
def tree_of(parents: tuple[int, ...]) -> Tree:
    """Return the tree with these parents, from a cache that keeps its tables."""
    return Tree(parents)


@dataclass(frozen=True)
class TreeTemplate:
    """Places for draft tokens, the likeliest first: the first n of them are a tree for every n."""

    paths: tuple[tuple[int, ...], ...]  # each place as the ranks on the path to it
    reach: tuple[float, ...]  # probability that the whole path is accepted

    def tree(self, nodes: int) -> Tree:
        """Return the tree of the first `nodes` places, in depth-first order."""
        ordered = [(), *sorted(self.paths[:nodes])]
        return tree_of(tuple(ordered.index(path[:-1]) for path in ordered[1:]))


def tree_template(nodes: int, rates: Sequence[Sequence[float]]) -> TreeTemplate:
    """Return the likeliest `nodes` places. `rates[depth][rank]`: acceptance of a guess, best rank first.

    Medusa builds its trees like this (arXiv:2401.10774), from counts over a calibration text.
    """
    paths, reach = list[tuple[int, ...]](), list[float]()
    front: dict[tuple[int, ...], float] = {(0,): rates[0][0]}  # places next to the chosen ones
    while front and len(paths) < nodes:
        best = max(front, key=lambda path: front[path])
        likely = front.pop(best)
        paths.append(best)
        reach.append(likely)
        depth, rank = len(best), best[-1]
        if depth < len(rates):
            front[(*best, 0)] = likely * rates[depth][0]
        if rank + 1 < len(rates[depth - 1]):
            parent = likely / rates[depth - 1][rank] if rates[depth - 1][rank] else 0.0
            front[(*best[:-1], rank + 1)] = parent * rates[depth - 1][rank + 1]
    return TreeTemplate(tuple(paths), tuple(reach))
