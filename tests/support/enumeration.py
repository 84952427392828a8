"""The exact distribution of what an acceptance rule emits, by enumerating every draft and every outcome.

Nothing is sampled. A rule is called on all V**K drafts of a random tree of distributions. Its uniforms are
integrated: bisection finds where the verdict changes, and one call inside each cell stands for all of it.
The residual is read from the rule's own first step. So the only error is float32's.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import mlx.core as mx
import numpy as np

Array = np.ndarray
Tree = list[Array]  # entry j, shape [V] * (j + 1): the distributions after each prefix of j tokens
Accept = Callable[[mx.array, mx.array, mx.array, mx.array], tuple[mx.array, mx.array]]

KINDS = ["dense", "masked p", "masked q", "both masked", "sparse q", "equal", "nearly equal", "peaked"]
BELOW_ONE = np.float32(1 - 2**-24)


def random_tree(rng: np.random.Generator, V: int, depth: int, spread: float, masked: float) -> Tree:
    """Random distributions; a token is masked with the given probability, never all of them."""
    tree = []
    for j in range(depth):
        logits = rng.normal(size=(V,) * (j + 1)) * spread
        hidden = (rng.random(logits.shape) < masked) & (logits < logits.max(-1, keepdims=True))
        tree.append(normalised(np.where(hidden, 0, np.exp(logits))).astype(np.float32))
    return tree


def normalised(weights: Array) -> Array:
    return np.asarray(weights / weights.sum(-1, keepdims=True))


def trees(kind: str, V: int, K: int, seed: int) -> tuple[Tree, Tree]:
    """Return the distributions p, of depth K + 1, and q, of depth K."""
    rng = np.random.default_rng([KINDS.index(kind), V, K, seed])
    spread = 4.0 if kind == "peaked" else 1.0
    p = random_tree(rng, V, K + 1, spread, 0.4 if kind in ("masked p", "both masked") else 0.0)
    if kind.endswith("equal"):
        noise = 1e-6 if kind == "nearly equal" else 0.0
        q = [level * (1 + noise * rng.normal(size=level.shape)) for level in p[:K]]
        return p, [normalised(level).astype(np.float32) for level in q]
    masked = {"masked q": 0.4, "both masked": 0.4, "sparse q": 1.0}.get(kind, 0.0)
    return p, random_tree(rng, V, K, spread, masked)


def rows(tree: Tree, paths: Array) -> Array:
    """Return the distributions along each path: [N, depth, V]."""
    shape = (len(paths), tree[0].shape[0])
    levels = [np.broadcast_to(level[tuple(paths[:, :j].T)], shape) for j, level in enumerate(tree)]
    return np.stack(levels, axis=1)


def evaluate(accept: Accept, p: Array, tokens: Array, q: Array, uniform: Array) -> tuple[Array, Array]:
    """Call a rule many times at once. Return n [N] and the weights of the next token [N, V]."""
    inputs = [mx.array(x.astype(np.float32)) for x in (p, q, uniform)]
    n, weights = mx.vmap(accept)(inputs[0], mx.array(tokens.astype(np.int32)), inputs[1], inputs[2])
    return np.array(n), np.array(weights, dtype=np.float64)


def thresholds(accept: Accept, p: Array, tokens: Array, q: Array) -> Array:
    """Return where each uniform changes the verdict n if the others are 0 or near 1: [N, K], 1 if nowhere."""
    N, K = tokens.shape
    corners = np.array(list(itertools.product([0.0, BELOW_ONE], repeat=K - 1)))
    probes = np.concatenate([np.insert(corners, i, np.nan, axis=1) for i in range(K)])  # nan: the one to vary
    p, tokens, q = (np.repeat(x, len(probes), axis=0) for x in (p, tokens, q))
    probes = np.tile(probes, (N, 1))

    def verdict(value: Array) -> Array:
        return evaluate(accept, p, tokens, q, np.where(np.isnan(probes), value[:, None], probes))[0]

    low, high = np.zeros(len(probes)), np.full(len(probes), float(BELOW_ONE))
    at_low = verdict(low)
    idle = at_low == verdict(high)
    for _ in range(28):
        middle = (low + high) / 2
        same = verdict(middle) == at_low
        low, high = np.where(same, middle, low), np.where(same, high, middle)
    return np.asarray(np.where(idle, 1, (low + high) / 2).reshape(N, K, -1).min(-1))


def emitted(accept: Accept, p: Tree, q: Tree, drawn: Tree) -> tuple[Tree, float]:
    """Enumerate a round whose drafts are drawn from `drawn` and judged by q.

    Return the mass of every emitted sequence, by number of accepted tokens, and the mean of that number.
    """
    V, K = p[0].shape[0], len(q)
    paths = np.array(list(itertools.product(range(V), repeat=K)))
    probability = np.take_along_axis(rows(drawn, paths), paths[:, :, None], -1)[:, :, 0].prod(1)
    paths, probability = paths[probability > 0], probability[probability > 0]
    inputs = rows(p, paths), paths, rows(q, paths)
    limit = thresholds(accept, *inputs)
    out, mean = [np.zeros((V,) * (j + 1)) for j in range(K + 1)], 0.0
    for below in itertools.product([True, False], repeat=K):
        inside = np.where(below, limit / 2, np.minimum((1 + limit) / 2, BELOW_ONE))
        weight = probability * np.where(below, limit, 1 - limit).prod(1)
        n, weights = evaluate(accept, *inputs, inside)
        assert np.isfinite(weights).all() and (weights >= 0).all()
        for j in range(K + 1):
            hit = (n == j) & (weight > 0)
            prefix = paths[hit, :j] @ V ** np.arange(j)[::-1]
            np.add.at(out[j].reshape(-1, V), prefix, weight[hit, None] * normalised(weights[hit]))
        mean += float(weight @ n)
    return out, mean


def error(out: Tree, p: Tree) -> float:
    """Return the largest error in the distribution of K + 1 tokens: the round's, then tokens drawn from p."""
    found, target = out[0], p[0].astype(np.float64)
    for emitted_here, level in zip(out[1:], p[1:], strict=True):
        found, target = found[..., None] * level + emitted_here, target[..., None] * level
    return float(np.abs(found - target).max())
