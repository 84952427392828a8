"""Trees emit exactly the target's distribution, drawn ones and others; wrong variants are caught.

The rules are enumerated, as in `test_verify.py`. What the engine emits is compared with the exact
distribution of a tiny model, as in `test_distribution.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial

import mlx.core as mx
import numpy as np
import pytest
from support.enumeration import Array, Drafts, Guess, Levels, error, normalised, trees
from support.exact_distribution import FEW, FILTERED, PLAIN, V, model, seeded
from support.exact_distribution import excess as excess_in

from mlx_spec.model.tree import Tree, tree_of
from mlx_spec.sampling import Sampling, verify
from mlx_spec.types import Draft, Features, FeatureSpec, Sampler

TOLERANCE = 1e-6
CAUGHT = 1e-2  # a wrong rule errs by more than this
SHAPES = [(0,), (0, 0), (0, 1), (0, 0, 0), (0, 1, 0), (0, 1, 1, 0), (0, 0, 2, 2), (0, 1, 0, 3)]
KINDS = ["dense", "masked p", "masked q", "both masked", "equal", "nearly equal", "peaked"]
Drawn = Callable[[Array, list[int]], Array]  # (the drafter's [V], earlier guesses) -> [V]


def without_replacement(q: Array, earlier: list[int]) -> Array:
    """Return the distribution without the earlier guesses; if nothing is left, any other token."""
    left = q.copy()
    left[earlier] = 0
    free = np.ones_like(q)
    free[earlier] = 0
    return normalised(left if left.sum() > 1e-6 else free)


def with_replacement(q: Array, earlier: list[int]) -> Array:
    return q


def drafts(
    kind: str, shape: tuple[int, ...], size: int, drawn: Drawn, judged: Drawn, seed: int = 0
) -> tuple[Drafts, Levels]:
    tree = tree_of(shape)
    p, q = trees(kind, size, tree.height, seed)

    def guess(rule: Drawn) -> Guess:
        return lambda prefix, earlier: rule(q[len(prefix)][prefix].astype(np.float64), earlier)

    return Drafts(tree, p, guess(drawn), guess(judged)), p


def emitted_from(every: Drafts, accept: Callable = verify.accept_recursive) -> tuple[Levels, float]:
    return every.emitted(partial(accept, tree=every.tree))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_distribution_is_exact(kind: str, shape: tuple[int, ...]) -> None:
    every, p = drafts(kind, shape, 3, without_replacement, without_replacement)
    assert error(emitted_from(every)[0], p) < TOLERANCE


@pytest.mark.parametrize("shape", SHAPES)
def test_guesses_drawn_with_replacement_are_exact(shape: tuple[int, ...]) -> None:
    every, p = drafts("both masked", shape, 3, with_replacement, with_replacement)
    assert error(emitted_from(every)[0], p) < TOLERANCE


def test_more_tokens_and_guesses_are_exact() -> None:
    every, p = drafts("both masked", (0, 0, 0, 2), 5, without_replacement, without_replacement)
    assert error(emitted_from(every)[0], p) < TOLERANCE


def test_more_guesses_add_to_what_a_chain_accepts() -> None:
    chain, more = (
        emitted_from(drafts("dense", shape, 3, without_replacement, without_replacement, 1)[0])[1]
        for shape in ((0, 1), (0, 1, 1, 0))
    )
    assert more > chain + 0.1


@pytest.mark.parametrize(
    ("drawn", "judged"), [(without_replacement, with_replacement), (with_replacement, without_replacement)]
)
@pytest.mark.parametrize("shape", [(0, 0), (0, 1, 1, 0)])
def test_guesses_judged_by_another_distribution_are_caught(shape, drawn, judged) -> None:
    """Drawn without replacement and judged as if with it, which leaves siblings unnormalised; the reverse."""
    every, p = drafts("dense", shape, 3, drawn, judged)
    assert error(emitted_from(every)[0], p) > CAUGHT


def left_unnormalised(p, tokens, q, uniform, tree):
    left, hits = list(p), []
    for j, row in enumerate(tree.parents):
        token = tokens[j : j + 1]
        hits.append(uniform[j : j + 1] * q[j][token] < left[row][token])
        left[row] = mx.maximum(left[row] - q[j], 0)
    last = verify.last_reached(mx.concatenate(hits), tree)
    return last, mx.where(mx.stack(left)[last].max() > 0, mx.stack(left)[last], p[last])


def judged_by_p(p, tokens, q, uniform, tree):
    """The mistake: judge each guess as if it were the first."""
    hits = uniform * mx.take_along_axis(q, tokens[:, None], -1)[:, 0] < p[mx.array(tree.parents), tokens]
    last = verify.last_reached(hits, tree)
    return last, verify.accept_recursive(p, tokens, q, mx.zeros_like(uniform) + 1, tree)[1] * 0 + p[last]


@pytest.mark.parametrize("wrong", [left_unnormalised, judged_by_p])
def test_wrong_residuals_are_caught(wrong) -> None:
    every, p = drafts("dense", (0, 0, 0), 3, without_replacement, without_replacement)
    assert error(emitted_from(every, wrong)[0], p) > CAUGHT


# --- the walk


def walked(shape: tuple[int, ...], size: int, rule: Callable[..., mx.array], twins: bool = True) -> float:
    """Return the largest error of a walk over all drafts of a shape and all choices of the target."""
    tree = tree_of(shape)
    p = trees("masked p", size, tree.height, 0)[0]
    choices = np.array(list(itertools.product(range(size), repeat=len(shape) + 1)))
    worst = 0.0
    for tokens in itertools.product(range(size), repeat=len(shape)):
        prefixes = [tuple(tokens[row - 1] for row in path[1:]) for path in tree.paths]
        if not twins and len(set(prefixes)) < len(prefixes):
            continue
        rows = np.array([p[len(prefix)][prefix] for prefix in prefixes])
        probability = np.take_along_axis(rows, choices.T, -1).prod(0)
        draft = mx.array(tokens, dtype=mx.int32)
        verdicts = np.array(
            mx.vmap(lambda chosen, t=draft: rule(chosen, t, tree))(mx.array(choices.astype(np.int32)))
        )
        out = [np.zeros((size,) * (j + 1)) for j in range(tree.height + 1)]
        for row, prefix in enumerate(prefixes):
            hit = verdicts[:, 0] == row
            np.add.at(out[len(prefix)][prefix], verdicts[hit, 1], probability[hit])
        worst = max(worst, error(out, p))
    return worst


def matched(chosen: mx.array, tokens: mx.array, tree: Tree) -> mx.array:
    return verify.match(chosen, tokens)


@pytest.mark.parametrize("shape", [(0, 0), (0, 1, 0), (0, 1, 1, 0), (0, 0, 2, 1)])
def test_walk_of_a_tree_that_was_not_drawn_is_exact(shape: tuple[int, ...]) -> None:
    """Also where two guesses are the same."""
    assert walked(shape, 3, verify.walk) < TOLERANCE


@pytest.mark.parametrize(("shape", "size"), [((0,), 2), ((0, 1, 2, 3), 2), ((0, 1, 2), 3), ((0, 1), 4)])
def test_match_of_a_chain_that_was_not_drawn_is_exact(shape: tuple[int, ...], size: int) -> None:
    assert walked(shape, size, matched) < TOLERANCE


def luckiest(chosen: mx.array, tokens: mx.array, tree: Tree) -> mx.array:
    """The mistake: of two equal guesses, take the one whose children fit."""
    hits = tokens == chosen[mx.array(tree.parents)]
    reached = (mx.array(tree.ancestors()).astype(mx.int32)[:, 1:] * (1 - hits)).sum(axis=-1) == 0
    last = mx.where(reached, mx.array(tree.depths), -1).argmax()
    return mx.stack([last.astype(mx.int32), chosen[last]])


def test_luck_between_equal_guesses_is_caught() -> None:
    assert walked((0, 0, 1, 2), 3, luckiest, twins=False) < TOLERANCE
    assert walked((0, 0, 1, 2), 3, luckiest) > CAUGHT


@pytest.mark.parametrize(("shape", "rule"), [((0, 1, 1, 0, 4), verify.walk), ((0, 1, 2, 3), matched)])
def test_what_the_target_chooses_is_emitted(shape: tuple[int, ...], rule: Callable[..., mx.array]) -> None:
    """Coupled noise makes the choice a function of the path; no draft changes the text."""
    tree, rng, rows = tree_of(shape), np.random.default_rng(0), set()
    choice = [rng.integers(3, size=(3,) * j) for j in range(tree.height + 1)]
    plain: list[int] = []
    for level in choice:
        plain.append(int(level[tuple(plain)]))
    for tokens in itertools.product(range(3), repeat=len(shape)):
        prefixes = [tuple(tokens[row - 1] for row in path[1:]) for path in tree.paths]
        chosen = mx.array([int(choice[len(prefix)][prefix]) for prefix in prefixes])
        last, following = np.array(rule(chosen, mx.array(tokens), tree)).tolist()
        assert [*prefixes[last], following] == plain[: len(prefixes[last]) + 1]
        rows.add(last)
    assert rows == set(range(len(shape) + 1))


# --- the engine


class Static:
    """Drafts the same tree each time: two guesses for the first place, two and one after them."""

    needs, tokens = FeatureSpec(), (3, 1, 5, 6, 2)

    def observe(self, history: Sequence[int], features: Features) -> None:
        pass

    def draft(self, history: Sequence[int], limit: int, sampler: Sampler) -> Draft:
        if limit == 1:
            return self.guesses((self.tokens[0], self.tokens[3]), (0, 0))
        return self.guesses(self.tokens, (0, 1, 1, 0, 4))

    def guesses(self, tokens: tuple[int, ...], shape: tuple[int, ...]) -> Draft:
        return Draft(mx.array(tokens, dtype=mx.int32), parents=shape)


class Sampled(Static):
    """Draws guesses without replacement; if it `lies`, it says that they were drawn with replacement."""

    def __init__(self, lies: bool = False) -> None:
        self.rng, self.lies = np.random.default_rng(5), lies
        self.rows = normalised(np.exp(3 * np.random.default_rng(12).normal(size=(2, V))))

    def guesses(self, tokens: tuple[int, ...], shape: tuple[int, ...]) -> Draft:
        tree, drawn, said = tree_of(shape), list[int](), []
        for j, row in enumerate(shape):
            earlier = [drawn[i] for i in range(j) if shape[i] == row]
            q = without_replacement(self.rows[tree.depths[row]], earlier)
            drawn.append(int(self.rng.choice(V, p=q)))
            said.append(self.rows[tree.depths[row]] if self.lies else q)
        probs = mx.array(np.array(said).astype(np.float32))
        return Draft(mx.array(drawn, dtype=mx.int32), probs, parents=shape)


class Posing(Static):
    """Drafts the same tree each time and says that it was drawn."""

    def guesses(self, tokens: tuple[int, ...], shape: tuple[int, ...]) -> Draft:
        return Draft(mx.array(tokens, dtype=mx.int32), mx.full((len(shape), V), 1 / V), parents=shape)


def excess(drafter: Static, sampling: Sampling, sampler: Callable[[int], Sampler] | None = None) -> float:
    return excess_in(drafter, sampling, sampler, FEW, model())


CASES: dict[str, Callable[[], float]] = {
    "not drawn": lambda: excess(Static(), PLAIN),
    "not drawn, filters and penalties": lambda: excess(Static(), FILTERED),
    "drawn": lambda: excess(Sampled(), PLAIN),
    "drawn, filters and penalties": lambda: excess(Sampled(), FILTERED),
    "drawn with the target's noise": lambda: excess(Sampled(), FILTERED, seeded(FILTERED)),
}


@pytest.mark.parametrize("trees", CASES)
def test_what_is_emitted_follows_the_distribution(trees: str) -> None:
    assert CASES[trees]() < 1


def test_trees_that_lie_about_their_distribution_are_caught() -> None:
    assert excess(Sampled(lies=True), PLAIN) > 1
    assert excess(Posing(), PLAIN) > 1
