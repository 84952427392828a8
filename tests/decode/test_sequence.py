"""A kept sequence goes on from what it shares with a prompt, and says what a new one says."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support import tiny
from support.pairs import KINDS, alone, generate, make_pair, shallow

from mlx_spec.decode.loop import decode
from mlx_spec.decode.statistics import Statistics, added
from mlx_spec.prompt import text_prompt
from mlx_spec.sampling import Sampling
from mlx_spec.types import Cost, Reason, Round

GREEDY = Sampling()
shallow_models = pytest.fixture(shallow, scope="module", autouse=True)


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_that_share_a_beginning(kind: str) -> None:
    pair = make_pair(kind, "other")
    held = pair.open()
    first = tiny.prompt(60)
    prompts = [first, first, first[:40] + [7] * 9, first[:40] + [7] * 9 + [3, 4], first[:10]]
    for prompt in prompts:
        expected = alone(pair, kind, prompt, 6, GREEDY)
        assert generate(pair, held, prompt, 6) == expected
        assert held.identity.tolist() == (prompt + expected)[:-1]
    assert held.nbytes > held.target.nbytes > 0  # the drafter has caches, too


def test_without_a_rewind_the_text_is_wrong() -> None:
    """The control of the test above."""
    pair, prompt, other = make_pair("full"), tiny.prompt(40), tiny.prompt(50, seed=5)
    held = pair.open()
    generate(pair, held, prompt, 12)
    wrong = [t for round in decode(pair.prepare(held, other, max_tokens=12)) for t in round.tokens]
    assert wrong != alone(pair, "full", other, 12, GREEDY)


@pytest.mark.parametrize("kind", ["full", "sliding", "quantized"])
def test_what_is_kept(kind: str) -> None:
    pair, tokens = make_pair(kind), tiny.prompt(30)
    prompt = text_prompt(tokens)
    held = pair.open()
    assert (held.identity.size, held.nbytes, held.shared(prompt)) == (0, 0, 0)
    emitted = generate(pair, held, tokens, 10)
    assert held.nbytes > 0
    assert (
        held.shared(prompt) == held.rewind_to_prefix(prompt) == 28
    )  # a row is written anew, and one is pending
    generate(pair, held, tokens, 10)
    longer = text_prompt([*tokens, *emitted, 5, 5, 5])
    assert held.rewind_to_prefix(longer) == 39  # the last token was never written
    empty = text_prompt([])
    assert held.shared(empty) == held.shared(text_prompt(tokens[:1])) == held.rewind_to_prefix(empty) == 0


@pytest.mark.parametrize("kind", ["shared", "recurrent"])
def test_truncate_forgets_what_a_stop_string_cut_off(kind: str) -> None:
    length = 4
    pair, prompt = make_pair(kind), tiny.prompt(40)
    held = pair.open()
    emitted = generate(pair, held, prompt, 12)
    held.truncate(len(prompt) + length)
    assert held.identity.tolist() == (prompt + emitted)[: len(held.identity)]
    assert len(held.identity) <= len(prompt) + length - 1
    if kind != "recurrent":
        assert len(held.identity) == len(prompt) + length - 1
    longer = [*prompt, *emitted[:length], 5, 5, 5]
    assert generate(pair, held, longer, 6) == alone(pair, kind, longer, 6, GREEDY)


def drafted(tokens: int, cost: Cost | None) -> Round:
    """Return a round that drafted 4 tokens."""
    return Round([5] * tokens, 4, tokens - 1, "draft", "lookup", reason=Reason.PAYS, cost=cost)


@pytest.mark.parametrize(
    ("tokens", "cost", "gain", "words", "reason"),
    [
        (4, Cost("lookup", 2.0, 0.05), 2.0, "2.0 × faster", Reason.PAYS),
        (2, Cost("lookup", 1.9, 0.01), 2 / 1.9, "1.05 × faster", Reason.PAYS),
        (1, Cost("lookup", 1.25), 0.8, "0.8 × plain speed", Reason.LOST),  # it does not say "pays"
        (4, Cost("lookup", 2.0, 0.1), None, "at least 1.6 × faster", Reason.PAYS),  # may be wrong by 15 %
        (4, Cost("lookup", 3.9, 0.05), None, "0.9 to 1.2 × plain speed", Reason.LEARNING),  # may be a loss
        (4, None, None, None, Reason.LEARNING),
    ],
)
def test_gain_and_reason_of_an_answer(
    tokens: int, cost: Cost | None, gain: float | None, words: str | None, reason: Reason
) -> None:
    answer = Statistics().plus(Round([5], 0, 0, "plain", cost=Cost("plain", 1.0)), 0.0)
    assert (answer.gain, answer.gain_words) == (1.0, "as fast as plain")
    answer = Statistics()
    for earlier in (None if cost is None else replace(cost, error=1.0), cost, cost):  # the newest cost counts
        answer = answer.plus(drafted(tokens, earlier), 0.0)
    assert answer.known_gain == (None if gain is None else pytest.approx(gain))
    assert answer.gain == (answer.known_gain or answer.gain_at_least), (
        "a bound is the gain while it is not known"
    )
    assert (answer.gain_words, answer.reason) == (words, reason)
    assert added([answer, answer]).gain == answer.gain and answer.tokens_per_pass == tokens
    if cost is None:  # the cost of a plain round alone tells nothing
        assert answer.plus(Round([5], 0, 0, "plain", cost=Cost("plain", 1.0)), 0.0).gain is None


def test_the_reason_is_that_of_most_tokens() -> None:
    answer = Statistics().plus(drafted(5, None), 0.0)
    for _ in range(4):
        answer = answer.plus(Round([5], 0, 0, "plain", reason=Reason.ACCEPTANCE), 0.0)
    assert answer.reason is Reason.LEARNING
