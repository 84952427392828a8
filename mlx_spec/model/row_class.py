"""The passes whose rows have the bits of plain decoding: a row class.

A device chooses a kernel by the rows of a pass. Two kernels add in another order, so in half precision their
last bits differ, and near ties may fall otherwise. Passes whose row counts are in one class agree bit by bit.
So plain decoding runs the fewest rows of the class, and drafts stay in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mlx_spec.hub.catalog import Exact
from mlx_spec.types import MAX_DRAFT_TOKENS


@dataclass(frozen=True)
class RowClass:
    """The row counts that agree with plain decoding, as they were measured.

    Without `limits` no pass is limited or padded. Then differences are too small to change a token, because
    activations are in float32, or `doubt` says why drafts are only likely to keep the text.
    """

    base: int = 1  # rows of a plain pass: the fewest of the class
    # Ascending pairs of keys and rows: from these keys on, a pass of one sequence has at most these rows.
    limits: tuple[tuple[int, int], ...] = ()
    shared: int = 0  # the most rows of a pass of several sequences; 0 if none agrees
    fewest: int = 1  # of one sequence in such a pass
    edges: tuple[int, ...] = ()  # numbers of keys from which on attention has another kernel
    cost: float = 1.0  # time of a plain pass, in passes of one row
    doubt: str | None = None  # why drafts are only likely to keep the text; None if they keep it
    differs: str | None = None  # what differs first in passes of more rows
    compared: tuple[int, int] = (0, 0)  # rows of whole passes, and layers alone, that were compared
    is_required: bool = False  # sequences share no pass that does not agree

    @property
    def is_bitwise(self) -> bool:
        """Return True if passes are limited to those that agree bit by bit."""
        return bool(self.limits)

    @property
    def most(self) -> int:
        """Return the most rows of a pass of one sequence, at any length."""
        return max((rows for _, rows in self.limits), default=MAX_DRAFT_TOKENS + 1)

    def most_rows(self, size: int) -> int:
        """Return the most rows of the next pass of a sequence of `size` tokens."""
        if not self.limits:
            return MAX_DRAFT_TOKENS + 1
        most = next(rows for keys, rows in reversed(self.limits) if keys <= size)
        # Row j of a draft is compared with a plain pass over `size + j + base` keys. No edge may lie between.
        first = size + self.base
        return max(min([most, *(edge - first for edge in self.edges if edge >= first)]), 1)

    def most_shared(self, sizes: Sequence[int]) -> int:
        """Return the most rows of each sequence in a pass of sequences with these sizes; 0 if none agrees."""
        if not self.limits:
            return MAX_DRAFT_TOKENS + 1
        rows = min(self.shared // len(sizes), *map(self.most_rows, sizes))
        first, last = min(sizes) + 1, max(sizes) + rows + self.base
        is_crossed = any(first <= edge <= last for edge in self.edges)
        return 0 if rows < self.fewest or is_crossed else rows

    def must_part(self, sizes: Sequence[int], replayed: int = 0) -> bool:
        """Return True if sequences with these sizes may not share the next passes.

        A pass writes `replayed` rows more. A round begins up to two passes, the second one after a token that
        is not committed yet.
        """
        most = min(self.most_shared([size + more for size in sizes]) for more in (0, 1, 2))
        return self.is_required and most <= replayed

    def under(self, exact: Exact, most_cost: float = 1.05) -> RowClass:
        """Return the class to decode with, for a choice of `--exact`.

        "auto" takes a class of two rows if a plain pass costs at most `most_cost` passes of one row.
        """
        if exact == "off":
            return RowClass(doubt="--exact off")
        if exact == "on":
            if self.doubt is None:
                return replace(self, is_required=True)
            limits = ((0, 1),)
            return RowClass(limits=limits, is_required=True, differs=self.differs, compared=self.compared)
        if exact == "auto" and self.cost > most_cost:
            share = f"two rows a pass take {self.cost - 1:.0%} longer here"
            return RowClass(doubt=f"{share}; --exact on takes them", compared=self.compared)
        return self

    @property
    def words(self) -> str:
        """Return what was measured, as users read it after "exact"."""
        rows, layers = self.compared
        if self.limits:
            plain = f"plain decoding runs {self.base} row{'s' * (self.base > 1)} a pass"
            same = f"0 of {rows} rows and 0 of {layers} layers differ bitwise"
            return f"{plain}; {same} in passes of up to {self.most} rows"
        if self.doubt is None:
            return "activations are in float32, where rounding is too small to change a token"
        return f"NO: {self.doubt}" + (f" ({self.differs})" if self.differs else "")

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> RowClass:
        """Return a class saved by `asdict`. Raises KeyError, TypeError or ValueError if it is damaged."""
        limits = tuple((int(keys), int(rows)) for keys, rows in saved["limits"])
        rows, layers = map(int, saved["compared"])
        base, shared, fewest = (int(saved[name]) for name in ("base", "shared", "fewest"))
        doubt, differs = (None if saved[name] is None else str(saved[name]) for name in ("doubt", "differs"))
        edges, cost = tuple(map(int, saved["edges"])), float(saved["cost"])
        row_class = cls(base, limits, shared, fewest, edges, cost, doubt, differs, (rows, layers))
        is_sound = (
            1 <= base <= 2 and 1 <= cost < 100 and all(0 < rows <= MAX_DRAFT_TOKENS + 1 for _, rows in limits)
        )
        if not is_sound or (limits and limits[0][0]) or bool(limits) == bool(row_class.doubt):
            raise ValueError("it holds a number that cannot have been measured")
        return row_class
