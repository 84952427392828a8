"""The cached sequences of one model: the next turn of a conversation processes only what is new."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from mlx_spec.model.sequence import CachedSequence, SequenceParts

from .prefix_files import PrefixFiles

MIN_SHARED = 0.5  # share of a sequence's tokens; with a shorter common prefix, another conversation began


class PrefixCache:
    """Free sequences, the one used last at the end; those in use belong to their requests.

    At most `count` sequences are kept, those in use included, with at most `max_bytes()` bytes. A sequence in
    use stays in any case. Those in `files` outlive the server. Only the engine thread may use this class.
    """

    def __init__(
        self,
        open: Callable[[], SequenceParts],
        count: int,
        max_bytes: Callable[[], int],
        files: PrefixFiles | None = None,
    ) -> None:
        self._open = open
        self._count = count
        self._max_bytes = max_bytes
        self._files = files
        self._free: list[CachedSequence] = []
        self._used: list[CachedSequence] = []

    def __len__(self) -> int:
        return len(self._free) + len(self._used)

    @property
    def nbytes(self) -> int:
        """Return the bytes of all caches."""
        return sum(sequence.nbytes for sequence in (*self._free, *self._used))

    @contextmanager
    def borrow(self, prompt: Sequence[int]) -> Iterator[CachedSequence]:
        """Lend a sequence for a prompt; keep it afterwards unless there was an error."""
        sequence = self._take(prompt)
        try:
            yield sequence
        except Exception:
            self._used.remove(sequence)  # the content of its caches is unknown
            raise
        except BaseException:  # the request was closed: the content of its caches is known
            self._give_back(sequence)
            raise
        self._give_back(sequence)

    def shrink(self, reserved: int = 0) -> None:
        """Forget the sequences used longest ago until both limits hold and `reserved` bytes are left."""
        self._forget(len(self) - self._count)
        while self._free and self.nbytes + reserved > self._max_bytes():
            del self._free[0]

    def close(self) -> None:
        """Write what is worth it to the files, the sequences used last first."""
        if self._files is not None:
            self._files.close(self._free[::-1])

    def _take(self, prompt: Sequence[int]) -> CachedSequence:
        sequence = self._best_match(prompt) or self._replaceable(prompt)
        stored = None
        if self._files is not None:
            known = 0 if sequence is None else sequence.reusable(prompt)
            stored = self._files.restore(prompt, known, self._open)
        if sequence is None or stored is not None:
            self._forget(len(self) + 1 - self._count)
            sequence = stored or CachedSequence(self._open())
        else:
            self._free.remove(sequence)
        self._used.append(sequence)
        return sequence

    def _give_back(self, sequence: CachedSequence) -> None:
        self._used.remove(sequence)
        if sequence.tokens:
            self._free.append(sequence)
            if self._files is not None:
                self._files.offer(sequence)
        self.shrink()

    def _forget(self, count: int) -> None:
        del self._free[: max(count, 0)]

    def _best_match(self, prompt: Sequence[int]) -> CachedSequence | None:
        """Return the free sequence with the longest common prefix, if that is most of what it holds.

        A prefix of the whole prompt is enough: the client repeats a request and does not need the old answer.
        """
        best = max(self._free, key=lambda sequence: sequence.shared(prompt), default=None)
        if best is None or not best.shared(prompt):
            return None
        repeats = best.tokens[: len(prompt)] == list(prompt)
        return best if repeats or best.shared(prompt) >= MIN_SHARED * len(best.tokens) else None

    def _replaceable(self, prompt: Sequence[int]) -> CachedSequence | None:
        """Return the sequence that a new one would displace, if it shares anything with the prompt."""
        if len(self) < self._count or not self._free:
            return None
        oldest = self._free[0]
        return oldest if oldest.shared(prompt) else None
