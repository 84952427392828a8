"""The decode loop: draft -> verify -> accept -> commit, for the sequences of a group in one pass.

Most groups have one sequence. Invariants after every round: the target's cache holds all of a history but its
last, pending token; no cache holds a token that was not emitted; every sequence emitted at least one token;
what a sequence emits does not depend on the others.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal, Protocol, TypeVar, cast

import mlx.core as mx

from mlx_spec.errors import InvalidValue
from mlx_spec.model.layer_caches import lanes_without
from mlx_spec.model.target import LMTarget
from mlx_spec.model.tree import tree_of
from mlx_spec.types import (
    Choice,
    Decision,
    Draft,
    Drafter,
    DraftLengthPolicy,
    DraftRequest,
    Features,
    GroupPolicy,
    Reason,
    RequestDrafter,
    Round,
    Sampler,
    no_draft,
)

PREFILL_STEP = 1024  # prompt tokens in one forward pass: bounds the memory of its activations
CLEAR_INTERVAL = 256  # rounds; block lengths vary, so freed buffers of many sizes pile up
MAX_MISSES = 2  # rounds without the wanted draft, after which plain decoding queues tokens ahead again

Result = TypeVar("Result")


def generate(
    target: LMTarget,
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
    return decode(
        RunningSequence(
            target, drafters, policy, sampler, prompt, max_tokens, frozenset(stop), request_drafters
        )
    )


def decode(sequence: RunningSequence) -> Generator[Round, None, None]:
    """Yield the rounds of one sequence, as `generate` does."""
    group = Group([sequence], Alone(sequence.target))
    try:
        for _ in sequence.prefill():
            pass
        while sequence.remaining > 0:
            (result,) = group.step()
            if isinstance(result, Exception):
                raise result
            if sequence.remaining == 0:
                group.close()
            yield result
    finally:
        group.close()


def prefill(
    target: LMTarget,
    drafters: Sequence[Drafter],
    prompt: list[int],
    step: Callable[[], int] = lambda: PREFILL_STEP,
) -> Iterator[int]:
    """Write what the target lacks of a prompt, all but its last token, in steps of so many tokens.

    Yields the number of tokens written after each step. If it is closed early, `generate` writes the rest.
    """
    end = len(prompt) - 1
    while (low := target.size) < end:
        high = min(low + step(), end)
        features = target.prefill(prompt[low:high])
        for drafter in drafters:
            drafter.observe(prompt[: high + 1], features)
        yield high
    mx.clear_cache()


class RunningSequence:
    """One sequence: its history and everything that decides how it goes on."""

    def __init__(
        self,
        target: LMTarget,
        drafters: Sequence[Drafter],
        policy: DraftLengthPolicy,
        sampler: Sampler,
        prompt: Sequence[int],
        max_tokens: int,
        stop: frozenset[int] = frozenset(),
        request_drafters: Sequence[RequestDrafter] = (),
    ) -> None:
        if not prompt:
            raise InvalidValue("the prompt is empty: give at least one token")
        self.target, self.policy, self.sampler = target, policy, sampler
        self.history = list(prompt)
        self.remaining = max_tokens  # tokens that may still be emitted; 0 after a stop token
        self.error: Exception | None = None  # ends this sequence and no other
        self._drafters = (*drafters, *(extra.drafter for extra in request_drafters))
        self._request_drafters = request_drafters
        self._stop = stop

    @property
    def unread(self) -> int:
        """Return the tokens of the prompt that the target lacks."""
        return len(self.history) - 1 - self.target.size

    def prefill(self, step: Callable[[], int] = lambda: PREFILL_STEP) -> Iterator[int]:
        """Write the prompt in steps of so many tokens, then begin the answer."""
        yield from prefill(self.target, self._drafters, self.history, step)
        self.policy.begin(self._request_drafters)

    def attempt(self, action: Callable[[], Result], otherwise: Result) -> Result:
        """Return the result of an action; `otherwise` if it fails or an earlier one did."""
        if self.error is None:
            try:
                return action()
            except Exception as error:  # whatever it is, the other sequences go on
                self.error = error
        return otherwise

    @property
    def pending(self) -> mx.array:
        """Return the last token of the history, [1] int32."""
        return mx.array(self.history[-1:], dtype=mx.int32)

    def draft(self, choices: Sequence[Choice]) -> tuple[int, Draft] | None:
        """Return the index and the draft of the first drafter that has one."""
        for choice in choices:
            request = self.request(choice)
            draft = request.drafter.draft(request.history, request.limit, request.sampler)
            if draft.tokens.size:
                return choice.drafter, draft
        return None

    def prepare(self, drafter: int, draft: Draft, choices: Sequence[Choice]) -> None:
        """Let a drafter work ahead while its draft is verified, if its choice says so."""
        if any(choice.ahead for choice in choices if choice.drafter == drafter):
            self._drafters[drafter].prepare(self.history, draft, self.sampler.drafting)

    def request(self, choice: Choice) -> DraftRequest:
        """Return the request for the draft of a choice."""
        drafter = self._drafters[choice.drafter]
        return DraftRequest(drafter, self.history, choice.limit, self.sampler.drafting)

    def draw(self, logits: mx.array, drafted: mx.array) -> mx.array:
        """Draw the token after the history and `drafted`, [1] int32."""
        return self.sampler.draw(logits, self.history, drafted)[0]

    def until_stop(self, tokens: list[int]) -> list[int]:
        """Return the tokens up to the first stop token."""
        return next((tokens[: i + 1] for i, token in enumerate(tokens) if token in self._stop), tokens)

    def observe(self, features: Features) -> None:
        """Show the drafters the features of new tokens."""
        for drafter in self._drafters:
            drafter.observe(self.history, features)

    def emit(self, round: Round, features: Features) -> Round:
        """Append the tokens of a round. Return it with what only the sequence knows."""
        position = len(self.history)
        self.history += round.tokens
        self.observe(features)
        stopped = round.tokens[-1] in self._stop
        self.remaining = 0 if stopped else self.remaining - len(round.tokens)
        return replace(
            round,
            finish_reason="stop" if stopped else None if self.remaining else "length",
            logprobs=self.sampler.logprobs(position, round.tokens),
        )


class Passes(Protocol):
    """The targets of a group: one pass writes and verifies blocks of all its sequences."""

    @property
    def takes_drafts(self) -> bool:
        """Return False if a pass takes one token of each sequence only."""

    def verify(self, tokens: mx.array, sizes: Sequence[int]) -> mx.array:
        """Write uncommitted tokens [R], so many of each sequence in turn. Return their logits [R, V]."""

    def commit(self, keep: Sequence[int]) -> Sequence[Features]:
        """Keep the first uncommitted rows of each and drop the others. Return the features of those kept."""


class Alone:
    """The target of one sequence: its passes need no padding, and it can verify trees."""

    takes_drafts = True

    def __init__(self, target: LMTarget) -> None:
        self.target = target

    def verify(self, tokens: mx.array, sizes: Sequence[int]) -> mx.array:
        """Write the tokens of the only sequence."""
        return self.target.verify(tokens)

    def commit(self, keep: Sequence[int]) -> Sequence[Features]:
        """Keep the first rows of the only block."""
        return [self.target.commit(keep[0])]


class Group:
    """Sequences that are decoded round by round, in one pass a round."""

    def __init__(
        self, sequences: list[RunningSequence], passes: Passes, policy: GroupPolicy | None = None
    ) -> None:
        self.sequences = sequences
        self.passes = passes
        self._policy = policy  # of several sequences; if it is None, each decides for itself
        self.queued: mx.array | None = None  # [B] int32: the tokens after the pending ones, not yet read
        self._rounds = 0
        self._misses = 0  # rounds in a row in which a draft was wanted and no drafter had one

    def step(self, *, may_queue: bool = True, may_probe: bool = True) -> list[Round | Exception]:
        """Decode one round of every sequence. Returns it, or the error that ended the sequence.

        Without `may_probe`, several sequences draft only what pays.
        """
        shared, decisions = self._shared_policy, self._decide()
        if shared is not None and not may_probe:
            plain = Decision((), Reason.ACCEPTANCE, decisions[0].plain_seconds)
            decisions = [plain if d.reason is Reason.PROBE else d for d in decisions]
        start = time.perf_counter()
        rounds = self._round(
            [_limited(d, each) for d, each in zip(decisions, self.sequences, strict=True)], may_queue
        )
        seconds = time.perf_counter() - start
        self._rounds += 1
        if self._rounds % CLEAR_INTERVAL == 0:
            mx.clear_cache()
        done: list[Round | Exception] = []
        for sequence, round, decision in zip(self.sequences, rounds, decisions, strict=True):
            round = replace(
                round,
                seconds=seconds,
                reason=decision.reason,
                plain_seconds=decision.plain_seconds,
                company=len(self.sequences),
            )
            if shared is None:
                sequence.attempt(partial(sequence.policy.observe, round), None)
            done.append(sequence.error or round)
        if shared is not None:
            shared.observe([None if isinstance(each, Exception) else each for each in done])
        return done

    def remove(self, index: int) -> None:
        """Remove a sequence; the last one takes its index."""
        if self.queued is not None:
            self.queued = self.queued[mx.array(lanes_without(index, len(self.sequences)), dtype=mx.int32)]
        self.sequences[index] = self.sequences[-1]
        self.sequences.pop()

    def close(self) -> None:
        """Drop uncommitted rows."""
        self.queued = None
        self.passes.commit([0] * len(self.sequences))

    @property
    def _shared_policy(self) -> GroupPolicy | None:
        """Return the policy that decides for all sequences; None if each decides for itself."""
        return self._policy if len(self.sequences) > 1 and self.passes.takes_drafts else None

    def _decide(self) -> list[Decision]:
        if not self.passes.takes_drafts:
            return [Decision((), Reason.RECURRENT)] * len(self.sequences)
        if self._shared_policy is not None:
            policies = [sequence.policy for sequence in self.sequences]
            return self._shared_policy.decide(policies, [sequence.history for sequence in self.sequences])
        plain = Decision((), Reason.NO_DRAFTER)
        return [
            sequence.attempt(partial(sequence.policy.decide, sequence.history), plain)
            for sequence in self.sequences
        ]

    def _round(self, wanted: list[list[Choice]], may_queue: bool) -> list[Round]:
        """Verify drafts, or decode plainly. Queued tokens are emitted before anything is verified."""
        drafting, patient = any(wanted), self._misses < MAX_MISSES
        if not drafting or (self.queued is not None and patient):
            return self._plain(queue_next=may_queue and not drafting)
        found = self._drafts(wanted)
        if not any(found):
            self._misses += 1
            return self._plain(queue_next=may_queue and self._misses >= MAX_MISSES)
        self._misses = 0
        if self.queued is not None:
            return self._plain(queue_next=False)
        if len(found) == 1 and found[0] is not None and found[0][1].parents is not None:
            return [self._verify_tree(*found[0], found[0][1].parents)]
        chains = [None if each is None else (each[0], _chain(each[1])) for each in found]
        # Before the pass: handing it over may hold this thread nearly until it is done.
        for sequence, chain, choices in zip(self.sequences, chains, wanted, strict=True):
            if chain is not None:
                sequence.attempt(partial(sequence.prepare, *chain, choices), None)
        return self._verify(chains)

    def _drafts(self, wanted: Sequence[list[Choice]]) -> list[tuple[int, Draft] | None]:
        """Return the draft of each sequence, and its drafter. One pass may draft the first choices of all."""
        found: list[tuple[int, Draft] | None] = [None] * len(wanted)
        choices = [list(each) for each in wanted]
        eager = [i for i, each in enumerate(wanted) if each]
        requests = [self.sequences[i].request(wanted[i][0]) for i in eager]
        kinds = {(wanted[i][0].drafter, type(r.drafter)) for i, r in zip(eager, requests, strict=True)}
        if len(kinds) == 1 < len(eager):
            try:
                drafts = requests[0].drafter.draft_batch(requests)
            except Exception:  # each by itself finds out whose it is
                drafts = []
            for i, draft in zip(eager, drafts, strict=False):
                first = choices[i].pop(0)
                found[i] = (first.drafter, draft) if draft.tokens.size else None
        for i, sequence in enumerate(self.sequences):
            if found[i] is None and choices[i]:
                found[i] = sequence.attempt(partial(sequence.draft, choices[i]), None)
        return found

    def _verify(self, found: Sequence[tuple[int, Draft] | None]) -> list[Round]:
        """Verify chains of draft tokens in one pass. Sequences without a draft decode one token."""
        drafts = [no_draft() if each is None else each[1] for each in found]
        blocks = [p for s, d in zip(self.sequences, drafts, strict=True) for p in (s.pending, d.tokens)]
        written = mx.concatenate(blocks)
        logits = self.passes.verify(written, [1 + draft.tokens.size for draft in drafts])
        rounds = []
        for sequence, each, (accepted, last, *drafted) in zip(
            self.sequences, found, self._verdicts(written, logits, drafts), strict=True
        ):
            tokens = sequence.until_stop([*drafted[:accepted], last])
            if each is None:
                rounds.append(Round(tokens, 0, 0, "landed"))
            else:
                counts = len(drafted), min(accepted, len(tokens))
                rounds.append(Round(tokens, *counts, "draft", each[0], ahead=each[1].ahead))
        return self._emit(rounds, self.passes.commit([len(round.tokens) for round in rounds]))

    def _verdicts(self, written: mx.array, logits: mx.array, drafts: Sequence[Draft]) -> list[list[int]]:
        """Return of each sequence the number of accepted tokens, the token after them, and its draft.

        `written` [R] has the pending token and the draft of each in turn, `logits` [R, V] their rows.
        """
        ends = list(itertools.accumulate(1 + draft.tokens.size for draft in drafts))
        starts = [0, *ends[:-1]]
        if self._takes_argmax:
            read = _read(mx.concatenate([logits.argmax(axis=-1).astype(mx.int32), written]))
            chosen, drafted = read[: ends[-1]], read[ends[-1] :]
            return [
                _matched(chosen[low:high], drafted[low + 1 : high])
                for low, high in zip(starts, ends, strict=True)
            ]
        parts = []
        for sequence, draft, low, high in zip(self.sequences, drafts, starts, ends, strict=True):
            verify = partial(sequence.sampler.verify, logits[low:high], sequence.history, draft)
            parts += [sequence.attempt(verify, mx.zeros((2,), mx.int32)), draft.tokens]
        numbers = iter(_read(mx.concatenate(parts)))
        return [list(itertools.islice(numbers, 2 + draft.tokens.size)) for draft in drafts]

    def _verify_tree(self, drafter: int, draft: Draft, parents: tuple[int, ...]) -> Round:
        """Verify a tree of draft tokens of the only sequence in one pass."""
        (sequence,), tree = self.sequences, tree_of(parents)
        logits = sequence.target.verify_tree(mx.concatenate([sequence.pending, draft.tokens]), parents)
        verdict = sequence.sampler.verify(logits, sequence.history, draft)
        end, last, *drafted = _read(mx.concatenate([verdict, draft.tokens]))
        path = tree.paths[end]
        tokens = sequence.until_stop([*(drafted[node - 1] for node in path[1:]), last])
        accepted = path[1 : len(tokens) + 1]
        ranks = tuple(tree.ranks[node] for node in accepted)
        round = Round(tokens, tree.height, len(accepted), "draft", drafter, nodes=len(drafted), ranks=ranks)
        return self._emit([round], [sequence.target.commit_path(path[: len(tokens)])])[0]

    def _plain(self, *, queue_next: bool) -> list[Round]:
        """Decode one token of each without drafts. With `queue_next` the device begins the next ones."""
        queue_next = queue_next and all(sequence.remaining > 1 for sequence in self.sequences)
        tokens = self.queued
        if tokens is None:
            pending = [sequence.history[-1] for sequence in self.sequences]
            tokens = self._draw(mx.array(pending, dtype=mx.int32), unread=0)
        features = self.passes.commit([1] * len(self.sequences))
        self.queued = None
        if queue_next:
            self.queued = self._draw(tokens, unread=1)
            mx.async_eval(tokens, self.queued)
        kind: Literal["plain", "landed"] = "plain" if queue_next else "landed"
        return self._emit([Round([token], 0, 0, kind) for token in _read(tokens)], features)

    def _draw(self, tokens: mx.array, unread: int) -> mx.array:
        """Write one token of each sequence and draw the next ones, [B] int32.

        The last `unread` of the written ones, 0 or 1, are not in the histories yet.
        """
        logits = self.passes.verify(tokens, [1] * len(self.sequences))
        if self._takes_argmax:
            return logits.argmax(axis=-1).astype(mx.int32)
        drawn = []
        for i, sequence in enumerate(self.sequences):
            draw = partial(sequence.draw, logits[i : i + 1], tokens[i : i + unread])
            drawn.append(sequence.attempt(draw, mx.zeros((1,), mx.int32)))
        return mx.concatenate(drawn) if len(drawn) > 1 else drawn[0]

    @property
    def _takes_argmax(self) -> bool:
        """Return True if one argmax chooses the tokens of all sequences."""
        return all(sequence.sampler.is_argmax for sequence in self.sequences)

    def _emit(self, rounds: Sequence[Round], features: Sequence[Features]) -> list[Round]:
        triples = zip(self.sequences, rounds, features, strict=True)
        return [
            sequence.attempt(partial(sequence.emit, round, each), round) for sequence, round, each in triples
        ]


def _limited(decision: Decision, sequence: RunningSequence) -> list[Choice]:
    """Return the choices of a decision, with room left for the token that ends the round."""
    most = sequence.remaining - 1
    return [c if c.limit <= most else replace(c, limit=most) for c in decision.choices if most]


def _matched(chosen: Sequence[int], drafted: Sequence[int]) -> list[int]:
    """Accept draft tokens [K] while they are the chosen ones [K + 1]. Return a verdict and the draft."""
    pairs = enumerate(zip(chosen, drafted, strict=False))
    accepted = next((i for i, (wanted, token) in pairs if wanted != token), len(drafted))
    return [accepted, chosen[accepted], *drafted]


def _chain(draft: Draft) -> Draft:
    """Return a chain as it is, and the likeliest path of a tree. That is exact without probabilities."""
    if draft.parents is None:
        return draft
    return Draft(draft.tokens[: len(tree_of(draft.parents).segments[0]) - 1])


def _read(array: mx.array) -> list[int]:
    """Copy to the host: the one copy of a round."""
    return cast(list[int], array.tolist())
