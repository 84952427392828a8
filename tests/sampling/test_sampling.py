"""Filters and penalties against a reference in float64; values out of range are refused."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.sample_utils import make_repetition_penalty

from mlx_spec.errors import InvalidValue
from mlx_spec.sampling import Greedy, LogitsProcessor, Sampling, Seeded, Unseeded
from mlx_spec.types import no_draft

V = 40
NONE = no_draft().tokens
PROMPT = [3, 5, 5, 8, 13, 21, 34]
OUTPUT = [3, 3, 9, 17, 9, 9, 39]
HISTORY = PROMPT + OUTPUT
PENALTIES: dict[str, Any] = {"repetition_penalty": 1.3, "presence_penalty": 0.6, "frequency_penalty": -0.4}
BIAS = {0: 2.5, 9: -1.0, 12: -math.inf, 39: 3.3}
FILTERS: list[dict[str, Any]] = [
    {},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": V},
    {"top_k": 1000},
    {"top_p": 1e-6},
    {"top_p": 0.5},
    {"top_p": 0.95},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_k": 12, "top_p": 0.8},
    {"top_k": 12, "top_p": 0.95, "min_p": 0.15},
    {"repetition_penalty": 1.3},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.7},
    {"logit_bias": BIAS},
    {**PENALTIES, "logit_bias": BIAS, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
]


def logits(rows: int, seed: int = 0, dtype: mx.Dtype = mx.float32, vocab: int = V) -> mx.array:
    return (mx.random.normal((rows, vocab), key=mx.random.key(seed)) * 2).astype(dtype)


def reference(
    sampling: Sampling, row: np.ndarray, history: Sequence[int], prompt_length: int = len(PROMPT)
) -> np.ndarray:
    """The law of the token after `history`, from logits [V]; the definitions, one token at a time."""
    row, generated = row.astype(np.float64).copy(), list(history[prompt_length:])
    for t in set(history):
        row[t] *= sampling.repetition_penalty ** -np.sign(row[t])
    for t in set(generated):
        row[t] -= sampling.presence_penalty + sampling.frequency_penalty * generated.count(t)
    for t, bias in (sampling.logit_bias or {}).items():
        row[t] += bias
    law = np.exp((row - row.max()) / sampling.temperature)
    if sampling.top_k:
        law[law < sorted(law)[-min(sampling.top_k, len(law))]] = 0
    law /= law.sum()
    if sampling.top_p < 1:
        law = np.where([law[law > share].sum() < sampling.top_p for share in law], law, 0)
    law[law < sampling.min_p * law.max()] = 0
    return np.asarray(law / law.sum())


def law_of(sampling: Sampling, block: mx.array, drafted: mx.array = NONE) -> np.ndarray:
    """The law [T, V] after HISTORY."""
    scores = LogitsProcessor(sampling, len(PROMPT), V).scores(block, HISTORY, drafted)
    assert scores.dtype == mx.float32
    return np.array(mx.softmax(scores, axis=-1))


@pytest.mark.parametrize("fields", FILTERS)
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("temperature", [0.6, 1.7])
def test_law_is_the_reference(fields: dict[str, Any], dtype: mx.Dtype, temperature: float) -> None:
    sampling = Sampling(temperature, **fields)
    block = logits(6, dtype=dtype)
    expected = [reference(sampling, row, HISTORY) for row in np.array(block.astype(mx.float32))]
    for row, law in enumerate(expected):
        got = law_of(sampling, block[row : row + 1])[0]
        assert np.abs(got - law).max() < 2e-6
        assert ((got > 0) == (law > 0)).all()


@pytest.mark.parametrize("fields", FILTERS)
def test_ties_with_the_last_token_kept_stay(fields: dict[str, Any]) -> None:
    sampling = Sampling(1.0, **fields)
    block = mx.round(logits(20, seed=1) * 0.6)  # a handful of values, many tokens each
    for row in block:
        got = law_of(sampling, row[None])[0]
        law = reference(sampling, np.array(row), HISTORY)
        assert ((got > 0) == (law > 0)).all()
    if fields == {"top_k": 7}:
        assert any((reference(sampling, np.array(row), HISTORY) > 0).sum() > 7 for row in block)


@pytest.mark.parametrize("fields", [{"temperature": 0.8, **f} for f in FILTERS] + [PENALTIES])
def test_each_row_sees_the_drafted_tokens_before_it(fields: dict[str, Any]) -> None:
    sampling = Sampling(**fields)
    drafted = [9, 0, 9, 3, 11, 0]
    block = logits(len(drafted) + 1)
    for rows in range(1, len(block) + 1):  # the last row sees all drafted tokens
        scores = LogitsProcessor(sampling, len(PROMPT), V).scores(block[-rows:], HISTORY, mx.array(drafted))
        for j in range(rows):
            history = HISTORY + drafted[: len(drafted) - rows + 1 + j]
            alone = LogitsProcessor(sampling, len(PROMPT), V).scores(block[-rows:][j : j + 1], history, NONE)
            assert mx.array_equal(scores[j : j + 1], alone)


def test_repetition_penalty_is_that_of_mlx_lm() -> None:
    block = logits(1)
    theirs = make_repetition_penalty(1.3, len(HISTORY))(mx.array(HISTORY), mx.array(block))
    ours = LogitsProcessor(Sampling(repetition_penalty=1.3), len(PROMPT), V).scores(block, HISTORY, NONE)
    assert mx.allclose(ours, theirs, rtol=1e-6)


class Watched(list[int]):
    """A history that counts the tokens read from it."""

    read = 0

    def __getitem__(self, index: Any) -> Any:
        items = super().__getitem__(index)
        self.read += len(items) if isinstance(index, slice) else 1
        return items


def test_counts_grow_with_the_history_and_read_each_token_once() -> None:
    sampling = Sampling(1.0, **PENALTIES)
    rng = np.random.default_rng(0)
    law, history = LogitsProcessor(sampling, len(PROMPT), V), Watched(PROMPT)
    for i in range(60):
        drafted = mx.array(rng.integers(V, size=i % 4).astype(np.int32))
        block = logits(drafted.shape[0] + 1, seed=i)
        fresh = LogitsProcessor(sampling, len(PROMPT), V).scores(block, list(history), drafted)
        assert mx.allclose(law.scores(block, history, drafted), fresh, atol=1e-6)
        assert history.read == len(history)
        history.extend(rng.integers(V, size=i % 3).tolist())


REFUSED: list[tuple[str, Any]] = [
    ("temperature", -0.1),
    ("temperature", 1e-5),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", "hot"),
    ("top_k", -1),
    ("top_k", 2.5),
    ("top_k", True),
    ("top_p", 0),
    ("top_p", 1.01),
    ("top_p", math.nan),
    ("min_p", -0.1),
    ("min_p", 1.5),
    ("repetition_penalty", 0),
    ("repetition_penalty", math.inf),
    ("presence_penalty", 2.5),
    ("frequency_penalty", -math.inf),
    ("seed", 1.5),
    ("seed", "one"),
    ("logit_bias", {-1: 1.0}),
    ("logit_bias", {"a": 1.0}),
    ("logit_bias", {1: math.inf}),
    ("logit_bias", {1: math.nan}),
    ("logit_bias", {1: 1e10}),
]


@pytest.mark.parametrize(("name", "value"), REFUSED)
def test_values_out_of_range_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidValue, match=name) as caught:
        Sampling(**{name: value})
    message = str(caught.value)
    assert "\n" not in message
    assert "give" in message
    shown = next(iter(value.items())) if isinstance(value, dict) else (value,)
    assert any(repr(part) in message for part in shown)


def test_a_bias_outside_the_vocabulary_is_refused() -> None:
    sampling = Sampling(logit_bias={V: 1.0})
    assert sampling.sampler(1, V + 1)
    with pytest.raises(InvalidValue, match=f"token id {V}.*{V - 1}"):
        sampling.sampler(1, V)


def test_sampling_is_a_value() -> None:
    bias = {1: 2.0}
    sampling = Sampling(0.5, logit_bias=bias)
    same = Sampling(0.5, logit_bias={1: 2.0})
    bias[1] = 3.0
    assert sampling == same
    assert hash(sampling) == hash(same)
    assert sampling != dataclasses.replace(sampling, logit_bias=bias)
    with pytest.raises(TypeError):
        sampling.logit_bias[1] = 4.0  # type: ignore[index]
    with pytest.raises(dataclasses.FrozenInstanceError):
        sampling.top_k = 3  # type: ignore[misc]
    kinds = [Sampling(1.0), Sampling(1.0, seed=0), Sampling(seed=0)]
    assert [type(s.sampler(1, V)) for s in kinds] == [Unseeded, Seeded, Greedy]
