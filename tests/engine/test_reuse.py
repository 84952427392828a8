"""A kept sequence goes on from what it shares with a prompt, and says what a new one says."""

from __future__ import annotations

from itertools import islice

import pytest
import tiny
from test_session import KINDS, alone, make_pair

from mlx_spec.pair import Pair
from mlx_spec.sampling import Sampling
from mlx_spec.sequence import CachedSequence, common_prefix
from mlx_spec.session import Statistics, added
from mlx_spec.types import Reason

GREEDY = Sampling()


def generate(pair: Pair, held: CachedSequence, prompt: list[int], count: int) -> list[int]:
    """Continue a prompt with a kept sequence, as those who keep one do."""
    rounds = pair.run(held.parts, prompt, max_tokens=count)
    held.rewind_to_prefix(prompt)
    emitted: list[int] = []
    for round in rounds:
        held.append(round.tokens)
        emitted += round.tokens
    return emitted


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


def test_not_to_align_is_noticed() -> None:
    """The control of the test above."""
    pair, prompt, other = make_pair("full"), tiny.prompt(40), tiny.prompt(50, seed=5)
    held = CachedSequence(pair.open())
    generate(pair, held, prompt, 12)
    wrong = [t for round in pair.run(held.parts, other, max_tokens=12) for t in round.tokens]
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
def test_cut_forgets_what_a_stop_string_cut_off(kind: str) -> None:
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


@pytest.mark.parametrize("kind", ["sliding", "recurrent"])
def test_interrupted_at_any_round(kind: str) -> None:
    pair = make_pair(kind, "other")
    held = CachedSequence(pair.open())
    for count in (0, 1, 3):
        prompt = tiny.prompt(30 + count)
        rounds = pair.run(held.parts, prompt, max_tokens=50)
        held.rewind_to_prefix(prompt)
        for round in islice(rounds, count):
            held.append(round.tokens)
        rounds.close()  # type: ignore[attr-defined]
        assert generate(pair, held, prompt, 6) == alone(pair, kind, prompt, 6, GREEDY)


def test_common_prefix() -> None:
    assert common_prefix([1, 2, 3], [1, 2, 4]) == common_prefix([1, 2], (1, 2, 3)) == 2
    assert common_prefix([], [1]) == common_prefix([2], [1]) == 0


def test_statistics_add_up() -> None:
    one = Statistics(prompt_tokens=5, generated_tokens=3, rounds=2, drafted_at=(2, 1), plain_seconds=1.0)
    two = Statistics(generated_tokens=4, rounds=1, drafted_at=(1,), reason=Reason.PAYS, finish_reason="stop")
    total = added([one, two])
    assert (total.prompt_tokens, total.generated_tokens, total.rounds) == (5, 7, 3)
    assert (total.drafted_at, total.plain_seconds) == ((3, 1), 1.0)
    assert (total.reason, total.finish_reason) == (Reason.PAYS, "stop")
    assert added([]) == Statistics() and added([one]) == one
