"""The conversations of one model, kept with their caches: the next turn need not read them again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from mlx_spec.sequence import CachedSequence, SequenceParts

WORTH = 0.5  # of what is held; a prompt that shares less than that begins a conversation of its own


class Conversations:
    """Sequences that are free, the one used last at the end; those in use are with their requests.

    With those in use at most `count` are kept, of at most `limit()` bytes; what is in use stays in any case.
    Only the engine thread may touch any of it.
    """

    def __init__(self, open: Callable[[], SequenceParts], count: int, limit: Callable[[], int]) -> None:
        self._open = open
        self._count = count
        self._limit = limit
        self._free: list[CachedSequence] = []
        self._used: list[CachedSequence] = []

    @property
    def nbytes(self) -> int:
        """Bytes of all caches."""
        return sum(held.nbytes for held in (*self._free, *self._used))

    @property
    def kept(self) -> int:
        """Sequences, free and in use."""
        return len(self._free) + len(self._used)

    @property
    def used(self) -> int:
        """Sequences in use."""
        return len(self._used)

    @contextmanager
    def using(self, prompt: Sequence[int]) -> Iterator[CachedSequence]:
        """A sequence for a prompt, kept afterwards unless there was an error."""
        held = self.take(prompt)
        try:
            yield held
        except Exception:
            self.drop(held)
            raise
        except BaseException:  # the request was closed: what its caches hold is known
            self.give(held)
            raise
        self.give(held)

    def take(self, prompt: Sequence[int]) -> CachedSequence:
        """A sequence for a prompt, until `give`: one that goes on where it shares enough, else a new one."""
        held = self._best(prompt) or self._replaceable(prompt)
        if held is None:
            self._forget(self.kept + 1 - self._count)
            held = CachedSequence(self._open())
        else:
            self._free.remove(held)
        self._used.append(held)
        return held

    def give(self, held: CachedSequence) -> None:
        """The request is done with it."""
        self._used.remove(held)
        if held.tokens:
            self._free.append(held)
        self.shrink()

    def drop(self, held: CachedSequence) -> None:
        """The request failed, and nobody knows what is in the caches."""
        self._used.remove(held)

    def shrink(self, reserved: int = 0) -> None:
        """Forget what was used longest ago until both limits hold, with so many bytes left over."""
        self._forget(self.kept - self._count)
        while self._free and self.nbytes + reserved > self._limit():
            del self._free[0]

    def clear(self) -> None:
        """Forget all that is free."""
        self._free.clear()

    def _forget(self, count: int) -> None:
        del self._free[: max(count, 0)]

    def _best(self, prompt: Sequence[int]) -> CachedSequence | None:
        """The free sequence with the longest prefix of a prompt, if that is much of what it holds.

        Or all of the prompt: then the same is asked again, and nobody goes on from the answer before.
        """
        found = max(self._free, key=lambda held: held.shared(prompt), default=None)
        if found is None or not found.shared(prompt):
            return None
        again = found.tokens[: len(prompt)] == list(prompt)
        return found if again or found.shared(prompt) >= WORTH * len(found.tokens) else None

    def _replaceable(self, prompt: Sequence[int]) -> CachedSequence | None:
        """The one that would make room for a new sequence, if it shares anything with the prompt."""
        if self.kept < self._count or not self._free:
            return None
        oldest = self._free[0]
        return oldest if oldest.shared(prompt) else None
