"""A fixed draft length, for people who want one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mlx_spec.errors import InvalidValue
from mlx_spec.types import MAX_DRAFT_TOKENS, Choice, Decision, Reason, RequestDrafter, Round


class FixedPolicy:
    """Draft always the same number of tokens, with the first drafter that has any.

    The drafters of a request come first, with the same limit. With 0 tokens nothing is drafted at all. With
    `ahead`, every draft that is verified is also drafted ahead of.
    """

    def __init__(
        self, num_draft_tokens: int, reason: Reason = Reason.FIXED, drafters: int = 1, ahead: bool = False
    ) -> None:
        is_integer = isinstance(num_draft_tokens, (int, np.integer))
        if not is_integer or not 0 <= num_draft_tokens <= MAX_DRAFT_TOKENS:
            raise InvalidValue(
                f"num_draft_tokens is {num_draft_tokens}, it must be 0 to {MAX_DRAFT_TOKENS}: "
                "0 is plain decoding"
            )
        self._length, self._drafters, self._reason, self._ahead = num_draft_tokens, drafters, reason, ahead
        self.begin()

    def policy(self, clock: object = None, gains: object = None) -> FixedPolicy:
        """Return a policy for a new sequence, as `AdaptivePolicies.policy` does."""
        return FixedPolicy(self._length, self._reason, self._drafters, self._ahead)

    def begin(self, request_drafters: Sequence[RequestDrafter] = ()) -> None:
        count = self._drafters + len(request_drafters)
        order = [*range(self._drafters, count), *range(self._drafters)]
        length, ahead = self._length, self._ahead
        choices = tuple(Choice(drafter, length, ahead) for drafter in order) if length else ()
        self._decision = Decision(choices, self._reason)

    def decide(self, history: Sequence[int]) -> Decision:
        return self._decision

    def observe(self, round: Round) -> None:
        """Learn nothing."""
