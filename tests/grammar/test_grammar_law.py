"""Under a grammar, what is emitted follows the masked law of the target, whatever is drafted.

Drafts that were drawn must be judged although the grammar may forbid them: to cut them by their own validity
is enumerated here and caught, and so it is by counting what the engine emits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import chi_square
import mlx.core as mx
import numpy as np
import pytest
from enumeration import Accept, Array, Tree, trees
from grammars import byte_text
from lossless import emitted
from test_cut_law import CAUGHT, RULES, TOLERANCE, Cut, law_error
from test_law import PROMPT, Nothing, V, draft_model, model

from mlx_spec import verify
from mlx_spec.constraint import Matcher
from mlx_spec.drafters.model_free import GrammarFilter, Lookup
from mlx_spec.engine import generate
from mlx_spec.grammar import compile
from mlx_spec.policy import Fixed
from mlx_spec.sampling import Law, Sampling, Unseeded
from mlx_spec.target import LMTarget
from mlx_spec.types import Draft, Drafter, Features, FeatureSpec, Sampler

COUNT = 3  # tokens of a generation
GENERATIONS = 120
LETTERS = "abcdef"  # tokens 0 to 5; 6 and 7 end a text
TEXT = byte_text({6: "<end>", 7: "<stop>"}, size=V, first=ord("a"))
PATTERN = "[abe][abcd]{2}|d[ad]f|c{3,4}|fa*"


def sampling(temperature: float = 1.0, seed: int | None = None) -> Sampling:
    return Sampling(temperature, seed=seed, grammar=compile("regex", PATTERN, TEXT, V, seconds=5.0))


def beginnings(word: str) -> bool:
    """Whether a text of the language can begin with `word`, by hand."""
    return any(
        len(form) >= len(word) and all(letter in allowed for letter, allowed in zip(word, form, strict=False))
        for form in (["abe", "abcd", "abcd"], ["d", "ad", "f"], ["c"] * 4, ["f", *"aaaa"])
    )


def ends(word: str) -> bool:
    """Whether `word` is of the language, by hand."""
    if word[:1] == "f":
        return set(word[1:]) <= {"a"}
    return (len(word) == 3 and beginnings(word)) or word == "cccc"


def exact(target: LMTarget, temperature: float = 1.0) -> np.ndarray:
    """The law [V, V, V] of the tokens of an answer; behind an end token everything is token 6."""
    law = np.zeros((V,) * COUNT)
    for path in itertools.product(range(V), repeat=COUNT):
        mass = 1.0
        for depth, token in enumerate(path):
            mass *= _masked(target, path[:depth], temperature)[token]
            if mass == 0.0:
                break
        law[path] = mass
    return law


def _masked(target: LMTarget, path: tuple[int, ...], temperature: float) -> np.ndarray:
    if path not in _known:
        target.rewind(0)
        logits = np.array(target.verify(mx.array([*PROMPT, *path])))[-1].astype(np.float64) / temperature
        target.commit(0)
        word = "".join(LETTERS[t] for t in path if t < len(LETTERS))
        legal = [beginnings(word + letter) for letter in LETTERS] + [ends(word)] * 2
        if len(word) < len(path):  # behind an end
            legal = [False] * len(LETTERS) + [True, False]
            logits = np.zeros(V)
        weights = np.where(legal, np.exp(logits), 0)
        _known[path] = weights / weights.sum()
    return _known[path]


_known: dict[tuple[int, ...], np.ndarray] = {}


def excess(drafter: Drafter, sampler: Callable[[int], Sampler], generations: int = GENERATIONS) -> float:
    """Chi-square of the tokens of many generations, over its one-in-a-million quantile."""
    weights = model()
    target, counts = LMTarget(weights), np.zeros((V,) * COUNT)
    for i in range(generations):
        target.rewind(len(PROMPT) - 1)
        done = list(
            generate(target, [drafter], Fixed(2), sampler(i), PROMPT, max_tokens=COUNT, stop=TEXT.eos)
        )
        tokens = emitted(done)
        counts[tuple([*tokens, 6, 6][:COUNT])] += 1
    return chi_square.excess(counts, exact(LMTarget(weights)))


def unseeded(rule: verify.Rule = verify.block) -> Callable[[int], Sampler]:
    return lambda i: Unseeded(Law(SAMPLING, len(PROMPT), V), rule=rule, key=i)


SAMPLING = sampling()


def matcher() -> Matcher:
    assert SAMPLING.grammar is not None
    return SAMPLING.grammar.matcher(PROMPT)


def legal(drafter: Drafter) -> Drafter:
    return GrammarFilter(drafter, matcher(), len(PROMPT))


class CutDrawn:
    """The mistake: drawn drafts cut by their own validity."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter, self._matcher, self.needs = drafter, matcher(), drafter.needs
        self.observe = drafter.observe

    def draft(self, history: Sequence[int], limit: int, sampler: Sampler) -> Draft:
        draft = self._drafter.draft(history, limit, sampler)
        assert draft.probs is not None
        keep = self._matcher.legal(history[len(PROMPT) :], [int(t) for t in np.array(draft.tokens)])
        return Draft(draft.tokens[:keep], draft.probs[:keep])


