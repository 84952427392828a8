"""Answers that match a JSON schema, a regular expression or a grammar, by llguidance.

Grammars are compiled to parsers over bytes, and a token may come next if its bytes may. llguidance
(github.com/guidance-ai/llguidance) is imported when something is compiled.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from itertools import pairwise
from typing import TYPE_CHECKING, Literal
from weakref import WeakKeyDictionary

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from mlx_spec.errors import InvalidValue, SpecError
from mlx_spec.hub.files import one_line
from mlx_spec.rehearsal import REHEARSAL
from mlx_spec.text import Text

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Kind = Literal["json_object", "json_schema", "regex", "lark"]
Place = Literal["start", "thoughts", "answer", "end", "astray"]
Words = NDArray[np.uint32]  # [W] or [T, W]: bit i % 32 of word i // 32 is token i

JSON_OBJECT = '{"type": "object"}'
# One way to write each value: only then there are tokens that must follow. Keywords are not ignored.
JSON = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "lenient": False}
LARGEST = 100_000  # characters of a source


@dataclass(frozen=True)
class Vocabulary:
    """Tokens as the parser knows them, and those that have a meaning of their own."""

    tokenizer: LLTokenizer
    small: tuple[str, int]  # a tokenizer of bytes with the same special tokens, serialized, and its size
    size: int  # rows of the logits, padding included
    ends: frozenset[int]
    opening: int | None  # begins thoughts; None: the model has no marks for them
    closing: int | None

    @cached_property
    def everything(self) -> Words:
        """All tokens."""
        return words(range(self.size), self.size)

    @cached_property
    def ended(self) -> Words:
        """The ends."""
        return words(self.ends, self.size)

    @cached_property
    def unended(self) -> Words:
        """All but the ends."""
        return self.everything & ~self.ended


@dataclass(frozen=True, eq=False)
class Grammar:
    """What answers must look like. Thoughts before the answer are free.

    With `thinks` the model may begin by opening its thoughts; they are also open where a prompt opens them.
    """

    text: Text
    vocabulary: Vocabulary
    start: LLMatcher  # a parser that has read nothing
    thinks: bool = False

    def thinking(self, thinks: bool) -> Grammar:
        """The same for answers that may, or may not, begin with thoughts."""
        return replace(self, thinks=thinks)

    def matcher(self, prompt: Sequence[int]) -> AnswerMatcher:
        """A matcher of the answer to `prompt`."""
        thinking = self.text.marks is not None and self.text.reader(prompt).kind == "thinking"
        place: Place = "thoughts" if thinking else "start" if self.thinks else "answer"
        return AnswerMatcher(self.vocabulary, self.start, place)


class AnswerMatcher:
    """Follows one answer; see `constraint.Matcher`.

    Tokens are entered to look behind them and taken back. `_places[i]` is where the answer stands after i
    tokens: "astray" behind one that may not stand there, which the parser never reads. A parser that gives up
    is lost; where only draft tokens made it, another one takes its place.
    """

    def __init__(self, vocabulary: Vocabulary, start: LLMatcher, place: Place) -> None:
        self._vocabulary = vocabulary
        self._start = start
        self._parser = start.deep_copy()
        self._tokens: list[int] = []
        self._places: list[Place] = [place]
        self._parsed = [0]  # how many of the first i tokens the parser has read

    def allowed(self, generated: Sequence[int], drafted: Sequence[int], rows: int) -> mx.array:
        """What may stand in each of T rows, bool [T, V]. Raises InvalidValue where the parser gives up."""
        self._read(generated)
        masks: list[Words] = []
        for i in range(len(drafted) + 1):
            if i > len(drafted) - rows:
                masks.append(self._row())
            if i < len(drafted):
                self._enter(drafted[i])
        self._back_to(len(generated))
        return _unpacked(mx.array(np.stack(masks)), self._vocabulary.size)

    def legal(self, generated: Sequence[int], drafted: Sequence[int]) -> int:
        """How many of the draft tokens may follow."""
        self._read(generated)
        for token in drafted:
            self._enter(token)
        places = self._places[len(generated) + 1 :]
        self._back_to(len(generated))
        return next((i for i, place in enumerate(places) if place == "astray"), len(places))

    def forced(self, generated: Sequence[int]) -> list[int]:
        """The tokens that must follow, as far as that is known."""
        self._read(generated)
        return self._parser.compute_ff_tokens() if self._places[-1] == "answer" else []

    def _read(self, generated: Sequence[int]) -> None:
        """Follow the tokens that count."""
        tokens = list(generated)
        kept = _common_prefix(self._tokens, tokens)
        self._back_to(kept)
        for token in tokens[kept:]:
            self._enter(token)
        if self._places[-1] == "answer":
            self._parser.compute_bitmask()  # kept by the parser
        if self._parser.is_error():
            raise InvalidValue(f"the grammar cannot be followed: {_one_line(self._parser.get_error())}")
        if self._places[-1] == "astray":
            raise InvalidValue("the answer so far does not match the grammar: give both from the beginning")

    def _enter(self, token: int) -> None:
        place = self._next(token)
        self._tokens.append(token)
        self._places.append(place)

    def _next(self, token: int) -> Place:
        """Where the answer stands behind `token`. Lets the parser read it if it may."""
        place, vocabulary = self._places[-1], self._vocabulary
        self._parsed.append(self._parsed[-1])
        if place in ("end", "astray"):
            return "astray"
        if place == "thoughts":
            closes = token == vocabulary.closing
            return "astray" if token in vocabulary.ends else "answer" if closes else "thoughts"
        if place == "start" and token == vocabulary.opening:
            return "thoughts"
        if token in vocabulary.ends:
            return "end" if self._parser.is_accepting() else "astray"
        if self._parser.is_stopped() or self._parser.try_consume_tokens([token]) == 0:
            return "astray"
        self._parsed[-1] += 1
        return "answer"

    def _back_to(self, count: int) -> None:
        """Forget all but the first tokens."""
        surplus = self._parsed[-1] - self._parsed[count]
        if self._parser.is_error():
            steps = zip(self._tokens[:count], pairwise(self._parsed), strict=False)
            self._parser = self._start.deep_copy()
            self._parser.try_consume_tokens([token for token, (before, after) in steps if after > before])
        elif surplus:
            self._parser.rollback(surplus)
        del self._tokens[count:], self._places[count + 1 :], self._parsed[count + 1 :]

    def _row(self) -> Words:
        """What may come next."""
        place, parser, vocabulary = self._places[-1], self._parser, self._vocabulary
        if place == "thoughts":
            return vocabulary.unended
        if place == "end":
            return vocabulary.ended
        if place == "astray" or parser.is_error():
            return vocabulary.everything
        if parser.is_stopped():
            return vocabulary.ended
        row = np.frombuffer(parser.compute_bitmask(), np.uint32)[: len(vocabulary.ended)]
        if parser.is_error():
            return vocabulary.everything
        row = row & vocabulary.unended
        if parser.is_accepting():
            row = row | vocabulary.ended
        if place == "start" and vocabulary.opening is not None:
            row = row | words([vocabulary.opening], vocabulary.size)
        return row


def compile(
    kind: Kind, source: str, text: Text, vocab_size: int, *, seconds: float, thinks: bool = False
) -> Grammar:
    """The grammar of answers that match `source`: a JSON schema as JSON, a regular expression or Lark.

    Of "json_object" the source does not matter. JSON is written on one line, ", " and ": " between its parts.
    `vocab_size` is that of the logits. Raises InvalidValue where llguidance does not support the source or
    took more than `seconds`, with its reason, and SpecError where it is not installed.
    """
    if find_spec("llguidance") is None:
        raise SpecError("structured output needs llguidance, which is not installed: pip install llguidance")
    if kind != "json_object" and len(source) > LARGEST:
        raise InvalidValue(
            f"the grammar has {len(source)} characters, the most are {LARGEST}: make it smaller"
        )
    from mlx_spec.compiling import parser

    vocabulary = _vocabulary(text, vocab_size)
    name = {"regex": "regular expression", "lark": "Lark grammar"}.get(kind, "JSON schema")
    source = JSON_OBJECT if kind == "json_object" else source
    request = {"kind": kind, "source": source, "tokenizer": vocabulary.small, "options": JSON}
    REHEARSAL.compile(name, request, seconds)
    try:
        start = parser(kind, source, vocabulary.tokenizer, JSON)
    except ValueError as error:
        raise InvalidValue(f"the {name} cannot be used: {one_line(error)}") from error
    if start.is_error():
        raise InvalidValue(f"the {name} cannot be used: {_one_line(start.get_error())}")
    return Grammar(text, vocabulary, start, thinks)


_vocabularies: WeakKeyDictionary[Text, dict[int, Vocabulary]] = WeakKeyDictionary()
_lock = threading.Lock()


def _vocabulary(text: Text, size: int) -> Vocabulary:
    """The tokens of `text`, made once: that takes half a second where there are many."""
    from llguidance import LLTokenizer

    with _lock:
        known = _vocabularies.setdefault(text, {})
        if size not in known:
            ends = sorted(text.eos)
            if not ends:
                raise InvalidValue("this target has no end-of-text token: an answer could not end")
            serialized = text.serialized()
            tokenizer = LLTokenizer(serialized, n_vocab=size, eos_token=ends)
            marks = (text.marks.open, text.marks.close) if text.marks else ()
            opening, closing = [text.token_id(mark) for mark in marks] or [None, None]
            known[size] = Vocabulary(tokenizer, _small(serialized, size), size, text.eos, opening, closing)
        return known[size]


def _small(serialized: str, size: int) -> tuple[str, int]:
    """A tokenizer with a token for every byte and the special tokens of another, and room for `size`."""
    special = [token["content"] for token in json.loads(serialized)["added_tokens"] if token["special"]]
    letters = pre_tokenizers.ByteLevel.alphabet()
    vocabulary = {token: i for i, token in enumerate([*sorted(letters), *special])}
    small = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    small.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    small.decoder = decoders.ByteLevel()
    small.add_special_tokens([AddedToken(name, special=True) for name in special])
    return small.to_str(), max(size, len(vocabulary))


def words(tokens: Sequence[int] | frozenset[int], size: int) -> Words:
    """Tokens as bits, [W]."""
    bits = np.zeros(-(-size // 32) * 32, dtype=np.uint8)
    bits[list(tokens)] = 1
    return np.packbits(bits, bitorder="little").view(np.uint32)


@mx.compile
def _bits(packed: mx.array) -> mx.array:
    """Words [T, W] to bool [T, 32 W]."""
    return ((packed[..., None] >> mx.arange(32, dtype=mx.uint32)) & 1).astype(mx.bool_).flatten(1)


def _unpacked(packed: mx.array, size: int) -> mx.array:
    """Words [T, W] to bool [T, V]."""
    return _bits(packed)[:, :size]


def _one_line(message: str) -> str:
    return one_line(ValueError(message))


def _common_prefix(a: list[int], b: list[int]) -> int:
    length = min(len(a), len(b))
    if a[:length] == b[:length]:
        return length
    return next(i for i in range(length) if a[i] != b[i])
