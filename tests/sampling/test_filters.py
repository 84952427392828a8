"""The tokens that may be drawn and how likely they are: as the definitions say, in float64.

Any settings, any ties, any rows of a draft; a shortlist is as good as the vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mlx_lm.sample_utils import make_repetition_penalty
from support.exact_distribution import reference

from mlx_spec.sampling import LogitsProcessor, Sampling, Unseeded, likeliest, softmax
from mlx_spec.sampling.candidates import Candidates
from mlx_spec.types import Draft, no_draft

PROMPT = [3, 5, 5, 8, 13, 21, 34]
HISTORY = [*PROMPT, 3, 3, 9, 17, 9, 9, 39]
NONE = no_draft().tokens
VOCABULARIES = [262_144, 49_152, 50_257]  # the last one has no divisor near its square root
ROUNDING = 1e-5  # a sum of float32 numbers may lie on either side of a bound that is as close

BIAS = {0: 2.5, 9: -1.0, 12: -math.inf, 39: 3.3}
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "top_k": st.sampled_from([1, 7, 12, 40, 1000, 4096, 4097, 4999]),
    "top_p": st.sampled_from([1e-60, 1e-6]) | st.floats(0.3, 0.99),  # the first is 0 in float32
    "min_p": st.sampled_from([0.02, 0.1, 1.0]),
    "repetition_penalty": st.sampled_from([0.7, 1.37]),
    "presence_penalty": st.sampled_from([0.5, 1.5]),
    "frequency_penalty": st.sampled_from([-0.25, 0.75]),
    "logit_bias": st.just(BIAS),
    "min_tokens": st.sampled_from([7, 8, 9, 11, 12, 10**20]),  # HISTORY holds 7 generated tokens
}
SETTINGS = st.fixed_dictionaries({"temperature": st.sampled_from([0.6, 1.0, 1.7])}, optional=FIELDS)
LATE = frozenset({4, 9, 10**6})


def logits(rows: int, vocab: int, seed: int, spread: float = 2.0, step: float = 0.0) -> mx.array:
    """Return logits [T, V]; with a step, rounded to its multiples, so that many are equal."""
    values = np.random.default_rng([seed, vocab]).normal(size=(rows, vocab)) * spread
    return mx.array((np.round(values / step) * step if step else values).astype(np.float32))


def probabilities(found: Candidates, vocab: int) -> np.ndarray:
    return np.array(found.over_vocabulary(found.probs, 0.0, vocab)).astype(np.float64)


def whole(sampling: Sampling, block: mx.array, drafted: mx.array) -> np.ndarray:
    """Return the distribution [T, V] after HISTORY: of shortlists, or where one is short, of all."""
    vocab = block.shape[-1]
    processor = LogitsProcessor(sampling, len(PROMPT), vocab)
    listed = processor.candidates(block, HISTORY, drafted)
    assert listed.scores.dtype == mx.float32
    short = probabilities(listed, vocab)
    if not sampling.top_k and sampling.top_p == 1:
        return short
    every = probabilities(processor.candidates(block, HISTORY, drafted, exact=True), vocab)
    fits = np.array(listed.fits[0]) if listed.fits else np.ones(len(short), dtype=bool)
    assert ((short > 0) == (every > 0))[fits].all() and np.abs(short - every)[fits].max(initial=0) < 2e-6
    return every


def check(sampling: Sampling, found: np.ndarray, row: np.ndarray, history: list[int]) -> None:
    """Compare a distribution [V] with that of logits [V]; a sum close to top_p may go either way."""

    def kept(slack: float) -> np.ndarray:
        top_p = sampling.top_p if sampling.top_p == 1 else min(sampling.top_p * (1 + slack), 1.0)
        bounds = replace(sampling, top_p=top_p, min_p=min(sampling.min_p * (1 - slack), 1.0))
        return reference(bounds, row, history, len(PROMPT))

    here, least, most = found > 0, kept(-ROUNDING) > 0, kept(ROUNDING) > 0
    assert here.any() and (least <= here).all() and (here <= most).all()
    free = reference(replace(sampling, top_p=1.0, min_p=0.0), row, history, len(PROMPT)) * here
    assert np.abs(found - free / free.sum()).max() < 2e-6


@settings(max_examples=50)
@given(
    fields=SETTINGS,
    vocab=st.sampled_from([40, 300, 5000]),
    drafted=st.lists(st.integers(0, 39), max_size=4),
    step=st.sampled_from([0.0, 0.5, 2.0]),
    dtype=st.sampled_from([mx.float32, mx.float32, mx.float16, mx.bfloat16]),
    seed=st.integers(0, 99),
)
@example({"temperature": 1.0, "top_p": 0.95}, 5000, [], 0.5, mx.float32, 4)  # ties at a cut of the vocabulary
@example({"temperature": 1.7, "top_p": 0.9, "min_p": 0.02}, 5000, [9], 2.0, mx.float32, 5)
@example({"temperature": 1.0, "top_k": 4097, "top_p": 0.99}, 5000, [], 0.5, mx.float32, 6)
def test_a_distribution_is_that_of_its_definition(fields, vocab, drafted, step, dtype, seed) -> None:
    """Also the rows of a draft, each of which counts the drafted tokens before it, as one by one."""
    sampling = Sampling(**fields, late_tokens=LATE)
    block = logits(len(drafted) + 1, vocab, seed, step=step).astype(dtype)
    found = whole(sampling, block, mx.array(drafted, dtype=mx.int32))
    for j, row in enumerate(np.array(block.astype(mx.float32))):
        check(sampling, found[j], row, [*HISTORY, *drafted[:j]])
    few = 1 + seed % len(block)  # a pass may hold the last rows only
    later = whole(sampling, block[-few:], mx.array(drafted, dtype=mx.int32))
    assert np.abs(later - found[-few:]).max() < 1e-6


def test_repetition_penalty_is_that_of_mlx_lm() -> None:
    block = logits(1, 40, 0)
    theirs = make_repetition_penalty(1.3, len(HISTORY))(mx.array(HISTORY), mx.array(block))
    ours = LogitsProcessor(Sampling(repetition_penalty=1.3), len(PROMPT), 40).process(block, HISTORY, NONE)
    assert mx.allclose(ours, theirs, rtol=1e-6)


def test_counts_grow_with_the_history() -> None:
    sampling = Sampling(repetition_penalty=1.3, presence_penalty=0.6, frequency_penalty=-0.4)
    rng, history = np.random.default_rng(0), list(PROMPT)
    processor = LogitsProcessor(sampling, len(PROMPT), 40)
    for i in range(60):
        drafted = mx.array(rng.integers(40, size=i % 4).astype(np.int32))
        block = logits(drafted.shape[0] + 1, 40, seed=i)
        fresh = LogitsProcessor(sampling, len(PROMPT), 40).process(block, list(history), drafted)
        assert mx.allclose(processor.process(block, history, drafted), fresh, atol=1e-6)
        history.extend(rng.integers(40, size=i % 3).tolist())


# --- vocabularies of real models


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_distributions_are_normalised_to_a_millionth(vocab: int) -> None:
    """One sum of float32 numbers is 1.4e-4 too small at 262,144."""
    block = logits(3, vocab, seed=1, spread=1.5)
    exact = np.array(block).astype(np.float64)
    top = exact.max(-1, keepdims=True)
    total = top + np.log(np.exp(exact - top).sum(-1, keepdims=True))
    assert np.abs(np.array(softmax.log_total(block)) - total).max() < 2e-6
    drawn = probabilities(LogitsProcessor(Sampling(1.0), 0, vocab).candidates(block, [], NONE), vocab)
    for probs in (np.array(softmax.probabilities(block)).astype(np.float64), drawn):
        assert np.abs(probs.sum(-1) - 1).max() < 2e-6


@pytest.mark.parametrize("vocab", [*VOCABULARIES, 40])
@pytest.mark.parametrize("step", [0.0, 0.5, 100.0])
def test_the_likeliest_are_in_order(vocab: int, step: float) -> None:
    block = logits(2, vocab, seed=2, spread=3.0, step=step)
    block[0, :5] = mx.array([-0.0, 0.0, -0.0, -np.inf, 0.0])
    for rows in (block, block.astype(mx.bfloat16)):
        values = np.array(rows.astype(mx.float32))
        order = [np.lexsort((np.arange(vocab), -row)) for row in values]
        for count in (1, 5, 64, 1000):
            found = np.array(likeliest(rows, min(count, vocab)))
            assert (found == [ids[:count] for ids in order]).all()


@pytest.mark.parametrize("vocab", VOCABULARIES[:2])
@pytest.mark.parametrize("spread", [0.0, 1.5, 3.0])
def test_a_nucleus_is_that_of_float64(vocab: int, spread: float) -> None:
    """A spread of 3 gives one of some thousand tokens, 0 one of nearly all of them, which are equal."""
    block = logits(3, vocab, seed=3, spread=spread)
    for top_p in (0.5, 0.95):
        found = whole(Sampling(1.0, top_p=top_p), block, NONE)
        for probs, row in zip(found, np.array(block), strict=True):
            wanted = reference(Sampling(1.0, top_p=top_p), row, HISTORY, len(PROMPT)) > 0
            # a token whose probability is the rounding of the sum may be on either side of the cut
            assert ((probs > 0) != wanted).sum() <= 1


@pytest.mark.parametrize("tokens", [[4, 9, 2], [0, 0, 29], None], ids=["any", "twice", "likeliest"])
def test_a_draft_is_judged_beside_a_shortlist_as_in_the_vocabulary(tokens: list[int] | None) -> None:
    V, K = 30, 3
    block, q = logits(K + 1, V, seed=7, spread=3.0), softmax.probabilities(logits(K, V, seed=8, spread=1.0))
    drafted = mx.array(likeliest(block, 1)[:K, 0].tolist() if tokens is None else tokens, dtype=mx.int32)
    short = Candidates.of(block, 6, 1.0, 6)
    beside, columns, judged = short.beside(drafted, q)
    assert beside.ids is not None
    rows = zip(np.array(beside.ids), np.array(beside.probs), probabilities(short, V), strict=True)
    for row, (ids, p, dense) in enumerate(rows):
        assert np.allclose(dense[ids[p > 0]], p[p > 0], atol=1e-7)
        if row < K:
            token = int(drafted[row])
            assert ids[int(columns[row])] == token and np.isclose(p[ids == token].sum(), dense[token])
            assert np.array_equal(np.array(q)[row][ids], np.array(judged)[row])
    sampler = Unseeded(LogitsProcessor(Sampling(1.0, top_k=6), 1, V), key=1)
    n, token = sampler.verify(block, [0], Draft(drafted, q)).tolist()
    assert 0 <= n <= K and probabilities(short, V)[n][token] > 0
