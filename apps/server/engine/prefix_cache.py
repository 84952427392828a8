"""Keep the caches of earlier prompts in memory; `prefix_files.py` keeps them in files, too.

A conversation goes on in its own sequence. One that only shares a beginning with a kept sequence gets a copy
of that beginning, a fork. Under pressure the sequence goes that costs least to read again per byte.
"""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal
from weakref import WeakKeyDictionary

import mlx.core as mx
import numpy as np

from mlx_spec.decode.sequence import CachedSequence, Reread
from mlx_spec.errors import InvalidValue
from mlx_spec.model.rewind_points import RewindKey
from mlx_spec.model.target import LMTarget
from mlx_spec.prompt import Identity, Prompt, shared_prefix
from mlx_spec.types import CacheState

from .prefix_files import PrefixFiles

Snapshot = tuple[Identity, CacheState]  # identity and caches of a sequence, to begin other sequences with


@dataclass
class CacheCounters:
    """Counts the work of a prefix cache since its start."""

    forks: int = 0  # sequences that began with a copy of another one
    fork_bytes: int = 0
    fork_seconds: float = 0.0  # of the host, which prepares the copies
    evicted: int = 0  # sequences that were dropped
    evicted_tokens: int = 0  # tokens of them that no other sequence had
    dropped_rewind_points: int = 0  # for memory


@dataclass(eq=False)
class Kept:
    """A sequence in memory, and when it was used last, in prompts."""

    sequence: CachedSequence
    used: int = 0
    is_lent: bool = True
    # Another prompt has its last question, too, and another text after it: thinking was left out, perhaps.
    is_superseded: bool = False

    @property
    def target(self) -> LMTarget:
        return self.sequence.target


@dataclass(frozen=True)
class Victim:
    """A part of what is kept that can be dropped."""

    worth: float  # tokens that its loss costs per byte, less if it was not used for long
    kept: Kept
    nbytes: int
    part: Literal["slack", "sequence"] | RewindKey  # unused columns, all, or a rewind point


@dataclass(frozen=True)
class Match:
    """Says how many tokens a sequence has of a prompt."""

    kept: Kept
    shared: int
    reused: int  # fewer than `shared` if windows or states cannot go back there

    def order(self) -> tuple[int, bool]:
        """Return a key: the best match is the greatest. Among equals it is a free one."""
        return self.reused, not self.kept.is_lent


