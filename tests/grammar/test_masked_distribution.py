"""Under a grammar, emitted tokens follow the masked distribution of the target, whatever is drafted.

Drawn drafts must be judged even where the grammar forbids them. Cutting them by their validity is enumerated
here and caught, and so it is by counting what the engine emits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import chi_square
import mlx.core as mx
import numpy as np
import pytest
from enumeration import Accept, Levels, error, rows, trees
from enumeration import emitted as enumerated
from exact_distribution import PROMPT, V, draft_model, model, unseeded
from grammars import byte_text
from lossless import Scripted, emitted

from mlx_spec.drafters.model_free import GrammarFilter, Lookup
from mlx_spec.engine import generate
from mlx_spec.grammar import Matcher
from mlx_spec.grammar.matcher import compile_grammar
from mlx_spec.model.target import LMTarget
from mlx_spec.policy import FixedPolicy
from mlx_spec.sampling import Sampling, verify
from mlx_spec.types import Draft, Drafter, Sampler

COUNT = 3  # tokens of a generation
GENERATIONS = 120
LETTERS = "abcdef"  # tokens 0 to 5; 6 and 7 end a text
TEXT = byte_text({6: "<end>", 7: "<stop>"}, size=V, first=ord("a"))
PATTERN = "[abe][abcd]{2}|d[ad]f|c{3,4}|fa*"


def sampling(seed: int | None = None) -> Sampling:
    return Sampling(1.0, seed=seed, grammar=compile_grammar("regex", PATTERN, TEXT, V, seconds=5.0))


SAMPLING = sampling()


def may_begin(word: str) -> bool:
    """Return True if a text of the language can begin with `word`, by hand."""
    return any(
        len(form) >= len(word) and all(letter in allowed for letter, allowed in zip(word, form, strict=False))
        for form in (["abe", "abcd", "abcd"], ["d", "ad", "f"], ["c"] * 4, ["f", *"aaaa"])
    )


def may_end(word: str) -> bool:
    """Return True if `word` is of the language, by hand."""
    if word[:1] == "f":
        return set(word[1:]) <= {"a"}
    return (len(word) == 3 and may_begin(word)) or word == "cccc"


def masked(target: LMTarget, path: tuple[int, ...]) -> np.ndarray:
    """Return the distribution [V] after an answer; after its end everything is token 6."""
    word = "".join(LETTERS[t] for t in path if t < len(LETTERS))
    if len(word) < len(path):
        return np.eye(V)[6]
    target.rewind(0)
    logits = np.array(target.verify(mx.array([*PROMPT, *path])))[-1].astype(np.float64)
    target.commit(0)
    legal = [may_begin(word + letter) for letter in LETTERS] + [may_end(word)] * 2
    weights = np.where(legal, np.exp(logits), 0)
    return weights / weights.sum()


def exact(target: LMTarget) -> np.ndarray:
    """Return the distribution [V, V, V] of the tokens of an answer."""
    p = np.zeros((V,) * COUNT)
    known: dict[tuple[int, ...], np.ndarray] = {(): masked(target, ())}
    for depth in range(1, COUNT + 1):
        for path in itertools.product(range(V), repeat=depth):
            if path[:-1] not in known or not known[path[:-1]][path[-1]]:
                continue
            if depth < COUNT:
                known[path] = masked(target, path)
            else:
                p[path] = np.prod([known[path[:i]][token] for i, token in enumerate(path)])
    return p


@pytest.fixture(scope="module")
def expected() -> np.ndarray:
    return exact(LMTarget(model()))


def excess(
    expected: np.ndarray, drafter: Drafter, sampler: Callable[[int], Sampler], generations: int = GENERATIONS
) -> float:
    """Return chi-square of the tokens of many generations, over its one-in-a-million quantile."""
    target, counts = LMTarget(model()), np.zeros((V,) * COUNT)
    for i in range(generations):
        target.rewind(len(PROMPT) - 1)
        rounds = generate(
            target, [drafter], FixedPolicy(2), sampler(i), PROMPT, max_tokens=COUNT, stop=TEXT.eos
        )
        counts[tuple([*emitted(list(rounds)), 6, 6][:COUNT])] += 1
    return chi_square.excess(counts, expected)


def matcher() -> Matcher:
    assert SAMPLING.grammar is not None
    return SAMPLING.grammar.matcher(PROMPT)


def legal(drafter: Drafter) -> Drafter:
    return GrammarFilter(drafter, matcher(), len(PROMPT))


class CutDrawn:
    """The mistake: cuts drawn drafts by their validity."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter, self._matcher, self.needs = drafter, matcher(), drafter.needs
        self.observe = drafter.observe

    def draft(self, history: Sequence[int], limit: int, sampler: Sampler) -> Draft:
        draft = self._drafter.draft(history, limit, sampler)
        assert draft.probs is not None
        keep = self._matcher.legal(history[len(PROMPT) :], [int(t) for t in np.array(draft.tokens)])
        return Draft(draft.tokens[:keep], draft.probs[:keep])