@pytest.mark.parametrize("rule", [verify.block, verify.token])
def test_drawn_drafts_keep_the_masked_law(rule: verify.Rule) -> None:
    assert excess(legal(draft_model()), unseeded(rule)) < 1


def test_drafts_without_chance_keep_the_masked_law() -> None:
    assert excess(legal(Lookup(2, 8)), unseeded()) < 1


def test_no_drafts() -> None:
    assert excess(Nothing(), unseeded()) < 1


def test_seeded_drafts_keep_the_masked_law() -> None:
    assert excess(legal(draft_model()), lambda i: sampling(seed=i).sampler(len(PROMPT), V)) < 1


def test_drawn_drafts_cut_by_validity_are_caught() -> None:
    assert excess(CutDrawn(draft_model()), unseeded(), 3 * GENERATIONS) > 1


def test_a_grammar_left_out_is_caught() -> None:
    free = Sampling(1.0)
    assert excess(Nothing(), lambda i: Unseeded(Law(free, len(PROMPT), V), key=i), 50) > 1


# --- every draft, enumerated


def by_validity(p: Tree) -> Cut:
    """Cut before the first token that p does not allow."""

    def cut(laws: Array, path: Array) -> int:
        allowed = [p[j][tuple(path[:j])][token] > 0 for j, token in enumerate(path)]
        return allowed.index(False) if False in allowed else len(path)

    return cut


@pytest.mark.parametrize("accept", RULES)
def test_masked_rows_need_no_cut(accept: Accept) -> None:
    for kind in ("masked p", "both masked"):
        for size, K, seed in [(2, 3, 0), (3, 2, 1), (4, 2, 0)]:
            assert law_error(accept, lambda laws, path: len(path), *trees(kind, size, K, seed)) < TOLERANCE


@pytest.mark.parametrize("accept", RULES)
def test_a_cut_by_validity_changes_the_law(accept: Accept) -> None:
    found = []
    for seed in range(4):
        p, q = trees("masked p", 3, 2, seed)
        found.append(law_error(accept, by_validity(p), p, q))
    assert max(found) > CAUGHT


class Reciting:
    """Drafts the same tokens whatever was said."""

    needs = FeatureSpec()

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = list(tokens)

    def observe(self, history: Sequence[int], features: Features) -> None:
        pass

    def draft(self, history: Sequence[int], limit: int, sampler: Sampler) -> Draft:
        return Draft(mx.array(self.tokens[:limit], dtype=mx.int32))


def test_a_draft_ends_with_the_first_token_that_is_forbidden() -> None:
    a, b, e, x = (LETTERS.index(letter) for letter in "abef")
    for drafted, kept in (([a, b, b], 3), ([a, b, e, a], 3), ([x, x, a], 2), ([7, a, a], 1)):
        found = legal(Reciting(drafted)).draft(PROMPT, 4, SAMPLING.sampler(len(PROMPT), V))
        assert found.tokens.tolist() == drafted[:kept]
