"""A conversation: its messages, the cache that it reuses, and its answers as they come."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any, Literal, Protocol

from mlx_spec.errors import InvalidValue
from mlx_spec.model.sequence import CachedSequence, SequenceParts
from mlx_spec.sampling import Sampling
from mlx_spec.text import Text
from mlx_spec.text.stream import AnswerStream, Span, TextKind, TextPart
from mlx_spec.types import Reason, Round

GREEDY = Sampling()
MIN_COMPARED_TOKENS = 24  # tokens; the time of fewer is mostly that of single rounds, which vary


class Generating(Protocol):
    """The part of `Pair` that a session needs."""

    text: Text

    def open(self) -> SequenceParts:
        """The parts of a new sequence."""
        ...

    def run(
        self, parts: SequenceParts, prompt_tokens: Sequence[int], *, sampling: Sampling, max_tokens: int
    ) -> Iterator[Round]:
        """Continue a prompt of which `decoding` may already hold a prefix."""
        ...


@dataclass(frozen=True)
class Piece:
    """A piece of an answer, as it lands."""

    text: str  # may be empty: a round of half a character, or of hidden tokens only
    kind: TextKind
    round: Round | None  # the round that brought it, on its last piece; None on the others
    spans: tuple[Span, ...] = ()  # where its tokens came from: their texts make up `text`


@dataclass(frozen=True)
class Positions:
    """Draft tokens of one drafter by their position in a draft."""

    drafted: tuple[int, ...] = ()  # [i]: rounds that drafted more than i tokens
    accepted: tuple[int, ...] = ()  # [i]: rounds that had more than i accepted

    def plus(self, more: Positions) -> Positions:
        """Return the sums by position."""
        return Positions(_sums([self.drafted, more.drafted]), _sums([self.accepted, more.accepted]))


@dataclass(frozen=True)
class Statistics:
    """Counts and times of an answer."""

    prompt_tokens: int = 0
    reused_tokens: int = 0  # of the prompt, found in the cache
    drafter_cold: int = 0  # of those reused: what the drafter never saw, so that it is less often right
    generated_tokens: int = 0
    rounds: int = 0
    speculative_rounds: int = 0  # those that drafted
    speculative_tokens: int = 0  # generated in those
    drafted: int = 0
    accepted: int = 0
    by_drafter: Mapping[int, Positions] = field(default_factory=dict)  # by index of the drafter
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0  # of all rounds, in the engine, not in whoever reads the answer
    compared_tokens: int = 0  # tokens of the rounds for which the time of plain decoding is known
    compared_seconds: float = 0.0  # time of those rounds
    plain_seconds: float = 0.0  # time that plain decoding takes for `compared_tokens`
    finish_reason: Literal["stop", "length"] | None = None  # None: interrupted
    last_reason: Reason = Reason.NO_DRAFTER  # why the last round drafted as many tokens as it did

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens by decode seconds; 0 before there are any."""
        return self.generated_tokens / self.decode_seconds if self.decode_seconds > 0 else 0.0

    @property
    def acceptance_length(self) -> float:
        """Tokens of a speculative round, the recovered or bonus token included; 0 if there was none."""
        return self.speculative_tokens / self.speculative_rounds if self.speculative_rounds else 0.0

    @property
    def gain(self) -> float | None:
        """Return the speed as a multiple of plain decoding; None if too few tokens were compared."""
        if self.compared_tokens < MIN_COMPARED_TOKENS or not self.compared_seconds:
            return None
        return self.plain_seconds / self.compared_seconds

    @property
    def reason(self) -> Reason:
        """Return the reason to show: an answer that gained nothing does not say that speculation pays."""
        gain = self.gain
        if self.last_reason is Reason.PAYS and (gain is None or gain < 1):
            return Reason.LEARNING
        return self.last_reason

    @property
    def drafted_at(self) -> tuple[int, ...]:
        """Return by position the rounds of all drafters that drafted a token there."""
        return _sums([positions.drafted for positions in self.by_drafter.values()])

    @property
    def accepted_at(self) -> tuple[int, ...]:
        """Return by position the rounds of all drafters that had a token accepted there."""
        return _sums([positions.accepted for positions in self.by_drafter.values()])

    @property
    def draft_length(self) -> int:
        """Draft tokens of most speculative rounds; 0 if there were none."""
        longer = (*self.drafted_at[1:], 0)
        exactly = [a - b for a, b in zip(self.drafted_at, longer, strict=False)]
        return exactly.index(max(exactly)) + 1 if exactly else 0

    def plus(self, round: Round, seconds: float) -> Statistics:
        """With one more round, for which the caller waited `seconds`; in the first that is prefill, too."""
        prefill = max(seconds - round.seconds, 0.0) if not self.rounds else 0.0
        plain = round.plain_seconds
        speculative = round.drafted > 0
        return replace(
            self,
            generated_tokens=self.generated_tokens + len(round.tokens),
            rounds=self.rounds + 1,
            speculative_rounds=self.speculative_rounds + speculative,
            speculative_tokens=self.speculative_tokens + len(round.tokens) * speculative,
            drafted=self.drafted + round.drafted,
            accepted=self.accepted + round.accepted,
            by_drafter=self._positions(round),
            prefill_seconds=self.prefill_seconds + prefill,
            decode_seconds=self.decode_seconds + round.seconds,
            compared_tokens=self.compared_tokens + (0 if plain is None else len(round.tokens)),
            compared_seconds=self.compared_seconds + (0.0 if plain is None else round.seconds),
            plain_seconds=self.plain_seconds + (plain or 0.0) * len(round.tokens),
            finish_reason=round.finish_reason,
            last_reason=round.reason,
        )

    def _positions(self, round: Round) -> Mapping[int, Positions]:
        if round.drafter is None:
            return self.by_drafter
        before = self.by_drafter.get(round.drafter, Positions())
        now = Positions((1,) * round.drafted, (1,) * round.accepted)
        return {**self.by_drafter, round.drafter: before.plus(now)}


