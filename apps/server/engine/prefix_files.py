"""Keep the caches of earlier prompts in files that outlive the server (`--cache-folder`).

A file has the caches of one sequence, of target and drafters, with its tokens. A thread writes it after an
answer, straight from the buffers of the caches. Nothing is copied unless the conversation goes on meanwhile:
then MLX copies the buffers that are not written yet, of at most one sequence. A file gets its name when it is
complete and never changes, so servers can share a folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np

from mlx_spec import __version__
from mlx_spec.checkpoint.config import WEIGHTS, fingerprint
from mlx_spec.checkpoint.files import check_space, human_bytes, one_line
from mlx_spec.checkpoint.writer import safetensors_header
from mlx_spec.decode.loop import decode
from mlx_spec.decode.measuring import scratch_text
from mlx_spec.decode.sequence import CachedSequence, SequenceParts, reusable
from mlx_spec.device import device_name
from mlx_spec.errors import InvalidValue, SpecError
from mlx_spec.pair import Pair
from mlx_spec.prompt import Prompt
from mlx_spec.types import CacheState

from ..errors import LOG

MIN_TOKENS = 1024  # tokens that a file must save: one chunk of a prefill, so small chats are never written
MAX_AGE_S = 30 * 24 * 3600  # since its last use: prompts are private and should not stay forever
NAME = re.compile(r"[0-9a-f]{16}-[0-9]+-[0-9a-f]{16}\.safetensors")  # key, tokens, checksum
# Reading a damaged file raises one of these.
DAMAGE = (OSError, RuntimeError, ValueError, LookupError, TypeError, OverflowError, SpecError)


def model_key(folders: Sequence[Path], drafters: Sequence[str], kv_bits: int | None) -> dict[str, Any]:
    """Return all that the content of a cache depends on, besides its tokens. Raises SpecError and OSError.

    `folders` are the checkpoints of target and drafter. Fine-tunes of a model have equal fingerprints, so
    the identity of each weight file counts, too.
    """
    stats = [(file.resolve(), file.stat()) for folder in folders for file in sorted(folder.glob(WEIGHTS))]
    # The format is raised when older files can no longer be read.
    return {
        "format": 3,
        "device": device_name(),
        "checkpoints": [fingerprint(folder) for folder in folders],
        "weights": [[str(file), s.st_ino, s.st_size, s.st_mtime_ns] for file, s in stats],
        "drafters": list(drafters),
        "kv_bits": kv_bits,
        "versions": [version("mlx"), version("mlx-lm"), __version__],
    }


class CacheFolder:
    """The cache folder of all models of a server, and the thread that writes into it."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        """Create the folder, for its owner only, and remove old files. Raises InvalidValue."""
        self.path = path
        self._max_bytes = max_bytes
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="mlx_spec writing")
        self._writing: Future[None] | None = None
        self._failed = False
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            info = path.stat()
            if info.st_uid != os.geteuid() or info.st_mode & 0o022:
                raise InvalidValue(f"--cache-folder {path} can be written by others: choose one of your own")
            self._make_room(0)
            tempfile.TemporaryFile(dir=path).close()
        except OSError as error:
            reason = error.strerror or one_line(error)
            raise InvalidValue(f"--cache-folder {path} cannot be used ({reason}): choose another") from error

    @property
    def is_ready(self) -> bool:
        """Return True if something can be written now: one file at a time, and none after a failure."""
        return not self._failed and (self._writing is None or self._writing.done())

    def wait(self) -> None:
        """Wait for the file that is being written."""
        if self._writing is not None:
            self._writing.exception()

    def names(self) -> set[str]:
        """Return the names of all files; none if the folder is gone."""
        with suppress(OSError):
            return {name for name in os.listdir(self.path) if NAME.fullmatch(name)}
        return set()

    def write(self, start: str, state: CacheState, metadata: Mapping[str, str], replaces: list[str]) -> None:
        """Write a file named `start`-CHECKSUM in the background; then remove the files that it replaces."""
        header = safetensors_header(state.arrays, metadata)
        size = len(header) + sum(array.nbytes for array in state.arrays.values())
        if size > self._max_bytes:
            LOG.info("a prompt of %s does not fit the cache folder", human_bytes(size))
            return
        # NumPy has no bfloat16.
        views = [a.view(mx.uint16) if a.dtype == mx.bfloat16 else a for a in state.arrays.values()]
        mx.eval(views)
        blocks = [np.asarray(view) for view in views]  # share the memory of the arrays
        self._writing = self._executor.submit(self._write, start, header, blocks, size, replaces)

    def _write(
        self, start: str, header: bytes, blocks: list[np.ndarray], size: int, replaces: list[str]
    ) -> None:
        try:
            self._make_room(size)
            check_space("a prompt", size, self.path, "give another --cache-folder")
            handle, temporary = tempfile.mkstemp(dir=self.path, prefix=".", suffix=".tmp")
            try:
                with os.fdopen(handle, "wb") as stream:
                    stream.write(header)
                    while blocks:
                        for part in _contiguous(blocks.pop(0)):  # pop: each is freed once it is written
                            stream.write(part.data)
                    stream.flush()
                    os.fsync(stream.fileno())
                name = f"{start}-{_checksum(Path(temporary)):016x}.safetensors"
                os.replace(temporary, self.path / name)
            except BaseException:
                Path(temporary).unlink(missing_ok=True)
                raise
            for name in replaces:
                (self.path / name).unlink(missing_ok=True)
        except Exception as error:  # such as a full disk
            self._failed = True
            LOG.warning("nothing more is written to %s until the next start: %s", self.path, one_line(error))

    def _make_room(self, size: int) -> None:
        """Remove expired files of prompts and answers, and then the oldest until `size` bytes fit."""
        now, found = time.time(), []
        for entry in os.scandir(self.path):
            try:
                info = entry.stat(follow_symlinks=False)
                stale_s = 3600  # age of a temporary file whose writer must have died
                if entry.name.endswith(".tmp") and now - info.st_mtime > stale_s:
                    os.unlink(entry.path)
                elif NAME.fullmatch(entry.name) or entry.name.endswith(".answers"):
                    found.append((info.st_mtime, info.st_size, entry.path))
            except FileNotFoundError:
                continue  # another server removed it
        total = size + sum(nbytes for _, nbytes, _ in found)
        for used, nbytes, path in sorted(found):
            if total > self._max_bytes or now - used > MAX_AGE_S:
                Path(path).unlink(missing_ok=True)
                total -= nbytes


@dataclass(frozen=True)
class _Entry:
    """A file, as its header describes it."""

    tokens: np.ndarray  # int64, the identity of the sequence
    reach: list[tuple[int, int]]  # ranges of sizes to which the target can be rewound


class PrefixFiles:
    """The files of one model. Only the engine thread may use this class."""

    def __init__(self, folder: CacheFolder, key: Mapping[str, Any], pair: Pair) -> None:
        """Find the files of a pair. Raises SpecError if its caches cannot be saved."""
        self._folder = folder
        self._key = json.dumps(key, sort_keys=True)
        self._digest = hashlib.sha256(self._key.encode()).hexdigest()[:16]
        self._slots = _slots(_probe(pair).arrays)
        self._index: dict[str, _Entry | None] = {}  # None for a file that is ignored
        self._entries()

    def restore(self, prompt: Prompt, known: int, open: Callable[[], SequenceParts]) -> CachedSequence | None:
        """Return a sequence with a prefix of a prompt from a file; None if no file saves enough.

        `known` tokens of the prompt are in memory.
        """
        if len(prompt) < known + MIN_TOKENS:
            return None
        wanted = np.array(prompt.identity[:-2])
        shared = {name: prompt.whole(_shared(e.tokens, wanted)) for name, e in self._entries()}
        kept = {name: reusable(e.reach, shared[name]) for name, e in self._entries()}
        for name in sorted(kept, key=lambda name: kept[name], reverse=True):
            if kept[name] < known + MIN_TOKENS:
                return None
            try:
                return self._read(name, prompt, CachedSequence(open()))
            except DAMAGE as error:
                self._ignore(name, error)
        return None

    def offer(self, sequence: CachedSequence, growth: float = 1.25) -> None:
        """Write a sequence in the background if it has enough tokens that no file has.

        It must have grown by the factor `growth` since its last write. So all writes of a sequence together
        have at most five times the bytes of the last one.
        """
        tokens = sequence.identity
        if len(tokens) < MIN_TOKENS or not self._folder.is_ready:
            return
        held, entries = np.array(tokens), self._entries()
        stored = max((reusable(e.reach, _shared(e.tokens, held)) for _, e in entries), default=0)
        if len(tokens) < max(stored + MIN_TOKENS, growth * stored):
            return
        reach, state = sequence.parts.target.reach(), sequence.state()
        content = {"key": self._key, "tokens": tokens, "reach": reach, "numbers": state.numbers}
        replaces = [
            name
            for name, e in entries
            if reach[0][0] == 0 and _shared(e.tokens, held) == len(e.tokens)  # it can be rewound to that file
        ]
        metadata = {"mlx_spec": json.dumps(content)}
        self._folder.write(f"{self._digest}-{len(tokens)}", state, metadata, replaces)

    def close(self, sequences: Sequence[CachedSequence]) -> None:
        """Write the sequences that have grown, and wait for it, before a model is unloaded."""
        close_s = 10  # no write begins later; a write that began is completed
        end = time.monotonic() + close_s
        self._folder.wait()
        for sequence in sequences:
            if time.monotonic() < end:
                self.offer(sequence, growth=1)
                self._folder.wait()

    def _entries(self) -> list[tuple[str, _Entry]]:
        """Return the files that can be used; read the headers of new ones."""
        names = {name for name in self._folder.names() if name.startswith(self._digest)}
        self._index = {name: entry for name, entry in self._index.items() if name in names}
        for name in names - self._index.keys():
            try:
                content = self._open(name)[1]
                reach = [(int(first), int(last)) for first, last in content["reach"]]
                self._index[name] = _Entry(np.array(content["tokens"], dtype=np.int64), reach)
            except DAMAGE as error:
                self._ignore(name, error)
        return [(name, entry) for name, entry in self._index.items() if entry is not None]

    def _open(self, name: str) -> tuple[dict[str, mx.array], dict[str, Any]]:
        """Return the arrays of a file, which MLX reads lazily, and its metadata."""
        found = mx.load(str(self._folder.path / name), return_metadata=True)
        arrays, metadata = cast(tuple[dict[str, mx.array], dict[str, str]], found)
        content: dict[str, Any] = json.loads(metadata["mlx_spec"])
        if content["key"] != self._key:
            raise ValueError("it belongs to another model")
        return arrays, content

    def _read(self, name: str, prompt: Prompt, sequence: CachedSequence) -> CachedSequence:
        """Read a file into a new sequence, and rewind it to a prefix of the prompt. Raises one of DAMAGE."""
        started, path = time.perf_counter(), self._folder.path / name
        os.utime(path)  # the time of its last use
        if f"-{_checksum(path):016x}." not in name:
            raise ValueError("its content was changed")
        arrays, content = self._open(name)
        if _slots(arrays) != self._slots:
            raise ValueError("its arrays belong to another model")
        sequence.restore(content["tokens"], CacheState(arrays, content["numbers"]))
        del arrays
        kept = sequence.rewind_to_prefix(prompt)
        for array in sequence.state().arrays.values():
            mx.eval(array)  # one at a time, to save memory: each is copied into a buffer with room for more
        LOG.info("read %d tokens from the cache folder in %.2f s", kept, time.perf_counter() - started)
        return sequence

    def _ignore(self, name: str, error: Exception) -> None:
        self._index[name] = None
        if not isinstance(error, FileNotFoundError):  # another server may have removed it
            LOG.warning("%s is ignored: %s", self._folder.path / name, one_line(error))


def _probe(pair: Pair) -> CacheState:
    """Return the state of a scratch sequence. Raises SpecError."""
    probe_tokens = 160  # more than any drafter leaves unprocessed
    tokens = scratch_text(pair.tokenizer, probe_tokens, None)
    sequence = CachedSequence(pair.open())
    for _ in decode(pair.prepare(sequence.parts, tokens, max_tokens=2)):
        pass
    return sequence.state()


def _slots(arrays: Mapping[str, mx.array]) -> dict[str, tuple[Any, ...]]:
    """Return the dtypes and shapes of arrays by name, without the numbers of rows and checkpoints."""
    return {re.sub("@[0-9]+", "", n): (a.dtype, *a.shape[:-2], a.shape[-1]) for n, a in arrays.items()}


def _shared(a: np.ndarray, b: np.ndarray) -> int:
    """Return the number of tokens that two sequences have in common at their beginning."""
    length = min(len(a), len(b))
    different = a[:length] != b[:length]
    return int(different.argmax()) if different.any() else length


def _contiguous(array: np.ndarray) -> Iterator[np.ndarray]:
    """Yield an array in contiguous parts: the rows of each head of a buffer."""
    if array.flags.c_contiguous or array.ndim < 2:
        yield np.ascontiguousarray(array)
    else:
        for part in array:
            yield from _contiguous(part)


def _checksum(path: Path) -> int:
    """Return the sum of a file's 64-bit words, which is faster than a hash. Raises OSError."""
    # A block of a megabyte stays in the processor's cache.
    total, block = 0, np.zeros(1 << 20, np.uint8)
    with path.open("rb") as stream:
        while size := stream.readinto(block.data):
            words = size // 8
            total += int(block.view(np.uint64)[:words].sum()) + int(block[8 * words : size].sum())
    return total % 2**64
