"""Acceptance rules emit exactly the target's distribution, whatever is drafted; wrong ones are caught.

Every draft and every outcome is enumerated: nothing is sampled.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.enumeration import (
    BELOW_ONE,
    KINDS,
    Accept,
    Array,
    Drafts,
    Guess,
    Levels,
    emitted,
    error,
    evaluate,
    normalised,
    trees,
    without_replacement,
)

from mlx_spec.model.tree import Tree, tree_of
from mlx_spec.sampling import verify

SIZES = [(2, 1), (2, 4), (3, 3), (4, 2), (4, 4)]  # V, K
SHAPES = [(0,), (0, 0), (0, 1), (0, 0, 0), (0, 1, 0), (0, 1, 1, 0), (0, 0, 2, 2), (0, 1, 0, 3)]
TREES = [*((3, shape) for shape in SHAPES), (5, (0, 0, 0, 2))]  # V, shape
TOLERANCE = 1e-6  # measured: below 1e-7
CAUGHT = 1e-2  # a wrong rule errs by more than this; measured: 0.03 or more
Drawn = Callable[[Array, list[int]], Array]  # (the drafter's [V], earlier guesses for the place) -> [V]


def with_replacement(q: Array, earlier: list[int]) -> Array:
    return q


def drafts(
    kind: str, size: int, shape: tuple[int, ...], drawn: Drawn, judged: Drawn, seed: int = 0
) -> tuple[Drafts, Levels]:
    tree = tree_of(shape)
    p, q = trees(kind, size, tree.height, seed)

    def guess(rule: Drawn) -> Guess:
        return lambda prefix, earlier: rule(q[len(prefix)][prefix].astype(np.float64), earlier)

    return Drafts(tree, p, guess(drawn), guess(judged)), p


def by_tree(every: Drafts, accept: Callable = verify.accept_recursive) -> tuple[Levels, float]:
    return every.emitted(partial(accept, tree=every.tree))


def means(p: Levels, q: Levels) -> tuple[float, float]:
    """Return how many tokens are accepted if each is judged by itself, and if all are judged together."""
    by_token = partial(verify.accept_recursive, tree=tree_of(tuple(range(len(q)))))
    found = [emitted(rule, p, q, q) for rule in (by_token, verify.accept_block)]
    assert max(error(out, p) for out, _ in found) < TOLERANCE
    return found[0][1], found[1][1]


# --- what is drawn


@settings(max_examples=20)
@given(kind=st.sampled_from(KINDS), size=st.sampled_from(SIZES), seed=st.integers(0, 99))
def test_a_chain_emits_the_distribution(kind: str, size: tuple[int, int], seed: int) -> None:
    """And a block accepts no fewer tokens than a rule for each, and no more than any rule could."""
    p, q = trees(kind, *size, seed)
    by_token, by_block = means(p, q)
    bound, joint_p, joint_q = 0.0, np.ones(()), np.ones(())
    for level_p, level_q in zip(p, q, strict=False):  # min(p, q) of whole prefixes: full information
        joint_p, joint_q = joint_p[..., None] * level_p, joint_q[..., None] * level_q
        bound += float(np.minimum(joint_p, joint_q).sum())
    assert by_token <= by_block + TOLERANCE
    assert by_block <= bound + TOLERANCE


@settings(max_examples=20)
@given(
    kind=st.sampled_from(KINDS),
    tree=st.sampled_from(TREES),
    rule=st.sampled_from([without_replacement, with_replacement]),
    seed=st.integers(0, 99),
)
def test_a_tree_emits_the_distribution(
    kind: str, tree: tuple[int, tuple[int, ...]], rule: Drawn, seed: int
) -> None:
    every, p = drafts(kind, *tree, rule, rule, seed)
    assert error(by_tree(every)[0], p) < TOLERANCE


@pytest.mark.parametrize("broken", [0, 1, 2])
def test_a_drafter_that_overflows_changes_nothing(broken: int) -> None:
    """Where a later row of q was not a number, every draft failed, and yet p less q was drawn."""
    p, q = trees("dense", 3, 3, 0)
    judged, drawn = [level.copy() for level in q], [level.copy() for level in q]
    some = (0,) * broken + (slice(None),)
    judged[broken][some], drawn[broken][some] = np.nan, np.eye(3)[1]
    out, _ = emitted(verify.accept_block, p, judged, drawn)
    assert error(out, p) < TOLERANCE


def test_example_of_the_block_paper() -> None:
    """Section 2 of arXiv:2403.10444: p = (1/3, 2/3), q = (2/3, 1/3), two drafts: 10/9 and 11/9 accepted."""
    p = [np.broadcast_to(np.array([1 / 3, 2 / 3]), (2,) * (j + 1)) for j in range(3)]
    q = [np.broadcast_to(np.array([2 / 3, 1 / 3]), (2,) * (j + 1)) for j in range(2)]
    assert means(p, q) == pytest.approx((10 / 9, 11 / 9), abs=TOLERANCE)


def test_more_guesses_add_to_what_a_chain_accepts() -> None:
    chain, more = (
        by_tree(drafts("dense", 3, shape, without_replacement, without_replacement, 1)[0])[1]
        for shape in ((0, 1), (0, 1, 1, 0))
    )
    assert more > chain + 0.1


# --- what is wrong


def one_hot(tree: Levels) -> Levels:
    return [np.eye(level.shape[-1])[level.argmax(-1)] for level in tree]


def sharpened(tree: Levels) -> Levels:
    return [normalised(level**2) for level in tree]


def top_scaled(tree: Levels) -> Levels:
    """The likeliest token at half its weight, as Saguaro draws (arXiv:2603.03251)."""
    return [normalised(level * (1 - 0.5 * one_hot([level])[0])) for level in tree]


def from_target(p, tokens, q, uniform):
    n, _ = verify.accept_block(p, tokens, q, uniform)
    return n, p[n]


def first_failure(p, tokens, q, uniform):
    # The rule itself, asked about each prefix alone: those before the first that fails.
    K = tokens.shape[0]
    alone = [mx.where(mx.arange(K) == i, uniform, float(BELOW_ONE)) for i in range(K)]
    passes = mx.stack([verify.accept_block(p, tokens, q, u)[0] > i for i, u in enumerate(alone)])
    n = mx.cumprod(passes.astype(mx.int32)).sum()
    forced = mx.where(mx.arange(1, K + 1) == n, 0.0, float(BELOW_ONE))
    return n, verify.accept_block(p, tokens, q, forced)[1]


def left_unnormalised(p, tokens, q, uniform, tree):
    left, hits = list(p), []
    for j, row in enumerate(tree.parents):
        token = tokens[j : j + 1]
        hits.append(uniform[j : j + 1] * q[j][token] < left[row][token])
        left[row] = mx.maximum(left[row] - q[j], 0)
    last = verify.last_reached(mx.concatenate(hits), tree)
    return last, mx.where(mx.stack(left)[last].max() > 0, mx.stack(left)[last], p[last])


def judged_by_p(p, tokens, q, uniform, tree):
    """Judge each guess as if it were the first."""
    hits = uniform * mx.take_along_axis(q, tokens[:, None], -1)[:, 0] < p[mx.array(tree.parents), tokens]
    last = verify.last_reached(hits, tree)
    return last, verify.accept_recursive(p, tokens, q, mx.zeros_like(uniform) + 1, tree)[1] * 0 + p[last]


def chain_error(accept: Accept = verify.accept_block, drawn: Callable[[Levels], Levels] = list) -> float:
    p, q = trees("dense", 3, 3, 0)
    return error(emitted(accept, p, q, drawn(q))[0], p)


def tree_error(
    shape: tuple[int, ...],
    accept: Callable = verify.accept_recursive,
    drawn: Drawn = without_replacement,
    judged: Drawn = without_replacement,
) -> float:
    every, p = drafts("dense", 3, shape, drawn, judged)
    return error(by_tree(every, accept)[0], p)


OTHERS = (without_replacement, with_replacement)
WRONG: dict[str, Callable[[], float]] = {
    "argmax passed off as drawn": lambda: chain_error(drawn=one_hot),
    "another temperature than that of q": lambda: chain_error(drawn=sharpened),
    "a rescaled draw": lambda: chain_error(drawn=top_scaled),
    "a recovered token drawn from p": lambda: chain_error(from_target),
    "a block that stops at the first failure": lambda: chain_error(first_failure),
    "residuals that are not normalised": lambda: tree_error((0, 0, 0), left_unnormalised),
    "guesses judged by p": lambda: tree_error((0, 0, 0), judged_by_p),
    # Drawn without replacement and judged as if with it, which leaves siblings unnormalised; the reverse.
    "siblings unnormalised": lambda: tree_error((0, 0), verify.accept_recursive, *OTHERS),
    "siblings unnormalised, deeper": lambda: tree_error((0, 1, 1, 0), verify.accept_recursive, *OTHERS),
    "siblings judged without": lambda: tree_error((0, 0), verify.accept_recursive, *OTHERS[::-1]),
    "siblings judged without, deeper": lambda: tree_error(
        (0, 1, 1, 0), verify.accept_recursive, *OTHERS[::-1]
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_drafts_and_rules_are_caught(name: str) -> None:
    assert WRONG[name]() > CAUGHT


# --- what is not drawn


def walked(rule: Callable[..., mx.array], shape: tuple[int, ...], size: int, twins: bool = True) -> float:
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


def luckiest(chosen: mx.array, tokens: mx.array, tree: Tree) -> mx.array:
    """Of two equal guesses, take the one whose children fit, which is wrong."""
    hits = tokens == chosen[mx.array(tree.parents)]
    reached = (mx.array(tree.ancestors()).astype(mx.int32)[:, 1:] * (1 - hits)).sum(axis=-1) == 0
    last = mx.where(reached, mx.array(tree.depths), -1).argmax()
    return mx.stack([last.astype(mx.int32), chosen[last]])


@pytest.mark.parametrize(
    ("rule", "size", "shape"),
    [
        *((verify.walk, 3, shape) for shape in ((0, 0), (0, 1, 0), (0, 1, 1, 0), (0, 0, 2, 1))),
        *((matched, 2, shape) for shape in ((0,), (0, 1, 2, 3))),
        (matched, 3, (0, 1, 2)),
        (matched, 4, (0, 1)),
    ],
)
def test_choices_of_the_target_are_followed_exactly(
    rule: Callable[..., mx.array], size: int, shape: tuple[int, ...]
) -> None:
    """Also where two guesses are the same."""
    assert walked(rule, shape, size) < TOLERANCE


def test_luck_between_equal_guesses_is_caught() -> None:
    assert walked(luckiest, (0, 0, 1, 2), 3, twins=False) < TOLERANCE
    assert walked(luckiest, (0, 0, 1, 2), 3) > CAUGHT


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


# --- corners


def test_match_of_an_empty_draft() -> None:
    verdict = verify.match(mx.array([5], dtype=mx.int32), mx.array([], dtype=mx.int32))
    assert verdict.dtype == mx.int32 and verdict.tolist() == [0, 5]


def judged(p: mx.array, tokens: list[int], q: mx.array, uniform: float) -> tuple[int, Array]:
    """Return n and the weights of the next token, with the same uniform everywhere."""
    n, weights = verify.accept_block(p, mx.array(tokens, dtype=mx.int32), q, mx.full((len(tokens),), uniform))
    return int(np.array(n)), np.array(weights)


def test_a_token_the_target_cannot_emit_is_rejected_at_uniform_zero() -> None:
    p = mx.array([[0.0, 0.5, 0.5], [0.2, 0.3, 0.5]])
    for q in ([0.5, 0.5, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]):
        n, weights = judged(p, [0], mx.array([q]), 0.0)
        assert n == 0
        assert weights[0] == 0 < weights.sum()


def test_equal_distributions_accept_all() -> None:
    p = mx.softmax(mx.random.normal((4, 9), key=mx.random.key(0)) * 8, axis=-1)
    for rows, tokens in ((p, [1, 2, 3]), (mx.ones((4, 1)), [0, 0, 0])):
        n, weights = judged(rows, tokens, rows[:3], float(BELOW_ONE))
        assert n == 3 and (weights == np.array(rows[3])).all()


def test_where_rounding_leaves_no_residual_the_target_decides() -> None:
    p = mx.array([[0.25, 0.75], [0.5, 0.5]])
    q = mx.array([[0.25 + 2**-20, 0.75]])  # no longer sums to 1, and is nowhere below p
    n, weights = judged(p, [0], q, float(BELOW_ONE))
    assert n == 0 and (weights == np.array(p[0])).all()


def test_vanishing_probabilities_leave_no_nan() -> None:
    p0, q0, p1, q1 = np.array(list(itertools.product([0.0, 1e-45, 1e-38, 1e-20, 1.0], repeat=4))).T
    p, q = (
        np.stack([np.stack(column, 1), np.ones((len(p0), len(column)))], 2) for column in ((p0, p1), (q0, q1))
    )
    p = np.concatenate([p, np.broadcast_to([[[1.0, 0.0]]], (len(p0), 1, 2))], axis=1)
    for uniform in (0.0, float(BELOW_ONE)):
        drafts = np.zeros((len(p0), 2)), q, np.full((len(p0), 2), uniform)
        n, weights = evaluate(verify.accept_block, p, *drafts)
        assert (n >= 0).all() and (n <= (p0 > 0) * (1 + (p1 > 0))).all()
        assert np.isfinite(weights).all() and (weights.sum(-1) > 0).all()
