"""Drafters of one request change the speed of its answer and no token."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import jsonschema
import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from support import tiny
from support.grammars import CLOSE, END, OPEN, STOP, V, byte_text, compiled
from support.lossless import Scripted, emitted, first_difference
from support.lossless import rounds as rounds_of
from support.schemas import CHOICES, NAME, Schema, either, record, several

from mlx_spec.drafters.draft_model import DraftModel, VocabularySizes
from mlx_spec.drafters.lookup import Lookup
from mlx_spec.drafters.per_request import for_request
from mlx_spec.grammar import Grammar
from mlx_spec.model.target import LMTarget
from mlx_spec.policy import AdaptivePolicies, AdaptivePolicy, Table
from mlx_spec.sampling import Sampling
from mlx_spec.types import Drafter, DraftLengthPolicy, Round

TEXT = byte_text()
PROMPT = tiny.prompt(20)
SCHEMA = record(
    name=NAME, color=CHOICES[0], size=several(record(u=CHOICES[0]), 1, 2), end=either({"const": 1}, NAME)
)
WRONG = [END, ord("!"), CLOSE, STOP, 0]
SAMPLINGS = [
    Sampling(),
    Sampling(frequency_penalty=0.7, presence_penalty=0.3, repetition_penalty=1.2),
    Sampling(0.9, seed=2, top_p=0.9, frequency_penalty=0.5),
]


def grammar(schema: Schema = SCHEMA, *, thinks: bool = False) -> Grammar:
    return compiled("json_schema", json.dumps(schema), thinks=thinks)


def run(
    policy: DraftLengthPolicy | int,
    sampling: Sampling,
    count: int = 100,
    *drafters: Drafter,
    kind: str = "full",
    prediction: Sequence[int] = (),
    offer: bool = True,
) -> list[Round]:
    """All rounds, with what the request brings to draft from if that is offered."""
    given, extras = drafters, ()
    if offer:
        given, extras = for_request(drafters, PROMPT, grammar=sampling.grammar, prediction=prediction)
    target = LMTarget(tiny.model_of(kind))
    return rounds_of(target, given, policy, PROMPT, count, V, sampling, TEXT.eos, extras)


def adaptive() -> AdaptivePolicy:
    """A policy without drafters of its own, on a device where rows cost nothing."""
    policies = AdaptivePolicies([])
    policies.use(Table(0.03, {1: 0.03, 17: 0.03}, []))
    return policies.policy()


def with_drafter(kind: str, truth: Sequence[int]) -> Drafter:
    if kind == "lookup":
        return Lookup(1, 16)
    if kind == "draft model":
        return DraftModel(tiny.full(seed=1, num_hidden_layers=1), VocabularySizes(V, V))
    return Scripted([*PROMPT, *truth], 2, wrong=WRONG)


def by_mlx_lm(model: object, schema: Schema, count: int) -> list[int]:
    """Greedy tokens of mlx-lm's own loop under masks of a parser that reads every token once."""
    parser = grammar(schema).start.deep_copy()
    done: list[int] = []

    def masked(tokens: mx.array, logits: mx.array) -> mx.array:
        if len(tokens) > len(PROMPT):
            assert parser.consume_token(int(tokens[-1].item()))
        bits = np.unpackbits(np.frombuffer(parser.compute_bitmask(), np.uint8), bitorder="little")[:V]
        return mx.where(mx.array(bits) == 1, logits, -mx.inf)

    for token, _ in generate_step(mx.array(PROMPT), model, max_tokens=count, logits_processors=[masked]):
        done.append(int(token))
        if token in TEXT.eos:
            break
    return done


def test_plain_decoding_under_a_grammar_is_mlx_lm_s_under_its_masks() -> None:
    plain = run(0, Sampling(grammar=grammar()))
    tokens = emitted(plain)
    assert tokens == by_mlx_lm(tiny.model_of("full"), SCHEMA, 100)
    assert plain[-1].finish_reason == "stop"
    jsonschema.validate(json.loads(bytes(tokens[:-1])), SCHEMA)
    assert len(tokens) > 50


LENGTH = 45


@cache
def plainly(number: int) -> list[int]:
    """The tokens of plain decoding."""
    sampling = replace(SAMPLINGS[number], grammar=grammar())
    return emitted(run(0, sampling, LENGTH, kind="sliding"))


@pytest.mark.parametrize(
    ("kind", "number"), [("lookup", 0), ("draft model", 2), ("mixed", 0), ("mixed", 1), ("mixed", 2)]
)
def test_the_text_is_that_of_plain_decoding(kind: str, number: int) -> None:
    """Past the sliding window of 16, with drafts that are right, illegal and end too early."""
    plain = plainly(number)
    sampling = replace(SAMPLINGS[number], grammar=grammar())
    for K, offer in [(4, False), (7, True)]:
        drafter = with_drafter(kind, plain)
        rounds = run(K, sampling, LENGTH, drafter, kind="sliding", prediction=plain[10:40], offer=offer)
        found = emitted(rounds)
        assert found == plain, first_difference(found, plain)
        drafters = {round.source for round in rounds if round.accepted}
        assert not offer or {"grammar", "prediction"} & drafters
    assert len(plain) > 40


@pytest.mark.parametrize("seed", [None, 3])
def test_thoughts_come_first(seed: int | None) -> None:
    """The closing mark falls inside drafts; the model never writes it, so the bias makes it."""
    sampling = Sampling(
        0.9 if seed else 0.0,
        seed=seed,
        logit_bias={OPEN: 7.0, CLOSE: 2.0},
        frequency_penalty=2,
        grammar=grammar(thinks=True),
    )
    plain = emitted(run(0, sampling, 120))
    assert plain[0] == OPEN and 1 < plain.index(CLOSE) < 100
    answer = plain[plain.index(CLOSE) + 1 :]
    for wrong in ([0], WRONG):
        assert emitted(run(5, sampling, 120, Scripted([*PROMPT, *plain], 2, wrong=wrong))) == plain
    assert answer[-1] in TEXT.eos
    jsonschema.validate(json.loads(bytes(answer[:-1])), SCHEMA)


# --- the policy


def test_forced_text_is_drafted_first_and_accepted() -> None:
    rounds = run(2, Sampling(grammar=grammar()), 100, Lookup(1, 8))
    forced = [round for round in rounds if round.source == "grammar"]
    assert len(forced) > 5 and all(round.accepted == round.drafted for round in forced)
    assert sum(round.accepted for round in forced) > 15


def test_forced_text_fills_a_pass_and_no_more() -> None:
    rounds = run(adaptive(), Sampling(grammar=grammar({"const": "x" * 60})))
    assert max(round.drafted for round in rounds) == 16 and len(rounds) < 16
    assert bytes(emitted(rounds)[:-1]) == json.dumps("x" * 60).encode()


def test_nothing_is_drafted_where_the_user_wants_none() -> None:
    rounds = run(0, Sampling(grammar=grammar()), 60, Lookup(1, 8), prediction=[1])
    assert not any(round.drafted for round in rounds)


def test_a_good_prediction_takes_few_rounds() -> None:
    plain = emitted(run(0, Sampling()))
    rounds = run(adaptive(), Sampling(), prediction=plain)
    assert emitted(rounds) == plain
    assert len(rounds) < 20
    assert {round.source for round in rounds if round.drafted} == {"prediction"}
