"""The policy of people who want a certain draft length."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_spec.errors import InvalidValue
from mlx_spec.types import MAX_DRAFT_TOKENS, Choice, Decision, Reason, RequestDrafter, Round


class Fixed:
    """Drafts the same number of tokens in every round, with the first drafter that has any.

    Drafters of the request come first. With Reason.DISABLED nothing is drafted at all.
    """

    def __init__(self, num_draft_tokens: int, reason: Reason = Reason.FIXED, drafters: int = 1) -> None:
        if not 0 <= num_draft_tokens <= MAX_DRAFT_TOKENS:
            raise InvalidValue(
                f"num_draft_tokens is {num_draft_tokens}, it must be 0 to {MAX_DRAFT_TOKENS}: "
                "0 is plain decoding"
            )
        self._limit, self._reason, self._drafters = num_draft_tokens, reason, drafters
        self.begin()

    def policy(self) -> Fixed:
        """Return this policy, which has no state between answers."""
        return self

    def begin(self, request_drafters: Sequence[RequestDrafter] = ()) -> None:
        """Begin an answer with the drafters of its request."""
        count = len(request_drafters)
        order = [*range(self._drafters, self._drafters + count), *range(self._drafters)]
        choices = tuple(Choice(drafter, self._limit) for drafter in order if self._limit)
        self._decision = Decision(choices, self._reason)

    def decide(self, history: Sequence[int]) -> Decision:
        """Return the same decision as ever."""
        return self._decision

    def observe(self, round: Round) -> None:
        """Learn nothing."""
