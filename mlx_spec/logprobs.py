"""Log-probabilities of tokens under the target's law: from scores on the device to values on the host."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import mlx.core as mx

from mlx_spec.text import Text
from mlx_spec.types import Alternative as Alternative
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
