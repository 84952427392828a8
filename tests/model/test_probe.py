"""The check at load: passes of several rows equal single passes, at all lengths that matter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from support import pairs, tiny

from mlx_spec.checkpoint.config import critical_lengths
from mlx_spec.load import load
from mlx_spec.model.probe import check_rows
from mlx_spec.model.target import LMTarget
from mlx_spec.model.target_batch import probe_batch
from mlx_spec.pair import Pair

LONGEST = 32
DYNAMIC = {"type": "dynamic", "rope_type": "dynamic", "factor": 4.0}


@pytest.mark.parametrize("kind", pairs.KINDS)
def test_other_models_pass_at_every_length(kind: str) -> None:
    model = tiny.model_of(kind)
    check_rows(model, lambda: LMTarget(model, kv_bits=tiny.bits_of(kind)), [20, 127, 2040, 131_072])


def test_lengths_are_checked_by_one_layer_of_each_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights of other layers do not change what depends on the length, and take most of the time."""
    model = tiny.make("llama, no windows")
    calls, call = list[int](), type(model.layers[0]).__call__

    def spy(layer: Any, *arguments: Any, **options: Any) -> mx.array:
        calls.append(1)
        out: mx.array = call(layer, *arguments, **options)
        return out

    monkeypatch.setattr(type(model.layers[0]), "__call__", spy)
    counts = []
    for lengths in ([], [100], [100, 1000]):
        check_rows(model, lambda: LMTarget(model), lengths)
        counts.append(len(calls))
        calls.clear()
    assert [count - counts[0] for count in counts] == [0, 3, 6]  # of 12 and 24 with all layers
    assert len(model.layers) == 4


def test_a_scratch_sequence_far_in_a_text_has_its_positions() -> None:
    """Each row is rotated by its position, so the logits of the same rows change with it."""
    model = tiny.make("llama, no windows")
    found = []
    for size in (40, 40, 1000):
        target = LMTarget(model)
        target.prefill([1, 2, 3])
        target.move_to(size)
        found.append(target.verify(mx.array([4, 5])))
        assert target.size == size
    assert mx.array_equal(found[0], found[1]) and not mx.allclose(found[0], found[2], atol=1e-3)


def test_the_lengths_are_the_context_and_what_a_rope_names() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
    assert critical_lengths({"max_position_embeddings": 8192}) == [8192]
    assert critical_lengths({"max_position_embeddings": 40_960, "rope_scaling": yarn}) == [
        32_769,
        40_961,
        131_072,
    ]
    assert critical_lengths({}) == []


def test_a_checkpoint_is_checked_at_other_lengths_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[list[int]] = []
    check = Pair.check

    def spy(pair: Pair, lengths: Any = ()) -> mx.Dtype:
        checked.append(list(lengths))
        return check(pair, lengths)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(Pair, "check", spy)
    folder = pairs.save(tiny.make("llama"), tmp_path / "target")
    for drafter in ("none", "none", "lookup"):
        load(folder, drafter, num_draft_tokens=0)
    assert checked == [[2048], [], [2048]]


def test_a_state_that_grows_with_the_first_tokens_keeps_sequences_apart() -> None:
    """The n-grams of LongCat: a prompt of two tokens could not join the others."""
    obstacle = probe_batch(tiny.make("longcat_flash_ngram")).obstacle
    assert obstacle is not None and "concatenate" in obstacle
