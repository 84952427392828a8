"""A model so small that the distribution of its next tokens is known exactly, and a test of what is emitted.

Each token of many short generations is compared with its exact distribution after the tokens before it. A
right engine is rejected once in a million; the keys are fixed, so a pass stays a pass.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import cache

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map
from mlx_lm.models import llama

from mlx_spec.decode.loop import generate
from mlx_spec.drafters import DrafterSource
from mlx_spec.drafters.draft_model import DraftModel, VocabularySizes
from mlx_spec.model.target import LMTarget
from mlx_spec.policy import FixedPolicy
from mlx_spec.sampling import LogitsProcessor, Sampling, Unseeded
from mlx_spec.types import Draft, Drafter, FeatureSpec, Sampler
from support import chi_square
from support.lossless import Scripted, emitted

V = 8
PROMPT = [1, 2, 3, 1, 2]  # lookup drafts 3, 1
COUNT = 3  # tokens of a generation: two drafted, one recovered or bonus
GENERATIONS = 160  # show a recovered token that is drawn from p, at 1.2 times the quantile
NOISE = 0.4  # of the draft model: with less or more of it, wrong rules change less
FEW = 120  # show the weakest lie of a drafter in the tests, of DFlash, at 1.3 times the quantile
DRAFTS = 60  # show every lie of a drafter in the tests, at 1.5 times the quantile or more
PLAIN = Sampling(1.0)
SPREAD = 0.6  # of the weights
FILTERED = Sampling(1.0, top_p=0.9, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.3)


def model(noise: float = 0.0, layers: int = 1) -> nn.Module:
    """A Llama of so many layers, D 16; with noise, one that resembles it."""
    args = llama.ModelArgs(
        model_type="llama",
        hidden_size=16,
        num_hidden_layers=layers,
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


class Liar(Unseeded):
    """Takes the likeliest token and says that it was drawn."""

    def __init__(self) -> None:
        super().__init__(LogitsProcessor(PLAIN, 0, V), key=0)

    def draw(
        self, logits: mx.array, history: Sequence[int], drafted: mx.array, *, exact: bool = False
    ) -> tuple[mx.array, mx.array | None]:
        return logits.argmax(axis=-1).astype(mx.int32), mx.softmax(logits, axis=-1)


class Lying:
    """A drafter that draws the likeliest tokens and says that they were drawn."""

    def __init__(self, drafter: Drafter) -> None:
        self.inner, self.needs, self.observe = drafter, drafter.needs, drafter.observe

    def draft(self, history: Sequence[int], limit: int, sampler: Sampler) -> Draft:
        return self.inner.draft(history, limit, Liar())


def draft_model() -> DraftModel:
    return DraftModel(model(noise=NOISE), VocabularySizes(V, V))


def reference(sampling: Sampling, row: np.ndarray, history: Sequence[int], prompt_length: int) -> np.ndarray:
    """Return the distribution after `history` of logits [V], by the definitions, one token at a time."""
    row, generated = row.astype(np.float64).copy(), list(history[prompt_length:])
    for t in set(history):
        row[t] *= sampling.repetition_penalty ** -np.sign(row[t])
    for t in set(generated):
        row[t] -= sampling.presence_penalty + sampling.frequency_penalty * generated.count(t)
    for t, bias in (sampling.logit_bias or {}).items():
        row[t] += bias
    if len(generated) < sampling.min_tokens:
        row[[t for t in sampling.late_tokens if t < len(row)]] = -np.inf
    p = np.exp((row - row.max()) / sampling.temperature)
    order = np.lexsort((np.arange(len(row)), -row))  # by score, then by id
    if sampling.top_k:
        p[order[sampling.top_k :]] = 0
    p /= p.sum()
    if sampling.top_p < 1:
        before = np.cumsum(p[order]) - p[order]
        p[order[before >= sampling.top_p]] = 0
    p[p < sampling.min_p * p.max()] = 0
    return np.asarray(p / p.sum())


def exact(target: nn.Module, sampling: Sampling) -> np.ndarray:
    """The distribution [V, V, V] of the tokens after the prompt, from plain passes over every prefix."""
    p = np.ones(())
    for depth in range(COUNT):
        histories = [[*PROMPT, *path] for path in itertools.product(range(V), repeat=depth)]
        logits = np.array(target(mx.array(histories))[:, -1])
        rows = [reference(sampling, *pair, len(PROMPT)) for pair in zip(logits, histories, strict=True)]
        p = p[..., None] * np.array(rows).reshape((V,) * (depth + 1))
    return p


def unseeded(sampling: Sampling) -> Callable[[int], Sampler]:
    return lambda i: Unseeded(LogitsProcessor(sampling, len(PROMPT), V), key=i)


def seeded(sampling: Sampling) -> Callable[[int], Sampler]:
    return lambda i: replace(sampling, seed=i).sampler(len(PROMPT), V)


@cache
def law_target() -> nn.Module:
    """A target of two layers, so that drafters may read the first."""
    return model(layers=2)


def texts(
    drafter: Drafter,
    sampler: Callable[[int], Sampler],
    generations: int,
    stop: Collection[int] = (),
    network: nn.Module | None = None,
) -> list[list[int]]:
    """Return what each generation emitted; those that ended go on with the first stop token.

    A `Scripted` drafter has nothing to draft here.
    """
    target, rest = LMTarget(network or law_target(), drafter.needs), [*stop][:1] * COUNT
    found, drafted = list[list[int]](), 0
    kept = len(PROMPT) - 1 if drafter.needs == FeatureSpec() else 0  # features of the prompt are read anew
    policy = FixedPolicy(COUNT - 1)
    for i in range(generations):
        target.rewind(kept)
        done = list(generate(target, [drafter], policy, sampler(i), PROMPT, max_tokens=COUNT, stop=stop))
        found.append([*emitted(done), *rest][:COUNT])
        drafted += sum(round.drafted for round in done)
    assert drafted >= generations or isinstance(drafter, Scripted)
    return found


def excess_of(found: Sequence[Sequence[int]], p: np.ndarray) -> float:
    """Return chi-square of texts over its quantile, above 1 a rejection: each place after those before it."""
    rows = []
    for text in found:
        for place in range(COUNT):
            row = p[tuple(text[:place])].reshape(V, -1).sum(1)
            if not row.sum():
                return float("inf")  # an impossible token came before
            rows.append(row / row.sum())
    places = np.tile(np.arange(COUNT), len(found))
    return chi_square.conditional_excess(np.ravel(found), np.array(rows), places)


def excess(
    drafter: Drafter,
    sampling: Sampling,
    sampler: Callable[[int], Sampler] | None = None,
    generations: int = GENERATIONS,
    network: nn.Module | None = None,
) -> float:
    """Return the excess of what a drafter's drafts become, without a seed if no sampler is given."""
    found = texts(drafter, sampler or unseeded(sampling), generations, network=network)
    return excess_of(found, exact(network or law_target(), sampling))


