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

from mlx_spec.model.tree import Tree, tree_of

Array = np.ndarray
Levels = list[Array]  # entry j, shape [V] * (j + 1): the distributions after each prefix of j tokens
Accept = Callable[[mx.array, mx.array, mx.array, mx.array], tuple[mx.array, mx.array]]
Guess = Callable[[tuple[int, ...], list[int]], Array]  # (tokens before, earlier guesses for the place) -> [V]

KINDS = ["dense", "masked p", "masked q", "both masked", "sparse q", "equal", "nearly equal", "peaked"]
BELOW_ONE = np.float32(1 - 2**-24)


def random_tree(rng: np.random.Generator, V: int, depth: int, spread: float, masked: float) -> Levels:
    """Random distributions; a token is masked with the given probability, never all of them."""
    tree = []
    for j in range(depth):
        logits = rng.normal(size=(V,) * (j + 1)) * spread
        hidden = (rng.random(logits.shape) < masked) & (logits < logits.max(-1, keepdims=True))
        tree.append(normalised(np.where(hidden, 0, np.exp(logits))).astype(np.float32))
    return tree


def normalised(weights: Array) -> Array:
    return np.asarray(weights / weights.sum(-1, keepdims=True))


def without_replacement(q: Array, earlier: list[int]) -> Array:
    """Return the distribution without the earlier guesses; if nothing is left, any other token."""
    left = q.copy()
    left[earlier] = 0
    free = np.ones_like(q)
    free[earlier] = 0
    return normalised(left if left.sum() > 1e-6 else free)


def trees(kind: str, V: int, K: int, seed: int) -> tuple[Levels, Levels]:
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


def rows(tree: Levels, paths: Array) -> Array:
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

    limit = np.ones(len(probes))
    at_low = verdict(np.zeros(len(probes)))
    moves = at_low != verdict(np.full(len(probes), float(BELOW_ONE)))  # the others change nothing
    if moves.any():
        cuts = np.arange(1, 16) / 16
        p, tokens, q, probes, at_low = (
            np.repeat(x[moves], len(cuts), axis=0) for x in (p, tokens, q, probes, at_low)
        )
        low, width = np.zeros(moves.sum()), float(BELOW_ONE)
        for _ in range(7):  # a call costs more than its rows, so each cuts the range by 16
            same = verdict((low[:, None] + width * cuts).ravel()) == at_low
            width /= 16
            low += width * same.reshape(-1, len(cuts)).cumprod(1).sum(1)
        limit[moves] = low + width / 2
    return np.asarray(limit.reshape(N, K, -1).min(-1))


class Drafts:
    """Every draft of a tree: tokens [N, K], its probability, and p [N, T, V] and q [N, K, V] along it."""

    def __init__(self, tree: Tree, p: Levels, drawn: Guess, judged: Guess) -> None:
        kept = []
        for tokens in itertools.product(range(p[0].shape[0]), repeat=len(tree.parents)):
            prefixes, probability, rows = [()], 1.0, []
            for j, row in enumerate(tree.parents):
                earlier = [tokens[i] for i in range(j) if tree.parents[i] == row]
                probability *= drawn(prefixes[row], earlier)[tokens[j]]
                rows.append(judged(prefixes[row], earlier))
                prefixes.append((*prefixes[row], tokens[j]))
            if probability > 0:
                kept.append((tokens, probability, [p[len(prefix)][prefix] for prefix in prefixes], rows))
        self.tree = tree
        self.tokens, self.probability, self.p, self.q = (
            np.array(column) for column in zip(*kept, strict=True)
        )

    def emitted(self, rule: Accept) -> tuple[Levels, float]:
        """Return the mass of every emitted sequence, by number of accepted tokens, and the mean number."""
        size, K = self.p.shape[-1], len(self.tree.parents)
        rows = self.p, self.tokens, self.q
        limit = thresholds(rule, *rows)
        out, mean = [np.zeros((size,) * (j + 1)) for j in range(self.tree.height + 1)], 0.0
        for below in itertools.product([True, False], repeat=K):
            inside = np.where(below, limit / 2, np.minimum((1 + limit) / 2, BELOW_ONE))
            weight = self.probability * np.where(below, limit, 1 - limit).prod(1)
            last, left = evaluate(rule, *rows, inside)
            assert np.isfinite(left).all() and (left >= 0).all()
            for row, path in enumerate(self.tree.paths):
                hit = (last == row) & (weight > 0)
                before = self.tokens[hit][:, [r - 1 for r in path[1:]]]
                prefix = before @ size ** np.arange(len(path) - 1)[::-1]
                at = out[len(path) - 1].reshape(-1, size)
                np.add.at(at, prefix, weight[hit, None] * normalised(left[hit]))
                mean += float(weight[hit].sum()) * (len(path) - 1)
        return out, mean


def emitted(accept: Accept, p: Levels, q: Levels, drawn: Levels) -> tuple[Levels, float]:
    """Enumerate a round whose drafts are chains that are drawn from `drawn` and judged by q."""

    def along(levels: Levels) -> Guess:
        return lambda prefix, earlier: levels[len(prefix)][prefix]

    return Drafts(tree_of(tuple(range(len(q)))), p, along(drawn), along(q)).emitted(accept)


def error(out: Levels, p: Levels) -> float:
    """Return the largest error in the distribution of K + 1 tokens: the round's, then tokens drawn from p."""
    found, target = out[0], p[0].astype(np.float64)
    for emitted_here, level in zip(out[1:], p[1:], strict=True):
        found, target = found[..., None] * level + emitted_here, target[..., None] * level
    return float(np.abs(found - target).max())
