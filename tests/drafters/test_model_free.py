"""Lookup against its definition and at work; predicted output; tokens that a grammar forces."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest
from support import lossless

from mlx_spec.drafters.earlier import TextRing
from mlx_spec.drafters.lookup import MAX_TAIL, Lookup
from mlx_spec.drafters.per_request import Forced, GrammarFilter, Prediction, prediction_counts
from mlx_spec.types import Draft, Features, Sampler

SAMPLER = lossless.GREEDY.sampler(1, 1000)
PROMPT = [1, 2, 3, 4, 5]


def drafts(drafter: Lookup | Prediction, history: Sequence[int], limit: int = 16) -> list[int]:
    draft = drafter.draft(history, limit, SAMPLER)
    assert draft.probs is None and draft.tokens.dtype == mx.int32
    if isinstance(drafter, Prediction):
        assert drafter.available(history) >= draft.tokens.size
    tokens: list[int] = draft.tokens.tolist()
    return tokens


def reference(history: list[int], limit: int, min_match: int = 2, max_match: int = 32) -> list[int]:
    """Return what followed the longest match of the last tokens, the latest of equals."""
    for length in range(min(max_match, len(history) - 1), min_match - 1, -1):
        for place in range(len(history) - 1, length - 1, -1):
            if history[place - length : place] == history[-length:]:
                text = list(history)
                for i in range(min(limit, length)):
                    text.append(text[place + i])
                return text[len(history) :]
    return []


def texts(seed: int) -> list[int]:
    """Random tokens with copied stretches and runs."""
    rng = random.Random(seed)
    text = [rng.randrange(4 + seed % 9) for _ in range(rng.randrange(1, 40))]
    for _ in range(rng.randrange(6)):
        start = rng.randrange(len(text))
        text += text[start : start + rng.randrange(1, 50)]
        text += [rng.randrange(12)] * rng.randrange(4)
    return text


@pytest.mark.parametrize("settings", [(2, 32), (1, 32), (3, 4), (2, 2), (5, 100)])
def test_equals_the_definition(settings):
    for seed in range(120):
        text = texts(seed)
        assert drafts(Lookup(*settings), text, 7) == reference(text, 7, *settings), seed


def test_history_may_be_replaced():
    """Between turns the history is cut, edited or another one altogether."""
    for seed in range(40):
        rng, drafter, text = random.Random(seed), Lookup(), texts(seed)
        for _ in range(6):
            assert drafts(drafter, text, 4) == reference(text, 4)
            keep = rng.randrange(len(text) + 1)
            text = text[:keep] + texts(rng.randrange(1000))
    drafter = Lookup()  # two of one length
    assert drafts(drafter, [1, 2, 3, 4, 1, 2], 1) == [3]
    assert drafts(drafter, [1, 2, 3, 4, 2, 3], 1) == [4]


@pytest.mark.parametrize("seed", range(20))
def test_histories_that_part_and_meet_again(seed: int) -> None:
    """Prompts of one length that differ in their middle: what follows is equal, so the change is not seen."""
    draw, drafter = random.Random(seed), Lookup()
    history = [draw.randrange(50) for _ in range(120)]
    for _ in range(60):
        history = history[: draw.randrange(max(len(history) - 70, 1), len(history) + 1)]
        history += [draw.randrange(50) for _ in range(draw.randrange(40))]
        changed = draw.randrange(len(history))
        history[changed : changed + 3] = [draw.randrange(50) for _ in history[changed : changed + 3]]
        drafter.observe(history, Features())
        copied = drafts(drafter, history, 4)
        assert all(token in history for token in copied)


def test_looks_at_the_latest_places_only():
    early, often = [9, 8, 1, 2, 5], [1, 2, 6] * 128
    assert drafts(Lookup(), [*early, *often[:-3], 9, 8, 1, 2], 1) == [5]
    assert drafts(Lookup(), [*early, *often, 9, 8, 1, 2], 1) == [6]


# --- predicted output


@pytest.mark.parametrize(
    ("before", "answer", "limit", "expected"),
    [
        ([], [], 3, [10, 11, 12]),  # an answer begins with the prediction
        ([], range(10, 14), 5, [14, 15, 16, 17, 18]),
        ([], [10, 11, 99, 98], 16, []),
        ([], [10, 11, 99, 98, 20, 21], 16, [22, 23]),  # found again after a change
        ([], [10, 11, 99, 98, 20, 21, 22, 23], 16, [24, 25, 26, 27]),
        ([7, 8, 9], [50, 7, 8], 1, [9]),  # of the prompt
        ([], [50, 51, 52, 50, 51], 1, [52]),  # of the answer
    ],
)
def test_prediction(before: list[int], answer: Sequence[int], limit: int, expected: list[int]) -> None:
    prompt = [*before, *PROMPT]
    drafter = Prediction(range(10, 40), prompt)
    for end in range(len(answer)):
        drafter.observe([*prompt, *answer[:end]], Features())
    assert drafts(drafter, [*prompt, *answer], limit) == expected


def test_a_prompt_in_chunks() -> None:
    chance = random.Random(0)
    prompt = [chance.randrange(7) for _ in range(3000)]
    drafter = Prediction(range(100, 130), prompt)
    for high in (1000, 2000, 3000):
        drafter.observe(prompt[:high], Features())
    assert drafts(drafter, prompt) == list(range(100, 116))


# --- what is counted


def longest_common(a: Sequence[int], b: Sequence[int]) -> int:
    """By the textbook's table."""
    row = [0] * (len(b) + 1)
    for x in a:
        before = row
        row = [0]
        for j, y in enumerate(b):
            row.append(before[j] + 1 if x == y else max(before[j + 1], row[-1]))
    return row[-1]


