"""Turns of a conversation as chat templates want them: nobody speaks twice in a row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def merged(turns: Iterable[Mapping[str, Any]], between: str) -> list[dict[str, Any]]:
    """`turns`, with those made one that one role has in a row; results of tools stay apart.

    `between` stands between texts of a user or the system; what a model wrote is put together as it was.
    """
    found: list[dict[str, Any]] = []
    for turn in turns:
        if found and turn["role"] == found[-1]["role"] != "tool":
            found[-1] = _joined(found[-1], turn, "" if turn["role"] == "assistant" else between)
        else:
            found.append(dict(turn))
    return found


def _joined(a: Mapping[str, Any], b: Mapping[str, Any], between: str) -> dict[str, Any]:
    both: dict[str, Any] = {"role": a["role"], "content": _text(a, b, "content", between)}
    thoughts = _text(a, b, "reasoning_content", "")
    calls = [*a.get("tool_calls", ()), *b.get("tool_calls", ())]
    both |= {"reasoning_content": thoughts} if thoughts else {}
    return both | ({"tool_calls": calls} if calls else {})


def _text(a: Mapping[str, Any], b: Mapping[str, Any], key: str, between: str) -> str | None:
    texts = [turn[key] for turn in (a, b) if turn.get(key) is not None]
    return between.join(texts) if texts else None
