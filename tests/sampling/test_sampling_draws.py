"""What the three samplers draw and accept.

Chi-square tests reject a right sampler once in a million; keys are fixed, so a pass stays a pass.
"""

from __future__ import annotations

import itertools
import math

import chi_square
import mlx.core as mx
import numpy as np
import pytest
from test_sampling import HISTORY, NONE, PENALTIES, PROMPT, V, law_of, logits

from mlx_spec.sampling import Greedy, LogitsProcessor, Sampling, Seeded, Unseeded
from mlx_spec.sampling.sampling import gumbel
from mlx_spec.sampling.verify import token
from mlx_spec.types import Draft, no_draft


def test_greedy_is_the_argmax_and_touches_nothing() -> None:
    for dtype in (mx.float32, mx.bfloat16):
        block = logits(5, dtype=dtype)
        sampling = Sampling(seed=1, top_k=2, top_p=0.1, min_p=0.9)
        sampler = sampling.sampler(len(PROMPT), V)
        tokens, probs = sampler.draw(block, HISTORY, mx.array([1, 2, 3, 4]))
        assert isinstance(sampler, Greedy)
        assert probs is None
        assert tokens.dtype == mx.int32
        assert mx.array_equal(tokens, block.argmax(-1))
        assert LogitsProcessor(sampling, len(PROMPT), V).scores(block, HISTORY, NONE) is block
        right = tokens[:4]
        for n, draft in [(4, right), (2, mx.where(mx.arange(4) == 2, right + 1, right)), (0, NONE)]:
            verdict = sampler.verify(block[: len(draft) + 1], HISTORY, Draft(draft))
            assert verdict.tolist() == [n, tokens[n].item()]


def test_greedy_obeys_penalties_and_bias() -> None:
    block = mx.array([[1.0, 3.0, 2.0]])
    cases = [(Sampling(), 1), (Sampling(presence_penalty=1.5), 2), (Sampling(logit_bias={0: 9.0}), 0)]
    for sampling, best in cases:
        sampler = sampling.sampler(1, 3)
        assert sampler.draw(block, [0, 1], NONE)[0].tolist() == [best]
    assert Sampling(presence_penalty=1.5).sampler(2, 3).draw(block, [0, 1], NONE)[0].tolist() == [1]


def drawn(sampler: Seeded | Unseeded, row: mx.array, count: int) -> np.ndarray:
    """Tokens [count] at consecutive positions from logits [V]."""
    filler = mx.zeros((count - 1,), dtype=mx.int32)
    return np.array(sampler.draw(mx.broadcast_to(row, (count, row.shape[0])), [0], filler)[0])


@pytest.mark.parametrize("kind", ["seeded", "unseeded"])
def test_draws_follow_the_law_and_each_other_by_chance(kind: str) -> None:
    """One token, two in a row, and the same position under the next seed."""
    count, row = 40_000, logits(1, vocab=12)[0]
    law = LogitsProcessor(Sampling(1.0, top_k=9), 1, 12)
    first, second = (Seeded(law, s) if kind == "seeded" else Unseeded(law, key=s) for s in (7, 8))
    p = np.array(mx.softmax(law.scores(row[None], [0], NONE), axis=-1))[0].astype(np.float64)
    p /= p.sum()
    tokens, others = drawn(first, row, count), drawn(second, row, count)
    assert chi_square.excess(np.bincount(tokens, minlength=12), p) < 1
    for pairs in (tokens[:-1] * 12 + tokens[1:], tokens * 12 + others):
        assert chi_square.excess(np.bincount(pairs, minlength=144), np.outer(p, p).ravel()) < 1
    assert chi_square.excess(np.bincount(tokens, minlength=12), np.roll(p, 1)) > 1


def test_seeded_noise_depends_on_position_alone() -> None:
    block = logits(9)
    law = LogitsProcessor(Sampling(0.9, **PENALTIES), len(PROMPT), V)
    guesses = [4, 1, 4, 7, 30, 2, 0, 5]
    drafted = mx.array(guesses)
    tokens, probs = Seeded(law, 5).draw(block, HISTORY, drafted)
    assert probs is None
    assert tokens.dtype == mx.int32
    for rows in range(1, 10):
        assert mx.array_equal(Seeded(law, 5).draw(block[-rows:], HISTORY, drafted)[0], tokens[-rows:])
    for j in range(9):
        alone = LogitsProcessor(Sampling(0.9, **PENALTIES), len(PROMPT), V)
        history = HISTORY + guesses[:j]
        assert Seeded(alone, 5).draw(block[j : j + 1], history, NONE)[0].tolist() == [tokens[j].item()]
    verdict = Seeded(law, 5).verify(block, HISTORY, Draft(drafted, probs=mx.zeros((8, V))))
    n = int((np.array(tokens)[:8] != np.array(drafted)).argmax())
    assert verdict.tolist() == [n, tokens[n].item()]