def added(parts: Sequence[Statistics]) -> Statistics:
    """The figures of several answers together; reasons are those of the last one."""
    if not parts:
        return Statistics()
    by_drafter: dict[int, Positions] = {}
    for part in parts:
        for drafter, positions in part.by_drafter.items():
            by_drafter[drafter] = by_drafter.get(drafter, Positions()).plus(positions)
    return replace(
        parts[-1],
        prompt_tokens=sum(part.prompt_tokens for part in parts),
        reused_tokens=sum(part.reused_tokens for part in parts),
        drafter_cold=sum(part.drafter_cold for part in parts),
        generated_tokens=sum(part.generated_tokens for part in parts),
        rounds=sum(part.rounds for part in parts),
        speculative_rounds=sum(part.speculative_rounds for part in parts),
        speculative_tokens=sum(part.speculative_tokens for part in parts),
        drafted=sum(part.drafted for part in parts),
        accepted=sum(part.accepted for part in parts),
        prefill_seconds=sum(part.prefill_seconds for part in parts),
        decode_seconds=sum(part.decode_seconds for part in parts),
        compared_tokens=sum(part.compared_tokens for part in parts),
        compared_seconds=sum(part.compared_seconds for part in parts),
        plain_seconds=sum(part.plain_seconds for part in parts),
        by_drafter=by_drafter,
    )


