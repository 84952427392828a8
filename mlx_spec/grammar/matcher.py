"""Answers that match a JSON schema, a regular expression or a Lark grammar, by llguidance.

llguidance (github.com/guidance-ai/llguidance) compiles grammars to parsers over bytes: a token may come next
if its bytes may. It is imported when a grammar is compiled.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from importlib.util import find_spec
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, cast
from weakref import WeakKeyDictionary

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from mlx_spec.checkpoint.files import one_line
from mlx_spec.errors import InvalidValue, SpecError
from mlx_spec.grammar.json_schema import enforced
from mlx_spec.grammar.sandbox import SANDBOX, build_parser
from mlx_spec.tokenizer import Tokenizer, common_prefix
from mlx_spec.tokenizer.segments import Segment, Segmenter
from mlx_spec.tokenizer.thinking import as_letters

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

GrammarKind = Literal["json_object", "json_schema", "regex", "lark"]
State = Literal["start", "thinking", "free", "answer", "end", "invalid"]
TokenBits = NDArray[np.uint32]  # [W] or [T, W]: bit i % 32 of word i // 32 is token i


@dataclass
class GrammarVocabulary:
    """The tokens of a target in the forms that the parser and the sandbox need."""

    tokenizer: LLTokenizer
    sandbox_tokenizer: tuple[str, int]  # serialized, and its size
    size: int  # rows of the logits, padding included
    ends: frozenset[int]

    def __post_init__(self) -> None:
        self.all_tokens = token_bits(range(self.size), self.size)
        self.end_tokens = token_bits(self.ends, self.size)
        self.other_tokens = self.all_tokens & ~self.end_tokens


@dataclass(frozen=True, eq=False)
class Grammar:
    """The grammar of answers. The thinking before an answer is free.

    With `thinks` the model may begin with its thinking. A prompt may also open it.
    """

    tokenizer: Tokenizer
    vocabulary: GrammarVocabulary
    start: LLMatcher  # a parser that has read nothing
    thinks: bool = False
    whole: bool = False  # True if the grammar covers the thinking, too
    # Tokens that open and close a call (None if no token closes it); the text around calls is free.
    calls: tuple[int, int | None] | None = None

    def thinking(self, thinks: bool) -> Grammar:
        """Return the same grammar for answers that may, or may not, begin with thinking."""
        return replace(self, thinks=thinks)

    def with_calls(self, open: int, close: int | None) -> Grammar:
        """Return the grammar of calls between these tokens, with any text around them."""
        return replace(self, calls=(open, close))

    def with_thinking(self) -> Grammar:
        """Return the same grammar for the whole output of the model, its thinking included."""
        return replace(self, whole=True)

    def matcher(self, prompt: Sequence[int]) -> Matcher:
        """Return a matcher of the answer to `prompt`."""
        # Tags are sought in the bytes of tokens.
        segmenter = Segmenter(self.tokenizer.marks, spell=lambda tag: as_letters(tag.encode()))
        segment = Segment("answer") if self.whole else segmenter.begin(prompt)
        if segment.kind != "answer":
            return Matcher(self, segmenter, "thinking", segment)
        return Matcher(self, segmenter, "start" if self.thinks and segment.fresh else "answer", segment)


class Matcher:
    """Follows one answer: `history[start:]`. The result of every method depends on its arguments alone.

    Draft tokens are consumed to look ahead, and taken back. `_states[i]` is the state after i tokens. After a
    forbidden token it is "invalid", and the parser reads nothing more. A parser that gives up stays in its
    error state; if only draft tokens led there, a new parser replaces it. The parser does not read text
    around calls ("free") or thinking ("thinking", headers of messages included).
    """

    def __init__(self, grammar: Grammar, segmenter: Segmenter, state: State, segment: Segment) -> None:
        self._vocabulary = vocabulary = grammar.vocabulary
        self._token_bytes = grammar.tokenizer.token_bytes
        self._segmenter, self._marks = segmenter, segmenter.marks
        # The parser takes a tag that is a token for its text, and the stream may hide it. `whole` shows all.
        tags = frozenset[int | None]() if grammar.whole else self._marks.tag_tokens
        self._hidden = frozenset(tag for tag in tags if tag is not None)
        self._text_tokens = vocabulary.other_tokens & ~token_bits(self._hidden, vocabulary.size)
        self._calls = grammar.calls
        self._answer: State = "answer" if self._calls is None else "free"  # the state after the thinking
        self._free_tokens = vocabulary.all_tokens
        if self._calls is not None:
            closing = [token for token in self._calls[1:] if token is not None]
            self._free_tokens = vocabulary.all_tokens & ~token_bits(closing, vocabulary.size)
        self._unread: dict[State, tuple[int, TokenBits, TokenBits]] = {}
        self._start = grammar.start
        self._parser = self._start.deep_copy()
        self._error: str | None = None  # why no token of the grammar may follow, if that happened
        self._tokens: list[int] = []
        # The last history, its `start` and the tokens read of it. The same list only grows, so it is not
        # compared again.
        self._followed: tuple[Sequence[int], int, int] = (), 0, 0
        self._states: list[State] = [self._answer if state == "answer" else state]
        self._segments = [segment]  # of the thinking, parallel to the states
        self._bits_of: dict[frozenset[int], TokenBits] = {}
        self._parsed = [0]  # how many of the first i tokens the parser has read

    def allowed(
        self, history: Sequence[int], drafted: Sequence[int], rows: int, *, start: int = 0
    ) -> TokenBits:
        """Return the allowed tokens of each of T rows, bits [T, W]. `types.Sampler` defines the rows.

        Every row allows some token, also after a forbidden draft token. Raises InvalidValue if the parser
        gives up.
        """
        count = self._follow(history, start)
        allowed: list[TokenBits] = []
        for i in range(len(drafted) + 1):
            if i > len(drafted) - rows:
                allowed.append(self._next_tokens())
            if i < len(drafted):
                self._consume(drafted[i])
        self._rewind(count)
        return np.stack(allowed)

    def legal(self, history: Sequence[int], drafted: Sequence[int], *, start: int = 0) -> int:
        """Return the number of draft tokens before the first forbidden one."""
        count = self._follow(history, start)
        for token in drafted:
            self._consume(token)
        states = self._states[count + 1 :]
        self._rewind(count)
        return next((i for i, state in enumerate(states) if state == "invalid"), len(states))

    def forced(self, history: Sequence[int], *, start: int = 0) -> list[int]:
        """Return the tokens that must follow, as far as the grammar determines them."""
        self._follow(history, start)
        if self._states[-1] == "answer":
            return self._parser.compute_ff_tokens()
        tokens: list[int] = []
        segment = self._segments[-1]
        while self._states[-1] == "thinking":
            allowed = self._marks.allowed(segment)
            if allowed is None or len(allowed) > 1:
                break
            tokens += allowed
            segment = self._segment_after(segment, tokens[-1])
        return tokens

    def after_unread(
        self, history: Sequence[int], *, start: int = 0
    ) -> tuple[int, TokenBits, TokenBits] | None:
        """Return the masks after a token that only the device knows, if a single token makes a difference.

        Returns that token, the bits [W] after it, and the bits after any other token. None if the host has to
        read the token.
        """
        count = self._follow(history, start)
        state, token = self._states[-1], None
        if state == "thinking":
            token = self._marks.leaving(self._segments[-1])
        elif state == "free" and self._calls is not None:
            token = self._calls[0]
        if token is None:
            return None
        if state not in self._unread:
            otherwise = self._next_tokens()
            self._consume(token)
            self._unread[state] = token, self._next_tokens(), otherwise
            self._rewind(count)
        return self._unread[state]

    def _follow(self, history: Sequence[int], start: int) -> int:
        """Consume the emitted tokens, `history[start:]`. Return their number.

        Raises InvalidValue if they do not match.
        """
        known, its_start, kept = self._followed
        is_known = history is known and start == its_start and kept == len(self._tokens)
        if not is_known or len(history) - start < kept:
            kept = common_prefix(self._tokens, history[start:])
        self._rewind(kept)
        for token in history[start + kept :]:
            self._consume(token)
        self._followed = history, start, len(self._tokens)
        if self._states[-1] == "answer":
            self._parser.compute_bitmask()  # here, so that an error shows below; the parser caches the mask
        if self._parser.is_error():
            raise InvalidValue(f"the grammar cannot be followed: {_parser_error(self._parser)}")
        if self._states[-1] == "invalid" and self._error is not None:
            raise InvalidValue(f"the grammar cannot be followed: {self._error}")
        if self._states[-1] == "invalid":
            raise InvalidValue("the answer so far does not match the grammar: give both from the beginning")
        return len(self._tokens)

    def _consume(self, token: int) -> None:
        before, segment = self._states[-1], self._segments[-1]
        if before in ("start", "thinking"):
            segment = self._segment_after(segment, token)
        state = self._state_after(token, segment)
        self._tokens.append(token)
        self._states.append(state)
        self._segments.append(segment)

    def _segment_after(self, segment: Segment, token: int) -> Segment:
        after = self._segmenter.after(segment, token)
        if after is None:
            after, _ = self._segmenter.read(segment, as_letters(self._token_bytes(token)))
        return after

    def _state_after(self, token: int, segment: Segment) -> State:
        """Return the state after `token`, which leads to `segment`. The parser reads its grammar."""
        state, vocabulary = self._states[-1], self._vocabulary
        self._parsed.append(self._parsed[-1])
        if state in ("end", "invalid"):
            return "invalid"
        if state == "thinking":
            if not self._next_tokens()[token // 32] >> (token % 32) & 1:
                return "invalid"
            return self._answer if self._is_answer(segment) else "thinking"
        if state == "start" and not self._is_answer(segment):
            return "thinking"
        if self._is_free(state) and self._calls is not None and token != self._calls[0]:
            return "end" if token in vocabulary.ends else "invalid" if token == self._calls[1] else "free"
        if token in vocabulary.ends:
            return "end" if self._parser.is_accepting() else "invalid"
        if token in self._hidden:
            return "invalid"
        if self._parser.is_stopped() or self._parser.try_consume_tokens([token]) == 0:
            return "invalid"
        self._parsed[-1] += 1
        closes_call = self._calls is not None and token == self._calls[1]
        return "free" if closes_call and not self._parser.is_stopped() else "answer"

    def _is_answer(self, segment: Segment) -> bool:
        return segment.kind == "answer" and self._marks.allowed(segment) is None

    def _is_free(self, state: State) -> bool:
        return self._answer == "free" and state in ("start", "free")

    def _rewind(self, count: int) -> None:
        surplus = self._parsed[-1] - self._parsed[count]
        if self._parser.is_error():
            steps = zip(self._tokens[:count], pairwise(self._parsed), strict=False)
            self._parser = self._start.deep_copy()
            self._parser.try_consume_tokens([token for token, (before, after) in steps if after > before])
        elif surplus:
            self._parser.rollback(surplus)
        del self._tokens[count:], self._states[count + 1 :], self._parsed[count + 1 :]
        del self._segments[count + 1 :]

    def _next_tokens(self) -> TokenBits:
        """Return the tokens that may come next; all of them after an invalid one."""
        state, parser, vocabulary = self._states[-1], self._parser, self._vocabulary
        if state == "thinking":
            return self._thinking_tokens()
        if state == "end":
            return vocabulary.end_tokens
        if self._is_free(state):
            return self._free_tokens
        if state == "invalid" or parser.is_error():
            return vocabulary.all_tokens
        if parser.is_stopped():
            return vocabulary.end_tokens
        row = np.frombuffer(parser.compute_bitmask(), np.uint32)[: len(vocabulary.end_tokens)]
        if parser.is_error():  # such as at a dead end
            self._error = _parser_error(parser)
            return vocabulary.all_tokens
        row = row & self._text_tokens
        if parser.is_accepting():
            row = row | vocabulary.end_tokens
        if state == "start" and self._marks.opening is not None:
            row = row | self._bits(frozenset({self._marks.opening}))
        return row

    def _thinking_tokens(self) -> TokenBits:
        """Return the tokens that may follow in thinking, or in the header of a message."""
        segment = self._segments[-1]
        allowed = self._marks.allowed(segment)
        if allowed is not None:
            return self._bits(allowed)
        return self._vocabulary.other_tokens & ~self._bits(self._marks.forbidden(segment))

    def _bits(self, tokens: frozenset[int]) -> TokenBits:
        if tokens not in self._bits_of:
            self._bits_of[tokens] = token_bits(tokens, self._vocabulary.size)
        return self._bits_of[tokens]


def compile_grammar(
    kind: GrammarKind, source: str, tokenizer: Tokenizer, vocab_size: int, *, seconds: float
) -> Grammar:
    """Return the grammar of answers that match `source`: a JSON schema as JSON, a regular expression or Lark.

    "json_object" ignores the source. A JSON schema is rewritten first (`json_schema.py`). JSON is written on
    one line, with ", " and ": " between its parts. `vocab_size` is the width of the logits. The grammar is
    compiled in the sandbox first, then here. Raises InvalidValue with the reason if the source is not
    supported or takes more than `seconds`, and SpecError if llguidance is not installed.
    """
    if find_spec("llguidance") is None:
        raise SpecError("structured output needs llguidance, which is not installed: pip install llguidance")
    most = 100_000  # characters: limits the memory that parsing takes
    if kind != "json_object" and len(source) > most:
        raise InvalidValue(f"the grammar has {len(source)} characters, the most are {most}: make it smaller")
    vocabulary = _vocabulary(tokenizer, vocab_size)
    name = {"regex": "regular expression", "lark": "Lark grammar"}.get(kind, "JSON schema")
    if kind == "json_schema":
        source, unenforced = enforced(source)
        if unenforced:
            raise InvalidValue(f"the JSON schema cannot be enforced: {unenforced[0]}: leave it out")
    json_object = '{"type": "object"}'
    source = json_object if kind == "json_object" else source
    SANDBOX.compile(
        name, {"kind": kind, "source": source, "tokenizer": vocabulary.sandbox_tokenizer}, seconds
    )
    try:
        start = build_parser(kind, source, vocabulary.tokenizer)
    except ValueError as error:
        raise InvalidValue(f"the {name} cannot be used: {one_line(error)}") from error
    if start.is_error():
        raise InvalidValue(f"the {name} cannot be used: {_parser_error(start)}")
    return Grammar(tokenizer, vocabulary, start)


def prepare_grammars(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Make what all grammars of a tokenizer share, and keep it: seconds for a large vocabulary."""
    if find_spec("llguidance") is not None and tokenizer.eos:
        with suppress(ValueError):  # of a tokenizer that does not fit: who asks for a grammar is told
            _vocabulary(tokenizer, vocab_size)