@dataclass(eq=False)
class PrefixCache:
    """Sequences with their caches: free ones, and ones lent to requests.

    At most `count` sequences are kept, lent ones included, with at most `max_bytes()` bytes. A lent sequence
    is never dropped. `files` keeps sequences across restarts. Only the engine thread may use this class.
    """

    open: Callable[[], CachedSequence]
    count: int
    max_bytes: Callable[[], int]
    files: PrefixFiles | None = None
    # Tokens that a fork must save, for the prompt and for the sequence that it is taken from. A copy
    # costs memory and some milliseconds. 64 beat 256 on recorded sessions: pairs of sub-agents part late.
    min_fork: int = 64
    counters: CacheCounters = field(default_factory=CacheCounters)
    _kept: list[Kept] = field(default_factory=list)  # the one given back last at the end
    _prompts: int = 0  # since the start
    _forgotten: deque[Identity] = field(default_factory=deque)  # dropped sequences, the newest last
    _change: object = field(default_factory=object)  # another one after each change of the kept sequences
    # By prompt that waits for another one: the last change, and how many tokens could be reused then.
    _waiting: WeakKeyDictionary[Prompt, tuple[object, int]] = field(default_factory=WeakKeyDictionary)

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def nbytes(self) -> int:
        return _bytes(self._kept)

    @property
    def rewind_points_nbytes(self) -> int:
        """Return the bytes of the rewind points among them."""
        return sum({n: size for kept in self._kept for n, size in kept.target.pinned.items()}.values())

    @property
    def used_nbytes(self) -> int:
        return _bytes(kept for kept in self._kept if kept.is_lent)

    def take(self, prompt: Prompt, snapshot: Snapshot | None = None) -> CachedSequence:
        """Lend a sequence until `give_back` or `forget`: a copy of `snapshot`, or the best for the prompt."""
        kept = self._best(prompt) if snapshot is None else Kept(self._copy(snapshot))
        self._prompts += 1
        kept.is_lent, kept.used, kept.is_superseded = True, self._prompts, False
        self._change = object()
        if kept not in self._kept:
            self._kept.append(kept)
            self._drop(0, len(self) - self.count)
        if snapshot is not None:
            self.shrink()
        return kept.sequence

    def give_back(self, sequence: CachedSequence) -> None:
        """Keep a lent sequence with the tokens that it has now.

        A fork that was cancelled before its copies were made is dropped: it has its origin's tokens
        only, and keeps the buffers that they are in.
        """
        kept = next(kept for kept in self._kept if kept.sequence is sequence)
        self._kept.remove(kept)
        self._change = object()
        if sequence.identity.size and not sequence.target.has_copies:
            kept.is_lent, kept.used = False, self._prompts
            self._kept.append(kept)
            if self.files is not None:
                self.files.offer(sequence)
        self.shrink()

    def forget(self, sequence: CachedSequence) -> None:
        """Drop a lent sequence, because an error left its caches in an unknown state."""
        self._kept = [kept for kept in self._kept if kept.sequence is not sequence]

    def shrink(self, reserved: int = 0) -> None:
        """Drop what is worth least until both limits hold and `reserved` bytes are left."""
        self._drop(self.nbytes + reserved - self.max_bytes(), len(self) - self.count)

    def waits(self, prompt: Prompt, least: int = 256) -> bool:
        """Return True while more of a prompt will be in memory soon.

        A file with its beginning is checked on another thread, or its beginning is read for another prompt
        that is at least `least` tokens ahead of what can be reused now. That one then leaves a rewind point
        where this one parts from it. Prompts are read one after the other in any case, so waiting takes no
        longer than reading both.
        """
        if self.files is not None and self.files.is_checking(prompt, self._reusable(prompt)):
            return True
        known = None
        for kept in (kept for kept in self._kept if kept.is_lent):
            target, coming = kept.target, kept.sequence.coming(prompt)
            if coming < least or (target.size >= coming and not target.is_in_pass):
                continue
            if known is None:
                known = self._reusable(prompt)
            if min(coming, len(prompt) - 2) >= known + least:
                kept.sequence.pin_at([coming])
                return True
        return False

    def close(self) -> None:
        """Write free sequences to the files, the one used last first."""
        if self.files is not None:
            self.files.close([kept.sequence for kept in self._free[::-1]])

    def snapshot(self, sequence: CachedSequence) -> Snapshot | None:
        """Return a copy of the caches of a lent sequence; None if a drafter's caches cannot be copied."""
        try:
            state = sequence.state()
        except InvalidValue:
            return None
        # Else the next write would copy buffers that are still referenced.
        mx.eval(list(state.arrays.values()))
        return sequence.identity, state

    def _copy(self, snapshot: Snapshot) -> CachedSequence:
        sequence = self.open()
        sequence.restore(*snapshot)
        return sequence

    # --- the best for a prompt

    def matches(self, prompt: Prompt) -> list[Match]:
        """Return what each sequence has of a prompt."""
        able = (kept for kept in self._kept if not kept.target.is_in_pass)
        return [Match(kept, *kept.sequence.match(prompt)) for kept in able]

    def _reusable(self, prompt: Prompt) -> int:
        """Return how many tokens of a prompt can be reused. It is counted again after each change."""
        if self._waiting.get(prompt, (None, 0))[0] is not self._change:
            self._waiting[prompt] = self._change, max((m.reused for m in self.matches(prompt)), default=0)
        return self._waiting[prompt][1]

    def _best(self, prompt: Prompt) -> Kept:
        """Return a kept sequence that can be rewound to the prompt, a fork of one, or a new one."""
        matches = self.matches(prompt)
        order = [match for match in sorted(matches, key=Match.order) if match.reused]
        best, reused = None, order[-1].reused if order else 0
        if self.files is not None and (stored := self.files.restore(prompt, reused, self.open)) is not None:
            best, reused = Kept(stored), stored.reusable(prompt)
        while best is None and order:
            match = order.pop()
            best, reused = self._lend(match, prompt), match.reused
            if match.kept.is_lent:  # it cannot be forked, so the next best
                continue
            break
        if best is None:
            best, reused = Kept(self.open()), 0
        for match in matches:
            has_question = match.shared >= match.kept.sequence.question_end
            match.kept.is_superseded |= has_question and not match.kept.is_lent
        parted = {match.shared for match in matches if match.shared > max(reused, self.min_fork)}
        best.sequence.pin_at(parted)
        forgotten = max((shared_prefix(each, prompt.identity) for each in self._forgotten), default=0)
        in_memory = max((match.shared for match in matches), default=0)
        if self.files is not None:  # read before the server started, perhaps
            forgotten = max(forgotten, self.files.known(prompt))
        known = max(in_memory, min(forgotten, max(len(prompt) - 2, 0)))
        reason: Literal["evicted", "no place"] = "no place" if in_memory == known else "evicted"
        best.sequence.reread = Reread(known - reused, reason) if known > reused else None
        return best

    def _lend(self, match: Match, prompt: Prompt) -> Kept | None:
        """Return the sequence of a match, or a fork of it if it would lose too much.

        Without room for a fork it loses that. None if a fork would save too little, or one of a lent sequence
        is not possible.
        """
        best, reused = match.kept, match.reused
        held = best.sequence.identity
        repeats = np.array_equal(held[: len(prompt)], prompt.identity)  # its answer is not needed
        lost = 0 if repeats else len(held) - max(match.shared, self._elsewhere(best))
        if not best.is_lent and lost <= min(self.min_fork, reused):
            return best
        if reused < self.min_fork:
            return None
        nbytes = best.sequence.fork_bytes * reused // len(held)
        worth = math.inf if best.is_lent else self._worth(best, lost / max(nbytes, 1))
        excess, many = self.nbytes + nbytes - self.max_bytes(), len(self) + 1 - self.count
        if self._drop(excess, many, worth, but=best):
            started = time.perf_counter()
            fork = self.open()
            if fork.fork_from(best.sequence, prompt, in_use=best.is_lent):
                self.counters.forks += 1
                self.counters.fork_bytes += fork.nbytes
                self.counters.fork_seconds += time.perf_counter() - started
                return Kept(fork)
        if best.is_lent:
            return None
        self._remember(best.sequence)
        self.counters.evicted_tokens += lost
        return best

    # --- what goes

    @property
    def _free(self) -> list[Kept]:
        return [kept for kept in self._kept if not kept.is_lent]

    def _elsewhere(self, one: Kept) -> int:
        """Return how many tokens of a sequence another one has, too."""
        held = one.sequence.identity
        others = (kept.sequence.identity for kept in self._kept if kept is not one)
        return max((shared_prefix(held, other) for other in others), default=0)

    def _worth(self, kept: Kept, cost: float, chance_superseded: float = 1 / 4) -> float:
        """Return the worth of a part of a sequence whose loss costs so many tokens per byte."""
        chance = chance_superseded if kept.is_superseded else 1.0
        return cost * chance / (1 + self._prompts - kept.used)

    def _victims(self, but: Kept | None, gone: Sequence[Kept] = ()) -> list[Victim]:
        """Return all that can be dropped, what is worth least first, once some sequences are gone.

        Lent sequences lose only rewind points.
        """
        # In the order of their texts, each shares most with a neighbour.
        left = (kept for kept in self._kept if kept not in gone)
        order = sorted(left, key=lambda kept: kept.sequence.identity.tobytes())
        held = [kept.sequence.identity for kept in order]
        shared = [0, *map(shared_prefix, held, held[1:]), 0]
        holders = Counter(number for kept in order for number in kept.target.pinned)
        by_block = defaultdict[int, set[object]](set)
        for kept in order:
            points = kept.target.rewind_points
            for point in points:
                for block in point.blocks:
                    by_block[id(block)].add(point.key)
            for block in points.parked.blocks if points.parked is not None else ():
                by_block[id(block)].add(kept)
        victims, of_points = list[Victim](), dict[RewindKey, Victim]()
        for i, kept in enumerate(order):
            if kept is but:
                continue
            pinned, its_keys = kept.target.pinned, {point.key for point in kept.target.rewind_points}
            elsewhere = {number for number in pinned if by_block[number] - its_keys}
            for cost, nbytes, point in kept.target.rewind_points.costs(elsewhere):
                victim = Victim(self._worth(kept, cost), kept, nbytes, point.key)
                if nbytes and (point.key not in of_points or of_points[point.key].worth < victim.worth):
                    of_points[point.key] = victim
            if kept.is_lent:
                continue
            if slack := kept.target.slack():
                victims.append(Victim(0.0, kept, slack, "slack"))
            tokens = len(held[i]) - max(shared[i], shared[i + 1])
            nbytes = kept.sequence.nbytes - sum(n for number, n in pinned.items() if holders[number] > 1)
            core = kept.sequence.nbytes - slack - sum(pinned.values())
            core += sum(b.nbytes for b in kept.target.rewind_points.core() if holders[id(b)] == 1)
            victims.append(Victim(self._worth(kept, tokens / max(core, 1)), kept, nbytes, "sequence"))
        needed = () if but is None else {point.key for point in but.target.rewind_points}
        victims += [victim for key, victim in of_points.items() if key not in needed]
        return sorted(victims, key=lambda victim: victim.worth)

    def _drop(self, excess: int, many: int, worth: float = math.inf, but: Kept | None = None) -> bool:
        """Drop what is worth least, until `excess` bytes and `many` sequences are gone.

        Drops nothing and returns False if that takes something that is worth more than `worth`.
        """
        chosen, freed, gone = dict[tuple[Kept, object], Victim](), Counter[Kept](), list[Kept]()
        is_short = True
        while is_short and (excess > 0 or many > 0):
            is_short = False
            for victim in self._victims(but, gone):
                if victim.worth >= worth or (excess <= 0 and many <= 0):
                    break
                is_whole = victim.part == "sequence"
                if (excess > 0 or is_whole) and (victim.kept, victim.part) not in chosen:
                    nbytes = victim.nbytes - freed[victim.kept] * is_whole
                    chosen[victim.kept, victim.part] = victim
                    freed[victim.kept] += nbytes
                    excess, many = excess - nbytes, many - is_whole
                if is_whole:  # the others are worth more now: nothing else has what they shared with it
                    gone.append(victim.kept)
                    is_short = True
                    break
        is_enough = excess <= 0 and many <= 0
        if not is_enough and worth < math.inf:
            return False
        for victim in chosen.values():
            if victim.kept not in gone:
                self._drop_part(victim)
        for kept in gone:
            self.counters.evicted += 1
            self.counters.evicted_tokens += len(kept.sequence.identity) - self._elsewhere(kept)
            self._kept.remove(kept)
            self._remember(kept.sequence)
        return is_enough

    def _drop_part(self, victim: Victim) -> None:
        if isinstance(victim.part, str):
            victim.kept.target.trim()
        else:
            for target in (kept.target for kept in self._kept):
                if victim.part in {point.key for point in target.rewind_points}:
                    target.drop_rewind_point(victim.part[0])
            self.counters.dropped_rewind_points += 1

    def _remember(self, sequence: CachedSequence, most: int = 2**20) -> None:
        """Write what is dropped to a file, and keep its identity, of the last `most` tokens: 8 MB."""
        if self.files is not None:
            self.files.offer(sequence, growth=1)
        self._forgotten.append(sequence.identity.copy())
        while sum(map(len, self._forgotten)) > most:
            self._forgotten.popleft()


def _bytes(kept: Iterable[Kept]) -> int:
    """Return the bytes of sequences. Rewind points that forks share are counted once."""
    total, seen = 0, set[int]()
    for one in kept:
        total += one.sequence.nbytes
        for number, nbytes in one.target.pinned.items():
            total -= nbytes if number in seen else 0
            seen.add(number)
    return total
