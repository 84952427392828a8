"""From the events of an answer to text completions and their chunks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from mlx_spec.apps.server.ask import Closed, Ended, Event, Piece
from mlx_spec.apps.server.figures import LEAST, timings_json
from mlx_spec.apps.server.stream import usage_json
from mlx_spec.types import TokenLogprob

Json = dict[str, Any]


class TextShape:
    """Chunks of a text completion."""

    def __init__(self, *, with_logprobs: bool) -> None:
        self._with_logprobs = with_logprobs
        self._lengths: dict[int, int] = {}  # of the text of each choice so far

    def begin(self, _event: Event) -> Iterator[Json]:
        """Nothing comes before the text."""
        return iter(())

    def piece(self, piece: Piece) -> Json:
        """More text."""
        start = self._lengths.get(piece.index, 0)
        self._lengths[piece.index] = start + len(piece.text)
        logprobs = logprobs_json(piece.logprobs, start) if self._with_logprobs else None
        return {"index": piece.index, "text": piece.text, "logprobs": logprobs, "finish_reason": None}

    def end(self, event: Ended) -> Json:
        """Nothing more, and why."""
        return {"index": event.index, "text": "", "logprobs": None, "finish_reason": event.reason}


def whole(head: Json, events: Iterable[Event], choices: int, *, with_logprobs: bool) -> Json:
    """The completion that `events` make."""
    texts, logprobs = [""] * choices, [[] for _ in range(choices)]  # type: list[str], list[list[TokenLogprob]]
    reasons: list[str | None] = [None] * choices
    found = dict(head)
    for event in events:
        match event:
            case Piece(index=i):
                texts[i] += event.text
                logprobs[i] += event.logprobs
            case Ended(index=i, reason=reason):
                reasons[i] = reason
            case Closed(usage=usage, timings=timings):
                found |= {"usage": usage_json(usage), "timings": timings_json(timings)}
    made = [
        {
            "index": i,
            "text": texts[i],
            "logprobs": logprobs_json(logprobs[i], 0) if with_logprobs else None,
            "finish_reason": reasons[i],
        }
        for i in range(choices)
    ]
    return {**found, "choices": made}


def logprobs_json(tokens: Sequence[TokenLogprob], start: int) -> Json:
    """Tokens whose text begins `start` characters into the answer. The first of a prompt has no logprob."""
    offsets, written = [], b""
    for token in tokens:
        offsets.append(start + len(written.decode("utf-8", "ignore")))
        written += token.written
    known = [not math.isnan(token.logprob) for token in tokens]
    return {
        "tokens": [_name(token.written) for token in tokens],
        "token_logprobs": [_finite(t.logprob) if k else None for t, k in zip(tokens, known, strict=True)],
        "top_logprobs": [_likely(t) if k else None for t, k in zip(tokens, known, strict=True)],
        "text_offset": offsets,
    }


def _likely(token: TokenLogprob) -> dict[str, float]:
    """The likeliest first; of two tokens with the same text the likelier one."""
    found: dict[str, float] = {}
    for other in token.top:
        found.setdefault(_name(other.written), _finite(other.logprob))
    return found


def _name(written: bytes) -> str:
    """The text of a token; the bytes of half a character are spelled out."""
    try:
        return written.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in written)


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LEAST
