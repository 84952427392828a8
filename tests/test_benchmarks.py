"""The benchmarks run: each once at its smallest, and its last line is the record that `results/` keeps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PAIR = ROOT / "tests" / "golden" / "e2b-trained"
FOLDERS = ["--target", str(PAIR / "target"), "--drafter", str(PAIR / "assistant"), "--dtype", "float32"]
CASES = {
    "rollback": ([], {"rollback", "ratios", "bytes", "rounds"}),
    "decode": (FOLDERS, {"arms", "null", "mlx-lm tokens/s", "blocks"}),
    "acceptance": (FOLDERS, {"T=1", "parameters"}),
}


def run(script: str, arguments: list[str]) -> dict[str, Any]:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(ROOT / "benchmarks" / f"{script}.py"), "--quick", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stderr[-2000:]
    record: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return record


@pytest.mark.parametrize("script", CASES)
def test_benchmark_runs(script: str) -> None:
    arguments, keys = CASES[script]
    record = run(script, arguments)
    assert record["benchmark"] == script
    assert keys <= record["results"].keys()
    assert {"device", "os", "versions", "commit", "load_average", "settings"} <= record.keys()
    assert {"mlx", "mlx-lm", "mlx-vlm"} <= record["versions"].keys()
    if script == "rollback":
        assert record["results"]["bytes"] == 0
    if script == "decode":
        assert record["results"]["arms"]["plain"]["differ"] == 0
