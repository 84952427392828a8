"""The BLAS that MLX calls: each process decides once, so each case is a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.waiting import LIMIT

CODE = """
import json, sys
import numpy as np
from mlx_spec.device.blas import blas_hint, gflops, use_blas
from mlx_spec.cli.command import PairOptions, parse

assert "mlx" not in sys.modules
options = parse(PairOptions, "chat", sys.argv[1:])
blas, hint = use_blas(), blas_hint()
import mlx.core as mx

mx.set_default_device(mx.cpu)
left, right = (np.random.default_rng(n).normal(size=(96, 96)).astype(np.float32) for n in range(2))
found = np.array(mx.array(left) @ mx.array(right).T)
error = float(np.abs(found - left @ right.T).max())
print(json.dumps([blas and blas.name, blas and blas.is_reference, hint, error, gflops(8, 8, 8)]))
"""


def run(*options: str, path: Path | None = None) -> tuple[str | None, bool | None, str | None]:
    """Return the library that MLX calls in a new process, whether it is the reference, and the hint."""
    variables = os.environ | ({} if path is None else {"PYTHONPATH": str(path)})
    command = [sys.executable, "-c", CODE, *options]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    name, is_reference, hint, error, speed = json.loads(done.stdout)
    assert error < 1e-4 and speed > 0
    return name, is_reference, hint


def test_mlx_calls_the_wheel_of_openblas():
    name, is_reference, hint = run()
    if sys.platform == "linux" and find_spec("scipy_openblas32"):
        assert (name, is_reference, hint) == ("libscipy_openblas.so", False, None)
    else:
        assert (hint is None) == (not is_reference)


@pytest.mark.parametrize("option", ["", "--mlx-blas"])
def test_without_another_library_mlx_keeps_its_own(option, tmp_path):
    """A wheel without its library is not taken; who wants MLX's own is not told to install another one."""
    (tmp_path / "scipy_openblas32").mkdir()
    (tmp_path / "scipy_openblas32" / "__init__.py").touch()
    name, is_reference, hint = run(*option.split(), path=tmp_path)
    assert name != "libscipy_openblas.so"
    assert (hint is not None) == bool(is_reference and not option)
    assert hint is None or "pip install scipy-openblas32" in hint