def drafted_excess(
    source: DrafterSource, sampling: Sampling = PLAIN, sampler: Callable[[int], Sampler] | None = None
) -> float:
    """Return the excess of what the drafts of a source become."""
    return excess(_made(source), sampling, sampler, FEW)


def drawn_excess(
    source: DrafterSource, sampling: Sampling = PLAIN, *, lies: bool = False, drafts: int = DRAFTS
) -> float:
    """Return the excess of draft tokens over the distributions that come with them, after one history.

    If it `lies`, the likeliest tokens are said to be drawn: they must be rejected.
    """
    target = LMTarget(law_target(), source.needs)
    drafter = source.make(target.parts)
    drafter.observe(PROMPT[:-1], target.prefill(PROMPT[:-2]))
    target.verify(mx.array(PROMPT[-2:-1]))
    drafter.observe(PROMPT, target.commit(1))
    drafter = Lying(drafter) if lies else drafter
    made = [drafter.draft(PROMPT, COUNT - 1, unseeded(sampling)(i)) for i in range(drafts)]
    tokens = np.concatenate([np.array(draft.tokens) for draft in made])
    assert len(tokens) == drafts * (COUNT - 1)
    rows = np.concatenate([np.array(draft.probs, dtype=np.float64) for draft in made])
    sums = rows.sum(-1, keepdims=True)
    assert np.abs(sums - 1).max() < 1e-5
    return chi_square.conditional_excess(tokens, rows / sums, np.tile(np.arange(COUNT - 1), drafts))


def _made(source: DrafterSource) -> Drafter:
    return source.make(LMTarget(law_target(), source.needs).parts)
