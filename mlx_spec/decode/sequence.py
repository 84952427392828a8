"""A sequence that is kept between generations, and the tokens that its caches hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mlx_spec.model.target import LMTarget
from mlx_spec.prompt import Identity, Prompt, shared_prefix
from mlx_spec.types import CacheState, Drafter, DraftLengthPolicy


@dataclass(frozen=True)
class SequenceParts:
    """The target, the drafters and the policy of one sequence. They keep their caches between generations."""

    target: LMTarget
    drafters: tuple[Drafter, ...]
    policy: DraftLengthPolicy


class CachedSequence:
    """A sequence, and the identity of the tokens that its caches hold.

    Call `rewind_to_prefix` before a generation and `append` with the tokens that it emits. The generation may
    be closed at any time: the target knows how many of its tokens it holds.
    """

    def __init__(self, parts: SequenceParts) -> None:
        self.parts = parts
        self._identity: Identity = np.zeros(0, np.int64)  # begins with what the target's cache holds
        self._emitted: list[int] = []  # tokens after it
        self.drafter_missing = 0  # tokens kept by the last rewind that a drafter has not processed

    @property
    def identity(self) -> Identity:
        """Return the tokens in the caches, with numbers below 0 for rows that are not text."""
        return self._whole_identity()[: self.parts.target.size]

    @property
    def nbytes(self) -> int:
        """Return the bytes of the caches, with the drafters' caches."""
        return self.parts.target.nbytes + sum(drafter.nbytes for drafter in self.parts.drafters)

    def shared(self, prompt: Prompt) -> int:
        """Return how many tokens of a prompt the caches already hold, without cutting a span.

        At least one row is left to write, so that a drafter gets features of this prompt.
        """
        return prompt.whole(min(shared_prefix(self.identity, prompt.identity), max(len(prompt) - 2, 0)))

    def reusable(self, prompt: Prompt) -> int:
        """Return how many tokens of a prompt `rewind_to_prefix` would keep."""
        return reusable(self.parts.target.reach(), self.shared(prompt))

    def state(self) -> CacheState:
        """Return the state of all caches. Raises InvalidValue if a drafter cannot save its caches."""
        drafters = {str(i): drafter.state() for i, drafter in enumerate(self.parts.drafters)}
        return CacheState.join({"target": self.parts.target.state(), **drafters})

    def restore(self, identity: Sequence[int] | Identity, state: CacheState) -> None:
        """Take over a state and its identity. This sequence must be new, with the same kinds of parts."""
        self.parts.target.restore(state.part("target"))
        for i, drafter in enumerate(self.parts.drafters):
            drafter.restore(state.part(str(i)))
        self._identity = np.array(identity, np.int64)

    def rewind_to_prefix(self, prompt: Prompt) -> int:
        """Forget all tokens after the common prefix with `prompt`. Return how many tokens are kept.

        They are fewer than `shared` if the target cannot go back that far. From then on the identity is that
        prompt's, as far as the target has processed it.
        """
        kept = self.parts.target.rewind(self.shared(prompt))
        self.drafter_missing = max((drafter.missing(kept) for drafter in self.parts.drafters), default=0)
        self._identity, self._emitted = prompt.identity, []
        return kept

    def append(self, tokens: Sequence[int]) -> None:
        """Record the tokens that a generation emitted."""
        self._emitted += tokens

    def truncate(self, length: int) -> None:
        """Forget all after the first `length` tokens of prompt and output.

        The last of them is pending, as at the end of a generation that stopped there.
        """
        self._identity = self._whole_identity()[:length]
        self.parts.target.rewind(min(max(length - 1, 0), self.parts.target.size))

    def _whole_identity(self) -> Identity:
        """Return the identity, with tokens that the caches do not hold yet."""
        if self._emitted:
            self._identity = np.concatenate([self._identity, np.array(self._emitted, np.int64)])
            self._emitted = []
        return self._identity


def reusable(reach: Sequence[tuple[int, int]], shared: int) -> int:
    """Return how many of `shared` tokens a target with this reach can keep."""
    return max((min(shared, last) for first, last in reach if first <= shared), default=0)
