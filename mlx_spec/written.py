"""Tokens to bytes, one by one: what a token adds to a text, also where that is half a character."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from tokenizers import Tokenizer

BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # a byte of a character that the vocabulary lacks (sentencepiece)
PIECEWISE = {"Replace", "Metaspace", "ByteFallback", "Fuse", "Strip"}  # decoders that read piece by piece


class Written:
    """The bytes of each token of a vocabulary.

    Three kinds are read: bytes written as letters (byte-level BPE), sentencepiece with its spaces and bytes,
    and any other, whose tokens are what its own decoder makes of them one by one.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = {i: token.content for i, token in tokenizer.get_added_tokens_decoder().items()}
        steps = list(_steps(tokenizer))
        names = {step["type"] for step in steps}
        self._letters = "ByteLevel" in names
        self._pieces = bool(names) and names <= PIECEWISE
        self._fallback = "ByteFallback" in names
        self._replaced = [pair for pair in map(_replaced, steps) if pair]
        self._known: dict[int, bytes] = {}

    def __call__(self, token: int) -> bytes:
        """The bytes of `token`: of a special token its name, of an id that is no token nothing."""
        if token not in self._known:
            piece = self._tokenizer.id_to_token(token)
            self._known[token] = b"" if piece is None else self._read(token, piece)
        return self._known[token]

    def _read(self, token: int, piece: str) -> bytes:
        if self._letters:
            if token in self._added or not set(piece) <= _bytes_of_letters().keys():
                return piece.encode()
            return bytes(_bytes_of_letters()[letter] for letter in piece)
        if not self._pieces:
            return self._tokenizer.decode([token], skip_special_tokens=False).encode()
        if self._fallback and (byte := BYTE.fullmatch(piece)):
            return bytes([int(byte[1], 16)])
        for old, new in self._replaced:
            piece = piece.replace(old, new)
        return piece.encode()


def _steps(tokenizer: Tokenizer) -> Iterator[Mapping[str, Any]]:
    """What the decoder of a tokenizer consists of, as its tokenizer.json says it."""
    waiting = [] if tokenizer.decoder is None else [json.loads(tokenizer.decoder.__getstate__())]
    while waiting:
        step = waiting.pop(0)
        waiting = [*step.get("decoders", ()), *waiting]
        if step["type"] != "Sequence":
            yield step


def _replaced(step: Mapping[str, Any]) -> tuple[str, str] | None:
    """What a decoder puts in place of what."""
    if step["type"] == "Metaspace":
        return step["replacement"], " "
    if step["type"] == "Replace" and "String" in step["pattern"]:
        return step["pattern"]["String"], step["content"]
    return None


@cache
def _bytes_of_letters() -> dict[str, int]:
    """Printable bytes of Latin-1 are their own letters; the others, in order, those from U+0100 (GPT-2)."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(256 + i): byte for i, byte in enumerate(others)}
