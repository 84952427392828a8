"""Streams as OpenAI's clients read them: chunks of JSON, a round each, then usage, then the end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

from mlx_spec.apps.server.ask import Closed, Ended, Event, Failed, Piece, RoundDone, Span, Timings, Usage
from mlx_spec.apps.server.bridge import one_line
from mlx_spec.apps.server.fields import StreamOptions
from mlx_spec.apps.server.figures import timings_json
from mlx_spec.session import Statistics

DONE = "data: [DONE]\n\n"
KEEPALIVE = ": keepalive\n\n"

Json = dict[str, Any]


class Shape(Protocol):
    """How a protocol writes what happens to a choice."""

    def begin(self, event: Event) -> Iterable[Json]:
        """Choices to write for an event that is no text: an opening, a call."""
        ...

    def piece(self, piece: Piece) -> Json:
        """A choice with more text."""
        ...

    def end(self, event: Ended) -> Json:
        """A choice that is complete."""
        ...


@dataclass(frozen=True)
class Wanted:
    """What a stream holds besides the answer."""

    usage: bool
    draft: bool


def wanted(options: StreamOptions | None) -> Wanted:
    """As the request says."""
    if options is None:
        return Wanted(usage=False, draft=False)
    return Wanted(usage=bool(options.include_usage), draft=bool(options.include_draft))


class Chunks:
    """Events to the text of a stream. What a round brought to a choice is one chunk.

    The chunk that ends the last choice waits for the timings, unless they come with the usage.
    """

    def __init__(self, head: Json, shape: Shape, wanted: Wanted) -> None:
        self._head = head
        self._shape = shape
        self._wanted = wanted
        self._piece: Piece | None = None  # of the round that is not over
        self._last: Json | None = None

    def frames(self, event: Event | None) -> Iterator[str]:
        """The text for one event, or for silence."""
        match event:
            case None:
                yield KEEPALIVE
            case Piece():
                yield from self._text(event)
            case RoundDone():
                yield from self._round(event)
            case Ended():
                yield from self._flush()
                yield from self._release()
                self._last = self._chunk([self._shape.end(event)])
            case Closed():
                yield from self._close(event)
            case Failed(failure=failure):
                yield from self._flush()
                yield from self._release()
                yield data(failure.body)
            case _:
                for choice in self._shape.begin(event):
                    yield from self._flush()
                    yield from self._release()
                    yield data(self._chunk([choice]))

    def _text(self, piece: Piece) -> Iterator[str]:
        held = self._piece
        if held is not None and (held.index, held.kind) == (piece.index, piece.kind):
            self._piece = replace(
                held,
                text=held.text + piece.text,
                logprobs=held.logprobs + piece.logprobs,
                spans=held.spans + piece.spans,
            )
            return
        yield from self._flush()
        self._piece = piece

    def _round(self, event: RoundDone) -> Iterator[str]:
        if not self._wanted.draft:
            yield from self._flush()
            return
        figures = {"statistics": statistics_json(event.index, event.statistics)}
        if self._piece is None:
            yield data({**self._chunk([]), "mlx_spec": figures})
        yield from self._flush(figures)

    def _flush(self, figures: Json | None = None) -> Iterator[str]:
        """Send the text that is held."""
        piece, self._piece = self._piece, None
        if piece is None or not (piece.text or piece.logprobs):
            return
        yield from self._release()
        chunk = self._chunk([self._shape.piece(piece)])
        if self._wanted.draft:
            chunk["mlx_spec"] = {"spans": [_span(span) for span in piece.spans], **(figures or {})}
        yield data(chunk)

    def _release(self) -> Iterator[str]:
        """Send the end of a choice that was not the last one."""
        if self._last is not None:
            yield data(self._last)
            self._last = None

    def _close(self, event: Closed) -> Iterator[str]:
        yield from self._flush()
        timings = {"timings": timings_json(event.timings)}
        if self._last is not None:
            self._last |= {} if self._wanted.usage else timings
        yield from self._release()
        if self._wanted.usage:
            yield data({**self._chunk([]), "usage": usage_json(event.usage), **timings})
        yield DONE

    def _chunk(self, choices: list[Json]) -> Json:
        usage = {"usage": None} if self._wanted.usage else {}
        return {**self._head, "choices": choices, **usage}


def data(content: Json) -> str:
    """An event of a stream."""
    return f"data: {one_line(content)}\n\n"


def usage_json(usage: Usage) -> Json:
    """Tokens of a request, as OpenAI counts them, but that rejected predictions are no output."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens, "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": usage.reasoning_tokens,
            "audio_tokens": 0,
            "accepted_prediction_tokens": usage.accepted_prediction_tokens,
            "rejected_prediction_tokens": usage.rejected_prediction_tokens,
        },
    }


def statistics_json(index: int, statistics: Statistics) -> Json:
    """How a choice goes, while it does: the names are those of `timings`."""
    figures = timings_json(Timings(statistics, None, 0.0, 0.0))
    unknown = ("draft_kind", "queued_ms", "ttft_ms")
    return {"index": index, **{name: value for name, value in figures.items() if name not in unknown}}


def _span(span: Span) -> Json:
    return {"text": span.text, "source": span.source, "position": span.position}
