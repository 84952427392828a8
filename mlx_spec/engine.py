"""The decode loop: draft -> verify -> accept -> commit.

Invariants after every round: the target's cache holds all of the history but its last, pending token; no
cache holds a token that was not emitted; at least one token was emitted.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import cast

import mlx.core as mx

from mlx_spec.errors import InvalidValue
from mlx_spec.model.tree import Tree, tree_of
from mlx_spec.types import (
    Choice,
    Draft,
    Drafter,
    DraftLengthPolicy,
    Features,
    RequestDrafter,
    Round,
    Sampler,
    Target,
)

PREFILL_STEP = 1024  # prompt tokens in one forward pass: bounds the memory of its activations
CLEAR_INTERVAL = 256  # rounds; block lengths vary, so freed buffers of many sizes pile up
MAX_MISSES = 2  # rounds without the wanted draft, after which plain decoding queues tokens ahead again


def generate(
    target: Target,
    drafters: Sequence[Drafter],
    policy: DraftLengthPolicy,
    sampler: Sampler,
    prompt: list[int],
    *,
    max_tokens: int,
    stop: Collection[int] = (),
    request_drafters: Sequence[RequestDrafter] = (),
) -> Generator[Round, None, None]:
    """Yield rounds of tokens with the distribution of plain decoding.

    Where that leaves no choice (greedy, or a seed), the tokens are those of plain decoding. The policy
    chooses among the drafters by index, those of the request last. The target may already hold a prefix of
    the prompt. A stop token is emitted and ends the last round. Closing the generator is safe at every
    yield. Raises InvalidValue for an empty prompt.
    """
    if not prompt:
        raise InvalidValue("the prompt is empty: give at least one token")
    drafters = (*drafters, *(extra.drafter for extra in request_drafters))
    sequence = _Sequence(target, drafters, policy, sampler, list(prompt), frozenset(stop), max_tokens)
    try:
        for _ in prefill(target, drafters, sequence.history):
            pass
        policy.begin(request_drafters)
        while sequence.remaining > 0:
            yield sequence.step()
    finally:
        sequence.close()


def prefill(target: Target, drafters: Sequence[Drafter], prompt: list[int]) -> Iterator[int]:
    """Write what the target lacks of a prompt, all but its last token, in steps.

    Yields the number of tokens written after each step. If it is closed early, `generate` writes the rest.
    """
    end = len(prompt) - 1
    for low in range(target.size, end, PREFILL_STEP):
        high = min(low + PREFILL_STEP, end)
        features = target.prefill(prompt[low:high])
        for drafter in drafters:
            drafter.observe(prompt[: high + 1], features)
        yield high
    mx.clear_cache()


@dataclass
class _Sequence:
    target: Target
    drafters: Sequence[Drafter]
    policy: DraftLengthPolicy
    sampler: Sampler
    history: list[int]
    stop: frozenset[int]
    remaining: int  # tokens that may still be emitted; 0 after a stop token
    queued: mx.array | None = None  # [1] int32: the token after the pending one, not yet read
    rounds: int = 0
    misses: int = 0  # rounds in a row in which a draft was wanted and no drafter had one

    def step(self) -> Round:
        """Decode one round."""
        decision = self.policy.decide(self.history)
        start = time.perf_counter()
        most = self.remaining - 1
        wanted = [c if c.limit <= most else replace(c, limit=most) for c in decision.choices if most]
        round = self._round(wanted)

        stopped = round.tokens[-1] in self.stop
        self.remaining = 0 if stopped else self.remaining - len(round.tokens)
        if self.remaining == 0:
            self.close()
        self.rounds += 1
        if self.rounds % CLEAR_INTERVAL == 0:
            mx.clear_cache()
        done = replace(
            round,
            seconds=time.perf_counter() - start,
            reason=decision.reason,
            finish_reason="stop" if stopped else None if self.remaining else "length",
            plain_seconds=decision.plain_seconds,
        )
        self.policy.observe(done)
        return done

    def _round(self, wanted: list[Choice]) -> Round:
        """Verify a draft, or decode one token. A queued token is emitted before anything is verified."""
        patient = self.misses < MAX_MISSES
        if not wanted or (self.queued is not None and patient):
            return self.plain(queue_next=not wanted)
        found = self.draft(wanted)
        if found is None:
            self.misses += 1
            return self.plain(queue_next=self.misses >= MAX_MISSES)
        self.misses = 0
        if self.queued is not None:
            return self.plain(queue_next=False)
        return self.verify(*found)

    def draft(self, wanted: list[Choice]) -> tuple[int, Draft] | None:
        """Return the index and the draft of the first drafter that has one."""
        for choice in wanted:
            draft = self.drafters[choice.drafter].draft(self.history, choice.limit, self.sampler.drafting)
            if draft.tokens.size:
                return choice.drafter, draft
        return None

    def verify(self, drafter: int, draft: Draft) -> Round:
        """Verify a chain of draft tokens in one pass of the target."""
        if draft.parents is not None:
            return self.verify_tree(drafter, draft, tree_of(draft.parents))
        pending = mx.array(self.history[-1:], dtype=mx.int32)
        logits = self.target.verify(mx.concatenate([pending, draft.tokens]))
        verdict = self.sampler.verify(logits, self.history, draft)
        accepted, last, *drafted = _read(mx.concatenate([verdict, draft.tokens]))
        tokens = self._until_stop([*drafted[:accepted], last])
        self._commit(tokens, self.target.commit(len(tokens)))
        return Round(tokens, len(drafted), min(accepted, len(tokens)), "draft", drafter)

    def verify_tree(self, drafter: int, draft: Draft, tree: Tree) -> Round:
        """Verify a tree of draft tokens in one pass of the target."""
        pending = mx.array(self.history[-1:], dtype=mx.int32)
        logits = self.target.verify_tree(mx.concatenate([pending, draft.tokens]), tree.parents)
        verdict = self.sampler.verify_tree(logits, self.history, draft)
        row, last, *drafted = _read(mx.concatenate([verdict, draft.tokens]))
        path = tree.paths[row]
        tokens = self._until_stop([*(drafted[row - 1] for row in path[1:]), last])
        self._commit(tokens, self.target.commit_path(path[: len(tokens)]))
        accepted = path[1 : len(tokens) + 1]
        ranks = tuple(tree.ranks[row] for row in accepted)
        return Round(tokens, tree.height, len(accepted), "draft", drafter, nodes=len(drafted), ranks=ranks)

    def plain(self, *, queue_next: bool) -> Round:
        """Decode one token without a draft. With `queue_next` the device begins the next one meanwhile."""
        queue_next = queue_next and self.remaining > 1
        none = mx.array([], dtype=mx.int32)
        token = self.queued if self.queued is not None else self._queue(mx.array(self.history[-1:]), none)
        features = self.target.commit(1)
        self.queued = None
        if queue_next:
            self.queued = self._queue(token, token)
            mx.async_eval(token, self.queued)
        tokens = _read(token)
        self._commit(tokens, features)
        return Round(tokens, 0, 0, "plain" if queue_next else "landed")

    def close(self) -> None:
        """Drop uncommitted rows."""
        self.queued = None
        self.target.commit(0)

    def _queue(self, token: mx.array, drafted: mx.array) -> mx.array:
        logits = self.target.verify(token.astype(mx.int32))
        return self.sampler.draw(logits, self.history, drafted)[0]

    def _commit(self, tokens: list[int], features: Features) -> None:
        self.history += tokens
        for drafter in self.drafters:
            drafter.observe(self.history, features)

    def _until_stop(self, tokens: list[int]) -> list[int]:
        return next((tokens[: i + 1] for i, token in enumerate(tokens) if token in self.stop), tokens)


def _read(array: mx.array) -> list[int]:
    """Copy to the host: the one copy of a round."""
    return cast(list[int], array.tolist())