def test_seeds_differ_modulo_two_to_the_64() -> None:
    flat = mx.zeros((V,))
    law = LogitsProcessor(Sampling(1.0), 1, V)
    seeds = [0, 1, 2, -1, 2**32, 2**63, 0x9E3779B97F4A7C15]  # the last is the step between positions
    texts = [drawn(Seeded(law, s), flat, 64).tolist() for s in seeds]
    assert all(a != b for a, b in itertools.combinations(texts, 2))
    assert drawn(Seeded(law, 2**64 - 1), flat, 64).tolist() == texts[3]
    for shift in range(1, 4):  # one seed's noise is not another's, moved along
        assert all(a[shift:] != b[:-shift] for a, b in itertools.permutations(texts, 2))


def test_unseeded_samplers_share_no_noise() -> None:
    flat = mx.zeros((V,))
    law = LogitsProcessor(Sampling(1.0), 1, V)
    first, second = Unseeded(law), Unseeded(law)
    texts = [drawn(sampler, flat, 64).tolist() for sampler in (first, first, second)]
    assert all(a != b for a, b in itertools.combinations(texts, 2))  # equal once in 40**64


def test_unseeded_drafts_come_with_their_law_and_are_judged_by_it() -> None:
    seen: list[tuple[mx.array, ...]] = []

    def rule(*inputs: mx.array) -> mx.array:
        seen.append(inputs)
        return token(*inputs)

    sampling = Sampling(1.0, top_p=0.8, **PENALTIES)
    sampler = Unseeded(LogitsProcessor(sampling, len(PROMPT), V), rule=rule, key=1)
    block, drafted = logits(4), mx.array([4, 4, 9], dtype=mx.int32)
    tokens, q = sampler.draw(block[:3], HISTORY, drafted[:2])
    assert q is not None
    assert tokens.dtype == mx.int32
    assert np.array(q).tolist() == law_of(sampling, block[:3], drafted[:2]).tolist()
    sampler.verify(block, HISTORY, Draft(drafted, probs=q))
    ((p, judged, law, uniform, noise),) = seen
    assert np.array(p).tolist() == law_of(sampling, block, drafted).tolist()
    assert mx.array_equal(judged, drafted)
    assert law is q
    assert (uniform.shape, noise.shape) == ((3,), (V,))
    for draft in (Draft(drafted), no_draft()):  # no law to judge by: the target's own draw decides
        assert sampler.verify(block[: draft.tokens.shape[0] + 1], HISTORY, draft).shape == (2,)
    assert len(seen) == 1


def test_banned_tokens_are_never_drawn() -> None:
    banned = {t: -math.inf for t in range(1, V)}
    for seed in (None, 3):
        sampler = Sampling(1.0, logit_bias=banned, seed=seed).sampler(1, V)
        block = mx.broadcast_to(mx.where(mx.arange(V) == 0, -60.0, 60.0), (500, V))
        assert sampler.draw(block, [0], mx.zeros((499,), dtype=mx.int32))[0].max().item() == 0
        assert sampler.verify(block[:2], [0], Draft(mx.array([1], dtype=mx.int32))).tolist() == [0, 0]


def test_noise_is_finite_and_fine_where_it_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small exponentials decide between unlikely tokens: their spacing is below 2**-24."""
    exponential = np.exp(-np.array(gumbel((2**21,), mx.random.key(0))).astype(np.float64))
    assert abs(exponential.mean() - 1) < 0.005  # seven standard errors
    steps = exponential[exponential < 2**-12] * 2**24
    assert len(steps) > 300
    assert ((steps % 1 > 0.25) & (steps % 1 < 0.75)).mean() > 0.3
    extremes = mx.array([0.0, 1 - 2**-24])
    monkeypatch.setattr(mx.random, "uniform", lambda **_: extremes)
    assert mx.isfinite(gumbel((2,), mx.random.key(0))).all().item()
