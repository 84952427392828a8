"""Trees of drafts where they pay: who drafts them, and the policy that asks for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mlx_spec.drafters import DrafterSource
from mlx_spec.drafters.medusa import Medusa, MedusaSource, MedusaTree
from mlx_spec.reuse import Decoding
from mlx_spec.tuning.tree import Branching, Guesses
from mlx_spec.tuning.tuner import Tuner


class Branches:
    """What the sequences of a pair share of trees."""

    def __init__(self, sources: Sequence[DrafterSource]) -> None:
        self._sources = {i: source for i, source in enumerate(sources) if isinstance(source, MedusaSource)}
        self._guesses = {i: Guesses() for i in self._sources}

    def offered(self, decoding: Decoding, policies: object) -> Decoding:
        """`decoding` with trees, where its target takes them and `policies` has measured costs."""
        if not (self._sources and isinstance(policies, Tuner)) or decoding.target.refuses_trees():
            return decoding
        tuner, target, policy, drafters = policies, decoding.target, decoding.policy, list(decoding.drafters)
        for i, source in self._sources.items():
            medusa = drafters[i]
            assert isinstance(medusa, Medusa)
            policy = asked = Branching(
                policy, target, lambda: tuner.costs, self._guesses[i], i, source.height
            )
            drafters[i] = MedusaTree(medusa, asked.tree)
        return replace(decoding, drafters=tuple(drafters), policy=policy)
