"""Seeded fuzzing: damaged copies of valid files, read in a child with limits of CPU and memory.

`support/fuzz_readers.py` says what is read and how. Input i of a reader depends on its name, the seed and i,
so a finding can be made again. A child reads many inputs. If one ends it, the parent notes that and starts
the next child after that input.
"""

from __future__ import annotations

import copy
import json
import mmap
import os
import random
import re
import resource
import shutil
import signal
import struct
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlx_spec.errors import SpecError

CPU_SECONDS = 5  # of one input; a loaded machine does not count
MEGABYTES = 400  # that one input may take, besides the libraries
PAGE = 4096

NUMBERS = b"-1 0 1 4294967296 9223372036854775808 -9223372036854775809 1e308 1e999 NaN -Infinity 0.5".split()
NUMBERS += [b"9" * 30, b"9" * 5000, *b'null true "7" [] {} [[1]]'.split()]
DEEP = 900, 100_000
VALUES: list[Any] = [None, True, False, 0, -1, 1, 3, *(2**n for n in (31, 63, 64)), -(2**63), 10**30, 1e308]
VALUES += [0.5, -0.5, float("nan"), float("inf"), "", "x", "\0", "../../x", "\ud83d", "a" * 70_000]
VALUES += [[], {}, [[]], [None], [0] * 999]
WORDS = tuple(struct.pack("<Q", n) for n in (0, 1, 2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1, 5, 64, 10**6))


@dataclass(frozen=True)
class Valid:
    """A valid file that a reader is given, and how its copies are damaged."""

    content: bytes
    form: str = "bytes"  # or "json", "lines" of JSON, "safetensors", "text" made of `pieces`
    pieces: Sequence[str] = ()  # what texts are made of


@dataclass(frozen=True)
class Reader:
    """Something that reads files. `read` raises SpecError, or an error of `refusals`, for damaged ones."""

    files: Mapping[str, Valid]  # by path in the folder; one of them is damaged at a time
    read: Callable[[], object]
    refusals: tuple[type[Exception], ...] = ()
    megabytes: int = MEGABYTES
    cpu_seconds: int = CPU_SECONDS


@dataclass
class Tried:
    """What was found in one reader."""

    inputs: int = 0
    seconds: float = 0.0  # of CPU
    refused: int = 0  # by an error of the reader; the others were read
    findings: list[str] = field(default_factory=list)


# --- damage


def damaged(chance: random.Random, valid: Valid, others: Sequence[bytes]) -> bytes:
    """Return a damaged copy of a file. `others` are files to splice in."""
    data = valid.content
    if valid.form in ("json", "lines", "safetensors") and chance.random() < 0.7:
        data = _damaged_json(chance, data, valid.form)
    elif valid.form == "text" and chance.random() < 0.8:
        data = _damaged_text(chance, data, valid.pieces)
    if data == valid.content or chance.random() < 0.3:
        for _ in range(chance.choice((1, 1, 1, 2, 4, 16))):
            data = chance.choice(DAMAGE)(chance, data, others)
    return data