_vocabularies: WeakKeyDictionary[Tokenizer, dict[int, GrammarVocabulary]] = WeakKeyDictionary()
_lock = threading.Lock()


def _vocabulary(tokenizer: Tokenizer, size: int) -> GrammarVocabulary:
    from llguidance import LLTokenizer

    with _lock:
        known = _vocabularies.setdefault(tokenizer, {})
        if size not in known:
            ends = sorted(tokenizer.eos)
            if not ends:
                raise InvalidValue("this target has no end-of-text token: an answer could not end")
            serialized = tokenizer.serialized()
            full = LLTokenizer(serialized, n_vocab=size, eos_token=ends)
            small = _small_tokenizer(serialized, size)
            known[size] = GrammarVocabulary(full, small, size, tokenizer.eos)
        return known[size]


def _small_tokenizer(serialized: str, size: int) -> tuple[str, int]:
    """Return a tokenizer with a token for every byte and the given special tokens, and its size.

    It stands for the full vocabulary in the sandbox.
    """
    key = '"added_tokens":'  # it comes before a vocabulary that takes seconds to parse
    added, _ = json.JSONDecoder().raw_decode(serialized, serialized.index(key) + len(key))
    special = [token["content"] for token in added if token["special"]]
    letters = pre_tokenizers.ByteLevel.alphabet()
    vocabulary = {token: i for i, token in enumerate([*sorted(letters), *special])}
    small = FastTokenizer(models.BPE(vocab=vocabulary, merges=[]))
    small.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    small.decoder = decoders.ByteLevel()
    small.add_special_tokens([AddedToken(name, special=True) for name in special])
    return small.to_str(), max(size, len(vocabulary))


