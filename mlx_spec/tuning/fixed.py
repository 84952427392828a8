"""The policy of people who want a certain draft length."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_spec.errors import InvalidValue
from mlx_spec.types import MAX_DRAFT_TOKENS, Choice, Decision, Reason, Round


class Fixed:
    """Always the same number of draft tokens, from the first drafter that has any."""

    def __init__(self, num_draft_tokens: int, reason: Reason = Reason.FIXED, drafters: int = 1) -> None:
        if not 0 <= num_draft_tokens <= MAX_DRAFT_TOKENS:
            raise InvalidValue(
                f"num_draft_tokens is {num_draft_tokens}, it must be 0 to {MAX_DRAFT_TOKENS}: "
                "0 is plain decoding"
            )
        choices = tuple(Choice(drafter, num_draft_tokens) for drafter in range(drafters))
        self._decision = Decision(choices if num_draft_tokens else (), reason)

    def begin(self) -> None:
        """Nothing to prepare."""

    def decide(self, history: Sequence[int]) -> Decision:
        """The fixed number."""
        return self._decision

    def cut(self, drafter: int, confidence: Sequence[float]) -> int:
        """All of them."""
        return len(confidence)

    def observe(self, round: Round) -> None:
        """Nothing to learn."""
