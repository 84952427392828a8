"""A prediction is drafted from its beginning, found again behind a change, and counted in the answer."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import mlx.core as mx
import pytest

from mlx_spec.drafters.model_free import Prediction, prediction_counts
from mlx_spec.sampling import Sampling
from mlx_spec.types import Features

SAMPLER = Sampling().sampler(0, 300)
PROMPT = [1, 2, 3, 4, 5]


def drafted(drafter: Prediction, history: Sequence[int], limit: int = 16) -> list[int]:
    found = drafter.draft(history, limit, SAMPLER)
    assert drafter.available(history) >= found.tokens.size
    tokens = found.tokens.tolist()
    assert isinstance(tokens, list)
    return tokens


def test_an_answer_begins_with_the_prediction() -> None:
    assert drafted(Prediction([10, 11, 12, 13], PROMPT), PROMPT, 3) == [10, 11, 12]


def test_it_goes_on_behind_what_came_true() -> None:
    drafter = Prediction(range(10, 40), PROMPT)
    for end in range(4):
        drafter.observe([*PROMPT, *range(10, 10 + end)], Features())
    assert drafted(drafter, [*PROMPT, *range(10, 14)], 5) == [14, 15, 16, 17, 18]


def test_it_is_found_again_behind_a_change() -> None:
    drafter = Prediction(range(10, 40), PROMPT)
    history = [*PROMPT, 10, 11, 99, 98]
    assert drafted(drafter, history) == []
    assert drafted(drafter, [*history, 20, 21]) == [22, 23]
    assert drafted(drafter, [*history, 20, 21, 22, 23]) == [24, 25, 26, 27]


def test_prompt_and_output_are_looked_up_too() -> None:
    prompt = [7, 8, 9, *PROMPT]
    assert drafted(Prediction([10, 11], prompt), [*prompt, 50, 7, 8], 1) == [9]
    assert drafted(Prediction([10, 11], prompt), [*prompt, 50, 51, 52, 50, 51], 1) == [52]


def test_a_prompt_in_chunks() -> None:
    chance = random.Random(0)
    prompt = [chance.randrange(7) for _ in range(3000)]
    drafter = Prediction(range(100, 130), prompt)
    for high in (1000, 2000, 3000):
        drafter.observe(prompt[:high], Features())
    assert drafted(drafter, prompt) == list(range(100, 116))


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


def test_plain_cases() -> None:
    assert prediction_counts([], [1, 2]) == (0, 0)
    assert prediction_counts([1, 2, 3], []) == (0, 3)
    assert prediction_counts([1, 2, 3], [1, 2, 3, 4]) == (3, 0)
    assert prediction_counts([1, 2, 3, 4], [1, 9, 3, 4]) == (3, 1)
    assert prediction_counts([1, 2], [2, 1]) == (1, 1)


def test_ten_thousand_tokens_take_no_time() -> None:
    chance = random.Random(0)
    prediction = [chance.randrange(300) for _ in range(10_000)]
    output = [t if chance.random() < 0.9 else 0 for t in prediction]
    start = time.perf_counter()
    accepted, rejected = prediction_counts(prediction, output)
    assert accepted > 8900 and accepted + rejected == 10_000
    assert time.perf_counter() - start < 2.0


def test_drafts_are_tokens() -> None:
    found = Prediction([10, 11], PROMPT).draft(PROMPT, 2, SAMPLER)
    assert found.tokens.dtype == mx.int32 and found.probs is None
    assert found.confidence is not None and found.confidence.shape == (2,)