def token_bits(tokens: Sequence[int] | frozenset[int], size: int) -> TokenBits:
    """Return tokens as bits, [W]."""
    bits = np.zeros(-(-size // 32) * 32, dtype=np.uint8)
    bits[list(tokens)] = 1
    return np.packbits(bits, bitorder="little").view(np.uint32)


def limits(bits: mx.array, size: int, dtype: mx.Dtype) -> mx.array:
    """Return limits [..., V] of logits: -inf where bits, uint8 [..., N], are 0, and inf where they are 1.

    Bit i % 8 of byte i // 8 is token i. Each byte is looked up in a table.
    """
    return _byte_limits(dtype)[bits].flatten(-2)[..., :size]


def row_limits(rows: TokenBits, size: int, dtype: mx.Dtype) -> mx.array:
    """Return the limits of rows [T, W] of bits: [T, V], or [1, V] if the rows are equal."""
    masks = [_known_limits(row.tobytes(), size, dtype) for row in rows]
    return masks[0][None] if all(mask is masks[0] for mask in masks) else mx.stack(masks)


@lru_cache(maxsize=16)  # a megabyte each for a large vocabulary; inside a JSON string the bits stay the same
def _known_limits(bits: bytes, size: int, dtype: mx.Dtype) -> mx.array:
    return limits(mx.array(np.frombuffer(bits, np.uint8)), size, dtype)


@cache
def _byte_limits(dtype: mx.Dtype) -> mx.array:
    """Return the limits [256, 8] of eight logits for each byte."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return mx.array(np.where(bits, np.inf, -np.inf)).astype(dtype)


def read_tokens(drafted: mx.array) -> list[int]:
    """Copy draft tokens to the host, where a grammar is followed."""
    return cast(list[int], drafted.tolist())


def _parser_error(parser: LLMatcher) -> str:
    reason = parser.get_error().replace("<non-verbose/>", "")
    return one_line(ValueError(reason.replace("NoExtensionBias", "no text matches it")))
