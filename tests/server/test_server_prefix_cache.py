"""The prefix cache: which sequence is used again, which one is forgotten, and never a wrong token."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from support import tiny
from support.pairs import alone, generate, make_pair

from mlx_spec.apps.server.engine.prefix_cache import PrefixCache
from mlx_spec.decode.loop import decode
from mlx_spec.decode.sequence import CachedSequence
from mlx_spec.pair import Pair
from mlx_spec.prompt import text_prompt
from mlx_spec.sampling import Sampling

GREEDY = Sampling()


def prefix_cache(pair: Pair, count: int = 4, limit: int = 10**9) -> PrefixCache:
    return PrefixCache(pair.open, count, lambda: limit)


def served(pair: Pair, cache: PrefixCache, prompt: Sequence[int], count: int = 4) -> CachedSequence:
    """A prompt that was answered."""
    sequence = cache.take(text_prompt(prompt))
    generate(pair, sequence, prompt, count)
    cache.give_back(sequence)
    return sequence


@pytest.fixture(scope="module")
def pair() -> Pair:
    return make_pair("full", "none")


A, B, C = ([100 + i] * 20 for i in range(3))


def test_a_conversation_continues_its_sequence(pair: Pair) -> None:
    cache = prefix_cache(pair)
    a, b = served(pair, cache, A), served(pair, cache, B)
    assert a is not b and len(cache) == 2
    assert served(pair, cache, [*A, 1, 2, 3]) is a
    assert served(pair, cache, [*B, 1]) is b
    assert len(cache) == 2


def test_a_sequence_in_use_is_never_lent_again(pair: Pair) -> None:
    cache = prefix_cache(pair, count=1)
    a = served(pair, cache, A)
    first, second = cache.take(text_prompt(A)), cache.take(text_prompt(A))
    assert first is a and second is not a
    assert len(cache) == 2
    cache.give_back(second)
    cache.give_back(first)
    assert len(cache) == 1


def test_the_oldest_sequence_is_forgotten(pair: Pair) -> None:
    cache = prefix_cache(pair, count=2)
    a, b = served(pair, cache, A), served(pair, cache, B)
    assert served(pair, cache, [*A, 1]) is a
    served(pair, cache, C)
    assert served(pair, cache, [*A, 1, 2]) is a
    assert served(pair, cache, [*B, 1]) is not b
    lent = cache.take(text_prompt([9]))
    assert len(cache) == 2  # while it grows, too
    cache.forget(lent)


def test_a_request_may_be_repeated_after_a_long_answer(pair: Pair) -> None:
    cache = prefix_cache(pair)
    a = served(pair, cache, [7, 8, 9], 12)
    assert served(pair, cache, [7, 8, 9], 12) is a
    assert served(pair, cache, [7, 8, 5]) is not a  # another conversation


def test_bytes_have_a_limit(pair: Pair) -> None:
    one = prefix_cache(pair)
    served(pair, one, A)
    cache = prefix_cache(pair, limit=2 * one.nbytes)
    a, b = served(pair, cache, A), served(pair, cache, B)
    assert cache.nbytes == 2 * one.nbytes
    served(pair, cache, C)
    assert cache.nbytes == 2 * one.nbytes and len(cache) == 2
    assert served(pair, cache, [*B, 1]) is b
    assert served(pair, cache, [*A, 1]) is not a
    cache.shrink(reserved=one.nbytes)
    assert len(cache) == 1


def test_a_sequence_is_dropped_after_an_error(pair: Pair) -> None:
    cache = prefix_cache(pair)
    a = served(pair, cache, A)
    assert cache.take(text_prompt(A)) is a
    cache.forget(a)
    assert len(cache) == 0


# --- never a wrong token


def edited(rng: random.Random, history: list[int], answer: list[int]) -> list[int]:
    """The next prompt of a conversation: as a rule it goes on, at times its past was changed."""
    said = [rng.randrange(tiny.VOCAB) for _ in range(rng.randrange(1, 12))]
    match rng.randrange(5):
        case 0:  # thoughts, or something else in the middle of the answer, are left out
            cut = rng.randrange(len(answer) + 1)
            return [*history, *answer[cut:], *said]
        case 1:  # an earlier message was edited
            cut = rng.randrange(1, len(history) + 1)
            return [*history[:cut], *said]
        case 2:  # the same again
            return history
    return [*history, *answer, *said]


@pytest.mark.parametrize("kind", ["sliding", "shared", "recurrent"])
def test_interleaved_conversations_equal_plain_decoding(kind: str) -> None:
    rng, pair = random.Random(kind), make_pair(kind, "other", K=3)
    cache = prefix_cache(pair, count=2)
    histories = {name: tiny.prompt(12 + 9 * name, seed=3 + name) for name in range(3)}
    reused = 0
    for _ in range(7):
        name = rng.randrange(3)
        prompt = text_prompt(histories[name])
        sequence = cache.take(prompt)
        reused += sequence.shared(prompt) > 0
        rounds = decode(pair.prepare(sequence.parts, prompt, max_tokens=6))
        sequence.rewind_to_prefix(prompt)
        answer: list[int] = []
        for round in rounds:
            sequence.append(round.tokens)
            answer += round.tokens
            if rng.random() < 0.1:  # cancelled
                break
        rounds.close()  # type: ignore[attr-defined]
        cut = rng.randrange(1, len(answer) + 1)
        if rng.random() < 0.2:  # a stop string
            sequence.truncate(len(prompt) + cut)
            answer = answer[:cut]
        cache.give_back(sequence)
        assert answer == alone(pair, kind, prompt, 6, GREEDY)[: len(answer)]
        histories[name] = edited(rng, histories[name], answer)
    assert reused >= 3
