"""Drafts that are accepted with a given probability, and an optimized BLAS in front of MLX's.

MLX's CPU backend multiplies float32 matrices with cblas_sgemm. The BLAS that comes with MLX for Linux is
plain: a pass over M rows costs M passes. An optimized one reads the weights once for a few rows, as GPUs do.
`--blas FILE` starts the script again with that library in front, such as libopenblas.so.0 of Debian's
libopenblas0-pthread; `--coretype` is for an OpenBLAS that does not recognise the processor.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
from arms import Prompt

from mlx_spec.types import Draft, Features, FeatureSpec, Sampler


@dataclass(frozen=True)
class Script(Prompt):
    """A prompt, its true continuation, and the positions at which the draft is accepted."""

    truth: tuple[int, ...] = ()
    right: tuple[bool, ...] = ()


class Scripted:
    """Drafts the truth at the script's accepted positions, another token at the others."""

    needs = FeatureSpec()

    def __init__(self, script: Script, vocab: int) -> None:
        lines = zip(script.truth, script.right, strict=True)
        self._tokens = [*script.tokens, *(token if right else (token + 1) % vocab for token, right in lines)]

    def observe(self, history: Sequence[int], features: Features) -> None:
        pass

    def draft(self, history: Sequence[int], limit: int, sampler: Sampler) -> Draft:
        return Draft(mx.array(self._tokens[len(history) : len(history) + limit], dtype=mx.int32))


def blas_options(options: argparse.ArgumentParser) -> None:
    """Add the options that choose a BLAS."""
    options.add_argument("--blas", type=Path, help="a shared library with cblas_sgemm; without it: MLX's own")
    options.add_argument("--coretype", help="kernels of OpenBLAS, such as SKYLAKEX, ZEN or HASWELL")
    options.add_argument("--threads", type=int, default=os.cpu_count(), help="of OpenBLAS")


def use_blas(settings: argparse.Namespace) -> None:
    """Restart with the library of `--blas` preloaded, if it is not: it must be there before MLX is loaded."""
    if not settings.blas or os.environ.get("LD_PRELOAD") == str(settings.blas):
        return
    if not settings.blas.is_file():
        sys.exit(f"--blas: there is no file {settings.blas}")
    named = {"OPENBLAS_CORETYPE": settings.coretype} if settings.coretype else {}
    wanted = {"LD_PRELOAD": str(settings.blas), "OPENBLAS_NUM_THREADS": str(settings.threads), **named}
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **wanted})
