"""Sequences that come and go at any round, and share the passes of their target where that is exact."""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import nlargest

import mlx.core as mx

from mlx_spec import engine
from mlx_spec.engine import Group, RunningSequence
from mlx_spec.errors import InvalidValue
from mlx_spec.model.target import LMTarget
from mlx_spec.model.target_batch import SingleTarget, TargetBatch
from mlx_spec.types import GroupPolicy, Round

MAX_PAUSE_S = 0.1  # between the tokens of sequences that decode while a prompt is read
PLANNED_SHARE = 0.8  # of MAX_PAUSE_S: what rounds and chunks are planned to take at most: times vary
# Pauses whose errors are remembered, and how many of them may be longer than planned for: 1 %.
PAUSES, LATE = 300, 3
MIN_CHUNK = 8  # prompt tokens in one pass, at least: the prompt goes on
# Rounds that a chunk may take where MIN_CHUNK tokens do not fit the pause. A pass has a fixed cost, nearly
# that of a round, so a chunk as long as a round would hold few tokens.
SLOW_SHARE = 2.0
# Seconds that sequences wait for other prompts before the first of them decodes. A second is the longest wait
# that does not interrupt a user's thought (Nielsen, Usability Engineering, 1993).
MAX_HOLD_S = 1.0
CHUNKS, ROUNDS = 2, 4  # whose times are remembered: prompts may be read by turns, and not all rounds draft
# Rows of a pass that reads several prompts, padding included. With more, computing takes longer than reading
# the weights, on any Mac, so that a pass of their own costs each prompt no more.
MAX_PROMPT_ROWS = 512
MAX_PADDED = 1.5  # rows of such a pass for each token that it reads: where rows cost time, padding does, too
MAX_PADDING = 2**30  # bytes of shared buffers that may be unused, unless the caller says otherwise

Result = Round | Exception
Clock = Callable[[], float]


