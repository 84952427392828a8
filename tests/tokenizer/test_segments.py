"""The state machine of an answer: no cut of the text changes what it finds, and its states are values."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest
from support.vocabularies import MARKED

from mlx_spec.tokenizer.segments import Segment, Segmenter, SegmentText
from mlx_spec.tokenizer.thinking import as_letters

FRAGMENTS = [*"<think> </think> <answer> </answer> < /think> </thi a b ; 👍".split(), " ", "\n"]
SEGMENTS = [
    Segment("answer", fresh=True),
    Segment("thinking", fresh=True, trim=True),
    Segment("answer"),
    Segment("answer", fresh=True, trim=True, after_call=True),
]


def read(
    segmenter: Segmenter, segment: Segment, texts: Sequence[str]
) -> tuple[list[SegmentText], str | None]:
    """Return the pieces of a whole answer, neighbours of one kind joined, and its stop string."""
    pieces: list[SegmentText] = []
    for text in texts:
        branch = segmenter.read(segment, "</think> a draft that is taken back")
        following, more = segmenter.read(segment, text)
        assert segmenter.read(segment, "</think> a draft that is taken back") == branch
        segment, pieces = following, pieces + more
        if segment.finished is not None:
            return joined(pieces), segment.finished
    segment, more = segmenter.end(segment)
    return joined(pieces + more), segment.finished


def joined(pieces: Sequence[SegmentText]) -> list[SegmentText]:
    whole: list[SegmentText] = []
    for kind, text in pieces:
        if whole and text and whole[-1][0] == kind:
            whole[-1] = kind, whole[-1][1] + text
        elif text:
            whole.append((kind, text))
    return whole


def as_bytes(text: str) -> str:
    return as_letters(text.encode())


def cuts(text: str, draw: random.Random) -> list[str]:
    ends = sorted({0, len(text), *(draw.randint(0, len(text)) for _ in range(draw.randint(0, 8)))})
    return [text[start:end] for start, end in pairwise(ends)]


@pytest.mark.parametrize("stop", [(), ("ab", "b\na", ">"), ("\n",)])
def test_no_cut_changes_the_pieces(stop: tuple[str, ...]) -> None:
    segmenter = Segmenter(MARKED["text-answer"].marks, separator="; <", stop=stop)
    kinds, finished = set(), 0
    for seed in range(300):
        draw = random.Random(seed)
        text, segment = "".join(draw.choices(FRAGMENTS, k=draw.randint(0, 12))), draw.choice(SEGMENTS)
        whole = read(segmenter, segment, [text])
        assert read(segmenter, segment, cuts(text, draw)) == read(segmenter, segment, [*text]) == whole, text
        pieces, string = whole
        written = "".join(piece for _, piece in pieces)
        assert text == written if string is None else text.startswith(written + string), text
        kinds |= {kind for kind, _ in pieces}
        finished += string is not None
    assert kinds == {None, "answer", "thinking"} and (10 < finished < 290 if stop else not finished)


def test_a_grammar_finds_the_answer_where_the_stream_does() -> None:
    """One reads bytes, the other the text."""
    marks = MARKED["text-answer"].marks
    segmenter, by_bytes = Segmenter(marks), Segmenter(marks, spell=as_bytes)
    for seed in range(300):
        draw = random.Random(seed)
        text, segment = "".join(draw.choices(FRAGMENTS, k=10)), draw.choice(SEGMENTS)
        pieces, _ = read(segmenter, segment, [text])
        found, _ = read(by_bytes, segment, cuts(as_bytes(text), draw))
        assert [(kind, piece.encode("latin-1").decode()) for kind, piece in found] == pieces
