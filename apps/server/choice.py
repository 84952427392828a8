"""One choice of an answer: from the rounds that made it to events."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from mlx_spec.apps.server.ask import Ended, Event, FinishReason, Piece, RoundDone, Span
from mlx_spec.apps.server.tool_formats import ToolCallReader
from mlx_spec.session import Statistics
from mlx_spec.text.stream import AnswerStream, TextPart
from mlx_spec.types import Round


class Choice:
    """Turns rounds into events. Nothing depends on where rounds end, but where pieces of text do."""

    def __init__(
        self,
        index: int,
        answer: AnswerStream,
        calls: Calls | None,
        names: Sequence[str],
        statistics: Statistics,
    ) -> None:
        self._index = index
        self._answer = answer
        self._calls = calls
        self._names = names  # of drafters, by the index that rounds name
        self._tokens: list[int] = []
        self.statistics = statistics  # so far
        self.drafted: dict[str, None] = {}  # names of the drafters that drafted, in that order

    @property
    def tokens(self) -> list[int]:
        """What was emitted, up to and with the token that completed a stop string."""
        return self._tokens[: self._answer.completion_tokens]

    @property
    def reasoning_tokens(self) -> int:
        """How many of them are thoughts."""
        return self._answer.reasoning_tokens

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string ended it, whatever the model goes on with."""
        return self._answer.finished is not None

    def read(self, round: Round, seconds: float) -> Iterator[Event]:
        """What a round brought, for which the engine took `seconds`."""
        self._tokens += round.tokens
        self.statistics = self.statistics.plus(round, seconds)
        if round.drafter is not None and round.drafted:
            self.drafted[self._names[round.drafter]] = None
        yield from self._events(self._answer.read(round, round.logprobs))
        yield RoundDone(self._index, self.statistics)

    def end(self) -> Iterator[Event]:
        """What was held back, and how it ended."""
        yield from self._events(self._answer.end())
        if self._calls is not None:
            yield from self._calls.end()
        yield Ended(self._index, self._reason(), self._answer.finished)

    def _events(self, parts: Iterable[TextPart]) -> Iterator[Event]:
        for part in parts:
            if part.kind != "call":
                spans = tuple(Span(s.text, self._name(s.drafter), s.position) for s in part.spans)
                yield Piece(self._index, part.kind, part.text, part.logprobs, spans)
            elif self._calls is not None:
                yield from self._calls.read(part)

    def _name(self, drafter: int | None) -> str | None:
        return None if drafter is None else self._names[drafter]

    def _reason(self) -> FinishReason:
        if self.is_stopped:
            return "stop"
        if self.statistics.finish_reason != "stop":
            return "length"
        return "tool_calls" if self._calls is not None and self._calls.complete else "stop"
