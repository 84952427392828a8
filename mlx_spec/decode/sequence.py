"""A sequence that is kept between answers, and the tokens that its caches hold."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import mlx.core as mx
import numpy as np

from mlx_spec.errors import InvalidValue
from mlx_spec.model.target import LMTarget
from mlx_spec.prompt import Identity, Prompt, shared_prefix
from mlx_spec.types import CacheState, Copy, Drafter, DraftLengthPolicy


@dataclass(frozen=True)
class Reread:
    """Tokens of a prompt that are read again, although they were read before, and why.

    "evicted": their caches were dropped for others. "no place": they are in memory, but without a rewind
    point where the prompt parts from them.
    """

    tokens: int
    reason: Literal["evicted", "no place"]


class CachedSequence:
    """The target, the drafters and the policy of one sequence, and the identity of the tokens in its caches.

    They keep their caches between answers. Call `rewind_to_prefix` before an answer and `append` with the
    tokens that it emits. The answer may be closed at any time: the target knows how many of its tokens it
    holds. A drafter that failed is dropped with the others; `Pair.prepare` opens others for the next one.
    """

    def __init__(self, target: LMTarget, drafters: tuple[Drafter, ...], policy: DraftLengthPolicy) -> None:
        self.target, self.drafters, self.policy = target, drafters, policy
        self.draft_error: Exception | None = None  # of a drafter that failed
        self._identity: Identity = np.zeros(0, np.int64)  # begins with what the target's cache holds
        self._emitted: list[int] = []  # tokens after it
        self.question_end = 0  # where the last question of its prompt ends
        self._pinned: set[int] = set()  # sizes where the next prompt leaves rewind points, beside its turns
        self.reread: Reread | None = None  # of the prompt that it was last lent for; None if nothing is
        self.drafter_missing = 0  # tokens kept by the last rewind that a drafter has not processed

    def drop_drafters(self, error: Exception) -> None:
        """Have no drafters until others are opened: their caches are not known after an error."""
        self.drafters, self.draft_error = (), error

    @property
    def identity(self) -> Identity:
        """Return the tokens in the caches, with numbers below 0 for rows that are not text."""
        return self._whole_identity()[: self.target.size]

    @property
    def nbytes(self) -> int:
        return self.target.nbytes + sum(drafter.nbytes for drafter in self.drafters)

    @property
    def fork_bytes(self) -> int:
        """Return the bytes of a fork of all tokens: it shares the rewind points."""
        parked = self.target.rewind_points.parked
        windows = 0 if parked is None else parked.nbytes
        return self.nbytes - sum(self.target.pinned.values()) + windows

    def shared(self, prompt: Prompt) -> int:
        """Return how many tokens of a prompt the caches already hold, without cutting a span.

        At least one row is left to write, so that a drafter gets features of this prompt.
        """
        return prompt.whole(min(shared_prefix(self.identity, prompt.identity), max(len(prompt) - 2, 0)))

    def match(self, prompt: Prompt) -> tuple[int, int]:
        """Return what `shared` returns, and how many tokens of a prompt `rewind_to_prefix` would keep."""
        shared = self.shared(prompt)
        return shared, reusable(self.target.reach(), shared) if shared else 0

    def reusable(self, prompt: Prompt) -> int:
        """Return how many tokens of a prompt `rewind_to_prefix` would keep."""
        return self.match(prompt)[1]

    def fork_from(self, origin: CachedSequence, prompt: Prompt, *, in_use: bool) -> bool:
        """Copy what another sequence has of a prompt. This one must be new, of the same pair.

        Rows are copied in the first steps of a prefill. If the origin is `in_use`, nothing refers to its rows
        before: its next pass would copy whole buffers. Returns False, and copies nothing, if a drafter cannot
        save its caches.
        """
        try:
            states = origin._drafter_states()
        except InvalidValue:
            return False
        target, shared = self.target, origin.shared(prompt)
        kept = target.fork_from(origin.target, shared, len(prompt) - shared)
        self._identity = origin.identity[:kept]
        copies = self._restore_drafters(states, origin.drafters if in_use else ())
        if in_use:
            target.follow(origin.target, copies)
        return True

    def state(self) -> CacheState:
        """Return the state of all caches. Raises InvalidValue if a drafter cannot save its caches."""
        drafters = {str(i): state for i, state in enumerate(self._drafter_states())}
        return CacheState.join({"target": self.target.state(), **drafters})

    def restore(self, identity: Sequence[int] | Identity, state: CacheState) -> None:
        """Take over a state and its identity. This sequence must be new, of the same pair."""
        self.target.restore(state.part("target"))
        self._restore_drafters([state.part(str(i)) for i in range(len(self.drafters))])
        self._identity = np.array(identity, np.int64)

    def _drafter_states(self) -> list[CacheState]:
        """Return the states of the drafters. Raises InvalidValue if one cannot be saved."""
        try:
            return [drafter.state() for drafter in self.drafters]
        except InvalidValue:
            raise
        except Exception as error:
            self.drop_drafters(error)
            raise InvalidValue(f"a drafter failed and cannot be saved ({error})") from error

    def _restore_drafters(self, states: Sequence[CacheState], in_use: Sequence[Drafter] = ()) -> list[Copy]:
        """Let the drafters take over states. If one cannot, the next answer begins without them.

        Returns what copies the rows of those that are `in_use`.
        """
        try:
            for drafter, state in zip(self.drafters, states, strict=True):
                drafter.restore(state)
            copies = list[Copy]()
            for drafter, origin in zip(self.drafters, in_use, strict=False):
                copies += (later := drafter.follow(origin))
                if not later:
                    mx.eval(list(drafter.state().arrays.values()))
            return copies
        except Exception as error:
            self.drop_drafters(error)
            return []

    def rewind_to_prefix(self, prompt: Prompt) -> int:
        """Forget all tokens after the common prefix with `prompt`. Return how many tokens are kept.

        They are fewer than `shared` if the target cannot go back that far. From then on the identity is that
        prompt's, as far as the target has processed it.
        """
        shared = self.shared(prompt)
        kept = self.target.rewind(shared)
        if self.reread is None and shared > kept:
            self.reread = Reread(shared - kept, "no place")
        opening = min(prompt.turns, default=len(prompt))
        self.question_end = max(prompt.turns, default=len(prompt))
        self.target.pin_at(sorted({*prompt.turns, *self._pinned}), len(prompt), opening)
        self._pinned = set()
        try:
            self.drafter_missing = max((drafter.missing(kept) for drafter in self.drafters), default=0)
        except Exception:  # its drafts will fail, too
            self.drafter_missing = kept
        self._identity, self._emitted = prompt.identity, []
        return kept

    def reread_counts(self) -> tuple[int, int]:
        """Return once what of the prompt is read again, by reason: evicted, no place."""
        reread, self.reread = self.reread, None
        if reread is None:
            return 0, 0
        return (reread.tokens, 0) if reread.reason == "evicted" else (0, reread.tokens)

    def pin_at(self, sizes: Iterable[int]) -> None:
        """Let the prompt that is read now, or the next one, leave rewind points at these sizes."""
        self._pinned |= set(sizes)
        self.target.pin_at(sorted(self._pinned))

    def coming(self, prompt: Prompt) -> int:
        """Return how many tokens of a prompt it will have once its own is read; 0 if that is read."""
        if self._emitted or self.target.size >= len(self._identity) - 1:
            return 0
        return shared_prefix(self._identity, prompt.identity)

    def append(self, tokens: Sequence[int]) -> None:
        self._emitted += tokens

    def truncate(self, length: int) -> None:
        """Forget all after the first `length` tokens of prompt and output.

        The last of them is pending, as at the end of an answer that stopped there.
        """
        self._identity = self._whole_identity()[:length]
        self.target.rewind(min(max(length - 1, 0), self.target.size))

    def _whole_identity(self) -> Identity:
        """Return the identity, with tokens that the caches do not hold yet."""
        if self._emitted:
            self._identity = np.concatenate([self._identity, np.array(self._emitted, np.int64)])
            self._emitted = []
        return self._identity


def reusable(reach: Sequence[tuple[int, int]], shared: int) -> int:
    """Return how many of `shared` tokens a target with this reach can keep."""
    return max((min(shared, last) for first, last in reach if first <= shared), default=0)
