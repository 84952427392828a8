"""Under a grammar, emitted tokens follow the masked distribution of the target, whatever is drafted.

Drawn drafts must be judged even where the grammar forbids them. Cutting them by their validity is caught by
counting what the engine emits; `test_verify` enumerates rules over rows that are masked and not cut.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from functools import cache

import mlx.core as mx
import numpy as np
import pytest
from support import chi_square
from support.exact_distribution import COUNT, PLAIN, PROMPT, V, draft_model, model, seeded, texts, unseeded
from support.grammars import byte_text, language, next_letters
from support.lossless import Scripted

from mlx_spec.drafters.lookup import Lookup
from mlx_spec.drafters.per_request import GrammarFilter
from mlx_spec.grammar import Matcher
from mlx_spec.grammar.matcher import compile_grammar
from mlx_spec.model.target import LMTarget
from mlx_spec.sampling import Sampling
from mlx_spec.types import Draft, Drafter, Sampler

GENERATIONS = 120
LETTERS = "abcdef"  # tokens 0 to 5; 6 and 7 end a text
PATTERN = "[abe][abcd]{2}|d[ad]f|c{3,4}|fa*"
NARROW = "[cdf]{3}"  # forbids half of what is drafted, so that fewer answers show the mistake


@cache
def sampling_of(pattern: str) -> Sampling:
    text = byte_text({6: "<end>", 7: "<stop>"}, size=V, first=ord("a"))
    return Sampling(1.0, grammar=compile_grammar("regex", pattern, text, V, seconds=5.0))


def masked(target: LMTarget, words: Collection[str], path: tuple[int, ...]) -> np.ndarray:
    """Return the distribution [V] after an answer; after its end everything is token 6."""
    word = "".join(LETTERS[t] for t in path if t < len(LETTERS))
    if len(word) < len(path):
        return np.eye(V)[6]
    target.rewind(0)
    logits = np.array(target.verify(mx.array([*PROMPT, *path])))[-1].astype(np.float64)
    target.commit(0)
    letters = next_letters(words, word)
    legal = [letter in letters for letter in LETTERS] + [word in words] * 2
    weights = np.where(legal, np.exp(logits), 0)
    return weights / (weights.sum() or 1)  # nothing follows what cannot be


def exact(pattern: str) -> np.ndarray:
    """Return the distribution [V, V, V] of the tokens of an answer."""
    target, words, p = LMTarget(model()), language(pattern, LETTERS, COUNT + 1), np.ones(())
    for depth in range(COUNT):
        rows = [masked(target, words, path) for path in itertools.product(range(V), repeat=depth)]
        p = p[..., None] * np.array(rows).reshape((V,) * (depth + 1))
    return p


@pytest.fixture(scope="module")
def expected() -> np.ndarray:
    return exact(PATTERN)


def excess(
    expected: np.ndarray, drafter: Drafter, sampler: Callable[[int], Sampler], generations: int = GENERATIONS
) -> float:
    """Return chi-square of the tokens of many generations, over its one-in-a-million quantile."""
    counts = np.zeros((V,) * COUNT)
    for text in texts(drafter, sampler, generations, [6, 7], model()):
        counts[tuple(text)] += 1
    return chi_square.excess(counts, expected)


def matcher(sampling: Sampling) -> Matcher:
    assert sampling.grammar is not None
    return sampling.grammar.matcher(PROMPT)


def legal(drafter: Drafter) -> Drafter:
    return GrammarFilter(drafter, matcher(sampling_of(PATTERN)), len(PROMPT))


class CutDrawn:
    """The mistake: cuts drawn drafts by their validity."""

    def __init__(self, drafter: Drafter, sampling: Sampling) -> None:
        self._drafter, self._matcher, self.needs = drafter, matcher(sampling), drafter.needs
        self.observe = drafter.observe

    def draft(self, history: Sequence[int], limit: int, sampler: Sampler) -> Draft:
        draft = self._drafter.draft(history, limit, sampler)
        assert draft.probs is not None
        keep = self._matcher.legal(history[len(PROMPT) :], [int(t) for t in np.array(draft.tokens)])
        return Draft(draft.tokens[:keep], draft.probs[:keep])


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "drawn": lambda: legal(draft_model()),
    "not drawn": lambda: legal(Lookup(2, 8)),
    "none": lambda: Scripted([]),
}


@pytest.mark.parametrize(("drafter", "noise"), [*((name, unseeded) for name in DRAFTERS), ("drawn", seeded)])
def test_tokens_follow_the_masked_distribution(
    drafter: str, noise: Callable[[Sampling], Callable[[int], Sampler]], expected: np.ndarray
) -> None:
    assert excess(expected, DRAFTERS[drafter](), noise(sampling_of(PATTERN))) < 1


def test_drawn_drafts_cut_by_validity_are_caught() -> None:
    sampling = sampling_of(NARROW)
    assert excess(exact(NARROW), CutDrawn(draft_model(), sampling), unseeded(sampling), 300) > 1


def test_a_missing_grammar_is_caught(expected: np.ndarray) -> None:
    assert excess(expected, Scripted([]), unseeded(PLAIN), 50) > 1


def test_a_draft_ends_with_the_first_forbidden_token() -> None:
    a, b, e, f = (LETTERS.index(letter) for letter in "abef")
    for drafted, kept in (([a, b, b], 3), ([a, b, e, a], 3), ([f, f, a], 2), ([7, a, a], 1)):
        found = legal(Scripted([*PROMPT, *drafted])).draft(
            PROMPT, 4, sampling_of(PATTERN).sampler(len(PROMPT), V)
        )
        assert found.tokens.tolist() == drafted[:kept]