@pytest.mark.parametrize("tokens", [2, 5, 50])
def test_counts_are_those_of_a_longest_common_subsequence(tokens: int) -> None:
    chance = random.Random(tokens)
    for _ in range(60):
        a, b = ([chance.randrange(tokens) for _ in range(chance.randrange(40))] for _ in range(2))
        expected = longest_common(a, b)
        assert prediction_counts(a, b) == (expected, len(a) - expected)


# --- grammars


class Letters:
    """A grammar that allows ascending tokens only, and forces 1, 2, 3 at the start."""

    def __init__(self) -> None:
        self.calls = 0

    def legal(self, history: Sequence[int], drafted: Sequence[int], *, start: int) -> int:
        generated = history[start:]
        before = [*generated[-1:], *drafted]
        ends = (i for i in range(1, len(before)) if before[i] <= before[i - 1])
        return next(ends, len(before)) - len(generated[-1:])

    def forced(self, history: Sequence[int], *, start: int) -> list[int]:
        self.calls += 1
        return [1, 2, 3][len(history) - start :]


def test_forced_tokens_are_drafted_and_read_once_a_round():
    matcher = Letters()
    drafter = Forced(matcher, len(PROMPT))
    assert drafter.available(PROMPT) == 3
    assert drafter.draft(PROMPT, 2, SAMPLER).tokens.tolist() == [1, 2] and matcher.calls == 1
    assert drafter.draft([*PROMPT, 1], 9, SAMPLER).tokens.tolist() == [2, 3]
    assert drafter.draft([*PROMPT, 1, 2, 3], 9, SAMPLER).tokens.size == 0
    assert (drafter.nbytes, drafter.missing(7)) == (0, 0)
    assert 0.9 < Forced.prior < 1 and Prediction.prior < Forced.prior


def test_a_draft_is_cut_after_the_first_forbidden_token():
    truth = [*PROMPT, 7, 8, 3, 9]
    drafter = GrammarFilter(lossless.Scripted(truth), Letters(), len(PROMPT))
    assert drafter.draft(PROMPT, 4, SAMPLER).tokens.tolist() == [7, 8, 3]
    assert drafter.draft(PROMPT, 2, SAMPLER).tokens.tolist() == [7, 8]


@pytest.mark.parametrize("drawn", [{"probs": mx.full((3, 10), 0.1)}, {"parents": (0, 0, 1)}])
def test_what_was_drawn_and_trees_are_not_cut(drawn: dict[str, Any]) -> None:
    """A cut would change the distribution of the drafts, or part a tree from its parents."""
    given = Draft(mx.array([7, 3, 8], dtype=mx.int32), **drawn)

    class Given(lossless.Scripted):
        def draft(self, history: Sequence[int], limit: int, sampler: Sampler) -> Draft:
            return given

    assert GrammarFilter(Given([]), Letters(), len(PROMPT)).draft(PROMPT, 4, SAMPLER) is given


def test_the_conversation_of_another_key_is_forgotten() -> None:
    """Else the drafts would show that it ended like this one."""
    tail = range(100, 100 + MAX_TAIL)
    lookup = Lookup()
    for middle, drafted in ((9, []), (2, [3])):
        lookup.copy_from(TextRing(1 << 10))
        history = [1, middle, 3, *tail]
        lookup.observe(history, Features())
        assert drafts(lookup, [*history, 1, 2], 1) == drafted
