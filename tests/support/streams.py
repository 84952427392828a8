"""Answers read as streams of text: their tokens in rounds, and their pieces joined again."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from mlx_spec.tokenizer import Tokenizer
from mlx_spec.tokenizer.stream import AnswerStream, TextPart
from mlx_spec.types import Round, TokenLogprob


def round_of(tokens: Sequence[int], accepted: int = 0, source: str | None = None) -> Round:
    return Round(list(tokens), accepted, accepted, "draft", source=source)


def logprobs_of(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[TokenLogprob]:
    """Return one for each token, told apart by its value."""
    return [TokenLogprob(t, tokenizer.token_bytes(t), -i / 8) for i, t in enumerate(tokens)]


def said(tokenizer: Tokenizer, source: str, prompt: str | None = "", **options: Any) -> list[tuple[str, str]]:
    """Return the kinds and the texts of the answer `source`."""
    begun = None if prompt is None else tokenizer.encode(prompt)
    return texts(streamed(AnswerStream(tokenizer, begun, **options), tokenizer, tokenizer.encode(source)))


def grouped(tokens: Sequence[int], draw: random.Random | None) -> list[Round]:
    """Group tokens in rounds of random lengths, drafted and plain; without `draw`, one by one."""
    rounds, rest = [], list(tokens)
    while rest:
        size = 1 if draw is None else min(draw.randint(1, 6), len(rest))
        accepted = size - 1 if draw is None or draw.random() < 0.8 else size
        rounds.append(round_of(rest[:size], accepted, draw and draw.randint(0, 1)))
        rest = rest[size:]
    return rounds


def streamed(
    answer: AnswerStream, tokenizer: Tokenizer, tokens: Sequence[int], draw: random.Random | None = None
) -> list[TextPart]:
    parts, given, logprobs = [], 0, logprobs_of(tokenizer, tokens)
    for round in grouped(tokens, draw):
        parts += answer.read(round, logprobs[given : given + len(round.tokens)])
        given += len(round.tokens)
    return parts + answer.end()


Joined = tuple[str, int | None, str, tuple[TokenLogprob, ...], bool]


def joined(parts: Sequence[TextPart]) -> list[Joined]:
    """Join neighbours of one kind and call: kind, call, text, logprobs, closed."""
    found: list[Joined] = []
    for part in parts:
        assert "".join(span.text for span in part.spans) == part.text
        assert part.text or part.kind == "call"
        if found and found[-1][:2] == (part.kind, part.call):
            kind, call, text, logprobs, _ = found.pop()
            found.append((kind, call, text + part.text, logprobs + part.logprobs, part.closed))
        else:
            found.append((part.kind, part.call, part.text, part.logprobs, part.closed))
    return found


def texts(parts: Sequence[TextPart]) -> list[tuple[str, str]]:
    return [(kind, text) for kind, _, text, _, _ in joined(parts)]
