"""Log-probabilities of tokens under the target's law: from scores on the device to values on the host."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import cast

import mlx.core as mx

from mlx_spec.model.caches import MAX_TRIAL
from mlx_spec.sampling import Law
from mlx_spec.sampling.verify_tree import straightened
from mlx_spec.text import Text
from mlx_spec.types import Alternative as Alternative
from mlx_spec.types import Draft, Drafter, Sampler, Target
from mlx_spec.types import TokenLogprob as TokenLogprob


def figures(scores: mx.array, tokens: mx.array, top: int) -> mx.array:
    """What is to be read of scores [T, V] whose rows drew `tokens` [T]. Lazy, [T, 1 + 2 top] float32.

    The log-probability of the token, those of the `top` most likely tokens in no order, and their ids, which
    are exact up to 2**24.
    """
    scores = scores.astype(mx.float32)
    logprobs = scores - mx.logsumexp(scores, axis=-1, keepdims=True)
    own = mx.take_along_axis(logprobs, tokens[:, None], axis=-1)
    count = min(top, scores.shape[-1])
    if count == 0:
        return own
    best = mx.argpartition(-scores, kth=count - 1, axis=-1)[:, :count]
    return mx.concatenate(
        [own, mx.take_along_axis(logprobs, best, axis=-1), best.astype(mx.float32)], axis=-1
    )


def read(rows: mx.array, tokens: Sequence[int], text: Text) -> tuple[TokenLogprob, ...]:
    """The figures [T, 1 + 2 top] of T tokens as values, in one copy. Masked tokens are no alternatives."""
    values = cast(list[list[float]], rows.tolist())
    return tuple(_value(row, token, text) for row, token in zip(values, tokens, strict=True))


def _value(row: list[float], token: int, text: Text) -> TokenLogprob:
    count = len(row) // 2
    pairs = zip(row[1 : 1 + count], row[1 + count :], strict=True)
    likely = sorted((-logprob, int(i)) for logprob, i in pairs if logprob > -math.inf)
    top = tuple(Alternative(i, text.written(i), -negative) for negative, i in likely)
    return TokenLogprob(token, text.written(token), row[0], top)


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


def score(
    target: Target, drafters: Sequence[Drafter], law: Law, tokens: Sequence[int], text: Text, top: int
) -> Iterator[tuple[TokenLogprob, ...]]:
    """Yield, chunk by chunk, the log-probabilities of the tokens behind the one that `target` lacks first.

    Of an empty target these are all but the first token, which has none. Afterwards target and drafters hold
    the prompt as `engine.prefill` leaves it, all but its last token, so that it can be continued. Chunks are
    as long as a trial may be: that is exact with every cache, and slower than a prefill.
    `law` is one of its own: what its prompt does not hold counts as generated under penalties.
    """
    end = len(tokens) - 1
    for low in range(target.size, end, MAX_TRIAL):
        high = min(low + MAX_TRIAL, end)
        chunk = mx.array(list(tokens[low:high]), dtype=mx.int32)
        following = list(tokens[low + 1 : high + 1])
        scores = law.processed(target.verify(chunk), tokens[: low + 1], chunk[1:])
        rows = figures(scores, mx.array(following, dtype=mx.int32), top)
        features = target.commit(high - low)
        for drafter in drafters:
            drafter.observe(list(tokens[: high + 1]), features)
        yield read(rows, following, text)
    mx.clear_cache()
