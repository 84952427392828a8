"""Log-probabilities are those of one full forward pass, however the tokens came about."""

from __future__ import annotations

import math
from collections.abc import Sequence

import grammars
import mlx.core as mx
import mlx.nn as nn
import pytest
import tiny
from likelihood import TEXT, TOP, check, log_softmax, reference
from lossless import Scripted, plain

import mlx_spec
from mlx_spec import engine
from mlx_spec.model.target import LMTarget
from mlx_spec.sampling import LogitsProcessor, Sampling
from mlx_spec.sampling.logprobs import LogprobRecorder
from mlx_spec.tuning.fixed import Fixed
from mlx_spec.types import (
    Choice,
    Decision,
    Draft,
    Drafter,
    DraftLengthPolicy,
    FeatureSpec,
    Reason,
    Round,
    Sampler,
    TokenLogprob,
)

MODELS = {"full": tiny.full(), "sliding": tiny.sliding(), "recurrent": tiny.recurrent()}


def recorded(
    model: nn.Module, drafter: Drafter, policy: DraftLengthPolicy, sampling: Sampling, prompt: list[int]
) -> tuple[list[Round], list[TokenLogprob]]:
    """40 tokens, and what was recorded of them round by round."""
    recorder = LogprobRecorder(sampling.sampler(len(prompt), 256), LogitsProcessor(sampling, len(prompt), 256), TEXT, TOP)
    position, rounds, found = len(prompt), [], []
    for round in engine.generate(LMTarget(model), [drafter], policy, recorder, prompt, max_tokens=40):
        rounds.append(round)
        found += recorder.of(position, round.tokens)
        position += len(round.tokens)
    assert len(recorder._kept) == 0, "what was read is dropped"
    return rounds, found


class Mixed:
    """Plain rounds that look ahead, single plain rounds and drafts in turn."""

    def __init__(self) -> None:
        self.rounds = 0

    def begin(self) -> None:
        pass

    def decide(self, history: Sequence[int]) -> Decision:
        drafts = self.rounds // 3 % 2 or self.rounds % 7 == 0
        return Decision((Choice(0, 4),) if drafts else (), Reason.PROBE)

    def cut(self, drafter: int, confidence: Sequence[float]) -> int:
        raise AssertionError("nothing selective was decided")

    def observe(self, round: Round) -> None:
        self.rounds += 1


ALL = Sampling(
    repetition_penalty=1.3,
    presence_penalty=0.4,
    frequency_penalty=0.3,
    logit_bias={3: -math.inf, 5: 2.5, 7: -1.0},
)
SAMPLINGS = {
    "greedy": Sampling(),
    "penalties": ALL,
    "seeded": Sampling(temperature=1.3, top_p=0.9, seed=5),
    "unseeded": Sampling(temperature=0.7, top_k=20, presence_penalty=0.5, logit_bias={9: 3.0}),
}
POLICIES = {"plain": lambda: Fixed(0), "speculative": lambda: Fixed(4), "mixed": Mixed}


CASES = [("sliding", name, policy) for name in SAMPLINGS for policy in POLICIES]
CASES += [("full", "unseeded", "mixed"), ("recurrent", "penalties", "mixed")]


@pytest.mark.parametrize(("kind", "name", "policy"), CASES)
def test_they_are_those_of_one_forward_pass(kind: str, name: str, policy: str) -> None:
    model, sampling, prompt = MODELS[kind], SAMPLINGS[name], tiny.prompt(13)
    truth = plain(model, prompt, 40) if name == "greedy" else [5] * 40
    done, found = recorded(model, Scripted(prompt + truth, 3), POLICIES[policy](), sampling, prompt)
    emitted = [token for round in done for token in round.tokens]
    assert len(emitted) == 40  # past the window of 16
    if policy != "plain":
        drafted, accepted = sum(r.drafted for r in done), sum(r.accepted for r in done)
        assert drafted > 0 and accepted < drafted and (name != "greedy" or accepted)
    check(found, reference(model, sampling, prompt, emitted), emitted)


@pytest.mark.parametrize("name", ["greedy", "penalties", "seeded"])
def test_they_are_the_same_with_speculation_on_and_off(name: str) -> None:
    model, sampling, prompt = MODELS["sliding"], SAMPLINGS[name], tiny.prompt(13)
    done, off = recorded(model, Scripted([]), Fixed(0), sampling, prompt)
    truth = prompt + [token for round in done for token in round.tokens]
    done, on = recorded(model, Scripted(truth, 2), Fixed(4), sampling, prompt)
    assert sum(r.accepted for r in done) > 10
    for a, b in zip(off, on, strict=True):
        assert a.token == b.token and abs(a.logprob - b.logprob) < 1e-5
        assert [x.token for x in a.top] == [x.token for x in b.top]
        assert [x.logprob for x in a.top] == pytest.approx([x.logprob for x in b.top], abs=1e-5)


def test_temperature_and_filters_do_not_count() -> None:
    hot, prompt = SAMPLINGS["seeded"], tiny.prompt(13)
    done, found = recorded(MODELS["full"], Scripted([]), Fixed(0), hot, prompt)
    emitted = [token for round in done for token in round.tokens]
    warm = log_softmax(reference(MODELS["full"], hot, prompt, emitted) / 1.3)
    with pytest.raises(AssertionError):
        check(found, warm, emitted)


