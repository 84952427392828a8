"""EAGLE-3 against an independent construction, at work with its target, and at the door."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import chi_square
import drafting
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import random_sources
import test_law
from drafting import K, drafted, fresh, largest, rows
from lossless import GREEDY, Scripted, emitted, rounds
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model
from one_pass_law import seeded_texts

from mlx_spec.drafters import open_drafter
from mlx_spec.drafters.checkpoint import own_parts
from mlx_spec.drafters.conditioned import MAX_WAITING, ChainDrafter, NetworkSource, Rows
from mlx_spec.engine import generate
from mlx_spec.errors import BadCheckpoint, Mismatch
from mlx_spec.policy import Fixed
from mlx_spec.sampling import Sampling
from mlx_spec.target import LMTarget
from mlx_spec.types import Draft, Features, FeatureSpec, Sampler

GOLDEN = Path(__file__).parents[1] / "golden" / "eagle3"
TARGET, TRAINED = GOLDEN / "llama", GOLDEN.parent / "trained"
NAMES = ("official", "speculators")
FACTS = json.loads((GOLDEN / "golden.json").read_text())
HISTORY, IDS = FACTS["history"], mx.array(FACTS["draft_ids"])
V = 96
TOLERANCE = 1e-5
Open = Callable[..., NetworkSource]


@cache
def target_model() -> nn.Module:
    model, _ = load_model(TARGET)
    model.set_dtype(mx.float32)
    return model


@cache
def golden() -> dict[str, mx.array]:
    tensors = mx.load(str(GOLDEN / "golden.safetensors"))
    assert isinstance(tensors, dict)
    return tensors


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Open:
    """Opens a golden drafter, with other conventions where they are given."""

    def source(name: str, **conventions: Any) -> NetworkSource:
        folder = tmp_path_factory.mktemp(name) / "drafter"
        return drafting.open_converted(GOLDEN / name, TARGET, folder, **conventions)

    return source


@cache
def seen_by(capture: tuple[int, ...]) -> Features:
    """What the target computes of the whole history."""
    return LMTarget(target_model(), FeatureSpec(capture)).prefill(HISTORY)


def errors(source: NetworkSource, name: str, chunks: Sequence[int] = ()) -> list[list[float]]:
    """Of each draft token's logits, by round."""
    found = drafting.in_rounds(target_model(), source, FACTS, chunks)
    return [
        [largest(ours[IDS], theirs) for ours, theirs in zip(one.logits, golden()[f"{name}.{i}"], strict=True)]
        for i, one in enumerate(found)
    ]


# --- the same numbers as an independent construction


def test_captured_layers() -> None:
    features = seen_by((1, 3, 4))
    assert largest(mx.concatenate(features.hidden, axis=-1), golden()["features"]) < TOLERANCE


@pytest.mark.parametrize("chunks", [(20,), (1, 7, 12)])
@pytest.mark.parametrize("name", NAMES)
def test_drafts_of_six_rounds(opened: Open, name: str, chunks: tuple[int, ...]) -> None:
    """3, 1, 5, 2 and 4 tokens are kept of rounds that draft 4."""
    source = opened(name)
    assert max(map(max, errors(source, name, chunks))) < TOLERANCE
    for found, expected in zip(
        drafting.in_rounds(target_model(), source, FACTS), FACTS["drafts"][name], strict=True
    ):
        assert found.tokens == expected
        assert found.logits.shape == (K, V)
        others = mx.array([i for i in range(V) if i not in FACTS["draft_ids"]])
        assert mx.all(found.logits[:, others] == -mx.inf)


@pytest.mark.parametrize("name", NAMES)
def test_drafts_as_mlx_vlm_computes_them(opened: Open, name: str) -> None:
    theirs = mx.load(str(GOLDEN / "mlx_vlm.safetensors"))
    for i, seen in enumerate(drafting.in_rounds(target_model(), opened(name), FACTS)):
        assert largest(seen.logits[:, IDS], theirs[f"{name}.{i}"]) < TOLERANCE


