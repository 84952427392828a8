"""The self-test of a conversion: passes what is right, and says what is wrong with what is not."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import mlx.core as mx
import pytest
from mlx_lm.models.gemma4 import Model as Gemma4
from support.checkpoints import edit_config, edit_tensors
from support.drafting import GOLDEN, SHORT, UNCOMPARED
from support.golden_pairs import converted, refusal

import mlx_spec
from mlx_spec.apps.selftest import Effort
from mlx_spec.checkpoint.config import read_checkpoint
from mlx_spec.cli.lossless import allowed_roundings, logits_gap
from mlx_spec.cli.progress import StageProgress
from mlx_spec.convert.command import run_conversion
from mlx_spec.convert.converted import convert_model
from mlx_spec.convert.options import ConversionOptions
from mlx_spec.convert.plan import Conversion, ConversionPlan, Quantization, open_source
from mlx_spec.convert.selftest import SelfTestFailed, compare, self_test
from mlx_spec.errors import BadCheckpoint
from mlx_spec.model.caches import Caches

QUIET = StageProgress(io.StringIO())
PAIR = "12b-trained"


def proved(pair: str | Path, out: Path, **changes: Any) -> dict[str, Any]:
    return dict(converted(pair, out, skip_test=False, **changes)["self_test"])


# --- what is right passes


def test_unquantized(tmp_path: Path) -> None:
    found = proved("26b-trained", tmp_path / "out")
    assert found["result"] == "passed"
    assert found["logits"] == {"difference": 0.0, "tolerance": 1e-4}
    assert found["perplexity"]["ratio"] == 1.0
    for part in found["tensors"].values():
        assert part["equal"] > 40 and part["quantized"] == 0
    acceptance = found["acceptance"]
    assert acceptance["first"] == pytest.approx(acceptance["first_before"], abs=0.05)
    assert acceptance["first"] > acceptance["floor"] > acceptance["chance"]
    assert found["lossless"]["ended_in_a_tie"] == 0 and found["lossless"]["tokens"] > 15


def test_target_alone(tmp_path: Path) -> None:
    out = tmp_path / "out"
    found = proved(PAIR, out, drafter="none", dtype="float16")
    assert found.keys() == {"result", "tensors", "logits", "perplexity"}
    assert {path.name for path in out.iterdir()} == {"target", "pair.json"}
    assert mlx_spec.load(out, num_draft_tokens=1).info.drafter == "lookup"
    assert 0 < found["logits"]["difference"] < found["logits"]["tolerance"] == 0.5


def test_quantized(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, out = GOLDEN / PAIR, tmp_path / "out"
    assistant = str(folder / "assistant")
    asked = ConversionOptions(str(folder / "target"), out, assistant, drafter_bits="8")
    assert run_conversion(asked, SHORT) == 0
    found = json.loads((out / "pair.json").read_text())["self_test"]
    target, drafter = found["tensors"]["target"], found["tensors"]["drafter"]
    assert target["quantized"] > 0 and 0.05 < target["error"] < 0.15 and drafter["error"] < 0.02
    assert found["logits"]["difference"] > 0.1 and found["logits"]["tolerance"] is None
    acceptance = found["acceptance"]
    assert acceptance["first_before"] > 0.5 and acceptance["first"] > 0.3
    expected = 100 * (1 - acceptance["first"] / acceptance["first_before"])
    assert acceptance["loss_percent"] == pytest.approx(expected)
    assert {path.name for path in out.iterdir()} == {"target", "drafter", "pair.json"}
    assert mlx_spec.load(out, num_draft_tokens=1).info.drafter_bytes > 0
    shown = capsys.readouterr()
    assert (
        f"loss {expected:.1f} %" in shown.out and "text with the drafter is the target's own on " in shown.out
    )
    assert "self-test: passed; perplexity" in shown.out
    assert len(shown.err.splitlines()) < 15 and "\r" not in shown.err


def test_a_drafter_with_a_rotary_base_of_its_own_is_measured_with_both(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Some published heads state another base than they were trained with."""
    trained = GOLDEN / "trained"
    drafter, out = Path(shutil.copytree(trained / "eagle3", tmp_path / "drafter")), tmp_path / "out"
    edit_config(drafter, lambda config: config.update(rope_theta=3.0))
    asked = ConversionOptions(str(trained / "llama"), out, str(drafter), "none", None, "none", "float32")
    assert run_conversion(asked, UNCOMPARED) == 0
    acceptance = json.loads((out / "pair.json").read_text())["self_test"]["acceptance"]
    assert acceptance["first"] < acceptance["first_with_rope_of_target"]
    shown = capsys.readouterr()
    assert "default, base 3; the target has default, base 10000" in shown.out
    assert '"rope": "target" in its config.json' in shown.out


# --- what is wrong is named