def _sums(counts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the sums by position; shorter counts end in zeros."""
    return tuple(sum(position) for position in zip_longest(*counts, fillvalue=0))


class Session:
    """A conversation with a pair. What the target has already read is read again only where it changed."""

    def __init__(self, pair: Generating, system: str | None = None) -> None:
        if not pair.text.chats:
            raise InvalidValue("this target has no chat template: use generate() with a prompt as tokens")
        self._pair = pair
        self._held = CachedSequence(pair.open())
        self._system = system
        self._messages: list[dict[str, Any]] = []
        self._running: Generator[Piece, None, None] | None = None
        self.statistics = Statistics()  # of the last answer

    @property
    def messages(self) -> list[dict[str, Any]]:
        """A copy of the conversation so far; thoughts stand apart, as `reasoning_content`."""
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        return [*system, *(dict(message) for message in self._messages)]

    def clear(self) -> None:
        """Forget the conversation, but not the system prompt."""
        self._stop()
        self._messages.clear()

    def resume(self, turns: Sequence[Mapping[str, Any]]) -> None:
        """Go on from messages of a user and answers, in turns, instead of the conversation so far.

        The system prompt stays. Raises InvalidValue where they are not in turns.
        """
        roles = [turn.get("role") for turn in turns]
        if roles != ["user", "assistant"] * (len(turns) // 2):
            raise InvalidValue("a conversation goes by turns: user and assistant, from the first to the last")
        self._stop()
        self._messages = [dict(turn) for turn in turns]

    def undo(self) -> list[dict[str, Any]]:
        """Forget the last turn. Returns its two messages, none where there was no turn."""
        self._stop()
        turn = self._messages[-2:]
        del self._messages[-2:]
        return turn

    def stream(
        self, message: str, *, sampling: Sampling = GREEDY, max_tokens: int, thinking: bool = False
    ) -> Generator[Piece, None, None]:
        """Answer a message of the user, piece by piece.

        The message and the answer become part of the conversation when the stream ends. When it is closed
        early, the answer counts as far as it came, and without any of it the message is forgotten. An
        answer that is still streaming is closed. Raises InvalidValue or PromptTooLong at once, and then the
        conversation is as before.
        """
        self._stop()
        asked = {"role": "user", "content": message}
        prompt = self._pair.text.prompt([*self.messages, asked], thinking=thinking)
        answer = _Answer(asked, prompt, AnswerStream(self._pair.text, prompt))
        rounds = self._rounds(answer, sampling, max_tokens)
        self._running = self._stream(answer, rounds)
        return self._running

    def _rounds(self, answer: _Answer, sampling: Sampling, max_tokens: int) -> Iterator[Round]:
        """Check the prompt, then rewind to what it shares with the cache."""
        decoding = self._held.parts
        rounds = self._pair.run(decoding, answer.prompt, sampling=sampling, max_tokens=max_tokens)
        kept = self._held.rewind_to_prefix(answer.prompt)
        self.statistics = Statistics(
            prompt_tokens=len(answer.prompt), reused_tokens=kept, drafter_cold=self._held.drafter_missing
        )
        return rounds

    def _stream(self, answer: _Answer, rounds: Iterator[Round]) -> Generator[Piece, None, None]:
        try:
            while True:
                start = time.perf_counter()
                round = next(rounds, None)
                if round is None:
                    break
                self.statistics = self.statistics.plus(round, time.perf_counter() - start)
                self._held.append(round.tokens)
                yield from answer.pieces(round)
            yield from answer.rest()
        finally:
            _close(rounds)
            self._record(answer)

    def _record(self, answer: _Answer) -> None:
        """Make the answer part of the conversation, unless it never began."""
        self._running = None
        if not self.statistics.rounds:
            return
        reply = {"role": "assistant", "content": answer.text("answer")}
        thoughts = answer.text("thinking")
        self._messages += [answer.asked, reply | ({"reasoning_content": thoughts} if thoughts else {})]

    def _stop(self) -> None:
        if self._running is not None:
            self._running.close()
            self._running = None


@dataclass
class _Answer:
    """One answer while it streams."""

    asked: dict[str, Any]
    prompt: list[int]
    reading: AnswerStream
    _texts: dict[TextKind, list[str]] = field(default_factory=lambda: {"answer": [], "thinking": []})

    def pieces(self, round: Round) -> list[Piece]:
        """Return the pieces of a round, at least one. The last one has the round."""
        found = self.reading.read(round) or [TextPart(self.reading.kind, "")]
        last = len(found) - 1
        return [self._piece(part, round if i == last else None) for i, part in enumerate(found)]

    def rest(self) -> list[Piece]:
        """Return the text that was held back."""
        return [self._piece(part, None) for part in self.reading.end()]

    def text(self, kind: TextKind) -> str:
        """All of one kind so far."""
        return "".join(self._texts[kind]).strip()

    def _piece(self, part: TextPart, round: Round | None) -> Piece:
        self._texts[part.kind].append(part.text)
        return Piece(part.text, part.kind, round, part.spans)


def _close(rounds: Iterator[Round]) -> None:
    """Let the engine drop what is on trial."""
    if isinstance(rounds, Generator):
        rounds.close()
