"""The reference for log-probabilities: one forward pass without a cache, in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from exact_distribution import reference as distribution
from grammars import byte_text

from mlx_spec.sampling import Sampling
from mlx_spec.types import TokenLogprob

TOP = 4


TEXT = byte_text({})


def reference(
    model: nn.Module, sampling: Sampling, prompt: list[int], emitted: list[int], temperature: float = 1.0
) -> np.ndarray:
    """Return log-probabilities [N, V] at the emitted tokens, by one forward pass without a cache."""
    logits = np.array(model(mx.array([prompt + emitted]))[0].astype(mx.float32), dtype=np.float64)
    plain = replace(sampling, temperature=temperature, top_k=0, top_p=1.0, min_p=0.0, grammar=None)
    rows = [
        distribution(plain, row, [*prompt, *emitted[:j]], len(prompt))
        for j, row in enumerate(logits[len(prompt) - 1 : -1])
    ]
    with np.errstate(divide="ignore"):  # a banned token
        return np.log(np.array(rows))


def check(found: Sequence[TokenLogprob], rows: np.ndarray, emitted: list[int], within: float = 1e-5) -> None:
    assert [each.token for each in found] == emitted and len(rows) == len(emitted)
    for each, row in zip(found, rows, strict=True):
        assert abs(each.logprob - row[each.token]) < within
        order = sorted(-row)[:TOP]
        assert [-a.logprob for a in each.top] == pytest.approx([o for o in order if o < math.inf], abs=within)
        assert all(abs(a.logprob - row[a.token]) < within for a in each.top)
        assert len({a.token for a in each.top}) == len(each.top)
        assert each.written == TEXT.token_bytes(each.token)
