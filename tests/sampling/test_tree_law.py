"""Trees emit exactly the target's law, sampled ones and others; wrong variants are caught.

The rules are enumerated: every draft, every outcome of chance, as in `test_verify.py`. What the engine emits
is counted and held against the exact law of a tiny model, as in `test_law.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial

import mlx.core as mx
import numpy as np
import pytest
from enumeration import BELOW_ONE, Accept, Array, emitted, error, evaluate, normalised, thresholds, trees
from enumeration import Tree as Laws
from test_law import FILTERED, PLAIN, V, excess, seeded, unseeded

from mlx_spec.model.tree import Tree, tree_of
from mlx_spec.sampling import Sampling, verify, verify_tree
from mlx_spec.types import Draft, Features, FeatureSpec, Sampler

TOLERANCE = 1e-6
CAUGHT = 1e-2  # a wrong rule errs by more than this
SHAPES = [(0,), (0, 0), (0, 1), (0, 0, 0), (0, 1, 0), (0, 1, 1, 0), (0, 0, 2, 2), (0, 1, 0, 3)]
KINDS = ["dense", "masked p", "masked q", "both masked", "equal", "nearly equal", "peaked"]
Drawn = Callable[[Array, list[int]], Array]  # law of a guess from the drafter's [V] and the guesses before it


def without_replacement(law: Array, elders: list[int]) -> Array:
    """The law without the elders; where nothing is left of it, any token that was not taken."""
    left = law.copy()
    left[elders] = 0
    free = np.ones_like(law)
    free[elders] = 0
    return normalised(left if left.sum() > 1e-6 else free)


def with_replacement(law: Array, elders: list[int]) -> Array:
    return law


class Drafts:
    """Every draft of a tree: tokens [N, K], its chance, and the laws along it: p [N, T, V], q [N, K, V]."""

    def __init__(self, tree: Tree, p: Laws, q: Laws, drawn: Drawn, judged: Drawn) -> None:
        size, kept = p[0].shape[0], []
        for tokens in itertools.product(range(size), repeat=len(tree.parents)):
            prefixes, chance, laws = [()], 1.0, []
            for j, row in enumerate(tree.parents):
                elders = [tokens[i] for i in range(j) if tree.parents[i] == row]
                law = q[len(prefixes[row])][prefixes[row]].astype(np.float64)
                chance *= drawn(law, elders)[tokens[j]]
                laws.append(judged(law, elders))
                prefixes.append((*prefixes[row], tokens[j]))
            if chance > 0:
                kept.append((tokens, chance, [p[len(prefix)][prefix] for prefix in prefixes], laws))
        self.tree = tree
        self.tokens, self.chance, self.p, self.q = (np.array(column) for column in zip(*kept, strict=True))

    def emitted(self, accept: Callable[..., tuple[mx.array, mx.array]]) -> tuple[Laws, float]:
        """Mass of every emitted sequence, by number of accepted tokens, and the mean of that number."""
        size, K = self.p.shape[-1], len(self.tree.parents)
        rule: Accept = partial(accept, tree=self.tree)
        laws = self.p, self.tokens, self.q
        limit = thresholds(rule, *laws)
        out, mean = [np.zeros((size,) * (j + 1)) for j in range(self.tree.height + 1)], 0.0
        for below in itertools.product([True, False], repeat=K):
            inside = np.where(below, limit / 2, np.minimum((1 + limit) / 2, BELOW_ONE))
            weight = self.chance * np.where(below, limit, 1 - limit).prod(1)
            last, left = evaluate(rule, *laws, inside)
            assert np.isfinite(left).all() and (left >= 0).all()
            for row, path in enumerate(self.tree.paths):
                hit = (last == row) & (weight > 0)
                prefix = (
                    self.tokens[hit][:, [r - 1 for r in path[1:]]] @ size ** np.arange(len(path) - 1)[::-1]
                )
                at = out[len(path) - 1].reshape(-1, size)
                np.add.at(at, prefix, weight[hit, None] * normalised(left[hit]))
                mean += float(weight[hit].sum()) * (len(path) - 1)
        return out, mean


def drafts(
    kind: str, shape: tuple[int, ...], size: int, drawn: Drawn, judged: Drawn, seed: int = 0
) -> tuple[Drafts, Laws]:
    tree = tree_of(shape)
    p, q = trees(kind, size, tree.height, seed)
    return Drafts(tree, p, q, drawn, judged), p


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_law_is_exact(kind: str, shape: tuple[int, ...]) -> None:
    every, p = drafts(kind, shape, 3, without_replacement, without_replacement)
    assert error(every.emitted(verify_tree.accept_recursive)[0], p) < TOLERANCE


@pytest.mark.parametrize("shape", SHAPES)
def test_law_of_guesses_drawn_with_replacement_is_exact(shape: tuple[int, ...]) -> None:
    every, p = drafts("both masked", shape, 3, with_replacement, with_replacement)
    assert error(every.emitted(verify_tree.accept_recursive)[0], p) < TOLERANCE


def test_law_of_more_tokens_and_guesses() -> None:
    every, p = drafts("both masked", (0, 0, 0, 2), 5, without_replacement, without_replacement)
    assert error(every.emitted(verify_tree.accept_recursive)[0], p) < TOLERANCE


def test_a_chain_is_the_chain_s_rule_and_guesses_add_to_it() -> None:
    p, q = trees("dense", 3, 2, 1)
    chain, more = (
        Drafts(tree_of(shape), p, q, without_replacement, without_replacement).emitted(
            verify_tree.accept_recursive
        )[1]
        for shape in ((0, 1), (0, 1, 1, 0))
    )
    assert chain == pytest.approx(emitted(verify.accept_token, p, q, q)[1], abs=TOLERANCE)
    assert more > chain + 0.1


@pytest.mark.parametrize(
    ("drawn", "judged"),
    [(without_replacement, with_replacement), (with_replacement, without_replacement)],
)
@pytest.mark.parametrize("shape", [(0, 0), (0, 1, 1, 0)])
def test_guesses_judged_by_another_law_are_caught(shape, drawn, judged) -> None:
    """Drawn without replacement and judged as if with it, which leaves siblings unnormalised; the reverse."""
    every, p = drafts("dense", shape, 3, drawn, judged)
    assert error(every.emitted(verify_tree.accept_recursive)[0], p) > CAUGHT


def left_unnormalised(p, tokens, q, uniform, tree):
    left, hits = list(p), []
    for j, row in enumerate(tree.parents):
        token = tokens[j : j + 1]
        hits.append(uniform[j : j + 1] * q[j][token] < left[row][token])
        left[row] = mx.maximum(left[row] - q[j], 0)
    last = verify_tree.last_reached(mx.concatenate(hits), tree)
    return last, mx.where(mx.stack(left)[last].max() > 0, mx.stack(left)[last], p[last])


def judged_by_p(p, tokens, q, uniform, tree):
    """Each guess as if it were the first."""
    hits = uniform * mx.take_along_axis(q, tokens[:, None], -1)[:, 0] < p[mx.array(tree.parents), tokens]
    last = verify_tree.last_reached(hits, tree)
    return last, verify_tree.accept_recursive(p, tokens, q, mx.zeros_like(uniform) + 1, tree)[1] * 0 + p[last]


@pytest.mark.parametrize("wrong", [left_unnormalised, judged_by_p])
def test_wrong_residuals_are_caught(wrong) -> None:
    every, p = drafts("dense", (0, 0, 0), 3, without_replacement, without_replacement)
    assert error(every.emitted(wrong)[0], p) > CAUGHT


# --- the walk


def walked(shape: tuple[int, ...], size: int, rule: Callable[..., mx.array], twins: bool = True) -> float:
    """The largest error of a walk over all drafts of a shape, against every choice that p can make."""
    tree = tree_of(shape)
    p = trees("masked p", size, tree.height, 0)[0]
    choices = np.array(list(itertools.product(range(size), repeat=len(shape) + 1)))
    worst = 0.0
    for tokens in itertools.product(range(size), repeat=len(shape)):
        prefixes = [tuple(tokens[row - 1] for row in path[1:]) for path in tree.paths]
        if not twins and len(set(prefixes)) < len(prefixes):
            continue
        laws = np.array([p[len(prefix)][prefix] for prefix in prefixes])
        chance = np.take_along_axis(laws, choices.T, -1).prod(0)
        draft = mx.array(tokens, dtype=mx.int32)
        verdicts = np.array(
            mx.vmap(lambda chosen, t=draft: rule(chosen, t, tree))(mx.array(choices.astype(np.int32)))
        )
        out = [np.zeros((size,) * (j + 1)) for j in range(tree.height + 1)]
        for row, prefix in enumerate(prefixes):
            hit = verdicts[:, 0] == row
            np.add.at(out[len(prefix)][prefix], verdicts[hit, 1], chance[hit])
        worst = max(worst, error(out, p))
    return worst


@pytest.mark.parametrize("shape", [(0, 0), (0, 1, 0), (0, 1, 1, 0), (0, 0, 2, 1)])
def test_walk_of_a_tree_without_chance_is_exact(shape: tuple[int, ...]) -> None:
    """Also where two guesses are the same."""
    assert walked(shape, 3, verify_tree.walk) < TOLERANCE


def luckiest(chosen: mx.array, tokens: mx.array, tree: Tree) -> mx.array:
    """Of two equal guesses the one whose children fit."""
    hits = tokens == chosen[mx.array(tree.parents)]
    reached = (mx.array(tree.ancestors()).astype(mx.int32)[:, 1:] * (1 - hits)).sum(axis=-1) == 0
    last = mx.where(reached, mx.array(tree.depths), -1).argmax()
    return mx.stack([last.astype(mx.int32), chosen[last]])


def test_luck_between_equal_guesses_is_caught() -> None:
    assert walked((0, 0, 1, 2), 3, luckiest, twins=False) < TOLERANCE
    assert walked((0, 0, 1, 2), 3, luckiest) > CAUGHT


def test_walk_emits_what_the_target_chooses() -> None:
    """Coupled noise makes the choice a function of the path; no tree changes the text."""
    tree, rng, rows = Tree((0, 1, 1, 0, 4)), np.random.default_rng(0), set()
    choice = [rng.integers(3, size=(3,) * j) for j in range(3)]
    plain: list[int] = []
    for level in choice:
        plain.append(int(level[tuple(plain)]))
    for tokens in itertools.product(range(3), repeat=5):
        prefixes = [tuple(tokens[row - 1] for row in path[1:]) for path in tree.paths]
        chosen = mx.array([int(choice[len(prefix)][prefix]) for prefix in prefixes])
        last, following = np.array(verify_tree.walk(chosen, mx.array(tokens), tree)).tolist()
        assert [*prefixes[last], following] == plain[: len(prefixes[last]) + 1]
        rows.add(last)
    assert rows == set(range(6))


# --- the engine


class Static:
    """Always the same guesses: two for the first place, and two and one behind them where there is room."""

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
    """Guesses drawn without replacement from a law of their own; where it `lies`, said to be of another."""

    def __init__(self, lies: bool = False) -> None:
        self.rng, self.lies = np.random.default_rng(5), lies
        self.laws = normalised(np.exp(2 * np.random.default_rng(12).normal(size=(2, V))))

    def guesses(self, tokens: tuple[int, ...], shape: tuple[int, ...]) -> Draft:
        tree, drawn, said = tree_of(shape), list[int](), []
        for j, row in enumerate(shape):
            elders = [drawn[i] for i in range(j) if shape[i] == row]
            law = without_replacement(self.laws[tree.depths[row]], elders)
            drawn.append(int(self.rng.choice(V, p=law)))
            said.append(self.laws[tree.depths[row]] if self.lies else law)
        probs = mx.array(np.array(said).astype(np.float32))
        return Draft(mx.array(drawn, dtype=mx.int32), probs, parents=shape)


@pytest.mark.parametrize("sampling", [PLAIN, FILTERED])
def test_trees_without_chance(sampling: Sampling) -> None:
    assert excess(Static(), sampling, unseeded(sampling), 300) < 1


@pytest.mark.parametrize("sampling", [PLAIN, FILTERED])
def test_sampled_trees(sampling: Sampling) -> None:
    assert excess(Sampled(), sampling, unseeded(sampling), 300) < 1


def test_seeded_trees() -> None:
    assert excess(Sampled(), FILTERED, seeded(FILTERED), 200) < 1


def test_trees_that_lie_about_their_law_are_caught() -> None:
    assert excess(Sampled(lies=True), PLAIN, unseeded(PLAIN), 700) > 1


class Posing(Static):
    """The same guesses each time, said to be drawn."""

    def guesses(self, tokens: tuple[int, ...], shape: tuple[int, ...]) -> Draft:
        return Draft(mx.array(tokens, dtype=mx.int32), mx.full((len(shape), V), 1 / V), parents=shape)


def test_fixed_guesses_that_pose_as_sampled_are_caught() -> None:
    assert excess(Posing(), PLAIN, unseeded(PLAIN), 300) > 1
