"""Conversations that are kept: which one goes on, which one is forgotten, and never a wrong token."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import tiny
from served import DEMO, begin, body, chat, closed, text_of, working
from test_session import alone, make_pair

from mlx_spec.apps.server.ask import RoundDone
from mlx_spec.apps.server.conversations import Conversations
from mlx_spec.apps.server.settings import Served, Settings
from mlx_spec.pair import Pair
from mlx_spec.sampling import Sampling
from mlx_spec.sequence import CachedSequence

GREEDY = Sampling()


def conversations(pair: Pair, count: int = 4, limit: int = 10**9) -> Conversations:
    return Conversations(pair.open, count, lambda: limit)


def generate(pair: Pair, held: CachedSequence, prompt: Sequence[int], count: int) -> list[int]:
    """Continue a prompt with a sequence that was taken for it."""
    rounds = pair.run(held.parts, prompt, max_tokens=count)
    held.rewind_to_prefix(prompt)
    emitted: list[int] = []
    for round in rounds:
        held.append(round.tokens)
        emitted += round.tokens
    return emitted


def served(pair: Pair, kept: Conversations, prompt: Sequence[int], count: int = 4) -> CachedSequence:
    """A prompt that was answered."""
    with kept.using(prompt) as held:
        generate(pair, held, prompt, count)
    return held


@pytest.fixture(scope="module")
def pair() -> Pair:
    return make_pair("full", "none")


A, B, C = ([100 + i] * 20 for i in range(3))


def test_a_conversation_goes_on_where_it_was(pair: Pair) -> None:
    kept = conversations(pair)
    a, b = served(pair, kept, A), served(pair, kept, B)
    assert a is not b and kept.kept == 2
    assert served(pair, kept, [*A, 1, 2, 3]) is a
    assert served(pair, kept, [*B, 1]) is b
    assert kept.kept == 2 and kept.used == 0


def test_what_shares_little_begins_anew(pair: Pair) -> None:
    kept = conversations(pair)
    a = served(pair, kept, [7] * 8 + A)  # 31 tokens are held
    assert served(pair, kept, [7] * 8 + B) is not a
    assert served(pair, kept, [7] * 8 + A[:10] + [1, 2]) is a  # 18 of them


def test_what_is_asked_again_takes_the_place_of_its_answer(pair: Pair) -> None:
    kept = conversations(pair)
    a = served(pair, kept, A, 60)
    assert served(pair, kept, A, 60) is a and kept.kept == 1
    assert served(pair, kept, [*A[:10], 1]) is not a  # an earlier place of it, not the same again
    assert served(pair, kept, A[:1]) is not a and served(pair, kept, A[:2]) is not a


def test_one_in_use_is_never_taken(pair: Pair) -> None:
    kept = conversations(pair, count=1)
    a = served(pair, kept, A)
    with kept.using(A) as first, kept.using(A) as second:
        assert first is a and second is not a
        assert (kept.used, kept.kept) == (2, 2)
    assert (kept.used, kept.kept) == (0, 1)


def test_what_was_used_longest_ago_is_forgotten(pair: Pair) -> None:
    kept = conversations(pair, count=2)
    a, b = served(pair, kept, A), served(pair, kept, B)
    assert served(pair, kept, [*A, 1]) is a
    served(pair, kept, C)
    assert served(pair, kept, [*A, 1, 2]) is a
    assert served(pair, kept, [*B, 1]) is not b


def test_what_is_forgotten_anyway_is_gone_on_from(pair: Pair) -> None:
    kept = conversations(pair, count=2)
    a, _ = served(pair, kept, [7] * 8 + A), served(pair, kept, C)
    assert served(pair, kept, [7] * 8 + B) is a


def test_bytes_have_a_limit(pair: Pair) -> None:
    one = conversations(pair)
    served(pair, one, A)
    kept = conversations(pair, limit=2 * one.nbytes)
    a, b = served(pair, kept, A), served(pair, kept, B)
    assert kept.nbytes == 2 * one.nbytes
    served(pair, kept, C)
    assert kept.nbytes == 2 * one.nbytes and kept.kept == 2
    assert served(pair, kept, [*B, 1]) is b
    assert served(pair, kept, [*A, 1]) is not a
    kept.shrink(reserved=one.nbytes)
    assert kept.kept == 1
    kept.clear()
    assert kept.nbytes == kept.kept == 0


def test_caches_of_drafters_count(pair: Pair) -> None:
    alone = served(pair, conversations(pair), A)
    twice = served(drafted := make_pair("full", "same"), conversations(drafted), A)
    assert twice.nbytes == 2 * alone.nbytes == 2 * twice.decoding.target.nbytes > 0


def test_after_an_error_nothing_is_kept(pair: Pair) -> None:
    kept = conversations(pair)
    a = served(pair, kept, A)
    with pytest.raises(ZeroDivisionError), kept.using(A) as held:
        assert held is a
        raise ZeroDivisionError
    assert kept.kept == 0


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
def test_interleaved_conversations_are_those_of_plain_decoding(kind: str) -> None:
    rng, pair = random.Random(kind), make_pair(kind, "other", K=3)
    kept = conversations(pair, count=2)
    histories = {name: tiny.prompt(12 + 9 * name, seed=3 + name) for name in range(3)}
    reused = 0
    for _ in range(7):
        name = rng.randrange(3)
        prompt = histories[name]
        with kept.using(prompt) as held:
            reused += held.shared(prompt) > 0
            rounds = pair.run(held.parts, prompt, max_tokens=6)
            held.rewind_to_prefix(prompt)
            answer: list[int] = []
            for round in rounds:
                held.append(round.tokens)
                answer += round.tokens
                if rng.random() < 0.1:  # cancelled
                    break
            rounds.close()  # type: ignore[attr-defined]
            cut = rng.randrange(1, len(answer) + 1)
            if rng.random() < 0.2:  # a stop string
                held.truncate(len(prompt) + cut)
                answer = answer[:cut]
        assert answer == alone(pair, kind, prompt, 6, GREEDY)[: len(answer)]
        histories[name] = edited(rng, prompt, answer)
    assert reused >= 3


QUESTIONS = ("What does os.path.join do?", "Explain len()", "and re.sub?", "json.loads", "why is that?")


def test_a_random_schedule_through_the_worker() -> None:
    """Chats that go on, are edited, think, stop, are cancelled; several at a time, past the window of 64."""
    rng = random.Random(2)
    plain = Settings(models=(Served("demo", "demo", drafter="none"),), conversations=0)
    chats: list[list[str]] = [[], [], []]
    cached = checked = 0
    with working(DEMO) as worker, working(plain) as fresh:
        for _ in range(4):
            streams = []
            for turns in chats:
                if turns and rng.random() < 0.2:
                    turns[0] = rng.choice(QUESTIONS)  # the history is edited
                turns.append(rng.choice(QUESTIONS))
                stop = ("e ",) if rng.random() < 0.3 else ()
                ask = chat(*turns, thinking=rng.random() < 0.3, stop=stop, max_tokens=10)
                streams.append((ask, turns, begin(worker, ask)))
            lost = begin(worker, ask)
            lost.until(RoundDone)
            lost.job.cancel()
            for ask, turns, stream in streams:
                events = stream.all()
                turns.append(text_of(events))  # without thoughts
                cached += closed(events).usage.cached_tokens
                if rng.random() < 0.4:
                    expected = begin(fresh, ask).all()
                    assert closed(expected).usage.cached_tokens == 0
                    assert body(events) == body(expected)
                    checked += 1
    assert cached > 100 and checked > 3
