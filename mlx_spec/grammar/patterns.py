"""Patterns and formats of JSON Schema: check with llguidance how it reads them, and translate patterns.

Patterns are JavaScript's. llguidance reads Rust's, which differ in character classes, braces and look-ahead.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mlx_spec.checkpoint.files import one_line
from mlx_spec.errors import InvalidValue
from mlx_spec.grammar.sandbox import SANDBOX, build_parser

if TYPE_CHECKING:
    from llguidance import LLMatcher

# The formats that llguidance enforces. Any other one is an annotation.
FORMATS = frozenset("date-time time date duration email hostname ipv4 ipv6 uuid uri".split())
EMPTY = "no value matches it"
_known: dict[str, LLMatcher | str] = {}


class PatternChecker:
    """Checks patterns with llguidance, within a limit of seconds for a whole schema."""

    def __init__(self, seconds: float = 10.0) -> None:
        self._seconds = self._left = seconds

    def problem(self, schema: Mapping[str, Any]) -> str | None:
        """Return why llguidance refuses a schema, by default of a string; None if it accepts it."""
        error = self._parser({"type": "string", **schema})
        if not isinstance(error, str):
            return None
        if "look" in error:
            return "look-around, as look-ahead and word borders are, is not supported"
        if "Unsatisfiable" in error:
            return EMPTY
        if "Unable to determine" in error:
            return "the pattern is too complex for it"
        return re.sub(r"^.*error: |^the pattern |: make it simpler$", "", error)

    def matches(self, pattern: str, name: str) -> bool:
        """Return True if llguidance finds `pattern`, which has no problem, in `name`."""
        start = self._parser({"type": "string", "pattern": pattern})
        if isinstance(start, str):
            return False
        parser = start.deep_copy()
        written = json.dumps(name, ensure_ascii=False).encode()
        return all(parser.try_consume_tokens([byte]) == 1 for byte in written) and parser.is_accepting()

    def has_other(self, pattern: str, names: Iterable[str]) -> bool:
        """Return True if `pattern` matches a text that is not one of `names`."""
        start = self._parser({"type": "string", "pattern": pattern})
        written = [json.dumps(name, ensure_ascii=False).encode() for name in names]
        prefixes = {each[:i] for each in written for i in range(len(each) + 1)}
        open_ = [] if isinstance(start, str) else [b""]
        while open_ and not isinstance(start, str):
            before = open_.pop()
            if before not in prefixes:
                return True  # every text that the parser begins can be completed
            parser = start.deep_copy()
            parser.try_consume_tokens(list(before))
            if not parser.is_stopped():
                bias = parser.compute_logit_bias()
                open_ += [before + bytes([byte]) for byte in range(256) if bias[byte]]
        return False

    def _parser(self, schema: Mapping[str, Any]) -> LLMatcher | str:
        """Return a parser of a schema over bytes, or why there is none. Raises InvalidValue if time is up."""
        source = json.dumps(schema)
        if source not in _known:
            if len(_known) >= 1024:  # parsers in the cache
                _known.clear()
            _known[source] = self._compiled(source)
        return _known[source]

    def _compiled(self, source: str) -> LLMatcher | str:
        from llguidance import LLTokenizer

        try:
            # The tokenizer of llguidance with a token for each byte has 262 tokens.
            request = {"kind": "json_schema", "source": source, "tokenizer": ("byte", 262)}
            self._left -= SANDBOX.compile("pattern", request, max(self._left, 0.01))
            parser = build_parser("json_schema", source, LLTokenizer("byte"))
        except InvalidValue as error:
            reason = f"the patterns of the JSON schema take more than {self._seconds:g} s to compile"
            raise InvalidValue(f"{reason}: make them simpler") from error
        except ValueError as error:
            return one_line(error)
        return one_line(ValueError(parser.get_error())) if parser.is_error() else parser


def translated(pattern: str, format: str | None = None) -> list[str]:
    """Return Rust patterns that must all match: together they equal a JavaScript pattern.

    Look-ahead at the beginning becomes a separate pattern. Look-ahead that all texts of `format` pass is left
    out.
    """
    implied: Mapping[str, Sequence[str]] = {
        "duration": ("(?!.*W)", r"(?=\d|T\d)", r"(?=\d)"),
        "email": (r"(?!\.)", r"(?!.*\.\.)"),
    }
    for assertion in implied.get(format or "", ()):
        pattern = pattern.replace(assertion, "")
    ahead = []
    while re.match(r"\^?\(\?=", pattern):
        start = pattern.index("(?=")
        end = _closing(pattern, start)
        if end is None or pattern[end : end + 1] in ("*", "+", "?", "{"):
            break
        if not pattern.startswith("^") or _has_choice(pattern[end:]):
            break
        ahead.append(f"^(?:{pattern[start + 3 : end - 1]})")
        pattern = "^" + pattern[end:]
    return [*map(_in_rust, [*ahead, pattern])]


def _pieces(pattern: str) -> Iterable[tuple[str, bool, int]]:
    """Yield characters and escapes, whether they stand in a class, and where they end."""
    position, in_class = 0, False
    while position < len(pattern):
        size = 2 if pattern[position] == "\\" else 1
        piece = pattern[position : position + size]
        position += size
        yield piece, in_class, position
        if not in_class and piece == "[":
            in_class = True
        elif in_class and piece == "]":
            in_class = False


def _closing(pattern: str, start: int) -> int | None:
    """Return the end of the group that begins at `start`."""
    depth = 0
    for piece, in_class, end in _pieces(pattern):
        if end <= start or in_class:
            continue
        depth += (piece == "(") - (piece == ")")
        if piece == ")" and depth == 0:
            return end
    return None


def _has_choice(pattern: str) -> bool:
    """Return True if `pattern` has alternatives outside of groups."""
    depth = 0
    for piece, in_class, _ in _pieces(pattern):
        if not in_class:
            depth += (piece == "(") - (piece == ")")
            if piece == "|" and depth == 0:
                return True
    return False


def _in_rust(pattern: str) -> str:
    pattern = pattern.replace("[^]", r"[\s\S]")
    surrogates = re.compile(r"\\u([dD][89aAbB][0-9a-fA-F]{2})\\u([dD][c-fC-F][0-9a-fA-F]{2})")
    pattern = surrogates.sub(lambda pair: _character(pair[1], pair[2]), pattern)
    pieces: list[str] = []
    for piece, in_class, end in _pieces(pattern):
        if piece.startswith("\\c") and pattern[end : end + 1].isalpha():
            piece = "\\x%02x" % (ord(pattern[end]) % 32) + "\0"  # \0 marks the next letter, removed below
        elif piece in (r"\<", r"\>"):
            piece = piece[1]
        elif in_class and (piece == "[" or (piece in "&~-" and pieces[-1:] == [piece])):
            piece = "\\" + piece
        elif not in_class and piece == "{" and not re.compile(r"\{\d+(,\d*)?\}").match(pattern, end - 1):
            # Braces of \p{..}, \u{..} and \x{..} belong to their escapes.
            piece = piece if pieces and pieces[-1] in (r"\p", r"\P", r"\u", r"\x") else r"\{"
        pieces.append(piece)
    return re.sub("\0.", "", "".join(pieces), flags=re.DOTALL)


def _character(high: str, low: str) -> str:
    """Return the escape of the character that a pair of surrogates encodes."""
    return "\\u{%x}" % (0x10000 + (int(high, 16) - 0xD800) * 0x400 + int(low, 16) - 0xDC00)
