"""The one scheduler: which sequence begins, whose prompt is read, and which sequences decode.

All code that answers several prompts uses `Batch`: the server, `Pair.generate_batch`, training, self-tests.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import cached_property, partial

import mlx.core as mx

from mlx_spec.decode import running
from mlx_spec.decode.pace import MAX_PAUSE_S, Clock, PromptPace
from mlx_spec.decode.round import Group
from mlx_spec.decode.running import PrefillStep, RunningSequence
from mlx_spec.device import resident
from mlx_spec.errors import InvalidValue, caught
from mlx_spec.model.row_class import RowClass
from mlx_spec.model.target_batch import SingleTarget, TargetBatch
from mlx_spec.policy.batch import BatchPolicy
from mlx_spec.types import Round

Result = Round | Exception


class Entry:
    """A sequence of a batch. It begins once there is room for it.

    Subclasses override the hooks. An error of `begin` or `on_progress` ends this entry and no other.
    """

    id: int  # in its batch
    sequence: RunningSequence  # set when it begins

    def __init__(self, owner: object = None, *, park: bool = False) -> None:
        self.owner = object() if owner is None else owner  # the one with the fewest begun entries is next
        self.park = park  # its caches are used again after it has left

    def begin(self) -> RunningSequence:
        """Return the sequence, with caches."""
        return self.sequence

    def waits(self) -> bool:
        """Return True while later entries may begin before it."""
        return False

    def has_room(self, unread: int) -> bool:
        """Return True if it may begin beside prompts with `unread` tokens to read."""
        return True

    def on_progress(self, seconds: float) -> None:
        """Take the seconds of a chunk of the prompt, which is read once `sequence.unread` is 0.

        Called at least once; the first round follows in the same step or later. May add and remove entries.
        """


class Batch:
    """Decodes many sequences: one round of each in every step.

    `target_batch` makes the targets of a group; if it is None, sequences cannot share a pass and decode in
    turns. `policies` makes the policy of a group; if it is None, each sequence decides for itself how much to
    draft. Every sequence gets the text that it would get alone. A sequence that fails leaves, and the others
    go on. Sequences of unequal length share a pass if at most `max_padding` bytes, or half of the buffers,
    are unused.
    """

    def __init__(
        self,
        target_batch: Callable[[], TargetBatch] | None,
        max_running: int,
        policies: Callable[[], BatchPolicy] | None = None,
        max_padding: int = 2**30,
        clock: Clock = time.perf_counter,
    ) -> None:
        if not isinstance(max_running, int) or max_running < 1:
            raise InvalidValue(f"max_running is {max_running}, it must be 1 or more, and an integer")
        self.target_batch = target_batch
        self.max_running = max_running  # sequences that have begun; waiting ones have no caches
        self._policies = policies
        self._max_padding = max_padding
        self._clock = clock
        self._pace = PromptPace(clock)
        self._ids = itertools.count()
        self._entries: dict[int, Entry] = {}  # all, by id
        self._waiting: list[Entry] = []  # entries that have not begun
        self._reading: dict[Entry, Generator[PrefillStep, None, None]] = {}  # their prompts are read
        self._decoding: dict[RunningSequence, Entry] = {}
        self._groups: list[Group] = []  # of decoding sequences
        self._results: list[tuple[int, Result]] = []  # of this step
        self._oldest_reads = False  # True if the oldest prompt is read next, False if the shortest
        self._is_deferred = False  # first rounds wait until other prompts are read

    def __len__(self) -> int:
        """Return the number of entries, waiting ones included."""
        return len(self._entries)

    @property
    def begun(self) -> int:
        return len(self._reading) + len(self._decoding)

    @property
    def is_decoding(self) -> bool:
        """Return True if sequences decode, and their first round is not deferred."""
        return bool(self._groups) and not self._is_deferred

    @property
    def group_sizes(self) -> list[int]:
        return [len(group.sequences) for group in self._groups]

    @property
    def nbytes(self) -> int:
        """Return the bytes of shared caches."""
        targets = [group.targets for group in self._groups]
        return sum(target.nbytes for target in targets if isinstance(target, TargetBatch))

    def add(self, sequence: RunningSequence, *, park: bool = False) -> int:
        """Add a sequence. Return its id.

        With `park`, its target and drafters keep their caches when it has left, for a later sequence.
        """
        entry = Entry(park=park)
        entry.sequence = sequence
        return self.enter(entry)

    def enter(self, entry: Entry) -> int:
        entry.id = next(self._ids)
        self._entries[entry.id] = entry
        self._waiting.append(entry)
        return entry.id

    def remove(self, id: int) -> None:
        """Remove a sequence in whatever state it is. Do nothing if it has left."""
        entry = self._entries.pop(id, None)
        if entry is None:
            return
        if entry in self._waiting:
            self._waiting.remove(entry)
        elif entry in self._reading:
            del self._reading[entry]
        else:
            self._leave(entry)

    def step(self) -> list[tuple[int, Result]]:
        """Begin entries, read a chunk of a prompt, and decode a round of all whose prompts are read.

        Returns the round of each by its id, or the error that ended it. A sequence leaves with the round that
        has a finish reason, or with its error.
        """
        self._results = []
        self._begin()
        self._start()
        self._is_deferred = self._defers_decoding()
        self._read()
        if not self._is_deferred:
            self._decode()
        return self._results

    def run(self) -> Iterator[tuple[int, Result]]:
        """Yield what `step` returns until no sequence is left."""
        with resident():
            while self._entries:
                yield from self.step()

    # --- who begins

    def _begin(self) -> None:
        """Begin entries while there is room: always the first entry of the owner with the fewest begun ones.

        Entries that wait for something else are passed over. If memory does not suffice for the one that is
        next, no later entry begins either, so none starves.
        """
        while self._waiting and self.begun < self.max_running:
            owners = Counter(entry.owner for entry in (*self._reading, *self._decoding.values()))
            order = sorted(self._waiting, key=lambda entry: owners[entry.owner])
            entry = next((entry for entry in order if not entry.waits()), None)
            if entry is None or not entry.has_room(sum(reading.sequence.unread for reading in self._reading)):
                return
            self._waiting.remove(entry)
            self._attempt(entry, partial(self._begin_entry, entry))

    def _begin_entry(self, entry: Entry) -> None:
        entry.sequence = entry.begin()
        self._begin_reading(entry)
        if not entry.sequence.unread:
            self._end_chunk(entry, 0.0)

    def _begin_reading(self, entry: Entry) -> None:
        self._reading[entry] = entry.sequence.prefill(self._chunk, lambda: self.is_decoding)

    def _attempt(self, entry: Entry, action: Callable[[], object]) -> None:
        """Do something for an entry. If that fails, it leaves with the error."""
        try:
            action()
        except Exception as error:  # whatever it is, the others go on
            self._results.append((entry.id, error))
            self._entries.pop(entry.id, None)
            self._reading.pop(entry, None)

    # --- who reads

    def _read(self) -> None:
        """Read a chunk of one prompt, or several short prompts in one pass.

        The shortest prompt is first, but every other time the oldest: short ones are quick, none starves.
        Before all others a fork copies its rows: its origin may be another prompt's, which then waits.
        """
        if not self._reading:
            return
        self._oldest_reads = not self._oldest_reads and not self._is_deferred
        order = sorted(self._reading, key=lambda entry: entry.sequence.unread)
        copying = (entry for entry in self._reading if entry.sequence.target.has_copies)
        first = next(copying, next(iter(self._reading)) if self._oldest_reads else order[0])
        start = self._clock()
        entries = self._read_together(first, order)
        if not entries:
            entries = [first]
            self._attempt(first, partial(self._read_chunk, first))
        seconds = self._clock() - start
        for entry in entries:
            if entry in self._reading:  # else it failed or was removed
                self._attempt(entry, partial(self._end_chunk, entry, seconds))

    def _read_chunk(self, entry: Entry) -> None:
        """Read a chunk. If it comes in steps, take as many as fit, also of the next chunks."""
        start, steps = self._clock(), entry.sequence.target.prefill_parts
        most_s = self._pace.seconds() if self.is_decoding else MAX_PAUSE_S
        while True:
            began = self._clock()
            step = next(self._reading[entry], PrefillStep(ends_chunk=True))
            seconds = self._clock() - began
            self._pace.read(step, seconds, steps)
            is_part = step.share < 1 and not step.unobserved
            if is_part and self._pace.chunk() < step.rows and not entry.sequence.prompt.spans:
                # On this device its steps take too long: it is read again in smaller chunks.
                self._reading[entry].close()
                self._begin_reading(entry)
            is_pass = step.rows > 0 and step.share == 1
            next_s = max(seconds, self._pace.step_seconds(step.rows) if step.rows else 0.0)
            if is_pass or not entry.sequence.unread or self._clock() - start + next_s > most_s:
                return

    def _read_together(self, first: Entry, order: Sequence[Entry]) -> list[Entry]:
        """Read `first` and the shortest other prompts in one pass, without their last tokens.

        Returns the entries that were read. Reads nothing if fewer than two fit, or if `first` does not. If
        the pass fails, prompts are read one by one, which finds the failing one.
        """
        # Beyond 512 rows, padding included, computing takes longer than reading the weights on any Mac. So
        # separate passes cost no more.
        chosen, count, most = list[Entry](), 0, 512
        if self.is_decoding:
            most = min(most, self._pace.shared_rows())
        for entry in order:
            if entry.sequence.can_share_prefill:
                unread = entry.sequence.unread
                count += unread
                # The pass has at most 1.5 rows for each token that it reads, because padding costs time, too.
                if unread * (len(chosen) + 1) > min(most, 1.5 * count):
                    break
                chosen.append(entry)
        sequences = [entry.sequence for entry in chosen]
        # Their caches move to shared buffers and back, in lanes as long as the longest.
        moved = len(chosen) * max((sequence.target.nbytes for sequence in sequences), default=0)
        fits = len(chosen) > 1 and first in chosen and moved <= self._max_padding
        if self.target_batch is None or not fits:
            return []
        start, targets = self._clock(), self.target_batch()
        sizes = [sequence.target.size for sequence in sequences]
        prompts = [sequence.history[size:-1] for sequence, size in zip(sequences, sizes, strict=True)]
        try:
            for sequence in sequences:
                targets.join(sequence.target)
            tokens = mx.array(list(itertools.chain.from_iterable(prompts)), dtype=mx.int32)
            features = targets.prefill(tokens, list(map(len, prompts)))
        except BaseException as error:
            caught(error)
            features = []
        for index, entry in reversed(list(enumerate(chosen))):
            _take_back(targets, index, entry.sequence, read=len(prompts[index]) if features else 0)
            if not features:
                entry.sequence.recover(sizes[index])
                self._begin_reading(entry)
        for sequence, its_features in zip(sequences, features, strict=False):
            sequence.observe(sequence.history, its_features)
        mx.clear_cache()
        steps = sequences[0].target.prefill_parts
        self._pace.read(PrefillStep(max(map(len, prompts)) * len(prompts)), self._clock() - start, steps)
        return chosen if features else []

    def _end_chunk(self, entry: Entry, seconds: float) -> None:
        if not entry.sequence.unread:
            for _ in self._reading[entry]:  # the code after its last chunk
                pass
        entry.on_progress(seconds)

    def _chunk(self) -> int:
        return self._pace.chunk() if self.is_decoding else running.PREFILL_STEP

    # --- who decodes

    def _start(self) -> None:
        """Let sequences whose prompts are read decode, each in a group of one at first."""
        for entry in [entry for entry in self._reading if not entry.sequence.unread]:
            self._attempt(entry, partial(self._start_entry, entry))

    def _start_entry(self, entry: Entry) -> None:
        del self._reading[entry]
        entry.sequence.begin()
        self._decode_alone(entry.sequence)
        self._decoding[entry.sequence] = entry

    def _decode_alone(self, sequence: RunningSequence) -> None:
        policy = None if self._policies is None else self._policies()
        self._groups.append(Group([sequence], SingleTarget(sequence.target), policy))

    def _defers_decoding(self) -> bool:
        """Return True if sequences could decode, but should wait and begin together with others."""
        unread = min((entry.sequence.unread for entry in self._reading), default=None)
        return bool(self._groups) and unread is not None and self._pace.defers_decoding(unread)

    def _decode(self) -> None:
        draining = self._regroup()
        groups = list(self._groups)
        for group in groups:
            ids = [self._decoding[sequence].id for sequence in group.sequences]
            rounds: list[Result] = [s.error for s in group.sequences if s.error is not None]
            try:
                rounds = rounds or group.step(
                    may_queue=group not in draining, may_probe=not self._pace.reading
                )
            except BaseException as error:
                if isinstance(group.targets, TargetBatch):
                    caught(error)
                    groups += self._separate(group, group.targets)
                    continue
                group.sequences[0].error = caught(error)
                rounds = [caught(error)]
            for id, round in zip(ids, rounds, strict=True):
                self._results.append((id, round))
                if isinstance(round, Exception) or round.finish_reason is not None:
                    self.remove(id)
        self._pace.end_round(goes_on=bool(self._groups))

    def _regroup(self) -> list[Group]:
        """Merge each sequence that decodes alone into a group that fits, once neither has a queued token.

        A group whose next passes would not agree with plain decoding, and must, parts into single sequences.
        Returns the groups that must not queue another token, so that they can merge or part in the next step.
        """
        draining: list[Group] = []
        for group in list(self._groups):
            if isinstance(group.targets, TargetBatch) and group.targets.must_part:
                if group.queued is None:
                    self._part(group, group.targets)
                else:
                    draining.append(group)
        for single in [group for group in self._groups if isinstance(group.targets, SingleTarget)]:
            if not isinstance(single.targets, SingleTarget):  # another sequence has joined it meanwhile
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
        """Return True if a sequence and a group may share buffers, with little padding."""
        sizes = [s.target.size for one in (group, single) for s in one.sequences]
        # After a prompt of one token a target has no rows, and so no buffers yet.
        if self.target_batch is None or not min(sizes):
            return False
        if any(s.failed_passes > 1 for one in (group, single) for s in one.sequences):
            return False
        if single.sequences[0].target.rows.is_required and self._row_class.must_part(sizes):
            return False
        padding = len(sizes) * max(sizes) - sum(sizes)
        row_bytes = single.sequences[0].target.row_bytes
        return padding <= sum(sizes) or padding * row_bytes <= self._max_padding

    @cached_property
    def _row_class(self) -> RowClass:
        assert self.target_batch is not None
        return self.target_batch().rows

    def _part(self, group: Group, targets: TargetBatch) -> None:
        """Let each sequence of a group decode alone."""
        self._groups.remove(group)
        for index, sequence in reversed(list(enumerate(group.sequences))):
            targets.leave(index, keep=sequence.error is None)
            self._decode_alone(sequence)

    def _separate(self, group: Group, targets: TargetBatch) -> list[Group]:
        """Let each sequence of a pass that failed go on alone: only those that fail again end.

        Returns their groups. The second time, a sequence decodes alone until it ends.
        """
        self._groups.remove(group)
        count = len(self._groups)
        mx.clear_cache()  # the pass may have lacked memory
        for index, sequence in reversed(list(enumerate(group.sequences))):
            _take_back(targets, index, sequence)
            sequence.failed_passes += 1
            sequence.attempt(sequence.reread, None)
            self._decode_alone(sequence)
        return self._groups[count:]

    def _merge(self, group: Group, single: Group) -> None:
        assert self.target_batch is not None
        self._groups.remove(single)
        targets = group.targets
        if not isinstance(targets, TargetBatch):
            targets = group.targets = self.target_batch()
            targets.join(group.sequences[0].target)
        targets.join(single.sequences[0].target)
        group.sequences += single.sequences

    def _leave(self, entry: Entry) -> None:
        """Remove a sequence from its group. If one is left, it goes on as a single sequence."""
        entry.sequence.end()
        del self._decoding[entry.sequence]
        group = next(group for group in self._groups if entry.sequence in group.sequences)
        if not isinstance(group.targets, TargetBatch):
            if entry.sequence.error is None:  # else its target may fail again
                group.close()
            self._groups.remove(group)
            return
        index = group.sequences.index(entry.sequence)
        group.remove(index)
        # After an error its rows are unknown: to compute them may fail again.
        group.targets.leave(index, keep=entry.park and entry.sequence.error is None)
        if len(group.sequences) == 1:  # a single sequence needs no padding, mask or copy
            (single,) = group.sequences
            group.queued = None
            group.targets.leave(0, keep=single.error is None)
            group.targets = SingleTarget(single.target)


def _take_back(targets: TargetBatch, index: int, sequence: RunningSequence, *, read: int = 0) -> None:
    """Give a sequence its caches back; empty ones if that fails. It is as in `TargetBatch.leave`."""
    try:
        targets.leave(index, keep=True, read=read)
    except BaseException as error:
        caught(error)
        sequence.target.forget()
