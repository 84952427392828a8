"""The check that MLX can run here at all. Imports nothing that needs MLX."""

from __future__ import annotations

import platform

from mlx_spec.errors import SpecError


class NoBackend(SpecError, ImportError):
    """MLX is not installed, or was installed without a backend for this machine."""


def require_backend() -> None:
    """Import MLX. Raises NoBackend, which names what to install, when that fails."""
    try:
        import mlx.core  # noqa: F401
    except ImportError as error:
        raise NoBackend(f"no MLX backend ({_one_line(error)}): {_way_out(platform.system())}") from error


def _one_line(error: ImportError) -> str:
    return " ".join(str(error).split())


def _way_out(system: str) -> str:
    if system == "Darwin":
        return "pip install mlx, with a native Python on Apple silicon"
    return "pip install 'mlx-spec[cpu]', or with an NVIDIA GPU 'mlx-spec[cuda13]' or 'mlx-spec[cuda12]'"
