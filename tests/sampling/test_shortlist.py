"""Nuclei that a shortlist does not hold are drawn and judged over the vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest
from support import chi_square, tiny
from support.lossless import Scripted, emitted, rounds, texts

from mlx_spec.decode import Batch
from mlx_spec.decode.running import RunningSequence
from mlx_spec.model.target import LMTarget
from mlx_spec.model.target_batch import TargetBatch
from mlx_spec.policy import FixedPolicy
from mlx_spec.prompt import text_prompt
from mlx_spec.sampling import LogitsProcessor, Sampling, Seeded, Unseeded, likeliest
from mlx_spec.types import Draft, FeatureSpec, no_draft

NONE = no_draft().tokens


def rows(count: int, vocab: int, seed: int, spread: float) -> mx.array:
    """Return logits [T, V]."""
    return mx.array(np.random.default_rng([seed, vocab]).normal(size=(count, vocab)) * spread, mx.float32)


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
    found = batched([(each, frozenset[int]()) for each in (sampling, Sampling(), sampling)], 12)
    assert found[0] == found[2] == truth


def batched(members: Sequence[tuple[Sampling, frozenset[int]]], count: int) -> dict[int, list[int]]:
    """Return the texts of sequences with these settings and stop tokens that share all passes."""
    batch = Batch(lambda: TargetBatch(WIDE, FeatureSpec()), 3)
    for sampling, stop in members:
        parts = ([], FixedPolicy(0), sampling.sampler(len(PROMPT), 5000), text_prompt(PROMPT), count, stop)
        batch.add(RunningSequence(LMTarget(WIDE, FeatureSpec()), *parts))
    return texts(batch.run())


def test_unseeded_verdicts_reach_beyond_the_shortlist() -> None:
    sampling = Sampling(1.5, top_p=0.95)
    row = WIDE(mx.array([PROMPT]))[0, -1:]
    best = set(likeliest(row, 2048)[0].tolist())
    answers = [rounds(LMTarget(WIDE), Scripted([]), 0, PROMPT, 2, 5000, sampling) for _ in range(12)]
    share = float(np.mean([emitted(done)[0] in best for done in answers]))
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
    accepted = [judged(sampler, block, [0])[0] for _ in range(120)]
    assert chi_square.excess(np.bincount(accepted, minlength=2), np.array([0.5, 0.5])) < 1


def test_a_sequence_leaves_before_its_queued_token_is_drawn_whole() -> None:
    """The others go on: it stops after its third token, and the nucleus of the fourth is too large."""
    sampling = Sampling(0.41, top_p=0.95, seed=4)
    truth = emitted(rounds(LMTarget(WIDE), Scripted([]), 0, PROMPT, 3, 5000, sampling))
    others = Sampling(), frozenset[int]()
    found = batched([others, (sampling, frozenset(truth[2:])), others], 6)
    assert found[1] == truth and found[0] == found[2] and len(found[0]) == 6