class PromptPace:
    """Chooses how many tokens of a prompt to read between two rounds, so that nobody waits too long.

    The time between the ends of two rounds is that of a chunk, and of the rest: the round itself, sequences
    that join, and what the caller does. The last ones tell what the next ones will take, and the errors of
    such predictions how much shorter than the bound the next ones have to be (conformal prediction).
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._chunks: deque[tuple[int, float]] = deque(maxlen=CHUNKS)  # tokens and seconds
        self._rests: deque[float] = deque(maxlen=ROUNDS)  # seconds
        self._least: deque[float] = deque(maxlen=ROUNDS)  # seconds of chunks of MIN_CHUNK tokens or fewer
        self._errors: deque[float] = deque(maxlen=PAUSES)  # ratios of what a pause took to what was expected
        self.reading = 0.0  # seconds of chunks since the last round
        self._expected = 0.0  # seconds expected of them; infinite if no chunk of such a size is known
        self._last: float | None = None  # time of the end of the last round; None if nobody decodes
        self._held: float | None = None  # time since which sequences could begin to decode, but wait

    def tokens(self) -> int:
        """Return how many tokens to read next. Small chunks come first where times are not known.

        Where not even those fit beside the fastest round, pauses are too long whatever is read. Then a chunk
        may take longer than a round: small ones would keep one client waiting and gain the others little.
        Times that vary are no reason for that.
        """
        worst = nlargest(LATE, self._errors)
        most = worst[-1] if len(worst) == LATE else 1.0  # times the plan that all but 1 % of pauses took
        planned = MAX_PAUSE_S * PLANNED_SHARE
        left = min(planned, MAX_PAUSE_S / most) - max(self._rests, default=MAX_PAUSE_S)
        fastest = min(self._rests, default=0.0)
        if min(self._least, default=0.0) > planned - fastest:
            left = SLOW_SHARE * fastest
        # A pass has a cost of its own, so a much larger one says too little of a small one.
        if not self._chunks or any(seconds > 2 * left for _, seconds in self._chunks):
            return MIN_CHUNK
        fits = min(math.ceil(tokens * left / seconds) for tokens, seconds in self._chunks)
        return min(max(fits, MIN_CHUNK), engine.PREFILL_STEP)

    def holds(self, unread: float) -> bool:
        """Return True if sequences that could begin should wait until so many tokens are read.

        Together their passes cost less, and prompts are read faster while nobody decodes.
        """
        if self._last is not None or not self._chunks:  # somebody decodes, or no speed is known
            return False
        now = self._clock()
        if self._held is None:
            self._held = now
        tokens, seconds = self._chunks[-1]
        return now - self._held + unread * seconds / tokens <= MAX_HOLD_S

    def timed(self, steps: Iterable[object], target: LMTarget) -> Iterator[None]:
        """Do steps that write a prompt to a target, and learn what they take."""
        todo = iter(steps)
        while True:
            start, before = self._clock(), target.size
            if next(todo, self) is self:
                return
            self.read(target.size - before, self._clock() - start)
            yield

    def read(self, rows: int, seconds: float) -> None:
        """Learn from a pass that read so many rows of prompts."""
        self.reading += seconds
        if rows:
            self._learn(rows, max(seconds, 1e-6))

    def end_round(self, goes_on: bool) -> None:
        """Learn from the time since the last round. `goes_on` says whether somebody waits for the next."""
        now = self._clock()
        if self._last is not None:
            expected = max(self._rests, default=math.inf) + self._expected
            if 0 < expected < math.inf:
                self._errors.append((now - self._last) / expected)
            self._rests.append(now - self._last - self.reading)
        self._last, self._held = now if goes_on else None, None
        self.reading = self._expected = 0.0

    def _learn(self, tokens: int, seconds: float) -> None:
        """Learn from a chunk. What it was expected to take is known from chunks of a similar size only."""
        alike = self._chunks and all(tokens <= 2 * other <= 4 * tokens for other, _ in self._chunks)
        self._expected += tokens * max(s / n for n, s in self._chunks) if alike else math.inf
        self._chunks.append((tokens, seconds))
        if tokens <= MIN_CHUNK:
            self._least.append(seconds)


@dataclass(eq=False)
class _Member:
    """A sequence of the batch."""

    id: int
    sequence: RunningSequence
    park: bool  # its caches are used again after it has left
    receive: Callable[[Result], None] | None


class Batch:
    """Decodes many sequences: one round of each in every step.

    `target_batch` makes the targets of a group, or is None if sequences of this target cannot share a pass.
    Then they decode in turns. `policies` makes the policy of a group; if it is None, each
    sequence decides for itself how much to draft. Sequences wait in the order of `add`. Every sequence gets
    the text that it would get alone. One that fails leaves, and the others go on. Sequences of unequal
    length share a pass if at most `max_padding` bytes, or half of the buffers, are unused.
    """

    def __init__(
        self,
        target_batch: Callable[[], TargetBatch] | None,
        max_running: int,
        policies: Callable[[], GroupPolicy] | None = None,
        max_padding: int = MAX_PADDING,
        clock: Clock = time.perf_counter,
    ) -> None:
        if max_running < 1:
            raise InvalidValue(f"max_running is {max_running}, it must be 1 or more")
        self.target_batch = target_batch
        self.max_running = max_running  # sequences that decode at a time; the others wait
        self._policies = policies
        self._max_padding = max_padding
        self._members: dict[int, _Member] = {}
        self._waiting: deque[_Member] = deque()
        self._reading: tuple[_Member, Iterator[None]] | None = None  # the prompt that is being written
        self._groups: list[Group] = []
        self._is_held = False  # sequences could begin, but wait for other prompts
        self._next_id = 0
        self._clock = clock
        self._pace = PromptPace(clock)

    def __len__(self) -> int:
        """Return the number of sequences that run or wait."""
        return len(self._members)

    @property
    def group_sizes(self) -> list[int]:
        """Return the number of sequences in each pass of a step."""
        return [len(group.sequences) for group in self._groups]

    @property
    def nbytes(self) -> int:
        """Return the bytes of shared caches."""
        targets = [group.targets for group in self._groups]
        return sum(each.nbytes for each in targets if isinstance(each, TargetBatch))

    def chunk(self) -> int:
        """Return how many tokens of a prompt to write next, so that nobody who decodes waits too long."""
        if not self._groups or self._is_held:
            return engine.PREFILL_STEP
        return self._pace.tokens()

    def holds(self, unread: Iterable[int]) -> bool:
        """Return True if sequences could begin to decode, but should wait for others.

        `unread` are the tokens that are to be read of each prompt that could be next.
        """
        can_begin = bool(self._groups) or any(not member.sequence.unread for member in self._unstarted())
        return can_begin and self._pace.holds(min(unread, default=math.inf))

    def timed(self, steps: Iterable[object], target: LMTarget) -> Iterator[None]:
        """Do steps that write a prompt to a target, and learn what they take."""
        return self._pace.timed(steps, target)

    def read_together(self, sequences: Sequence[RunningSequence]) -> list[RunningSequence]:
        """Read the prompts of the first and the shortest others in one pass, all but their last tokens.

        Returns their sequences. None are read if fewer than two fit, or not the first, or if the pass fails:
        each by itself finds out whose fault it is.
        """
        chosen, count, most = list[RunningSequence](), 0, min(self.chunk(), MAX_PROMPT_ROWS)
        for each in sorted(sequences, key=lambda sequence: sequence.unread):
            if each.unread and not each.target.is_recurrent:
                count += each.unread
                if each.unread * (len(chosen) + 1) > min(most, MAX_PADDED * count):
                    break
                chosen.append(each)
        # What they hold moves to shared caches and back, with lanes as long as the longest.
        moved = len(chosen) * max((each.target.nbytes for each in chosen), default=0)
        fits = len(chosen) > 1 and sequences[0] in chosen and moved <= self._max_padding
        if self.target_batch is None or not fits:
            return []
        start, shared = self._clock(), self.target_batch()
        unread = [each.history[each.target.size : -1] for each in chosen]
        for each in chosen:
            shared.join(each.target)
        try:
            tokens = list(itertools.chain.from_iterable(unread))
            features = shared.prefill(mx.array(tokens, dtype=mx.int32), list(map(len, unread)))
        except Exception:
            chosen, features = [], []
        for index in reversed(range(len(unread))):
            shared.leave(index, keep=True, remember=bool(features))
        for each, its_features in zip(chosen, features, strict=True):
            each.attempt(partial(each.observe, its_features), None)
        self._pace.read(max(map(len, unread)) * len(unread), self._clock() - start)
        return chosen

    def add(
        self,
        sequence: RunningSequence,
        *,
        park: bool = False,
        receive: Callable[[Result], None] | None = None,
    ) -> int:
        """Add a sequence. Return its id. `receive` gets what `step` returns of it, at the end of the step.

        With `park`, its target and drafters hold the text when it has left, so that another one can go on.
        """
        member = _Member(self._next_id, sequence, park, receive)
        self._next_id += 1
        self._members[member.id] = member
        self._waiting.append(member)
        return member.id

    def remove(self, id: int) -> None:
        """Remove a sequence, whether it waits or runs. Do nothing if it has left already."""
        member = self._members.pop(id, None)
        if member is None:
            return
        if member in self._waiting:
            self._waiting.remove(member)
        elif self._reading is not None and self._reading[0] is member:
            self._reading = None
        else:
            group = next(group for group in self._groups if member.sequence in group.sequences)
            self._leave(group, member)

    def step(self) -> list[tuple[int, Result]]:
        """Write one chunk of a prompt. Decode one round of every running sequence, unless `holds` says wait.

        Returns the round of each by its id, or the error that ended it. A sequence leaves with the round that
        has a finish reason, or with its error.
        """
        unread = [unread for member in self._unstarted() if (unread := member.sequence.unread)]
        self._is_held = self.holds(unread[:1])
        results = self._prefill()
        if not self._is_held:
            results += self._decode()
        for member, result in results:
            if member.receive is not None:
                member.receive(result)
        return [(member.id, result) for member, result in results]

    def run(self) -> Iterator[tuple[int, Result]]:
        """Yield what `step` returns until no sequence is left."""
        while self._members:
            yield from self.step()

    def _unstarted(self) -> list[_Member]:
        """Return the sequences whose prompts are read next."""
        first = [] if self._reading is None else [self._reading[0]]
        room = self.max_running - sum(self.group_sizes)
        return [*first, *self._waiting][:room]

    def _decode(self) -> list[tuple[_Member, Result]]:
        """Decode one round of every running sequence."""
        results = list[tuple[_Member, Result]]()
        draining = self._regroup()
        for group in list(self._groups):
            members = [self._member(sequence) for sequence in group.sequences]
            try:
                rounds = group.step(may_queue=group not in draining, may_probe=not self._pace.reading)
            except Exception as error:  # of the pass: it ends all sequences of the group
                rounds = [error] * len(members)
            for member, round in zip(members, rounds, strict=True):
                results.append((member, round))
                if isinstance(round, Exception) or round.finish_reason is not None:
                    self.remove(member.id)
        self._pace.end_round(goes_on=bool(self._groups))
        return results

    def _member(self, sequence: RunningSequence) -> _Member:
        return next(member for member in self._members.values() if member.sequence is sequence)

    def _prefill(self) -> list[tuple[_Member, Result]]:
        """Write a chunk of the first prompt that waits, or several short prompts.

        Sequences whose prompts are written begin alone.
        """
        if self._reading is None and self.read_together([m.sequence for m in self._unstarted()]):
            return []
        while self._reading is not None or (self._waiting and sum(self.group_sizes) < self.max_running):
            if self._reading is None:
                member = self._waiting.popleft()
                steps = self.timed(member.sequence.prefill(self.chunk), member.sequence.target)
                self._reading = member, steps
            member, steps = self._reading
            try:
                if next(steps, self) is not self:
                    return []
            except Exception as error:
                self._reading = None
                del self._members[member.id]
                return [(member, error)]
            self._reading = None
            member.sequence.begin()
            policy = None if self._policies is None else self._policies()
            self._groups.append(Group([member.sequence], SingleTarget(member.sequence.target), policy))
        return []

    def _regroup(self) -> list[Group]:
        """Merge each sequence that decodes alone into a group that fits, once neither has a queued token.

        Returns the groups that must not queue a token, because a merge waits for them.
        """
        draining: list[Group] = []
        for single in [group for group in self._groups if isinstance(group.targets, SingleTarget)]:
            if not isinstance(single.targets, SingleTarget):  # another one has joined it
                continue
            others = (group for group in self._groups if group is not single and self._fits(group, single))
            other = next(others, None)
            if other is None:
                continue
            if single.queued is not None or other.queued is not None:
                draining += [single, other]
            else:
                self._merge(other, single)
        return draining

    def _fits(self, group: Group, single: Group) -> bool:
        """Return True if a sequence and a group may share buffers: they waste little memory."""
        sizes = [s.target.size for each in (group, single) for s in each.sequences]
        # A target without a row has no buffers yet: a prompt of one token.
        if self.target_batch is None or not min(sizes):
            return False
        padding = len(sizes) * max(sizes) - sum(sizes)
        row_bytes = single.sequences[0].target.row_bytes
        return padding <= sum(sizes) or padding * row_bytes <= self._max_padding

    def _merge(self, group: Group, single: Group) -> None:
        """Move the only sequence of `single` to `group`."""
        assert self.target_batch is not None
        self._groups.remove(single)
        targets = group.targets
        if not isinstance(targets, TargetBatch):
            targets = group.targets = self.target_batch()
            targets.join(group.sequences[0].target)
        targets.join(single.sequences[0].target)
        group.sequences += single.sequences

    def _leave(self, group: Group, member: _Member) -> None:
        index = group.sequences.index(member.sequence)
        if not isinstance(group.targets, TargetBatch):
            group.close()
            self._groups.remove(group)
            return
        group.remove(index)
        group.targets.leave(index, keep=member.park)
        if len(group.sequences) == 1:  # a single sequence needs no padding, mask or copy
            group.queued = None
            last = self._member(group.sequences[0])
            group.targets.leave(0, keep=True)
            group.targets = SingleTarget(last.sequence.target)
