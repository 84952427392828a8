"""The candidates that a row may draw, a shortlist or the whole vocabulary, and the filters on them.

Filters keep the first tokens in one order: by score, the largest first, then by id, the smallest first. Only
a shortlist is sorted. Everything is lazy.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import mlx.core as mx
import numpy as np

from mlx_spec.sampling import softmax
from mlx_spec.sampling.verify import MIN_NORMAL


@dataclass(frozen=True)
class Candidates:
    """The tokens that each of T rows may draw, and their distribution."""

    scores: mx.array  # [T, C] float32: the logarithm of the distribution, up to a constant; -inf if dropped
    weights: mx.array  # [T, C] float32: proportional to the distribution
    ids: mx.array | None = None  # [T, C] int32, in order; None if column i is token i
    mass: mx.array | None = (
        None  # [T, 1] total weight of the vocabulary, if a shortlist may lack a part of it
    )
    # [T] bool, False if the nucleus exceeds the shortlist; empty if that is impossible
    fits: list[mx.array] = field(default_factory=list)

    @classmethod
    def of(cls, logits: mx.array, top_k: int, temperature: float, length: int) -> Candidates:
        """Return the first `top_k` tokens of logits [T, V] at a temperature; all tokens if `top_k` is 0.

        With a `length` above 0 only a shortlist of that length is returned. A nucleus may exceed it.
        """
        V = logits.shape[-1]
        if not length:
            scores = logits.astype(mx.float32) / temperature
            whole = cls(scores, softmax.weights(scores))
            if 0 < top_k < V:
                return whole.only(whole.first(mx.ones_like(scores), mx.array(float(top_k))))
            return whole
        ids = likeliest(logits, length)
        scores = mx.take_along_axis(logits, ids, axis=-1).astype(mx.float32) / temperature
        mass = None
        if length < min(top_k or V, V):
            mass = softmax.total(softmax.weights(logits.astype(mx.float32) / temperature))
        return cls(scores, softmax.weights(scores), ids, mass)

    @property
    def probs(self) -> mx.array:
        """Return the distribution [T, C] over the columns."""
        return self.weights / softmax.total(self.weights)

    def tokens(self, columns: mx.array) -> mx.array:
        """Return the tokens [T] int32 of one column of each row."""
        if self.ids is not None:
            columns = mx.take_along_axis(self.ids, columns[:, None], axis=-1)[:, 0]
        return columns.astype(mx.int32)

    def over_vocabulary(self, values: mx.array, fill: float, vocab_size: int) -> mx.array:
        """Return values [T, C] of the candidates as [T, V], with `fill` for all other tokens."""
        if self.ids is None:
            return values
        rest = mx.full((values.shape[0], vocab_size), fill)
        return mx.put_along_axis(rest, self.ids, values, axis=-1)

    def beside(self, tokens: mx.array, q: mx.array) -> tuple[Candidates, mx.array, mx.array]:
        """Return the candidates with the draft tokens [K] added, the columns [K] of these, and q [K, C].

        q [K, V] is the distribution that the tokens were drawn from. Only candidates are ever drawn, so the
        rest of q does not matter. T is K + 1.
        """
        if self.ids is None:
            return self, tokens, q
        K = tokens.shape[0]
        drafted = mx.concatenate([tokens, mx.array([-1], dtype=mx.int32)])[:, None]  # none in the last row
        ids = mx.concatenate([self.ids, drafted], axis=-1)
        columns = (ids[:K] == drafted[:K]).argmax(axis=-1)  # the first match: a candidate's own column
        scores = mx.pad(self.scores, [(0, 0), (0, 1)], constant_values=mx.array(-math.inf))
        weights = mx.pad(self.weights, [(0, 0), (0, 1)])
        return (
            replace(self, scores=scores, weights=weights, ids=ids),
            columns,
            mx.take_along_axis(q, ids[:K], axis=-1),
        )

    def only(self, kept: mx.array) -> Candidates:
        """Return the candidates with all dropped for which `kept`, bool [T, C], is False."""
        return replace(self, scores=mx.where(kept, self.scores, -mx.inf), weights=self.weights * kept)

    def first(self, amounts: mx.array, goal: mx.array) -> mx.array:
        """Return the shortest prefix, in order, whose amounts [T, C] reach the goal [T, 1], bool [T, C].

        A token is kept if the amounts before it sum to less than the goal. Equal scores have equal amounts.
        """
        if self.ids is not None:
            return mx.cumsum(amounts, axis=-1, inclusive=False) < goal
        last = _last_score(self.scores, amounts, goal)
        above, ties = self.scores > last, self.scores == last
        before = softmax.total(amounts * above)
        amount = (amounts * ties).max(axis=-1, keepdims=True)
        rank = mx.cumsum(ties.astype(mx.int32), axis=-1, inclusive=False)
        return above | (ties & (before + amount * rank < goal))


def shortlist_length(top_k: int, top_p: float, vocab_size: int, *, nucleus: int = 2048) -> int:
    """Return the length of the shortlist; 0 to use the whole vocabulary.

    Nearly all nuclei of trained models have fewer than 2,048 tokens.
    """
    if 0 < top_k < vocab_size:
        # Beyond 4096 tokens, thresholds over the vocabulary cost about as much as sorting.
        return top_k if top_k <= 4096 else 0
    return min(nucleus, vocab_size) if top_p < 1 else 0


def likeliest(scores: mx.array, count: int) -> mx.array:
    """Return the first `count` tokens [T, count] int32 of scores [T, V], in order.

    They lie in the `count` chunks with the largest maxima: the maximum of each of these chunks comes before
    all tokens of the other chunks.
    """
    T, V = scores.shape
    ids, values, wanted = mx.arange(V)[None], scores, math.isqrt(V // count)
    if wanted > 3:  # else most chunks would be taken
        size = softmax.chunk_size(V, wanted)
        chunks = softmax.in_chunks(scores, size, -math.inf)
        best = chunks.max(axis=-1)
        taken = _first(best, mx.arange(best.shape[1])[None], count)
        values = mx.take_along_axis(chunks, taken[..., None], axis=1).reshape(T, -1)
        ids = (taken[..., None] * size + mx.arange(size)).reshape(T, -1)
    return _first(values, ids, count)


def _first(values: mx.array, ids: mx.array, count: int) -> mx.array:
    """Return the first `count` ids [T, count] int32, in order, by their values [T, N].

    A key holds a value and its id in one number, so the sort need not be stable.
    """
    scale = mx.array(2**32, mx.int64)
    keys = ids.astype(mx.int64) - _rank(values).astype(mx.int64) * scale
    if 2 * count < keys.shape[-1]:
        keys = mx.partition(keys, count - 1, axis=-1)[:, :count]
    return (mx.sort(keys, axis=-1)[:, :count] & (scale - 1)).astype(mx.int32)


def _rank(values: mx.array) -> mx.array:
    """Return int32 integers that have the order of `values`."""
    bits = (values.astype(mx.float32) + 0.0).view(mx.int32)  # -0.0 and 0.0 are equal
    return mx.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _value(ranks: mx.array) -> mx.array:
    return mx.where(ranks < 0, ranks ^ 0x7FFFFFFF, ranks).view(mx.float32)


def _last_score(scores: mx.array, amounts: mx.array, goal: mx.array) -> mx.array:
    """Return the largest threshold [T, 1] at which the amounts [T, V] of all scores above or equal reach the
    goal; -inf if no threshold does.

    Bisects the 32 bits of a score: always 32 passes over the vocabulary.
    """
    high = _rank(scores.max(axis=-1, keepdims=True))
    low = mx.full(high.shape, _rank(mx.array(-math.inf)), mx.int32)
    for _ in range(32):
        middle = (low | high) - ((low ^ high) >> 1)  # of two 32-bit numbers, rounded up
        is_reached = softmax.total(amounts * (scores >= _value(middle))) >= goal
        low, high = mx.where(is_reached, middle, low), mx.where(is_reached, high, middle - 1)
    return _value(low)


def _top_p(candidates: Candidates, p: float) -> Candidates:
    """Keep the fewest tokens whose probabilities reach p together."""
    share = np.float32(p)
    if share > p:  # p rounded up would keep a token too many
        share = np.nextafter(share, np.float32(0))
    listed = softmax.total(candidates.weights)
    mass = listed if candidates.mass is None else candidates.mass
    goal = mass * max(float(share), MIN_NORMAL)  # less is 0 in float32, and no token would be kept
    fits = [] if candidates.mass is None else [(listed >= goal)[:, 0]]
    return replace(candidates.only(candidates.first(candidates.weights, goal)), fits=fits)


def by_scores(keep: Callable[[mx.array, mx.array, float], mx.array]) -> Callable[..., Candidates]:
    """Return a filter by a function of finite scores [T, C] that returns which tokens stay, bool [T, C].

    `keep` also gets which tokens are left, bool [T, C], and the value of the parameter. The others have the
    lowest score of their row instead of -inf, which would make a mean or a deviation NaN.
    """

    def filtered(candidates: Candidates, value: float) -> Candidates:
        left = candidates.scores > -math.inf
        lowest = mx.where(left, candidates.scores, math.inf).min(axis=-1, keepdims=True)
        return candidates.only(left & keep(mx.where(left, candidates.scores, lowest), left, value))

    return filtered


def _min_p(scores: mx.array, left: mx.array, p: float) -> mx.array:
    """Keep the tokens that are at least p times as likely as the likeliest one."""
    return scores >= scores.max(axis=-1, keepdims=True) + math.log(p)


@dataclass(frozen=True)
class Filter:
    """A filter of candidates: `keep(candidates, value)` returns those that stay."""

    keep: Callable[[Candidates, float], Candidates]
    off: float  # the value that drops nothing
    least: float
    most: float


# Field of `Sampling` -> its filter, in the order in which they are applied, after top_k.
FILTERS = {"top_p": Filter(_top_p, 1, 0, 1), "min_p": Filter(by_scores(_min_p), 0, 0, 1)}
