"""A sampler that remembers under which law the target drew: log-probabilities with speculation on."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mlx_spec.logprobs import TokenLogprob, figures, read
from mlx_spec.sampling import Law
from mlx_spec.text import Text
from mlx_spec.types import Draft, Sampler
from mlx_spec.verify_tree import straightened


class Recorder:
    """Draws as `sampler` does and keeps what tells the log-probabilities of what was drawn, until it is read.

    They are those of the target under `law` (one of its own, since a law counts tokens): with penalties, bias
    and grammar, before temperature and filters, for accepted, recovered, bonus and plain tokens alike. Only
    what the target draws is kept: drafters draw with `drafting`. Nothing is evaluated before it is read but
    for single draws, so that reading one never waits for the token behind it.
    """

    def __init__(self, sampler: Sampler, law: Law, text: Text, top: int) -> None:
        self._sampler = sampler
        self._law = law
        self._text = text
        self._top = top
        self._kept: dict[int, mx.array] = {}  # index in the sequence -> the figures of its token, [1, ...]

    @property
    def drafting(self) -> Sampler:
        """That of the wrapped sampler."""
        return self._sampler.drafting

    def draw(
        self, logits: mx.array, history: Sequence[int], drafted: mx.array
    ) -> tuple[mx.array, mx.array | None]:
        """What the wrapped sampler draws."""
        tokens, law = self._sampler.draw(logits, history, drafted)
        kept = self._keep(logits, history, drafted, tokens)
        if len(kept) == 1:
            mx.async_eval(tokens, *kept)
        return tokens, law

    def verify(self, logits: mx.array, history: Sequence[int], draft: Draft) -> mx.array:
        """The verdict of the wrapped sampler."""
        verdict = self._sampler.verify(logits, history, draft)
        self._keep(logits, history, draft.tokens, _judged(draft.tokens, verdict[:1], verdict[1:]))
        return verdict

    def verify_tree(self, logits: mx.array, history: Sequence[int], draft: Draft) -> mx.array:
        """The verdict of the wrapped sampler."""
        verdict = self._sampler.verify_tree(logits, history, draft)
        logits, path, accepted = straightened(logits, draft, verdict[:1])
        self._keep(logits, history, path, _judged(path, accepted, verdict[1:]))
        return verdict

    def agreement(self, logits: mx.array, history: Sequence[int], token: mx.array, draft: Draft) -> mx.array:
        """That of the wrapped sampler."""
        return self._sampler.agreement(logits, history, token, draft)

    def of(self, first_position: int, tokens: Sequence[int]) -> tuple[TokenLogprob, ...]:
        """The log-probabilities of tokens just emitted, the first of which has this index in the sequence.

        They can be read once.
        """
        rows = mx.concatenate([self._kept.pop(first_position + i) for i in range(len(tokens))])
        return read(rows, tokens, self._text)

    def _keep(
        self, logits: mx.array, history: Sequence[int], drafted: mx.array, tokens: mx.array
    ) -> list[mx.array]:
        """Keep the figures of `tokens` [T]; what was kept of their places and later ones is void."""
        T = logits.shape[0]
        first = len(history) + drafted.shape[0] - T + 1
        scores = self._law.processed(logits, history, drafted)
        kept = [figures(scores[j : j + 1], tokens[j : j + 1], self._top) for j in range(T)]
        self._kept = {place: row for place, row in self._kept.items() if place < first}
        self._kept |= {first + j: row for j, row in enumerate(kept)}
        return kept


def _judged(drafted: mx.array, accepted: mx.array, last: mx.array) -> mx.array:
    """Draft tokens as far as they are accepted, and behind them the last token; [K + 1]."""
    tokens = mx.concatenate([drafted, last])
    return mx.where(mx.arange(tokens.size) < accepted, tokens, last)
