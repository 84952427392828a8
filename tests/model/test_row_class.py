"""Row classes: measured as the kernels are, wrong ones found, saved once, and limits for passes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import qwen3_moe
from support import tiny
from support.lossless import count_calls
from support.metal import M1, M3, M3_MAX, Chip, metal

from mlx_spec.errors import Mismatch, NotFound
from mlx_spec.model.row_bits import measure_rows
from mlx_spec.model.row_class import RowClass
from mlx_spec.model.target import LMTarget
from mlx_spec.policy import BadCosts, Key, saved_costs
from mlx_spec.types import MAX_DRAFT_TOKENS, FeatureSpec

CLASS = RowClass(2, ((0, 8), (4096, 3)), 12, 1, (1024, 4096), 1.04, None, "a layer", (544, 11))
KEY = Key("Some Chip", "0123456789abcdef", (), "4-bit, groups of 64, activations in bfloat16", None, "1.2.3")


def quantized() -> nn.Module:
    model = tiny.full(hidden_size=192, intermediate_size=256, head_dim=64)
    model.set_dtype(mx.bfloat16)
    nn.quantize(model, 64, 4)
    return model


def experts() -> nn.Module:
    """A Qwen3 MoE, whose experts are layers, too."""
    args = qwen3_moe.ModelArgs(
        model_type="qwen3_moe",
        num_hidden_layers=1,
        num_experts=4,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        moe_intermediate_size=128,
        max_position_embeddings=4096,
        rope_theta=1e4,
        tie_word_embeddings=True,
        norm_topk_prob=True,
        **tiny.SIZES | tiny.EPS | {"hidden_size": 192, "intermediate_size": 256, "head_dim": 64},
    )
    model = qwen3_moe.Model(args)
    model.set_dtype(mx.bfloat16)
    nn.quantize(model, 64, 4)
    return model


def measured(model: nn.Module, chip: Chip, context_length: int | None = None) -> RowClass:
    with metal(chip):
        return measure_rows(model, LMTarget(model), tiny.VOCAB, context_length, outputs=2**14)


@pytest.mark.usefixtures("rules_of_a_cpu")
@pytest.mark.parametrize(
    ("build", "dtype"),
    [
        (lambda: tiny.full(num_hidden_layers=1), mx.float16),
        (lambda: tiny.sliding(num_hidden_layers=2), mx.bfloat16),
        (lambda: tiny.recurrent(num_hidden_layers=2), mx.bfloat16),
    ],
)
def test_half_precision_on_a_cpu_is_one_class(build: Callable[[], nn.Module], dtype: mx.Dtype) -> None:
    model = build()
    model.set_dtype(dtype)
    found = measure_rows(model, LMTarget(model), tiny.VOCAB)
    expected = RowClass(1, ((0, MAX_DRAFT_TOKENS + 1),), MAX_DRAFT_TOKENS + 1)
    assert replace(found, compared=(0, 0)) == expected, found


@pytest.mark.parametrize(("chip", "base"), [(M1, 1), (M3, 2)])
def test_chips_have_their_classes(chip: Chip, base: int, monkeypatch: pytest.MonkeyPatch) -> None:
    passes = count_calls(monkeypatch, "verify", "prefill")
    found = measured(experts(), chip)
    assert (found.base, found.limits, found.shared, found.fewest) == (base, ((0, 8),), 12, 1)
    assert len(passes) <= 30
    assert f"plain decoding runs {base} row" in found.words


@dataclass(frozen=True)
class Wrong(Chip):
    """A chip with one layer that takes another kernel from 6 rows on."""

    def quantized_kernel(self, M: int, N: int, K: int, bits: int = 4, mode: str = "affine") -> str:
        return "matrix" if M >= 6 and K == 256 else super().quantized_kernel(M, N, K, bits, mode)


def test_a_class_that_is_wrong_on_purpose_is_found() -> None:
    found = measured(quantized(), Wrong(13), context_length=512)
    assert found.limits == ((0, 5),) and found.shared == 5
    assert found.differs == "a layer of 256 x 192, 4 bits, in bfloat16 in passes of 6 rows"


def test_attention_limits_rows_by_its_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a Max two passes over 1,024 keys and more deal them by the rows, unless a user fixes the blocks."""
    model = tiny.full(num_hidden_layers=1, num_key_value_heads=1)  # K of 64 and 128: one kernel for all rows
    model.set_dtype(mx.float16)
    nn.quantize(model, 64, 4)
    monkeypatch.delenv("MLX_SDPA_BLOCKS", raising=False)
    assert measured(model, M3_MAX).limits[1][0] == 1024
    monkeypatch.setenv("MLX_SDPA_BLOCKS", "128")
    found = measured(model, M3_MAX)
    assert found.limits == ((0, 8),) and found.edges == (1024,)


def test_limits_follow_the_keys_and_the_edges() -> None:
    """No pass has keys on both sides of an edge, as plain passes of its rows would have."""
    found = {size: CLASS.most_rows(size) for size in (0, 1000, 1014, 1016, 1021, 1022, 1023, 4096)}
    assert found == {0: 8, 1000: 8, 1014: 8, 1016: 6, 1021: 1, 1022: 1, 1023: 8, 4096: 3}
    for size in range(1000, 1030):
        plain = {size + row + CLASS.base >= 1024 for row in range(CLASS.most_rows(size))}
        assert len(plain) == 1, f"a pass after {size} tokens"
    assert RowClass(doubt="it differs").most_rows(5) == MAX_DRAFT_TOKENS + 1


