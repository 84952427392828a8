"""Blocks of a pass. A block is the pending token of a sequence and its draft, a chain or a tree.

These functions need neither a target nor a sampler. They limit drafts, accept the rows of a block, take the
chain out of a tree, and make rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate

import mlx.core as mx

from mlx_spec.model.layer_caches import MAX_UNCOMMITTED
from mlx_spec.model.tree import tree_of
from mlx_spec.types import Decision, Draft, Round

# The accepted rows of a block, the pending token's row first, and the new tokens.
Accepted = tuple[Sequence[int], list[int]]


def limited(decision: Decision, most: int) -> Decision:
    """Return the decision with all drafts limited to `most` tokens."""
    if all(choice.limit <= most for choice in decision.choices):
        return decision
    choices = [replace(choice, limit=min(choice.limit, most)) for choice in decision.choices if most]
    return replace(decision, choices=tuple(choices))


def rows_of(drafts: Sequence[Draft], logits: mx.array) -> list[mx.array]:
    """Return the rows of each block, [K + 1, V], of the logits [R, V] of a pass."""
    ends = accumulate(1 + draft.tokens.size for draft in drafts)
    return [logits[end - 1 - draft.tokens.size : end] for draft, end in zip(drafts, ends, strict=True)]


def matched(chosen: Sequence[int], drafted: Sequence[int]) -> tuple[int, int]:
    """Accept draft tokens [K] while they equal the chosen ones [K + 1]. Return their number, and the next."""
    pairs = enumerate(zip(chosen, drafted, strict=False))
    accepted = next((i for i, (wanted, token) in pairs if wanted != token), len(drafted))
    return accepted, chosen[accepted]


def round_of(draft: Draft, doubt: str | None, rows: Sequence[int], tokens: list[int]) -> Round:
    """Return the round of a draft. `rows` are its accepted rows, the pending token's first."""
    if draft.source is None:
        return Round(tokens, 0, 0, "drained", doubt=doubt)
    size, accepted = draft.tokens.size, rows[1 : len(tokens) + 1]
    of_draft = partial(
        Round, source=draft.source, drafter_index=draft.drafter_index, ahead=draft.ahead, doubt=doubt
    )
    if draft.parents is None:
        return of_draft(tokens, size, len(accepted), "draft")
    tree = tree_of(draft.parents)
    ranks = tuple(tree.ranks[row] for row in accepted)
    return of_draft(tokens, tree.height, len(accepted), "draft", nodes=size, ranks=ranks)


def chain_of(draft: Draft) -> Draft:
    """Return a chain as it is, and the likeliest path of a tree, which is exact without probabilities."""
    if draft.parents is None:
        return draft
    length = len(tree_of(draft.parents).segments[0]) - 1
    return Draft(draft.tokens[:length], source=draft.source, drafter_index=draft.drafter_index)


def checked(draft: Draft, limit: int, vocab_size: int) -> Draft:
    """Return a draft as it is. Raises ValueError if it has not the form of one of at most `limit` tokens."""
    tokens, probs, parents = draft.tokens, draft.probs, draft.parents
    if tokens.ndim != 1 or not mx.issubdtype(tokens.dtype, mx.integer):
        raise ValueError(f"a draft has tokens {list(tokens.shape)} of {tokens.dtype}, not a list of integers")
    K, most = tokens.size, limit if parents is None else MAX_UNCOMMITTED - 1
    if most < K:
        raise ValueError(f"a draft has {K} tokens, at most {most} were asked for")
    if probs is not None and K and probs.shape != (K, vocab_size):
        raise ValueError(f"a draft has probabilities {list(probs.shape)}, not [{K}, {vocab_size}]")
    if parents is not None and len(parents) != K:
        raise ValueError(f"a draft has {len(parents)} parents of {K} tokens")
    return draft


def bounded(draft: Draft, vocab_size: int) -> Draft:
    """Return a draft whose tokens can be embedded: MLX reads other memory for those outside [0, V)."""
    if not draft.tokens.size:
        return draft
    tokens = mx.clip(draft.tokens.astype(mx.int32), 0, vocab_size - 1)
    return replace(draft, tokens=tokens, drawn=draft.tokens)


def strays(drawn: Sequence[int], vocab_size: int) -> bool:
    """Return True if one of the tokens is not in the vocabulary."""
    return any(not 0 <= token < vocab_size for token in drawn)
