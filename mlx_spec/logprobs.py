"""Log-probabilities of emitted tokens under the target's law."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Alternative:
    """A token that could have stood in a place."""

    token: int
    written: bytes  # its text; half a character is those bytes
    logprob: float


@dataclass(frozen=True)
class TokenLogprob:
    """An emitted token, and the most likely tokens in its place, the most likely first."""

    token: int
    written: bytes
    logprob: float
    top: tuple[Alternative, ...] = ()
