"""The loss of a chain of drafts, unrolled as it is used: every step reads the output of the one before.

A row is one position of an answer where a round could begin. Its first step reads the target's hidden state
there and the token after it; all steps attend to the K/V up to that position. They run at the position of the
pending token, as in `drafters/gemma4.py`, so all rows of a batch take a step in one pass.

The loss is the KL divergence from the target's distribution, summed over the steps with falling weights. It
is taken over the tokens that the drafter knows. In the experiments of FastMTP (arXiv:2509.18362) and others,
unrolling raised the accepted length by a fifth, and a distribution taught more than the token drawn from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx

from mlx_spec.drafters.gemma4 import SLIDING, AssistantNetwork
from mlx_spec.types import KVRows, TargetParts

from .answers import RecordedAnswer

STEP_WEIGHT = 0.8  # of a step against the one before it: a later draft counts only if all before are accepted

Embed = Callable[[mx.array], mx.array]


@dataclass(frozen=True)
class TrainingRows:
    """A batch of B answers, padded to A rows and S positions of K/V."""

    tokens: mx.array  # [B, A] int32: the pending token of each row
    hidden: mx.array  # [B, A, D]
    logsumexp: mx.array  # [B, A]
    shared: Mapping[str, KVRows]  # [B, H, S, Dk]; the mask [B, 1, A, S] says what each row sees
    positions: mx.array  # [B * A]: of the pending token
    real: mx.array  # bool [B, A]: not padding

    @property
    def size(self) -> int:
        """Return the number of rows, padding included."""
        return self.positions.size


def batch_of(answers: Sequence[RecordedAnswer], window: int, dtype: mx.Dtype) -> TrainingRows:
    """Return the rows of several answers. `window` limits what rows see of sliding K/V."""
    sizes = [answer.tokens.size for answer in answers]
    starts = [answer.prompt_tokens for answer in answers]
    A, S = max(sizes), max(start + size - 1 for start, size in zip(starts, sizes, strict=True))

    def pad(array: mx.array, axis: int, length: int) -> mx.array:
        widths = [(0, 0)] * array.ndim
        widths[axis] = (0, length - array.shape[axis])
        return mx.pad(array, widths)

    places = mx.array(starts)[:, None] + mx.arange(A)  # of the pending token of each row, [B, A]
    distance = places[..., None] - mx.arange(S)  # to each row of K/V
    masks = {SLIDING: (distance > 0) & (distance < window)}
    shared = {}
    for kind in answers[0].shared:
        mask = masks.get(kind, distance > 0)[:, None]
        keys = mx.concatenate([pad(answer.shared[kind].keys, 2, S) for answer in answers])
        values = mx.concatenate([pad(answer.shared[kind].values, 2, S) for answer in answers])
        shared[kind] = KVRows(keys.astype(dtype), values.astype(dtype), mask)
    return TrainingRows(
        mx.stack([pad(answer.tokens, 0, A) for answer in answers]),
        mx.stack([pad(answer.hidden, 0, A) for answer in answers]).astype(dtype),
        mx.stack([pad(answer.logsumexp, 0, A) for answer in answers]),
        shared,
        places.reshape(-1),
        mx.arange(A) < mx.array(sizes)[:, None],
    )


def take_step(
    network: AssistantNetwork, embedded: mx.array, hidden: mx.array, rows: TrainingRows
) -> tuple[mx.array, mx.array]:
    """Return the next hidden state [N, D] and the final norm [N, h] for two [N, D], N = B * A."""
    x = network.pre_projection(mx.concatenate([embedded, hidden], axis=-1))
    B, A = rows.real.shape
    for layer in network.model.layers:
        queries = layer.queries(x, rows.positions)
        shared = rows.shared[layer.attention_type]
        attended = mx.fast.scaled_dot_product_attention(
            queries.reshape(B, A, *queries.shape[1::2]).swapaxes(1, 2),
            shared.keys,
            shared.values,
            scale=1.0,
            mask=shared.mask,
        )
        x = layer.finish(x, attended.swapaxes(1, 2).reshape(B * A, -1))
    normed = network.model.norm(x)
    return network.post_projection(normed), normed


@dataclass(frozen=True)
class Step:
    """One step of a chain over all rows that have a token so far ahead."""

    logprobs: mx.array  # of the drafter, [B, A - k, W]
    target: mx.array  # the target's probabilities of the same tokens, [B, A - k, W]
    real: mx.array  # bool [B, A - k]


@dataclass(frozen=True)
class Heads:
    """The tokens that a drafter is trained on, and what scores them."""

    ids: mx.array  # [W] int32
    drafter: Callable[[AssistantNetwork, mx.array, mx.array], mx.array]  # hidden, final norm -> [.., W]
    target: Callable[[mx.array], mx.array]  # hidden -> [.., W]


def heads_of(network: AssistantNetwork, parts: TargetParts, ids: mx.array) -> Heads:
    """Return what scores the tokens `ids`: for the drafter the target's head, or a table of its own."""
    score = parts.select(ids)
    if "draft_ids" in network:
        return Heads(ids, lambda network, hidden, normed: score(hidden), score)
    places = network.places(ids)
    return Heads(
        ids, lambda network, hidden, normed: normed @ network.model.embed_tokens.weight[places].T, score
    )


