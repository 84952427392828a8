"""The machine: its MLX backend, its name and its memory. Importing this needs no MLX."""

from __future__ import annotations

import json
import os
import platform
import resource
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from mlx_spec.device.blas import use_blas
from mlx_spec.device.memory import (
    Stay,
    bound_freed_buffers,
    memory_for_models,
    most_resident,
    most_scores,
    resident,
)
from mlx_spec.errors import InvalidValue, SpecError

__all__ = [
    "NoBackend",
    "Stay",
    "bound_freed_buffers",
    "device_name",
    "install_command",
    "keep_attention_order",
    "memory_for_models",
    "most_resident",
    "most_scores",
    "require_backend",
    "resident",
    "use_blas",
    "use_device",
]


class NoBackend(SpecError, ImportError):
    """MLX is not installed, or was installed without a backend for this machine."""


def require_backend() -> None:
    """Import MLX and give it the best BLAS. Raises NoBackend, which names what to install or to change."""
    try:
        import mlx.core  # noqa: F401
    except ImportError as error:
        if platform.system() == "Darwin":
            system = platform.mac_ver()[0]
            is_old = system.partition(".")[0] in ("11", "12", "13")
            way = "pip install mlx, with a native Python on Apple silicon"
            way = f"MLX needs macOS 14 or later, and this is macOS {system}: update it" if is_old else way
        else:
            way = f"{install_command('cpu')}; with an NVIDIA GPU take cuda13 or cuda12 instead of cpu"
        raise NoBackend(f"no MLX backend ({' '.join(str(error).split())}): {way}") from error
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (2048, 4096))  # as mlx-lm does when it is imported
    except ValueError as error:
        allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        raise NoBackend(
            f"{allowed} open files are allowed here, and mlx-lm takes 4096: raise the hard limit, which "
            "`ulimit -Hn` shows"
        ) from error
    use_blas()
    use_device()


@cache
def use_device() -> None:
    """Compute on the device that MLX_SPEC_DEVICE names, "cpu" or "gpu"; without it MLX chooses.

    MLX has one default device for all threads of a process. So the first call decides, and children inherit
    the variable. Raises InvalidValue if this machine has no such device.
    """
    if not (name := os.environ.get("MLX_SPEC_DEVICE")):
        return
    import mlx.core as mx

    devices = {"cpu": mx.Device(mx.cpu), "gpu": mx.Device(mx.gpu)}
    if (device := devices.get(name)) is None:
        raise InvalidValue(f"MLX_SPEC_DEVICE={name}: the devices are cpu and gpu; without it MLX chooses")
    if not mx.is_available(device):
        raise InvalidValue(f"MLX_SPEC_DEVICE={name}: this MLX has no such device; without it MLX chooses")
    mx.set_default_device(device)


def keep_attention_order() -> None:
    """On a Mac, deal the keys of long texts to one number of partial sums, whatever the rows of a pass.

    MLX reads the variable at each call (mlx/backend/metal/scaled_dot_product_attention.cpp). It takes 128 for
    most rows and keys of a large GPU. That is at most the step of a window's view.
    """
    import mlx.core as mx

    if mx.metal.is_available():
        os.environ.setdefault("MLX_SDPA_BLOCKS", "128")


def install_command(extras: str) -> str:
    """Return the command that installs this package with `extras`, by the installer that made this Python."""
    try:
        record = json.loads(distribution("mlx-spec").read_text("direct_url.json") or "{}")
    except PackageNotFoundError:  # run from a folder
        record = {}
    url, system = record.get("url", ""), record.get("vcs_info", {}).get("vcs")
    source = f"mlx-spec[{extras}]" + (f" @ {system}+{url}" if system else f" @ {url}" if url else "")
    folders = Path(sys.prefix).parts
    if "uv" in folders and "tools" in folders:
        return f"uv tool install --managed-python '{source}'"
    return f"pipx install --force '{source}'" if "pipx" in folders else f"pip install '{source}'"


def device_name() -> str:
    """Return the name that MLX gives the default device, such as "Apple M4 Pro".

    On a Mac the CPU has the name of the GPU, but other costs and roundings.
    """
    import mlx.core as mx

    is_second = mx.default_device().type == mx.cpu and mx.is_available(mx.Device(mx.gpu))
    return str(mx.device_info()["device_name"]) + (" (CPU)" if is_second else "")
