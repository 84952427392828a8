"""The prefix cache: which sequence is used again, which one is forgotten, and never a wrong token."""

from __future__ import annotations

import gc
import random
import time
import timeit
import weakref
from collections.abc import Sequence

import numpy as np
import pytest
from support import tiny
from support.pairs import alone, generate, make_pair, shallow
from support.shared_caches import Served, Talks, random_session, serve

from mlx_spec.apps.server.engine.prefix_cache import PrefixCache
from mlx_spec.decode.loop import decode
from mlx_spec.decode.sequence import CachedSequence, Reread
from mlx_spec.pair import Pair
from mlx_spec.prompt import Prompt, text_prompt
from mlx_spec.sampling import Sampling

GREEDY = Sampling()
shallow_models = pytest.fixture(shallow, scope="module", autouse=True)


def cache_of(pair: Pair, count: int = 4, limit: int = 10**9) -> PrefixCache:
    return PrefixCache(pair.open, count, lambda: limit, min_fork=8)  # the texts are short


def served(pair: Pair, cache: PrefixCache, prompt: Sequence[int], count: int = 4) -> CachedSequence:
    """A prompt that was answered."""
    prompt = prompt if isinstance(prompt, Prompt) else text_prompt(map(int, prompt))
    sequence = cache.take(prompt)
    generate(pair, sequence, prompt, count)
    cache.give_back(sequence)
    return sequence


@pytest.fixture(scope="module")
def pair() -> Pair:
    return make_pair("full", "none")


A, B, C = ([100 + i] * 20 for i in range(3))


def test_a_conversation_continues_its_sequence(pair: Pair) -> None:
    cache = cache_of(pair)
    a, b = served(pair, cache, A), served(pair, cache, B)
    assert a is not b and len(cache) == 2
    assert served(pair, cache, [*A, 1, 2, 3]) is a
    assert served(pair, cache, [*B, 1]) is b
    assert len(cache) == 2


def test_a_sequence_in_use_is_never_lent_again(pair: Pair) -> None:
    cache = cache_of(pair, count=1)
    a = served(pair, cache, A)
    first, second = cache.take(text_prompt(A)), cache.take(text_prompt(A))
    assert first is a and second is not a
    assert len(cache) == 2
    cache.give_back(second)
    cache.give_back(first)
    assert len(cache) == 1


def test_the_oldest_sequence_is_forgotten(pair: Pair) -> None:
    cache = cache_of(pair, count=2)
    a, b = served(pair, cache, A), served(pair, cache, B)
    assert served(pair, cache, [*A, 1]) is a
    served(pair, cache, C)
    assert served(pair, cache, [*A, 1, 2]) is a
    assert served(pair, cache, [*B, 1]) is not b
    lent = cache.take(text_prompt([9]))
    assert len(cache) == 2  # while it grows, too
    cache.forget(lent)


def test_a_request_may_be_repeated_after_a_long_answer(pair: Pair) -> None:
    cache = cache_of(pair)
    a = served(pair, cache, [7, 8, 9], 12)
    assert served(pair, cache, [7, 8, 9], 12) is a
    assert served(pair, cache, [7, 8, 5]) is not a  # another conversation


def test_bytes_have_a_limit(pair: Pair) -> None:
    one = cache_of(pair)
    served(pair, one, A)
    cache = cache_of(pair, limit=2 * one.nbytes)
    a, b = served(pair, cache, A), served(pair, cache, B)
    assert cache.nbytes == 2 * one.nbytes
    served(pair, cache, C)
    assert cache.nbytes == 2 * one.nbytes and len(cache) == 2
    assert served(pair, cache, [*B, 1]) is b
    assert served(pair, cache, [*A, 1]) is not a
    cache.shrink(reserved=one.nbytes)
    assert len(cache) == 1


def test_a_sequence_is_dropped_after_an_error(pair: Pair) -> None:
    cache = cache_of(pair)
    a = served(pair, cache, A)
    assert cache.take(text_prompt(A)) is a
    cache.forget(a)
    assert len(cache) == 0


def text(seed: int, size: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, tiny.VOCAB, size).tolist()


def test_conversations_that_share_a_beginning_keep_it_both(pair: Pair) -> None:
    """The second gets a fork, and then each goes on in its own sequence."""
    cache, start = cache_of(pair), text(1, 60)
    histories = [start + text(2, 40), start + text(3, 30)]
    for turn in range(3):
        for i, history in enumerate(histories):
            sequence = cache.take(prompt := text_prompt(history))
            expected = 0 if not i + turn else 60 if not turn else len(history) - 13
            assert (sequence.shared(prompt), sequence.reread) == (expected, None)
            generate(pair, sequence, history, 4)
            cache.give_back(sequence)
            histories[i] = sequence.identity.tolist() + text(4 + turn, 13)
    assert len(cache) == 2 and cache.counters.forks == 1 and cache.counters.fork_bytes == sequence.nbytes


