"""Markdown to text with SGR escape codes: what models write most, and all else as it is."""

from __future__ import annotations

import re
import unicodedata

BOLD, ITALIC, CODE, DIM = "1", "3", "36", "2"
FENCE = re.compile(r"\s*(```|~~~)")
HEADING = re.compile(r"#{1,6}\s+(?P<text>.*?)\s*#*\s*")
BULLET = re.compile(r"(?P<indent>\s*)[-*+]\s+(?P<text>.*)")
QUOTE = re.compile(r"\s*>\s?(?P<text>.*)")
SPAN = re.compile(
    r"`(?P<code>[^`\n]+)`"
    r"|\*\*(?P<bold>\S(?:[^*\n]*[^*\s])?)\*\*"
    r"|(?<![\w*])\*(?P<italic>[^\s*](?:[^*\n]*[^*\s])?)\*(?![\w*])"
)
# Joined emoji and the like: terminals do not agree about how wide they are. Tabs are as wide as their place.
UNSURE = re.compile("[\t\u200d\ufe0e\ufe0f\U0001f1e6-\U0001f1ff\U0001f3fb-\U0001f3ff]")


def rendered(text: str) -> str:
    """The text for a terminal; the same text where there is no Markdown in it."""
    lines: list[str] = []
    in_code = False
    for line in text.split("\n"):
        if FENCE.match(line):
            in_code = not in_code
        else:
            lines.append(_styled(line, CODE) if in_code else _line(line))
    return "\n".join(lines)


def rows(text: str, columns: int) -> int | None:
    """How many rows of a terminal the text takes; None where that is not certain."""
    if UNSURE.search(text) or columns < 1:
        return None
    return sum(max(-(-_width(line) // columns), 1) for line in text.split("\n"))


def _line(line: str) -> str:
    if found := HEADING.fullmatch(line):
        return _styled(found["text"], BOLD)
    if found := QUOTE.fullmatch(line):
        return f"{_styled('│', DIM)} {_spans(found['text'])}"
    if found := BULLET.fullmatch(line):
        return f"{found['indent']}• {_spans(found['text'])}"
    return _spans(line)


def _spans(line: str) -> str:
    return SPAN.sub(_span, line)


def _span(found: re.Match[str]) -> str:
    styles = {"code": CODE, "bold": BOLD, "italic": ITALIC}
    name = found.lastgroup or "code"
    return _styled(found[name], styles[name])


def _styled(text: str, style: str) -> str:
    return f"\x1b[{style}m{text}\x1b[0m" if text else ""


def _width(line: str) -> int:
    """Columns; wide characters take two, combining ones none."""
    wide = sum(unicodedata.east_asian_width(letter) in ("W", "F") for letter in line)
    return len(line) + wide - sum(unicodedata.combining(letter) > 0 for letter in line)
