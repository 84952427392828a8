"""A given text is scored as one forward pass scores it, and can be continued as if it had been prefilled."""

from __future__ import annotations

import math

import mlx.core as mx
import pytest
import tiny
from likelihood import TEXT, TOP, check, reference
from lossless import GREEDY, Scripted, emitted, plain, rounds

from mlx_spec import engine
from mlx_spec.model.caches import MAX_UNCOMMITTED
from mlx_spec.model.target import LMTarget
from mlx_spec.sampling import LogitsProcessor, Sampling
from mlx_spec.sampling.logprobs import score_prompt
from mlx_spec.tuning.fixed import Fixed
from mlx_spec.types import FeatureSpec, TokenLogprob

MODELS = {"full": tiny.full(), "sliding": tiny.sliding(), "recurrent": tiny.recurrent()}
LENGTHS = [1, 2, MAX_UNCOMMITTED, MAX_UNCOMMITTED + 1, MAX_UNCOMMITTED + 2, 150]


def scored(target: LMTarget, drafters: list[Scripted], prompt: list[int], law: LogitsProcessor) -> list[TokenLogprob]:
    return [each for chunk in score_prompt(target, drafters, law, prompt, TEXT, TOP) for each in chunk]


def bare() -> LogitsProcessor:
    return LogitsProcessor(Sampling(), 0, 256)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("kind", MODELS)
def test_a_prompt_is_scored_and_then_continued(kind: str, length: int) -> None:
    model, prompt, needs = MODELS[kind], tiny.prompt(length), FeatureSpec(final_hidden=True)
    target, drafter = LMTarget(model, needs), Scripted([], needs=needs)
    found = scored(target, [drafter], prompt, bare())
    check(found, reference(model, Sampling(), prompt[:1], prompt[1:]), prompt[1:])
    assert target.size == length - 1 and target.uncommitted == 0
    truth = plain(model, prompt, 20)
    assert emitted(rounds(target, Scripted(prompt + truth, 2), 3, prompt, 20)) == truth
    rows = [f.final_hidden.shape[0] for f in drafter.seen if f.final_hidden is not None]
    assert drafter.histories == [sum(rows[: i + 1]) + 1 for i in range(len(rows))]
    assert sum(rows) == length - 1


def test_drafters_see_what_a_prefill_shows_them() -> None:
    prompt, needs = tiny.prompt(100), FeatureSpec(final_hidden=True, hidden_layers=(1,))
    seen = []
    for how in ("score", "prefill"):
        target, drafter = LMTarget(MODELS["sliding"], needs), Scripted([], needs=needs)
        if how == "score":
            scored(target, [drafter], prompt, bare())
        else:
            list(engine.prefill(target, [drafter], prompt))
        assert drafter.histories[-1] == len(prompt)
        seen.append([mx.concatenate([f.hidden[0] for f in drafter.seen])])
        seen[-1].append(mx.concatenate([f.final_hidden for f in drafter.seen if f.final_hidden is not None]))
    for ours, theirs in zip(*seen, strict=True):
        assert ours.shape == theirs.shape and mx.allclose(ours, theirs, rtol=1e-3, atol=1e-3).item()


def test_penalties_and_bias_count() -> None:
    sampling = Sampling(repetition_penalty=1.2, frequency_penalty=0.4, logit_bias={3: 2.0, 8: -math.inf})
    prompt = [token for token in tiny.prompt(90) if token != 8]
    found = scored(LMTarget(MODELS["sliding"]), [], prompt, LogitsProcessor(sampling, 0, 256))
    everything = reference(MODELS["sliding"], sampling, prompt[:1], prompt[1:])
    with pytest.raises(AssertionError):  # there, the first token is a prompt and not generated
        check(found, everything, prompt[1:])
    prompt[0] = 255
    assert 255 not in prompt[1:]
    found = scored(LMTarget(MODELS["sliding"]), [], prompt, LogitsProcessor(sampling, 1, 256))
    check(found, reference(MODELS["sliding"], sampling, prompt[:1], prompt[1:]), prompt[1:])


def test_others_may_run_between_chunks_and_it_may_end_early() -> None:
    model, prompts = MODELS["sliding"], [tiny.prompt(150), tiny.prompt(140, seed=8)]
    targets = [LMTarget(model), LMTarget(model)]
    streams = [score_prompt(t, [], bare(), p, TEXT, TOP) for t, p in zip(targets, prompts, strict=True)]
    found: list[list[TokenLogprob]] = [[], []]
    for _ in range(3):
        for i in (0, 1):
            found[i] += next(streams[i])
    assert [len(each) for each in found] == [149, 139]
    for each, prompt in zip(found, prompts, strict=True):
        check(each, reference(model, Sampling(), prompt[:1], prompt[1:]), prompt[1:])
    target = LMTarget(model)
    stream = score_prompt(target, [], bare(), prompts[0], TEXT, TOP)
    next(stream)
    stream.close()
    assert target.size == MAX_UNCOMMITTED and target.uncommitted == 0
    sampler = GREEDY.sampler(150, 256)
    done = list(engine.generate(target, [], Fixed(0), sampler, prompts[0], max_tokens=9))
    assert emitted(done) == plain(model, prompts[0], 9)


def test_what_the_target_holds_is_not_scored_again() -> None:
    prompt = tiny.prompt(100)
    target = LMTarget(MODELS["full"])
    target.prefill(prompt[:30])
    found = scored(target, [], prompt, bare())
    check(found, reference(MODELS["full"], Sampling(), prompt[:31], prompt[31:]), prompt[31:])
