"""The doctor finds nothing on the demo pair, and finds caches that are rolled back wrongly."""

from __future__ import annotations

import io
import json
import os
import socket
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from huggingface_hub import constants
from support import mac
from support.spans import pair_of

import mlx_spec
from mlx_spec import demo
from mlx_spec.apps import doctor
from mlx_spec.apps.doctor import (
    WIDTH,
    Check,
    Examination,
    all_checks,
    certificate,
    main,
    part_in_words,
    version,
)
from mlx_spec.apps.selftest import (
    ADAPTIVE,
    BATCHED,
    OWN,
    SPOILED,
    Comparison,
    Divergence,
    Effort,
    SelfTest,
    self_test,
)
from mlx_spec.cli.lossless import Gap
from mlx_spec.cli.progress import StageProgress
from mlx_spec.model.caches import Caches
from mlx_spec.pair import Pair

# A slow machine is not a reason to leave something out.
PATIENT = Effort(seconds=600.0, questions=1, tokens=5)
EQUAL = Comparison("Why?", OWN, False, 24, 20, 18)


def gap(logits: float) -> Gap:
    """Return a gap of bfloat16 logits between 16 and 32."""
    return Gap(logits, 0.125, "bfloat16", 8)


GOOD = SelfTest([EQUAL], seconds=1.0)
NOW = datetime(2026, 11, 21, 16, 5, tzinfo=UTC)


@pytest.fixture(scope="module")
def report(pair: Pair) -> dict[str, Any]:
    """Return what `mlx-spec doctor --json` says of the demo pair."""
    examination = Examination(list(all_checks()), *doctor.tested(pair, PATIENT))
    report: dict[str, Any] = json.loads(examination.to_json())
    return report


# --- on the demo pair


def test_the_demo_pair_passes(report):
    found = report["self_test"]
    compared = found["comparisons"]
    assert report["ok"] and report["problem"] is None
    assert {each["decoder"] for each in compared} == {SPOILED, OWN, ADAPTIVE, BATCHED}
    assert {each["seeded"] for each in compared} == {False, True}
    assert not any(each["divergence"] or each["error"] for each in compared)
    assert all(each["tokens"] > 0 and each["drift"] is not None for each in compared)
    assert all(each["accepted"] < each["drafted"] for each in compared if each["decoder"] == SPOILED)
    assert found["window"] == 64 and found["past_window"] and found["left_out"] == 0


@pytest.mark.parametrize(("variant", "drafter"), [("e2b", "assistant"), ("qwen", "mtp")])
def test_a_picture_is_read_the_same_with_drafts(variant, drafter):
    found = self_test(pair_of(variant, drafter), None, PATIENT, StageProgress(io.StringIO()))
    seen = [each for each in found.comparisons if each.prompt.startswith("a drawing")]
    assert {each.decoder for each in seen} == {SPOILED, OWN, ADAPTIVE, BATCHED}
    assert found.passed and found.picture == 64
    lines = certificate({}, found, [], NOW)
    assert "picture      a drawing of 64 rows was read by the vision tower" in lines


def test_its_certificate_can_be_shown_to_others(report):
    lines = report["certificate"].splitlines()
    assert lines[0] == lines[2] == lines[-1] == "-" * WIDTH and max(map(len, lines)) <= WIDTH
    text = " ".join(report["certificate"].split())
    count = len(report["self_test"]["comparisons"])
    for expected in (
        f"verdict lossless: {count} of {count} answers equal",
        "target demo, gemma4",
        "bfloat16",
        "window 64 tokens, crossed",
        f"mlx-spec {mlx_spec.__version__}, mlx {version('mlx')}",
        "acceptance ",
    ):
        assert expected in text
    for secret in (socket.gethostname(), str(Path.home()) + "/", str(demo.TARGET), os.getcwd()):
        assert secret not in json.dumps(report)


