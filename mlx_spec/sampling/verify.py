"""Acceptance rules for chains and trees of draft tokens. Pure, lazy, float32.

Names as in the papers: p is the target's distribution, q the drafter's. A verdict is int32 [2]: the number
of accepted draft tokens n, and the token after them. Row j of p [K + 1, V] and of q [K, V] is the
distribution of the token after `tokens[:j]`.
"""

from __future__ import annotations

import mlx.core as mx

from mlx_spec.model.tree import Tree

MIN_NORMAL = 1.1754944e-38  # least normal float32: keeps log q finite where q is 0


def match(chosen: mx.array, tokens: mx.array) -> mx.array:
    """Accept draft tokens while they equal the target's own choices. Return int32 [2].

    chosen [K + 1] int32; K may be 0. Exact for any draft, since only the target's choices are emitted: greedy
    decoding, Gumbel-coupled draws (Daliri et al., arXiv:2408.07978), and choices drawn from p against a draft
    that was not drawn at random (the walk of SpecInfer, arXiv:2305.09781, for one path).
    """
    never = mx.array([-1], dtype=mx.int32)  # no token has this id, so row K always ends the run
    n = (chosen != mx.concatenate([tokens, never])).argmax(keepdims=True)
    return mx.concatenate([n.astype(mx.int32), chosen[n]])


def accept_block(p: mx.array, tokens: mx.array, q: mx.array, uniform: mx.array) -> tuple[mx.array, mx.array]:
    """Judge all tokens together (Sun et al., arXiv:2403.10444, algorithm 2). uniform [K] in [0, 1).

    Return n, a scalar int32, and the distribution [V] of the next token, not normalised. This accepts more
    tokens than a rule that judges each alone (Leviathan et al., arXiv:2211.17192).

    With P_i = min(1, P_{i-1} p_i / q_i) and s_i the mass of max(P_i p - q, 0) after i tokens, prefix i passes
    with probability h_i = s_i / (s_i + 1 - P_i), and h_K = P_K. n is the longest prefix that passes: one that
    fails does not end the search. A row of q that is NaN, after an overflow in the drafter, ends the draft
    before its token.
    """
    K = tokens.shape[0]
    ratio = mx.log(_probability(p, tokens)) - mx.log(mx.maximum(_probability(q, tokens), MIN_NORMAL))
    total = mx.cumsum(ratio)
    mass = mx.exp(total - mx.maximum(mx.cummax(total), 0))  # P_1 .. P_K: the recursion above, unrolled
    inner = mass[:-1]
    excess = mx.maximum(inner[:, None] * p[1:K] - q[1:], 0).sum(axis=-1)  # s_1 .. s_{K-1}
    passing = excess / (excess + mx.maximum(1 - inner, MIN_NORMAL))  # 0 at 0 / 0: the next one passes
    passing = mx.where(mx.isnan(excess), inner, passing)
    passes = uniform < mx.concatenate([passing, mass[-1:]])
    n = mx.where(passes, mx.arange(1, K + 1, dtype=mx.int32), 0).max()
    return n, _residual(p, q, n, mx.concatenate([mx.array([1.0]), mass])[n])


def _probability(rows: mx.array, tokens: mx.array) -> mx.array:
    """Return the probability [K] of each draft token in its row: 0 for -1, which is not a token."""
    return mx.take_along_axis(rows[: tokens.shape[0]], tokens[:, None], axis=-1)[:, 0] * (tokens >= 0)


def _residual(p: mx.array, q: mx.array, n: mx.array, mass: mx.array) -> mx.array:
    """Return max(mass p - q, 0) [V] after n tokens; q is 0 after the draft. If rounding leaves nothing, p."""
    K = q.shape[0]
    target, drafted = p[n], q[mx.minimum(n, K - 1)]
    drafted = mx.where((n < K) & ~mx.isnan(drafted), drafted, 0)
    excess = mx.maximum(mass * target - drafted, 0)
    return mx.where(excess.max() > 0, excess, target)


# --- trees
#
# The first number of a verdict is the row of the last accepted token, 0 if none is. Row v of p [K + 1, V] is
# the distribution of the token after row v of the tree. In a chain, that is the number of accepted tokens.


def walk(chosen: mx.array, tokens: mx.array, tree: Tree) -> mx.array:
    """Follow the target's own choices as long as they are in the tree. Return int32 [2].

    chosen [K + 1] int32, one after every row. Exact for any tree: only the target's choices are emitted
    (SpecInfer, arXiv:2305.09781).
    """
    last = last_reached(tokens == chosen[mx.array(tree.parents)], tree)
    return mx.stack([last, chosen[last]])


def accept_recursive(
    p: mx.array, tokens: mx.array, q: mx.array, uniform: mx.array, tree: Tree
) -> tuple[mx.array, mx.array]:
    """Judge the guesses after one row in turn (arXiv:2402.14160, algorithm 2). uniform [K] in [0, 1).

    Return the row of the last accepted token, a scalar int32, and the distribution [V] of the next one, not
    normalised. Row j of q [K, V] is the distribution that token j was drawn from, given the tokens before it.
    If guesses are drawn without replacement, it is 0 at earlier guesses for the same place.

    r is the rest of p after the earlier guesses there. A guess is accepted with probability
    min(1, r / q). If it is not, the rest is max(r - q, 0), normalised, or r if rounding leaves nothing.
    """
    left, hits = list(p), []
    for j, row in enumerate(tree.parents):
        r, drawn, token = left[row], q[j], tokens[j : j + 1]
        hits.append((uniform[j : j + 1] * drawn[token] < r[token]) & (token >= 0))
        excess = mx.maximum(r - drawn, 0)
        total = excess.sum()
        left[row] = mx.where(total > 0, excess / mx.where(total > 0, total, 1), r)
    last = last_reached(mx.concatenate(hits), tree)
    return last, mx.stack(left)[last]


def last_reached(hits: mx.array, tree: Tree) -> mx.array:
    """Return the deepest row whose whole path hit, a scalar int32. hits [K] bool.

    Of several guesses after one row only the first that hits is taken, whatever follows the others.
    """
    # Products, because mx.vmap of & goes wrong in MLX 0.32.4, and tests enumerate the rules with vmap.
    earlier = mx.array(tree.earlier_siblings()).astype(mx.int32)
    ancestors = mx.array(tree.ancestors()).astype(mx.int32)
    taken = hits.astype(mx.int32) * ((earlier * hits).sum(axis=-1) == 0)
    reached = (ancestors[:, 1:] * (1 - taken)).sum(axis=-1) == 0  # at most one row of each depth
    return mx.where(reached, mx.arange(reached.shape[0], dtype=mx.int32), 0).max()
