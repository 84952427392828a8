"""Draft-length policies: how many tokens to draft in the next round, 0 included."""

from __future__ import annotations

from mlx_spec.errors import InvalidValue
from mlx_spec.types import Decision, Reason, Round

MAX_DRAFT_TOKENS = 16


class Fixed:
    """Always the same number of draft tokens."""

    def __init__(self, num_draft_tokens: int, reason: Reason = Reason.FIXED) -> None:
        if not 0 <= num_draft_tokens <= MAX_DRAFT_TOKENS:
            raise InvalidValue(
                f"num_draft_tokens is {num_draft_tokens}, it must be 0 to {MAX_DRAFT_TOKENS}: 0 is plain decoding"
            )
        self._decision = Decision(num_draft_tokens, reason)

    def decide(self) -> Decision:
        """The fixed number."""
        return self._decision

    def observe(self, round: Round) -> None:
        """Nothing to learn."""
