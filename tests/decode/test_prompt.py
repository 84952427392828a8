"""A prompt as a value: those who compute read its tokens, those who compare read its identity."""

from __future__ import annotations

from collections.abc import Generator

import mlx.core as mx
import numpy as np

from mlx_spec.prompt import LazyRows, Prompt, Span, shared_prefix, text_prompt


def rows() -> LazyRows:
    def encode() -> Generator[mx.array, None, mx.array]:
        yield mx.zeros((1,))
        return mx.ones((4, 2))

    return LazyRows(encode)


def with_spans(*spans: tuple[int, bytes]) -> Prompt:
    """Return 20 tokens, with spans of 4 rows."""
    return Prompt(tuple(range(20)), tuple(Span(start, 4, digest, rows()) for start, digest in spans))


def test_a_text_is_its_own_identity() -> None:
    text = text_prompt([5, 6, 7])
    assert list(text) == [5, 6, 7] and len(text) == 3 and text[1:] == (6, 7) and text[-1] == 7
    assert text.identity.tolist() == [5, 6, 7] and [text.whole(size) for size in range(4)] == [0, 1, 2, 3]


def test_the_common_prefix_of_identities() -> None:
    """In blocks that double: a difference before, at and after the ends of the first ones, or none."""
    tokens = np.arange(5000)
    for place in (0, 1, 255, 256, 767, 768, 4999):
        other = tokens.copy()
        other[place] = -1
        assert shared_prefix(tokens, other) == place
    assert shared_prefix(tokens, tokens[:300]) == 300 and shared_prefix(tokens[:0], tokens) == 0


def test_identity_depends_on_the_digest_from_the_first_row_on() -> None:
    one, other = (with_spans((3, b"a"), (10, digest)).identity.tolist() for digest in (b"b", b"c"))
    assert one[:10] == other[:10] and one[14:] == other[14:] == list(range(14, 20))
    assert not set(one[10:14]) & set(other[10:14])
    found = {n for n in (*one, *other) if n < 0}
    assert len(found) == 12 and all(n >= -(2**63) for n in found)  # another one in each row, as int64
    again = with_spans((1, b"b")).identity.tolist()
    assert again[1:5] == one[10:14]  # the same picture, wherever it is
    assert with_spans((3, b"a"), (10, b"b")).tokens == tuple(range(20))


def test_sizes_end_in_no_span() -> None:
    prompt = with_spans((3, b"a"), (7, b"b"))
    assert [prompt.whole(size) for size in range(13)] == [0, 1, 2, 3, 3, 3, 3, 7, 7, 7, 7, 11, 12]


def test_rows_are_computed_once_in_steps() -> None:
    found = rows()
    assert [step.shape for step in found.steps()] == [(1,), (4, 2)] and not list(found.steps())
    assert found() is found() and found().shape == (4, 2)
    assert rows()().shape == (4, 2)
