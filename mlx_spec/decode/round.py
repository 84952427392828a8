"""One decode round: draft -> verify -> accept -> commit, for the sequences of a group in one pass.

`Group.step` is one round; most groups have one sequence. Invariants after every round: the target's cache
holds a history without its last, pending token; no cache holds a token that is not in the history; every
sequence emitted at least one token; the tokens of a sequence do not depend on the others.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Literal, cast

import mlx.core as mx

from mlx_spec.decode.blocks import Accepted, bounded, chain_of, limited, matched, round_of, rows_of, strays
from mlx_spec.decode.running import Ending, RunningSequence
from mlx_spec.device import most_resident, resident
from mlx_spec.errors import DraftsGrow, NotFinite, caught, lacks_memory
from mlx_spec.model.layer_caches import lanes_without
from mlx_spec.model.target_batch import SingleTarget, TargetBatch
from mlx_spec.model.tree import tree_of
from mlx_spec.policy.batch import BatchPolicy
from mlx_spec.types import Cost, Decision, Draft, DraftChoice, Features, Reason, Round, no_draft

MAX_MISSES = 2  # rounds in a row without the wanted draft; then plain decoding queues tokens ahead again

Emitted = tuple[Round, Ending]  # of a sequence


class Group:
    """Sequences that are decoded round by round, in one pass a round."""

    def __init__(
        self,
        sequences: list[RunningSequence],
        targets: SingleTarget | TargetBatch,
        policy: BatchPolicy | None = None,
    ) -> None:
        self.sequences = sequences
        self.targets = targets
        self._policy = policy  # of several sequences; if it is None, each decides for itself
        # [2 B] int32: the tokens after the pending ones, not yet read, and then `_largest` of their logits.
        self.queued: mx.array | None = None
        # Last draws from a shortlist that may lack part of a nucleus: sequence, logits, and `Sampler.fits`.
        self._shortlisted: list[tuple[RunningSequence, mx.array, mx.array]] = []
        self._rounds = 0
        self._misses = 0  # rounds in a row in which a draft was wanted and no drafter had one
        self._doubt: str | None = None  # `Round.doubt` of the last pass
        self._has_draft = False  # the last pass verified a draft
        self._drafting_took = 0  # bytes by which the process grew while the last round drafted
        self._before_drafts: int | None = None  # `_beside_caches` before the drafts of the last round

    def step(self, *, may_queue: bool = True, may_probe: bool = True) -> list[Round | Exception]:
        """Decode one round of every sequence: draft, verify, accept, commit.

        Returns the round of each, or the error that ended it. Without a draft a round is one plain token, and
        the device begins the next one if `may_queue`. Without `may_probe`, a batch drafts only if it pays.
        A pass of one sequence that fails is tried again once, without a draft. An error of a shared pass is
        raised, and so is an error of the second try. Drafters that take memory without end are turned off.
        """
        held, self._drafting_took, self._before_drafts = mx.get_active_memory(), 0, None
        try:
            rounds = self._step(may_queue, may_probe)
        except BaseException as error:
            if len(self.sequences) > 1:
                raise
            (sequence,), failure = self.sequences, caught(error)
            if self._has_draft or (sequence.is_drafting and lacks_memory(failure)):
                sequence.stop_drafting(failure)
            self.queued, self._shortlisted = None, []
            mx.clear_cache()  # the pass may have lacked memory
            sequence.reread()
            return self._step(False, False)
        try:
            self._weigh(held)
        except BaseException as error:
            caught(error)  # a pass in flight failed: the next round meets it, and this one is emitted
        return rounds

    def _step(self, may_queue: bool, may_probe: bool) -> list[Round | Exception]:
        self._has_draft = False
        decisions = self._decide(may_probe)
        start = time.perf_counter()
        drafts = self._draft(decisions)
        self._has_draft = any(draft.tokens.size for draft in drafts)
        if self._has_draft:
            logits = self._verify(drafts, decisions)
            rounds = self._commit(drafts, self._accept(drafts, logits))
        else:
            waits_for_draft = any(decision.choices for decision in decisions) and self._misses < MAX_MISSES
            rounds = self._plain(queue_next=may_queue and not waits_for_draft)
        return self._observe(rounds, decisions, time.perf_counter() - start)

    def remove(self, index: int) -> None:
        """Remove a sequence; the last one takes its index."""
        if self.queued is not None:
            count = len(self.sequences)
            lanes = lanes_without(index, count)
            self.queued = self.queued[mx.array([*lanes, *(count + lane for lane in lanes)], dtype=mx.int32)]
        self._shortlisted = [drawn for drawn in self._shortlisted if drawn[0] is not self.sequences[index]]
        self.sequences[index] = self.sequences[-1]
        self.sequences.pop()

    def close(self) -> None:
        """Drop uncommitted rows."""
        self.queued = None
        self.targets.commit([0] * len(self.sequences))

    # --- one round

    def _decide(self, may_probe: bool) -> list[Decision]:
        shared, off = self._shared_policy, Decision((), Reason.FAILED)
        if not self.targets.takes_drafts:
            return [Decision((), Reason.RECURRENT)] * len(self.sequences)
        if shared is None:
            decisions = [s.try_drafting(partial(s.policy.decide, s.history), off) for s in self.sequences]
        else:
            decisions = self._shared_decisions(shared)
            if not may_probe:
                plain = Decision((), Reason.ACCEPTANCE, decisions[0].plain_seconds)
                decisions = [plain if decision.reason is Reason.PROBE else decision for decision in decisions]
            pairs_of = zip(self.sequences, decisions, strict=True)
            decisions = [d if s.draft_error is None else _without_drafts(d) for s, d in pairs_of]
        most, pairs = self.targets.most_drafted, zip(self.sequences, decisions, strict=True)
        return [limited(decision, min(sequence.remaining - 1, most)) for sequence, decision in pairs]

    def _shared_decisions(self, shared: BatchPolicy) -> list[Decision]:
        """Return what the policy of all decides. If it fails, find the sequences that it fails for."""
        try:
            policies = [sequence.policy for sequence in self.sequences]
            return shared.decide(policies, [sequence.history for sequence in self.sequences])
        except BaseException as error:
            known = [sequence.draft_error for sequence in self.sequences]
            for sequence in self.sequences:
                one = partial(shared.decide, [sequence.policy], [sequence.history])
                sequence.try_drafting(one, None)
            if known == [sequence.draft_error for sequence in self.sequences]:
                for sequence in self.sequences:
                    sequence.stop_drafting(caught(error))
            self._policy = None  # what it planned is not known
            return [Decision((), Reason.WAITING)] * len(self.sequences)

    def _draft(self, decisions: Sequence[Decision]) -> list[Draft]:
        """Return the draft of each sequence. All are empty if a queued token has to be emitted first."""
        none = [no_draft()] * len(decisions)
        if not any(decision.choices for decision in decisions):
            return none
        if self.queued is not None and self._misses < MAX_MISSES:
            return none
        if any(sequence.draft_memory.suspected for sequence in self.sequences if sequence.is_drafting):
            self._before_drafts = self._beside_caches()
        before = most_resident()
        drafts = self._drafts_of([list(decision.choices) for decision in decisions])
        self._drafting_took = most_resident() - before
        self._misses = 0 if any(draft.tokens.size for draft in drafts) else self._misses + 1
        return drafts if self.queued is None else none

    def _drafts_of(self, choices: list[list[DraftChoice]]) -> list[Draft]:
        """Return for each sequence the draft of its first choice that has one. One pass may serve all."""
        drafts = [no_draft()] * len(choices)
        wanting = [i for i, of_one in enumerate(choices) if of_one] if len(choices) > 1 else []
        calls = [self.sequences[i].draft_call(choices[i][0]) for i in wanting]
        pairs = zip(wanting, calls, strict=True)
        drafters = {(choices[i][0].drafter_index, type(call.drafter)) for i, call in pairs}
        if len(drafters) == 1 < len(wanting):
            try:
                made = zip(wanting, calls[0].drafter.draft_batch(calls), strict=True)
                checked = [self.sequences[i].checked(draft, choices[i][0]) for i, draft in made]
            except BaseException as error:  # retry one by one to find the sequence that fails
                caught(error)
                checked = []
            for i, draft in zip(wanting, checked, strict=False):
                first = choices[i].pop(0)
                drafts[i] = draft.with_choice(first) if draft.tokens.size else no_draft()
        for i, sequence in enumerate(self.sequences):
            if not drafts[i].tokens.size and choices[i]:
                drafts[i] = sequence.try_drafting(partial(sequence.draft, choices[i]), no_draft())
        takes_trees = len(drafts) == 1 and not self.sequences[0].target.rows.is_bitwise
        drafts = drafts if takes_trees else [chain_of(draft) for draft in drafts]
        return [bounded(draft, s.sampler.vocab_size) for s, draft in zip(self.sequences, drafts, strict=True)]

    def _verify(self, drafts: Sequence[Draft], decisions: Sequence[Decision]) -> mx.array:
        """Write the pending token and the draft of each sequence in one pass. Return logits [R, V]."""
        # Before the pass: its dispatch may block this thread until the pass is nearly done.
        for sequence, draft, decision in zip(self.sequences, drafts, decisions, strict=True):
            sequence.try_drafting(partial(sequence.prepare, draft, decision.choices), None)
        pairs = zip(self.sequences, drafts, strict=True)
        written = mx.concatenate([block for s, draft in pairs for block in (s.pending, draft.tokens)])
        if drafts[0].parents is not None:  # a tree, of the only sequence
            self._doubt = self.sequences[0].target.rows.doubt
            logits = self.sequences[0].target.verify_tree(written, drafts[0].parents)
            return self._allowed(logits, [logits.shape[0]])
        sizes = [1 + draft.tokens.size for draft in drafts]
        logits = self.targets.verify(written, sizes)
        self._doubt = self.targets.doubt
        return self._allowed(logits, sizes)

    def _accept(self, drafts: Sequence[Draft], logits: mx.array) -> list[Accepted]:
        """Return the accepted rows and the new tokens of each sequence. Makes the one copy to the host."""
        takes_argmax = self._takes_argmax and drafts[0].parents is None
        if takes_argmax:
            verdicts, shortlisted = [logits.argmax(axis=-1).astype(mx.int32)], []
        else:
            verdicts = self._verdicts(drafts, logits)
            shortlisted = [(i, fits) for i, s in enumerate(self.sequences) for fits in s.sampler.fits]
        tokens = [draft.tokens if draft.drawn is None else draft.drawn for draft in drafts]
        flags = [_largest(logits), *(fits for _, fits in shortlisted)]
        numbers = iter(self._await(mx.concatenate([*verdicts, *tokens, *flags])))
        lengths = [1 + draft.tokens.size if takes_argmax else 2 for draft in drafts]
        accepted = list[Accepted]()
        read = [list(itertools.islice(numbers, length)) for length in lengths]
        drafted = [list(itertools.islice(numbers, draft.tokens.size)) for draft in drafts]
        largest = [list(itertools.islice(numbers, 1 + draft.tokens.size)) for draft in drafts]
        for (i, _), is_exact in zip(shortlisted, numbers, strict=True):
            if not is_exact:
                read[i] = self._await(self._verdicts(drafts, logits, exact=i)[0])
        blocks = zip(self.sequences, drafts, read, drafted, largest, strict=True)
        for i, (sequence, draft, verdict, guesses, tops) in enumerate(blocks):
            if strays(guesses, sequence.sampler.vocab_size):
                sequence.stop_drafting(ValueError("a draft has tokens outside the vocabulary"))
                if not takes_argmax:  # the verdict is about other tokens
                    verdict = self._without_draft(i, drafts, logits)
            row, last = matched(verdict, guesses) if takes_argmax else verdict
            rows = range(row + 1) if draft.parents is None else tree_of(draft.parents).paths[row]
            tokens_of = [*(guesses[j - 1] for j in rows[1:]), last]
            finite = next((j for j, row in enumerate(rows) if not _is_finite(tops[row])), len(rows))
            if not finite:
                sequence.error = sequence.error or NotFinite.after(sequence.emitted)
            accepted.append((rows, sequence.until_stop(tokens_of[:finite])))
        return accepted

    def _without_draft(self, index: int, drafts: Sequence[Draft], logits: mx.array) -> list[int]:
        """Return the verdict on the pending token of a sequence alone."""
        sequence, row = self.sequences[index], rows_of(drafts, logits)[index][:1]
        draw = partial(sequence.draw, row, no_draft().tokens, exact=True)
        return [0, *self._await(sequence.attempt(draw, mx.array([0])))]

    def _verdicts(self, drafts: Sequence[Draft], logits: mx.array, exact: int = -1) -> list[mx.array]:
        """Return the row of the last accepted token and the token after it, [2] for each sequence.

        With `exact`, only the sequence at that index is judged, over the whole vocabulary.
        """
        verdicts, blocks = list[mx.array](), rows_of(drafts, logits)
        for i, (sequence, draft, rows) in enumerate(zip(self.sequences, drafts, blocks, strict=True)):
            if exact in (-1, i):
                verify = partial(sequence.sampler.verify, rows, sequence.history, draft, exact=exact == i)
                verdicts.append(sequence.attempt(verify, mx.zeros((2,), mx.int32)))
        return verdicts

    def _commit(self, drafts: Sequence[Draft], accepted: Sequence[Accepted]) -> list[Emitted]:
        """Keep the rows of the new tokens, drop the others, and emit the tokens."""
        pairs = zip(drafts, accepted, strict=True)
        rounds = [round_of(draft, self._doubt, *rows_and_tokens) for draft, rows_and_tokens in pairs]
        kept = [rows[: len(tokens)] for rows, tokens in accepted]
        if drafts[0].parents is not None:
            return self._emit(rounds, [self.sequences[0].target.commit_path(kept[0])])
        return self._emit(rounds, self.targets.commit(list(map(len, kept))))

    def _plain(self, *, queue_next: bool) -> list[Emitted]:
        """Decode one token of each sequence. With `queue_next` the device begins the next ones."""
        queue_next = queue_next and all(sequence.remaining > 1 for sequence in self.sequences)
        drawn, count = self.queued, len(self.sequences)
        if drawn is None:
            pending = [sequence.history[-1] for sequence in self.sequences]
            drawn = self._draw(mx.array(pending, dtype=mx.int32), unread=0)
        shortlisted, doubt = self._shortlisted, self._doubt
        features = self.targets.commit([1] * len(self.sequences))
        self.queued = None
        if queue_next:
            self.queued = self._draw(drawn[:count], unread=1)
            mx.async_eval(drawn, self.queued)
        fits = [fits for _, _, fits in shortlisted]
        read = self._await(mx.concatenate([drawn, *fits]) if fits else drawn)
        tokens = read[:count]
        for sequence, top in zip(self.sequences, read[count : 2 * count], strict=True):
            if not _is_finite(top):
                sequence.error = sequence.error or NotFinite.after(sequence.emitted)
        for (sequence, logits, _), is_exact in zip(shortlisted, read[2 * count :], strict=True):
            if is_exact:
                continue
            if self.queued is not None:  # its pass has read the token that is now drawn again
                self.targets.commit([0] * len(self.sequences))
                self.queued, queue_next = None, False
            draw = partial(sequence.draw, logits, no_draft().tokens, exact=True)
            (tokens[self.sequences.index(sequence)],) = self._await(sequence.attempt(draw, mx.array([0])))
        round_kind: Literal["plain", "drained"] = "plain" if queue_next else "drained"
        return self._emit([Round([token], 0, 0, round_kind, doubt=doubt) for token in tokens], features)

    def _draw(self, tokens: mx.array, unread: int) -> mx.array:
        """Write one token of each sequence. Return the next tokens and `_largest` of their logits, [2 B].

        `unread` is 1 if the histories lack the written tokens, because the host has not read them, else 0.
        """
        sizes = [1] * len(self.sequences)
        logits = self._allowed(self.targets.verify(tokens, sizes, early=not unread), sizes, unread)
        self._shortlisted, self._doubt = [], self.targets.doubt
        if self._takes_argmax:
            return mx.concatenate([logits.argmax(axis=-1).astype(mx.int32), _largest(logits)])
        drawn = []
        for i, sequence in enumerate(self.sequences):
            row = logits[i : i + 1]
            draw = partial(sequence.draw, row, tokens[i : i + unread])
            drawn.append(sequence.attempt(draw, mx.zeros((1,), mx.int32)))
            self._shortlisted += [(sequence, row, fits) for fits in sequence.sampler.fits]
        return mx.concatenate([*drawn, _largest(logits)])

    def _allowed(self, logits: mx.array, sizes: Sequence[int], unread: int = 0) -> mx.array:
        """Return logits [R, V] without tokens that the model must not say; `sizes` are the rows of each."""
        suppressed = self.sequences[0].suppressed
        if suppressed is None:
            return logits
        lows = itertools.accumulate(sizes[:-1], initial=0)
        pairs = zip(lows, self.sequences, strict=True)
        first = [low for low, s in pairs if len(s.history) + unread == len(s.prompt)]
        return suppressed.leave_out(logits, first)

    def _emit(self, rounds: Sequence[Round], features: Sequence[Features]) -> list[Emitted]:
        emitted, failed = list[Emitted](), cast(Ending, (None, ()))
        for sequence, round, its_features in zip(self.sequences, rounds, features, strict=True):
            emit = partial(sequence.emit, round.tokens, its_features)
            emitted.append((round, sequence.attempt(emit, failed)))
        return emitted

    def _observe(
        self, emitted: Sequence[Emitted], decisions: Sequence[Decision], seconds: float
    ) -> list[Round | Exception]:
        """Show the policies the time and the accepted tokens. Return the round or the error of each.

        The device waits, if nothing is queued. So policies learn only what the next decision needs.
        """
        self._rounds += 1
        done, shared = list[Round | Exception](), self._shared_policy
        longest = max((round for round, _ in emitted), key=lambda round: round.nodes or round.drafted)
        triples = zip(self.sequences, emitted, decisions, strict=True)
        for sequence, (round, (finish_reason, logprobs)), decision in triples:
            round = replace(
                round,
                seconds=seconds,
                reason=decision.reason if sequence.draft_error is None else Reason.FAILED,
                finish_reason=finish_reason,
                plain_seconds=decision.plain_seconds,
                cost=self._cost(sequence, decision, longest),
                logprobs=logprobs,
                batch_size=len(self.sequences),
                doubt=round.doubt or sequence.doubt,
            )
            if shared is None:
                sequence.try_drafting(partial(sequence.policy.observe, round), None)
            done.append(sequence.error or round)
        if shared is not None:
            try:
                shared.observe([None if isinstance(outcome, Exception) else outcome for outcome in done])
            except BaseException as error:
                self._policy = None  # what it learned is not known
                for sequence in self.sequences:
                    sequence.stop_drafting(caught(error))
        return done

    def _weigh(self, held: int) -> None:
        """Watch the memory of drafters after a round, before which the process held `held` bytes."""
        if self._before_drafts is None:
            self._suspect_drafters(max(mx.get_active_memory() - held, self._drafting_took))
        else:
            self._judge_drafters(self._beside_caches() - self._before_drafts)

    def _suspect_drafters(self, taken: int) -> None:
        """Count the bytes that a round took. Suspect drafters if caches do not account for them.

        On a GPU a pass in flight may take them and give them back, so the next round with drafts is weighed.
        """
        memories = [sequence.draft_memory for sequence in self.sequences if sequence.is_drafting]
        for memory in memories:
            memory.taken, memory.rounds = memory.taken + taken // len(memories), memory.rounds + 1
        total, most = sum(memory.taken for memory in memories), min((m.most for m in memories), default=0)
        if total <= most:
            return
        caches = self._cache_bytes()
        excess = max(0, total - max(0, caches - sum(memory.counted for memory in memories))) // len(memories)
        for memory in memories:
            memory.suspected = excess / memory.rounds if excess * len(memories) > most else 0.0
            memory.taken, memory.counted = excess, caches // len(memories)

    def _judge_drafters(self, grown: int) -> None:
        """Turn suspected drafters off if a weighed round took memory that no cache counts.

        Less than 1 MiB is not growth: hidden states that wait for a drafter vary with the rows of a round.
        """
        sequences = [sequence for sequence in self.sequences if sequence.is_drafting]
        suspected = sum(sequence.draft_memory.suspected for sequence in sequences)
        taken = max(grown, self._drafting_took)
        if taken > max(suspected / 2, 2**20):
            error = DraftsGrow(f"drafters take {taken} bytes a round beside their caches")
            for sequence in sequences:
                sequence.stop_drafting(error)
            mx.clear_cache()
        for sequence in sequences:
            sequence.draft_memory.acquit()

    def _cache_bytes(self) -> int:
        return self.targets.nbytes + sum(sequence.drafter_bytes for sequence in self.sequences)

    def _beside_caches(self) -> int:
        """Return the bytes of arrays beside caches, weights among them. Waits for passes in flight."""
        mx.synchronize()
        return mx.get_active_memory() - self._cache_bytes()

    def _cost(self, sequence: RunningSequence, decision: Decision, longest: Round) -> Cost | None:
        """Return the cost in passes of one row: users compare with those, even if plain passes have two."""
        plain = self.targets.plain_cost
        try:
            cost = decision.cost_of(longest)
        except BaseException as error:
            sequence.stop_drafting(caught(error))
            return None
        if cost is None or plain == 1:
            return cost
        return Cost((cost.shape, plain), cost.plain_tokens * plain, cost.error)

    def _await(self, array: mx.array) -> list[int]:
        """Begin to compute an array, let the policies settle the last round meanwhile, and read it."""
        mx.async_eval(array)
        for sequence in self.sequences:
            sequence.try_drafting(sequence.policy.settle, None)
        if self._rounds % 256 == 255:  # freed buffers of many block lengths pile up
            mx.clear_cache()
            resident.grow()
        return _read(array)

    @property
    def _shared_policy(self) -> BatchPolicy | None:
        """Return the policy that decides for all sequences; None if each decides for itself."""
        return self._policy if len(self.sequences) > 1 and self.targets.takes_drafts else None

    @property
    def _takes_argmax(self) -> bool:
        return all(sequence.sampler.is_argmax for sequence in self.sequences)


def _without_drafts(decision: Decision) -> Decision:
    """Return a decision for a sequence whose drafter failed."""
    return replace(decision, choices=(), reason=Reason.FAILED)


def _largest(logits: mx.array) -> mx.array:
    """Return the bits of the largest logit of each row, int32 [R]: MLX's max is NaN if a logit is."""
    return logits.max(axis=-1).astype(mx.float32).view(mx.int32)


def _is_finite(bits: int) -> bool:
    """Return False for the bits of a float32 that is infinite or NaN."""
    exponent = 0x7F800000
    return bits & exponent != exponent


def _read(array: mx.array) -> list[int]:
    """Copy to the host: the one copy of a round."""
    return cast(list[int], array.tolist())
