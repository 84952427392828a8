"""Acceptance rules for trees of draft tokens. Pure, lazy, float32; p is the target's law, q the drafter's.

Every rule returns int32 [2]: the row of the last accepted token, 0 if none is, and the token that follows it.
Row v of p [K + 1, V] is the law of the token behind row v of the tree. Where a tree is a chain, the row is
the number of accepted tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx

from mlx_spec.model.tree import Tree, tree_of
from mlx_spec.sampling.verify import recover
from mlx_spec.types import Draft

Draw = Callable[[mx.array, Sequence[int], mx.array], tuple[mx.array, mx.array | None]]


def walk(chosen: mx.array, tokens: mx.array, tree: Tree) -> mx.array:
    """Follow the target's own choices as long as they are in the tree. Returns int32 [2].

    chosen [K + 1] int32, one behind every row. Exact for any tree: only the target's choices are emitted
    (SpecInfer, arXiv:2305.09781).
    """
    last = deepest(tokens == chosen[mx.array(tree.parents)], tree)
    return mx.stack([last, chosen[last]])


def recursive(
    p: mx.array, tokens: mx.array, q: mx.array, uniform: mx.array, noise: mx.array, tree: Tree
) -> mx.array:
    """Judge guesses for a place in turn (arXiv:2402.14160, algorithm 2). Returns int32 [2].

    uniform [K] in [0, 1), noise [V] Gumbel. Row j of q [K, V] is the law that token j was drawn from when
    those before it were known: without replacement, earlier guesses for its place have no probability in it.
    """
    return recover(*accept_recursive(p, tokens, q, uniform, tree), noise)


def accept_recursive(
    p: mx.array, tokens: mx.array, q: mx.array, uniform: mx.array, tree: Tree
) -> tuple[mx.array, mx.array]:
    """Returns the row of the last accepted token, a scalar int32, and the law [V] of the next one.

    A guess stays with probability min(1, r / q), r being what the guesses before it left of p; then
    max(r - q, 0) is left, normalised, and where rounding leaves nothing, r.
    """
    left, hits = list(p), []
    for j, row in enumerate(tree.parents):
        r, drawn, token = left[row], q[j], tokens[j : j + 1]
        hits.append(uniform[j : j + 1] * drawn[token] < r[token])
        excess = mx.maximum(r - drawn, 0)
        total = excess.sum()
        left[row] = mx.where(total > 0, excess / mx.where(total > 0, total, 1), r)
    last = deepest(mx.concatenate(hits), tree)
    return last, mx.stack(left)[last]


def deepest(hits: mx.array, tree: Tree) -> mx.array:
    """The last row that is reached through tokens that hit, hits [K] bool; a scalar int32.

    Of guesses for one place the first that hits is taken, whatever follows the others.
    """
    # Products, because mx.vmap of & goes wrong in MLX 0.32.4, and the rules are enumerated with it.
    elders, above = mx.array(tree.elders()).astype(mx.int32), mx.array(tree.above()).astype(mx.int32)
    taken = hits.astype(mx.int32) * ((elders * hits).sum(axis=-1) == 0)
    reached = (above[:, 1:] * (1 - taken)).sum(axis=-1) == 0  # at most one row of a depth
    return mx.where(reached, mx.arange(reached.shape[0], dtype=mx.int32), 0).max()


def drawn_everywhere(
    draw: Draw, logits: mx.array, history: Sequence[int], draft: Draft
) -> tuple[mx.array, mx.array | None]:
    """What `Sampler.draw` draws behind every row of a tree: tokens [K + 1] and their law [K + 1, V], or None.

    Every row is conditioned on the history and its own path.
    """
    assert draft.parents is not None
    tree, tokens, laws = tree_of(draft.parents), list[mx.array](), list[mx.array]()
    for run in tree.segments:
        path = draft.tokens[mx.array([row - 1 for row in tree.paths[run[-1]][1:]], dtype=mx.int32)]
        chosen, law = draw(logits[run[0] : run[-1] + 1], history, path)
        tokens.append(chosen)
        laws += [] if law is None else [law]
    return mx.concatenate(tokens), mx.concatenate(laws) if laws else None


def straightened(logits: mx.array, draft: Draft, last: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """The path to row `last`, int32 [1], as a chain: logits [H + 1, V], tokens [H], tokens accepted, [1].

    H is the height of the tree; behind the path rows are repeated.
    """
    assert draft.parents is not None
    tree = tree_of(draft.parents)
    table = mx.array([path + path[-1:] * (tree.height + 1 - len(path)) for path in tree.paths])
    rows = table[last[0]]
    depth = mx.array(tree.depths, dtype=mx.int32)[last]
    return logits[rows], draft.tokens[mx.maximum(rows[1:] - 1, 0)], depth