WRONG = {
    "a layer too early": {"capture": [0, 2, 3]},
    "a layer too late": {"capture": [2, 4, 5]},
    "hidden before embedding": {"fc_order": ["hidden", "embedding"]},
    "1 in the norms twice": {"norm_offset": 1},
    "the drafter's own rope": {"rope": "own"},
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("name", NAMES)
def test_wrong_conventions_change_every_token(opened: Open, name: str, wrong: str) -> None:
    found = errors(opened(name, **WRONG[wrong]), name)
    assert min(map(max, found)) > 100 * TOLERANCE


@pytest.mark.parametrize("wrong", [{"chain": "post_norm"}, {"position_offset": -1}])
def test_wrong_chaining_changes_all_but_the_first(opened: Open, wrong: dict[str, Any]) -> None:
    for first, *rest in errors(opened("official", **wrong), "official"):
        assert first < TOLERANCE and max(rest) > 100 * TOLERANCE


def test_offsets_taken_for_ids_draft_other_tokens(opened: Open) -> None:
    source = opened("official")
    offsets = source.network.draft_ids - mx.arange(40)
    assert not mx.array_equal(offsets, source.network.draft_ids)
    assert mx.array_equal(source.network.draft_ids, IDS)
    assert {0, V - 1} <= set(FACTS["draft_ids"])  # both ends of the vocabulary can be drafted
    source.network.draft_ids = offsets
    found = [seen.tokens for seen in drafting.in_rounds(target_model(), source, FACTS)]
    assert all(a != b for a, b in zip(found, FACTS["drafts"]["official"], strict=True))


def test_features_of_the_next_position_change_the_draft(opened: Open) -> None:
    source, features = opened("official"), seen_by((1, 3, 4))
    target = LMTarget(target_model(), source.needs)
    drafter = source.make(target.parts)
    drafter.observe(HISTORY[:21], rows(features, 1, 21))
    assert largest(drafted(drafter, HISTORY[:21]).logits[0][IDS], golden()["official.0"][0]) > 100 * TOLERANCE


def test_a_pair_that_is_missing_at_a_border_changes_the_draft(opened: Open) -> None:
    source, features = opened("official"), seen_by((1, 3, 4))
    drafter = fresh(source, LMTarget(target_model(), source.needs), HISTORY[:12], features)
    drafter.observe(HISTORY[:21], rows(features, 12, 20))
    assert largest(drafted(drafter, HISTORY[:21]).logits[0][IDS], golden()["official.0"][0]) > 100 * TOLERANCE


# --- its state


def test_rows_of_its_own_do_not_stay(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a draft wrote behind the newest row would change every round but the first."""
    source = opened("official")
    monkeypatch.setattr(Rows, "cut", lambda self, size, position: None)
    first, *rest = map(max, errors(source, "official"))
    assert first < TOLERANCE and min(rest) > 100 * TOLERANCE


def test_after_any_round_it_is_as_good_as_new(opened: Open) -> None:
    source, features = opened("official"), seen_by((1, 3, 4))
    target = LMTarget(target_model(), source.needs)
    drafter, end = fresh(source, target, HISTORY[:12], features), 12
    for kept in (5, 2, 1, 5, 2, 1, 4):
        drafted(drafter, HISTORY[:end])
        end += kept
        drafter.observe(HISTORY[:end], rows(features, end - 1 - kept, end - 1))
        ours = drafted(drafter, HISTORY[:end])
        theirs = drafted(fresh(source, target, HISTORY[:end], features), HISTORY[:end])
        assert ours.tokens == theirs.tokens
        assert largest(ours.logits[:, IDS], theirs.logits[:, IDS]) < TOLERANCE
        assert mx.array_equal(ours.logits, drafted(drafter, HISTORY[:end]).logits)  # and again


def test_rows_that_wait_are_written_in_time(opened: Open) -> None:
    """Plain decoding for longer than the backlog, one row at a time; then a draft."""
    source, long = opened("official"), (HISTORY * 8)[: 2 * MAX_WAITING + 9]
    target = LMTarget(target_model(), source.needs)
    features = target.prefill(long)
    drafter = fresh(source, target, long[:3], features)
    for end in range(4, len(long) + 1):
        drafter.observe(long[:end], rows(features, end - 2, end - 1))
    ours = drafted(drafter, long)
    theirs = drafted(fresh(source, target, long, features), long)
    assert ours.tokens == theirs.tokens and largest(ours.logits[:, IDS], theirs.logits[:, IDS]) < TOLERANCE


def test_positions_beyond_those_of_its_config(opened: Open) -> None:
    """Only the last rows are known, far behind position 2048: the same as at the start, in numbers."""
    source, features = opened("official"), seen_by((1, 3, 4))
    target = LMTarget(target_model(), source.needs)
    far = [7] * 3000 + HISTORY
    drafter = source.make(target.parts)
    drafter.observe(far, rows(features, 0, len(HISTORY) - 1))
    near = drafted(fresh(source, target, HISTORY, features), HISTORY)
    assert largest(drafted(drafter, far).logits[:, IDS], near.logits[:, IDS]) < 100 * TOLERANCE


def test_another_end_of_a_known_prefix(opened: Open) -> None:
    """What was read with the token that changed is gone; everything before it stays."""
    source = opened("official")
    target = LMTarget(target_model(), source.needs)
    first = target.prefill(HISTORY[:20])
    drafter = fresh(source, target, HISTORY[:21], first)
    drafted(drafter, HISTORY[:21])
    other = [*HISTORY[:12], *[(token + 1) % V for token in HISTORY[12:21]]]
    assert target.rewind(12) == 12
    second = target.prefill(other[12:-1])
    drafter.observe(other, second)
    ours = drafted(drafter, other).logits
    expected = source.make(target.parts)
    expected.observe(HISTORY[:12], rows(first, 0, 11))
    expected.observe(other, second)
    assert mx.array_equal(ours, drafted(expected, other).logits)
    stale = source.make(target.parts)
    stale.observe(HISTORY[:13], rows(first, 0, 12))
    stale.observe([*HISTORY[:13], *other[13:]], second)
    assert not mx.array_equal(ours, drafted(stale, [*HISTORY[:13], *other[13:]]).logits)


def test_the_same_end_of_a_known_prefix(opened: Open) -> None:
    source = opened("official")
    target = LMTarget(target_model(), source.needs)
    drafter = source.make(target.parts)
    drafter.observe(HISTORY[:21], target.prefill(HISTORY[:20]))
    target.rewind(12)
    drafter.observe(HISTORY, target.prefill(HISTORY[12:-1]))
    whole = fresh(source, target, HISTORY, seen_by((1, 3, 4)))
    assert (
        largest(drafted(drafter, HISTORY).logits[:, IDS], drafted(whole, HISTORY).logits[:, IDS]) < TOLERANCE
    )


def test_no_draft_without_the_features_of_this_history(opened: Open) -> None:
    source, features = opened("speculators"), seen_by((1, 3, 4))
    target, sampler = LMTarget(target_model(), source.needs), GREEDY.sampler(1, V)
    drafter = source.make(target.parts)
    assert drafter.draft(HISTORY[:1], 3, sampler).tokens.size == 0
    drafter.observe(HISTORY[:9], rows(features, 0, 8))
    assert drafter.draft(HISTORY[:9], 3, sampler).tokens.size == 3
    assert drafter.draft(HISTORY[:9], 0, sampler).tokens.size == 0
    assert drafter.draft(HISTORY[:8], 3, sampler).tokens.size == 0
    assert drafter.draft(HISTORY[:10], 3, sampler).tokens.size == 0
    assert drafter.draft([*HISTORY[:8], HISTORY[8] + 1], 3, sampler).tokens.size == 0


# --- at work


LAW_IDS = (1, 2, 4, 7)  # half of the eight tokens
GENERATIONS = 400


class Liar(ChainDrafter):
    """Drafts the likeliest tokens and says that they were drawn."""

    def draft(self, history: Sequence[int], limit: int, sampler: Sampler) -> Draft:
        return super().draft(history, limit, test_law.Liar())


def law_excess(
    sampling: Sampling, sampler: Callable[[int], Sampler], count: int, *, lying: bool = False
) -> float:
    """Chi-square of the tokens of many generations over its quantile: above 1 is a rejection."""
    source = random_sources.eagle3(16, test_law.V, LAW_IDS, (0,))
    weights, prompt, tokens = test_law.model(), test_law.PROMPT, test_law.COUNT
    target, counts = LMTarget(weights, source.needs), np.zeros((test_law.V,) * tokens)
    drafter = source.make(target.parts)
    if lying:
        parts = own_parts(source.network, target.parts, test_law.V)
        drafter = Liar(source.network, parts, source.needs)
    for i in range(count):
        target.rewind(len(prompt) - 2)
        done = list(generate(target, [drafter], Fixed(tokens - 1), sampler(i), prompt, max_tokens=tokens))
        assert done[0].drafted == tokens - 1
        counts[tuple(emitted(done))] += 1
    return chi_square.excess(counts, test_law.exact(weights, sampling))


def test_sampled_drafts_of_a_reduced_vocabulary_keep_the_law() -> None:
    sampling = test_law.PLAIN
    assert law_excess(sampling, test_law.unseeded(sampling), GENERATIONS) < 1


def test_seeded_drafts_of_a_reduced_vocabulary_keep_the_law() -> None:
    sampling = test_law.FILTERED
    assert law_excess(sampling, test_law.seeded(sampling), GENERATIONS) < 1


def test_argmax_posing_as_sampled_is_caught() -> None:
    sampling = test_law.PLAIN
    assert law_excess(sampling, test_law.unseeded(sampling), GENERATIONS, lying=True) > 1


def test_seeded_text_is_the_same_without() -> None:
    with_drafter, without = seeded_texts(random_sources.eagle3(16, test_law.V, LAW_IDS, (0,)))
    assert with_drafter == without


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_draws_with_chance_leave_their_law(opened: Open, dtype: mx.Dtype) -> None:
    """Also in half precision, where tokens outside the reduced vocabulary have logits of -inf."""
    source, features = opened("official"), seen_by((1, 3, 4))
    source.network.set_dtype(dtype)
    drafter = fresh(source, LMTarget(target_model(), source.needs), HISTORY, features)
    draft = drafter.draft(HISTORY, 3, Sampling(temperature=1.0).sampler(1, V))
    assert draft.probs is not None and draft.probs.shape == (3, V)
    assert largest(draft.probs.sum(axis=-1), mx.ones(3)) < 1e-5
    assert ((draft.probs > 0).sum(axis=-1) <= 40).all()
    assert mx.take_along_axis(draft.probs, draft.tokens[:, None], axis=-1).min().item() > 0


def test_the_target_says_tokens_that_the_drafter_does_not_know(opened: Open) -> None:
    source = opened("official")
    target = LMTarget(target_model(), source.needs)
    done = emitted(rounds(target, source.make(target.parts), 3, HISTORY[:21], 15, V))
    plain = emitted(rounds(LMTarget(target_model()), Scripted([]), 0, HISTORY[:21], 15, V))
    assert done == plain == HISTORY[21:]
    assert set(done) - set(FACTS["draft_ids"])


@pytest.mark.parametrize("bits", [4, 8])
def test_quantized(opened: Open, tmp_path: Path, bits: int) -> None:
    folder = drafting.write_converted(GOLDEN / "official", TARGET, tmp_path / "drafter")
    network = opened("official").network

    def chosen(path: str, layer: nn.Module) -> bool:
        return isinstance(layer, nn.Linear) and path != "fc" and layer.weight.shape[-1] % 32 == 0

    nn.quantize(network, 32, bits, class_predicate=chosen)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(network.parameters())))
    source = open_drafter(folder, drafting.read(folder), drafting.read(TARGET))
    layers = dict(source.network.named_modules())
    assert isinstance(layers["lm_head"], nn.QuantizedLinear) and isinstance(layers["fc"], nn.Linear)
    target = LMTarget(target_model(), source.needs)
    done = rounds(target, source.make(target.parts), 3, HISTORY[:21], 15, V)
    assert emitted(done) == HISTORY[21:]


def test_trained_pair_converted_loaded_and_at_work(tmp_path: Path) -> None:
    manifest = drafting.prove(TRAINED / "llama", str(TRAINED / "eagle3"), tmp_path / "out")
    part, proof = manifest["parts"]["drafter"], manifest["self_test"]
    assert part["family"] == "eagle3" and part["runnable"] and proof["result"] == "passed"
    assert proof["acceptance"]["length"] > 2
    drafting.check_acceptance(drafting.generate_with(tmp_path / "out"))


# --- at the door


def refused(folder: Path, kind: type[Exception], target: dict[str, Any] | None = None, **changes: Any) -> str:
    config = {**drafting.read(folder), **changes}
    with pytest.raises(kind) as caught:
        open_drafter(folder, config, target or drafting.read(TARGET))
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_refusals(tmp_path: Path) -> None:
    folder = drafting.write_converted(GOLDEN / "official", TARGET, tmp_path / "drafter")
    config, theirs = drafting.read(folder), drafting.read(TARGET)
    text = refused(folder, Mismatch, {**theirs, "hidden_size": 48})
    assert "hidden size 32" in text and "48" in text
    assert "num hidden layers 8" in refused(folder, Mismatch, {**theirs, "num_hidden_layers": 9})

    def recorded(**changes: Any) -> dict[str, Any]:
        return {**config["mlx_spec"], **changes}

    assert "[1, 3, 8]" in refused(folder, Mismatch, mlx_spec=recorded(capture=[1, 3, 8]))
    assert "[1, 3, 3]" in refused(folder, Mismatch, mlx_spec=recorded(capture=[1, 3, 3]))
    assert "[-1, 3, 4]" in refused(folder, Mismatch, mlx_spec=recorded(capture=[-1, 3, 4]))
    assert "shift 0" in refused(folder, BadCheckpoint, mlx_spec=recorded(shift=0))
    assert "has no 'mlx_spec'" in refused(folder, BadCheckpoint, mlx_spec=None)
    layer = config["layer_config"]
    assert "'gelu'" in refused(folder, BadCheckpoint, layer_config={**layer, "hidden_act": "gelu"})
    tensors = mx.load(str(folder / "model.safetensors"))
    assert isinstance(tensors, dict)
    without = {name: tensor for name, tensor in tensors.items() if name != "draft_ids"}
    mx.save_safetensors(str(folder / "model.safetensors"), without)
    assert "40 of the target's 96" in refused(folder, BadCheckpoint)
