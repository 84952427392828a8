"""A kept sequence goes on from what it shares with a prompt, and says what a new one says."""

from __future__ import annotations

import pytest
from support import tiny
from support.pairs import KINDS, alone, generate, make_pair

from mlx_spec.decode.round import decode
from mlx_spec.decode.sequence import CachedSequence
from mlx_spec.sampling import Sampling
from mlx_spec.session import MIN_COMPARED_TOKENS, Statistics
from mlx_spec.types import Reason, Round

GREEDY = Sampling()


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_that_share_a_beginning(kind: str) -> None:
    pair = make_pair(kind, "other")
    held = CachedSequence(pair.open())
    first = tiny.prompt(60)
    prompts = [first, first, first[:40] + [7] * 9, first[:40] + [7] * 9 + [3, 4], first[:10]]
    for prompt in prompts:
        expected = alone(pair, kind, prompt, 6, GREEDY)
        assert generate(pair, held, prompt, 6) == expected
        assert held.tokens == (prompt + expected)[:-1]


def test_without_a_rewind_the_text_is_wrong() -> None:
    """The control of the test above."""
    pair, prompt, other = make_pair("full"), tiny.prompt(40), tiny.prompt(50, seed=5)
    held = CachedSequence(pair.open())
    generate(pair, held, prompt, 12)
    wrong = [t for round in decode(pair.prepare(held.parts, other, max_tokens=12)) for t in round.tokens]
    assert wrong != alone(pair, "full", other, 12, GREEDY)


@pytest.mark.parametrize("kind", ["full", "sliding", "quantized"])
def test_what_is_kept(kind: str) -> None:
    pair, prompt = make_pair(kind), tiny.prompt(30)
    held = CachedSequence(pair.open())
    assert (held.tokens, held.nbytes, held.shared(prompt)) == ([], 0, 0)
    emitted = generate(pair, held, prompt, 10)
    assert held.nbytes > 0
    assert (
        held.shared(prompt) == held.rewind_to_prefix(prompt) == 28
    )  # a row is written anew, and one is pending
    generate(pair, held, prompt, 10)
    longer = [*prompt, *emitted, 5, 5, 5]
    assert held.rewind_to_prefix(longer) == 39  # the last token was never written
    assert held.shared([]) == held.shared([prompt[0]]) == held.rewind_to_prefix([]) == 0


@pytest.mark.parametrize("kind", ["shared", "recurrent"])
def test_truncate_forgets_what_a_stop_string_cut_off(kind: str) -> None:
    length = 4
    pair, prompt = make_pair(kind), tiny.prompt(40)
    held = CachedSequence(pair.open())
    emitted = generate(pair, held, prompt, 12)
    held.truncate(len(prompt) + length)
    assert held.tokens == (prompt + emitted)[: len(held.tokens)]
    assert len(held.tokens) <= len(prompt) + length - 1
    if kind != "recurrent":
        assert len(held.tokens) == len(prompt) + length - 1
    longer = [*prompt, *emitted[:length], 5, 5, 5]
    assert generate(pair, held, longer, 6) == alone(pair, kind, longer, 6, GREEDY)


def drafted(tokens: int, seconds: float) -> Round:
    """Return a round that drafted 4 tokens; a plain token takes a second."""
    cost = {"seconds": seconds, "plain_seconds": 1.0}
    return Round([5] * tokens, 4, tokens - 1, "draft", "lookup", reason=Reason.PAYS, **cost)


def test_a_gain_is_shown_once_enough_tokens_were_compared() -> None:
    answer = Statistics()
    for _ in range(MIN_COMPARED_TOKENS // 4 - 1):
        answer = answer.plus(drafted(4, 2.0), 2.0)
    assert answer.gain is None and answer.reason is Reason.LEARNING
    answer = answer.plus(drafted(4, 2.0), 2.0)
    assert answer.gain == 2.0 and answer.reason is Reason.PAYS


def test_an_answer_that_lost_time_does_not_say_that_speculation_pays() -> None:
    """The first answers of a pair used to say "pays" beside 0.92 x plain."""
    answer = Statistics()
    for _ in range(MIN_COMPARED_TOKENS):
        answer = answer.plus(drafted(1, 1.1), 1.1)
    assert answer.gain == pytest.approx(1 / 1.1) and answer.reason is Reason.LEARNING
