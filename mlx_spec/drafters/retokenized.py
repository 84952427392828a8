"""A smaller language model with another tokenizer: its draft is read as text and encoded again.

This is assisted generation with different tokenizers (transformers, "universal assisted decoding"), with one
difference: a draft holds only certain tokens. A token is certain if it stays the same when the drafter adds
one more. The draft is the drafter's likeliest text. It is deterministic, so verification is exact. If the two
texts do not line up, tokens are rejected and nothing else happens.

Text passes between the two models as bytes, because a token may be half a character. Tokens of the two
need not end alike, so only text that begins exactly at the end of the history is used.
"""

from __future__ import annotations

import codecs
import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_spec.checkpoint.config import Checkpoint
from mlx_spec.drafters.draft_model import MAX_UNWRITTEN, DraftModel, VocabularySizes, vocab_size_of
from mlx_spec.drafters.drafter import DrafterSource, DrafterWrapper
from mlx_spec.errors import Mismatch
from mlx_spec.grammar import read_tokens
from mlx_spec.sampling import Sampling
from mlx_spec.tokenizer import Tokenizer, common_prefix
from mlx_spec.types import Draft, Features, Sampler, no_draft


def encode_after(tokenizer: Tokenizer, before: bytes, text: bytes) -> list[int] | None:
    """Return the tokens of `text` when it follows `before`.

    None if no token ends between the two, or if the tokenizer does not write the same bytes. Some tokenizers
    put a space before every text; it is left out.
    """
    anchor = b"x" if (before + text)[:1].isspace() else b"\n"  # it does not become one token with the text
    expected = anchor + before + text
    try:
        tokens = tokenizer.encode(expected.decode())
    except UnicodeDecodeError:
        return None
    ends = [0, *accumulate(len(tokenizer.token_bytes(token)) for token in tokens)]
    encoded = b"".join(tokenizer.token_bytes(token) for token in tokens)
    added = len(encoded) - len(expected)
    if encoded != b" " * added + expected:
        return None
    start = len(expected) - len(text) + added
    index = bisect_left(ends, start)
    return tokens[index:] if ends[index] == start else None


def whole_characters(text: bytes) -> bytes:
    """Return `text` up to the first byte that is not part of a whole character."""
    try:
        text.decode()
    except UnicodeDecodeError as error:
        return text[: error.start]
    return text


def split_characters(text: bytes) -> tuple[str, bytes]:
    """Return the characters of `text`, and the bytes at its end that may become one."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    return decoder.decode(text), decoder.getstate()[0]


@dataclass(frozen=True)
class Translated:
    """The end of a history in the drafter's tokens."""

    tokens: list[int]  # the drafter's tokens of all whole characters
    before: bytes  # the last piece of text
    pending: bytes  # the end of `before`: half a character, which `tokens` do not hold


class Translation:
    """The history of one sequence in the drafter's tokens.

    The history is cut into pieces whose ends do not depend on later text. A closed piece is encoded once;
    only the last piece is encoded again for each draft. A control token is a separate piece. It becomes the
    drafter's token of the same name, or nothing.
    """

    def __init__(self, target: Tokenizer, drafter: Tokenizer) -> None:
        self._target = target
        self._drafter = drafter
        self._opening = drafter.prompt_tokens("")
        self._history: list[int] = []
        self._tokens = list(self._opening)  # of closed pieces
        self._ends = [(0, len(self._tokens))]  # of closed pieces, in tokens of the target and of the drafter

    def read(self, history: Sequence[int]) -> Translated:
        """Return the end of `history` in the drafter's tokens."""
        shared = common_prefix(self._history, history)
        while len(self._ends) > 1 and self._ends[-1][0] >= shared:
            self._ends.pop()
        self._history = list(history)
        start, kept = self._ends[-1]
        del self._tokens[kept:]
        for end in self._closed(start):
            self._tokens += self._piece(start, end)
            self._ends.append((end, len(self._tokens)))
            start = end
        before = self._bytes(start, len(history))
        text, pending = split_characters(before)
        return Translated([*self._tokens, *self._encode(text)], before, pending)

    def _closed(self, start: int) -> Iterator[int]:
        """Yield the ends of the pieces from `start` on, without the last one.

        A piece is closed at the first word after 32 tokens, and at the first character after 128.
        """
        for i in range(start, len(self._history)):
            token, length = self._history[i], i - start
            control = token in self._target.controls
            # A new word begins with one of these in every tokenizer that keeps words apart.
            spaces = (b" ", b"\n")
            word = length >= 32 and self._target.token_bytes(token).startswith(spaces)
            long = length >= 128 and not split_characters(self._bytes(start, i))[1]
            if length and (control or word or long):
                yield i
                start = i
            if control:
                yield i + 1
                start = i + 1

    def _piece(self, start: int, end: int) -> list[int]:
        token = self._history[start]
        if token not in self._target.controls:
            return self._encode(split_characters(self._bytes(start, end))[0])
        same = same_control(self._target, token, self._drafter)
        return [] if start == 0 and same == self._opening[-1:] else same

    def _encode(self, text: str) -> list[int]:
        tokens = encode_after(self._drafter, b"", text.encode())
        return self._drafter.encode(text) if tokens is None else tokens

    def _bytes(self, start: int, end: int) -> bytes:
        return b"".join(self._target.token_bytes(token) for token in self._history[start:end])


