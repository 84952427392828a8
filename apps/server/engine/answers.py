"""The events that answer a request, and what the writers of all protocols need to write them as JSON."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

from mlx_spec.decode.statistics import Statistics
from mlx_spec.tokenizer.stream import TokenText
from mlx_spec.types import TokenLogprob

from ..errors import Failure

FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True)
class PromptRead:
    """The prompt has been processed. Sent once for each prompt."""

    prompt_tokens: int
    cached_tokens: int  # of the prompt, found in a cache


@dataclass(frozen=True)
class PromptProgress:
    """A part of the prompt has been read. Sent only to requests with `progress`, before `PromptRead`."""

    prompt_tokens: int
    cached_tokens: int
    read_tokens: int  # cached ones included
    seconds: float = 0.0  # of reading


@dataclass(frozen=True)
class TextDelta:
    """More text of a choice."""

    index: int
    kind: Literal["answer", "thinking"]
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()  # of the tokens that end in this text, if requested
    spans: tuple[TokenText, ...] = ()  # their texts make up `text`


@dataclass(frozen=True)
class ToolCall:
    """A complete tool call."""

    index: int
    call: int  # 0, 1, ... within the choice
    id: str
    name: str
    arguments: str  # JSON text of an object; may be empty


@dataclass(frozen=True)
class RoundDone:
    """A choice has completed a round."""

    index: int
    statistics: Statistics  # of the choice so far


@dataclass(frozen=True)
class ChoiceEnded:
    """A choice is complete."""

    index: int
    reason: FinishReason
    stop: str | None = None  # the stop string that ended it


@dataclass(frozen=True)
class Usage:
    """Tokens of the whole request."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int  # including the token that completes a stop string
    reasoning_tokens: int
    accepted_prediction_tokens: int = 0  # of the client's prediction, in the answer
    rejected_prediction_tokens: int = 0  # of the client's prediction, not in the answer
    image_tokens: int = 0  # of the prompt: rows of pictures
    reread_tokens: int = 0  # of the prompt, known before and read again
    reread_words: str | None = None  # why


@dataclass(frozen=True)
class Timings:
    """Measurements of a request, summed over its choices."""

    statistics: Statistics
    draft_kind: str | None  # names of the drafters that drafted, joined by "+"; None if none did
    queued_seconds: float
    first_token_seconds: float  # since admission
    longest_pause_seconds: float = 0.0  # between two rounds of a choice


@dataclass(frozen=True)
class Racer:
    """One of the two answers of a race, after a turn."""

    name: str
    text: str  # new since the last turn
    tokens: int  # so far
    tokens_per_second: float | None


@dataclass(frozen=True)
class RaceTurn:
    """An answer of a race has taken a turn."""

    racers: tuple[Racer, Racer]  # with drafts, and plain
    multiple: tuple[float, float, float] | None  # of plain speed: median between the ends of its interval
    turns: int  # pairs of turns behind `multiple`
    difference: int | None  # index of the first token that differs
    verdict: tuple[str, ...] = ()  # for people, once both have ended


@dataclass(frozen=True)
class Finished:
    """The request is answered. The last event."""

    usage: Usage
    timings: Timings


@dataclass(frozen=True)
class Failed:
    """The request failed. The last event."""

    failure: Failure


Event = (
    PromptProgress
    | PromptRead
    | TextDelta
    | ToolCall
    | RoundDone
    | ChoiceEnded
    | RaceTurn
    | Finished
    | Failed
)
LAST_EVENTS: frozenset[type[Event]] = frozenset({Finished, Failed})
STEP_EVENTS: frozenset[type[Event]] = LAST_EVENTS | {
    PromptProgress,
    PromptRead,
    RoundDone,
    ChoiceEnded,
    RaceTurn,
}


@dataclass
class ChoiceContent:
    """The content of some events of one choice: of a chunk, or of the whole answer."""

    index: int
    deltas: list[TextDelta] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    end: ChoiceEnded | None = None

    def text(self, kind: Literal["answer", "thinking"] = "answer") -> str:
        """Return the text of one kind."""
        return "".join(delta.text for delta in self.deltas if delta.kind == kind)

    def logprobs(self) -> list[TokenLogprob]:
        """Return the logprobs of the answer, without thinking."""
        return [token for delta in self.deltas if delta.kind == "answer" for token in delta.logprobs]


def choices(events: Iterable[Event]) -> list[ChoiceContent]:
    """Return the content of events, by choice."""
    by_index: dict[int, ChoiceContent] = {}
    for event in events:
        match event:
            case TextDelta(index=i):
                by_index.setdefault(i, ChoiceContent(i)).deltas.append(event)
            case ToolCall(index=i):
                by_index.setdefault(i, ChoiceContent(i)).calls.append(event)
            case ChoiceEnded(index=i):
                by_index.setdefault(i, ChoiceContent(i)).end = event
    return [by_index[i] for i in sorted(by_index)]


# --- as blocks


