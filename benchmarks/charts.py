"""Figures of benchmark records."""

from __future__ import annotations

from typing import Any

from svg import Axes, Interval, Point, intervals, staircase

SHOWN = ("adaptive", "lookup", "random drafter, adaptive")  # arms that must never be slower than plain
Results = dict[str, Any]


def decode(results: Results) -> str:
    """Tokens a second of every arm, to mlx-lm's."""
    rows = [_row(name, arm["decode"], _group(name)) for name, arm in results["arms"].items()]
    return intervals("Decoding, ratio to mlx-lm in the same block, 95 % intervals", rows)


def kinds(results: Results) -> str:
    """The arms that choose for themselves, by kind of prompt, to our own plain decoding."""
    rows = [
        _row(f"{kind}: {name}".replace(", adaptive", ""), found[name]["to plain"], SHOWN.index(name))
        for kind, found in results["kinds"].items()
        for name in SHOWN
        if name in found
    ]
    return intervals("Decoding by kind of prompt, ratio to depth 0, 95 % intervals", rows)


def blas(results: Results) -> str:
    """Every arm at every acceptance, to our own plain decoding."""
    rows = [
        _row(f"{kind.split()[-1]}: {name}", arm["to plain"], index)
        for index, (kind, found) in enumerate(results["kinds"].items())
        for name, arm in found.items()
        if name != "plain, again"
    ]
    return intervals("Acceptance: arm. Ratio to depth 0, 95 % intervals", rows)


def round_costs(results: Results) -> str:
    """Verification in plain tokens, a line for each context."""
    lines = {}
    for context, found in results["contexts"].items():
        unit = found["plain"]["1"][1]
        points = found["verify"].items()
        lines[f"{context} tokens"] = [Point(int(m), s[1] / unit, s[0] / unit, s[2] / unit) for m, s in points]
    return staircase(Axes(f"Cost of verification, {results['subject']}", "rows", "plain tokens"), lines)


def _row(label: str, values: list[float], group: int) -> Interval:
    value, low, high = values
    return Interval(label, value, low, high, group)


def _group(name: str) -> int:
    """One colour for each package."""
    return 1 if name.startswith("mlx-vlm") else 5 if name.startswith("mlx-lm") else 0
