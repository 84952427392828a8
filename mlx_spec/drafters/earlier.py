"""Earlier answers to copy from: suffix decoding over requests (arXiv:2411.04975), with memory that is fixed.

A suffix tree finds every match and counts its continuations; it takes 300 bytes a token and drops whole
requests. Here a ring holds the text, and tables for a few context lengths hold the place of their last
occurrence. That finds the latest place of nearly the longest match. On recorded conversations of agents,
frequencies and all other lengths would add 1 % of the tokens.

Accepted counts reveal whether a text was seen before (arXiv:2411.01076). So each API key has its own ring,
and a file only if a folder is given.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import mmap
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from operator import mul
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from mlx_spec.checkpoint.files import one_line, temporary_file
from mlx_spec.prompt import Prompt

TAIL = 32  # tokens of a prompt that are stored before its answer, so that its first tokens can be found
LENGTHS = (2, 4, 8, 16)  # tokens of the contexts that have a table
MAX_TOKENS = 1 << 20  # of a ring: 21 MB
MAX_ANSWER = 1 << 15  # tokens of one answer: entering them must not delay other requests
MAX_RINGS = 4  # API keys whose answers are kept, for each target

EMPTY = -1  # between two texts
MASK = (1 << 64) - 1
STEP, MIX = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93  # odd; hashes are numbers modulo 2^64
FACTORS = tuple(pow(STEP, k, 1 << 64) * MIX & MASK for k in range(1, LENGTHS[-1] + 1))  # of the k-th last
ONES = {n: sum(FACTORS[:n]) for n in LENGTHS}  # by n: the hash of n zeros, because 1 is added to each token

_log = logging.getLogger("mlx_spec")


class TextRing:
    """A ring of texts, the oldest overwritten first, with the last place of each context.

    The hash of n tokens is MIX times the sum of (the k-th from the end, plus 1) * STEP^k. A place is the
    index of the token after a context. It counts only if the tokens before it equal the context. So an entry
    that collides or is stale loses a match and does no harm.
    """

    def __init__(self, tokens: int) -> None:
        """Make a ring of a power of two of tokens."""
        self._text = _memory(tokens)
        self._text[:] = EMPTY
        self._tables = {n: _memory(tokens) for n in LENGTHS}  # 0: no place
        # A search reads single items, which takes half the time in a memoryview.
        self._view, self._places = self._text.data, {n: table.data for n, table in self._tables.items()}
        self._shift = 65 - tokens.bit_length()
        self._end = 1

    @property
    def longest(self) -> int:
        """Return how many tokens are entered at most; of a longer text only the last ones are."""
        return min(MAX_ANSWER, len(self._text) // 4)

    @property
    def nbytes(self) -> int:
        return self._text.nbytes + sum(table.nbytes for table in self._tables.values())

    def add(self, tokens: Sequence[int] | NDArray[np.int32]) -> None:
        """Enter a text, or several with EMPTY between them."""
        text = np.asarray(tokens[-self.longest :], np.int32)
        if not (size := len(text)):
            return
        if self._end + size >= len(self._text):
            self._text[self._end :] = EMPTY
            self._end = 1
        start, self._end = self._end, self._end + size + 1
        self._text[start : self._end - 1] = text
        self._text[self._end - 1] = EMPTY
        down, up = _powers()
        sums = np.zeros(size + 1, np.uint64)
        np.add.accumulate((text.astype(np.uint64) + 1) * down[:size], out=sums[1:])
        places = np.arange(start, start + size, dtype=np.int32)
        is_end = text == EMPTY
        ends = np.concatenate([[0], np.cumsum(is_end)]) if is_end.any() else None  # texts before each token
        for n, table in self._tables.items():
            if size > n:  # the n tokens up to each one but the last, which none follows
                rows = sums[n:-1] - sums[: -n - 1]
                rows *= up[n - 1 : size - 1]
                rows >>= self._shift
                if ends is None:
                    table[rows.view(np.int64)] = places[n:]
                else:
                    within = ends[n + 1 :] == ends[: -n - 1]  # one text
                    table[rows.view(np.int64)[within]] = places[n:][within]

    def find(self, last: Sequence[int]) -> tuple[int, int]:
        """Return the latest place after the longest match of the end of `last`, and its length; or zeros."""
        latest, hashed, start = last[: -LENGTHS[-1] - 1 : -1], 0, 0
        known = list[tuple[int, int]]()
        for n, places in self._places.items():
            if n > len(latest):
                break
            hashed += sum(map(mul, latest[start:n], FACTORS[start:n]))
            known.append((n, places[(hashed + ONES[n] & MASK) >> self._shift]))
            start = n
        for n, place in reversed(known):
            if place >= n and self._view[place - n : place].tolist() == last[-n:]:
                return place, self._match(place, last)
        return 0, 0

    def copy(self, place: int, count: int) -> list[int]:
        """Return at most `count` tokens from a place on, up to the end of its text."""
        tokens = self._view[place : place + count].tolist()
        return tokens[: tokens.index(EMPTY)] if EMPTY in tokens else tokens

    def _match(self, place: int, last: Sequence[int]) -> int:
        before = self._view[max(place - len(last), 0) : place].tolist()
        pairs = zip(reversed(before), reversed(last), strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(before), len(last)))


class EarlierAnswers:
    """The earlier answers of one target: a ring for each API key, and their files if there is a folder.

    A file holds the text alone: tokens as int32, EMPTY after each answer. Answers are only appended, so
    whenever a process ends, what it wrote can be read. Several processes may append to one file.
    """

    def __init__(self, ring_tokens: int) -> None:
        self._ring_tokens = ring_tokens
        self._rings: dict[str, TextRing] = {}  # by the digest of a key, the one used last at the end
        self._folder: Path | None = None
        self._name = ""  # of the target, in names of files
        self._vocab_size = 0

    @property
    def nbytes(self) -> int:
        return sum(ring.nbytes for ring in self._rings.values())

    def ring(self, key: str) -> TextRing:
        """Return the ring of an API key. The one that was used longest ago gives way to a new one."""
        return self._ring(_digest(key))

    def add(self, key: str, prompt: Prompt, answer: Sequence[int]) -> None:
        """Enter an answer after the last text of its prompt."""
        tail = prompt[max([len(prompt) - TAIL, *(span.end for span in prompt.spans), 0]) :]
        ring, text = self.ring(key), [*tail, *answer[-MAX_ANSWER:]]
        ring.add(text)
        if self._folder is not None:
            self._write(self._file(_digest(key)), text)

    def _ring(self, digest: str) -> TextRing:
        ring = self._rings.pop(digest, None) or self._read(digest)
        self._rings[digest] = ring
        if len(self._rings) > MAX_RINGS:
            del self._rings[next(iter(self._rings))]
        return ring

    # --- files

    def keep_in(self, folder: Path, target: str, vocab_size: int, max_age_s: float) -> None:
        """Keep the answers of the target of this name in a folder. Read its files; remove old ones."""
        self._folder, self._name, self._vocab_size = folder, _digest(target), vocab_size
        ages = dict[Path, float]()
        for file in folder.glob("*.answers"):
            with suppress(OSError):  # another server removed it
                ages[file] = time.time() - file.stat().st_mtime
                if ages[file] > max_age_s:
                    file.unlink()
        files = [file for file, age in ages.items() if age <= max_age_s and file.name.startswith(self._name)]
        for file in sorted(files, key=ages.__getitem__)[MAX_RINGS - 1 :: -1]:
            self._ring(file.stem.removeprefix(f"{self._name}-"))

    def _file(self, digest: str) -> Path:
        assert self._folder is not None
        return self._folder / f"{self._name}-{digest}.answers"

    def _read(self, digest: str) -> TextRing:
        """Return a new ring with the texts of its file. A damaged file is removed."""
        ring = TextRing(self._ring_tokens)
        if self._folder is None or not (file := self._file(digest)).exists():
            return ring
        try:
            with _locked(file):
                tokens = self._newest(file)
            if tokens.size and not EMPTY <= tokens.min() <= tokens.max() < self._vocab_size:
                raise ValueError("it holds tokens that the target does not have")
        except (OSError, ValueError) as error:
            _log.warning("%s is not used: %s", file, one_line(error))
            if isinstance(error, ValueError):  # else the disk failed, not the file
                with suppress(OSError):
                    file.unlink()
            return ring
        is_end = tokens == EMPTY
        tokens = tokens[~is_end | ~np.roll(is_end, 1)]  # one after each text
        while tokens.size:  # many texts at a time: short ones one by one would take seconds
            piece = tokens[: ring.longest]
            ends = np.flatnonzero(piece == EMPTY)
            size = int(ends[-1]) if ends.size else len(piece)
            ring.add(piece[:size])
            tokens = tokens[size + bool(ends.size) :]
        return ring

    def _write(self, file: Path, text: Sequence[int]) -> None:
        """Append a text; drop the older half of a file with twice the tokens of a ring. Stop at an error."""
        try:
            with _locked(file) as stream:
                stream.write(np.array([*text, EMPTY], "<i4").tobytes())
                stream.flush()
                if stream.tell() > 8 * self._ring_tokens:
                    with temporary_file(file.parent, file.name) as shorter:
                        shorter.write(self._newest(file).tobytes())  # also what others have appended
                        shorter.flush()
                        os.replace(shorter.name, file)
        except (OSError, MemoryError) as error:  # most likely the disk is full
            _log.warning("no more answers are kept in %s: %s", file.parent, one_line(error))
            self._folder = None

    def _newest(self, file: Path) -> NDArray[np.int32]:
        """Return the tokens at the end of a file, as many as a ring has."""
        older = max(file.stat().st_size // 4 - self._ring_tokens, 0)
        return np.fromfile(file, "<i4", offset=4 * older)


@contextmanager
def _locked(file: Path) -> Iterator[BinaryIO]:
    """Open a file to append to, and lock it. Wait while another process has its lock. Raises OSError.

    A file that was replaced during the wait is opened anew. The package filelock would need a second file
    and look at it every 50 ms, and the engine would wait.
    """
    while True:
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "ab") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            if _is_at(file, stream):
                size = stream.seek(0, os.SEEK_END)
                if size % 4:  # another process ended while it wrote a token
                    stream.seek(stream.truncate(size // 4 * 4))
                yield stream
                return


def _is_at(file: Path, stream: BinaryIO) -> bool:
    try:
        return os.path.samefile(file, stream.fileno())
    except FileNotFoundError:
        return False


def ring_tokens(memory: int) -> int:
    """Return the tokens of a ring on a machine with these bytes for models: a power of two."""
    # Each token takes four bytes in the ring and in every table. A 500th of the memory is theirs: on a
    # machine with 8 GB for models that is half of MAX_TOKENS.
    fitting = int(memory * (1 / 500) / (4 * (1 + len(LENGTHS))))
    return min(MAX_TOKENS, 1 << max(fitting.bit_length() - 1, 10))


@cache
def _powers() -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Return STEP^-k and MIX * STEP^(k + 1) modulo 2^64, for each token of an answer."""
    down = np.cumprod(np.full(MAX_ANSWER, pow(STEP, -1, 1 << 64), np.uint64), dtype=np.uint64)
    up = np.cumprod(np.full(MAX_ANSWER, STEP, np.uint64), dtype=np.uint64)
    return down, up * np.uint64(STEP * MIX & MASK)


def _memory(count: int) -> NDArray[np.int32]:
    """Return zeros whose memory is allocated page by page, when it is written.

    Linux zeroes 2 MB at once for NumPy's large arrays: the first answer would wait 40 ms for a ring.
    """
    block = mmap.mmap(-1, 4 * count)
    if sys.platform == "linux":
        with suppress(OSError):  # a kernel without huge pages
            block.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(block, np.int32)


def _digest(name: str) -> str:
    """Return a digest that stands for a key or a target in file names."""
    return hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:16]
