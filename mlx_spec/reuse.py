"""A sequence that is kept between generations, and what its caches hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from mlx_spec.model.target import LMTarget
from mlx_spec.types import Drafter, DraftLengthPolicy


@dataclass(frozen=True)
class Decoding:
    """The parts of one sequence. They keep their caches from one generation to the next."""

    target: LMTarget
    drafters: tuple[Drafter, ...]
    policy: DraftLengthPolicy


@runtime_checkable
class Following(Protocol):
    """A drafter with rows of its own of what the target computed, which it cannot make again by itself."""

    def missing(self, size: int) -> int:
        """Of how many of the first `size` positions it has no row."""
        ...


@runtime_checkable
class Caching(Protocol):
    """A drafter with caches of its own."""

    @property
    def nbytes(self) -> int:
        """Bytes of its caches."""
        ...


class Held:
    """The parts of one sequence and the tokens that its caches hold.

    Before a generation `align` rewinds to what the caches share with the prompt; what a generation emits is
    noted. It may be closed at any time: the target knows how many of those tokens it holds.
    """

    def __init__(self, decoding: Decoding) -> None:
        self.decoding = decoding
        self._tokens: list[int] = []  # what the target's cache holds begins with these
        self.cold = 0  # tokens kept by the last `align` of which a drafter has no rows: it begins cold there

    @property
    def tokens(self) -> list[int]:
        """What the caches hold."""
        return self._tokens[: self.decoding.target.size]

    @property
    def nbytes(self) -> int:
        """Bytes of the caches, those of drafters included."""
        parts = (self.decoding.target, *self.decoding.drafters)
        return sum(part.nbytes for part in parts if isinstance(part, Caching))

    def shared(self, prompt: Sequence[int]) -> int:
        """How many tokens of a prompt need not be read again.

        At least one row is written anew, so that a drafter has features of this prompt.
        """
        return min(common_prefix(self.tokens, prompt), max(len(prompt) - 2, 0))

    def align(self, prompt: Sequence[int]) -> int:
        """Forget what a prompt does not begin with. Returns how many of its tokens are kept.

        They are fewer than `shared` where the target cannot go back so far. To be called before the prompt
        is read: its tokens count as held from here on, as far as the target has got with them.
        """
        kept = self.decoding.target.rewind(self.shared(prompt))
        following = (drafter for drafter in self.decoding.drafters if isinstance(drafter, Following))
        self.cold = max((drafter.missing(kept) for drafter in following), default=0)
        self._tokens = list(prompt)
        return kept

    def note(self, tokens: Sequence[int]) -> None:
        """A generation emitted `tokens`."""
        self._tokens += tokens

    def cut(self, length: int) -> None:
        """Forget what comes after the first `length` tokens of prompt and output.

        The last of them is pending, as at the end of a generation that stopped there.
        """
        del self._tokens[length:]
        self.decoding.target.rewind(min(max(length - 1, 0), self.decoding.target.size))


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    length = min(len(a), len(b))
    if list(a[:length]) == list(b[:length]):
        return length
    return next(i for i in range(length) if a[i] != b[i])