class Drawing:
    """Draws its draft tokens from a law of its own, as a model does."""

    needs = FeatureSpec()

    def __init__(self) -> None:
        self.logits = mx.random.normal((4, 256))
        self.recorder = False

    def observe(self, history: Sequence[int], features: object) -> None:
        pass

    def draft(self, history: Sequence[int], limit: int, sampler: Sampler) -> Draft:
        self.recorder |= isinstance(sampler, LogprobRecorder)
        none = mx.array([], dtype=mx.int32)
        drawn = [sampler.draw(self.logits[j : j + 1], history, none) for j in range(limit)]
        laws = [law for _, law in drawn if law is not None]
        return Draft(mx.concatenate([t for t, _ in drawn]), mx.concatenate(laws))


def test_what_drafters_draw_is_not_recorded() -> None:
    prompt, sampling, drafter = tiny.prompt(13), Sampling(temperature=2.0), Drawing()
    done, found = recorded(MODELS["full"], drafter, Fixed(4), sampling, prompt)
    emitted = [token for round in done for token in round.tokens]
    assert sum(r.accepted for r in done) and not drafter.recorder
    check(found, reference(MODELS["full"], sampling, prompt, emitted), emitted)


def test_masked_tokens_are_no_alternatives() -> None:
    allowed = {17, 40}
    sampling = Sampling(logit_bias={i: -math.inf for i in range(256) if i not in allowed})
    for policy in (Fixed(0), Fixed(3)):
        _, found = recorded(MODELS["full"], Scripted([17] * 90), policy, sampling, tiny.prompt(9))
        assert all({a.token for a in each.top} == allowed for each in found)
        assert all(math.isfinite(each.logprob) and each.top[0].token == each.token for each in found)


def test_a_grammar_is_part_of_the_law() -> None:
    grammar = grammars.compiled("regex", "([ab]{3}(c|de)){20}")
    for sampling in (Sampling(grammar=grammar), Sampling(grammar=grammar, temperature=1.5, seed=3)):
        prompt, found = tiny.prompt(9), []
        truth: list[int] = []
        for K in (0, 4):
            drafter = grammars.Mixed(prompt + truth, [ord("x"), ord("a"), grammars.END])
            done, each = recorded(MODELS["full"], drafter, Fixed(K), sampling, prompt)
            truth = [token for round in done for token in round.tokens]
            found.append(each)
        assert bytes(truth[:3]).strip(b"ab") == b"" and sum(r.accepted for r in done) > 5
        for off, on in zip(*found, strict=True):
            assert off.token == on.token and abs(off.logprob - on.logprob) < 1e-5
            assert {a.token for a in off.top} == {a.token for a in on.top} <= set(b"abcde")
            assert sum(math.exp(a.logprob) for a in on.top) == pytest.approx(1)
        assert {len(each.top) for each in found[0]} >= {1, 2}


def test_top_is_as_long_as_asked_for() -> None:
    logits, none = mx.random.normal((1, 256)), mx.array([], dtype=mx.int32)
    for top in (0, 1, 20, 256, 300):
        recorder = LogprobRecorder(Sampling().sampler(1, 256), LogitsProcessor(Sampling(), 1, 256), TEXT, top)
        token = recorder.draw(logits, [3], none)[0].item()
        (each,) = recorder.of(1, [token])
        assert len(each.top) == min(top, 256)
        assert [a.logprob for a in each.top] == sorted((a.logprob for a in each.top), reverse=True)
        assert not top or (each.top[0].token, each.top[0].logprob) == (token, each.logprob)


def test_a_place_drawn_again_counts_as_drawn_last() -> None:
    recorder = LogprobRecorder(Sampling().sampler(1, 256), LogitsProcessor(Sampling(), 1, 256), TEXT, 1)
    none = mx.array([], dtype=mx.int32)
    first, second = mx.zeros((1, 256)).at[0, 3].add(9.0), mx.zeros((1, 256)).at[0, 4].add(2.0)
    recorder.draw(first, [3], none)
    recorder.draw(mx.zeros((1, 256)), [3], mx.array([3], dtype=mx.int32))  # on its way, then dropped
    recorder.draw(second, [3], none)
    (each,) = recorder.of(1, [4])
    assert each.logprob == pytest.approx(2 - math.log(255 + math.exp(2)), abs=1e-5)
    with pytest.raises(KeyError):
        recorder.of(2, [0])


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, seed=2)])
def test_the_demo_pair(sampling: Sampling) -> None:
    pair = mlx_spec.load("demo", num_draft_tokens=4)
    text, V = pair.text, pair.facts.vocab_size
    prompt = text.prompt([{"role": "user", "content": "What is the capital of France?"}])
    decoding = pair.open()
    recorder = LogprobRecorder(sampling.sampler(len(prompt), V), LogitsProcessor(sampling, len(prompt), V), text, 3)
    done, found = list(prompt), []
    for round in engine.generate(
        decoding.target, decoding.drafters, decoding.policy, recorder, prompt, max_tokens=80, stop=text.eos
    ):
        found += recorder.of(len(done), round.tokens)
        done += round.tokens
    logits = decoding.target._model(mx.array([done]))[0].astype(mx.float32)
    rows = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    emitted = done[len(prompt) :]
    expected = [rows[len(prompt) - 1 + j, token].item() for j, token in enumerate(emitted)]
    assert [each.logprob for each in found] == pytest.approx(expected, abs=1e-3)  # bfloat16
    written = b"".join(each.written for each in found)
    assert written.decode() == text.decode_raw(emitted)
