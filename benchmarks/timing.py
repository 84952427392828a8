"""What the benchmarks share: arms in a balanced order, bootstrap intervals, the table and the JSON line."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import random
import statistics
import subprocess
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

PACKAGES = ("mlx", "mlx-lm", "mlx-vlm", "mlx-spec")


def parser(doc: str | None) -> argparse.ArgumentParser:
    """An argument parser with the options that every benchmark has."""
    result = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("--quick", action="store_true", help="smallest sizes: does it run?")
    result.add_argument("--seed", type=int, default=0)
    return result


def latin_square(names: Sequence[str]) -> list[list[str]]:
    """Orders in which every arm stands equally often at every place and after every other (Williams 1949)."""
    n = len(names)
    zigzag = [(i + 1) // 2 if i % 2 else (n - i // 2) % n for i in range(n)]
    rows = [[names[(z + shift) % n] for z in zigzag] for shift in range(n)]
    return rows + ([row[::-1] for row in rows] if n % 2 else [])


def interval(ratios: list[list[float]], seed: int, draws: int = 2000) -> list[float]:
    """Median of the prompts' medians, with a bootstrap 95 % interval over prompts and their blocks."""

    def middle(sample: list[list[float]]) -> float:
        return statistics.median(statistics.median(values) for values in sample)

    chance = random.Random(seed)
    drawn = []
    for _ in range(draws):
        sample = chance.choices(ratios, k=len(ratios))
        drawn.append(middle([chance.choices(values, k=len(values)) for values in sample]))
    drawn.sort()
    return [round(x, 4) for x in (middle(ratios), drawn[int(0.025 * draws)], drawn[int(0.975 * draws) - 1])]


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a Markdown table."""
    cells = [[str(c) for c in row] for row in (head, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    cells.insert(1, ["-" * width for width in widths])
    for row in cells:
        print("| " + " | ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) + " |")
    print(flush=True)


def finish(question: str, results: Any, settings: argparse.Namespace, started: float) -> None:
    """Print the JSON line: what was measured, on what, with what."""
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
    """Device, system, versions and load."""
    info = mx.device_info() if mx.default_device().type == mx.gpu else {}
    return {
        "device": str(info.get("device_name") or _processor()),
        "backend": str(mx.default_device()),
        "cores": os.cpu_count(),
        "os": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "commit": _commit(),
        "blas": Path(os.environ["LD_PRELOAD"]).name if os.environ.get("LD_PRELOAD") else None,
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
    """The commit, with a plus sign where files were changed since."""
    folder = Path(__file__).parent
    try:
        args = ["git", "-C", str(folder), "describe", "--always", "--dirty=+", "--abbrev=12"]
        return subprocess.run(args, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
