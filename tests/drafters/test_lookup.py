"""Lookup against its definition, and at work."""

from __future__ import annotations

import random

import lossless
import pytest
import tiny

from mlx_spec.drafters import FAMILIES, open_drafter
from mlx_spec.drafters.model_free import MAX_PLACES, MAX_TAIL, Lookup, LookupSource
from mlx_spec.target import LMTarget
from mlx_spec.types import Features

NOTHING = Features()
SAMPLER = lossless.GREEDY.sampler(1, 1000)


def drafts(drafter: Lookup, history: list[int], limit: int) -> list[int]:
    draft = drafter.draft(history, limit, SAMPLER)
    assert draft.probs is None
    return draft.tokens.tolist()


def reference(history: list[int], limit: int, min_match: int = 2, max_match: int = 32) -> list[int]:
    """What followed the longest match of the last tokens, the latest of equals; as many tokens at most."""
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


def test_grows_with_the_history():
    for seed in range(12):
        text, rng, drafter = texts(seed), random.Random(seed), Lookup(2, 32)
        end = 1
        while end < len(text):
            if rng.random() < 0.5:
                drafter.observe(text[:end], NOTHING)
            if rng.random() < 0.5:
                assert drafts(drafter, text[:end], 3) == reference(text[:end], 3)
            end += rng.randrange(1, 6)


def test_history_may_be_replaced():
    """Between turns the history is cut, edited or another one altogether."""
    for seed in range(40):
        rng, drafter, text = random.Random(seed), Lookup(2, 32), texts(seed)
        for _ in range(6):
            assert drafts(drafter, text, 4) == reference(text, 4)
            keep = rng.randrange(len(text) + 1)
            text = text[:keep] + texts(rng.randrange(1000))


def test_change_far_back_costs_matches_but_no_error():
    """Only the last tokens are compared; places that no longer match are noticed one by one."""
    rng = random.Random(0)
    text = [rng.randrange(5, 9) for _ in range(4 * MAX_TAIL)]
    drafter = Lookup(2, 32)
    drafts(drafter, [*text, 1, 2, 3, *text[-MAX_TAIL:], 1, 2], 1)
    edited = [*text, 1, 4, 3, *text[-MAX_TAIL:], 1, 2]
    assert drafts(drafter, edited, 1) == []


def test_edges():
    assert drafts(Lookup(2, 32), [5], 4) == []
    assert drafts(Lookup(2, 32), [5, 5], 4) == []
    assert drafts(Lookup(2, 32), [5, 5, 5], 4) == [5, 5]
    assert drafts(Lookup(2, 32), [5] * 9, 4) == [5] * 4
    assert drafts(Lookup(2, 3), [5] * 9, 4) == [5] * 3
    assert drafts(Lookup(2, 32), [1, 2, 3, 1, 2], 0) == []
    assert drafts(Lookup(2, 32), [1, 2, 3, 1, 2], 1) == [3]
    assert drafts(Lookup(2, 32), [1, 2, 3, 1, 2], 5) == [3, 1]
    assert drafts(Lookup(2, 32), [1, 2, 3, 1, 2, 3, 1], 9) == [2, 3, 1, 2]
    assert drafts(Lookup(2, 32), [7, 1, 2, 8, 9, 1, 2, 4, 7, 1, 2], 1) == [8]  # longest before latest
    assert drafts(Lookup(2, 32), [1, 2, 8, 9, 1, 2, 4, 7, 1, 2], 1) == [4]


def test_tuples_and_lists():
    assert drafts(Lookup(2, 32), (1, 2, 3, 1, 2), 2) == [3, 1]


def test_looks_at_the_latest_places_only():
    early, often = [9, 8, 1, 2, 5], [1, 2, 6] * MAX_PLACES
    assert drafts(Lookup(2, 32), [*early, *often[:-3], 9, 8, 1, 2], 1) == [5]
    assert drafts(Lookup(2, 32), [*early, *often, 9, 8, 1, 2], 1) == [6]


class Counted(list):
    """Counts the tokens that are read."""

    read = 0

    def __getitem__(self, key):
        found = super().__getitem__(key)
        self.read += len(found) if isinstance(key, slice) else 1
        return found


@pytest.mark.parametrize("kinds", [2, 50])
def test_cost_does_not_grow_with_the_history(kinds):
    rng = random.Random(0)
    text, drafter = Counted(rng.randrange(kinds) for _ in range(20_000)), Lookup(2, 32)
    drafter.observe(text, NOTHING)
    for _ in range(50):
        text += [rng.randrange(kinds)] * 2
        text.read = 0
        drafter.observe(text, NOTHING)
        drafter.draft(text, 4, SAMPLER)
        assert text.read < 50 * MAX_PLACES


def test_few_new_tokens_are_indexed_when_a_draft_is_asked_for():
    rng = random.Random(1)
    text, drafter = Counted(rng.randrange(9) for _ in range(500)), Lookup(2, 32)
    drafter.observe(text, NOTHING)
    text.read = 0
    for _ in range(40):
        text.append(rng.randrange(9))
        drafter.observe(text, NOTHING)
    assert text.read == 0
    fresh = Lookup(2, 32)
    assert drafter.draft(text, 8, SAMPLER).tokens.tolist() == fresh.draft(text, 8, SAMPLER).tokens.tolist()
    shorter = list(text[:300])
    drafter.observe(shorter, NOTHING)
    again = [*shorter, *(rng.randrange(9) for _ in range(240))]
    drafter.observe(again, NOTHING)
    fresh = Lookup(2, 32)
    assert drafter.draft(again, 8, SAMPLER).tokens.tolist() == fresh.draft(again, 8, SAMPLER).tokens.tolist()


@pytest.mark.parametrize("kind", ["full", "sliding", "recurrent"])
@pytest.mark.parametrize("K", [1, 4])
def test_lossless(kind, K):
    model, prompt = getattr(tiny, kind)(), tiny.prompt(30)
    source = LookupSource(min_match=1)
    target = LMTarget(model, source.needs)
    done = lossless.rounds(target, source.make(target.parts), K, prompt, 40)
    assert lossless.emitted(done) == lossless.plain(model, prompt, 40)
    assert any(round.drafted for round in done)


def test_source(tmp_path):
    source = open_drafter(tmp_path, {"model_type": "lookup"}, {})
    assert (source.name, source.vocab_size) == ("lookup", None)
    assert source == FAMILIES["lookup"](tmp_path, {}, {})
