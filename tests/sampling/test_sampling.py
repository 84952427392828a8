"""Draws and verdicts of the three samplers, their noise, and refusals.

Chi-square tests reject a right sampler once in a million. Keys are fixed, so a pass stays a pass.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from support import chi_square
from support.grammars import compiled

from mlx_spec.errors import InvalidValue
from mlx_spec.sampling import Greedy, LogitsProcessor, Sampling, Seeded, Unseeded
from mlx_spec.sampling.noise import draw_by_weight, gumbel, seeded_noise
from mlx_spec.types import Draft, no_draft

V = 40
NONE = no_draft().tokens
PROMPT = [3, 5, 5, 8, 13, 21, 34]
HISTORY = [*PROMPT, 3, 3, 9, 17, 9, 9, 39]
PENALTIES: dict[str, Any] = {"repetition_penalty": 1.3, "presence_penalty": 0.6, "frequency_penalty": -0.4}


def logits(rows: int, seed: int = 0, dtype: mx.Dtype = mx.float32, vocab: int = V) -> mx.array:
    return (mx.random.normal((rows, vocab), key=mx.random.key(seed)) * 2).astype(dtype)


def processor_of(sampling: Sampling) -> LogitsProcessor:
    return LogitsProcessor(sampling, len(PROMPT), V)


def distribution(processor: LogitsProcessor, *row: Any) -> np.ndarray:
    """Return the distribution [T, V] of what `row` gives to `candidates`."""
    found = processor.candidates(*row)
    return np.array(found.over_vocabulary(found.probs, 0.0, row[0].shape[-1])).astype(np.float64)


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
        assert processor_of(sampling).process(block, HISTORY, NONE) is block
        right = tokens[:4]
        for n, draft in [(4, right), (2, mx.where(mx.arange(4) == 2, right + 1, right)), (0, NONE)]:
            verdict = sampler.verify(block[: len(draft) + 1], HISTORY, Draft(draft))
            assert verdict.tolist() == [n, tokens[n].item()]


def test_greedy_obeys_penalties_and_bias() -> None:
    block, penalised = mx.array([[1.0, 3.0, 2.0]]), Sampling(presence_penalty=1.5)
    cases = [(Sampling(), 1, 1), (penalised, 1, 2), (penalised, 2, 1), (Sampling(logit_bias={0: 9.0}), 1, 0)]
    for sampling, prompt_length, best in cases:
        assert sampling.sampler(prompt_length, 3).draw(block, [0, 1], NONE)[0].tolist() == [best]


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
    p = distribution(processor, row[None], [0], NONE)[0]
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
    p = distribution(processor_of(sampling), block[:3], HISTORY, drafted[:2])
    assert np.allclose(np.array(q), p, atol=1e-6)
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


def test_draws_by_weight_follow_the_weights() -> None:
    for size in (1, 2, 13, 64):
        weights = np.random.default_rng(size).random(size) * (np.arange(size) % 4 != 1)
        drawn = draw_by_weight(mx.broadcast_to(mx.array(weights), (20_000, size)), mx.random.key(size))
        if size > 2:
            assert (
                chi_square.excess(np.bincount(np.array(drawn), minlength=size), weights / weights.sum()) < 1
            )
        else:
            assert drawn.max().item() == 0


def test_noise_of_a_token_does_not_depend_on_the_others() -> None:
    ids = mx.array([[5, 3, 70_000], [3, 5, 9]], dtype=mx.int32)
    noise = seeded_noise(7, 20, (2, 3), ids)
    assert mx.array_equal(noise[:, :2], seeded_noise(7, 20, (2, 2), ids[:, :2]))
    assert mx.array_equal(noise[1:], seeded_noise(7, 21, (1, 3), ids[1:]))
    many = np.array(seeded_noise(7, 0, (40, 500), mx.broadcast_to(mx.arange(500), (40, 500)))).ravel()
    cells = np.histogram(np.exp(-np.exp(-many)), bins=50, range=(0, 1))[0]  # uniform
    assert chi_square.excess(cells, np.full(50, 0.02)) < 1


# --- values


REFUSED: list[tuple[dict[str, Any], str]] = [
    *(({"temperature": value}, f"temperature={value!r}.*give") for value in (-0.1, 1e-5, math.nan, math.inf)),
    ({"temperature": 10**400}, "temperature=1000.*give"),
    ({"temperature": "hot"}, "temperature='hot'.*give 0 or a number"),
    *(({"top_k": value}, f"top_k={value}.*give an integer") for value in (-1, 2.5, True)),
    *(({"top_p": value}, f"top_p={value}.*give") for value in (0, 1.01, math.nan)),
    *(({"min_p": value}, f"min_p={value}.*give") for value in (-0.1, 1.5)),
    *(({"repetition_penalty": value}, f"repetition_penalty={value}.*give") for value in (0, math.inf)),
    ({"frequency_penalty": -math.inf}, "frequency_penalty=-inf.*give"),
    *(({"seed": value}, f"seed={value!r}.*give an integer") for value in (1.5, "one")),
    ({"late_tokens": [-1]}, "late_tokens token id=-1.*give"),
    ({"logit_bias": [1]}, r"logit_bias=\[1\].*give a mapping"),
    *(({"logit_bias": {key: 1.0}}, f"logit_bias token id={key!r}.*give") for key in (-1, "a")),
    *(
        ({"logit_bias": {1: value}}, f"logit_bias of token 1={value!r}.*give")
        for value in (math.inf, math.nan)
    ),
    ({"logit_bias": {1: 1e10}}, "logit_bias of token 1=10000000000.0.*give"),
    ({"grammar": "json"}, "grammar='json'.*give what compile_grammar returns"),
    # Of the sampler of a vocabulary.
    ({"logit_bias": {V: 1.0}}, f"token id {V}.*{V - 1}"),
    ({"logit_bias": dict.fromkeys(range(V), -math.inf)}, f"ban all {V} tokens"),
    (
        {"logit_bias": dict.fromkeys(range(1, V), -math.inf), "late_tokens": {0}, "min_tokens": 1},
        f"ban all {V} tokens",
    ),
]


@pytest.mark.parametrize(("fields", "words"), REFUSED)
def test_messages(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidValue, match=words) as caught:
        Sampling(**fields).sampler(1, V)
    assert "\n" not in str(caught.value)


def test_numbers_of_numpy_are_numbers() -> None:
    theirs = {"temperature": np.float32(0.5), "top_k": np.int64(3), "seed": np.uint8(7)}
    bias = {np.int32(1): np.float16(0.5)}
    found = Sampling(**theirs, logit_bias=bias, late_tokens=frozenset({np.int64(2)}))
    assert found == Sampling(0.5, 3, seed=7, logit_bias={1: 0.5}, late_tokens=frozenset({2}))
    values = [found.temperature, found.top_k, found.seed, *found.late_tokens, *(found.logit_bias or {})]
    assert {type(value) for value in values} == {float, int}


@pytest.mark.parametrize("fields", [{}, {"temperature": 1.0, "seed": 3}])
def test_a_grammar_wins_over_a_ban(fields: dict[str, Any]) -> None:
    sampling = Sampling(logit_bias={ord("a"): -math.inf}, grammar=compiled("regex", "a"), **fields)
    assert sampling.sampler(1, 256).draw(mx.zeros((1, 256)), [1], NONE)[0].tolist() == [ord("a")]
    banned = dict.fromkeys(range(256), -math.inf)
    assert replace(sampling, logit_bias=banned).sampler(1, 256)
