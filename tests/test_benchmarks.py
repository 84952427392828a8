"""The benchmarks run: each once at its smallest, and its last line is the record that `results/` keeps."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PAIR = ROOT / "tests" / "golden" / "e2b-trained"
TARGET = str(PAIR / "target")
FOLDERS = ["--target", TARGET, "--drafter", str(PAIR / "assistant"), "--dtype", "float32"]
ONE_KIND = ["--draft-model", TARGET, "--kinds", "prose"]
CASES = {
    "rollback": ([], {"rollback", "ratios", "bytes", "rounds"}),
    "decode": ([*FOLDERS, *ONE_KIND], {"arms", "kinds", "null", "mlx-lm tokens/s", "prompts"}),
    "acceptance": (FOLDERS, {"T=1", "parameters"}),
    "round_costs": (["--random", "tiny"], {"bandwidth, GB/s", "contexts"}),
    "blas": ([], {"arms", "kinds", "best", "verify", "megabytes"}),
    "families": (["--families", "medusa"], {"medusa"}),
    "traces": (FOLDERS[:4], {"acceptance", "curves", "confidence pays on"}),
    "batch": (FOLDERS, {"2"}),
    "ahead": (["--target", ""], {"gains", "floors", "hits"}),
}
STARTED = (
    "structured",
    "demo_answers",
    "server_checks",
    "server_load",
    "server_overhead",
    "pictures",
    "restart",
    "smollm2",
    "unchanged",
)  # slower, or in need of more


def python(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(ROOT / "benchmarks" / f"{script}.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path})


def run(script: str, arguments: list[str]) -> dict[str, Any]:
    done = python(script, "--quick", *arguments)
    assert done.returncode == 0, done.stderr[-2000:]
    record: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return record


@pytest.mark.parametrize("script", CASES)
def test_benchmark_runs(script: str) -> None:
    arguments, keys = CASES[script]
    record = run(script, arguments)
    results = record["results"]
    assert record["benchmark"] == script
    assert keys <= results.keys()
    assert {"device", "os", "versions", "commit", "load_average", "settings"} <= record.keys()
    assert {"mlx", "mlx-lm", "mlx-vlm"} <= record["versions"].keys()
    if script == "rollback":
        assert results["bytes"] == 0
    if script == "decode":
        check_decode(results)
    if script == "round_costs":
        assert [len(found["verify"]) for found in results["contexts"].values()] == [3, 3]
    if script == "blas":
        check_blas(results)
    if script == "traces":
        check_traces(results)
    if script == "families":
        assert all(arm["differ"] == 0 for found in results.values() for arm in found["arms"].values())


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


def check_blas(results: dict[str, Any]) -> None:
    arms = results["arms"]
    assert [arms[f"K={k}"]["differ"] for k in (1, 4, 8)] == [0, 0, 0]
    assert arms["K=1"]["tokens a step"] < arms["K=4"]["tokens a step"]
    assert results["verify"]["1"] == 1


def test_benchmarks_start(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setattr(sys, "argv", ["", "--help"])
    for script in STARTED:
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(ROOT / "benchmarks" / f"{script}.py"), run_name="__main__")
        assert end.value.code == 0 and f"usage: {script}.py" in capsys.readouterr().out


def test_policy_lists_its_sources() -> None:
    """Its cells are checked by tests/policy/test_adaptive.py."""
    done = python("policy", "--list")
    assert done.returncode == 0 and "M3 Max" in done.stdout, done.stderr[-2000:]


def test_our_own_results_are_current() -> None:
    done = python("report", "--check")
    assert done.returncode == 0, done.stderr
