"""What the engine emits when it samples follows the target's law, whatever is drafted.

Many short generations of a tiny model are counted by their three tokens and compared with its exact law. A
right engine is rejected once in a million; the keys are fixed, so a pass stays a pass. The controls, argmax
drafts that pose as sampled, must be rejected by the same test.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import chi_square
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from lossless import Scripted, emitted, first_difference
from mlx.utils import tree_map
from mlx_lm.models import llama
from test_sampling import reference

from mlx_spec import verify
from mlx_spec.drafters.draft_model import DraftModel, VocabularySizes
from mlx_spec.drafters.model_free import Lookup
from mlx_spec.engine import generate
from mlx_spec.policy import Fixed
from mlx_spec.sampling import Law, Sampling, Unseeded
from mlx_spec.target import LMTarget
from mlx_spec.types import Draft, Drafter, Features, FeatureSpec, Sampler, no_draft

V = 8
PROMPT = [1, 2, 3, 1, 2]  # lookup drafts 3, 1
COUNT = 3  # tokens of a generation: two drafted, one recovered or bonus
GENERATIONS, FEW = 600, 300  # the controls need fewer
PLAIN = Sampling(1.0)
SPREAD = 0.6  # of the weights: 31 of the 512 cells or more are expected five times
FILTERED = Sampling(1.0, top_p=0.9, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.3)


def model(noise: float = 0.0) -> nn.Module:
    """A Llama of one layer; with noise, one that resembles it."""
    args = llama.ModelArgs(
        model_type="llama",
        hidden_size=16,
        num_hidden_layers=1,
        intermediate_size=16,
        num_attention_heads=1,
        rms_norm_eps=1e-5,
        vocab_size=V,
        num_key_value_heads=1,
        head_dim=16,
    )
    built = llama.Model(args)
    mx.random.seed(1)
    weights = tree_map(lambda x: SPREAD * mx.random.normal(x.shape), built.parameters())
    built.update(tree_map(lambda x: x + noise * mx.random.normal(x.shape), weights))
    mx.eval(built.parameters())
    return built


class Nothing:
    """Never drafts."""

    needs = FeatureSpec()

    def observe(self, history: Sequence[int], features: Features) -> None:
        pass

    def draft(self, history: Sequence[int], limit: int, sampler: Sampler) -> Draft:
        return no_draft()


class Posing(DraftModel):
    """Drafts the likeliest tokens and says that they were drawn."""

    def draft(self, history: Sequence[int], limit: int, sampler: Sampler) -> Draft:
        return super().draft(history, limit, Liar())


class Liar(Unseeded):
    def __init__(self) -> None:
        super().__init__(Law(PLAIN, 0, V), key=0)

    def draw(
        self, logits: mx.array, history: Sequence[int], drafted: mx.array
    ) -> tuple[mx.array, mx.array | None]:
        return logits.argmax(axis=-1).astype(mx.int32), mx.softmax(logits, axis=-1)


def draft_model(kind: type[DraftModel] = DraftModel) -> DraftModel:
    return kind(model(noise=0.2), VocabularySizes(V, V))


def exact(target: nn.Module, sampling: Sampling) -> np.ndarray:
    """The law [V, V, V] of the tokens after the prompt, from plain passes over every prefix."""
    law = np.ones(())
    for depth in range(COUNT):
        histories = [[*PROMPT, *path] for path in itertools.product(range(V), repeat=depth)]
        logits = np.array(target(mx.array(histories))[:, -1])
        rows = [reference(sampling, *pair, len(PROMPT)) for pair in zip(logits, histories, strict=True)]
        law = law[..., None] * np.array(rows).reshape((V,) * (depth + 1))
    return law


def unseeded(sampling: Sampling, rule: verify.Rule = verify.block) -> Callable[[int], Sampler]:
    return lambda i: Unseeded(Law(sampling, len(PROMPT), V), rule=rule, key=i)


def seeded(sampling: Sampling) -> Callable[[int], Sampler]:
    return lambda i: replace(sampling, seed=i).sampler(len(PROMPT), V)


def excess(
    drafter: Drafter, sampling: Sampling, sampler: Callable[[int], Sampler], generations: int = GENERATIONS
) -> float:
    """Chi-square of the tokens of many generations, over its quantile: above 1 is a rejection."""
    weights = model()
    target, counts = LMTarget(weights), np.zeros((V,) * COUNT)
    for i in range(generations):
        target.rewind(len(PROMPT) - 1)
        done = list(generate(target, [drafter], Fixed(COUNT - 1), sampler(i), PROMPT, max_tokens=COUNT))
        assert done[0].drafted == (0 if isinstance(drafter, Nothing) else COUNT - 1)
        counts[tuple(emitted(done))] += 1
    return chi_square.excess(counts, exact(weights, sampling))


@pytest.mark.parametrize("rule", [verify.block, verify.token])
def test_drafts_drawn_by_a_model(rule: verify.Rule) -> None:
    assert excess(draft_model(), PLAIN, unseeded(PLAIN, rule)) < 1


def test_drafts_drawn_by_a_model_with_filters_and_penalties() -> None:
    assert excess(draft_model(), FILTERED, unseeded(FILTERED)) < 1


@pytest.mark.parametrize("sampling", [PLAIN, FILTERED])
def test_drafts_without_chance(sampling: Sampling) -> None:
    assert excess(Lookup(2, 8), sampling, unseeded(sampling)) < 1


def test_no_drafts() -> None:
    assert excess(Nothing(), FILTERED, unseeded(FILTERED)) < 1


def test_seeded_drafts_drawn_with_the_target_s_noise() -> None:
    assert excess(draft_model(), FILTERED, seeded(FILTERED)) < 1


@pytest.mark.parametrize("rule", [verify.block, verify.token])
def test_argmax_posing_as_sampled_is_caught(rule: verify.Rule) -> None:
    assert excess(draft_model(Posing), PLAIN, unseeded(PLAIN, rule), FEW) > 1


def test_filters_left_out_are_caught() -> None:
    assert excess(Nothing(), FILTERED, unseeded(PLAIN), FEW) > 1


def text(drafter: Drafter, K: int, sampling: Sampling, count: int) -> list[int]:
    sampler = sampling.sampler(len(PROMPT), V)
    rounds = list(generate(LMTarget(model()), [drafter], Fixed(K), sampler, PROMPT, max_tokens=count))
    if not isinstance(drafter, Nothing):
        assert 0 < sum(r.accepted for r in rounds) < sum(r.drafted for r in rounds)
    return emitted(rounds)


@pytest.mark.parametrize("filtered", [False, True])
def test_seeded_text_is_the_same_with_any_drafter_or_none(filtered: bool) -> None:
    """2,000 tokens a case: nine drafted texts of 200 and the plain one."""
    sampling, count = Sampling(0.8, seed=11), 200
    if filtered:
        sampling = replace(sampling, top_p=0.95, repetition_penalty=1.1, frequency_penalty=0.02)
    plain = text(Nothing(), 0, sampling, count)
    spoiled = [(t + 1) % V if i % 5 == 4 else t for i, t in enumerate(plain)]
    for K in (1, 3, 7):
        for drafter in (Scripted([*PROMPT, *spoiled]), Lookup(1, 8), draft_model()):
            drafted = text(drafter, K, sampling, count)
            assert drafted == plain, f"{type(drafter).__name__}, K {K}: {first_difference(drafted, plain)}"
    assert text(Nothing(), 0, replace(sampling, seed=12), count) != plain
