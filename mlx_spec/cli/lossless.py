"""Compare texts with and without drafts for the self-tests, with a rule for near-ties.

A pass over several rows sums in another order than a pass over one. If two tokens are equally likely up to
the last bits, either may be chosen and neither is wrong: a near-tie. The size of these last bits is measured,
as the difference of logits after the same tokens, written row by row and in blocks, without a rollback.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from mlx_spec.decode.running import prefill
from mlx_spec.model.target import LMTarget
from mlx_spec.prompt import Prompt, text_prompt
from mlx_spec.sampling import GREEDY, Sampling
from mlx_spec.sampling.candidates import shortlist_length
from mlx_spec.sampling.noise import seeded_noise
from mlx_spec.tokenizer import common_prefix


@dataclass(frozen=True)
class Gap:
    """The distance of two logits that may differ by rounding only."""

    logits: float
    rounding: float  # the step from one number of the type to the next
    dtype: str
    limit: int  # roundings that are allowed at most

    @property
    def roundings(self) -> float:
        return self.logits / self.rounding

    def within(self, allowed: float) -> bool:
        """Return True if the gap is at most `allowed` roundings. False for NaN."""
        return self.roundings <= min(allowed, self.limit)


@dataclass(frozen=True)
class Difference:
    """The first token at which a text with drafts differs from plain decoding."""

    position: int  # in the answer, from 0
    expected: int  # token of plain decoding
    actual: int
    gap: Gap  # between the two


def first_difference(
    open_target: Callable[[], LMTarget],
    prompt: Prompt,
    expected: Sequence[int],
    actual: Sequence[int],
    sampling: Sampling = GREEDY,
) -> Difference | None:
    """Compare two answers to `prompt`. Return None if they are equal or one begins with the other."""
    at = common_prefix(expected, actual)
    if at == min(len(expected), len(actual)):
        return None
    history = Prompt((*prompt, *expected[:at]), prompt.spans)
    gap = token_gap(open_target(), history, (expected[at], actual[at]), sampling)
    return Difference(at, expected[at], actual[at], gap)


def largest_noise(single: mx.array, others: Iterable[mx.array]) -> Gap:
    """Return the largest gap between logits [V] after the same tokens, written row by row and otherwise."""
    return max((logits_gap(single, other) for other in others), key=lambda gap: gap.roundings)


def allowed_roundings(noise: Gap | None) -> float:
    """Return the number of roundings up to which another token is a near-tie.

    `noise` is the largest measured difference between caches without a rollback. Four times that counts as
    rounding; if nothing was measured, one rounding does.
    """
    return 1.0 if noise is None else min(max(1.0, 4 * noise.roundings), noise.limit)


def logits_gap(a: mx.array, b: mx.array) -> Gap:
    """Return the largest difference of two rows of logits [V]."""
    difference = mx.abs(a.astype(mx.float32) - b.astype(mx.float32)).max()
    return _gap(float(difference), float(mx.abs(a).max().astype(mx.float32)), a.dtype)


def token_gap(
    target: LMTarget, history: Sequence[int], tokens: tuple[int, int], sampling: Sampling = GREEDY
) -> Gap:
    """Return the distance of two tokens after `history`, noise included if the sampling is seeded."""
    logits = next_logits(target, history)
    values = scores = logits.astype(mx.float32)
    if sampling.temperature > 0:
        assert sampling.seed is not None, "without a seed no two texts are the same"
        V = values.shape[0]
        ids = mx.arange(V)[None] if shortlist_length(sampling.top_k, sampling.top_p, V) else None
        scores = values + sampling.temperature * seeded_noise(sampling.seed, len(history), (1, V), ids)[0]
    first, second = tokens
    size = max(abs(float(values[first])), abs(float(values[second])))
    return _gap(abs(float(scores[first] - scores[second])), size, logits.dtype)


def next_logits(target: LMTarget, history: Sequence[int]) -> mx.array:
    """Return the logits [V] after `history`, of which the target may hold a prefix, in its own type."""
    for _ in prefill(target, (), history if isinstance(history, Prompt) else text_prompt(history)):
        pass
    logits = target.verify(mx.array(list(history[-1:]), dtype=mx.int32))[0]
    target.commit(0)
    return logits


def _gap(logits: float, size: float, dtype: mx.Dtype) -> Gap:
    """Return a gap of logits of about `size`; below 1 the rounding of 1 counts."""
    # Bits of the fraction, and the most roundings that are allowed. In short types the values that lead to a
    # logit are rounded a few times. In float32 the sums themselves differ.
    fraction, limit = {mx.bfloat16: (7, 8), mx.float16: (10, 8), mx.float32: (23, 4096)}[dtype]
    power = math.floor(math.log2(max(size, 1.0))) if math.isfinite(size) else 0
    return Gap(logits, 2.0 ** (power - fraction), str(dtype).rsplit(".", 1)[-1], limit)
