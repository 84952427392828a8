"""A prompt: its tokens, and the spans of it that are not text.

A span takes one position for each of its rows. The tokens hold the model's placeholder there, which the
vocabulary has. Code that computes with tokens reads the prompt. Code that compares tokens, to reuse
something, reads its identity.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

if TYPE_CHECKING:
    import mlx.core as mx


class LazyRows:
    """The rows of a span, [count, D]: computed once, when they are first read.

    `encode` computes them in steps. It yields what each step computes, and returns the rows.
    """

    def __init__(self, encode: Callable[[], Generator[mx.array, None, mx.array]]) -> None:
        self._encode = encode
        self._rows: mx.array | None = None

    @property
    def are_computed(self) -> bool:
        return self._rows is not None

    def steps(self) -> Iterator[mx.array]:
        """Compute the rows. Yield the array to evaluate in each step; nothing if they are computed."""
        if self._rows is None:
            rows = yield from self._encode()
            yield rows
            self._rows = rows

    def __call__(self) -> mx.array:
        for _ in self.steps():
            pass
        assert self._rows is not None
        return self._rows


@dataclass(frozen=True, eq=False)
class Span:
    """Positions of a prompt whose rows are not embeddings of tokens, such as a picture's."""

    start: int
    count: int
    digest: bytes  # of everything that its rows depend on, except the weights
    rows: LazyRows
    grid: tuple[int, int] | None = None  # rows and columns, for models with positions in the plane

    @property
    def end(self) -> int:
        return self.start + self.count


@dataclass(frozen=True)
class Sight:
    """How a language model reads spans of its prompts."""

    pad_token: int  # what its per-layer embeddings read in place of the placeholder
    scale: float = 1.0  # the factor of token embeddings, which must not multiply rows of a span
    # The layers with bidirectional attention within a span: sliding-window layers, all, or none.
    together: Literal["sliding", "all"] | None = None
    # Where rows have positions in the plane (M-RoPE): the axis of each rotary frequency, 0 time, 1 y, 2 x.
    axes: tuple[int, ...] = ()


@dataclass(frozen=True)
class RotaryPositions:
    """The rotary positions of a sequence with spans in the plane.

    Row (y, x) of a span that begins at position p is at (p, p + y, p + x) in time, y and x. Text after it
    goes on at p + max(rows, columns): its position is its index and a shift, 0 or less.
    """

    axes: tuple[int, ...] = ()  # see `Sight`
    spans: tuple[tuple[int, int, int], ...] = ()  # index of the first row, rows and columns of each

    @classmethod
    def of(cls, sight: Sight | None, spans: Iterable[Span]) -> RotaryPositions:
        """Return the positions beside spans; plain ones for a family that counts rows as tokens."""
        if sight is None or not sight.axes:
            return cls()
        return cls(sight.axes, tuple((s.start, *s.grid) for s in spans if s.grid is not None))

    def before(self, size: int) -> RotaryPositions:
        """Return the positions with the spans that end within the first `size` indices of a prompt."""
        return RotaryPositions(self.axes, tuple(s for s in self.spans if s[0] + s[1] * s[2] <= size))

    def shift(self, index: int) -> int:
        """Return the shift of a token at an index."""
        return sum(max(h, w) - h * w for start, h, w in self.spans if start + h * w <= index)

    def crosses(self, start: int, end: int) -> bool:
        """Return True if an index from `start` up to `end` is in a span."""
        return any(first < end and first + h * w > start for first, h, w in self.spans)

    def positions(self, start: int, end: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return time, y and x [3, end - start] of the indices from `start` up to `end`."""
        index = np.arange(start, end)
        positions = np.stack([index, index, index])
        for first, h, w in self.spans:
            row, count = index - first, h * w
            turned = np.stack([np.zeros_like(row), *np.divmod(row, w)]) - row
            after = np.where(row >= count, max(h, w) - count, 0)
            positions += np.where((row >= 0) & (row < count), turned, after)
        return positions


Identity = np.ndarray[Any, np.dtype[np.int64]]  # what caches compare in place of tokens


@dataclass(frozen=True, eq=False)
class Prompt(Sequence[int]):
    """The tokens of a prompt, and its spans in their order."""

    tokens: tuple[int, ...]
    spans: tuple[Span, ...] = ()
    # Sizes at which other prompts may go on otherwise; not a part of its identity.
    turns: tuple[int, ...] = ()
    salt: bytes = b""  # prompts with different salts have no beginning in common

    def __len__(self) -> int:
        return len(self.tokens)

    def __iter__(self) -> Iterator[int]:
        return iter(self.tokens)

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...

    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        return self.tokens[index]

    @cached_property
    def identity(self) -> Identity:
        """Return what caches compare: the tokens, and for each row of a span a number below 0.

        The numbers are drawn from the digest, one for each row. So two pictures differ from their first row
        on. With a salt, the first number is drawn from the salt and the token: whatever compares identities
        keeps the prompts of several users apart. A text without a salt is its own identity.
        """
        identity = np.fromiter(self.tokens, np.int64, len(self.tokens))
        for span in self.spans:
            drawn = hashlib.shake_256(span.digest).digest(8 * span.count)
            identity[span.start : span.end] = -1 - (np.frombuffer(drawn, "<u8") >> 1).astype(np.int64)
        if self.salt and len(identity):
            first = int(identity[0]).to_bytes(8, "little", signed=True)
            drawn = hashlib.shake_256(first + self.salt).digest(8)
            identity[0] = -1 - (int.from_bytes(drawn, "little") >> 1)
        identity.setflags(write=False)
        return identity

    def whole(self, size: int) -> int:
        """Return the largest number of positions, at most `size`, that cuts no span."""
        return next((span.start for span in self.spans if span.start < size < span.end), size)

    def whole_chunk(self, low: int, high: int) -> int:
        """Return the end of a chunk that begins at `low` and cuts no span, near `high`.

        It is at most `high`, unless a span begins at `low` and ends later.
        """
        shorter = self.whole(high)
        return shorter if shorter > low else next(s.end for s in self.spans if s.start < high < s.end)


def text_prompt(tokens: Iterable[int], turns: tuple[int, ...] = ()) -> Prompt:
    """Return a prompt of text alone."""
    return Prompt(tuple(tokens), turns=turns)


def shared_prefix(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> int:
    """Return the length of the common prefix of two identities, of any integer type."""
    length, low, step = min(len(a), len(b)), 0, 256
    while low < length:  # blocks that double: most pairs differ early, and the others are read at full speed
        high = min(low + step, length)
        different = a[low:high] != b[low:high]
        if different[first := int(different.argmax())]:
            return low + first
        low, step = high, 2 * step
    return length
