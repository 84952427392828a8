"""The doctor finds nothing on the demo pair, and finds caches that are rolled back wrongly."""

from __future__ import annotations

import io
import json
import os
import socket
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import mlx_spec
from mlx_spec import demo
from mlx_spec.apps.bench import chat_questions
from mlx_spec.apps.doctor import WIDTH, Check, all_checks, certificate, main, part_in_words, version
from mlx_spec.apps.selftest import (
    ADAPTIVE,
    OWN,
    QUICK,
    SPOILED,
    Comparison,
    Divergence,
    Gap,
    SelfTest,
    allowed_roundings,
    logits_gap,
    self_test,
    token_gap,
)
from mlx_spec.hub.progress import StageProgress
from mlx_spec.model.caches import FullCache, SlidingCache
from mlx_spec.pair import GREEDY, Pair
from mlx_spec.policy import saved_costs

PATIENT = replace(
    QUICK, seconds=600.0, questions=1, tokens=16
)  # a slow machine is no reason to leave something out
EQUAL = Comparison("Why?", OWN, False, 24, 20, 18)


def gap(logits: float) -> Gap:
    """Return a gap of bfloat16 logits between 16 and 32."""
    return Gap(logits, 0.125, "bfloat16", 8)


GOOD = SelfTest((EQUAL,), 0, None, False, None, None, None, None, 1.0)
NOW = datetime(2026, 11, 21, 16, 5, tzinfo=UTC)


@pytest.fixture(scope="module")
def pair() -> Pair:
    return mlx_spec.load("demo")


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """Return the report of `mlx-spec doctor --quick --json` on the demo pair."""
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out):
        patch.setattr("mlx_spec.apps.selftest.QUICK", PATIENT)
        assert main(["--quick", "--json"]) == 0
    found: dict[str, Any] = json.loads(out.getvalue())
    return found


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_spec.apps.selftest.QUICK", PATIENT)


# --- on the demo pair


def test_the_demo_pair_passes(report):
    found = report["self_test"]
    compared = found["comparisons"]
    assert report["ok"] and report["problem"] is None
    assert {each["decoder"] for each in compared} == {SPOILED, OWN, ADAPTIVE}
    assert {each["seeded"] for each in compared} == {False, True}
    assert not any(each["divergence"] or each["error"] for each in compared)
    assert all(each["tokens"] > 0 and each["drift"] is not None for each in compared)
    assert all(each["accepted"] < each["drafted"] for each in compared if each["decoder"] == SPOILED)
    assert found["window"] == 64 and found["past_window"] and found["left_out"] == 0
    assert found["accepted"]["accepted"] > 0
    assert found["plain"]["tokens_per_second"] > 0 and found["gain"]["gain"] > 0


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
        "first draft tokens",
        "times plain",
    ):
        assert expected in text
    for secret in (socket.gethostname(), str(Path.home()) + "/", str(demo.TARGET), os.getcwd()):
        assert secret not in json.dumps(report)


def keep_a_rejected_row(self: FullCache | SlidingCache, size: int) -> None:
    """Rewind wrongly."""
    self.offset = min(self.offset, size + 1)


def test_a_cache_that_keeps_a_rejected_row_is_reported(patient, monkeypatch, capsys):
    monkeypatch.setattr(FullCache, "rewind", keep_a_rejected_row)
    assert main(["--quick", "--drafter", "none"]) == 1
    out, err = capsys.readouterr()
    assert out.startswith("ok     machine ") and "Traceback" not in err
    block = out[out.index("\n---") + 1 :].splitlines()
    assert block[0] == block[2] == block[-1] == "-" * WIDTH
    text = " ".join(" ".join(block).split())
    assert "verdict FAILED" in text and "difference spoiled drafts, greedy" in text
    assert "roundings of bfloat16" in text and "times plain" not in text


def test_a_window_that_keeps_a_rejected_row_is_found(monkeypatch, pair):
    monkeypatch.setattr(SlidingCache, "rewind", keep_a_rejected_row)
    broken = self_test(pair, None, PATIENT, StageProgress(io.StringIO()))
    assert not broken.passed and SPOILED in {each.decoder for each in broken.wrong}


def test_a_cache_that_keeps_all_rejected_rows_gives_other_tokens(monkeypatch, pair):
    monkeypatch.setattr(FullCache, "rewind", lambda self, size: None)
    monkeypatch.setattr(SlidingCache, "rewind", lambda self, size: None)
    broken = self_test(pair, None, PATIENT, StageProgress(io.StringIO()))
    assert not broken.passed and broken.plain is None
    parted = [each for each in broken.wrong if each.divergence is not None]
    assert parted
    divergence = parted[0].divergence
    assert divergence is not None and divergence.found != divergence.expected
    assert divergence.gap.roundings > broken.allowed
    text = "\n".join(certificate(PARTS, broken, [], NOW))
    assert f"token {divergence.position} is" in " ".join(text.split())


def test_what_breaks_off_an_answer_is_reported(monkeypatch, pair):
    def rewind(self, size: int) -> None:
        raise IndexError("no such row in /home/somebody/cache.bin")

    monkeypatch.setattr(FullCache, "rewind", rewind)
    broken = self_test(pair, None, PATIENT, StageProgress(io.StringIO()))
    assert not broken.passed
    assert {each.error for each in broken.wrong} == {"IndexError: no such row in (a file)"}


def test_without_a_drafter_the_caches_are_tested_all_the_same():
    alone = mlx_spec.load("demo", "none")
    found = self_test(alone, None, PATIENT, StageProgress(io.StringIO()))
    assert found.passed and {each.decoder for each in found.comparisons} == {SPOILED}
    assert found.accepted is None and found.gain is None and found.plain is not None


