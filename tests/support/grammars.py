"""Vocabularies of single bytes for tiny models, and a reference for grammars."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import mlx.core as mx
import numpy as np
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from mlx_spec.grammar import Grammar, GrammarKind, Matcher
from mlx_spec.grammar.matcher import compile_grammar
from mlx_spec.tokenizer import Tokenizer
from mlx_spec.tokenizer.tokenizer import _byte_of_letter

V = 256
OPEN, CLOSE, END, STOP = 251, 252, 253, 254  # bytes of no character
NAMES = {OPEN: "<think>", CLOSE: "</think>", END: "<end>", STOP: "<stop>"}


def byte_text(specials: dict[int, str] = NAMES, size: int = V, first: int = 0) -> Tokenizer:
    """One token for each byte from `first` on, and special tokens in their places."""
    written = {byte: letter for letter, byte in _byte_of_letter().items()}
    vocabulary = {specials.get(i, written[(i + first) % 256]): i for i in range(size)}
    tokenizer = FastTokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in specials.values()])
    ends = [i for i, name in specials.items() if name in ("<end>", "<stop>")]
    return Tokenizer(tokenizer, None, ends)


def compiled(
    kind: GrammarKind, source: str, *, thinks: bool = False, tokenizer: Tokenizer | None = None
) -> Grammar:
    return compile_grammar(kind, source, tokenizer or byte_text(), V, seconds=5.0).thinking(thinks)


def language(pattern: str, letters: str, longest: int) -> set[str]:
    """Return all texts of these letters that match Python's regular expression."""
    words, found = [""], set()
    for _ in range(longest + 1):
        found |= {word for word in words if re.fullmatch(pattern, word)}
        words = [word + letter for word in words for letter in letters]
    return found


def next_letters(words: Iterable[str], before: str) -> set[str]:
    return {word[len(before)] for word in words if word.startswith(before) and len(word) > len(before)}


def tokens_of(row: np.ndarray | mx.array) -> set[int]:
    """Return the tokens that a row of bits allows."""
    return set(np.nonzero(np.unpackbits(np.array(row).view(np.uint8), bitorder="little"))[0].tolist())


def row(matcher: Matcher, generated: Sequence[int], drafted: Sequence[int] = ()) -> set[int]:
    """Return the tokens that may follow all of these."""
    return tokens_of(matcher.allowed(generated, drafted, 1)[0])
