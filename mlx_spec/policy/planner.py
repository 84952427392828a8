"""The draft length with the most expected tokens per second.

    speed(K) = expected tokens(K) / seconds(K)        K = 0 is plain decoding

The tokens and seconds may be those of several sequences in one padded pass: then all share one length.
"""

from __future__ import annotations

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