# --- near-ties


def test_roundings_are_those_of_the_type():
    a = mx.array([22.0, 1.0])
    for dtype, step in ((mx.bfloat16, 2.0**-3), (mx.float16, 2.0**-6), (mx.float32, 2.0**-19)):
        found = logits_gap(a.astype(dtype), (a + mx.array([0.0, 0.5])).astype(dtype))
        assert found.logits == 0.5 and found.rounding == step
        assert found.roundings == 0.5 / step
    assert logits_gap(mx.array([0.25, 0.0]), mx.array([0.25, 0.0])).rounding == 2.0**-23


def test_what_is_a_near_tie_follows_what_was_measured():
    assert allowed_roundings(None) == allowed_roundings(gap(0.0)) == 1.0
    assert allowed_roundings(gap(0.125)) == 4.0
    assert allowed_roundings(gap(2.0)) == 8.0  # and no more
    assert gap(0.5).within(4.0) and not gap(0.625).within(4.0)
    assert not gap(1.125).within(100.0)
    assert not gap(float("nan")).within(8.0) and not gap(float("inf")).within(8.0)


def test_the_gap_is_that_of_the_logits(pair):
    prompt = list(chat_questions(pair.text)[0].tokens)
    (first, *_) = pair.run(pair.open(), prompt, max_tokens=1, top_logprobs=3)
    best, second = first.logprobs[0].top[:2]
    found = token_gap(pair, prompt, (best.token, second.token), GREEDY)
    assert found.logits == pytest.approx(best.logprob - second.logprob, abs=2 * found.rounding)
    assert found.dtype == "bfloat16"
    seeded = token_gap(pair, prompt, (best.token, second.token), mlx_spec.Sampling(temperature=0.8, seed=3))
    assert seeded.logits != found.logits and seeded.rounding == found.rounding


def test_blocks_that_give_other_logits_fail():
    worse = replace(GOOD, noise=gap(1.25))
    assert worse.blocks_differ and not worse.passed
    assert not replace(GOOD, noise=gap(1.0)).blocks_differ
    nothing = replace(GOOD, comparisons=())
    assert not nothing.passed and "NOT SUBJECT" in shown(nothing)


# --- scripted drafts


# --- what can be seen without a model


def test_without_mlx_the_rest_is_checked(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "mlx.core", None)
    assert main([]) == 1
    out, err = capsys.readouterr()
    assert "wrong  backend    no MLX backend" in out and "disk" in out and "models" in out
    assert err == "mlx-spec: without MLX nothing can be tested\n"


def test_a_target_that_is_not_there(capsys, tmp_path):
    assert main(["--target", str(tmp_path / "nowhere"), "--json"]) == 1
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert report["certificate"] is None and report["problem"] in err
    assert err.count("\n") == 1


def test_two_backends_are_one_too_many(monkeypatch, tmp_path):
    for name in ("mlx-cpu", "mlx-cuda-12"):
        folder = tmp_path / f"{name.replace('-', '_')}-0.32.4.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.32.4\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = {check.name: check for check in all_checks()}["backend"]
    assert found.state == "wrong" and "mlx-cpu and mlx-cuda-12" in found.text


def test_saved_costs_are_counted(monkeypatch, tmp_path):
    monkeypatch.setattr(saved_costs, "folder", lambda: tmp_path)
    (tmp_path / "a.json").write_text('{"key": {"device": "another", "mlx": "0.1"}}')
    (tmp_path / "b.json").write_text("{")
    costs = {check.name: check for check in all_checks()}["costs"]
    assert (
        costs.state == "note"
        and costs.text.startswith("2 saved, 0 of this device")
        and "1 damaged" in costs.text
    )


# --- the certificate

PARTS = {"target": part_in_words(str(demo.TARGET), None), "drafter": part_in_words("owner/name", None)}


def shown(found: SelfTest, *made: Check) -> str:
    lines = certificate(PARTS, found, list(made), NOW)
    assert all(len(line) <= WIDTH for line in lines)
    return " ".join("\n".join(lines).split())


def test_certificate_of_a_near_tie():
    near = replace(EQUAL, divergence=Divergence(7, " the", " a", gap(0.25)))
    some = replace(GOOD, comparisons=(EQUAL, near), noise=gap(0.0625))
    assert some.passed and some.near_ties == [near]
    text = shown(some)
    assert (
        "2026-11-21 16:05 UTC" in text
        and "verdict lossless: 2 of 2 answers equal, 1 up to a near-tie" in text
    )
    assert "near-tie K = 4, greedy, prompt 'Why?': token 7 is ' a' where plain decoding says ' the'" in text
    assert "logits 0.25 apart, 2 roundings of bfloat16" in text
    assert "0.5 roundings between correct caches; near-tie: logits at most 2 roundings apart" in text


def test_certificate_of_a_difference_hides_places():
    far = replace(EQUAL, divergence=Divergence(7, " the", " a", gap(0.5)))
    off = replace(EQUAL, drift=gap(0.5), seeded=True)
    some = replace(GOOD, comparisons=(EQUAL, far, off), noise=gap(0.0625))
    assert not some.passed and some.wrong == [far, off]
    text = shown(some, Check("disk", "ok", "much"), Check("backend", "wrong", "two of them"))
    assert "verdict FAILED: 2 of 3 answers" in text and "wrong backend: two of them" in text
    assert "difference K = 4, seeded, prompt 'Why?': 24 equal tokens, but after them logits 0.5 apart" in text
    assert "target target " in text and "drafter owner/name" in text and str(demo.TARGET) not in text
