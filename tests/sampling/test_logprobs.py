"""Log-probabilities are those of one full forward pass, of generated tokens and of a given prompt."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from support import grammars, tiny
from support.exact_distribution import reference as distribution
from support.logprobs import TEXT, TOP, recorded, recorder_of
from support.lossless import GREEDY, Scripted, emitted, lengths, plain, rounds

from mlx_spec.model.layer_caches import MAX_UNCOMMITTED
from mlx_spec.model.target import LMTarget
from mlx_spec.policy import FixedPolicy
from mlx_spec.sampling import LogitsProcessor, Sampling
from mlx_spec.sampling.logprobs import LogprobRecorder, score_prompt
from mlx_spec.types import Draft, Drafter, FeatureSpec, Sampler, TokenLogprob

MODELS = {"full": tiny.full(), "sliding": tiny.sliding(), "recurrent": tiny.recurrent()}
NONE = mx.array([], dtype=mx.int32)
PENALTIES = Sampling(
    repetition_penalty=1.3,
    presence_penalty=0.4,
    frequency_penalty=0.3,
    logit_bias={3: -math.inf, 5: 2.5, 7: -1.0},
)
SAMPLINGS = {
    "greedy": Sampling(),
    "penalties": PENALTIES,
    "seeded": Sampling(temperature=1.3, top_p=0.9, seed=5),
    "unseeded": Sampling(temperature=0.7, top_k=20, presence_penalty=0.5, logit_bias={9: 3.0}),
}


def reference(
    model: nn.Module, sampling: Sampling, prompt: list[int], emitted: list[int], temperature: float = 1.0
) -> np.ndarray:
    """Return log-probabilities [N, V] at the emitted tokens, by one forward pass without a cache."""
    logits = np.array(model(mx.array([prompt + emitted]))[0].astype(mx.float32), dtype=np.float64)
    plain = replace(sampling, temperature=temperature, top_k=0, top_p=1.0, min_p=0.0, grammar=None)
    rows = [
        distribution(plain, row, [*prompt, *emitted[:j]], len(prompt))
        for j, row in enumerate(logits[len(prompt) - 1 : -1])
    ]
    with np.errstate(divide="ignore"):  # a banned token
        return np.log(np.array(rows))


def check(found: Sequence[TokenLogprob], rows: np.ndarray, emitted: list[int], within: float = 1e-5) -> None:
    assert [each.token for each in found] == emitted and len(rows) == len(emitted)
    for each, row in zip(found, rows, strict=True):
        assert abs(each.logprob - row[each.token]) < within
        order = sorted(-row)[:TOP]
        assert [-a.logprob for a in each.top] == pytest.approx([o for o in order if o < math.inf], abs=within)
        assert all(abs(a.logprob - row[a.token]) < within for a in each.top)
        assert len({a.token for a in each.top}) == len(each.top)
        assert each.token_bytes == TEXT.token_bytes(each.token)


POLICIES = {
    "plain": lambda: FixedPolicy(0),
    "speculative": lambda: FixedPolicy(4),
    "mixed": lambda: lengths(4, 0, 0, 4, 4, 4, 0, 4, 0),  # queued tokens, single plain rounds and drafts
}
CASES = [("sliding", name, "mixed") for name in SAMPLINGS]
CASES += [("sliding", "greedy", "plain"), ("sliding", "unseeded", "speculative")]
CASES += [("full", "unseeded", "mixed"), ("recurrent", "penalties", "mixed")]


# --- generated tokens


@pytest.mark.parametrize(("kind", "name", "policy"), CASES)
def test_they_equal_those_of_one_forward_pass(kind: str, name: str, policy: str) -> None:
    model, sampling, prompt = MODELS[kind], SAMPLINGS[name], tiny.prompt(13)
    truth = plain(model, prompt, 24) if name == "greedy" else [5] * 24
    done, found = recorded(model, Scripted(prompt + truth, 3), POLICIES[policy](), sampling, prompt)
    tokens = emitted(done)
    assert len(tokens) == 24  # past the window of 16
    if policy != "plain":
        drafted, accepted = sum(r.drafted for r in done), sum(r.accepted for r in done)
        assert drafted > 0 and accepted < drafted and (name != "greedy" or accepted)
    check(found, reference(model, sampling, prompt, tokens), tokens)


def test_temperature_and_filters_do_not_count() -> None:
    hot, prompt = SAMPLINGS["seeded"], tiny.prompt(13)
    done, found = recorded(MODELS["full"], Scripted([]), FixedPolicy(0), hot, prompt)
    warm = reference(MODELS["full"], hot, prompt, emitted(done), temperature=1.3)
    with pytest.raises(AssertionError):
        check(found, warm, emitted(done))


class Drawing:
    """Draws its draft tokens from a distribution of its own, as a model does."""

    needs = FeatureSpec()

    def __init__(self) -> None:
        self.logits = mx.random.normal((4, 256))
        self.samplers: list[Sampler] = []

    def observe(self, history: Sequence[int], features: object) -> None:
        pass

    def draft(self, history: Sequence[int], limit: int, sampler: Sampler) -> Draft:
        self.samplers.append(sampler)
        drawn = [sampler.draw(self.logits[j : j + 1], history, NONE) for j in range(limit)]
        probs = [q for _, q in drawn if q is not None]
        return Draft(mx.concatenate([t for t, _ in drawn]), mx.concatenate(probs))


def test_draws_of_drafters_are_not_recorded() -> None:
    prompt, sampling, drafter = tiny.prompt(13), Sampling(temperature=2.0), Drawing()
    done, found = recorded(MODELS["full"], drafter, FixedPolicy(4), sampling, prompt)
    assert sum(r.accepted for r in done)
    assert not any(isinstance(sampler, LogprobRecorder) for sampler in drafter.samplers)
    check(found, reference(MODELS["full"], sampling, prompt, emitted(done)), emitted(done))


@pytest.mark.parametrize("K", [0, 3])
def test_masked_tokens_are_no_alternatives(K: int) -> None:
    allowed = {17, 40}
    sampling = Sampling(logit_bias={i: -math.inf for i in range(256) if i not in allowed})
    _, found = recorded(MODELS["full"], Scripted([17] * 90), FixedPolicy(K), sampling, tiny.prompt(9))
    assert all({a.token for a in each.top} == allowed for each in found)
    assert all(math.isfinite(each.logprob) and each.top[0].token == each.token for each in found)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.5, seed=3)])
def test_a_grammar_counts(sampling: Sampling) -> None:
    grammar = grammars.compiled("regex", "([ab]{3}(c|de)){20}")
    sampling = Sampling(sampling.temperature, seed=sampling.seed, grammar=grammar)
    prompt, found, truth = tiny.prompt(9), [], list[int]()
    for K in (0, 4):
        drafter = Scripted(prompt + truth, 2, wrong=[ord("x"), ord("a"), grammars.END])
        done, each = recorded(MODELS["full"], drafter, FixedPolicy(K), sampling, prompt)
        truth = emitted(done)
        found.append(each)
    assert bytes(truth[:3]).strip(b"ab") == b"" and sum(r.accepted for r in done) > 5
    for off, on in zip(*found, strict=True):
        assert off.token == on.token and abs(off.logprob - on.logprob) < 1e-5
        assert {a.token for a in off.top} == {a.token for a in on.top} <= set(b"abcde")
        assert sum(math.exp(a.logprob) for a in on.top) == pytest.approx(1)
    assert {len(each.top) for each in found[0]} >= {1, 2}


def test_the_last_draw_of_a_position_counts() -> None:
    recorder = recorder_of(Sampling(), 1, 1)
    first, second = mx.zeros((1, 256)).at[0, 3].add(9.0), mx.zeros((1, 256)).at[0, 4].add(2.0)
    recorder.draw(first, [3], NONE)
    recorder.draw(mx.zeros((1, 256)), [3], mx.array([3], dtype=mx.int32))  # queued, then dropped
    recorder.draw(second, [3], NONE)
    (each,) = recorder.logprobs(1, [4])
    assert each.logprob == pytest.approx(2 - math.log(255 + math.exp(2)), abs=1e-5)
    with pytest.raises(KeyError):
        recorder.logprobs(2, [0])


# --- tokens of a prompt


def scored(
    target: LMTarget,
    prompt: list[int],
    drafters: Sequence[Drafter] = (),
    sampling: Sampling = GREEDY,
    prompt_length: int = 0,
) -> list[TokenLogprob]:
    processor = LogitsProcessor(sampling, prompt_length, 256)
    return [each for chunk in score_prompt(target, drafters, processor, prompt, TEXT, TOP) for each in chunk]


@pytest.mark.parametrize("length", [1, 2, MAX_UNCOMMITTED, MAX_UNCOMMITTED + 1, MAX_UNCOMMITTED + 2, 150])
@pytest.mark.parametrize("kind", MODELS)
def test_a_prompt_is_scored_and_then_continued(kind: str, length: int) -> None:
    model, prompt, needs = MODELS[kind], tiny.prompt(length), FeatureSpec(final_hidden=True)
    target, drafter = LMTarget(model, needs), Scripted([], needs=needs)
    found = scored(target, prompt, [drafter])
    check(found, reference(model, Sampling(), prompt[:1], prompt[1:]), prompt[1:])
    assert target.size == length - 1 and target.uncommitted == 0
    truth = plain(model, prompt, 8)
    assert emitted(rounds(target, Scripted(prompt + truth, 2), 3, prompt, 8)) == truth
    seen = [f.final_hidden.shape[0] for f in drafter.seen if f.final_hidden is not None]
    assert drafter.histories == [sum(seen[: i + 1]) + 1 for i in range(len(seen))]
    assert sum(seen) == length - 1


def test_scoring_may_end_early() -> None:
    model, prompt = MODELS["sliding"], tiny.prompt(150)
    target = LMTarget(model)
    stream = score_prompt(target, [], LogitsProcessor(GREEDY, 0, 256), prompt, TEXT, TOP)
    next(stream)
    stream.close()
    assert target.size == MAX_UNCOMMITTED and target.uncommitted == 0
    assert emitted(rounds(target, Scripted([]), 0, prompt, 5)) == plain(model, prompt, 5)


def test_tokens_that_the_target_holds_are_not_scored_again() -> None:
    prompt, target = tiny.prompt(100), LMTarget(MODELS["full"])
    target.prefill(prompt[:30])
    check(
        scored(target, prompt), reference(MODELS["full"], Sampling(), prompt[:31], prompt[31:]), prompt[31:]
    )
