"""The loss of a chain of drafts: cross entropy with the target's distribution, on a part of the vocabulary.

On a CPU, exponentials and products with the head take half of a training step. So the loss only uses the
tokens that the target finds likely somewhere in the batch, and a random sample of the others, each of which
stands for several. The drafter's sum over its vocabulary is then right on average (importance sampling, as in
Jean et al., arXiv:1412.2007). The loss and its gradient share one exponential for each score.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import mlx.core as mx

from mlx_spec.sampling.softmax import probabilities, total, weights

Loss = Callable[[mx.array, mx.array], tuple[mx.array, mx.array]]


@dataclass(frozen=True)
class TokenSample:
    """The C tokens of a loss, as places in the drafter's vocabulary of W."""

    places: mx.array  # [C] int32
    log_weights: mx.array  # [C] float32: the log of how many tokens each stands for


def sample_tokens(
    target: mx.array, key: mx.array, *, likely: int = 1536, sampled: int = 512
) -> TokenSample | None:
    """Choose tokens by the target's probabilities [.., W]. Return None, for all tokens, if W is small.

    In a batch of 512 rows, 1,536 tokens have nearly all of the target's mass.
    """
    width = target.shape[-1]
    if likely + sampled >= width:
        return None
    order = mx.argsort(-target.reshape(-1, width).sum(axis=0))
    others = mx.random.permutation(order[likely:], key=key)[:sampled]
    stands_for = math.log((width - likely) / sampled)
    log_weights = mx.concatenate([mx.zeros(likely), mx.full(sampled, stands_for)])
    return TokenSample(mx.concatenate([order[:likely], others]), log_weights)


@dataclass(frozen=True)
class Step:
    """Step k of a chain, for all rows with a token k places further."""

    logits: mx.array  # of the drafter, [B, A - k, C] float32
    target: mx.array  # the target's probabilities of the same tokens, [B, A - k, C]
    real: mx.array  # bool [B, A - k]


def loss_of(steps: Sequence[Step]) -> mx.array:
    """Return the weighted mean cross entropy of all steps, in nats a row.

    It differs from the KL divergence by the target's entropy, which does not depend on the weights.
    """
    loss, weight, weight_sum = mx.array(0.0), 1.0, 0.0
    for step in steps:
        entropy, _ = cast(Loss, _cross_entropy)(step.logits, step.target)
        mean = mx.where(step.real, entropy, 0).sum() / mx.maximum(step.real.sum(), 1)
        loss, weight_sum = loss + weight * mean, weight_sum + weight
        weight *= 0.8  # a later draft counts only if all before are accepted
    return loss / weight_sum


def round_tokens(steps: Sequence[Step], tokens: mx.array, ids: mx.array) -> tuple[mx.array, mx.array]:
    """Return the tokens that a round from each row would emit, [B, A - K]: greedy, and expected if sampled.

    The steps score all tokens; `tokens` [B, A] are the pending ones. Greedy counts hold for greedy answers,
    in which a draft token is accepted if it is the next token. Sampled ones take earlier drafts from the
    answer.
    """
    K, A = len(steps), tokens.shape[1]
    greedy = sampled = mx.ones((tokens.shape[0], A - K))
    results = greedy, sampled
    for k, step in enumerate(steps, 1):
        right = ids[mx.argmax(step.logits, axis=-1)] == tokens[:, k:]
        overlap = mx.minimum(probabilities(step.logits), step.target).sum(axis=-1)
        greedy, sampled = greedy * right[:, : A - K], sampled * overlap[:, : A - K]
        results = results[0] + greedy, results[1] + sampled
    return results


def _entropy_and_softmax(logits: mx.array, target: mx.array) -> tuple[mx.array, mx.array]:
    """Return the cross entropy [..] of logits [.., C] with probabilities [.., C], and the softmax [.., C]."""
    weighed = weights(logits)
    sums = total(weighed)
    log_sum = logits.max(axis=-1) + mx.log(sums[..., 0])
    entropy = log_sum * target.sum(axis=-1) - (target * logits).sum(axis=-1)
    return entropy, weighed / sums


_cross_entropy = mx.custom_function(_entropy_and_softmax)


@_cross_entropy.vjp
def _entropy_gradient(
    primals: tuple[mx.array, mx.array],
    cotangents: tuple[mx.array, mx.array],
    outputs: tuple[mx.array, mx.array],
) -> tuple[mx.array, mx.array]:
    """Return the gradients of the logits and, as zeros, of the target's probabilities."""
    _, target = primals
    known = target.sum(axis=-1, keepdims=True)  # less than 1: the sample does not have all tokens
    gradient = cotangents[0][..., None] * (outputs[1] * known - target)
    return gradient, mx.zeros_like(target)