def test_the_command(one_layer, capsys):
    assert main(["--quick", "--target", str(one_layer[0]), "--drafter", "lookup"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("ok     machine ") and "lossless: " in out and str(one_layer[0].parent) not in out


def test_a_cache_that_keeps_a_rejected_row_is_reported(monkeypatch, tiny):
    commit = Caches.commit

    def keep_more(self: Caches, keep: list[int]) -> None:
        commit(self, [min(keep[0] + 1, self.uncommitted)] if len(keep) == 1 else keep)

    monkeypatch.setattr(Caches, "commit", keep_more)
    broken = self_test(tiny, None, PATIENT, StageProgress(io.StringIO()))
    parted = [each.divergence for each in broken.wrong if each.divergence is not None]
    assert parted[0].found != parted[0].expected and parted[0].gap.roundings > broken.allowed
    text = shown(broken)
    assert "verdict FAILED" in text and "difference spoiled drafts, greedy" in text
    assert f"token {parted[0].position} is" in text and "roundings of float32" in text


def test_a_window_that_keeps_a_rejected_row_is_found(monkeypatch, tiny):
    commit = Caches.commit

    def keep_a_row(self: Caches, keep: list[int]) -> None:
        dropped = keep[0] < self.uncommitted
        commit(self, keep)
        for window, columns in self._columns.items():
            if dropped and window is not None:
                columns.first = [columns.first[0] - 1]

    monkeypatch.setattr(Caches, "commit", keep_a_row)
    broken = self_test(tiny, None, PATIENT, StageProgress(io.StringIO()))
    assert not broken.passed and SPOILED in {each.decoder for each in broken.wrong}


def test_what_breaks_off_an_answer_is_reported(monkeypatch, pair):
    def commit(self, keep: list[int]) -> None:
        raise IndexError("no such row in /home/somebody/cache.bin")

    monkeypatch.setattr(Caches, "commit", commit)
    broken = self_test(pair, None, PATIENT, StageProgress(io.StringIO()))
    assert not broken.passed
    assert {each.error for each in broken.wrong} == {"IndexError: no such row in (a file)"}


# --- near-ties


def test_what_is_a_near_tie_follows_what_was_measured():
    assert SelfTest().allowed == SelfTest(noise=gap(0.0)).allowed == 1.0
    assert SelfTest(noise=gap(0.125)).allowed == 4.0
    assert SelfTest(noise=gap(2.0)).allowed == 8.0  # and no more
    assert gap(0.5).within(4.0) and not gap(0.625).within(4.0)
    assert not gap(1.125).within(100.0)
    assert not gap(float("nan")).within(8.0) and not gap(float("inf")).within(8.0)


def test_blocks_that_give_other_logits_fail():
    worse = replace(GOOD, noise=gap(1.25))
    assert worse.blocks_differ and not worse.passed
    assert not replace(GOOD, noise=gap(1.0)).blocks_differ
    nothing = replace(GOOD, comparisons=[])
    assert not nothing.passed and "NOT TESTED" in shown(nothing)


# --- what can be seen without a model


def test_float32_that_is_rounded_is_noted(monkeypatch):
    mac.imitate_metal(monkeypatch, mac.MACS[16], mx)
    checks = []
    for wanted in ("0", "1"):
        monkeypatch.setenv("MLX_ENABLE_TF32", wanted)
        checks.append(next(check for check in all_checks() if check.name == "backend"))
    assert [check.state for check in checks] == ["ok", "note"]
    assert "on the GPU, by Metal; MLX_ENABLE_TF32 is set" in checks[1].text


def test_without_mlx_the_rest_is_checked(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))  # not the models of the user
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setitem(sys.modules, "mlx.core", None)
    assert main([]) == 1
    out, err = capsys.readouterr()
    assert "wrong  backend     no MLX backend" in out and "disk" in out
    assert [line.split(None, 2)[2] for line in out.splitlines() if line.split()[1] == "models"] == [
        "demo (bundled)"
    ]
    assert err == "mlx-spec: without MLX nothing can be tested\n"


def test_a_target_that_is_not_there(capsys, tmp_path):
    assert main(["--target", str(tmp_path / "nowhere"), "--json"]) == 1
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert report["certificate"] is None and report["problem"] in err
    assert err.count("\n") == 1


# --- the certificate

PARTS = {"target": part_in_words(str(demo.TARGET), None), "drafter": part_in_words("owner/name", None)}


def shown(found: SelfTest, *made: Check) -> str:
    lines = certificate(PARTS, found, list(made), NOW)
    assert lines[0] == lines[2] == lines[-1] == "-" * WIDTH and max(map(len, lines)) <= WIDTH
    assert not Examination(list(made), PARTS, found).is_fine
    return " ".join("\n".join(lines).split())


def test_certificate_of_a_difference_hides_places():
    far = replace(EQUAL, divergence=Divergence(7, " the", " a", gap(0.5)))
    off = replace(EQUAL, drift=gap(0.5), seeded=True)
    some = replace(GOOD, comparisons=[EQUAL, far, off], noise=gap(0.0625))
    assert not some.passed and some.wrong == [far, off]
    text = shown(some, Check("disk", "ok", "much"), Check("backend", "wrong", "two of them"))
    assert "verdict FAILED: 2 of 3 answers" in text and "wrong backend: two of them" in text
    assert "difference K = 4, seeded, prompt 'Why?': 24 equal tokens, but after them logits 0.5 apart" in text
    assert "target target " in text and "drafter owner/name" in text and str(demo.TARGET) not in text
