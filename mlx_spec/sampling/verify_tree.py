"""Acceptance rules for trees of draft tokens. Pure, lazy, float32.

p is the target's distribution, q the drafter's. Every rule returns int32 [2]: the row of the last accepted
token, 0 if none is, and the token after it. Row v of p [K + 1, V] is the distribution of the token after row
v of the tree. If the tree is a chain, the row is the number of accepted tokens.
"""

from __future__ import annotations

import mlx.core as mx

from mlx_spec.model.tree import Tree
from mlx_spec.sampling.verify import recover


def walk(chosen: mx.array, tokens: mx.array, tree: Tree) -> mx.array:
    """Follow the target's own choices as long as they are in the tree. Return int32 [2].

    chosen [K + 1] int32, one after every row. Exact for any tree: only the target's choices are emitted
    (SpecInfer, arXiv:2305.09781).
    """
    last = last_reached(tokens == chosen[mx.array(tree.parents)], tree)
    return mx.stack([last, chosen[last]])


def recursive(
    p: mx.array, tokens: mx.array, q: mx.array, uniform: mx.array, noise: mx.array, tree: Tree
) -> mx.array:
    """Judge the guesses for a place in turn (arXiv:2402.14160, algorithm 2). Return int32 [2].

    uniform [K] in [0, 1), noise [V] Gumbel. Row j of q [K, V] is the distribution that token j was drawn
    from, given the tokens before it. If guesses are drawn without replacement, it is 0 at earlier guesses for
    the same place.
    """
    return recover(*accept_recursive(p, tokens, q, uniform, tree), noise)


def accept_recursive(
    p: mx.array, tokens: mx.array, q: mx.array, uniform: mx.array, tree: Tree
) -> tuple[mx.array, mx.array]:
    """Return the row of the last accepted token, a scalar int32, and the distribution [V] of the next one.

    r is the rest of p after the earlier guesses for a place. A guess is accepted with probability
    min(1, r / q). If it is not, the rest is max(r - q, 0), normalised, or r if rounding leaves nothing.
    """
    left, hits = list(p), []
    for j, row in enumerate(tree.parents):
        r, drawn, token = left[row], q[j], tokens[j : j + 1]
        hits.append(uniform[j : j + 1] * drawn[token] < r[token])
        excess = mx.maximum(r - drawn, 0)
        total = excess.sum()
        left[row] = mx.where(total > 0, excess / mx.where(total > 0, total, 1), r)
    last = last_reached(mx.concatenate(hits), tree)
    return last, mx.stack(left)[last]


def last_reached(hits: mx.array, tree: Tree) -> mx.array:
    """Return the deepest row whose whole path hit, a scalar int32. hits [K] bool.

    Of several guesses for one place only the first that hits is taken, whatever follows the others.
    """
    # Products, because mx.vmap of & goes wrong in MLX 0.32.4, and tests enumerate the rules with vmap.
    earlier = mx.array(tree.earlier_siblings()).astype(mx.int32)
    ancestors = mx.array(tree.ancestors()).astype(mx.int32)
    taken = hits.astype(mx.int32) * ((earlier * hits).sum(axis=-1) == 0)
    reached = (ancestors[:, 1:] * (1 - taken)).sum(axis=-1) == 0  # at most one row of each depth
    return mx.where(reached, mx.arange(reached.shape[0], dtype=mx.int32), 0).max()
