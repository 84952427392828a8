"""Keep the caches of earlier prompts in memory; `prefix_files.py` keeps them in files, too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from mlx_spec.decode.sequence import CachedSequence, SequenceParts
from mlx_spec.errors import InvalidValue
from mlx_spec.prompt import Identity, Prompt
from mlx_spec.types import CacheState

from .prefix_files import PrefixFiles

Snapshot = tuple[Identity, CacheState]  # identity and caches of a sequence, to begin other sequences with


@dataclass(eq=False)
class PrefixCache:
    """Sequences with their caches: free ones, the one used last at the end, and ones lent to requests.

    At most `count` sequences are kept, lent ones included, with at most `max_bytes()` bytes. A lent sequence
    is never dropped. `files` keeps sequences across restarts. Only the engine thread may use this class.
    """

    open: Callable[[], SequenceParts]
    count: int
    max_bytes: Callable[[], int]
    files: PrefixFiles | None = None
    _free: list[CachedSequence] = field(default_factory=list)
    _used: list[CachedSequence] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self._free) + len(self._used)

    @property
    def nbytes(self) -> int:
        """Return the bytes of all caches."""
        return sum(sequence.nbytes for sequence in (*self._free, *self._used))

    @property
    def used_nbytes(self) -> int:
        """Return the bytes of the caches of lent sequences."""
        return sum(sequence.nbytes for sequence in self._used)

    def take(self, prompt: Prompt, snapshot: Snapshot | None = None) -> CachedSequence:
        """Lend a sequence until `give_back` or `forget`: a copy of `snapshot`, or the best for the prompt."""
        return self._best(prompt) if snapshot is None else self._copy(snapshot)

    def give_back(self, sequence: CachedSequence) -> None:
        """Keep a lent sequence with the tokens that it has now."""
        self._used.remove(sequence)
        if sequence.identity.size:
            self._free.append(sequence)
            if self.files is not None:
                self.files.offer(sequence)
        self.shrink()

    def forget(self, sequence: CachedSequence) -> None:
        """Drop a lent sequence, because an error left its caches in an unknown state."""
        self._used = [used for used in self._used if used is not sequence]

    def shrink(self, reserved: int = 0) -> None:
        """Forget the sequences used longest ago until both limits hold and `reserved` bytes are left."""
        del self._free[: max(len(self) - self.count, 0)]
        while self._free and self.nbytes + reserved > self.max_bytes():
            del self._free[0]

    def close(self) -> None:
        """Write free sequences to the files, the one used last first."""
        if self.files is not None:
            self.files.close(self._free[::-1])

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
        self._used.append(sequence)
        self.shrink()
        return sequence

    def _best(self, prompt: Prompt) -> CachedSequence:
        sequence = self._best_match(prompt) or self._replaceable(prompt)
        stored = None
        if self.files is not None:
            known = 0 if sequence is None else sequence.reusable(prompt)
            stored = self.files.restore(prompt, known, self.open)
        if sequence is None or stored is not None:
            del self._free[: max(len(self) + 1 - self.count, 0)]
            sequence = stored or CachedSequence(self.open())
        else:
            self._free.remove(sequence)
        self._used.append(sequence)
        return sequence

    def _best_match(self, prompt: Prompt) -> CachedSequence | None:
        """Return the free sequence with the longest common prefix, if that is most of the sequence.

        A prefix of the whole prompt is enough: the client repeats a request and does not need the old answer.
        """
        best = max(self._free, key=lambda sequence: sequence.shared(prompt), default=None)
        if best is None or not best.shared(prompt):
            return None
        held = best.identity
        repeats = np.array_equal(held[: len(prompt)], prompt.identity)
        min_shared = 0.5  # share of a sequence's tokens; with less, this is another conversation
        return best if repeats or best.shared(prompt) >= min_shared * len(held) else None

    def _replaceable(self, prompt: Prompt) -> CachedSequence | None:
        """Return the sequence that a new one would displace, if it shares anything with the prompt."""
        if len(self) < self.count or not self._free:
            return None
        oldest = self._free[0]
        return oldest if oldest.shared(prompt) else None
