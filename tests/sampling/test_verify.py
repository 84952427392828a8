"""Acceptance rules emit exactly the target's distribution, whatever is drafted; wrong variants are caught."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import mlx.core as mx
import numpy as np
import pytest
from support.enumeration import BELOW_ONE, KINDS, Array, Levels, emitted, error, evaluate, normalised, trees

from mlx_spec.model.tree import tree_of
from mlx_spec.sampling import verify

SIZES = [(2, 1), (2, 4), (3, 3), (4, 2), (4, 4)]  # V, K
TOLERANCE = 1e-6  # measured: below 1e-7
CAUGHT = 1e-2  # a wrong rule errs by more than this; measured: 0.03 or more


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("V", "K"), SIZES)
def test_the_distribution_is_exact(kind: str, V: int, K: int) -> None:
    for seed in range(1 if V**K > 100 else 3):
        p, q = trees(kind, V, K, seed)
        out, _ = emitted(verify.accept_block, p, q, q)
        assert error(out, p) < TOLERANCE


@pytest.mark.parametrize("broken", [0, 1, 2])
def test_a_drafter_that_overflows_changes_nothing(broken: int) -> None:
    """Where a later row of q was not a number, every draft failed, and yet p less q was drawn."""
    p, q = trees("dense", 3, 3, 0)
    judged, drawn = [level.copy() for level in q], [level.copy() for level in q]
    some = (0,) * broken + (slice(None),)
    judged[broken][some], drawn[broken][some] = np.nan, np.eye(3)[1]
    out, _ = emitted(verify.accept_block, p, judged, drawn)
    assert error(out, p) < TOLERANCE


def means(p: Levels, q: Levels) -> tuple[float, float]:
    """Return how many tokens are accepted if each is judged by itself, and if all are judged together."""
    by_token = partial(verify.accept_recursive, tree=tree_of(tuple(range(len(q)))))
    return emitted(by_token, p, q, q)[1], emitted(verify.accept_block, p, q, q)[1]


@pytest.mark.parametrize("kind", KINDS)
def test_block_accepts_no_fewer_and_no_rule_beats_the_bound(kind: str) -> None:
    for seed in range(4):
        p, q = trees(kind, 3, 3, seed)
        by_token, by_block = means(p, q)
        bound, joint_p, joint_q = 0.0, np.ones(()), np.ones(())
        for level_p, level_q in zip(p, q, strict=False):  # min(p, q) of whole prefixes: full information
            joint_p, joint_q = joint_p[..., None] * level_p, joint_q[..., None] * level_q
            bound += float(np.minimum(joint_p, joint_q).sum())
        assert by_token <= by_block + TOLERANCE
        assert by_block <= bound + TOLERANCE


def test_example_of_the_block_paper() -> None:
    """Section 2 of arXiv:2403.10444: p = (1/3, 2/3), q = (2/3, 1/3), two drafts: 10/9 and 11/9 accepted."""
    p = [np.broadcast_to(np.array([1 / 3, 2 / 3]), (2,) * (j + 1)) for j in range(3)]
    q = [np.broadcast_to(np.array([2 / 3, 1 / 3]), (2,) * (j + 1)) for j in range(2)]
    by_token, by_block = means(p, q)
    assert by_token == pytest.approx(10 / 9, abs=TOLERANCE)
    assert by_block == pytest.approx(11 / 9, abs=TOLERANCE)


def one_hot(tree: Levels) -> Levels:
    return [np.eye(level.shape[-1])[level.argmax(-1)] for level in tree]


def sharpened(tree: Levels) -> Levels:
    return [normalised(level**2) for level in tree]


def top_scaled(tree: Levels) -> Levels:
    """The likeliest token at half its weight, as Saguaro draws (arXiv:2603.03251)."""
    return [normalised(level * (1 - 0.5 * one_hot([level])[0])) for level in tree]


@pytest.mark.parametrize("misdrawn", [one_hot, sharpened, top_scaled])
def test_a_draft_not_drawn_from_q_is_caught(misdrawn: Callable[[Levels], Levels]) -> None:
    """Argmax passed off as sampled, a temperature that differs from q's, a rescaled draw with plain q."""
    p, q = trees("dense", 3, 3, 0)
    out, _ = emitted(verify.accept_block, p, q, misdrawn(q))
    assert error(out, p) > CAUGHT


def test_a_recovered_token_drawn_from_p_is_caught() -> None:
    def from_target(p, tokens, q, uniform):
        n, _ = verify.accept_block(p, tokens, q, uniform)
        return n, p[n]

    p, q = trees("dense", 3, 3, 0)
    out, _ = emitted(from_target, p, q, q)
    assert error(out, p) > CAUGHT


def test_a_block_rule_that_stops_at_the_first_failure_is_caught() -> None:
    def first_failure(p, tokens, q, uniform):
        # The rule itself, asked about each prefix alone: those before the first that fails.
        K = tokens.shape[0]
        alone = [mx.where(mx.arange(K) == i, uniform, float(BELOW_ONE)) for i in range(K)]
        passes = mx.stack([verify.accept_block(p, tokens, q, u)[0] > i for i, u in enumerate(alone)])
        n = mx.cumprod(passes.astype(mx.int32)).sum()
        forced = mx.where(mx.arange(1, K + 1) == n, 0.0, float(BELOW_ONE))
        return n, verify.accept_block(p, tokens, q, forced)[1]

    p, q = trees("dense", 3, 3, 0)
    out, _ = emitted(first_failure, p, q, q)
    assert error(out, p) > CAUGHT


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
    n, weights = judged(p, [1, 2, 3], p[:3], float(BELOW_ONE))
    assert n == 3
    assert (weights == np.array(p[3])).all()
    n, weights = judged(mx.ones((4, 1)), [0, 0, 0], mx.ones((3, 1)), float(BELOW_ONE))
    assert n == 3
    assert weights == 1


def test_where_rounding_leaves_no_residual_the_target_decides() -> None:
    p = mx.array([[0.25, 0.75], [0.5, 0.5]])
    q = mx.array([[0.25 + 2**-20, 0.75]])  # no longer sums to 1, and is nowhere below p
    n, weights = judged(p, [0], q, float(BELOW_ONE))
    assert n == 0
    assert (weights == np.array(p[0])).all()


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
