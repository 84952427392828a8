"""Drafters of one request change the speed of its answer and no token."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cache

import jsonschema
import mlx.core as mx
import numpy as np
import pytest
import tiny
from grammars import CLOSE, END, OPEN, STOP, V, byte_text
from lossless import Scripted, emitted, first_difference
from lossless import rounds as rounds_of
from mlx_lm.generate import generate_step
from schemas import CHOICES, NAME, SCHEMAS, Schema, either, record, several

import mlx_spec
from mlx_spec.drafters.draft_model import DraftModel, VocabularySizes
from mlx_spec.drafters.model_free import Lookup, for_request
from mlx_spec.grammar import Grammar
from mlx_spec.grammar.matcher import compile_grammar
from mlx_spec.model.sequence import SequenceParts
from mlx_spec.model.target import LMTarget
from mlx_spec.pair import Pair
from mlx_spec.policy import AdaptivePolicies, AdaptivePolicy, FixedPolicy, Table
from mlx_spec.sampling import Sampling
from mlx_spec.types import Drafter, Reason, Round

TEXT = byte_text()
FORMATS = jsonschema.FormatChecker(["date", "email", "ipv4", "uuid"])
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
    return compile_grammar("json_schema", json.dumps(schema), TEXT, V, seconds=5.0).thinking(thinks)


def bare() -> SequenceParts:
    """A target without a drafter."""
    return SequenceParts(LMTarget(tiny.full()), (), FixedPolicy(0, Reason.NO_DRAFTER))


def run(
    parts: SequenceParts,
    sampling: Sampling,
    count: int,
    prompt: Sequence[int] = PROMPT,
    *,
    prediction: Sequence[int] = (),
    offer: bool = True,
    stop: Collection[int] = TEXT.eos,
    vocabulary: int = V,
) -> list[Round]:
    """All rounds, with what the request brings to draft from if that is offered."""
    drafters, extras = parts.drafters, ()
    if offer:
        drafters, extras = for_request(drafters, prompt, grammar=sampling.grammar, prediction=prediction)
    given = list(prompt)
    return rounds_of(parts.target, drafters, parts.policy, given, count, vocabulary, sampling, stop, extras)


def adaptive() -> AdaptivePolicy:
    """A policy without drafters of its own, on a device where rows cost nothing."""
    policies = AdaptivePolicies([])
    policies.use(Table(0.03, {1: 0.03, 17: 0.03}, []))
    return policies.policy()


def with_drafter(kind: str, truth: Sequence[int]) -> Drafter:
    if kind == "lookup":
        return Lookup(1, 16)
    if kind == "draft model":
        return DraftModel(tiny.full(seed=1), VocabularySizes(V, V))
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
    plain = run(bare(), Sampling(grammar=grammar()), 100)
    tokens = emitted(plain)
    assert tokens == by_mlx_lm(tiny.full(), SCHEMA, 100)
    assert plain[-1].finish_reason == "stop"
    jsonschema.validate(json.loads(bytes(tokens[:-1])), SCHEMA)
    assert len(tokens) > 50


LENGTH = 60


@cache
def plainly(number: int) -> list[int]:
    """The tokens of plain decoding."""
    sampling = replace(SAMPLINGS[number], grammar=grammar())
    return emitted(run(SequenceParts(LMTarget(tiny.sliding()), (), FixedPolicy(0)), sampling, LENGTH))


@pytest.mark.parametrize("kind", ["lookup", "draft model", "mixed"])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_the_text_is_that_of_plain_decoding(kind: str, sampling: Sampling) -> None:
    """Past the sliding window of 16, with drafts that are right, illegal and end too early."""
    plain = plainly(SAMPLINGS.index(sampling))
    sampling = replace(sampling, grammar=grammar())
    for K, offer in [(4, False), (7, True)]:
        parts = SequenceParts(LMTarget(tiny.sliding()), (with_drafter(kind, plain),), FixedPolicy(K))
        rounds = run(parts, sampling, LENGTH, prediction=plain[10:40], offer=offer)
        found = emitted(rounds)
        assert found == plain, first_difference(found, plain)
        drafters = {round.drafter for round in rounds if round.accepted}
        assert not offer or {1, 2} & drafters
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
    plain = emitted(run(bare(), sampling, 120))
    assert plain[0] == OPEN and 1 < plain.index(CLOSE) < 100
    answer = plain[plain.index(CLOSE) + 1 :]
    for wrong in ([0], WRONG):
        drafter = Scripted([*PROMPT, *plain], 2, wrong=wrong)
        parts = SequenceParts(LMTarget(tiny.full()), (drafter,), FixedPolicy(5))
        assert emitted(run(parts, sampling, 120)) == plain
    assert answer[-1] in TEXT.eos
    jsonschema.validate(json.loads(bytes(answer[:-1])), SCHEMA)


# --- the policy


def test_forced_text_is_drafted_first_and_accepted() -> None:
    parts = SequenceParts(LMTarget(tiny.full()), (Lookup(1, 8),), FixedPolicy(2))
    rounds = run(parts, Sampling(grammar=grammar()), 100)
    forced = [round for round in rounds if round.drafter == 1]
    assert len(forced) > 5 and all(round.accepted == round.drafted for round in forced)
    assert sum(round.accepted for round in forced) > 15


def test_forced_text_fills_a_pass_and_no_more() -> None:
    parts = SequenceParts(LMTarget(tiny.full()), (), adaptive())
    rounds = run(parts, Sampling(grammar=grammar({"const": "x" * 60})), 100)
    assert max(round.drafted for round in rounds) == 16 and len(rounds) < 16
    assert bytes(emitted(rounds)[:-1]) == json.dumps("x" * 60).encode()


def test_nothing_is_drafted_where_the_user_wants_none() -> None:
    parts = SequenceParts(LMTarget(tiny.full()), (Lookup(1, 8),), FixedPolicy(0, Reason.DISABLED))
    rounds = run(parts, Sampling(grammar=grammar()), 60, prediction=[1])
    assert not any(round.drafted for round in rounds)


def test_a_good_prediction_takes_few_rounds() -> None:
    plain = emitted(run(bare(), Sampling(), 100))
    parts = SequenceParts(LMTarget(tiny.full()), (), adaptive())
    rounds = run(parts, Sampling(), 100, prediction=plain)
    assert emitted(rounds) == plain
    assert len(rounds) < 20
    assert {round.drafter for round in rounds if round.drafted} == {0}


# --- the bundled pair


def demo_answer(pair: Pair, schema: Schema, question: str, offer: bool, sampling: Sampling) -> list[Round]:
    vocabulary = pair.info.vocab_size
    form = compile_grammar("json_schema", json.dumps(schema), pair.text, vocabulary, seconds=5.0)
    prompt = pair.text.prompt([{"role": "user", "content": question}])
    sampling = replace(sampling, grammar=form)
    return run(pair.open(), sampling, 30, prompt, offer=offer, stop=pair.text.eos, vocabulary=vocabulary)


@pytest.fixture(scope="module")
def pairs() -> tuple[Pair, Pair, Pair]:
    return mlx_spec.load("demo"), mlx_spec.load("demo", num_draft_tokens=3), mlx_spec.load("demo", "none")


@pytest.mark.parametrize("schema", SCHEMAS[3::5], ids=lambda schema: json.dumps(schema)[:60])
def test_answers_of_the_demo_match_their_schemas(schema: Schema, pairs: tuple[Pair, Pair, Pair]) -> None:
    drafted, plain = pairs[SCHEMAS.index(schema) % 2], pairs[2]
    rounds = demo_answer(plain, schema, "What does os.path.join do?", False, Sampling())
    tokens = emitted(rounds)
    assert emitted(demo_answer(drafted, schema, "What does os.path.join do?", True, Sampling())) == tokens
    if rounds[-1].finish_reason == "stop":
        answer = json.loads(plain.text.decode_raw(tokens[:-1]))
        jsonschema.Draft202012Validator(schema, format_checker=FORMATS).validate(answer)
