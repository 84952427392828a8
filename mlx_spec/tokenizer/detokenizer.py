"""The text of tokens as they come, one by one."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from dataclasses import replace

from mlx_spec.tokenizer.tokenizer import Tokenizer
from mlx_spec.types import TokenLogprob

REPLACEMENT = "\ufffd"  # a decoder writes it for bytes that are not a character, or not yet


class Detokenizer:
    """Turns a stream of tokens into text. It never returns half a character.

    A window of tokens is decoded twice, with the new token and without it: the difference is the new text. So
    a token gets the spaces of its place, also the first one after the tokens `before`.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], before: Sequence[int] = (), half: int = 0
    ) -> None:
        self._decode = decode
        # The window: tokens whose text was returned, then tokens whose text was not. The last `half` tokens
        # of `before` are half a character.
        self._tokens = _last_text(decode, before)
        self._given = len(self._tokens) - half
        self.waiting = False  # True if the last tokens are half a character

    def add(self, token: int) -> str:
        """Return the text that `token` completes."""
        self._tokens.append(token)
        return self._new_text(final=False)

    def end(self) -> str:
        """Return the rest, such as bytes that never became a character."""
        return self._new_text(final=True)

    def _new_text(self, *, final: bool) -> str:
        before = self._decode(self._tokens[: self._given])
        after = self._decode(self._tokens)
        self.waiting = len(after) > len(before) and after.endswith(REPLACEMENT) and not final
        if len(after) <= len(before) or self.waiting:
            return ""
        self._tokens = self._tokens[self._given :]
        self._given = len(self._tokens)
        # A broken character makes some decoders write the ones before it anew, byte by byte.
        return after[len(before) :] if after.startswith(before) else self._decode(self._tokens)


def _last_text(decode: Callable[[Sequence[int]], str], tokens: Sequence[int]) -> list[int]:
    """Return an end of `tokens` that has text, so that later tokens get their spaces."""
    count = 1
    while count < len(tokens) and not decode(tokens[-count:]).strip(" " + REPLACEMENT):
        count *= 2
    return list(tokens[-count:])


def half_character(tokenizer: Tokenizer, tokens: Sequence[int]) -> int:
    """Return how many of the last tokens are half a character, which later tokens may complete."""
    written = [tokenizer.token_bytes(token) for token in tokens[-4:]]  # bytes of a character, at most
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(b"".join(written))
    half = len(decoder.getstate()[0])
    counts = (i for i in range(len(written) + 1) if len(b"".join(written[len(written) - i :])) == half)
    return next(counts, 0)


def placed(logprobs: Sequence[TokenLogprob], tokenizer: Tokenizer) -> tuple[TokenLogprob, ...]:
    """Return the logprobs of a whole text with their offsets. A token without text has the next offset."""
    detokenizer, end, with_offsets = Detokenizer(tokenizer.decode), 0, list[TokenLogprob]()
    for logprob in logprobs:
        with_offsets.append(replace(logprob, offset=end))
        end += len(detokenizer.add(logprob.token))
    return tuple(with_offsets)
