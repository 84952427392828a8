"""What a request brings to draft from changes how fast it is answered, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import jsonschema
import mlx.core as mx
import numpy as np
import pytest
import tiny
from grammars import CLOSE, END, OPEN, STOP, Mixed, V, byte_text
from lossless import emitted, first_difference
from mlx_lm.generate import generate_step
from schemas import CHOICES, NAME, SCHEMAS, Schema, either, record, several

import mlx_spec
from mlx_spec.drafters.draft_model import DraftModel, VocabularySizes
from mlx_spec.drafters.model_free import Lookup
from mlx_spec.engine import generate
from mlx_spec.grammar import Grammar, compile
from mlx_spec.offers import Offered, offered
from mlx_spec.pair import Pair
from mlx_spec.policy import Fixed
from mlx_spec.sampling import Sampling
from mlx_spec.sequence import SequenceParts
from mlx_spec.target import LMTarget
from mlx_spec.types import Choice, Decision, Drafter, Reason, Round

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
    return compile("json_schema", json.dumps(schema), TEXT, V, seconds=5.0, thinks=thinks)


def bare() -> SequenceParts:
    """A target without a drafter."""
    return SequenceParts(LMTarget(tiny.full()), (), Fixed(0, Reason.NO_DRAFTER))


def run(
    decoding: SequenceParts, sampling: Sampling, count: int, prompt: Sequence[int] = PROMPT
) -> list[Round]:
    sampler = sampling.sampler(len(prompt), V)
    parts = (decoding.target, decoding.drafters, decoding.policy)
    return list(generate(*parts, sampler, list(prompt), max_tokens=count, stop=TEXT.eos))


def with_drafter(kind: str, truth: Sequence[int]) -> Drafter:
    if kind == "lookup":
        return Lookup(1, 16)
    if kind == "draft model":
        return DraftModel(tiny.full(seed=1), VocabularySizes(V, V))
    return Mixed([*PROMPT, *truth], WRONG)


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
    return emitted(run(SequenceParts(LMTarget(tiny.sliding()), (), Fixed(0)), sampling, LENGTH))


@pytest.mark.parametrize("kind", ["lookup", "draft model", "mixed"])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_the_text_is_that_of_plain_decoding(kind: str, sampling: Sampling) -> None:
    """Past the sliding window of 16, with drafts that are right, illegal and end too early."""
    plain = plainly(SAMPLINGS.index(sampling))
    sampling = replace(sampling, grammar=grammar())
    for K, extra in [(4, False), (7, True)]:
        decoding = SequenceParts(LMTarget(tiny.sliding()), (with_drafter(kind, plain),), Fixed(K))
        if extra:
            decoding = offered(decoding, PROMPT, grammar=sampling.grammar, prediction=plain[10:40])
        rounds = run(decoding, sampling, LENGTH)
        found = emitted(rounds)
        assert found == plain, first_difference(found, plain)
        drafters = {round.drafter for round in rounds if round.accepted}
        assert not extra or {1, 2} & drafters
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
        drafter = Mixed([*PROMPT, *plain], wrong)
        decoding = offered(
            SequenceParts(LMTarget(tiny.full()), (drafter,), Fixed(5)), PROMPT, grammar=sampling.grammar
        )
        assert emitted(run(decoding, sampling, 120)) == plain
    assert answer[-1] in TEXT.eos
    jsonschema.validate(json.loads(bytes(answer[:-1])), SCHEMA)


def test_an_answer_may_be_cut_short() -> None:
    sampling = Sampling(grammar=grammar())
    whole = emitted(run(bare(), sampling, 100))
    for count in (1, 2, 5, 11, 30):
        decoding = offered(
            SequenceParts(LMTarget(tiny.full()), (Lookup(1, 8),), Fixed(3)), PROMPT, grammar=sampling.grammar
        )
        rounds = run(decoding, sampling, count)
        assert emitted(rounds) == whole[:count]
        assert rounds[-1].finish_reason == "length"


# --- the policy


class Counting:
    """A policy that checks that it only hears of rounds it decided on."""

    def __init__(self, K: int) -> None:
        self._policy = Fixed(K)
        self.cut = self._policy.cut
        self.decided, self.observed = 0, list[Round]()

    def begin(self) -> None:
        pass

    def decide(self, history: Sequence[int]) -> Decision:
        assert self.decided == len(self.observed)
        self.decided += 1
        return self._policy.decide(history)

    def observe(self, round: Round) -> None:
        self.observed.append(round)
        assert self.decided == len(self.observed)


def test_the_other_policy_hears_of_its_own_rounds_only() -> None:
    policy, sampling = Counting(2), Sampling(grammar=grammar())
    decoding = offered(
        SequenceParts(LMTarget(tiny.full()), (Lookup(1, 8),), policy), PROMPT, grammar=sampling.grammar
    )
    rounds = run(decoding, sampling, 100)
    forced = [round for round in rounds if round.drafter == 1]
    assert decoding.names == ("grammar",)
    assert len(forced) > 5 and all(round.accepted == round.drafted for round in forced)
    assert all(round.drafter != 1 for round in policy.observed)
    assert len(forced) + len(policy.observed) == len(rounds)
    assert sum(round.accepted for round in forced) > 25


def test_forced_text_fills_a_trial_and_no_more() -> None:
    sampling = Sampling(grammar=grammar({"const": "x" * 60}))
    decoding = offered(
        SequenceParts(LMTarget(tiny.full()), (), Fixed(0, Reason.NO_DRAFTER)),
        PROMPT,
        grammar=sampling.grammar,
    )
    rounds = run(decoding, sampling, 100)
    assert [round.drafted for round in rounds][:3] == [16, 16, 16]
    assert bytes(emitted(rounds)[:-1]) == json.dumps("x" * 60).encode()


@pytest.mark.parametrize("policy", [Fixed(0, Reason.DISABLED)])
def test_where_nothing_is_to_be_drafted_nothing_is(policy: Fixed) -> None:
    sampling = Sampling(grammar=grammar())
    decoding = offered(
        SequenceParts(LMTarget(tiny.full()), (Lookup(1, 8),), policy),
        PROMPT,
        grammar=sampling.grammar,
        prediction=[1],
    )
    assert decoding.names == () and len(decoding.drafters) == 1
    assert not any(round.drafted for round in run(decoding, sampling, 60))


def test_a_request_that_brings_nothing_is_left_alone() -> None:
    plain = SequenceParts(LMTarget(tiny.full()), (Lookup(1, 8),), Fixed(2))
    assert offered(plain, PROMPT) == Offered(plain.target, plain.drafters, plain.policy)


class Slow(Fixed):
    """Plain decoding of known speed."""

    def decide(self, history: Sequence[int]) -> Decision:
        return Decision((), Reason.COST, None, 1.0)


def asked(decoding: Offered, accepted: int, seconds: float, rounds: int) -> list[int]:
    """What is drafted when every draft fares the same; plain rounds take a second."""
    limits = []
    for _ in range(rounds):
        decision = decoding.policy.decide(PROMPT)
        limit = decision.choices[0].limit if decision.choices else 0
        kept = min(accepted, limit)
        drafter = decision.choices[0].drafter if decision.choices else None
        took = seconds if limit else 1.0
        decoding.policy.observe(Round([1] * (kept + 1), limit, kept, took, drafter=drafter))
        limits.append(limit)
    return limits


def test_what_does_not_pay_is_not_asked_again_soon() -> None:
    def fresh() -> Offered:
        return offered(SequenceParts(LMTarget(tiny.full()), (), Slow(0)), PROMPT, prediction=[*range(40)])

    good = asked(fresh(), 16, 2.0, 60)
    assert good.count(16) >= 56
    useless = asked(fresh(), 0, 1.5, 400)
    assert useless[0] == 16
    assert sum(map(bool, useless)) < 20
    assert useless[-100:].count(0) >= 98
    costly = asked(fresh(), 16, 40.0, 400)
    assert sum(limit == 16 for limit in costly) < 10


def test_a_good_prediction_takes_few_rounds() -> None:
    sampling = Sampling()
    plain = emitted(run(bare(), sampling, 100))
    decoding = offered(
        SequenceParts(LMTarget(tiny.full()), (), Fixed(0, Reason.NO_DRAFTER)), PROMPT, prediction=plain
    )
    rounds = run(decoding, sampling, 100)
    assert emitted(rounds) == plain
    assert len(rounds) < 15
    assert {round.drafter for round in rounds if round.drafted} == {0} and decoding.names == ("prediction",)


# --- the bundled pair


def demo_answer(pair: Pair, schema: Schema, question: str, offer: bool, sampling: Sampling) -> list[Round]:
    vocabulary = pair.info.vocab_size
    form = compile("json_schema", json.dumps(schema), pair.text, vocabulary, seconds=5.0)
    prompt = pair.text.prompt([{"role": "user", "content": question}])
    decoding = pair.open()
    if offer:
        decoding = offered(decoding, prompt, grammar=form)
    sampler = replace(sampling, grammar=form).sampler(len(prompt), vocabulary)
    parts = (decoding.target, decoding.drafters, decoding.policy)
    return list(generate(*parts, sampler, prompt, max_tokens=30, stop=pair.text.eos))


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


def test_seeded_answers_of_the_demo(pairs: tuple[Pair, Pair, Pair]) -> None:
    for schema in SCHEMAS[45:60:8]:
        sampling = Sampling(0.9, seed=7, presence_penalty=0.5)
        answers = [
            demo_answer(pair, schema, "Who are you?", pair is not pairs[2], sampling) for pair in pairs
        ]
        assert len({tuple(emitted(answer)) for answer in answers}) == 1


def test_choices_of_the_policy_name_drafters_that_are_there(pairs: tuple[Pair, Pair, Pair]) -> None:
    adaptive = pairs[0]
    prompt = adaptive.text.prompt([{"role": "user", "content": "hello"}])
    form = compile("json_object", "", adaptive.text, adaptive.info.vocab_size, seconds=5.0)
    decoding = offered(adaptive.open(), prompt, grammar=form, prediction=[1, 2, 3])
    assert decoding.names == ("grammar", "prediction")
    assert len(decoding.drafters) == len(adaptive.open().drafters) + 2
    decision = decoding.policy.decide(prompt)
    assert all(isinstance(choice, Choice) for choice in decision.choices)
