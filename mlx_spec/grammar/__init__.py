"""Grammars of answers: which tokens may come next. Samplers and drafters need these protocols only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, Protocol, cast

if TYPE_CHECKING:
    import mlx.core as mx

GrammarKind = Literal["json_object", "json_schema", "regex", "lark"]


class Matcher(Protocol):
    """Follows one answer. The result of every method depends on its arguments alone."""

    def allowed(self, generated: Sequence[int], drafted: Sequence[int], rows: int) -> mx.array:
        """Return which tokens may stand in each of T rows, bool [T, V]. `types.Sampler` defines the rows.

        Every row allows some token, also after a draft token that is not allowed.
        """

    def legal(self, generated: Sequence[int], drafted: Sequence[int]) -> int:
        """Return how many of the draft tokens may follow, up to the first that may not."""

    def forced(self, generated: Sequence[int]) -> list[int]:
        """Return the tokens that must follow, as far as they are known."""

    def after_unread(self, generated: Sequence[int]) -> tuple[int, mx.array, mx.array] | None:
        """Return what may stand after a token that only the device knows, if one token decides that.

        That token, and the masks [V] after it and after any other one. None if the host has to read.
        """


class Grammar(Protocol):
    """The form that answers must have."""

    def matcher(self, prompt: Sequence[int]) -> Matcher:
        """Return a matcher of the answer to `prompt`, whose end may already open the model's thinking."""

    def thinking(self, thinks: bool) -> Grammar:
        """Return the same grammar for answers that may begin with thinking, or may not."""

    def with_calls(self, open: int, close: int) -> Grammar:
        """Return the same grammar, which lets any text stand outside of calls between these tokens."""


def read_tokens(drafted: mx.array) -> list[int]:
    """Copy draft tokens to the host, where a grammar is followed."""
    return cast(list[int], drafted.tolist())
