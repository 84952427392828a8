"""Draw README's moving picture: a race of one question, with drafts and plain, as it was decoded here.

Both answers take turns, and each is shown by its own seconds of decoding. The gain below is the one that the
race measured, with its interval; nothing is drawn that was not decoded. The record on the last line has the
figures. Writes results/race.svg, an SVG with SMIL animation that repeats.
"""

from __future__ import annotations

import textwrap
import time
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from timing import finish, parser

import mlx_spec
from mlx_spec.apps.race import NAMES, question, race, verdict
from mlx_spec.device import device_name

QUESTION = "Write a Python function that reads a CSV file, and explain each line of it."
COLUMNS, LINES = 84, 14  # of the text of an answer
LINE = 18  # px
PAUSE_S = 4.0  # after the end of the slower answer


@dataclass
class Lane:
    """One answer: its text after each turn, with the seconds of decoding until then."""

    steps: list[tuple[float, int, str]] = field(default_factory=list)  # seconds, tokens, text


def main() -> None:
    settings = parser(__doc__)
    settings.add_argument("--model", default="smollm2")
    settings.add_argument("--question", default=QUESTION)
    settings.add_argument("--tokens", type=int, default=160)
    settings.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "race.svg")
    options = settings.parse_args()
    started, pair = time.time(), mlx_spec.load(options.model)
    lanes, last = (Lane(), Lane()), None
    for last in race(pair, question(pair.tokenizer, options.question), options.tokens):
        for lane, run in zip(lanes, last.runs, strict=True):
            if run.tokens and (not lane.steps or len(run.tokens) > lane.steps[-1][1]):
                lane.steps.append((run.seconds, len(run.tokens), pair.tokenizer.decode(run.tokens)))
    assert last is not None and last.multiple is not None
    lines = [*verdict(last, pair.tokenizer)[-2:], f"{options.model} on {device_name()}"]
    options.output.write_text(_svg(options.model, lanes, lines), encoding="utf-8")
    results = {"multiple": last.multiple, "pairs": len(last.ratios), "bytes": options.output.stat().st_size}
    finish("race_picture", results | {"verdict": lines}, options, started)


def _svg(model: str, lanes: tuple[Lane, Lane], lines: list[str]) -> str:
    end = max(lane.steps[-1][0] for lane in lanes)
    high = 64 + 2 * (LINES + 2) * LINE + 3 * LINE
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 {high}" font-family="ui-monospace, Menlo, '
        'monospace" font-size="13">',
        f"<title>A race of {escape(model)}: {escape(lines[0])}</title>",
        f'<rect width="760" height="{high}" rx="10" fill="#15171c"/>',
        # The clock of the picture: it begins again when it ends.
        f'<rect width="0" height="0"><animate id="clock" attributeName="x" from="0" to="0" '
        f'begin="0s;clock.end" dur="{end + PAUSE_S:.2f}s"/></rect>',
        f'<text x="24" y="32" fill="#e8eaed">$ mlx-spec race {escape(model)}</text>',
    ]
    top = 64
    for lane, name, colour in zip(lanes, NAMES, ("#7ee787", "#9aa0a6"), strict=True):
        parts.append(f'<text x="24" y="{top}" fill="{colour}" font-weight="bold">{name}</text>')
        rows: list[str] = []
        for seconds, tokens, text in lane.steps:
            wrapped = [row for line in text.split("\n") for row in textwrap.wrap(line, COLUMNS) or [""]]
            for number in range(max(len(rows) - 1, 0), min(len(wrapped), LINES)):
                before = rows[number] if number < len(rows) else ""
                row = wrapped[number]
                if row.startswith(before) and row != before:
                    x, y = 24 + 7.85 * len(before), top + (number + 1) * LINE
                    parts.append(_text(x, y, "#e8eaed", row[len(before) :], seconds))
            rows = wrapped[:LINES]
            count = f"{tokens} tokens, {seconds:.1f} s"
            later = [step[0] for step in lane.steps if step[0] > seconds]
            parts.append(_text(620, top, colour, count, seconds, min(later, default=None)))
        top += (LINES + 2) * LINE
    for line, colour in zip(lines, ("#7ee787", "#7ee787", "#9aa0a6"), strict=True):
        parts.append(_text(24, top, colour, line, end))
        top += LINE
    return "\n".join([*parts, "</svg>\n"])


def _text(x: float, y: float, colour: str, text: str, begin: float, end: float | None = None) -> str:
    """Return a text that is seen from `begin` seconds on, until `end` or the picture begins again."""
    until = "clock.end" if end is None else f"clock.begin+{end:.2f}s;clock.end"
    return (
        f'<text x="{x:.1f}" y="{y}" fill="{colour}" xml:space="preserve" visibility="hidden">{escape(text)}'
        f'<set attributeName="visibility" to="visible" begin="clock.begin+{begin:.2f}s" end="{until}"/>'
        "</text>"
    )


if __name__ == "__main__":
    main()
