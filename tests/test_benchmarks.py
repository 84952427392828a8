"""The benchmarks run: each once at its smallest, and its last line is the record that `results/` keeps."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PAIR = ROOT / "tests" / "golden" / "e2b-trained"
TARGET = str(PAIR / "target")
FOLDERS = ["--target", TARGET, "--drafter", str(PAIR / "assistant"), "--dtype", "float32"]
ONE_KIND = ["--draft-model", TARGET, "--kinds", "prose"]
CASES = {
    "decode": ([*FOLDERS, *ONE_KIND], {"arms", "kinds", "null", "mlx-lm tokens/s", "prompts"}),
    "traces": (FOLDERS[:4], {"acceptance", "curves", "confidence pays on"}),
    "batch": (FOLDERS, {"2"}),
    "templates": ([TARGET], {"templates", "conversations", "all"}),
    "real_vocabularies": ([str(PAIR / "target")], {"right", "wrong", "refused", "each"}),
    "ahead": (["--target", ""], {"gains", "floors", "hits"}),
}
STARTED = (  # slower, or in need of more
    "exact exact_cost gguf_files architectures server_checks server_load pictures restart "
    "reread reuse "
    "large_vocabulary newcomer sampling saved_checkpoints smollm2 unchanged growth host attack fuzz "
    "gains race_picture"
).split()

Run = Callable[..., str]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a script in this process. Return what it prints."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))

    def run(script: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        try:
            runpy.run_path(str(ROOT / "benchmarks" / f"{script}.py"), run_name="__main__")
        except SystemExit as end:
            assert not end.code
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize("script", CASES)
def test_benchmark_runs(script: str, run: Run) -> None:
    arguments, keys = CASES[script]
    record = json.loads(run(script, "--quick", *arguments).splitlines()[-1])
    results = record["results"]
    assert record["benchmark"] == script
    assert keys <= results.keys()
    assert {"device", "os", "versions", "commit", "load_average", "settings"} <= record.keys()
    assert {"mlx", "mlx-lm", "mlx-vlm"} <= record["versions"].keys()
    if script == "decode":
        check_decode(results)
    if script == "traces":
        check_traces(results)


def check_decode(results: dict[str, Any]) -> None:
    arms, kinds = results["arms"], results["kinds"]
    assert set(kinds) == {"prose"}
    for name in ("plain", "K=2", "adaptive", "lookup", "random drafter, adaptive", "draft model, K=2"):
        assert arms[name]["differ"] == 0
    assert arms["plain"]["steps without a draft"] == 1
    assert arms["K=2"]["drafted a step"] > 1
    # The draft model is the target itself: but for the last, shorter one, every round brings K + 1 tokens.
    assert arms["draft model, K=2"]["tokens a step"] > 2.5
    assert len(results["prompts"]) == 1


def check_traces(results: dict[str, Any]) -> None:
    """Drafting pays where a pass of many rows costs what one costs, and nowhere if each row costs a pass."""
    arms = results["curves"]
    assert arms["flat"]["K=4"]["all"] > 1 > arms["CUDA linear"]["K=4"]["all"]
    assert all("gemma4_assistant" in name for name in results["acceptance"] if "lookup" not in name)


@pytest.mark.parametrize("script", STARTED)
def test_benchmarks_start(script: str, run: Run) -> None:
    assert f"usage: {script}" in run(script, "--help")


def test_policy_lists_its_sources(run: Run) -> None:
    """Its cells are checked by tests/policy/test_adaptive.py."""
    assert "M3 Max" in run("policy", "--list")


def test_our_own_results_are_current(run: Run) -> None:
    run("report", "--check")
