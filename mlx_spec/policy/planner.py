"""The draft length with the most expected tokens per second, for one sequence and for a batch.

    speed(K) = expected tokens(K) / seconds(K)        K = 0 is plain decoding

One pass verifies the tokens of all sequences. The k-th draft token of a sequence costs one row and is worth
the probability that k tokens in a row are accepted, so the most likely ones get the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def best_length(tokens: Floats, seconds: Floats, limit: int) -> tuple[int, float]:
    """Return the best number of draft tokens, 1 to `limit`, and its tokens per second.

    `tokens` and `seconds` of a round are by the number of draft tokens, 0 included.
    """
    speeds = tokens[1 : limit + 1] / seconds[1 : limit + 1]
    best = int(speeds.argmax())
    return best + 1, float(speeds[best])


def lengths(
    reach: Sequence[Sequence[float]],
    plain_seconds: float,
    pass_seconds: Callable[[int], float],
    draft_seconds: Callable[[int], float],
) -> list[int]:
    """Return the draft length of every sequence of a batch, all 0 if plain decoding is faster.

    `reach[b][k - 1]` is the probability that k draft tokens of sequence b are accepted; it falls with k.
    `plain_seconds` is the time of a queued pass with one row per sequence, `pass_seconds(rows)` that of any
    pass, and `draft_seconds(k)` that of drafting k tokens for all sequences.
    """
    count = len(reach)
    best_speed, best = count / plain_seconds, [0] * count
    for longest in range(1, max(map(len, reach), default=0) + 1):
        candidates = sorted(
            ((probability, b) for b, row in enumerate(reach) for probability in row[:longest]), reverse=True
        )
        tokens, drafting = float(count), draft_seconds(longest)
        for number, (probability, _) in enumerate(candidates, 1):
            tokens += probability
            speed = tokens / (drafting + pass_seconds(count + number))
            if speed > best_speed:
                chosen = [b for _, b in candidates[:number]]
                best_speed, best = speed, [chosen.count(b) for b in range(count)]
    return best
