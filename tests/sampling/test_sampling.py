"""Distributions against a reference in float64; draws and verdicts of the three samplers; refusals.

Chi-square tests reject a right sampler once in a million. Keys are fixed, so a pass stays a pass.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.sample_utils import make_repetition_penalty
from support import chi_square
from support.exact_distribution import reference
from support.grammars import compiled

from mlx_spec.errors import InvalidValue
from mlx_spec.sampling import Greedy, LogitsProcessor, Sampling, Seeded, Unseeded
from mlx_spec.sampling.noise import gumbel
from mlx_spec.types import Draft, no_draft

V = 40
NONE = no_draft().tokens
PROMPT = [3, 5, 5, 8, 13, 21, 34]
OUTPUT = [3, 3, 9, 17, 9, 9, 39]
HISTORY = PROMPT + OUTPUT
PENALTIES: dict[str, Any] = {"repetition_penalty": 1.3, "presence_penalty": 0.6, "frequency_penalty": -0.4}
BIAS = {0: 2.5, 9: -1.0, 12: -math.inf, 39: 3.3}
FILTERS: list[dict[str, Any]] = [
    {},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": V},
    {"top_k": 1000},
    {"top_p": 1e-6},
    {"top_p": 1e-60},  # 0 in float32
    {"top_p": 0.5},
    {"top_p": 0.95},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_k": 12, "top_p": 0.8},
    {"top_k": 12, "top_p": 0.95, "min_p": 0.15},
    {"repetition_penalty": 1.3},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.7},
    {"logit_bias": BIAS},
    {**PENALTIES, "logit_bias": BIAS, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
]


def logits(rows: int, seed: int = 0, dtype: mx.Dtype = mx.float32, vocab: int = V) -> mx.array:
    return (mx.random.normal((rows, vocab), key=mx.random.key(seed)) * 2).astype(dtype)


def processor_of(sampling: Sampling) -> LogitsProcessor:
    return LogitsProcessor(sampling, len(PROMPT), V)


def scores_of(processor: LogitsProcessor, *row: Any) -> mx.array:
    """Return the scores [T, V] of what `row` gives to `process`, -inf where a token is not drawn."""
    if processor.sampling.temperature == 0:
        return processor.process(*row)
    found = processor.candidates(*row)
    return found.over_vocabulary(found.scores, -math.inf, row[0].shape[-1])


def distribution(sampling: Sampling, block: mx.array, drafted: mx.array = NONE) -> np.ndarray:
    """Return the distribution [T, V] after HISTORY."""
    scores = scores_of(processor_of(sampling), block, HISTORY, drafted)
    assert scores.dtype == mx.float32
    return np.array(mx.softmax(scores, axis=-1))


# --- distributions


@pytest.mark.parametrize("fields", FILTERS)
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("temperature", [0.6, 1.7])
def test_distributions_equal_the_reference(
    fields: dict[str, Any], dtype: mx.Dtype, temperature: float
) -> None:
    sampling = Sampling(temperature, **fields)
    block = logits(6, dtype=dtype)
    for row, values in enumerate(np.array(block.astype(mx.float32))):
        got = distribution(sampling, block[row : row + 1])[0]
        p = reference(sampling, values, HISTORY, len(PROMPT))
        assert np.abs(got - p).max() < 2e-6
        assert ((got > 0) == (p > 0)).all()


@pytest.mark.parametrize("fields", FILTERS)
def test_ties_at_the_cut_are_kept_by_id(fields: dict[str, Any]) -> None:
    sampling = Sampling(1.0, **fields)
    block = mx.round(logits(20, seed=1) * 0.6)  # a handful of values, many tokens each
    kept = [reference(sampling, np.array(row), HISTORY, len(PROMPT)) > 0 for row in block]
    for row, expected in zip(block, kept, strict=True):
        assert ((distribution(sampling, row[None])[0] > 0) == expected).all()
    if fields == {"top_k": 7}:
        assert {expected.sum() for expected in kept} == {7}


@pytest.mark.parametrize("fields", [{"temperature": 0.8, **f} for f in FILTERS] + [PENALTIES])
def test_each_row_counts_the_drafted_tokens_before_it(fields: dict[str, Any]) -> None:
    sampling, drafted = Sampling(**fields), [9, 0, 9, 3, 11, 0]
    block = logits(len(drafted) + 1)
    for rows in range(1, len(block) + 1):  # the last row counts all drafted tokens
        scores = scores_of(processor_of(sampling), block[-rows:], HISTORY, mx.array(drafted))
        for j in range(rows):
            history = HISTORY + drafted[: len(drafted) - rows + 1 + j]
            alone = scores_of(processor_of(sampling), block[-rows:][j : j + 1], history, NONE)
            assert mx.array_equal(scores[j : j + 1], alone)


def test_repetition_penalty_is_that_of_mlx_lm() -> None:
    block = logits(1)
    theirs = make_repetition_penalty(1.3, len(HISTORY))(mx.array(HISTORY), mx.array(block))
    ours = scores_of(processor_of(Sampling(repetition_penalty=1.3)), block, HISTORY, NONE)
    assert mx.allclose(ours, theirs, rtol=1e-6)


def test_counts_grow_with_the_history() -> None:
    sampling = Sampling(1.0, **PENALTIES)
    rng = np.random.default_rng(0)
    processor, history = processor_of(sampling), list(PROMPT)
    for i in range(60):
        drafted = mx.array(rng.integers(V, size=i % 4).astype(np.int32))
        block = logits(drafted.shape[0] + 1, seed=i)
        fresh = scores_of(processor_of(sampling), block, list(history), drafted)
        assert mx.allclose(scores_of(processor, block, history, drafted), fresh, atol=1e-6)
        history.extend(rng.integers(V, size=i % 3).tolist())


# --- draws and verdicts


def test_greedy_is_the_argmax_and_changes_no_logits() -> None:
    for dtype in (mx.float32, mx.bfloat16):
        block = logits(5, dtype=dtype)
        sampling = Sampling(seed=1, top_k=2, top_p=0.1, min_p=0.9)
        sampler = sampling.sampler(len(PROMPT), V)
        tokens, probs = sampler.draw(block, HISTORY, mx.array([1, 2, 3, 4]))
        assert isinstance(sampler, Greedy)
        assert probs is None and tokens.dtype == mx.int32
        assert mx.array_equal(tokens, block.argmax(-1))
        assert scores_of(processor_of(sampling), block, HISTORY, NONE) is block
        right = tokens[:4]
        for n, draft in [(4, right), (2, mx.where(mx.arange(4) == 2, right + 1, right)), (0, NONE)]:
            verdict = sampler.verify(block[: len(draft) + 1], HISTORY, Draft(draft))
            assert verdict.tolist() == [n, tokens[n].item()]


def test_greedy_obeys_penalties_and_bias() -> None:
    block, penalised = mx.array([[1.0, 3.0, 2.0]]), Sampling(presence_penalty=1.5)
    cases = [(Sampling(), 1, 1), (penalised, 1, 2), (penalised, 2, 1), (Sampling(logit_bias={0: 9.0}), 1, 0)]
    for sampling, prompt_length, best in cases:
        assert sampling.sampler(prompt_length, 3).draw(block, [0, 1], NONE)[0].tolist() == [best]


@pytest.mark.parametrize("least", [0, 7, 8, 9, 11, 12, 10**20])
def test_late_tokens_are_banned_before_min_tokens(least: int) -> None:
    """HISTORY holds generated tokens, too. Rows of a draft are what they are one by one."""
    block, guesses = logits(5), [4, 1, 0, 7]
    sampling = Sampling(1.0, logit_bias={4: 2.0}, min_tokens=least, late_tokens=frozenset({4, 9, V + 5}))
    free = processor_of(dataclasses.replace(sampling, min_tokens=0))
    for rows in range(1, 6):
        scores = scores_of(processor_of(sampling), block[-rows:], HISTORY, mx.array(guesses))
        for j in range(5 - rows, 5):
            path = HISTORY + guesses[:j]
            alone = scores_of(processor_of(sampling), block[j : j + 1], path, NONE)[0]
            assert mx.array_equal(scores[j - 5 + rows], alone)
            is_early = len(path) - len(PROMPT) < least
            assert [alone[t].item() == -math.inf for t in (4, 9, 10)] == [is_early, is_early, False]
            kept = mx.array([t for t in range(V) if t not in (4, 9)])
            assert mx.array_equal(alone[kept], scores_of(free, block[j : j + 1], path, NONE)[0][kept])


def drawn(sampler: Seeded | Unseeded, row: mx.array, count: int) -> np.ndarray:
    """Draw tokens [count] at consecutive positions from logits [V]."""
    filler = mx.zeros((count - 1,), dtype=mx.int32)
    return np.array(sampler.draw(mx.broadcast_to(row, (count, row.shape[0])), [0], filler)[0])


@pytest.mark.parametrize("kind", ["seeded", "unseeded"])
def test_draws_follow_the_distribution_independently(kind: str) -> None:
    """One token, two in a row, and the same position under the next seed."""
    count, row = 40_000, logits(1, vocab=12)[0]
    processor = LogitsProcessor(Sampling(1.0, top_k=9), 1, 12)
    first, second = (Seeded(processor, s) if kind == "seeded" else Unseeded(processor, key=s) for s in (7, 8))
    p = np.array(mx.softmax(scores_of(processor, row[None], [0], NONE), axis=-1))[0].astype(np.float64)
    p /= p.sum()
    tokens, others = drawn(first, row, count), drawn(second, row, count)
    assert chi_square.excess(np.bincount(tokens, minlength=12), p) < 1
    for pairs in (tokens[:-1] * 12 + tokens[1:], tokens * 12 + others):
        assert chi_square.excess(np.bincount(pairs, minlength=144), np.outer(p, p).ravel()) < 1
    assert chi_square.excess(np.bincount(tokens, minlength=12), np.roll(p, 1)) > 1


def test_seeded_noise_depends_on_the_position_alone() -> None:
    block, sampling = logits(9), Sampling(0.9, **PENALTIES)
    sampler = Seeded(processor_of(sampling), 5)
    guesses = [4, 1, 4, 7, 30, 2, 0, 5]
    drafted = mx.array(guesses)
    tokens, probs = sampler.draw(block, HISTORY, drafted)
    assert probs is None and tokens.dtype == mx.int32
    for rows in range(1, 10):
        assert mx.array_equal(sampler.draw(block[-rows:], HISTORY, drafted)[0], tokens[-rows:])
    for j in range(9):
        alone = Seeded(processor_of(sampling), 5).draw(block[j : j + 1], HISTORY + guesses[:j], NONE)[0]
        assert alone.tolist() == [tokens[j].item()]
    verdict = sampler.verify(block, HISTORY, Draft(drafted, probs=mx.zeros((8, V))))
    n = int((np.array(tokens)[:8] != np.array(drafted)).argmax())
    assert verdict.tolist() == [n, tokens[n].item()]


def test_seeds_draw_the_same_bytes_as_ever() -> None:
    """A seeded text must not change from one version to the next."""
    sampler = Seeded(LogitsProcessor(Sampling(1.0), 1, V), 11)
    expected = [31, 29, 11, 27, 16, 37, 15, 25, 29, 35, 1, 30]
    assert drawn(sampler, mx.arange(V) / 20.0, 12).tolist() == expected


def test_seeds_differ_modulo_two_to_the_64() -> None:
    flat, processor = mx.zeros((V,)), LogitsProcessor(Sampling(1.0), 1, V)
    seeds = [0, 1, 2, -1, 2**32, 2**63, 0x9E3779B97F4A7C15]  # the last is the step between positions
    texts = [drawn(Seeded(processor, s), flat, 64).tolist() for s in seeds]
    assert all(a != b for a, b in itertools.combinations(texts, 2))
    assert drawn(Seeded(processor, 2**64 - 1), flat, 64).tolist() == texts[3]
    for shift in range(1, 4):  # one seed's noise is not another's, moved along
        assert all(a[shift:] != b[:-shift] for a, b in itertools.permutations(texts, 2))


def test_unseeded_samplers_share_no_noise() -> None:
    flat, processor = mx.zeros((V,)), LogitsProcessor(Sampling(1.0), 1, V)
    first, second = Unseeded(processor), Unseeded(processor)
    texts = [drawn(sampler, flat, 64).tolist() for sampler in (first, first, second)]
    assert all(a != b for a, b in itertools.combinations(texts, 2))  # equal once in 40**64


def test_unseeded_drafts_come_with_their_distribution() -> None:
    sampling = Sampling(1.0, top_p=0.8, **PENALTIES)
    sampler = Unseeded(processor_of(sampling), key=1)
    block, drafted = logits(4), mx.array([4, 4, 9], dtype=mx.int32)
    tokens, q = sampler.draw(block[:3], HISTORY, drafted[:2])
    assert q is not None and tokens.dtype == mx.int32
    assert np.allclose(np.array(q), distribution(sampling, block[:3], drafted[:2]), atol=1e-6)
    for draft in (Draft(drafted, probs=q), Draft(drafted), no_draft()):
        assert sampler.verify(block[: draft.tokens.shape[0] + 1], HISTORY, draft).shape == (2,)


@pytest.mark.parametrize("seed", [None, 3])
def test_banned_tokens_are_never_drawn(seed: int | None) -> None:
    sampler = Sampling(1.0, logit_bias={t: -math.inf for t in range(1, V)}, seed=seed).sampler(1, V)
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


# --- values


REFUSED: dict[str, list[Any]] = {
    "temperature": [-0.1, 1e-5, math.nan, math.inf, 10**400, "hot"],
    "top_k": [-1, 2.5, True],
    "top_p": [0, 1.01, math.nan],
    "min_p": [-0.1, 1.5],
    "repetition_penalty": [0, math.inf],
    "frequency_penalty": [-math.inf],
    "seed": [1.5, "one"],
    "late_tokens": [[-1]],
    "logit_bias": [{-1: 1.0}, {"a": 1.0}, {1: math.inf}, {1: math.nan}, {1: 1e10}, [1]],
    "grammar": ["json"],
}


@pytest.mark.parametrize(("name", "value"), [(name, each) for name in REFUSED for each in REFUSED[name]])
def test_values_out_of_range_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidValue, match=name) as caught:
        Sampling(**{name: value})
    message = str(caught.value)
    assert "\n" not in message and "give" in message
    shown = (
        next(iter(value.items()))
        if isinstance(value, dict)
        else value
        if isinstance(value, list)
        else [value]
    )
    assert any(repr(part) in message for part in shown)


def test_numbers_of_numpy_are_numbers() -> None:
    theirs = {"temperature": np.float32(0.5), "top_k": np.int64(3), "seed": np.uint8(7)}
    bias = {np.int32(1): np.float16(0.5)}
    found = Sampling(**theirs, logit_bias=bias, late_tokens=frozenset({np.int64(2)}))
    assert found == Sampling(0.5, 3, seed=7, logit_bias={1: 0.5}, late_tokens=frozenset({2}))
    values = [found.temperature, found.top_k, found.seed, *found.late_tokens, *(found.logit_bias or {})]
    assert {type(value) for value in values} == {float, int}


def test_a_bias_outside_the_vocabulary_is_refused() -> None:
    sampling = Sampling(logit_bias={V: 1.0})
    assert sampling.sampler(1, V + 1)
    with pytest.raises(InvalidValue, match=f"token id {V}.*{V - 1}"):
        sampling.sampler(1, V)


@pytest.mark.parametrize(
    "fields", [{}, {"logit_bias": dict.fromkeys(range(1, V), -math.inf), "late_tokens": {0}, "min_tokens": 1}]
)
def test_a_ban_of_all_tokens_is_refused(fields: dict[str, Any]) -> None:
    sampling = Sampling(**{"logit_bias": dict.fromkeys(range(V), -math.inf), **fields})
    with pytest.raises(InvalidValue, match=f"ban all {V} tokens"):
        sampling.sampler(1, V)
    assert dataclasses.replace(sampling, grammar=compiled("regex", "a")).sampler(1, V)


@pytest.mark.parametrize("fields", [{}, {"temperature": 1.0, "seed": 3}])
def test_a_grammar_wins_over_a_ban(fields: dict[str, Any]) -> None:
    sampling = Sampling(logit_bias={ord("a"): -math.inf}, grammar=compiled("regex", "a"), **fields)
    assert sampling.sampler(1, 256).draw(mx.zeros((1, 256)), [1], NONE)[0].tolist() == [ord("a")]
