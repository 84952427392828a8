"""Shortlists, nuclei and sums over a vocabulary against numpy in float64; draws by weight."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from support import chi_square, tiny
from support.lossless import Scripted, emitted, rounds

from mlx_spec.decode import Batch
from mlx_spec.decode.running import RunningSequence
from mlx_spec.model.target import LMTarget
from mlx_spec.model.target_batch import TargetBatch
from mlx_spec.policy import FixedPolicy
from mlx_spec.prompt import text_prompt
from mlx_spec.sampling import LogitsProcessor, Sampling, Seeded, Unseeded, likeliest, softmax
from mlx_spec.sampling.candidates import Candidates
from mlx_spec.sampling.noise import draw_by_weight, seeded_noise
from mlx_spec.types import Draft, FeatureSpec, no_draft

VOCABULARIES = [262_144, 49_152, 50_257]  # the last one has no divisor near its square root
NONE = no_draft().tokens


def rows(count: int, vocab: int, seed: int, spread: float = 3.0, step: float = 0.0) -> mx.array:
    """Return logits [T, V]; with a step, rounded to its multiples, so that many are equal."""
    values = np.random.default_rng([seed, vocab]).normal(size=(count, vocab)) * spread
    return mx.array((np.round(values / step) * step if step else values).astype(np.float32))


def in_order(row: np.ndarray) -> np.ndarray:
    """Return all tokens, by score and then by id."""
    return np.lexsort((np.arange(len(row)), -row))


def expected(row: np.ndarray, top_k: int, top_p: float, min_p: float) -> set[int]:
    """Return the tokens that may be drawn of logits [V], by the definitions, in float64."""
    order = in_order(row)[: top_k or None]
    p = np.exp(row[order].astype(np.float64) - row.max())
    p /= p.sum()
    if top_p < 1:
        order = order[: np.searchsorted(np.cumsum(p), top_p) + 1]
    return set(order[p[: len(order)] >= min_p * p[0]].tolist())


def kept(block: mx.array, **fields: Any) -> list[set[int]]:
    """Return the tokens that may be drawn of each row: of a shortlist that holds them, or of all."""
    processor = LogitsProcessor(Sampling(1.0, **fields), 0, block.shape[1])
    listed, fits = tokens_of(processor.candidates(block, [], NONE))
    if fits.all():
        return listed
    every, _ = tokens_of(processor.candidates(block, [], NONE, exact=True))
    assert all(a == b for a, b, fit in zip(listed, every, fits, strict=True) if fit)
    return every


def tokens_of(found: Candidates) -> tuple[list[set[int]], np.ndarray]:
    ids = None if found.ids is None else np.array(found.ids)
    columns = [np.nonzero(row)[0] for row in np.array(found.weights)]
    tokens = [set((each if ids is None else ids[i][each]).tolist()) for i, each in enumerate(columns)]
    return tokens, np.array(found.fits[0]) if found.fits else np.ones(len(tokens), dtype=bool)


# --- sums


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_distributions_are_normalised_to_a_millionth(vocab: int) -> None:
    """One sum of float32 numbers is 1.4e-4 too small at 262,144."""
    block = rows(3, vocab, seed=1, spread=1.5)
    exact = np.array(block).astype(np.float64)
    top = exact.max(-1, keepdims=True)
    total = top + np.log(np.exp(exact - top).sum(-1, keepdims=True))
    assert np.abs(np.array(softmax.log_total(block)) - total).max() < 2e-6
    assert np.abs(np.array(softmax.probabilities(block)).astype(np.float64).sum(-1) - 1).max() < 2e-6
    _, q = Unseeded(LogitsProcessor(Sampling(1.0), 0, vocab), key=1).draw(block, [], NONE)
    assert q is not None and np.abs(np.array(q).astype(np.float64).sum(-1) - 1).max() < 2e-6


# --- shortlists and nuclei


@pytest.mark.parametrize("vocab", [*VOCABULARIES, 40])
@pytest.mark.parametrize("step", [0.0, 0.5, 100.0])
def test_the_likeliest_are_in_order(vocab: int, step: float) -> None:
    block = rows(2, vocab, seed=2, step=step)
    block[0, :5] = mx.array([-0.0, 0.0, -0.0, -np.inf, 0.0])
    for count in (1, 5, 64, 1000):
        found, count = np.array(likeliest(block, min(count, vocab))), min(count, vocab)
        assert all(
            (ids == in_order(row)[:count]).all() for ids, row in zip(found, np.array(block), strict=True)
        )
        half = likeliest(block.astype(mx.bfloat16), count)
        wide = np.array(block.astype(mx.bfloat16).astype(mx.float32))
        assert all(
            (ids == in_order(row)[:count]).all() for ids, row in zip(np.array(half), wide, strict=True)
        )


@pytest.mark.parametrize("vocab", [262_144, 49_152])
@pytest.mark.parametrize("spread", [0.0, 1.5, 3.0])
def test_a_nucleus_is_that_of_float64(vocab: int, spread: float) -> None:
    """A spread of 3 gives one of some thousand tokens, 0 one of nearly all of them, which are equal."""
    block = rows(3, vocab, seed=3, spread=spread)
    for top_p in (0.5, 0.95):
        found = kept(block, top_p=top_p)
        for ids, row in zip(found, np.array(block), strict=True):
            wanted = expected(row, 0, top_p, 0)
            # a token whose probability is the rounding of the sum may be on either side of the cut
            assert len(ids ^ wanted) <= 1 and abs(len(ids) - len(wanted)) <= 1


SETTINGS = [
    {"top_k": 7},
    {"top_p": 0.7},
    {"min_p": 0.2},
    {"top_k": 9, "top_p": 0.6, "min_p": 0.1},
    {"top_p": 0.9, "min_p": 0.1},
]


@pytest.mark.parametrize("fields", SETTINGS)
@pytest.mark.parametrize("vocab", [17, 5000])
def test_kept_tokens_are_those_of_numpy_with_ties(fields: dict[str, Any], vocab: int) -> None:
    for step in (0.0, 0.25, 1.0):
        block = rows(60 if vocab < 100 else 5, vocab, seed=4, step=step)
        values = {"top_k": 0, "top_p": 1.0, "min_p": 0.0} | fields
        assert kept(block, **fields) == [expected(row, **values) for row in np.array(block)]


def test_a_large_top_k_needs_no_shortlist() -> None:
    block = rows(2, 20_000, seed=5, step=0.5)
    for top_k in (4096, 4097, 19_999):
        assert kept(block, top_k=top_k) == [expected(row, top_k, 1, 0) for row in np.array(block)]


# --- draws


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


def test_a_shortlist_is_drawn_and_judged_as_the_vocabulary() -> None:
    """A shortlist of all tokens but the last, which is banned, has the distribution of the vocabulary."""
    V, count = 12, 8000
    block = mx.broadcast_to(mx.where(mx.arange(V) < V - 1, rows(1, V, seed=6), -mx.inf), (count, V))
    p = np.array(softmax.probabilities(block[0])).astype(np.float64)
    filler = mx.zeros((count - 1,), dtype=mx.int32)
    for make in (lambda processor: Seeded(processor, 3), lambda processor: Unseeded(processor, key=3)):
        sampler = make(LogitsProcessor(Sampling(1.0, top_k=V - 1), 1, V))
        tokens, q = sampler.draw(block, [0], filler)
        assert chi_square.excess(np.bincount(np.array(tokens), minlength=V), p / p.sum()) < 1
        assert q is None or np.abs(np.array(q[0]) - p).max() < 1e-6


def test_block_verification_of_a_shortlist_equals_that_of_the_vocabulary() -> None:
    V, K = 30, 3
    block, q = rows(K + 1, V, seed=7), softmax.probabilities(rows(K, V, seed=8, spread=1.0))
    for tokens in ([4, 9, 2], [0, 0, 29], likeliest(block, 1)[:K, 0].tolist()):
        drafted = mx.array(tokens, dtype=mx.int32)
        short = Candidates.of(block, 6, 1.0, 6)
        beside, columns, judged = short.beside(drafted, q)
        assert beside.ids is not None
        assert mx.take_along_axis(beside.ids[:K], columns[:, None], axis=-1)[:, 0].tolist() == tokens
        dense = np.array(short.over_vocabulary(short.probs, 0.0, V))
        for row, (ids, p) in enumerate(zip(np.array(beside.ids), np.array(beside.probs), strict=True)):
            assert np.allclose(dense[row][ids[p > 0]], p[p > 0], atol=1e-7)
            if row < K:
                assert np.array_equal(np.array(q)[row][ids], np.array(judged)[row])
                drawn = ids == tokens[row]
                assert np.isclose(p[drawn].sum(), dense[row][tokens[row]])
        sampler = Unseeded(LogitsProcessor(Sampling(1.0, top_k=6), 1, V), key=1)
        n, token = sampler.verify(block, [0], Draft(drafted, q)).tolist()
        assert 0 <= n <= K and dense[n][token] > 0


# --- nuclei that a shortlist does not hold

WIDE = tiny.full(vocab_size=5000, scale=0.1)  # nearly flat: a nucleus of .95 has more than 4,000 tokens
PROMPT = [5, 900, 4000, 17]


@pytest.mark.parametrize("temperature", [0.05, 1.5])
def test_a_nucleus_beyond_the_shortlist_is_drawn_whole(temperature: float) -> None:
    """With a seed, plain, drafted and batched texts are those of passes without a cache."""
    sampling = Sampling(temperature, top_p=0.95, seed=3)
    sampler, history = sampling.sampler(len(PROMPT), 5000), list(PROMPT)
    late = 0
    for _ in range(12):
        row = WIDE(mx.array([history]))[0, -1:]
        token, _ = sampler.draw(row, history, NONE)
        if not sampler.fits[0].item():
            token, _ = sampler.draw(row, history, NONE, exact=True)
        history.append(token.item())
        late += history[-1] not in likeliest(row, 2048)[0].tolist()
    truth = history[len(PROMPT) :]
    assert bool(late) == (temperature > 1)
    for K, drafter in ((0, Scripted([])), (3, Scripted(history, 3))):
        done = rounds(LMTarget(WIDE), drafter, K, PROMPT, 12, 5000, sampling)
        assert emitted(done) == truth
        assert not K or sum(r.accepted for r in done) > 3
    sequences = [
        RunningSequence(
            LMTarget(WIDE, FeatureSpec()),
            [],
            FixedPolicy(0),
            each.sampler(len(PROMPT), 5000),
            text_prompt(PROMPT),
            12,
        )
        for each in (sampling, Sampling(), sampling)
    ]
    batch = Batch(lambda: TargetBatch(WIDE, FeatureSpec()), 3)
    for sequence in sequences:
        batch.add(sequence)
    found: dict[int, list[int]] = {}
    for index, result in batch.run():
        assert not isinstance(result, Exception)
        found.setdefault(index, []).extend(result.tokens)
    assert found[0] == found[2] == truth


def test_unseeded_verdicts_reach_beyond_the_shortlist() -> None:
    sampling = Sampling(1.5, top_p=0.95)
    row = WIDE(mx.array([PROMPT]))[0, -1:]
    best = set(likeliest(row, 2048)[0].tolist())
    texts = [rounds(LMTarget(WIDE), Scripted([]), 0, PROMPT, 2, 5000, sampling) for _ in range(12)]
    share = float(np.mean([emitted(done)[0] in best for done in texts]))
    assert 0.2 < share < 0.95


def judged(sampler: Seeded | Unseeded, block: mx.array, tokens: list[int]) -> list[int]:
    """Return the verdict of a round: judged again over the vocabulary where a shortlist does not fit."""
    draft = Draft(mx.array(tokens, dtype=mx.int32))
    verdict = sampler.verify(block, [0], draft)
    if any(not fits.item() for fits in sampler.fits):
        verdict = sampler.verify(block, [0], draft, exact=True)
    return verdict.tolist()


def test_a_row_beyond_its_shortlist_leaves_the_tokens_of_the_others() -> None:
    """With a seed a row draws the same token alone and beside rows whose nuclei are larger."""
    for seed in range(12):
        wide = np.random.default_rng(seed).random(4) < 0.5
        block = mx.concatenate([rows(1, 5000, seed, 0.1 if each else 4.0) for each in wide])
        sampling, truth = Sampling(1.0, top_p=0.95, seed=seed), list[int]()
        for j in range(4):
            alone = sampling.sampler(1, 5000)
            token, _ = alone.draw(block[j : j + 1], [0, *truth], NONE)
            if not alone.fits[0].item():
                token, _ = alone.draw(block[j : j + 1], [0, *truth], NONE, exact=True)
            truth.append(token.item())
        sampler = sampling.sampler(1, 5000)
        assert isinstance(sampler, Seeded)
        assert judged(sampler, block, truth[:3]) == [3, truth[3]]


def test_whether_a_round_is_judged_again_does_not_depend_on_its_draws() -> None:
    """Else a draft token before a wide row would have to be drawn twice: it would be too rare."""
    first = mx.where(mx.arange(5000) < 2, 0.0, -20.0)  # tokens 0 and 1, and 0 is drafted
    block = mx.stack([first, rows(1, 5000, 9, 0.1)[0]])
    sampler = Unseeded(LogitsProcessor(Sampling(1.0, top_p=0.95), 1, 5000), key=4)
    accepted = [judged(sampler, block, [0])[0] for _ in range(200)]
    assert chi_square.excess(np.bincount(accepted, minlength=2), np.array([0.5, 0.5])) < 1


def test_a_sequence_leaves_before_its_queued_token_is_drawn_whole() -> None:
    """The others go on: it stops after its third token, and the nucleus of the fourth is too large."""
    sampling = Sampling(0.41, top_p=0.95, seed=4)
    truth = emitted(rounds(LMTarget(WIDE), Scripted([]), 0, PROMPT, 3, 5000, sampling))
    batch = Batch(lambda: TargetBatch(WIDE, FeatureSpec()), 3)
    for each in (Sampling(), sampling, Sampling()):
        sampler, stop = each.sampler(len(PROMPT), 5000), frozenset(truth[2:] if each.seed else ())
        target = LMTarget(WIDE, FeatureSpec())
        batch.add(RunningSequence(target, [], FixedPolicy(0), sampler, text_prompt(PROMPT), 6, stop))
    found: dict[int, list[int]] = {}
    for index, result in batch.run():
        assert not isinstance(result, Exception)
        found.setdefault(index, []).extend(result.tokens)
    assert found[1] == truth and found[0] == found[2] and len(found[0]) == 6
