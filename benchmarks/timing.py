"""Shared code of the benchmarks: options, tables, the JSON record, bootstrap intervals, and blocks of runs.

A block has one run of every arm on one prompt. The runs of a block take turns of a few tokens, so that a slow
moment of the machine affects all of them. Only runs of one block are compared.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from arms import Decoder, Prompt

from mlx_spec.device.blas import use_blas

PACKAGES = ("mlx", "mlx-lm", "mlx-vlm", "mlx-spec")


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Return an argument parser with the options of every benchmark."""
    result = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("--quick", action="store_true", help="smallest sizes: does it run?")
    result.add_argument("--seed", type=int, default=0)
    return result


def latin_square(names: Sequence[str]) -> list[list[str]]:
    """Return orders with every arm equally often in each place and after each other (Williams 1949)."""
    n = len(names)
    zigzag = [(i + 1) // 2 if i % 2 else (n - i // 2) % n for i in range(n)]
    rows = [[names[(z + shift) % n] for z in zigzag] for shift in range(n)]
    return rows + ([row[::-1] for row in rows] if n % 2 else [])


def interval(ratios: list[list[float]], seed: int, draws: int = 2000) -> list[float]:
    """Return the geometric mean of the prompts' medians, with a bootstrap 95 % interval.

    A median over prompts would hide a kind of prompt on which an arm loses.
    """

    chance = np.random.default_rng(seed)
    chosen = chance.integers(len(ratios), size=(draws, len(ratios)))
    logs = np.empty(chosen.shape)
    for prompt, values in enumerate(ratios):
        places = chosen == prompt
        drawn = chance.choice(values, size=(np.count_nonzero(places), len(values)))
        logs[places] = np.log(np.median(drawn, axis=1))
    means = np.sort(np.exp(logs.mean(axis=1)))
    middle = statistics.geometric_mean(statistics.median(values) for values in ratios)
    return [round(float(x), 4) for x in (middle, means[int(0.025 * draws)], means[int(0.975 * draws) - 1])]


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a Markdown table."""
    cells = [[str(c) for c in row] for row in (head, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    cells.insert(1, ["-" * width for width in widths])
    for row in cells:
        print("| " + " | ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) + " |")
    print(flush=True)


def finish(question: str, results: Any, settings: argparse.Namespace, started: float) -> None:
    """Print the JSON record: results, settings, device and versions."""
    given = {key: str(value) if isinstance(value, Path) else value for key, value in vars(settings).items()}
    record = {
        "benchmark": question,
        "results": results,
        "settings": given,
        "minutes": round((time.time() - started) / 60, 2),
        **surroundings(),
    }
    print(json.dumps(record))


def surroundings() -> dict[str, Any]:
    """Return device, system, versions and load."""
    blas = use_blas()
    info = mx.device_info() if mx.default_device().type == mx.gpu else {}
    return {
        "device": str(info.get("device_name") or _processor()),
        "backend": str(mx.default_device()),
        "cores": os.cpu_count(),
        "os": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "commit": _commit(),
        "blas": None if blas is None else blas.name,
        "load_average": os.getloadavg(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor()
    names = (line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line)
    return next(names, platform.machine())


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Return the commit, with a plus sign if files were changed."""
    folder = Path(__file__).parent
    try:
        args = ["git", "-C", str(folder), "describe", "--always", "--dirty=+", "--abbrev=12"]
        return subprocess.run(args, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


BASE = "mlx-lm"
PLAIN, AGAIN = "plain", "plain, again"
DRAWS = 2000


@dataclass(frozen=True)
class Run:
    tokens: list[int]
    drafted: list[int]  # draft tokens verified, by step
    decode: float  # tokens a second from the end of the prompt
    whole: float  # tokens a second from the start

    @property
    def hash(self) -> str:
        return hashlib.sha256(str(self.tokens).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Block:
    """All arms once on one prompt."""

    first: Run
    last: Run
    runs: dict[str, Run]

    @property
    def null(self) -> float:
        return self.last.decode / self.first.decode

    def ratio(self, arm: str, base: str, measure: str) -> float:
        """Return the ratio to another arm; mlx-lm and plain count as the mean of their two runs."""
        runs = [self.first, self.last]
        if base != BASE:
            names = [name for name in ((PLAIN, AGAIN) if base == PLAIN else (base,)) if name != arm]
            runs = [self.runs[name] for name in names if name in self.runs] or [self.runs[arm]]
        return float(getattr(self.runs[arm], measure) / statistics.mean(getattr(r, measure) for r in runs))


def measure(
    decoders: dict[str, Decoder], names: list[str], prompts: list[Prompt], settings: argparse.Namespace
) -> list[list[Block]]:
    """Return blocks by prompt, without the first of each."""
    square = latin_square(names)
    random.Random(settings.seed).shuffle(square)
    done: list[list[Block]] = [[] for _ in prompts]
    for repeat in range(settings.repeats):
        for i, prompt in enumerate(prompts):
            order = square[(repeat * len(prompts) + i) % len(square)]
            arms = [decoders[n] for n in (BASE, *order, BASE)]
            first, *runs, last = in_turns(arms, prompt, settings.burst, repeat)
            if repeat > 0:
                done[i].append(Block(first, last, dict(zip(order, runs, strict=True))))
        print(f"repeat {repeat + 1} of {settings.repeats}", file=sys.stderr, flush=True)
    return done


def in_turns(decoders: Sequence[Decoder], prompt: Prompt, burst: int, start: int) -> list[Run]:
    """Run each decoder once, in turns of `burst` tokens."""
    going = [Going(decoder, prompt) for decoder in decoders]
    for turn in range(len(going) * prompt.count):
        for i in range(len(going)):
            going[(i + start + turn) % len(going)].go(burst)
        if all(each.done for each in going):
            break
    return [each.run() for each in going]


class Going:
    """A run in progress. Its time includes waiting for queued work, except after its last token.

    A decoder that does not say when it has read the prompt is timed from its first step on, and that step's
    tokens are left out. That favours a decoder a little if it has begun the next token by then.
    """

    def __init__(self, decoder: Decoder, prompt: Prompt) -> None:
        self._steps, self._count = decoder(prompt, self._read), prompt.count
        self._tokens: list[int] = []
        self._drafted: list[int] = []
        self._started = 0.0  # clock time at which this turn began
        self._seconds = 0.0  # seconds of the turns before
        self._prefill: float | None = None  # seconds until the prompt was read; None if not said
        self._first = 0  # tokens that came before decoding was timed

    @property
    def done(self) -> bool:
        return len(self._tokens) >= self._count

    def go(self, burst: int) -> None:
        """Decode at least `burst` more tokens. The first turn only reads the prompt and takes one step."""
        if self.done:
            return
        goal = min(len(self._tokens) + burst, self._count) if self._tokens else 1
        self._started = time.perf_counter()
        while len(self._tokens) < goal:
            new, count = next(self._steps)
            self._tokens += new
            self._drafted.append(count)
        end = time.perf_counter()
        mx.synchronize()  # a pipelined decoder has queued one step more
        self._seconds += (end if self.done else time.perf_counter()) - self._started
        if self._prefill is None:
            self._first, self._prefill = len(self._tokens), self._seconds

    def run(self) -> Run:
        self._steps = iter(())  # it holds this run: it would be closed later, during another on its caches
        seconds = self._seconds - (self._prefill or 0.0)
        decode = (len(self._tokens) - self._first) / max(seconds, 1e-9)
        return Run(self._tokens, self._drafted, decode, len(self._tokens) / self._seconds)

    def _read(self) -> None:
        self._prefill = self._seconds + time.perf_counter() - self._started


def summary(
    blocks: list[list[Block]], prompts: list[Prompt], names: list[str], settings: argparse.Namespace
) -> dict[str, Any]:
    """Return the results of all blocks for the record."""
    used, kept = within(blocks, prompts, settings.spread)
    kinds = list(dict.fromkeys(prompt.kind for prompt in prompts))
    nulls = sorted(b.null for by_prompt in blocks for b in by_prompt)
    base = [r.decode for by_prompt in used for b in by_prompt for r in (b.first, b.last)]
    return {
        "arms": {name: summary_of(name, used, blocks, settings.seed) for name in names},
        "kinds": {kind: of_kind(kind, names, used, blocks, prompts, settings.seed) for kind in kinds},
        "mlx-lm tokens/s": round(statistics.median(base), 1),
        "null": interval([[b.null for b in by_prompt] for by_prompt in blocks], settings.seed),
        "null, quartiles": [round(nulls[len(nulls) * i // 4], 3) for i in (1, 3)],
        "blocks": sum(map(len, blocks)),
        "blocks within the spread": kept,
        "noisy blocks used": used is blocks,
        "prompts": [
            {"kind": p.kind, "prompt tokens": len(p.tokens), "new tokens": p.count, "hash": b[0].first.hash}
            for p, b in zip(prompts, blocks, strict=True)
        ],
    }


def within(blocks: list[list[Block]], prompts: list[Prompt], spread: float) -> tuple[list[list[Block]], int]:
    """Return the quiet blocks and their number; all blocks if a kind had no quiet one."""
    quiet = [[b for b in by_prompt if abs(b.null - 1) <= spread] for by_prompt in blocks]
    kinds = {prompt.kind for prompt in prompts}
    left = {prompt.kind for prompt, found in zip(prompts, quiet, strict=True) if found}
    return (quiet if left == kinds else blocks), sum(map(len, quiet))


def of_kind(
    kind: str,
    names: list[str],
    used: list[list[Block]],
    every: list[list[Block]],
    prompts: list[Prompt],
    seed: int,
) -> dict[str, Any]:
    """Return the results of all arms on prompts of one kind."""
    at = [i for i, prompt in enumerate(prompts) if prompt.kind == kind]
    return {name: summary_of(name, [used[i] for i in at], [every[i] for i in at], seed) for name in names}


def summary_of(name: str, blocks: list[list[Block]], every: list[list[Block]], seed: int) -> dict[str, Any]:
    """Return ratios with intervals, tokens a step, and where the tokens differ from mlx-lm's."""

    def against(base: str, measure: str) -> list[float]:
        found = [[b.ratio(name, base, measure) for b in by_prompt] for by_prompt in blocks if by_prompt]
        return interval(found, seed, DRAWS)

    runs = [b.runs[name] for by_prompt in blocks for b in by_prompt]
    plain = any(PLAIN in b.runs for by_prompt in blocks for b in by_prompt)
    return {
        "decode": against(BASE, "decode"),
        "whole": against(BASE, "whole"),
        "to plain": against(PLAIN, "decode") if plain else None,
        "tokens/s": round(statistics.median(r.decode for r in runs), 1),
        **shape(runs),
        **differences(name, every),
    }


def shape(runs: Sequence[Run]) -> dict[str, Any]:
    """Return tokens and draft tokens a step, and the share of steps without a draft."""
    drafted = [k for r in runs for k in r.drafted]
    return {
        "tokens a step": round(sum(len(r.tokens) for r in runs) / len(drafted), 2),
        "drafted a step": round(statistics.mean(drafted), 2),
        "steps without a draft": round(drafted.count(0) / len(drafted), 3),
    }


def differences(name: str, blocks: list[list[Block]]) -> dict[str, Any]:
    """Return how many prompts gave other tokens than mlx-lm, and the first position that differs."""
    places: dict[int, int] = defaultdict(int)
    hashes: dict[str, str] = {}
    for i, by_prompt in enumerate(blocks):
        for block in by_prompt:
            a, b = block.first.tokens, block.runs[name].tokens
            if a != b:
                pairs = enumerate(zip(a, b, strict=False))
                places[i] = next((j for j, (x, y) in pairs if x != y), min(len(a), len(b)))
                hashes[str(i)] = block.runs[name].hash
    return {"differ": len(places), "first at": min(places.values(), default=None), "other hashes": hashes}
