"""What an answer must look like, as the sampler sees it: which tokens may stand in the next places."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, Protocol, cast

import mlx.core as mx

if TYPE_CHECKING:
    from mlx_spec.grammar.matcher import CompiledGrammar
    from mlx_spec.text import Text

Kind = Literal["json_object", "json_schema", "regex", "lark"]


class Matcher(Protocol):
    """Follows one answer. Every method is a function of its arguments, whatever was asked before."""

    def allowed(self, generated: Sequence[int], drafted: Sequence[int], rows: int) -> mx.array:
        """What may stand in each of T rows, bool [T, V]; rows are conditioned as `Sampler` says.

        A row always allows something, also behind a draft token that is not allowed.
        """
        ...

    def legal(self, generated: Sequence[int], drafted: Sequence[int]) -> int:
        """How many of the draft tokens may follow, up to the first that may not."""
        ...

    def forced(self, generated: Sequence[int]) -> list[int]:
        """The tokens that must follow, as far as that is known."""
        ...


class Grammar(Protocol):
    """What answers must look like."""

    def matcher(self, prompt: Sequence[int]) -> Matcher:
        """A matcher of the answer to `prompt`, whose end may already open the model's thoughts."""
        ...

    def thinking(self, thinks: bool) -> Grammar:
        """The same for answers that may, or may not, begin with thoughts."""
        ...


class Constraint:
    """The grammar of one generation, whose history starts with `prompt_length` tokens of prompt."""

    def __init__(self, grammar: Grammar, prompt_length: int) -> None:
        self._grammar = grammar
        self._prompt_length = prompt_length
        self._matcher: Matcher | None = None
        self._asked: tuple[int, list[int], int] | None = None  # what the last mask was for
        self._mask = mx.array(True)

    def mask(self, logits: mx.array, history: Sequence[int], drafted: mx.array) -> mx.array:
        """Which of logits [T, V] may be chosen, bool [T, V]. Waits for the draft, not for the logits.

        The history only grows.
        """
        mx.async_eval(drafted)  # apart from the logits: what is evaluated together is waited for together
        mx.async_eval(logits)  # the pass of the target runs while the host looks at the draft
        if self._matcher is None:
            self._matcher = self._grammar.matcher(history[: self._prompt_length])
        tokens = read_tokens(drafted)
        asked = (len(history), tokens, logits.shape[0])
        if asked != self._asked:
            self._asked = asked
            self._mask = self._matcher.allowed(history[self._prompt_length :], *asked[1:])
        return self._mask


def read_tokens(drafted: mx.array) -> list[int]:
    """Draft tokens on the host: a grammar is followed there."""
    return cast(list[int], drafted.tolist())


def compile(
    kind: Kind, source: str, text: Text, vocab_size: int, *, seconds: float, thinks: bool = False
) -> CompiledGrammar:
    """See `matcher.compile_grammar`."""
    from mlx_spec.grammar.matcher import compile_grammar

    return compile_grammar(kind, source, text, vocab_size, seconds=seconds, thinks=thinks)