def _cut(chance: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    return data[: chance.randrange(len(data) + 1)]


def _flip(chance: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    changed = bytearray(data or b"\0")
    for _ in range(chance.choice((1, 1, 3, 20))):
        changed[_place(chance, len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def _byte(chance: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    i = _place(chance, len(data))
    return (
        data[:i]
        + bytes([chance.choice((0, 1, 0x7F, 0x80, 0xFF, 0x22, 0x7B, 0x5B, 0x5C, 0x0A))])
        + data[i + 1 :]
    )


def _word(chance: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    i, word = _place(chance, len(data)), chance.choice(WORDS)[: chance.choice((2, 4, 8))]
    return data[:i] + word + data[i + len(word) :]


def _delete(chance: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    i = _place(chance, len(data))
    return data[:i] + data[i + chance.choice((1, 2, 4, 8, 100, PAGE)) :]


def _repeat(chance: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    i, size = _place(chance, len(data)), chance.choice((1, 4, 8, 64, PAGE))
    return (
        data[:i] + data[i : i + size] * chance.choice((2, 2, 3, 1000 if size < 64 else 2)) + data[i + size :]
    )


def _swap(chance: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Exchange two words or pages."""
    size = chance.choice((1, 2, 4, 8, 8, PAGE, PAGE))
    if len(data) < 2 * size:
        return data
    i, j = sorted(size * chance.randrange(len(data) // size) for _ in range(2))
    if i == j:
        return data
    return data[:i] + data[j : j + size] + data[i + size : j] + data[i : i + size] + data[j + size :]


def _splice(chance: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    other = chance.choice([data, *others])
    return data[: _place(chance, len(data))] + other[_place(chance, len(other)) :]


def _number(chance: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Replace a number in a text by an extreme one."""
    head = data[:200_000]
    found = list(re.finditer(rb"-?\d+(\.\d+)?([eE][-+]?\d+)?", head))
    if not found:
        return _word(chance, data, others)
    begin, end = chance.choice(found).span()
    return data[:begin] + chance.choice(NUMBERS) + data[end:]


def _nest(chance: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    i, deep = _place(chance, len(data)), chance.choice(DEEP)
    opening, closing = chance.choice(((b"[", b"]"), (b'{"a":', b"}"), (b"(", b")")))
    return data[:i] + opening * deep + closing * chance.choice((0, deep)) + data[i:]


DAMAGE = (_cut, _flip, _byte, _word, _delete, _repeat, _swap, _splice, _number, _number, _nest)


def _place(chance: random.Random, size: int) -> int:
    """Return a place, half of the time in the beginning, where headers are."""
    return chance.randrange(min(size, 256) or 1) if chance.random() < 0.5 else chance.randrange(size or 1)


def _damaged_json(chance: random.Random, data: bytes, form: str) -> bytes:
    rest = b""
    if form == "safetensors":
        size = int.from_bytes(data[:8], "little")
        data, rest = data[8 : 8 + size], data[8 + size :]
    lines = [json.loads(line) for line in data.splitlines()] if form == "lines" else [json.loads(data)]
    for _ in range(chance.choice((1, 1, 1, 2, 5))):
        _damage_tree(chance, lines)
    text = "\n".join(json.dumps(line, ensure_ascii=chance.random() < 0.9) for line in lines)
    found = text.encode(errors="surrogatepass")
    if chance.random() < 0.2:
        found = _number(chance, found, ())
    if form == "safetensors":
        return len(found).to_bytes(8, "little") + found + rest
    return found


def _damage_tree(chance: random.Random, root: list[Any]) -> None:
    """Change one value of a tree of JSON in place."""
    places = list(_places(root))
    if not places:
        return
    holder, key = chance.choice(places)
    other, other_key = chance.choice(places)
    match chance.randrange(8):
        case 0 | 1 | 2:
            holder[key] = copy.copy(chance.choice(VALUES))
        case 3:
            del holder[key]
        case 4:  # a copy: no list holds itself
            holder[key] = json.loads(json.dumps(other[other_key]))
        case 5:
            if isinstance(holder, dict):
                name = (
                    other_key if isinstance(other_key, str) else chance.choice(("", "x", "\0", "type", "0"))
                )
                holder[name] = holder.pop(key)
            else:
                holder.insert(chance.randrange(len(holder) + 1), holder[key])
        case 6:
            value = holder[key]
            for _ in range(chance.choice((1, 50))):
                value = [value] if chance.random() < 0.5 else {"a": value}
            holder[key] = value
        case 7:
            if isinstance(holder[key], str):
                text, i = holder[key], chance.randrange(len(holder[key]) + 1)
                holder[key] = (
                    text[:i] + chance.choice(("\0", "\n", "\ud800", "٣", "(a+)+$", "%s", "}", '"')) + text[i:]
                )
            elif isinstance(holder[key], int | float) and abs(holder[key]) < 10**9:
                holder[key] = holder[key] * chance.choice((-1, 2, 3, 1000, 0.5, 10**6))


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield where each value of a tree is, at most some thousand."""
    waiting, count = [value], 0
    while waiting and count < 3000:
        holder = waiting.pop()
        for key in list(holder) if isinstance(holder, dict) else range(len(holder)):
            count += 1
            yield holder, key
            if isinstance(holder[key], dict | list):
                waiting.append(holder[key])


def _damaged_text(chance: random.Random, data: bytes, pieces: Sequence[str]) -> bytes:
    """Exchange, drop and insert the pieces of a text."""
    cut = re.findall(r"\{%.*?%\}|\{\{.*?\}\}|[^{]+|.", data.decode(), re.DOTALL)
    for _ in range(chance.choice((1, 1, 2, 4))):
        i = chance.randrange(len(cut) + 1)
        match chance.randrange(4):
            case 0:
                cut[i : i + 1] = [chance.choice(pieces)]
            case 1:
                cut.insert(i, chance.choice(pieces))
            case 2:
                del cut[i : i + 1]
            case 3:
                j = chance.randrange(len(cut) + 1)
                cut[i : i + 1] = [*cut[i : i + 1], *cut[j : j + chance.randrange(4)]]
    return "".join(cut).encode()


# --- children


def fuzz(
    name: str,
    make: Callable[[Path], Reader],
    *,
    seed: int = 0,
    first: int = 0,
    count: int | None = None,
    seconds: float = 3600.0,
    tries_again: bool = True,
) -> Tried:
    """Let a reader read damaged files, `count` or for some `seconds` of CPU. Needs Linux.

    `make` makes the reader in an empty folder, in a child. An input that takes too much CPU is tried alone.
    """
    tried, end = Tried(), None if count is None else first + count
    shared = mmap.mmap(-1, PAGE)  # input that is read now, inputs that were refused, seconds of earlier ones
    folder = Path(tempfile.mkdtemp(prefix="mlx_spec-fuzz-"))
    notes = folder.with_suffix(".txt")
    try:
        while (end is None or first < end) and tried.seconds < seconds and len(tried.findings) < 20:
            shared[:24] = struct.pack("<qqd", first - 1, 0, 0.0)
            pid = os.fork()
            if not pid:
                _child(name, make, folder, notes, shared, seed, first, end, seconds - tried.seconds)
            status, own = _wait(pid, shared)
            last, refused, used = struct.unpack("<qqd", shared[:24])
            tried.seconds += max(used, own)
            tried.inputs += last + 1 - first
            tried.refused += refused
            if (
                os.WIFSIGNALED(status)
                and os.WTERMSIG(status) == signal.SIGXCPU
                and tries_again
                and last >= first
            ):
                # A virtual machine counts time that its host takes away: alone it must be slow, too.
                again = fuzz(name, make, seed=seed, first=last, count=1, tries_again=False)
                tried.findings += again.findings
                tried.seconds += again.seconds
            elif status:
                tried.findings.append(f"{name} {seed} {last}: {_cause(status)}")
                if last < first:  # it did not even begin
                    break
            if not status and (end is None or last + 1 >= end):
                break
            first = last + 1
        if notes.exists():
            tried.findings += notes.read_text(encoding="utf-8", errors="replace").split("\n\n")[:-1]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        notes.unlink(missing_ok=True)
    return tried


def _wait(pid: int, shared: mmap.mmap, patience_s: float = 120.0) -> tuple[int, float]:
    """Wait for a child, and kill one that is stuck. Return its status, and the CPU seconds that it used."""
    before, since = b"", time.monotonic()
    while True:
        ended, status, usage = os.wait4(pid, os.WNOHANG)
        if ended:
            return status, usage.ru_utime + usage.ru_stime
        if shared[:8] != before:
            before, since = shared[:8], time.monotonic()
        elif time.monotonic() - since > patience_s:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _cause(status: int) -> str:
    if not os.WIFSIGNALED(status):
        return f"the child ended with status {os.waitstatus_to_exitcode(status)}"
    number = os.WTERMSIG(status)
    limits = {signal.SIGXCPU: "too much CPU", signal.SIGKILL: "it hangs without using the CPU"}
    return limits.get(signal.Signals(number), signal.Signals(number).name)


def _child(
    name: str,
    make: Callable[[Path], Reader],
    folder: Path,
    notes: Path,
    shared: mmap.mmap,
    seed: int,
    first: int,
    end: int | None,
    seconds: float,
) -> None:
    """Read inputs until the end or a finding that spoils the process. Never returns."""
    status = 1
    try:
        warnings.simplefilter("error")
        quiet = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(quiet, stream)
        place = folder / "files"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        reader = make(place)
        for path, valid in reader.files.items():
            (place / path).parent.mkdir(parents=True, exist_ok=True)
            (place / path).write_bytes(valid.content)
        begun, refused, index, known = time.process_time(), 0, first, set[str]()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        most = _resident() + (1 << 20) * (reader.megabytes + 2048) + _virtual()
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        while (end is None or index < end) and time.process_time() - begun < seconds:
            shared[:24] = struct.pack("<qqd", index, refused, time.process_time() - begun)
            _limit_cpu(reader.cpu_seconds)
            before = _resident()
            path, data = input_of(name, seed, index, reader)
            (place / path).write_bytes(data)
            problem, is_refused = _problem(reader)
            refused += is_refused
            grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10) - before >> 20
            if problem is None and grown > reader.megabytes:
                problem = f"it took {grown} MB"
            if problem is not None and (kind := problem.split(": ")[0]) not in known:
                known.add(kind)
                with notes.open("a", encoding="utf-8", errors="backslashreplace") as stream:
                    stream.write(f"{name} {seed} {index}: {path}, {len(data)} bytes: {problem}\n\n")
            (place / path).write_bytes(reader.files[path].content)
            index += 1
            shared[:24] = struct.pack("<qqd", index - 1, refused, time.process_time() - begun)
            if grown > reader.megabytes:  # its peak would hide that of the next inputs
                break
        status = 0
    except BaseException:
        with notes.open("a", encoding="utf-8", errors="backslashreplace") as stream:
            stream.write(f"{name} {seed}: the reader cannot be made: {traceback.format_exc(limit=-4)}\n\n")
    finally:
        os._exit(status)


def input_of(name: str, seed: int, index: int, reader: Reader) -> tuple[str, bytes]:
    """Return the path and the damaged content of an input."""
    chance = random.Random(f"{name} {seed} {index}")
    path = chance.choice(list(reader.files))
    others = [valid.content for other, valid in reader.files.items() if other != path]
    return path, damaged(chance, reader.files[path], others)


def _problem(reader: Reader) -> tuple[str | None, bool]:
    """Read the files. Return what is wrong with how that ends, or None, and whether they were refused."""
    try:
        reader.read()
    except (SpecError, *reader.refusals) as error:
        text = str(error)
        return (f"an error of several lines: {text[:300]!r}" if "\n" in text else None), True
    except AssertionError as error:
        return f"{error}", False
    except BaseException as error:
        where = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in where if "mlx_spec" in frame.filename or "/apps/" in frame.filename]
        frame = (own or list(where))[-1]
        place = f"{frame.name}, {Path(frame.filename).name}:{frame.lineno}"
        return f"{type(error).__name__} in {place}: {str(error)[:200]!r}", False
    return None, False


def _limit_cpu(seconds: int) -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + 1 + seconds, hard))


def _resident() -> int:
    return _pages(1)


def _virtual() -> int:
    return _pages(0)


def _pages(which: int) -> int:
    counts = Path("/proc/self/statm")  # macOS has none
    return int(counts.read_text().split()[which]) * mmap.PAGESIZE if counts.exists() else 0
