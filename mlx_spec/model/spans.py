"""A pass over a prompt with spans, whose rows replace embeddings of tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_spec.model.hooks import decoder_of
from mlx_spec.model.layer_caches import Blocks
from mlx_spec.model.rotary import multi_axis_rope
from mlx_spec.prompt import RotaryPositions, Sight, Span


def spans_between(spans: Sequence[Span], start: int, end: int) -> list[Span]:
    """Return the spans that have rows from position `start` up to `end`."""
    return [span for span in spans if span.start < end and span.end > start]


def blocks_of(sight: Sight | None, spans: Sequence[Span], start: int, end: int) -> Blocks:
    """Return the spans of a pass within which attention is bidirectional; none if the family has it causal.

    Such a pass holds each of its spans whole.
    """
    if sight is None or sight.together is None:
        return ()
    assert all(start <= span.start and span.end <= end for span in spans), "a span was cut"
    return [(span.start, span.end) for span in spans]


def run_with_spans(
    model: Any,
    sight: Sight,
    rotary: RotaryPositions,
    tokens: mx.array,
    start: int,
    spans: Sequence[Span],
    cache: Sequence[Any],
) -> mx.array:
    """Return the logits [T, V] of tokens from position `start` on, with the rows of `spans`.

    The model gets the ids, too. Its per-layer embeddings, if it has any, read the pad token in spans.
    """
    owner = decoder_of(model).owner
    with _unscaled(owner) as scale:
        embedded = decoder_of(model).table(tokens)
        divisor = sight.scale if scale is None else 1.0
        embedded = embedded if scale is None else embedded * scale
        ids, at = list[mx.array](), list[mx.array]()
        done = 0
        for span in spans:
            low, high = max(span.start - start, 0), min(span.end - start, tokens.size)
            rows = span.rows()[low + start - span.start : high + start - span.start] / divisor
            ids += [tokens[done:low], mx.full((high - low,), sight.pad_token, tokens.dtype)]
            at += [embedded[done:low], rows.astype(embedded.dtype)]
            done = high
        inputs, embeddings = mx.concatenate([*ids, tokens[done:]]), mx.concatenate([*at, embedded[done:]])
        with multi_axis_rope(model, rotary, start, start + tokens.size):
            logits: mx.array = model(inputs[None], cache=cache, input_embeddings=embeddings[None])[0]
    return logits


@contextmanager
def _unscaled(owner: nn.Module) -> Iterator[float | None]:
    """Turn off a model's scaling of embeddings for one pass. Yield its scale.

    It is None if the scale is a number in the model's code. Then rows are divided by it before, which may
    change their last bit.
    """
    scale: float | None = vars(owner).get("embed_scale")
    if scale is None:
        yield None
        return
    owner.embed_scale = 1.0
    try:
        yield scale
    finally:
        owner.embed_scale = scale