def unroll(
    network: AssistantNetwork, rows: TrainingRows, depth: int, heads: Heads, embed: Embed
) -> list[Step]:
    """Take `depth` steps from every row."""
    B, A = rows.real.shape
    target = mx.exp(heads.target(rows.hidden).astype(mx.float32) - rows.logsumexp[..., None])
    target = mx.stop_gradient(target)
    hidden, steps = rows.hidden.reshape(B * A, -1), []
    for k in range(1, depth + 1):
        tokens = mx.pad(rows.tokens[:, k - 1 :], [(0, 0), (0, k - 1)]).reshape(-1)
        hidden, normed = take_step(network, embed(tokens), hidden, rows)
        logits = heads.drafter(network, hidden, normed).reshape(B, A, -1)[:, : A - k].astype(mx.float32)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        steps.append(Step(logprobs, target[:, k:], rows.real[:, k:]))
    return steps


def loss_of(steps: Sequence[Step]) -> mx.array:
    """Return the weighted cross entropy of all steps, in nats a row.

    It differs from the KL divergence by the target's entropy, which no weight changes.
    """
    total, weights = mx.array(0.0), 0.0
    for k, step in enumerate(steps):
        entropy = -(step.target * step.logprobs).sum(axis=-1)
        mean = mx.where(step.real, entropy, 0).sum() / mx.maximum(step.real.sum(), 1)
        total = total + STEP_WEIGHT**k * mean
        weights += STEP_WEIGHT**k
    return total / weights


def round_tokens(
    steps: Sequence[Step], rows: TrainingRows, ids: mx.array
) -> tuple[mx.array, mx.array, mx.array]:
    """Return the tokens of a round from each row, [B, A - K]: greedy, and expected when sampled.

    Greedy figures hold for greedy answers, where a draft is accepted if it is the next token. Sampled ones
    take the draft tokens before as those of the answer. The third result says which rows are no padding.
    """
    K, A = len(steps), rows.real.shape[1]
    greedy = sampled = mx.ones(rows.real[:, K:].shape)
    results = [greedy, sampled]
    for k, step in enumerate(steps, 1):
        right = ids[mx.argmax(step.logprobs, axis=-1)] == rows.tokens[:, k:]
        overlap = mx.minimum(mx.exp(step.logprobs), step.target).sum(axis=-1)
        greedy, sampled = greedy * right[:, : A - K], sampled * overlap[:, : A - K]
        results = [results[0] + greedy, results[1] + sampled]
    return results[0], results[1], rows.real[:, K:]