@pytest.mark.parametrize("rule", [verify.block, verify.token])
def test_drawn_drafts(expected: np.ndarray, rule: verify.Rule) -> None:
    assert excess(expected, legal(draft_model()), unseeded(SAMPLING, rule)) < 1


@pytest.mark.parametrize("drafter", [legal(Lookup(2, 8)), Scripted([])])
def test_drafts_that_are_not_drawn_and_no_drafts(expected: np.ndarray, drafter: Drafter) -> None:
    assert excess(expected, drafter, unseeded(SAMPLING)) < 1


def test_seeded_drafts(expected: np.ndarray) -> None:
    assert excess(expected, legal(draft_model()), lambda i: sampling(seed=i).sampler(len(PROMPT), V)) < 1


def test_drawn_drafts_cut_by_validity_are_caught(expected: np.ndarray) -> None:
    assert excess(expected, CutDrawn(draft_model()), unseeded(SAMPLING), 3 * GENERATIONS) > 1


def test_a_missing_grammar_is_caught(expected: np.ndarray) -> None:
    assert excess(expected, Scripted([]), unseeded(Sampling(1.0)), 50) > 1


# --- every draft, enumerated


RULES = [verify.accept_token, verify.accept_block]
TOLERANCE = 1e-6
CAUGHT = 1e-2  # a wrong cut errs by more than this


def error_of_cut(accept: Accept, p: Levels, q: Levels, by_validity: bool) -> float:
    """Return the error of the distribution if drafts from q are cut before the first token without p."""
    size, K = p[0].shape[0], len(q)
    paths = np.array(list(itertools.product(range(size), repeat=K)))
    probability = np.take_along_axis(rows(q, paths), paths[:, :, None], -1)[:, :, 0].prod(1)
    allowed = np.take_along_axis(rows(p[:K], paths), paths[:, :, None], -1)[:, :, 0] > 0
    lengths = allowed.cumprod(1).sum(1) if by_validity else np.full(len(paths), K)
    out = [np.zeros((size,) * (j + 1)) for j in range(K + 1)]
    out[0] += probability[lengths == 0].sum() * p[0]
    for m in range(1, K + 1):
        weights = np.zeros((size,) * m)
        np.add.at(weights, tuple(paths[lengths == m, :m].T), probability[lengths == m])
        drawn = [*(np.ones((size,) * (j + 1)) for j in range(m - 1)), weights]
        for j, level in enumerate(enumerated(accept, p[: m + 1], q[:m], drawn)[0] if weights.any() else []):
            out[j] += level
    return error(out, p)


@pytest.mark.parametrize("accept", RULES)
@pytest.mark.parametrize("kind", ["masked p", "both masked"])
def test_masked_rows_need_no_cut(accept: Accept, kind: str) -> None:
    for size, K, seed in [(2, 3, 0), (3, 2, 1), (4, 2, 0)]:
        assert error_of_cut(accept, *trees(kind, size, K, seed), by_validity=False) < TOLERANCE


@pytest.mark.parametrize("accept", RULES)
def test_a_cut_by_validity_changes_the_distribution(accept: Accept) -> None:
    errors = [error_of_cut(accept, *trees("masked p", 3, 2, seed), by_validity=True) for seed in range(4)]
    assert max(errors) > CAUGHT


def test_a_draft_ends_with_the_first_forbidden_token() -> None:
    a, b, e, f = (LETTERS.index(letter) for letter in "abef")
    for drafted, kept in (([a, b, b], 3), ([a, b, e, a], 3), ([f, f, a], 2), ([7, a, a], 1)):
        found = legal(Scripted([*PROMPT, *drafted])).draft(PROMPT, 4, SAMPLING.sampler(len(PROMPT), V))
        assert found.tokens.tolist() == drafted[:kept]
