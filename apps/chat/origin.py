"""Where tokens came from: the target, a draft and the position in it, the text so far, or the grammar."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlx_spec.text.stream import Span

BORDER = "│"  # between two rounds
DIM = "2"
# Parameters of SGR escape codes, of the 256 colours; that of the target is none.
DRAFTED = ("38;5;34", "38;5;36", "38;5;38", "38;5;33", "38;5;63")  # by position, the last for all later
COPIED, FORCED = "38;5;172", "38;5;170"
GRAMMAR = "grammar"


@dataclass(frozen=True)
class Origins:
    """Names and colours for what a pair drafts with. `drafters` by the index that rounds name."""

    drafters: Sequence[str]

    def name(self, drafter: int | None) -> str | None:
        """That of a drafter; an index past those of the pair is what a grammar forces."""
        if drafter is None:
            return None
        return self.drafters[drafter] if drafter < len(self.drafters) else GRAMMAR

    def style(self, span: Span) -> str:
        """The colour of a span."""
        name = self.name(span.drafter)
        if name is None:
            return ""
        if name == GRAMMAR:
            return FORCED
        return COPIED if name == "lookup" else DRAFTED[min(span.position, len(DRAFTED)) - 1]


def legend() -> list[tuple[str, str]]:
    """What the colours mean: texts with their styles, to be put side by side."""
    last = len(DRAFTED)
    drafted = [
        (f" {position}{'+' if position == last else ''}", style) for position, style in enumerate(DRAFTED, 1)
    ]
    return [
        ("target ", ""),
        (BORDER, DIM),
        (" drafted at position", DRAFTED[0]),
        *drafted,
        (f" {BORDER}", DIM),
        (" copied by lookup", COPIED),
        (f" {BORDER}", DIM),
        (" forced by the grammar", FORCED),
        (f"   {BORDER} ends a round", DIM),
    ]
