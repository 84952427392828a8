"""A filter, a drafter and a cache that are added as the table of DESIGN says work, with all others."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from support import tiny
from support.drafting import emitted
from support.grammars import byte_text
from support.pairs import pair_with

from mlx_spec.checkpoint import drafter_families
from mlx_spec.checkpoint.config import read_checkpoint
from mlx_spec.checkpoint.targets import TargetShape
from mlx_spec.drafters import DrafterSource, open_drafter
from mlx_spec.model.caches import Caches
from mlx_spec.model.layer_caches import AttentionCache, Columns, LayerCache
from mlx_spec.model.probe import check_rows
from mlx_spec.model.target import LMTarget
from mlx_spec.model.target_batch import TargetBatch
from mlx_spec.pair import Pair
from mlx_spec.sampling import LogitsProcessor, Sampling, sampling
from mlx_spec.sampling.candidates import FILTERS, Filter, by_scores
from mlx_spec.types import Draft, Drafter, Features, FeatureSpec, KVRows, Round, Sampler


def pair_of(model: Any, *sources: DrafterSource) -> Pair:
    return pair_with(model, sources, 3, byte_text())


def texts(pair: Pair) -> list[list[int]]:
    """Return the answers of two prompts of other lengths, which share passes."""
    batch, together = pair.batch(), dict[int, list[int]]()
    for length in (9, 21):
        together[batch.add(pair.prepare(pair.open(), tiny.prompt(length), max_tokens=14))] = []
    for id, round in batch.run():
        assert isinstance(round, Round), round
        together[id] += round.tokens
    return list(together.values())


# --- a filter


@dataclass(frozen=True)
class MoreSampling(Sampling):
    sigmas: float = 0.0


def near(scores: mx.array, left: mx.array, sigmas: float) -> mx.array:
    """Keep the tokens within some deviations below the best score (top-n-sigma)."""
    count = left.sum(axis=-1, keepdims=True)
    apart = mx.where(left, scores - mx.where(left, scores, 0).sum(axis=-1, keepdims=True) / count, 0)
    deviation = mx.sqrt(apart.square().sum(axis=-1, keepdims=True) / count)
    return scores >= scores.max(axis=-1, keepdims=True) - sigmas * deviation


def naive(scores: mx.array, left: mx.array, sigmas: float) -> mx.array:
    """Do as `near`, but count the tokens that were dropped."""
    return scores >= scores.max(axis=-1, keepdims=True) - sigmas * mx.std(scores, axis=-1, keepdims=True)


def expected(scores: np.ndarray, order: Sequence[str], values: dict[str, float]) -> list[int]:
    """Return the tokens that stay of one row."""
    left = [int(i) for i in np.argsort(-scores, kind="stable") if scores[i] > -math.inf]
    left = left[: int(values.get("top_k", 0)) or None]
    for name in order:
        if (value := values.get(name)) is None:
            continue
        weights = np.exp(scores[left] - scores[left[0]])
        if name == "top_p":
            left = left[: int((np.cumsum(weights) - weights < value * weights.sum()).sum())]
        elif name == "min_p":
            left = [token for token, weight in zip(left, weights, strict=True) if weight >= value]
        else:
            least = scores[left[0]] - value * scores[left].std()
            left = [token for token in left if scores[token] >= least]
    return sorted(left)


ON = {"top_p": 0.8, "min_p": 0.05, "sigmas": 0.9}
SUBSETS = [dict(some) for n in range(4) for some in itertools.combinations(ON.items(), n)]


@pytest.mark.parametrize("order", list(itertools.permutations(ON)), ids="-".join)
def test_filters_in_any_order_keep_the_likeliest_and_their_own(order, monkeypatch):
    block = mx.random.normal((3, 40), key=mx.random.key(2)) * 2
    for keep, top_k, bias in itertools.product((near, naive), (0, 9), (None, {4: -math.inf, 7: -math.inf})):
        kinds = {**FILTERS, "sigmas": Filter(by_scores(keep), 0, 0, 9)}
        monkeypatch.setattr(sampling, "FILTERS", {name: kinds[name] for name in order})
        for values in SUBSETS:
            settings = MoreSampling(1.3, top_k=top_k, logit_bias=bias, **values)
            found = LogitsProcessor(settings, 1, 40).candidates(block, [1], mx.array([], dtype=mx.int32))
            probs = np.array(found.over_vocabulary(found.probs, 0.0, 40))
            assert np.allclose(probs.sum(axis=-1), 1)
            rows = np.array(block, dtype=np.float64) / 1.3
            rows[:, list(bias or ())] = -math.inf
            assert (probs[np.arange(3), rows.argmax(axis=-1)] > 0).all()
            if keep is near:
                kept = [expected(row, order, {**values, "top_k": top_k}) for row in rows]
                assert [np.flatnonzero(row).tolist() for row in probs] == kept


# --- a drafter


class Bigram(Drafter):
    """Drafts the token that followed the last one of the history before."""

    needs = FeatureSpec()

    def observe(self, history: Sequence[int], features: Features) -> None:
        """Do nothing: a draft depends on its history only."""

    def draft(self, history: Sequence[int], limit: int, sampler: Sampler) -> Draft:
        drafted = list[int]()
        for _ in range(limit):
            seen = [*history, *drafted]
            last = len(seen) - 2 - seen[-2::-1].index(seen[-1]) if seen[-1] in seen[:-1] else 0
            drafted.append(seen[last + 1])
        return Draft(mx.array(drafted, dtype=mx.int32))

    @staticmethod
    def open(*arguments: object) -> DrafterSource:
        return DrafterSource("bigram", Bigram.needs, lambda parts: Bigram())


def test_a_family_of_drafters_is_a_file_and_an_entry(monkeypatch, tmp_path):
    file = ModuleType("mlx_spec.drafters.bigram")
    vars(file)["Bigram"] = Bigram
    monkeypatch.setitem(sys.modules, file.__name__, file)
    family = drafter_families.DrafterFamily(
        "bigram",
        ("bigram",),
        "bigram:Bigram",
        "bigram:convert",
        drafter_families.marks("bigram"),
        lambda config, tensors: TargetShape(),
    )
    monkeypatch.setitem(drafter_families.OPENED_AS, "bigram", family)
    (tmp_path / "config.json").write_text('{"model_type": "bigram"}')
    checkpoint = read_checkpoint(tmp_path)
    source = open_drafter(checkpoint, checkpoint.config, {})
    drafted, plain = pair_of(tiny.model_of("full"), source), pair_of(tiny.model_of("full"))
    assert texts(drafted) == texts(plain)
    rounds = list(drafted.generate(tiny.prompt(9), max_tokens=14))
    assert emitted(rounds) == texts(plain)[0] and sum(round.drafted for round in rounds) > 10


# --- a cache


class NarrowCache(AttentionCache):
    """K and V in a type of its own, given back in that of the activations."""

    def __init__(self, columns: Columns, dtype: mx.Dtype) -> None:
        super().__init__(columns)
        self.dtype = self.activations = dtype  # those of a cache without a pass are not known

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.activations = keys.dtype
        self._write([keys.astype(self.dtype), values.astype(self.dtype)])
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        keys, values = super().keys_and_values()
        return keys.astype(self.activations), values.astype(self.activations)

    def rows(self, lane: int, size: int) -> KVRows:
        stored = super().rows(lane, size)
        return KVRows(stored.keys.astype(self.activations), stored.values.astype(self.activations))


def with_narrow(caches: Caches, cache: object) -> LayerCache:
    return NarrowCache(caches._columns_for(None), mx.float16)


def test_a_cache_is_a_class_and_a_line(monkeypatch):
    """Alone, in a batch, and for a sequence that goes on from a saved state."""
    monkeypatch.setattr(Caches, "_with_rollback", with_narrow)
    model, block, together = tiny.full(), mx.array([5, 6]), list[LMTarget]()
    batch = TargetBatch(model, FeatureSpec())
    for length in (9, 21):
        together.append(LMTarget(model))
        together[-1].prefill(tiny.prompt(length))
    alone = list[LMTarget]()
    for target in together:
        alone.append(LMTarget(model))
        alone[-1].restore(target.state())
        batch.join(target)
    expected = mx.concatenate([target.verify(block) for target in alone])
    assert mx.abs(batch.verify(mx.concatenate([block, block]), [2, 2]) - expected).max() < 1e-4
    batch.commit([1, 2])
    batch.leave(0, keep=True)
    kept = {array.dtype for target in (*alone, together[0]) for array in target.state().arrays.values()}
    assert kept == {mx.float16} and together[0].size == 10


@pytest.mark.parametrize("activations", [mx.float32, mx.bfloat16])
def test_what_a_cache_stores_is_not_the_type_of_the_activations(activations, monkeypatch):
    monkeypatch.setattr(Caches, "_with_rollback", with_narrow)
    model = tiny.full()
    model.set_dtype(activations)
    assert check_rows(model, lambda: LMTarget(model)) == activations
    target = LMTarget(model, FeatureSpec(shared_kv=True))
    target.prefill(tiny.prompt(9))
    (read,) = target.shared_kv().values()
    cache = target.caches.attention[0]
    assert isinstance(cache, NarrowCache) and cache.buffers[0].dtype == mx.float16
    assert read.keys.dtype == read.values.dtype == cache.keys_and_values()[0].dtype == activations


def test_kv_bits_name_the_cache_that_they_leave_as_it_is(monkeypatch):
    monkeypatch.setattr(Caches, "_with_rollback", with_narrow)
    caches = Caches.of_model(tiny.smallest(), kv_bits=4)
    obstacle = "this target has full attention with NarrowCache, which stays as it is"
    assert caches.quantization_obstacle == obstacle
    caches.layers.append(AttentionCache(caches._columns_for(None)))
    assert caches.quantization_obstacle == f"{obstacle} like the last of its other layers"