def test_limits_of_batches() -> None:
    assert [CLASS.most_shared([100] * count) for count in (1, 2, 3, 4, 12, 13)] == [8, 6, 4, 3, 1, 0]
    assert CLASS.most_shared([100, 5000]) == 0  # one of them has other keys than the pass
    assert CLASS.most_shared([1000, 1030]) == 0
    assert replace(CLASS, fewest=2).most_shared([100] * 7) == 0
    assert replace(CLASS, shared=0).most_shared([100, 101]) == 0


def test_a_saved_class_is_read_and_dropped_with_its_version(tmp_path: Path) -> None:
    file = tmp_path / saved_costs.file_name(KEY)
    saved_costs.write_rows(file, KEY, CLASS)
    assert saved_costs.read_rows(file, KEY) == CLASS
    with pytest.raises(Mismatch, match=r"mlx 1.2.3, here it is 1.2.4"):
        saved_costs.read_rows(file, replace(KEY, mlx="1.2.4"))
    changed = replace(KEY, code=saved_costs.computing_code())  # such as a cache that writes other bits
    assert saved_costs.file_name(changed) == file.name
    with pytest.raises(Mismatch, match=rf"code none, here it is {changed.code}"):
        saved_costs.read_rows(file, changed)
    with pytest.raises(NotFound):
        saved_costs.read_rows(tmp_path / "none", KEY)


@pytest.mark.parametrize(
    "wrong",
    [{"base": 3}, {"limits": [[8, 8]]}, {"limits": []}, {"cost": 0.5}, {"edges": "x"}, {"doubt": "why"}],
)
def test_a_damaged_class_is_not_used(tmp_path: Path, wrong: dict[str, object]) -> None:
    saved_costs.write_rows(tmp_path / "file", KEY, CLASS)
    content = json.loads((tmp_path / "file").read_text())
    content["rows"] |= wrong
    (tmp_path / "file").write_text(json.dumps(content))
    with pytest.raises(BadCosts, match="row class"):
        saved_costs.read_rows(tmp_path / "file", KEY)


@pytest.mark.parametrize("build", [tiny.full, lambda: tiny.sliding(), lambda: tiny.shared()])
def test_a_padded_pass_is_a_pass_of_one_row(build: Callable[[], nn.Module]) -> None:
    """The second row leaves no trace in logits, features and caches, also after several passes."""
    model, needs = build(), FeatureSpec(hidden_layers=(0,), final_hidden=True)
    padded = LMTarget(model, needs, rows=RowClass(base=2, limits=((0, 8),), shared=12))
    plain = LMTarget(model, needs)
    for target in (padded, plain):
        target.prefill(tiny.prompt(20))
    for block in ([3], [4, 5, 6], [7], [8]):
        found, expected = (target.verify(mx.array(block)) for target in (padded, plain))
        assert found.shape == expected.shape and mx.allclose(found, expected, atol=1e-4)
        if block != [7]:  # else the next pass adds to it, as when a token is queued
            ours, theirs = (target.commit(target.uncommitted) for target in (padded, plain))
            assert ours.final_hidden.shape == theirs.final_hidden.shape
            assert mx.allclose(ours.final_hidden, theirs.final_hidden, atol=1e-4)
            assert mx.allclose(ours.hidden[0], theirs.hidden[0], atol=1e-4)
    assert padded.size == plain.size == padded.caches.sizes[0]
    assert padded.rewind(22) == plain.rewind(22)
    assert mx.allclose(padded.verify(mx.array([9])), plain.verify(mx.array([9])), atol=1e-4)


@pytest.mark.parametrize("chip", [M1, M3])
def test_a_recurrent_target_without_a_class_is_named(chip: Chip) -> None:
    """A pass of two rows would write its second row to the state, so plain passes have one."""
    model = tiny.recurrent()
    model.set_dtype(mx.bfloat16)
    found = measured(model, chip)
    assert not found.limits and "its state is recurrent" in found.words
    nn.quantize(model, 64, 4)  # layers of 64 take one kernel for all rows
    assert measured(model, chip).limits == ((0, 8),)


def test_choices_of_exactness() -> None:
    dear, none = replace(CLASS, cost=1.2), RowClass(doubt="it differs", differs="a layer")
    assert CLASS.under("auto") == replace(CLASS.under("on"), is_required=False) == CLASS
    assert dear.under("on") == replace(dear, is_required=True) and "20% longer" in str(
        dear.under("auto").doubt
    )
    assert none.under("auto") == none and none.under("on").most_rows(5) == 1
    for rows in (CLASS, dear, none):
        assert rows.under("off") == RowClass(doubt="--exact off")
    assert none.words == "NO: it differs (a layer)"
    assert CLASS.words.startswith(
        "plain decoding runs 2 rows a pass; 0 of 544 rows and 0 of 11 layers differ"
    )