def test_a_fork_of_a_sequence_in_use(pair: Pair) -> None:
    cache, start = cache_of(pair), text(1, 60)
    first = cache.take(one := text_prompt(start + text(2, 40)))
    rounds = decode(pair.prepare(first, one, max_tokens=8))
    first.rewind_to_prefix(one)
    emitted = next(rounds).tokens
    prompt = text_prompt(start + text(3, 30))
    second = cache.take(prompt)
    assert generate(pair, second, prompt, 6) == alone(pair, "full", prompt, 6, GREEDY)
    emitted += [token for round in rounds for token in round.tokens]
    assert emitted == alone(pair, "full", one, 8, GREEDY)
    assert cache.counters.forks == 1


@pytest.mark.parametrize("in_use", [True, False])
def test_a_fork_that_is_cancelled_keeps_no_buffers_of_its_origin(pair: Pair, in_use: bool) -> None:
    cache, start = cache_of(pair), text(1, 60)
    origin = cache.take(one := text_prompt(start + text(2, 40)))
    generate(pair, origin, one, 4)
    if not in_use:
        cache.give_back(origin)
    fork = cache.take(text_prompt(start + text(3, 30)))
    assert cache.counters.forks == 1
    held = weakref.ref(origin.target.caches.full[0].buffers[0])
    cache.give_back(fork)
    cache.forget(origin)
    del origin, fork
    gc.collect()
    assert held() is None and len(cache) == 0


def test_without_room_for_a_fork_the_sequence_is_taken_over(pair: Pair) -> None:
    cache, start = cache_of(pair, count=1), text(1, 60)
    one = served(pair, cache, start + text(2, 40))
    held = one.identity
    assert served(pair, cache, start + text(3, 40)) is one
    assert one.reread is None
    served(pair, cache, [*held, 1, 2])
    assert (one.reread, cache.counters.forks) == (Reread(len(held) - 60, "evicted"), 0)
    assert len(held) - 60 == cache.counters.evicted_tokens / 2  # it was taken over twice


def test_a_prompt_without_a_place_to_go_on_from_says_so() -> None:
    pair = make_pair("recurrent", "none")
    cache = cache_of(pair)
    served(pair, cache, text(1, 60) + text(2, 20))
    sequence = cache.take(text_prompt(text(1, 60)[:40] + text(3, 60)))
    assert sequence.reread == Reread(40, "no place")


def test_what_costs_least_to_read_again_per_byte_goes_first(pair: Pair) -> None:
    """A branch with few tokens of its own goes before an older whole conversation."""
    cache, start = cache_of(pair), text(1, 200)
    old = served(pair, cache, text(5, 220))
    branch = served(pair, cache, start + text(2, 30))
    served(pair, cache, start + text(3, 90))
    assert len(cache) == 3
    before = cache.nbytes
    cache.shrink(10**9 - cache.nbytes + 1)
    assert len(cache) == 3 and cache.nbytes < before  # columns that no token needs
    while len(cache) == 3:
        cache.shrink(10**9 - cache.nbytes + 1)
    assert cache.take(text_prompt([*text(5, 220), 1])) is old
    assert cache.take(text_prompt(start + text(2, 30))) is not branch


@pytest.mark.parametrize("has_question", [True, False])
def test_what_left_its_last_answer_out_goes_before_an_older_conversation(
    has_question: bool, pair: Pair
) -> None:
    """A prompt that parts before the last question says nothing of it: it is of another agent."""
    cache, start = cache_of(pair), text(1, 20)
    old = text_prompt(text(5, 96))
    served(pair, cache, old)
    asked = text_prompt(start, (20,)) if has_question else text_prompt(start + text(7, 70), (20, 85))
    main = served(pair, cache, asked, 100 - len(asked))
    served(pair, cache, text_prompt(start + text(6, 60), (20, 75)))
    assert len(cache) == 3
    while len(cache) == 3:
        cache.shrink(10**9 - cache.nbytes + 1)
    assert (cache.take(old).identity.size > 90) == has_question
    again = text_prompt(main.identity.tolist())
    assert (cache.take(again).shared(again) > 90) != has_question


