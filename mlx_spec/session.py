"""A conversation of answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

from mlx_spec.decode.answer import Answer
from mlx_spec.decode.loop import decode
from mlx_spec.decode.running import RunningSequence
from mlx_spec.decode.sequence import CachedSequence
from mlx_spec.decode.statistics import Positions as Positions  # programs read both from here
from mlx_spec.decode.statistics import Statistics as Statistics
from mlx_spec.errors import InvalidValue, NoVision
from mlx_spec.sampling import GREEDY, Sampling
from mlx_spec.tokenizer import Tokenizer
from mlx_spec.tokenizer.segments import TextKind
from mlx_spec.tokenizer.stream import AnswerStream, TextPart, TokenText
from mlx_spec.types import DraftLengthPolicy, Round
from mlx_spec.vision.conversation import NO_VISION, Part, conversation_prompt, prepared
from mlx_spec.vision.vision import Vision


@dataclass(frozen=True)
class Piece:
    """A piece of an answer, as it streams."""

    text: str  # may be empty: a round of half a character, or of hidden tokens only
    kind: TextKind
    round: Round | None  # on the last piece of each round; None on the others
    spans: tuple[TokenText, ...] = ()  # where its tokens came from: their texts make up `text`


class Session:
    """A conversation. Its cache is reused: only tokens after the first change are read again.

    Made by `Pair.session`. `prepare` is `Pair.prepare`, `vision` is the pair's. `sequence` belongs to this
    conversation alone.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        sequence: CachedSequence,
        prepare: Callable[..., RunningSequence],
        system: str | None = None,
        vision: Vision | NoVision = NO_VISION,
    ) -> None:
        if not tokenizer.chats:
            raise InvalidValue("this target has no chat template: use generate() with a prompt as tokens")
        if not isinstance(system, str | None):
            raise InvalidValue(f"the system prompt is {system!r}, it must be a text, or None")
        self._tokenizer = tokenizer
        self._sequence = sequence
        self._prepare = prepare
        self._vision = vision
        self._system = system
        self._messages: list[dict[str, Any]] = []
        self._answer: Answer | None = None  # the last one
        self._running: Generator[Piece, None, None] | None = None

    @property
    def statistics(self) -> Statistics:
        """Return the statistics of the last answer."""
        return Statistics() if self._answer is None else self._answer.statistics

    @property
    def messages(self) -> list[dict[str, Any]]:
        """Return a copy of the conversation so far. Thinking is under the key `reasoning_content`."""
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        return [*system, *(dict(message) for message in self._messages)]

    def clear(self) -> None:
        """Forget the conversation, but not the system prompt."""
        self._stop()
        self._messages.clear()

    def change_policy(self, policy: DraftLengthPolicy) -> None:
        """Use another policy from the next answer on; the caches stay."""
        self._stop()
        self._sequence.policy = policy

    def resume(self, turns: Sequence[Mapping[str, Any]]) -> None:
        """Replace the conversation by these turns: a message of the user and an answer each.

        The system prompt stays. Raises InvalidValue if users and answers do not take turns.
        """
        roles = [turn.get("role") for turn in turns]
        if roles != ["user", "assistant"] * (len(turns) // 2):
            raise InvalidValue("a conversation goes by turns: user and assistant, from the first to the last")
        self._stop()
        self._messages = [dict(turn) for turn in turns]

    def undo(self) -> list[dict[str, Any]]:
        """Forget the last turn. Return its two messages; empty if there was no turn."""
        self._stop()
        turn = self._messages[-2:]
        del self._messages[-2:]
        return turn

    def stream(
        self,
        message: str | Sequence[Part],
        *,
        sampling: Sampling = GREEDY,
        max_tokens: int,
        thinking: bool = False,
    ) -> Generator[Piece, None, None]:
        """Answer a message of the user, piece by piece.

        The message is a text or a list of parts: {"type": "text", "text": ...} and {"type": "image", "image":
        bytes of a file}. It joins the conversation with the answer when the stream ends. If the stream is
        closed early, the conversation keeps the begun answer; without a round it forgets the message. An
        earlier stream is closed first. Raises InvalidValue or PromptTooLong at once; then the conversation
        stays as it was.
        """
        self._stop()
        content = message if isinstance(message, str) else prepared(message, self._vision)
        question = {"role": "user", "content": content}
        messages = [*self.messages, question]
        prompt = conversation_prompt(messages, self._tokenizer, self._vision, thinking=thinking)
        running = self._prepare(self._sequence, prompt, sampling=sampling, max_tokens=max_tokens)
        self._answer = Answer(self._sequence, running, AnswerStream(self._tokenizer, prompt))
        self._running = self._stream(question, self._answer)
        return self._running

    def _stream(self, question: dict[str, Any], answer: Answer) -> Generator[Piece, None, None]:
        texts = {"answer": "", "thinking": ""}
        try:
            with closing(_pieces(answer)) as pieces:
                for piece in pieces:
                    texts[piece.kind] += piece.text
                    yield piece
        finally:
            self._running = None
            if answer.statistics.rounds:  # else the answer never began
                thinking = texts["thinking"].strip()
                reply = {"role": "assistant", "content": texts["answer"].strip()}
                self._messages += [question, reply | ({"reasoning_content": thinking} if thinking else {})]

    def _stop(self) -> None:
        if self._running is not None:
            self._running.close()
            self._running = None


def _pieces(answer: Answer) -> Generator[Piece, None, None]:
    """Yield the text of an answer. Each round has at least one piece."""
    with closing(answer), closing(decode(answer.running)) as rounds:
        start = time.perf_counter()
        for round in rounds:
            *parts, last = answer.add(round, time.perf_counter() - start) or [
                TextPart(answer.stream.kind, "")
            ]
            yield from map(_piece, parts)
            yield replace(_piece(last), round=round)
            if answer.is_complete:
                break
            start = time.perf_counter()
    yield from map(_piece, answer.stream.end())


def _piece(part: TextPart) -> Piece:
    return Piece(part.text, part.kind, None, part.spans)
