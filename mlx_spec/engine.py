"""draft -> verify -> accept -> commit.

Invariants, after every round: the target's cache holds all of the history but its last, pending token; no
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
    Decision,
    Draft,
    Drafter,
    DraftLengthPolicy,
    Features,
    Round,
    Sampler,
    Target,
)

PREFILL_STEP = 1024  # prompt tokens in one forward pass
CLEAR_EVERY = 256  # rounds; block lengths vary, so freed buffers of many sizes pile up
PATIENCE = 2  # rounds without a draft, after which plain decoding looks ahead although one is wanted
CERTAIN = 2**20  # the int32 that stands for a probability of 1 in what is read from the device


def generate(
    target: Target,
    drafters: Sequence[Drafter],
    policy: DraftLengthPolicy,
    sampler: Sampler,
    prompt: list[int],
    *,
    max_tokens: int,
    stop: Collection[int] = (),
) -> Generator[Round, None, None]:
    """Yield rounds of tokens with the law of plain decoding, token for token where the law leaves no choice.

    The policy chooses among the drafters by index; there may be none. The target may already hold a prefix
    of the prompt. A stop token is emitted and ends the last round. Closing the generator is safe at every
    yield. Raises InvalidValue for an empty prompt.
    """
    if not prompt:
        raise InvalidValue("the prompt is empty: give at least one token")
    sequence = _Sequence(target, drafters, policy, sampler, list(prompt), frozenset(stop), max_tokens)
    try:
        for _ in prefill(target, drafters, sequence.history):
            pass
        policy.begin()
        while sequence.room > 0:
            yield sequence.next()
    finally:
        sequence.close()


def prefill(target: Target, drafters: Sequence[Drafter], prompt: list[int]) -> Iterator[int]:
    """Write what the target lacks of a prompt, all but its last token, in steps.

    Yields the tokens written so far after each step. What is left when it is closed, `generate` writes.
    """
    end = len(prompt) - 1
    for low in range(target.size, end, PREFILL_STEP):
        high = min(low + PREFILL_STEP, end)
        features = target.prefill(prompt[low:high])
        for drafter in drafters:
            drafter.observe(prompt[: high + 1], features)
        yield high
    mx.clear_cache()


@dataclass(frozen=True)
class _Found:
    """What a drafter drafted and the policy left of it."""

    drafter: int
    proposed: int
    draft: Draft
    confidence: tuple[float, ...] = ()


@dataclass(frozen=True)
class _Ahead:
    """A token drawn after the pending one, whose row is on trial. Not yet read."""

    token: mx.array  # [1] int32
    logits: mx.array  # [1, V], what it was drawn from


@dataclass
class _Sequence:
    target: Target
    drafters: Sequence[Drafter]
    policy: DraftLengthPolicy
    sampler: Sampler
    history: list[int]
    stop: frozenset[int]
    room: int  # tokens that may still be emitted; 0 behind a stop token
    ahead: _Ahead | None = None
    rounds: int = 0
    misses: int = 0  # rounds in a row in which a draft was wanted and no drafter had one

    def next(self) -> Round:
        """The next round. A token that is already on its way is emitted before anything is drafted."""
        decision = self.policy.decide(self.history)
        start = time.perf_counter()
        most = self.room - 1
        wanted = [c if c.limit <= most else replace(c, limit=most) for c in decision.choices if most]
        round = self._round(wanted, decision)
        stopped = round.tokens[-1] in self.stop
        self.room = 0 if stopped else self.room - len(round.tokens)
        if self.room == 0:
            self.close()
        self.rounds += 1
        if self.rounds % CLEAR_EVERY == 0:
            mx.clear_cache()
        done = replace(
            round,
            seconds=time.perf_counter() - start,
            reason=decision.reason,
            finish_reason="stop" if stopped else None if self.room else "length",
            plain_seconds=decision.plain_seconds,
        )
        self.policy.observe(done)
        return done

    def _round(self, wanted: list[Choice], decision: Decision) -> Round:
        shadow, unlikely = decision.shadow, decision.unlikely
        found, ahead = None, self.ahead is not None
        if wanted and (not ahead or unlikely or self.misses >= PATIENCE):
            found = self.draft(wanted)
            self.misses = 0 if found else self.misses + 1
        if found and not ahead and found.draft.tokens.size:
            return self.verify(found)
        # What is on its way must land before something can be drafted.
        waits = bool(wanted) and not unlikely and self.misses < PATIENCE
        land = bool(found) or waits
        probe = found if found and found.draft.tokens.size else None  # what lands tells of it, too
        if shadow is not None and not wanted:
            probe = self.draft([Choice(shadow, 1)])
        go_on = not land and self.room > 1
        round = self.plain(look_ahead=go_on, probe=probe, certainty=decision.certainty)
        if found is None:
            return round
        return replace(
            round,
            drafter=found.drafter,
            proposed=found.proposed,
            confidence=found.confidence or round.confidence,
        )

    def draft(self, wanted: list[Choice]) -> _Found | None:
        """What the first drafter that has something to draft drafted, cut as the policy will have it."""
        for choice in wanted:
            draft = self.drafters[choice.drafter].draft(self.history, choice.limit, self.sampler.drafting)
            proposed = draft.tokens.size
            if not choice.selective or draft.confidence is None:
                found = _Found(choice.drafter, proposed, draft)
            else:
                confidence = tuple(c / CERTAIN for c in _read(_packed(draft.confidence)))
                keep = self.policy.cut(choice.drafter, confidence)
                probs = None if draft.probs is None else draft.probs[:keep]
                found = _Found(choice.drafter, proposed, Draft(draft.tokens[:keep], probs), confidence)
            if proposed:
                return found
        return None

    def verify(self, found: _Found) -> Round:
        """Judge a draft in one pass of the target."""
        if found.draft.parents is not None:
            return self.verify_tree(found, tree_of(found.draft.parents))
        draft = found.draft
        pending = mx.array(self.history[-1:], dtype=mx.int32)
        logits = self.target.verify(mx.concatenate([pending, draft.tokens]))
        verdict = self.sampler.verify(logits, self.history, draft)
        accepted, last, *drafted = _read(mx.concatenate([verdict, draft.tokens]))
        tokens = self._until_stop([*drafted[:accepted], last])
        self._observe(tokens, self.target.commit(len(tokens)))
        return Round(
            tokens,
            draft.tokens.size,
            min(accepted, len(tokens)),
            drafter=found.drafter,
            proposed=found.proposed,
            confidence=found.confidence,
        )

    def verify_tree(self, found: _Found, tree: Tree) -> Round:
        """Judge a tree of draft tokens in one pass of the target."""
        draft = found.draft
        pending = mx.array(self.history[-1:], dtype=mx.int32)
        logits = self.target.verify_tree(mx.concatenate([pending, draft.tokens]), tree.parents)
        verdict = self.sampler.verify_tree(logits, self.history, draft)
        row, last, *drafted = _read(mx.concatenate([verdict, draft.tokens]))
        path = tree.paths[row]
        tokens = self._until_stop([*(drafted[row - 1] for row in path[1:]), last])
        self._observe(tokens, self.target.commit_path(path[: len(tokens)]))
        accepted = path[1 : len(tokens) + 1]
        return Round(
            tokens,
            tree.height,
            len(accepted),
            drafter=found.drafter,
            proposed=found.proposed,
            nodes=draft.tokens.size,
            ranks=tuple(tree.ranks[row] for row in accepted),
        )

    def plain(self, *, look_ahead: bool, probe: _Found | None, certainty: bool) -> Round:
        """One token without a draft; with `look_ahead` the next one is already on its way.

        A probe is a draft that is not verified: its first token is compared with the one that comes.
        """
        none = mx.array([], dtype=mx.int32)
        ahead = self.ahead or self._advance(mx.array(self.history[-1:], dtype=mx.int32), none)
        features = self.target.commit(1)
        self.ahead, said = None, ahead.token
        if probe is not None:
            agreement = self.sampler.agreement(ahead.logits, self.history, ahead.token, probe.draft)
            confidence = agreement[:0] if probe.draft.confidence is None else probe.draft.confidence[:1]
            said = mx.concatenate([said, _packed(agreement), _packed(confidence)])
        elif certainty:
            said = mx.concatenate([said, _packed(_highest(ahead.logits))])
        if said is not ahead.token:
            mx.async_eval(said)  # apart: what is evaluated together is there together
        if look_ahead:
            self.ahead = self._advance(ahead.token, ahead.token)
            mx.async_eval(ahead.token, self.ahead.token)
        token, *told = _read(said)
        chances = tuple(c / CERTAIN for c in told)
        round = Round([token], 0, 0, certainty=chances[0] if chances else None)
        if probe is not None:
            round = Round([token], 0, 0, drafter=probe.drafter, agreement=chances[0], confidence=chances[1:])
        self._observe(round.tokens, features)
        return round

    def close(self) -> None:
        """Drop what is on trial."""
        self.ahead = None
        self.target.commit(0)

    def _advance(self, token: mx.array, drafted: mx.array) -> _Ahead:
        logits = self.target.verify(token)
        return _Ahead(self.sampler.draw(logits, self.history, drafted)[0], logits)

    def _observe(self, tokens: list[int], features: Features) -> None:
        self.history += tokens
        for drafter in self.drafters:
            drafter.observe(self.history, features)

    def _until_stop(self, tokens: list[int]) -> list[int]:
        return next((tokens[: i + 1] for i, token in enumerate(tokens) if token in self.stop), tokens)


def _highest(logits: mx.array) -> mx.array:
    """The highest probability [1] of logits [1, V]."""
    logits = logits.astype(mx.float32)
    return mx.exp(logits.max(axis=-1) - mx.logsumexp(logits, axis=-1))


def _packed(probabilities: mx.array) -> mx.array:
    """Probabilities as int32, to be read together with tokens."""
    return (probabilities.astype(mx.float32) * CERTAIN).astype(mx.int32)


def _read(array: mx.array) -> list[int]:
    """The one device-to-host copy of a round; a selective round makes a second."""
    return cast(list[int], array.tolist())