def same_control(tokenizer: Tokenizer, token: int, other: Tokenizer) -> list[int]:
    """Return the control token of `other` that has the name of `token`, if there is one."""
    same = other.token_id(tokenizer.token_bytes(token).decode(errors="replace"))
    return [] if same is None or same not in other.controls else [same]


def continuation(target: Tokenizer, known: Translated, drafted: bytes) -> list[int]:
    """Return the target's tokens of a drafted text; none if they do not begin at the end of its history."""
    text = whole_characters(drafted)
    if not text.startswith(known.pending):
        return []
    text = text[len(known.pending) :]
    tokens = encode_after(target, known.before, text)
    if tokens is None and not known.pending:  # the target would write the last token and the text as one
        tokens = encode_after(target, b"", text)
    return tokens or []


class Retokenized(DrafterWrapper):
    """Drafts one sequence with its own model, caches and tokens."""

    inner: DraftModel

    def __init__(self, model: nn.Module, vocab_size: int, target: Tokenizer, drafter: Tokenizer) -> None:
        super().__init__(DraftModel(model, VocabularySizes(vocab_size, vocab_size)))
        self._translation = Translation(target, drafter)
        self._target, self._drafter = target, drafter
        self._greedy = Sampling().sampler(0, vocab_size)
        self._read = 0  # length of the history that was translated last

    def observe(self, history: Sequence[int], features: Features) -> None:
        """Process a prompt, and the tokens of many rounds without a draft."""
        is_near = 0 <= len(history) - self._read <= MAX_UNWRITTEN
        if not is_near and (tokens := self._translate(history).tokens):
            self.inner.write(tokens)

    def draft(self, history: Sequence[int], limit: int, sampler: Sampler) -> Draft:
        """Draft greedily, at most `limit` tokens: a deterministic draft has the highest acceptance.

        Waits for the drafter, because the host encodes its text in the target's tokens.
        """
        known = self._translate(history)
        if limit < 1 or not known.tokens:
            return no_draft()
        # The drafter's tokens per token of the target, within limits because a short text misleads.
        ratio = min(max(len(known.tokens) / len(history), 0.25), 4.0)
        steps = min(math.ceil(limit * ratio) + 1, 48)  # the drafter's tokens in one draft
        tokens = read_tokens(self.inner.draft(known.tokens, steps, self._greedy).tokens)
        self.inner.keep_draft(tokens)
        certain = self._certain(known, tokens)[:limit]
        return Draft(mx.array(certain, dtype=mx.int32)) if certain else no_draft()

    def _translate(self, history: Sequence[int]) -> Translated:
        self._read = len(history)
        return self._translation.read(history)

    def _certain(self, known: Translated, tokens: Sequence[int]) -> list[int]:
        """Return the target's tokens that no further token of the drafter can change.

        A control token of the drafter ends the text, so all of it is certain.
        """
        controls = self._drafter.controls
        end = next((i for i, token in enumerate(tokens) if token in controls), len(tokens))
        pieces = [self._drafter.token_bytes(token) for token in tokens[:end]]
        text = b"".join(pieces)
        certain = continuation(self._target, known, text)
        if end == len(tokens):
            return certain[: common_prefix(certain, continuation(self._target, known, b"".join(pieces[:-1])))]
        length = sum(len(self._target.token_bytes(token)) for token in certain)
        if len(known.pending) + length == len(text):
            return [*certain, *same_control(self._drafter, tokens[end], self._target)]
        return certain


def retokenized_source(
    name: str, model: nn.Module, vocab_size: int, target: Tokenizer, drafter: Tokenizer
) -> DrafterSource:
    """Return the source of drafters with `model`. They draft tokens of the target's tokenizer."""
    remake = partial(retokenized_source, name, vocab_size=vocab_size, target=target, drafter=drafter)
    make = partial(Retokenized, model, vocab_size, target, drafter)
    return DrafterSource(name, DraftModel.needs, lambda parts: make(), model, remake=remake)


def open_retokenized(
    checkpoint: Checkpoint, config: Mapping[str, Any], drafter: Tokenizer, target: Tokenizer
) -> DrafterSource:
    """Load a model that mlx-lm knows, to draft for a target of another vocabulary.

    Raises BadCheckpoint, NotRewindable, or Mismatch if a tokenizer does not write back the text it encodes.
    """
    probe = "Is it 3.14 or 42?\n    x = {'Key': [1, 2]}  # Yes, as `a_b` said.\n"
    for tokenizer, whose in ((drafter, f"the drafter {checkpoint.folder}"), (target, "the target")):
        if encode_after(tokenizer, b"", probe.encode()) is None:
            raise Mismatch(
                f"the drafter {checkpoint.folder} and the target have different tokenizers, and the "
                f"tokenizer of {whose} does not write back the text it encodes: "
                'use a drafter with the target\'s vocabulary, or "lookup"'
            )
    source = DraftModel.open(checkpoint, config, config)
    name = f"{source.name}, re-tokenized"
    return retokenized_source(name, source.network, vocab_size_of(config, "drafter"), target, drafter)