def test_prompts_that_come_together_read_their_beginning_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others wait for it, also with windows and states, unless their own beginning is short."""
    monkeypatch.setattr("mlx_spec.decode.running.PREFILL_STEP", 64)
    start = text(1, 150)  # past the window, and what its buffers hold beyond it
    for kind in ("full", "sliding", "recurrent"):
        pair = make_pair(kind, "none")
        cache, batch = cache_of(pair), pair.batch(4)
        requests = [Served(text_prompt(start + text(2 + i, 20)), 3, None) for i in range(4)]
        requests.append(Served(text_prompt(text(9, 20)), 3, None))
        serve(batch, cache, pair, requests)
        assert [request.reused for request in requests] == [0, *[150] * 3, 0]
        for request in requests:
            assert request.said == alone(pair, kind, request.prompt, 3, GREEDY)


def test_nobody_waits_for_a_prompt_that_failed(pair: Pair) -> None:
    cache, prompt = cache_of(pair), text_prompt(text(1, 400))
    assert not cache.waits(prompt) and cache._reusable(prompt) == 0
    first = cache.take(prompt)
    first.rewind_to_prefix(prompt)
    assert cache.waits(prompt) and not cache.waits(text_prompt(text(1, 200) + text(2, 300)))
    first.target.prefill(prompt[:100])
    assert cache.waits(prompt)
    cache.forget(first)
    assert not cache.waits(prompt)


def test_places_go_before_lent_caches_are_too_large() -> None:
    """They are given up before anything is refused; what has been read stays."""
    pair = make_pair("recurrent", "none")
    cache, prompt = cache_of(pair), text_prompt(text(1, 300), (100, 200))
    sequence = cache.take(prompt)
    sequence.rewind_to_prefix(prompt)
    target = sequence.target
    target.prefill(prompt[:-1])
    assert [place.size for place in target.rewind_points] == [100, 200, 267, 299]
    assert cache.nbytes == cache.used_nbytes == target.nbytes > sum(target.pinned.values()) > 0
    fork = cache.take(text_prompt(text(1, 200) + [5] * 60))
    assert fork.identity.size == 200 and cache.nbytes < target.nbytes + fork.nbytes  # places are shared
    cache.forget(fork)
    cache.shrink(10**9 - cache.nbytes + 1)
    assert [place.size for place in target.rewind_points] == [
        200,
        267,
        299,
    ] and cache.counters.dropped_rewind_points == 1
    cache.shrink(10**9)
    assert [place.size for place in target.rewind_points] == [267, 299]  # of the last prompt


def test_choosing_among_long_conversations_is_quick(pair: Pair) -> None:
    """8 of 32k tokens, most of which the prompt shares: at most 0.5 ms."""
    cache, rng = cache_of(pair, count=8), np.random.default_rng(1)
    shared = rng.integers(0, 250, 32_000)
    for i in range(8):
        sequence = cache.take(text_prompt([i]))
        tokens = shared.copy()
        tokens[3999 * i + 3999 :] += 1
        sequence.rewind_to_prefix(text_prompt(tokens.tolist()))
        sequence.target.count(32_000)
        cache.give_back(sequence)
    prompt = text_prompt(shared.tolist())
    assert len(prompt.identity) == 32_000  # the preparation thread makes it
    timer = timeit.Timer(lambda: cache.matches(prompt), timer=time.thread_time)  # others compute, too
    seconds = min(timer.repeat(number=5, repeat=50)) / 5  # the first ones find cold caches
    assert [match.shared for match in cache.matches(prompt)] == [3999 * i + 3999 for i in range(8)]
    assert seconds < 0.5e-3


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
    cache = cache_of(pair, count=3)
    histories = {name: tiny.prompt(12 + 9 * name, seed=3 + name) for name in range(4)}
    reused = 0
    for _ in range(10):
        name = rng.randrange(4)
        prompt = text_prompt(histories[name])
        sequence = cache.take(prompt)
        reused += sequence.shared(prompt) > 0
        rounds = decode(pair.prepare(sequence, prompt, max_tokens=6))
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


@pytest.mark.parametrize(
    ("kind", "drafter"),
    [
        ("full", "lookup"),
        ("sliding", "other"),
        ("shared", "same"),
        ("recurrent", "lookup"),
        ("quantized", "same"),
    ],
)
def test_what_is_shared_changes_no_text(kind: str, drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random conversations, several at a time: they go on, part, begin again, wait and lose their caches."""
    monkeypatch.setattr("mlx_spec.decode.running.PREFILL_STEP", 48)
    draw, pair = random.Random(kind), make_pair(kind, drafter, K=3)
    first = text_prompt(text(1, 70), (40, 70))
    talks = Talks(draw, range(tiny.VOCAB), 250, first)
    found = random_session(pair, talks, draw, 5, max_bytes=3 * 10**6)
    assert found.differ == 0 and found.forks >= 1 and found.reused > found.tokens / 4
