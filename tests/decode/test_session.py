"""A conversation with speculation and a reused cache says what plain decoding of the same prompts says."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
from support import tiny
from support.pairs import KINDS, TOKENIZER, alone, make_pair, shallow

from mlx_spec.errors import InvalidValue, PromptTooLong
from mlx_spec.model.target import LMTarget
from mlx_spec.pair import Pair
from mlx_spec.policy import FixedPolicy
from mlx_spec.sampling import Sampling
from mlx_spec.session import Piece, Session

shallow_models = pytest.fixture(shallow, scope="module", autouse=True)
QUESTIONS = ["Hi", "one two one two one", "Why?"]


OPEN, CLOSE = (TOKENIZER.token_to_id(token) for token in ("<|channel>", "<channel|>"))
GREEDY = Sampling()
UNMARKED = Sampling(logit_bias={OPEN: -100.0, CLOSE: -100.0})  # greedy, no thoughts


def prompt_of(session: Session, pair: Pair, question: str, *, thinking: bool = False) -> list[int]:
    return pair.tokenizer.prompt(
        [*session.messages, {"role": "user", "content": question}], thinking=thinking
    )


def tokens_of(pieces: list[Piece]) -> list[int]:
    return [token for piece in pieces if piece.round for token in piece.round.tokens]


def text_of(pieces: list[Piece], kind: str = "answer") -> str:
    return "".join(piece.text for piece in pieces if piece.kind == kind)


def turn(
    session: Session,
    pair: Pair,
    kind: str,
    question: str,
    count: int = 12,
    sampling: Sampling = GREEDY,
    thinking: bool = False,
) -> list[Piece]:
    """Return the pieces of an answer whose tokens are those of plain decoding."""
    prompt = prompt_of(session, pair, question, thinking=thinking)
    pieces = list(session.stream(question, sampling=sampling, max_tokens=count, thinking=thinking))
    assert tokens_of(pieces) == alone(pair, kind, prompt, count, sampling)
    assert session.statistics.prompt_tokens == len(prompt)
    assert session.messages[-1]["content"] == text_of(pieces).strip()
    return pieces


SEEDED = Sampling(temperature=0.8, top_k=20, seed=5, logit_bias=UNMARKED.logit_bias)
CASES = [(kind, "other", UNMARKED) for kind in KINDS] + [("recurrent", "same", SEEDED)]
CASES += [("full", "lookup", UNMARKED), ("sliding", "same", UNMARKED), ("quantized", "none", UNMARKED)]


@pytest.mark.parametrize(("kind", "drafter", "sampling"), CASES)
def test_turns_are_those_of_plain_decoding(kind: str, drafter: str, sampling: Sampling) -> None:
    pair = make_pair(kind, drafter)
    session = pair.session(system="You are tiny.")
    for number, question in enumerate(QUESTIONS, 1):
        pieces = turn(session, pair, kind, question, 8, sampling)
        assert text_of(pieces) == pair.tokenizer.decode(tokens_of(pieces))
        assert session.statistics.generated_tokens == len(tokens_of(pieces))
        assert [m["role"] for m in session.messages] == ["system"] + ["user", "assistant"] * number


@pytest.mark.parametrize(("kind", "count"), [("full", 1), ("quantized", 3), ("sliding", 3), ("recurrent", 3)])
def test_interrupted_answer_stays_as_far_as_it_came(kind: str, count: int) -> None:
    pair = make_pair(kind, "other")
    session = pair.session()
    list(session.stream("Hi", max_tokens=10))
    stream = session.stream("Go on", max_tokens=200)
    seen = list(islice(stream, count))
    stream.close()
    assert session.messages[-2:] == [
        {"role": "user", "content": "Go on"},
        {"role": "assistant", "content": text_of(seen).strip()},
    ]
    assert session.statistics.finish_reason is None
    assert session.statistics.generated_tokens == len(tokens_of(seen))
    turn(session, pair, kind, "Why?")


def test_interrupted_before_the_first_round_is_forgotten() -> None:
    pair = make_pair("full")
    session = pair.session()
    list(session.stream("Hi", max_tokens=5))
    before = session.messages
    session.stream("never read", max_tokens=5).close()
    assert session.messages == before
    session.stream("never read either", max_tokens=5)
    turn(session, pair, "full", "Why?")


def test_an_error_in_the_middle_keeps_what_came(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = make_pair("full", "none")
    session = pair.session()
    stream = session.stream("Hi", max_tokens=50)
    seen = list(islice(stream, 4))
    with monkeypatch.context() as broken:
        broken.setattr(LMTarget, "verify", lambda *_, **options: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            list(stream)
    assert session.messages[-1]["content"] == text_of(seen).strip()
    turn(session, pair, "full", "Why?")


MIXED = Sampling(temperature=1.0, seed=4, logit_bias={CLOSE: 2.0})


@pytest.mark.parametrize("kind", ["sliding", "recurrent"])
def test_thoughts_stay_out_of_later_prompts(kind: str) -> None:
    pair = make_pair(kind, "other")
    session = pair.session()
    for question in QUESTIONS:
        prompt = prompt_of(session, pair, question, thinking=True)
        assert pair.tokenizer.decode(prompt).count("thought\n") == 1
        pieces = turn(session, pair, kind, question, 16, MIXED, thinking=True)
        assert session.messages[-1].get("reasoning_content", "") == text_of(pieces, "thinking").strip()
    assert any("reasoning_content" in message for message in session.messages)


# --- the cache


@pytest.mark.parametrize("kind", ["quantized", "shared"])
def test_cache_is_reused(kind: str) -> None:
    pair = make_pair(kind)
    session = pair.session(system="x" * 50)
    ascii_only = Sampling(logit_bias={i: -100.0 for i in range(tiny.VOCAB) if not _printable(i)})
    list(session.stream("Hi", sampling=ascii_only, max_tokens=20))
    first = session.statistics
    assert first.reused_tokens == 0
    turn(session, pair, kind, "Why?", 20, ascii_only)
    # all of the first turn but the pending token: the answer was cut at max_tokens, without a closing mark
    assert session.statistics.reused_tokens == first.prompt_tokens + 20 - 1


def _printable(token: int) -> bool:
    text = TOKENIZER.decode([token])
    return len(text) == 1 and text.isascii() and text.isprintable() and not text.isspace()


# --- statistics and refusals


def test_prompt_too_long_leaves_the_conversation_alone() -> None:
    pair = make_pair("full", context=100)
    session = pair.session()
    list(session.stream("Hi", max_tokens=10))
    before, statistics = session.messages, session.statistics
    with pytest.raises(PromptTooLong, match=r"the prompt is too long: \d+ tokens > 100 maximum"):
        session.stream("x" * 200, max_tokens=10)
    with pytest.raises(InvalidValue, match="max_tokens is 0"):
        session.stream("x", max_tokens=0)
    assert session.messages == before and session.statistics == statistics
    list(session.stream("x", max_tokens=500))
    assert session.statistics.prompt_tokens + session.statistics.generated_tokens == 100
    assert session.statistics.finish_reason == "length"


# --- without a session


def test_pair_generates() -> None:
    prompt = TOKENIZER.encode("one two one two one").ids
    expected = alone(make_pair("full"), "full", prompt, 20, GREEDY)
    ends = next(t for i, t in enumerate(expected) if i >= 3 and t not in expected[:i])
    until = expected[: expected.index(ends) + 1]
    for pair, stop in ((make_pair("full"), (ends,)), (make_pair("full", eos=(ends,)), ())):
        rounds = list(pair.generate(prompt, max_tokens=20, stop=stop))
        assert [token for round in rounds for token in round.tokens] == until
        assert rounds[-1].finish_reason == "stop"


def test_integers_of_numpy_and_texts_that_are_not_unicode() -> None:
    pair, prompt = make_pair("full"), tiny.prompt(9)
    assert list(pair.generate([1], max_tokens=2, key="half a pair \ud800"))
    plain = list(pair.generate(prompt, max_tokens=3))
    pair.policies = FixedPolicy(np.int64(4))
    same = list(pair.generate(np.array(prompt), max_tokens=np.int64(3)))
    assert [round.tokens for round in plain] == [round.tokens for round in same]
