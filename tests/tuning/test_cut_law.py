"""A draft that is cut by confidence before it is verified leaves the law exact; cut by later knowledge, not.

Confidence is the largest probability of the law that a token was drawn from, so it is known before the token.
Every draft is enumerated, as in `test_verify.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from enumeration import KINDS, Accept, Array, Tree, emitted, error, rows, trees

from mlx_spec.sampling import verify
from mlx_spec.tuning.acceptance import BINS, bin_of
from mlx_spec.tuning.programme import Rule

RULES = [verify.accept_token, verify.accept_block]
TOLERANCE = 1e-6
CAUGHT = 1e-2  # a wrong cut errs by more than this
Cut = Callable[[Array, Array], int]  # laws [K, V] along a path, its tokens [K] -> how many to verify

THRESHOLDS = (0.46, 0.28, 0.2)
RULE = Rule(THRESHOLDS, [[(b + 0.5) / BINS for b in range(BINS)]] * 3)


def by_confidence(laws: Array, path: Array) -> int:
    """As the policy cuts: confidences in, a number out."""
    return RULE.cut([bin_of(float(law.max())) for law in laws])


def by_the_token_itself(laws: Array, path: Array) -> int:
    likely = [law[token] >= 0.4 for law, token in zip(laws, path, strict=True)]
    return likely.index(False) if False in likely else len(path)


def by_the_next_confidence(laws: Array, path: Array) -> int:
    """Token j goes by the confidence of token j + 1, which knows what token j was."""
    sure = [float(law.max()) >= 0.5 for law in laws[1:]]
    return sure.index(False) if False in sure else len(path)


def law_error(accept: Accept, cut: Cut, p: Tree, q: Tree) -> float:
    """The error of the law of K + 1 tokens when each draft from q is cut before `accept` sees it."""
    V, K = p[0].shape[0], len(q)
    paths = np.array(list(itertools.product(range(V), repeat=K)))
    laws = rows(q, paths)
    chance = np.take_along_axis(laws, paths[:, :, None], -1)[:, :, 0].prod(1)
    lengths = np.array([cut(*pair) for pair in zip(laws, paths, strict=True)])
    out = [np.zeros((V,) * (j + 1)) for j in range(K + 1)]
    out[0] += chance[lengths == 0].sum() * p[0]
    for m in range(1, K + 1):
        weights = np.zeros((V,) * m)
        np.add.at(weights, tuple(paths[lengths == m, :m].T), chance[lengths == m])
        drawn = [*(np.ones((V,) * (j + 1)) for j in range(m - 1)), weights]
        for j, level in enumerate(emitted(accept, p[: m + 1], q[:m], drawn)[0] if weights.any() else []):
            out[j] += level
    return error(out, p)


@pytest.mark.parametrize("accept", RULES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_cut_by_confidence_is_exact(accept: Accept, kind: str) -> None:
    for V, K, seed in [(2, 3, 0), (3, 3, 0), (4, 2, 0)]:
        p, q = trees(kind, V, K, seed)
        assert law_error(accept, by_confidence, p, q) < TOLERANCE


def test_every_length_occurs() -> None:
    paths = np.array(list(itertools.product(range(3), repeat=3)))
    found = {
        by_confidence(laws, path)
        for seed in range(6)
        for laws, path in zip(rows(trees("dense", 3, 3, seed)[1], paths), paths, strict=True)
    }
    assert found == {0, 1, 2, 3}


@pytest.mark.parametrize("accept", RULES)
@pytest.mark.parametrize("cut", [by_the_token_itself, by_the_next_confidence])
def test_a_cut_that_knows_the_token_is_caught(accept: Accept, cut: Cut) -> None:
    assert max(law_error(accept, cut, *trees("dense", 3, 3, seed)) for seed in range(4)) > CAUGHT
