"""The memory of this machine: what models may take, freed buffers, and what stays resident on a Mac.

On a Mac the GPU shares the memory of the system. MLX wires buffers up to a limit: the system can neither move
nor compress them, freed ones included (mlx/backend/metal/resident.cpp). A limit that stays at the whole
recommended set takes that memory from all other programs. Under pressure the system may panic
(ml-explore/mlx#3186). So the limit follows what is in use, and ends with it, as in mlx-lm.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from threading import Lock


def memory_for_models() -> int:
    """Return the bytes that this machine has for weights, caches and the chunk of a prompt."""
    # Metal's GPU has this, whatever the default device is, and its memory is also the CPU's.
    if (recommended := _recommended()) is not None:
        return recommended - max(384 * 2**20, recommended // 20)  # for freed buffers and Python
    # Without Metal they get three quarters of the memory; the rest is for other programs.
    return int(0.75 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def most_scores() -> int:
    """Return the bytes that the scores of attention in one pass may take: a twentieth of the memory."""
    return memory_for_models() // 20


def most_resident() -> int:
    """Return the most bytes that this process has had in memory."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most << 10  # kilobytes on Linux


def bound_freed_buffers(weights: int) -> None:
    """Bound the buffers that MLX keeps for reuse, before a model with these bytes of weights is loaded.

    By itself MLX frees them once 95 % of the recommended set are in use. The bound is a tenth of what weights
    leave: the arrays of a layer are smaller, and the next layer reuses them.
    """
    import mlx.core as mx

    free = memory_for_models() - mx.get_active_memory() - weights
    mx.set_cache_limit(max(2**29, free // 10))


class _Residency:
    """The wired limit of this process, and how many uses of models it is for."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._uses = 0
        self._limit = 0

    @contextmanager
    def __call__(self, weights: int = 0) -> Iterator[None]:
        """Keep models resident within the context, where they compute. Contexts may overlap.

        `weights` are bytes that will be in use and may not be yet. At the end of the last context the device
        is waited for, and freed buffers go back, too.
        """
        with self._lock:
            self._uses += 1
        try:
            self.grow(weights)
            yield
        finally:
            with self._lock:
                self._uses -= 1
                if not self._uses:
                    self._release()

    def grow(self, least: int = 0) -> None:
        """Let the limit cover what is in use and the next chunk of a prompt, at most `memory_for_models`.

        Call it between two passes as caches grow. It does nothing outside of a context.
        """
        import mlx.core as mx

        if not self._uses or not mx.metal.is_available():
            return
        needed = max(mx.get_active_memory(), least) + most_scores() + 2**28  # and other arrays of a pass
        if needed > self._limit:
            with self._lock:
                self._set(min(needed + 2**29, memory_for_models()))  # so that it is raised rarely

    def _release(self) -> None:
        if sys.is_finalizing():  # a generator that the program has left open: no module can be imported
            return
        import mlx.core as mx

        if self._limit:
            self._set(0)
        mx.clear_cache()

    def _set(self, limit: int) -> None:
        import mlx.core as mx

        if limit != self._limit:
            mx.synchronize()  # the limit must not change during an evaluation (mlx_lm/generate.py)
            mx.set_wired_limit(limit)
            self._limit = limit


resident = _Residency()


class Stay:
    """Keeps models resident from `hold` to `release`. Each may be called again."""

    def __init__(self) -> None:
        self._context = ExitStack()
        self._has_begun = False

    def hold(self) -> None:
        if not self._has_begun:
            self._context.enter_context(resident())
            self._has_begun = True

    def release(self) -> None:
        self._context.close()
        self._has_begun = False


def _recommended() -> int | None:
    """Return the bytes of Metal's recommended working set; None without Metal."""
    import mlx.core as mx

    most_bytes = mx.device_info(mx.gpu).get("max_recommended_working_set_size")
    return None if most_bytes is None else int(most_bytes)
