"""Keep the caches of earlier prompts in files that outlive the server (`--cache-folder`).

A file has the caches of one sequence, of target and drafters, with its tokens. The folder's thread writes it
after an answer, straight from the buffers of the caches. Nothing is copied unless the conversation goes on
meanwhile: then MLX copies the buffers that are not written yet, of at most one sequence. A file gets its name
when it is complete and never changes, so servers can share a folder. The name holds the checksum of what the
buffers held. The folder's thread also keeps the index: the engine thread never reads a header.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np

from mlx_spec import __version__
from mlx_spec.checkpoint.config import Checkpoint
from mlx_spec.checkpoint.files import check_space, human_bytes, one_line, remove_abandoned, temporary_file
from mlx_spec.checkpoint.headers import WEIGHTS
from mlx_spec.checkpoint.writer import safetensors_header
from mlx_spec.decode.loop import decode
from mlx_spec.decode.measuring import scratch_text
from mlx_spec.decode.sequence import CachedSequence, reusable
from mlx_spec.device import device_name
from mlx_spec.errors import InvalidValue, SpecError
from mlx_spec.pair import Pair
from mlx_spec.prompt import Identity, Prompt, shared_prefix
from mlx_spec.types import CacheState

from ..errors import LOG

MIN_TOKENS = 1024  # tokens that a file must save: one chunk of a prefill, so small chats are never written
MAX_AGE_S = 30 * 24 * 3600  # since its last use: prompts are private and should not stay forever
# Key, tokens, checksum; the second half of the checksum is in names of older formats.
NAME = re.compile(r"([0-9a-f]{16})-[0-9]+-([0-9a-f]{8})([0-9a-f]{8})?\.safetensors")
TOKENS = "tokens"  # the array of a file that holds the identity of its sequence
# Reading a damaged file raises one of these.
DAMAGE = (OSError, RuntimeError, ValueError, LookupError, TypeError, OverflowError, SpecError)


def model_key(
    checkpoints: Sequence[Checkpoint],
    drafters: Sequence[str],
    kv_bits: int | None,
    plain_rows: int = 1,
    *,
    is_float32: bool = False,
) -> dict[str, Any]:
    """Return all that the content of a cache depends on, besides its tokens. Raises SpecError and OSError.

    `checkpoints` are target and drafter. Fine-tunes of a model have equal fingerprints, so
    the identity of each weight file counts, too. K and V also depend on the rows of a plain pass, and on
    whether `--exact float32` made them.
    """
    files = [file for stored in checkpoints for file in sorted(stored.folder.glob(WEIGHTS))]
    stats = [(file.resolve(), file.stat()) for file in files]
    # The format is raised when older files can no longer be read.
    return {
        "format": 5,
        "device": device_name(),
        "checkpoints": [checkpoint.fingerprint for checkpoint in checkpoints],
        "weights": [[str(file), s.st_ino, s.st_size, s.st_mtime_ns] for file, s in stats],
        "drafters": list(drafters),
        "kv_bits": kv_bits,
        "computed": [plain_rows, is_float32],
        "versions": [version("mlx"), version("mlx-lm"), __version__],
    }


@dataclass(frozen=True)
class StoredPrefix:
    """A file, as its header describes it."""

    tokens: np.ndarray  # int32 or int64, the identity of the sequence
    reach: list[tuple[int, int]]  # ranges of sizes to which the target can be rewound

    def covers(self, other: StoredPrefix) -> bool:
        """Return True if this sequence can be rewound to every rewind point of the other one."""
        return shared_prefix(self.tokens, other.tokens) == len(other.tokens) and all(
            any(low <= first and last <= high for low, high in self.reach) for first, last in other.reach
        )


class CacheFolder:
    """The cache folder of all models of a server: its index, and the threads that write and check files."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        """Create the folder, for its owner only, and remove old files. Raises InvalidValue."""
        self.path = path
        self._max_bytes = max_bytes
        self._executor = ThreadPoolExecutor(1, "mlx_spec writing")
        self._checker = ThreadPoolExecutor(1, "mlx_spec checking")  # never waits for writes
        self._writing: Future[None] | None = None
        self._failed = False
        self._index: dict[str, StoredPrefix] = {}  # replaced as a whole, by the folder's thread alone
        self._ignored: set[str] = set()
        self._checked: dict[str, Future[bool]] = {}
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
        self._first_look = self._look = self._executor.submit(self._update_index)

    @property
    def is_ready(self) -> bool:
        """Return True if something can be written now: one file at a time, and none after a failure."""
        return not self._failed and (self._writing is None or self._writing.done())

    def wait(self) -> None:
        """Wait for the file that is being written."""
        if self._writing is not None:
            self._writing.exception()

    def entries(self, digest: str) -> list[tuple[str, StoredPrefix]]:
        """Return the names and headers of a model's files, as the folder's thread saw them last.

        The thread then looks again, because other servers may share the folder.
        """
        self._first_look.exception()  # it began with the server, before the weights were loaded
        if self._look.done():
            self._look = self._executor.submit(self._update_index)
        return [(n, e) for n, e in self._index.items() if n.startswith(digest) and n not in self._ignored]

    def check(self, name: str) -> Future[bool]:
        """Compare a file with its checksum, once, on another thread. The future holds True if they agree."""
        if name not in self._checked:
            self._checked[name] = self._checker.submit(_is_whole, self.path / name)
        return self._checked[name]

    def ignore(self, name: str, error: Exception) -> None:
        """Use a file no more, and say why."""
        self._ignored.add(name)
        if not isinstance(error, FileNotFoundError):  # another server may have removed it
            LOG.warning("%s is ignored: %s", self.path / name, one_line(error))

    def write(self, start: str, prefix: StoredPrefix, content: Mapping[str, Any], state: CacheState) -> None:
        """Write a file named `start`-CHECKSUM in the background; then remove the files that it replaces.

        `content` is its metadata.
        """
        arrays = {TOKENS: mx.array(prefix.tokens), **state.arrays}
        header = safetensors_header(arrays, {"mlx_spec": json.dumps(content)})
        size = len(header) + sum(array.nbytes for array in arrays.values())
        if size > self._max_bytes:
            LOG.info("a prompt of %s does not fit the cache folder", human_bytes(size))
            return
        # NumPy has no bfloat16.
        views = [a.view(mx.uint16) if a.dtype == mx.bfloat16 else a for a in arrays.values()]
        mx.eval(views)
        blocks = [np.asarray(view) for view in views]  # share the memory of the arrays
        self._writing = self._executor.submit(self._write, start, prefix, header, blocks, size)

    def _write(
        self, start: str, prefix: StoredPrefix, header: bytes, blocks: list[np.ndarray], size: int
    ) -> None:
        try:
            self._make_room(size)
            check_space("a prompt", size, self.path, "give another --cache-folder")
            with temporary_file(self.path) as stream:
                checksum = zlib.crc32(header)
                stream.write(header)
                while blocks:
                    for part in _contiguous(blocks.pop(0)):  # pop: each is freed once it is written
                        checksum = zlib.crc32(part.data, checksum)
                        stream.write(part.data)
                stream.flush()
                os.fsync(stream.fileno())
                name = f"{start}-{checksum:08x}.safetensors"
                os.replace(stream.name, self.path / name)
            earlier, self._index = self._index, {**self._index, name: prefix}
            for old, entry in earlier.items():
                if old.split("-")[0] == start.split("-")[0] and old != name and prefix.covers(entry):
                    (self.path / old).unlink(missing_ok=True)
        except Exception as error:  # such as a full disk
            self._failed = True
            LOG.warning("nothing more is written to %s until the next start: %s", self.path, one_line(error))

    def _update_index(self) -> None:
        names: set[str] = set()
        with suppress(OSError):  # the folder is gone
            names = {name for name in os.listdir(self.path) if (m := NAME.fullmatch(name)) and not m[3]}
        index = {name: entry for name, entry in self._index.items() if name in names}
        for name in names - index.keys() - self._ignored:
            try:
                index[name] = _read_entry(self.path / name)
            except DAMAGE as error:
                self.ignore(name, error)
        self._index = index

    def _make_room(self, size: int) -> None:
        """Remove expired files of prompts and answers, and then the oldest until `size` bytes fit.

        Files that others are writing count, too.
        """
        now, files, total = time.time(), [], size
        for entry in os.scandir(self.path):
            try:
                info = entry.stat(follow_symlinks=False)
                if entry.name.startswith(".") and entry.name.endswith(".tmp"):
                    total += 0 if remove_abandoned(Path(entry.path)) else info.st_size
                elif NAME.fullmatch(entry.name) or entry.name.endswith(".answers"):
                    files.append((info.st_mtime, info.st_size, entry.path))
            except FileNotFoundError:
                continue  # another server removed it
        total += sum(nbytes for _, nbytes, _ in files)
        for used, nbytes, path in sorted(files):
            if total > self._max_bytes or now - used > MAX_AGE_S:
                Path(path).unlink(missing_ok=True)
                total -= nbytes


class PrefixFiles:
    """The files of one model. Only the engine thread may use this class."""

    def __init__(self, folder: CacheFolder, key: Mapping[str, Any], pair: Pair) -> None:
        """Find the files of a pair. Raises SpecError if its caches cannot be saved."""
        self._folder = folder
        self._key = json.dumps(key, sort_keys=True)
        self._digest = hashlib.sha256(self._key.encode()).hexdigest()[:16]
        self._slots = _slots(_probe(pair).arrays)

    def is_checking(self, prompt: Prompt, known: int, patience_s: float = 0.002) -> bool:
        """Return True while the file that `restore` would read is compared with its checksum.

        Waits for that at most `patience_s`: this is asked before each round of other sequences.
        """
        for name in self._matches(prompt, known):
            check = self._folder.check(name)
            if not wait([check], patience_s).done:
                return True
            if check.exception() is None and check.result():
                return False
        return False

    def restore(
        self, prompt: Prompt, known: int, open: Callable[[], CachedSequence]
    ) -> CachedSequence | None:
        """Return a sequence with a prefix of a prompt from a file; None if no file saves enough.

        `known` tokens of the prompt are in memory.
        """
        for name in self._matches(prompt, known):
            try:
                if not self._folder.check(name).result():
                    raise ValueError("its content was changed")
                return self._read(name, prompt, open())
            except DAMAGE as error:
                self._folder.ignore(name, error)
        return None

    def _matches(self, prompt: Prompt, known: int) -> list[str]:
        """Return the files that save at least MIN_TOKENS tokens of a prompt, the best first."""
        if len(prompt) < known + MIN_TOKENS:
            return []
        wanted, entries = prompt.identity[:-2], self._folder.entries(self._digest)
        kept = {n: reusable(e.reach, prompt.whole(shared_prefix(e.tokens, wanted))) for n, e in entries}
        best_first = sorted(kept, key=lambda name: kept[name], reverse=True)
        return [name for name in best_first if kept[name] >= known + MIN_TOKENS]

    def known(self, prompt: Prompt) -> int:
        """Return the most tokens of a prompt that a file holds, whether or not it can be rewound to them."""
        entries = self._folder.entries(self._digest)
        return max((shared_prefix(entry.tokens, prompt.identity[:-2]) for _, entry in entries), default=0)

    def offer(self, sequence: CachedSequence, growth: float = 1.25) -> None:
        """Write a sequence in the background if it has enough tokens that no file has.

        It must have grown by the factor `growth` since its last write. So all writes of a sequence together
        have at most five times the bytes of the last one.
        """
        tokens, has_drafters = sequence.identity, sequence.draft_error is None
        if len(tokens) < MIN_TOKENS or not self._folder.is_ready or not has_drafters:
            return
        held = _compact(tokens)
        entries = self._folder.entries(self._digest)
        stored = max((reusable(e.reach, shared_prefix(e.tokens, held)) for _, e in entries), default=0)
        if len(tokens) < max(stored + MIN_TOKENS, growth * stored):
            return
        try:
            prefix, state = StoredPrefix(held, sequence.target.reach()), sequence.state()
        except InvalidValue:  # a drafter fails
            return
        content = {"key": self._key, "reach": prefix.reach, "numbers": state.numbers}
        self._folder.write(f"{self._digest}-{len(tokens)}", prefix, content, state)

    def close(self, sequences: Sequence[CachedSequence]) -> None:
        """Write the sequences that have grown, and wait for it, before a model is unloaded."""
        close_s = 10  # no write begins later; a write that began is completed
        end = time.monotonic() + close_s
        self._folder.wait()
        for sequence in sequences:
            if time.monotonic() < end:
                self.offer(sequence, growth=1)
                self._folder.wait()

    def _read(self, name: str, prompt: Prompt, sequence: CachedSequence) -> CachedSequence:
        """Read a file into a new sequence, and rewind it to a prefix of the prompt. Raises one of DAMAGE."""
        path = self._folder.path / name
        os.utime(path)  # the time of its last use
        loaded = mx.load(str(path), return_metadata=True)  # an array is read when it is used
        arrays, metadata = cast(tuple[dict[str, mx.array], dict[str, str]], loaded)
        content: dict[str, Any] = json.loads(metadata["mlx_spec"])
        tokens = np.asarray(arrays.pop(TOKENS))
        if content["key"] != self._key or _slots(arrays) != self._slots:
            raise ValueError("its key or its arrays belong to another model")
        sequence.restore(tokens, CacheState(arrays, content["numbers"]))
        del arrays
        kept = sequence.rewind_to_prefix(prompt)
        # One at a time between the rounds of others: each is copied into a buffer with room for more.
        sequence.target.compute_later(sequence.state().arrays.values())
        LOG.info("goes on from %d tokens of the cache folder", kept)
        return sequence


def _probe(pair: Pair) -> CacheState:
    """Return the state of a scratch sequence. Raises SpecError."""
    probe_tokens = 160  # more than any drafter leaves unprocessed
    tokens = scratch_text(pair.tokenizer, probe_tokens, None)
    sequence = pair.open()
    for _ in decode(pair.prepare(sequence, tokens, max_tokens=2)):
        pass
    return sequence.state()


def _slots(arrays: Mapping[str, mx.array]) -> dict[str, tuple[Any, ...]]:
    """Return the dtypes and shapes of arrays by name, without the numbers of rows and checkpoints."""
    return {re.sub("@[0-9]+", "", n): (a.dtype, *a.shape[:-2], a.shape[-1]) for n, a in arrays.items()}


def _compact(identity: Identity) -> np.ndarray:
    """Return an identity as int32 if it fits: rows of pictures are numbers of 64 bits."""
    return identity.astype(np.int32) if (identity == identity.astype(np.int32)).all() else identity


def _read_entry(path: Path) -> StoredPrefix:
    """Read the header and the tokens of a file. Raises one of DAMAGE."""
    with path.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(min(size, path.stat().st_size)))
        reach = json.loads(header["__metadata__"]["mlx_spec"])["reach"]
        begin, end = header[TOKENS]["data_offsets"]
        stream.seek(8 + size + begin)
        dtype = {"I32": np.int32, "I64": np.int64}[header[TOKENS]["dtype"]]
        tokens = np.frombuffer(stream.read(end - begin), dtype)
    return StoredPrefix(tokens, [(int(first), int(last)) for first, last in reach])


def _contiguous(array: np.ndarray) -> Iterator[np.ndarray]:
    """Yield an array in contiguous parts: the rows of each head of a buffer."""
    if array.flags.c_contiguous or array.ndim < 2:
        yield np.ascontiguousarray(array)
    else:
        for part in array:
            yield from _contiguous(part)


def _is_whole(path: Path) -> bool:
    """Return True if a file has the checksum that its name holds. Raises OSError."""
    block, checksum = memoryview(bytearray(1 << 20)), 0  # a megabyte stays in the processor's cache
    with path.open("rb") as stream:
        while size := stream.readinto(block):
            checksum = zlib.crc32(block[:size], checksum)
    return f"-{checksum:08x}." in path.name