class BlockWriter(ABC):
    """Writes an answer as a list of blocks; at most the last one is open.

    A protocol overrides the abstract methods, which make its blocks and yield its stream events.
    """

    def __init__(self) -> None:
        self.body: dict[str, Any] = {}  # of a response without a stream; it grows with the events
        self.blocks: list[dict[str, Any]] = []
        self._open: Literal["answer", "thinking"] | None = None  # kind of the last block while it is open

    @abstractmethod
    def new_block(self, begins: TextDelta | ToolCall) -> dict[str, Any]:
        """Return a new block for an event, without its text or arguments."""

    @abstractmethod
    def started(self, block: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the protocol's events for the start of a block."""

    @abstractmethod
    def grown(self, block: dict[str, Any], more: TextDelta | ToolCall) -> Iterator[dict[str, Any]]:
        """Add text or the arguments of a call to the block. Yield the protocol's events."""

    @abstractmethod
    def ended(self, block: dict[str, Any], *, is_cut: bool) -> Iterator[dict[str, Any]]:
        """Yield the protocol's events for the end of a block; `is_cut` if the answer ended within it."""

    @abstractmethod
    def read(self, event: Event | None) -> Iterator[dict[str, Any]]:
        """Yield the protocol's events for one of ours, or for silence."""

    def whole(self, events: list[Event]) -> dict[str, Any]:
        """Return the body of a response without a stream."""
        for event in events:
            for _ in self.read(event):
                pass
        return self.body

    def write(self, event: TextDelta | ToolCall) -> Iterator[dict[str, Any]]:
        """Add text to the open block of the same kind, or to a new block. A call is a whole block."""
        kind = event.kind if isinstance(event, TextDelta) else None
        if kind is None or kind != self._open:
            yield from self.close()
            self.blocks.append(self.new_block(event))
            yield from self.started(self.blocks[-1])
        yield from self.grown(self.blocks[-1], event)
        self._open = kind
        if kind is None:
            yield from self.ended(self.blocks[-1], is_cut=False)

    def close(self, *, is_cut: bool = False) -> Iterator[dict[str, Any]]:
        if self._open is not None:
            self._open = None
            yield from self.ended(self.blocks[-1], is_cut=is_cut)


# --- as JSON


def reread_json(usage: Usage) -> dict[str, Any]:
    """Return the fields of a usage that say what was read again, and why; {} if nothing was."""
    fields = {"reread_tokens": usage.reread_tokens, "reread_reason": usage.reread_words}
    return fields if usage.reread_tokens else {}


def progress_json(event: PromptProgress) -> dict[str, Any]:
    """Return how much of a prompt is read, in the field of llama.cpp's server."""
    return {
        "prompt_progress": {
            "total": event.prompt_tokens,
            "cache": event.cached_tokens,
            "processed": event.read_tokens,
            "time_ms": _milliseconds(event.seconds),
        }
    }


def notes_json(notes: Sequence[str]) -> dict[str, Any]:
    """Return the field of an answer that lists the parameters without effect; {} without notes."""
    return {"mlx_spec": {"notes": list(notes)}} if notes else {}


def timings_json(timings: Timings) -> dict[str, Any]:
    """Return the `timings` of a response, named as in llama.cpp's server where it has them.

    `drafted_at[i]` rounds drafted more than i tokens; `accepted_at[i]` rounds accepted more than i. Rates and
    `gain` are None if they are not known. `reason` says why most tokens were drafted or not. `batch_n`
    sequences shared a pass on average; `gain` compares with plain decoding in a batch of the same size.
    """
    return {
        "draft_kind": timings.draft_kind,
        **measurements(timings.statistics),
        "queued_ms": _milliseconds(timings.queued_seconds),
        "ttft_ms": _milliseconds(timings.first_token_seconds),
        "longest_pause_ms": _milliseconds(timings.longest_pause_seconds),
    }


def measurements(statistics: Statistics) -> dict[str, Any]:
    """Return the part of `timings` that is known while an answer goes on: all figures, some by two names."""
    figures = statistics.as_dict()
    aliases = {  # Clients of llama.cpp's server read figures by these names.
        "draft_rounds": "speculative_rounds",
        "draft_n": "drafted",
        "draft_n_accepted": "accepted",
        "cache_n": "reused_tokens",
        "drafter_cold_n": "drafter_cold",
        "predicted_n": "generated_tokens",
    }
    return {
        **figures,
        **{alias: figures[name] for alias, name in aliases.items()},
        "prompt_n": statistics.prompt_tokens - statistics.reused_tokens,
        "prompt_ms": _milliseconds(statistics.prefill_seconds),
        "predicted_ms": _milliseconds(statistics.decode_seconds),
        "predicted_per_second": statistics.tokens_per_second or None,
        "batch_n": round(statistics.batch_size, 3),
    }


def statistics_json(event: RoundDone) -> dict[str, Any]:
    """Return the measurements of a choice so far, under the names of `timings`."""
    return {"index": event.index, **measurements(event.statistics)}


def logprob_json(token: TokenLogprob) -> dict[str, Any]:
    """Return a token, its logprob and its bytes, and the same of its likeliest alternatives."""
    return {**_token_json(token), "top_logprobs": [_token_json(other) for other in token.top]}


def finite(logprob: float) -> float:
    """Return a logprob as a finite number, which JSON can express."""
    min_logprob = -9999.0  # stands for minus infinity, which JSON does not have; OpenAI's own value
    return logprob if math.isfinite(logprob) else min_logprob


def timestamp(seconds: float) -> str:
    """Return seconds since 1970 in the form of RFC 3339; later times than dates can hold as the last date."""
    last = datetime.max.replace(tzinfo=UTC)
    when = last if seconds >= last.timestamp() else datetime.fromtimestamp(seconds, UTC)
    return when.isoformat().replace("+00:00", "Z")


def _token_json(token: TokenLogprob) -> dict[str, Any]:
    text = token.token_bytes.decode("utf-8", "replace")
    return {"token": text, "logprob": finite(token.logprob), "bytes": list(token.token_bytes)}


def _milliseconds(seconds: float) -> float:
    return round(seconds * 1000, 3)