def test_a_damaged_drafter(tmp_path: Path) -> None:
    def swap_inputs(tensors: dict[str, mx.array]) -> None:
        left, right = mx.split(tensors["pre_projection.weight"], 2, axis=-1)
        tensors["pre_projection.weight"] = mx.concatenate([right, left], axis=-1)

    source = Path(shutil.copytree(GOLDEN / PAIR, tmp_path / "source"))
    edit_tensors(source / "assistant", swap_inputs)
    changes = {"skip_test": False, "drafter_bits": "8", "effort": UNCOMPARED}
    text = refusal(source, tmp_path / "out", SelfTestFailed, **changes)
    assert "likely the drafter of another target" in text and "--no-self-test" in text


# --- each check, on its own


def test_not_finite(tmp_path: Path) -> None:
    source, out = Path(shutil.copytree(GOLDEN / PAIR, tmp_path / "source")), tmp_path / "out"
    name = "model.language_model.layers.1.mlp.up_proj.weight"
    edit_tensors(source / "target", lambda tensors: tensors.update({name: tensors[name] * 1e6}))
    with pytest.raises(BadCheckpoint, match=r"up_proj\.weight in target is not finite.*--dtype"):
        proved(source, out, drafter="none", dtype="float16")


def test_a_model_that_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some models of mlx-lm cannot be quantized although it quantizes them."""
    monkeypatch.setattr(Gemma4, "__call__", Mock(side_effect=ValueError("[matmul] odd\nshapes")))
    text = refusal(PAIR, tmp_path / "out", SelfTestFailed, skip_test=False, drafter="none")
    assert text.startswith("the first pass of target fails ([matmul] odd shapes): ")


def plan(folder: Path, quantization: Quantization | None = None) -> ConversionPlan:
    target = open_source(str(GOLDEN / PAIR / "target"))
    return ConversionPlan(folder, Conversion(target, quantization=quantization))


STEM = "language_model.model.layers.1.mlp.up_proj."


@pytest.mark.parametrize(
    ("bits", "edited", "edit", "named"),
    [
        ("none", "weight", lambda array: array * 1.01, "weight"),
        ("8", "scales", lambda array: -array, "weight"),
        ("none", "weight", lambda array: array.astype(mx.float32), "weight"),  # the same values
        ("none", "more", lambda array: mx.zeros(1), "more"),
    ],
    ids=["changed", "scales", "type", "more"],
)
def test_files_that_are_not_the_source(
    bits: str, edited: str, edit: Callable[[Any], mx.array], named: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    converted(PAIR, out, drafter="none", quantization=bits, dtype=None)
    edit_tensors(
        out / "target", lambda tensors: tensors.update({STEM + edited: edit(tensors.get(STEM + edited))})
    )
    expected = convert_model(Conversion(open_source(str(GOLDEN / PAIR / "target")))).tensors
    with pytest.raises(BadCheckpoint, match=STEM + named):
        compare(read_checkpoint(out / "target"), expected, QUIET)


def test_other_logits(tmp_path: Path) -> None:
    """Right tensors under a wrong config: only the logits can tell."""
    out = tmp_path / "out"
    converted(PAIR, out, drafter="none", dtype=None)
    edit_config(out / "target", lambda config: config["text_config"].update(sliding_window=4))
    with pytest.raises(SelfTestFailed, match="logits of the converted target differ"):
        self_test(plan(out), QUIET, SHORT)


def test_perplexity(tmp_path: Path) -> None:
    out = tmp_path / "out"
    ratio = proved(PAIR, out, drafter="none", quantization="8", dtype=None)["perplexity"]["ratio"]
    assert 0.9 < ratio < 1.1
    strict = replace(SHORT, max_perplexity_ratio=ratio - 0.01)
    with pytest.raises(SelfTestFailed, match=r"perplexity of the converted target is .* use more bits"):
        self_test(plan(out, Quantization(8, 64)), QUIET, strict)


def test_text_that_is_not_the_targets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = Caches.commit

    def keep_more(self: Caches, keep: list[int]) -> None:
        commit(self, [min(keep[0] + 1, self.uncommitted)] if len(keep) == 1 else keep)

    monkeypatch.setattr(Caches, "commit", keep_more)
    # The first prompt alone does not show it.
    whole = replace(SHORT, prompts=SHORT.prompts[:1], generated=2, comparison=Effort(10.0, 1, 8))
    with pytest.raises(SelfTestFailed, match=r"^FAILED: .*: nothing was written"):
        proved(PAIR, tmp_path / "out", effort=whole)


def test_a_near_tie_is_what_rounding_explains() -> None:
    """The doctor and the conversion have this rule."""
    row = mx.array([17.0, 16.875, 3.0]).astype(mx.bfloat16)  # neighbours in bfloat16
    one = logits_gap(row, row[mx.array([1, 0, 2])])
    assert one.roundings == 1.0 and one.within(allowed_roundings(None))
    three = replace(one, logits=3 * one.logits)
    assert not three.within(allowed_roundings(None)) and three.within(allowed_roundings(one))
    assert not replace(one, logits=9 * one.logits).within(allowed_roundings(three))
    assert not replace(one, logits=float("nan")).within(allowed_roundings(one))
