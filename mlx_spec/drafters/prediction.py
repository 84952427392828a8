"""Lookup in what a client expects the answer to be, then in the prompt and the answer so far.

The prediction is put before the conversation as if it were an earlier answer to the same prompt: behind a
copy of the prompt's last tokens. So the first tokens of an answer find its beginning, and where the answer
leaves it, the longest match leads back into it.
"""

from __future__ import annotations

from collections.abc import Sequence

from mlx_spec.drafters.lookup import Lookup
from mlx_spec.types import Draft, Features, FeatureSpec, Sampler

MIN_MATCH, MAX_MATCH = 2, 32  # tokens


class Prediction:
    """Drafts one answer from the tokens that are predicted for it."""

    needs = FeatureSpec()

    def __init__(self, prediction: Sequence[int], prompt: Sequence[int]) -> None:
        self._lookup = Lookup(MIN_MATCH, MAX_MATCH)
        self._text = [*prompt[-MAX_MATCH:], *prediction]
        self._before = len(self._text)

    def observe(self, history: Sequence[int], features: Features) -> None:
        """Index the new tokens."""
        self._extend(history)
        self._lookup.observe(self._text, features)

    def available(self, history: Sequence[int]) -> int:
        """How many tokens the longest match is good for."""
        self._extend(history)
        return self._lookup.match(self._text)

    def draft(self, history: Sequence[int], limit: int, sampler: Sampler) -> Draft:
        """At most `limit` tokens that followed the longest match."""
        self._extend(history)
        return self._lookup.draft(self._text, limit, sampler)

    def _extend(self, history: Sequence[int]) -> None:
        """Add what is new of the conversation, which only grows."""
        self._text += history[len(self._text) - self._before :]


def prediction_counts(prediction: Sequence[int], output: Sequence[int]) -> tuple[int, int]:
    """How many tokens of a prediction appear in the output, in its order, and how many do not.

    The first is the length of a longest common subsequence, whatever was drafted from the prediction and
    when. Bit i of an integer stands for token i of the prediction, so one token of the output takes a few
    operations (Hyyrö, Bit-parallel LCS-length computation revisited, 2004).
    """
    places: dict[int, int] = {}
    for i, token in enumerate(prediction):
        places[token] = places.get(token, 0) | 1 << i
    everything = (1 << len(prediction)) - 1
    unmatched = everything
    for token in output:
        found = unmatched & places.get(token, 0)
        unmatched = (unmatched + found | unmatched - found) & everything
    accepted = len(prediction) - unmatched.bit_count()
    return accepted, len(prediction) - accepted
