"""Lossless speculative decoding on MLX.

    import mlx_spec

    pair = mlx_spec.load("demo")
    for piece in pair.session().stream("What does os.path.join do?", max_tokens=200):
        print(piece.text, end="")

Importing this is quick and needs no MLX; loading a pair does.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from mlx_spec.device.lean import install
from mlx_spec.errors import (
    BadCheckpoint,
    InvalidValue,
    Mismatch,
    NotFound,
    NotRewindable,
    NoVision,
    PromptTooLong,
    SpecError,
)
from mlx_spec.load import load

if TYPE_CHECKING:
    from mlx_spec.decode.statistics import Statistics
    from mlx_spec.pair import Pair
    from mlx_spec.prompt import Prompt
    from mlx_spec.sampling import Sampling
    from mlx_spec.session import Piece, Session
    from mlx_spec.types import Reason, Round

__version__ = "0.1.0"

install()  # before anything imports mlx-lm

# MLX reads this once, before its first product. Without it an M5 and NVIDIA's GPUs round float32 to 10 bits
# in products of several rows, and not in those of one row, so that a verified text could differ.
os.environ.setdefault("MLX_ENABLE_TF32", "0")

__all__ = [
    "BadCheckpoint",
    "InvalidValue",
    "Mismatch",
    "NoVision",
    "NotFound",
    "NotRewindable",
    "Pair",
    "Piece",
    "Prompt",
    "PromptTooLong",
    "Reason",
    "Round",
    "Sampling",
    "Session",
    "SpecError",
    "Statistics",
    "__version__",
    "load",
]

# Names whose modules need MLX. They are imported when they are first used.
_HOMES = {
    "Pair": "pair",
    "Piece": "session",
    "Prompt": "prompt",
    "Reason": "types",
    "Round": "types",
    "Sampling": "sampling",
    "Session": "session",
    "Statistics": "session",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
