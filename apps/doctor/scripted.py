"""Drafts that are known beforehand: all right, or right but for one token, so that rows are rejected."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mlx_spec.types import Draft, Features, FeatureSpec, Sampler


class Scripted:
    """Drafts `truth`, the whole text from its prompt on."""

    needs = FeatureSpec()

    def __init__(self, truth: Sequence[int]) -> None:
        self._truth = list(truth)

    def observe(self, history: Sequence[int], features: Features) -> None:
        """Nothing to learn."""

    def draft(self, history: Sequence[int], limit: int, sampler: Sampler) -> Draft:
        """What follows in `truth`."""
        return Draft(mx.array(self._truth[len(history) : len(history) + limit], dtype=mx.int32))


class Spoiled(Scripted):
    """The same with another token in one place of each draft, in the next place each time, then in none."""

    def __init__(self, truth: Sequence[int], vocab_size: int) -> None:
        super().__init__(truth)
        self._vocab_size = vocab_size
        self._drafts = 0

    def draft(self, history: Sequence[int], limit: int, sampler: Sampler) -> Draft:
        """What follows in `truth`, one token of it spoiled."""
        tokens = self._truth[len(history) : len(history) + limit]
        at = self._drafts % (limit + 1)
        self._drafts += 1
        if at < len(tokens):
            tokens[at] = (tokens[at] + 1) % self._vocab_size
        return Draft(mx.array(tokens, dtype=mx.int32))
