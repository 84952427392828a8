"""A sequence that is kept between generations, and the tokens that its caches hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlx_spec.model.target import LMTarget
from mlx_spec.prompt import Prompt
from mlx_spec.tokenizer import common_prefix
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
        self._identity: list[int] = []  # begins with the identity of the tokens in the target's cache
        self.drafter_missing = 0  # tokens kept by the last rewind that a drafter has not processed

    @property
    def identity(self) -> list[int]:
        """Return the tokens in the caches, with numbers below 0 for rows that are not text."""
        return self._identity[: self.parts.target.size]

    @property
    def nbytes(self) -> int:
        """Return the bytes of the caches, with the drafters' caches."""
        return self.parts.target.nbytes + sum(drafter.nbytes for drafter in self.parts.drafters)

    def shared(self, prompt: Prompt) -> int:
        """Return how many tokens of a prompt the caches already hold, without cutting a span.

        At least one row is left to write, so that a drafter gets features of this prompt.
        """
        return prompt.whole(min(common_prefix(self.identity, prompt.identity), max(len(prompt) - 2, 0)))

    def reusable(self, prompt: Prompt) -> int:
        """Return how many tokens of a prompt `rewind_to_prefix` would keep."""
        return reusable(self.parts.target.reach(), self.shared(prompt))

    def state(self) -> CacheState:
        """Return the state of all caches. Raises InvalidValue if a drafter cannot save its caches."""
        drafters = {str(i): drafter.state() for i, drafter in enumerate(self.parts.drafters)}
        return CacheState.join({"target": self.parts.target.state(), **drafters})

    def restore(self, identity: Sequence[int], state: CacheState) -> None:
        """Take over a state and its identity. This sequence must be new, with the same kinds of parts."""
        self.parts.target.restore(state.part("target"))
        for i, drafter in enumerate(self.parts.drafters):
            drafter.restore(state.part(str(i)))
        self._identity = list(identity)

    def rewind_to_prefix(self, prompt: Prompt) -> int:
        """Forget all tokens after the common prefix with `prompt`. Return how many tokens are kept.

        They are fewer than `shared` if the target cannot go back that far. From then on the identity is that
        prompt's, as far as the target has processed it.
        """
        kept = self.parts.target.rewind(self.shared(prompt))
        self.drafter_missing = max((drafter.missing(kept) for drafter in self.parts.drafters), default=0)
        self._identity = list(prompt.identity)
        return kept

    def append(self, tokens: Sequence[int]) -> None:
        """Record the tokens that a generation emitted."""
        self._identity += tokens

    def truncate(self, length: int) -> None:
        """Forget all after the first `length` tokens of prompt and output.

        The last of them is pending, as at the end of a generation that stopped there.
        """
        del self._identity[length:]
        self.parts.target.rewind(min(max(length - 1, 0), self.parts.target.size))


def reusable(reach: Sequence[tuple[int, int]], shared: int) -> int:
    """Return how many of `shared` tokens a target with this reach can keep."""
    return max((min(shared, last) for first, last in reach if first <= shared), default=0)
