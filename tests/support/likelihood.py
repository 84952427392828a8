"""The reference for log-probabilities: one forward pass without a cache, in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from mlx_spec.sampling import Sampling
from mlx_spec.text import Text
from mlx_spec.types import TokenLogprob

TOP = 4


def letters() -> Text:
    """The 256 bytes as letters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return Text(tokenizer, None, ())


TEXT = letters()


def reference(model: nn.Module, sampling: Sampling, prompt: list[int], emitted: list[int]) -> np.ndarray:
    """Return log-probabilities [N, V] at the emitted tokens, by one forward pass without a cache."""
    logits = np.array(model(mx.array([prompt + emitted]))[0].astype(mx.float32), dtype=np.float64)
    rows = logits[len(prompt) - 1 : -1].copy()
    for j, row in enumerate(rows):
        seen = sorted({*prompt, *emitted[:j]})
        penalty = sampling.repetition_penalty
        row[seen] = np.where(row[seen] > 0, row[seen] / penalty, row[seen] * penalty)
        for token in set(emitted[:j]):
            row[token] -= sampling.presence_penalty + sampling.frequency_penalty * emitted[:j].count(token)
        for token, bias in (sampling.logit_bias or {}).items():
            row[token] += bias
    return log_softmax(rows)


def log_softmax(rows: np.ndarray) -> np.ndarray:
    peak = rows.max(axis=-1, keepdims=True)
    return rows - peak - np.log(np.exp(rows - peak).sum(axis=-1, keepdims=True))


def check(found: Sequence[TokenLogprob], rows: np.ndarray, emitted: list[int], within: float = 1e-5) -> None:
    assert [each.token for each in found] == emitted and len(rows) == len(emitted)
    for each, row in zip(found, rows, strict=True):
        assert abs(each.logprob - row[each.token]) < within
        order = sorted(-row)[:TOP]
        assert [-a.logprob for a in each.top] == pytest.approx([o for o in order if o < math.inf], abs=within)
        assert all(abs(a.logprob - row[a.token]) < within for a in each.top)
        assert len({a.token for a in each.top}) == len(each.top)
        assert each.written == TEXT.token_bytes(each.token)
