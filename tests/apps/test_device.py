"""The device of a process: each process decides once, so each case is a process."""

from __future__ import annotations

import os
import subprocess
import sys

import mlx.core as mx
from support.waiting import LIMIT

CODE = """
import os, sys
import mlx_spec
from mlx_spec.device import require_backend

try:
    require_backend()
except mlx_spec.SpecError as error:
    sys.exit(f"refused: {error}")
import mlx.core as mx
print(os.environ["MLX_ENABLE_TF32"], str(mx.default_device().type).rpartition(".")[2])
"""


def run(**variables: str) -> str:
    """Return what a new process says of its device, whatever this process was told."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MLX")}
    command = [sys.executable, "-c", CODE]
    done = subprocess.run(command, env=clean | variables, capture_output=True, text=True, timeout=LIMIT)
    return (done.stdout + done.stderr).strip()


def test_float32_is_not_rounded_to_tf32_unless_the_user_wants_it():
    assert [run(), run(MLX_ENABLE_TF32="1")] == [f"{wanted} {_chosen_by_mlx()}" for wanted in (0, 1)]


def _chosen_by_mlx() -> str:
    return "gpu" if mx.is_available(mx.Device(mx.gpu)) else "cpu"


def test_the_device_can_be_chosen():
    assert run(MLX_SPEC_DEVICE="cpu") == "0 cpu"
    has_gpu = mx.is_available(mx.Device(mx.gpu))
    missing = "refused: MLX_SPEC_DEVICE=gpu: this MLX has no such device; without it MLX chooses"
    assert run(MLX_SPEC_DEVICE="gpu") == ("0 gpu" if has_gpu else missing)
    assert run(MLX_SPEC_DEVICE="tpu").startswith("refused: MLX_SPEC_DEVICE=tpu: the devices are cpu and gpu")
