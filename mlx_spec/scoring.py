"""How likely a given text is: log-probabilities of the tokens of a prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import mlx.core as mx

from mlx_spec.cache import MAX_TRIAL
from mlx_spec.logprobs import TokenLogprob, figures, read
from mlx_spec.sampling import Law
from mlx_spec.text import Text
from mlx_spec.types import Drafter, Target


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
