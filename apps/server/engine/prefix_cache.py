"""Keep the caches of earlier prompts in memory; `prefix_files.py` keeps them in files, too.

A conversation goes on in its own sequence. One that only shares a beginning with a kept sequence gets a copy
of that beginning, a fork. Under pressure the sequence goes that costs least to read again per byte.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from mlx_spec.decode.sequence import CachedSequence, Reread, SequenceParts
from mlx_spec.errors import InvalidValue
from mlx_spec.prompt import Identity, Prompt, shared_prefix
from mlx_spec.types import CacheState

from .prefix_files import PrefixFiles

Snapshot = tuple[Identity, CacheState]  # identity and caches of a sequence, to begin other sequences with


@dataclass
class CacheCounters:
    """Counts the work of a prefix cache since its start."""

    forks: int = 0
    fork_bytes: int = 0
    fork_seconds: float = 0.0
    evicted: int = 0  # sequences that were dropped
    evicted_tokens: int = 0  # that no other sequence had
    reread_evicted: int = 0  # tokens of prompts that were read again after they had been dropped
    reread_no_place: int = 0  # tokens of prompts that are in memory, but windows or states cannot go back


@dataclass(eq=False)
class Kept:
    """A sequence in memory, and how often it was used.

    Its worth is that of GreedyDual-Size with frequencies: what its loss costs per byte, times its uses, above
    the worth of the last victim when it was last used. So an unused sequence grows old.
    """

    sequence: CachedSequence
    is_lent: bool = True
    uses: int = 0
    floor: float = 0.0

    def worth(self, tokens: int, nbytes: int | None = None) -> float:
        """Return what it is worth not to read `tokens` of it again, which free `nbytes`."""
        return self.floor + self.uses * tokens / max(self.sequence.nbytes if nbytes is None else nbytes, 1)


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

    open: Callable[[], SequenceParts]
    count: int
    max_bytes: Callable[[], int]
    files: PrefixFiles | None = None
    # Tokens that a fork must save, for the prompt and for the sequence that it is taken from. A copy
    # costs memory and some milliseconds. 64 beat 256 on recorded sessions: pairs of sub-agents part late.
    min_fork: int = 64
    counters: CacheCounters = field(default_factory=CacheCounters)
    _kept: list[Kept] = field(default_factory=list)  # the one given back last at the end
    _floor: float = 0.0  # the worth of the last sequence that was dropped for memory
    _forgotten: deque[Identity] = field(default_factory=deque)  # dropped sequences, the newest last

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def nbytes(self) -> int:
        """Return the bytes of all caches."""
        return sum(kept.sequence.nbytes for kept in self._kept)

    @property
    def used_nbytes(self) -> int:
        """Return the bytes of the caches of lent sequences."""
        return sum(kept.sequence.nbytes for kept in self._kept if kept.is_lent)

    def take(self, prompt: Prompt, snapshot: Snapshot | None = None) -> CachedSequence:
        """Lend a sequence until `give_back` or `forget`: a copy of `snapshot`, or the best for the prompt."""
        kept = self._best(prompt) if snapshot is None else Kept(self._copy(snapshot))
        kept.is_lent, kept.uses, kept.floor = True, kept.uses + 1, self._floor
        if kept not in self._kept:
            self._drop_to(self.count - 1)
            self._kept.append(kept)
        if snapshot is not None:
            self.shrink()
        return kept.sequence

    def waits(self, prompt: Prompt) -> bool:
        """Return True while a file with a beginning of the prompt is checked on another thread."""
        if self.files is None:
            return False
        return self.files.is_checking(prompt, max((m.reused for m in self.matches(prompt)), default=0))

    def give_back(self, sequence: CachedSequence) -> None:
        """Keep a lent sequence with the tokens that it has now."""
        kept = next(kept for kept in self._kept if kept.sequence is sequence)
        self._kept.remove(kept)
        if sequence.identity.size:
            kept.is_lent = False
            self._kept.append(kept)
            if self.files is not None:
                self.files.offer(sequence)
        self.shrink()

    def forget(self, sequence: CachedSequence) -> None:
        """Drop a lent sequence, because an error left its caches in an unknown state."""
        self._kept = [kept for kept in self._kept if kept.sequence is not sequence]

    def shrink(self, reserved: int = 0) -> None:
        """Drop the sequences worth least until both limits hold and `reserved` bytes are left."""
        self._drop_to(self.count)
        while self.nbytes + reserved > self.max_bytes():
            if (victim := self._victim()) is None:
                return
            self._drop(*victim)

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
        mx.eval(
            list(state.arrays.values())
        )  # else the next write would copy buffers that are still referenced
        return sequence.identity, state

    def _copy(self, snapshot: Snapshot) -> CachedSequence:
        sequence = CachedSequence(self.open())
        sequence.restore(*snapshot)
        return sequence

    # --- the best for a prompt

    def matches(self, prompt: Prompt) -> list[Match]:
        """Return what each sequence has of a prompt."""
        able = (kept for kept in self._kept if not kept.sequence.parts.target.is_in_pass)
        return [Match(kept, *kept.sequence.match(prompt)) for kept in able]

    def _best(self, prompt: Prompt) -> Kept:
        """Return a kept sequence that can be rewound to the prompt, a fork of one, or a new one."""
        matches = self.matches(prompt)
        order = [match for match in sorted(matches, key=Match.order) if match.reused]
        found, reused = None, order[-1].reused if order else 0
        if self.files is not None and (stored := self.files.restore(prompt, reused, self.open)) is not None:
            found, reused = Kept(stored), stored.reusable(prompt)
        while found is None and order:
            match = order.pop()
            found, reused = self._lend(match, prompt), match.reused
            if match.kept.is_lent:  # it cannot be forked, so the next best
                continue
            break
        if found is None:
            found, reused = Kept(CachedSequence(self.open())), 0
        forgotten = max((shared_prefix(each, prompt.identity) for each in self._forgotten), default=0)
        in_memory = max((match.shared for match in matches), default=0)
        found.sequence.reread = self._reread(reused, in_memory, min(forgotten, max(len(prompt) - 2, 0)))
        return found

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
        nbytes = best.sequence.nbytes * reused // len(held)
        if self._make_room(best, nbytes, float("inf") if best.is_lent else best.worth(lost, nbytes)):
            started = time.perf_counter()
            fork = CachedSequence(self.open())
            if fork.fork_from(best.sequence, prompt, at_once=best.is_lent):
                self.counters.forks += 1
                self.counters.fork_bytes += fork.nbytes
                self.counters.fork_seconds += time.perf_counter() - started
                best.uses, best.floor = best.uses + 1, self._floor
                return Kept(fork)
        if best.is_lent:
            return None
        self._remember(held)
        self.counters.evicted_tokens += lost
        return best

    def _reread(self, reused: int, in_memory: int, forgotten: int) -> Reread | None:
        """Return what of a prompt is read again, and count it; None if nothing is."""
        known = max(in_memory, forgotten)
        if known <= reused:
            return None
        if in_memory == known:
            self.counters.reread_no_place += known - reused
            return Reread(known - reused, "no place")
        self.counters.reread_evicted += known - reused
        return Reread(known - reused, "evicted")

    # --- what goes

    @property
    def _free(self) -> list[Kept]:
        return [kept for kept in self._kept if not kept.is_lent]

    def _elsewhere(self, one: Kept) -> int:
        """Return how many tokens of a sequence another one has, too."""
        held = one.sequence.identity
        others = (kept.sequence.identity for kept in self._kept if kept is not one)
        return max((shared_prefix(held, other) for other in others), default=0)

    def _ranked(self, free: Iterable[Kept]) -> list[tuple[float, Kept]]:
        """Return free sequences with their worth, the least first."""
        # In the order of their texts, each shares most with a neighbour.
        order = sorted(self._kept, key=lambda kept: kept.sequence.identity.tobytes())
        held = [kept.sequence.identity for kept in order]
        shared = [0, *map(shared_prefix, held, held[1:]), 0]
        own = {id(kept): len(held[i]) - max(shared[i], shared[i + 1]) for i, kept in enumerate(order)}
        return sorted(((kept.worth(own[id(kept)]), kept) for kept in free), key=lambda each: each[0])

    def _victim(self) -> tuple[float, Kept] | None:
        """Return the free sequence that is worth least, and its worth."""
        return next(iter(self._ranked(self._free)), None)

    def _make_room(self, source: Kept, nbytes: int, worth: float) -> bool:
        """Make room for a fork, if all that has to go is worth less. Return True if there is room."""
        excess, many = self.nbytes + nbytes - self.max_bytes(), len(self) + 1 - self.count
        victims = []
        if excess > 0 or many > 0:
            for victim in self._ranked(kept for kept in self._free if kept is not source):
                if (excess <= 0 and many <= 0) or victim[0] >= worth:
                    break
                victims.append(victim)
                excess, many = excess - victim[1].sequence.nbytes, many - 1
        if excess > 0 or many > 0:
            return False
        for victim in victims:
            self._drop(*victim)
        return True

    def _drop_to(self, count: int) -> None:
        """Drop free sequences until at most `count` sequences are left."""
        while len(self) > count and (victim := self._victim()) is not None:
            self._drop(*victim)

    def _drop(self, worth: float, kept: Kept) -> None:
        self._floor = max(self._floor, worth)
        self.counters.evicted += 1
        self.counters.evicted_tokens += len(kept.sequence.identity) - self._elsewhere(kept)
        self._kept.remove(kept)
        self._remember(kept.sequence.identity)

    def _remember(self, identity: Identity, most: int = 2**20) -> None:
        """Keep the identity of what is dropped, of the last `most` tokens: 8 MB."""
        self._forgotten.append(identity.copy())
        while sum(map(len, self._forgotten)) > most:
            self._forgotten.popleft()
