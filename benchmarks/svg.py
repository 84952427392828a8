"""Figures without a library: staircases over integers, and intervals in rows."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

COLORS = ("#2563eb", "#dc2626", "#059669", "#9333ea", "#d97706", "#475569")
FONT = 'font-family="system-ui, sans-serif" font-size="12"'
WIDTH, LEFT, RIGHT, TOP, BOTTOM = 720, 60, 150, 40, 44
ROW = 22


@dataclass(frozen=True)
class Point:
    x: float
    y: float
    low: float
    high: float


@dataclass(frozen=True)
class Interval:
    """A row: a value and its interval, in a group that has one colour."""

    label: str
    value: float
    low: float
    high: float
    group: int = 0


@dataclass(frozen=True)
class Axes:
    """Of a plot of lines: what its numbers are."""

    title: str
    x: str
    y: str


def staircase(axes: Axes, lines: dict[str, list[Point]]) -> str:
    """Lines of points with their quartiles, y from 0."""
    height = 380
    points = [p for line in lines.values() for p in line]
    low, high = min(p.x for p in points), max(p.x for p in points)
    ticks = _ticks(max(p.high for p in points))

    def at(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (WIDTH - LEFT - RIGHT) * (x - low) / max(high - low, 1)
        return across, height - BOTTOM - (height - TOP - BOTTOM) * y / ticks[-1]

    body = [_text(LEFT, 22, axes.title, weight="600")]
    body += [_rule(at(low, y), at(high, y), str(_short(y))) for y in ticks]
    body += [_text(at(x, 0)[0], height - 24, str(x), anchor="middle") for x in range(int(low), int(high) + 1)]
    body += [_text((LEFT + WIDTH - RIGHT) / 2, height - 6, axes.x, anchor="middle"), _upright(axes.y, height)]
    colored = list(zip(COLORS, lines.items(), strict=False))
    for color, (_, line) in colored:
        body += [_line([at(p.x, p.y) for p in line], color)]
        body += [_line([at(p.x, p.low), at(p.x, p.high)], color, width=4, opacity=0.35) for p in line]
        body += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>'
            for x, y in (at(p.x, p.y) for p in line)
        ]
    ends = [(at(line[-1].x, line[-1].y), name, color) for color, (name, line) in colored]
    free = 0.0  # where the next name may stand, from the top down
    for (x, y), name, color in sorted(ends, key=lambda end: end[0][1]):
        free = max(y, free)
        body.append(_text(x + 10, free + 4, name, color=color))
        free += 15
    return _document(height, body)


def intervals(title: str, rows: Sequence[Interval], *, mark: float = 1.0) -> str:
    """A row for each value, with a line at `mark`."""
    label = 210
    height = TOP + ROW * len(rows) + BOTTOM
    low = min(0.8 * mark, *(r.low for r in rows))
    high = max(1.2 * mark, *(r.high for r in rows))

    def at(x: float) -> float:
        return label + (WIDTH - label - 130) * (x - low) / (high - low)

    bottom = height - BOTTOM + 4
    body = [_text(12, 22, title, weight="600"), _line([(at(mark), TOP - 4), (at(mark), bottom)], "#94a3b8")]
    body.append(_text(at(mark), bottom + 16, _short(mark), anchor="middle"))
    for index, row in enumerate(rows):
        y, color = TOP + ROW * (index + 0.5), COLORS[row.group % len(COLORS)]
        body.append(_text(label - 12, y + 4, row.label, anchor="end"))
        body.append(_line([(at(row.low), y), (at(row.high), y)], color, width=4, opacity=0.35))
        body.append(f'<circle cx="{at(row.value):.1f}" cy="{y:.1f}" r="4" fill="{color}"/>')
        shown = f"{row.value:.2f} [{row.low:.2f}, {row.high:.2f}]"
        body.append(_text(WIDTH - 120, y + 4, shown, color="#475569"))
    return _document(height, body)


def _ticks(most: float) -> list[float]:
    """Round numbers from 0 to beyond `most`."""
    step = 10 ** math.floor(math.log10(most / 4)) if most > 0 else 1.0
    step *= next((m for m in (1, 2, 5) if most / (step * m) <= 6), 10)
    return [step * i for i in range(math.ceil(most / step) + 1)]


def _short(number: float) -> str:
    return f"{number:.4g}"


def _rule(start: tuple[float, float], end: tuple[float, float], label: str) -> str:
    return _line([start, end], "#e2e8f0") + _text(start[0] - 8, start[1] + 4, label, anchor="end")


def _line(
    points: Iterable[tuple[float, float]], color: str, *, width: float = 1.5, opacity: float = 1
) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    style = f'stroke="{color}" stroke-width="{width}" stroke-opacity="{opacity}" fill="none"'
    return f'<polyline points="{path}" {style}/>'


def _text(
    x: float, y: float, text: str, *, anchor: str = "start", color: str = "#0f172a", weight: str = "400"
) -> str:
    style = f'text-anchor="{anchor}" fill="{color}" font-weight="{weight}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{html.escape(text)}</text>'


def _upright(text: str, height: int) -> str:
    x, y = 16, (height - BOTTOM + TOP) / 2
    return f'<g transform="rotate(-90 {x} {y})">{_text(x, y, text, anchor="middle")}</g>'


def _document(height: int, body: Iterable[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" {FONT}>'
    ground = f'<rect width="{WIDTH}" height="{height}" rx="6" fill="#ffffff"/>'
    return "\n".join([head, ground, *body, "</svg>", ""])
